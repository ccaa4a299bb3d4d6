"""The simulated node: every scenario does what it says, to the GPU it strikes and no other."""

import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from running import Running, wait_for
from simulated_node import BASE, SimulatedNode

from gpuwatch import pulse as page
from gpuwatch.alerts import AlertEngine
from gpuwatch.clock import SECOND_NS
from gpuwatch.rules import RULES
from gpuwatch.scenario import SCENARIOS, SICK
from gpuwatch.signals import HOST
from gpuwatch.summation import RingWindows
from gpuwatch.window import TICK_NS, Tick

POWER_BRAKE = 'gpu_throttle_active{reason="hw_power_brake"}'
HW_THERMAL = 'gpu_throttle_active{reason="hw_thermal_slowdown"}'
POWER_CAP = 'gpu_throttle_active{reason="sw_power_cap"}'
SM_CLOCK = 'gpu_clock_hertz{clock="sm"}'
CORE = 'gpu_temperature_celsius{sensor="core"}'


def severities(ticks, overrides=None):
    """Return the severities that fire, and the rules and entities they are of."""
    engine = AlertEngine(RULES, overrides or {}, None, "")
    fired = set()
    for tick in ticks:
        engine.judge(tick)
        fired |= {
            (alert.severity, alert.rule, alert.entity)
            for alert in engine.alerts()
            if alert.state == "firing"
        }
    return fired


@pytest.mark.parametrize("count", [1, 2, 16, 64])
def test_any_number_of_gpus(monkeypatch, count):
    """Each has an address of its own, a row of its own, and sensible values."""
    node = SimulatedNode(monkeypatch, gpus=count)
    ticks = node.ticks(2.0)

    assert len({gpu.id for gpu in node.gpus}) == count
    assert len(node.opened.groups) == count + 1
    for gpu in node.gpus:
        assert ticks[-1].window(gpu, "gpu_up").minimum == 1
        assert ticks[-1].window(gpu, SM_CLOCK).last == 1.98e9
        assert 50 < ticks[-1].window(gpu, CORE).mean < 100
        assert ticks[-1].window(gpu, "gpu_power_watts").missing == 0


def test_a_healthy_node_is_quiet(monkeypatch):
    """No scenario, no fault: no alert, no detection, no event, and the GPUs are busy."""
    node = SimulatedNode(monkeypatch)
    ticks = node.ticks(60)

    assert severities(ticks) == set()
    assert node.events == []
    assert node.source.findings.errors == {}
    busy = [tick.window(node.gpus[0], "gpu_utilization_ratio").mean for tick in ticks]
    assert min(busy) > 0.5


def test_power_capped_is_never_above_info(monkeypatch):
    """A training load at its power limit is information, on every GPU, and costs some clock."""
    node = SimulatedNode(monkeypatch, "power-capped", gpus=2, period_ms=20.0)
    ticks = node.ticks(700)

    assert severities(ticks) == {("info", "gpu_power_capped", gpu) for gpu in node.gpus}
    clocks = [tick.window(node.gpus[0], SM_CLOCK) for tick in ticks]
    assert 1.5e9 < min(window.minimum for window in clocks) < 1.8e9


@pytest.mark.parametrize(("count", "sick"), [(1, 0), (2, 1), (4, SICK), (16, SICK)])
def test_thermal_strikes_one_gpu_for_its_time(monkeypatch, count, sick):
    """From five seconds on to its end one GPU is hot and slow; its siblings go on."""
    node = SimulatedNode(monkeypatch, "thermal", gpus=count, fault_seconds=3.0)
    ticks = node.ticks(10)
    victim = node.gpus[sick]
    active = [tick.window(victim, HW_THERMAL).mean for tick in ticks]

    assert active == [0.0] * 20 + [1.0] * 12 + [0.0] * 8
    assert ticks[25].window(victim, SM_CLOCK).maximum < 1.3e9
    assert ticks[25].window(victim, CORE).minimum > ticks[5].window(victim, CORE).maximum + 20
    (event,) = node.events
    assert (event.name, event.entity) == ("scenario_fault", HOST)
    assert event.time_ns == BASE + 5 * SECOND_NS
    for gpu in set(node.gpus) - {victim}:
        assert all(tick.window(gpu, HW_THERMAL).maximum == 0 for tick in ticks)
        assert all(tick.window(gpu, SM_CLOCK).minimum == 1.98e9 for tick in ticks)


def test_a_thermal_fault_that_stays_becomes_critical(monkeypatch):
    """With the rules as they are a lasting fault fires on the GPU it struck, and only there."""
    node = SimulatedNode(monkeypatch, "thermal", period_ms=20.0)

    assert severities(node.ticks(30)) == {
        ("critical", "gpu_hw_thermal_slowdown", node.gpus[SICK]),
    }


def test_the_power_brake_halves_the_clock_of_one_gpu(monkeypatch):
    """The brake is on for the fault's time, on the GPU it strikes, and fires a warning there."""
    node = SimulatedNode(monkeypatch, "power-brake", period_ms=20.0)
    ticks = node.ticks(60)
    victim = node.gpus[SICK]
    active = [tick.window(victim, POWER_BRAKE).mean for tick in ticks]

    assert active == [0.0] * 20 + [1.0] * 220
    assert ticks[25].window(victim, SM_CLOCK).maximum <= 1.98e9 / 2
    assert {(rule, gpu) for _, rule, gpu in severities(ticks)} >= {("gpu_power_brake", victim)}
    assert {gpu for _, _, gpu in severities(ticks)} == {victim}
    for gpu in set(node.gpus) - {victim}:
        assert all(tick.window(gpu, POWER_BRAKE).maximum == 0 for tick in ticks)


def test_a_starved_node_waits_again_and_again(monkeypatch):
    """From the fault on all GPUs do nothing for one second in three, and then go on."""
    node = SimulatedNode(monkeypatch, "starved", gpus=2, period_ms=20.0)
    ticks = node.ticks(17)
    for gpu in node.gpus:
        idle = [tick.window(gpu, "gpu_utilization_ratio").minimum == 0 for tick in ticks]
        assert not any(idle[:20])
        waits = [tick for tick, (before, now) in enumerate(pairwise(idle)) if now > before]
        assert [later - earlier for earlier, later in pairwise(waits)] == [12, 12, 12]


@pytest.mark.parametrize("name", ["gpu-lost", "xid-79"])
def test_a_lost_gpu_is_down_and_nothing_else_is_known_of_it(monkeypatch, name):
    """gpu_up is 0, every other value is absent, not 0; the siblings are as before."""
    node = SimulatedNode(monkeypatch, name, gpus=4)
    ticks = node.ticks(40)
    lost, last = node.gpus[SICK], ticks[-1]

    assert last.window(lost, "gpu_up").maximum == 0
    for name, window in last.windows[lost].items():
        assert name.startswith(("gpu_up", "gpu_hung")) or window.covered_ns == 0, name
    assert all(tick.window(lost, "gpu_up").minimum == 1 for tick in ticks[:20])
    for gpu in set(node.gpus) - {lost}:
        assert all(tick.window(gpu, "gpu_up").minimum == 1 for tick in ticks)
    assert severities(ticks) == {("critical", "gpu_lost", lost)}


def test_a_hang_is_a_read_that_does_not_return(monkeypatch):
    """The read names the GPU in the pulse and comes back only when the fault is over."""
    node = SimulatedNode(monkeypatch, "gpu-hang", gpus=3, fault_seconds=10.0)
    node.now_ns = BASE + 6 * SECOND_NS
    reading = threading.Thread(target=node.opened.groups[0].read)
    reading.start()
    wait_for(lambda: node.pulse.reading() == node.gpus[2].id)
    time.sleep(0.1)
    assert reading.is_alive()
    node.now_ns = BASE + 16 * SECOND_NS
    reading.join(10)

    assert not reading.is_alive()
    assert node.pulse.words[page.READING] == page.NOT_READING


def test_a_gpu_that_hung_is_left_alone_by_the_next_child(monkeypatch):
    """Without the sick GPU all goes on: it is down, and the fault is not told again."""
    addresses = [gpu.id for gpu in SimulatedNode(monkeypatch, gpus=3).gpus]
    node = SimulatedNode(
        monkeypatch, "gpu-hang", gpus=3, ready_before=5.5, excluded=(addresses[2],)
    )
    ticks = node.ticks(3)

    assert ticks[-1].window(node.gpus[2], "gpu_up").maximum == 0
    assert ticks[-1].window(node.gpus[0], "gpu_up").minimum == 1
    assert node.events == []


def test_a_fault_is_told_once_over_all_children(monkeypatch):
    """A child that starts when the fault has long begun does not tell it again."""
    node = SimulatedNode(monkeypatch, "thermal", ready_before=60)
    ticks = node.ticks(3)

    assert node.events == []
    assert ticks[-1].window(node.gpus[SICK], HW_THERMAL).minimum == 1


@pytest.mark.parametrize("name", ["healthy", "power-capped", "thermal", "gpu-lost"])
def test_the_same_seed_gives_the_same_values(monkeypatch, name):
    """Values are a function of time and seed, not of how often they were looked at."""

    def values(**options):
        node = SimulatedNode(monkeypatch, name, fault_after=1.0, **options)
        return [rows for _, rows in node.rows(3)]

    one, two, other = values(), values(), values(seed=2)
    rarer = values(period_ms=20.0)
    for a, b in zip(one, two, strict=True):
        assert a.tobytes() == b.tobytes()
    assert not np.array_equal(one[1]["gauges"], other[1]["gauges"])
    fast, slow = (dict(zip(rows["time_ns"], rows["gauges"], strict=True)) for rows in
                  (one[1], rarer[1]))  # fmt: skip
    for instant in fast.keys() & slow.keys():
        np.testing.assert_array_equal(fast[instant], slow[instant])


def test_values_are_renewed_as_a_driver_renews_them(monkeypatch):
    """Power keeps its value for 100 ms, so calibration has something to find."""
    node = SimulatedNode(monkeypatch, period_ms=1.0, gpus=1)
    found = node.rows(10)
    windows = [RingWindows(schema) for schema, _ in found]
    for ring, (_, rows) in zip(windows, found, strict=True):
        ring.add(rows.tobytes())
        for number in range(40):
            ring.close(Tick(BASE + number * TICK_NS, BASE + (number + 1) * TICK_NS))

    assert windows[1].refresh_seconds["gpu_power_watts"] == pytest.approx(0.1, abs=0.01)


def test_every_scenario_is_tested_here():
    """A new scenario needs a test of what it does."""
    tested = {"healthy", "power-capped", "thermal", "power-brake", "gpu-lost", "gpu-hang"}
    tested |= {"xid-79", "starved"}
    elsewhere = {"mig", "rdma-loss", "rdma-flap", "nvlink-down", "pcie-degraded", "slow-gpu"}
    assert set(SCENARIOS) == tested | elsewhere


def up_of(running):
    """Return what the daemon says of each GPU being up."""
    series = running.scrape().items()
    return {name: value for name, value in series if name.startswith("gpuwatch_gpu_up{")}


def test_a_fault_shows_in_a_running_daemon(tmp_path):
    """About five seconds after ready the event is told, and one GPU of sixteen is down."""
    config = "[simulated]\ngpus = 16\n[state]\nperiod_ms = 2.0\nbudget_ratio = 1.0\n"
    with Running(tmp_path, "--source", "simulated:gpu-lost", config=config) as running:
        ready_ns = time.monotonic_ns()
        wait_for(lambda: sum(up_of(running).values()) == 16)
        wait_for(lambda: running.value("gpuwatch_gpu_up", f'gpu="{SICK}"') == 0)
        (fault,) = running.events("scenario_fault")
        up = up_of(running)

    # The endpoint was ready after the first window, the samplers began before it.
    assert 2 * SECOND_NS < fault["time_ns"] - ready_ns < 6 * SECOND_NS
    assert fault["detail"] == "gpu-lost"
    assert sum(up.values()) == 15

"""The counters sampler against a scripted NVML: right values in base units, from the right GPU."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node import Node, quiet
from running import Running, wait_for

CONFIG = quiet("nvml_state", "nvml_counters")
FIELD = "nvmlDeviceGetFieldValues"
RECEIVED, TRANSMITTED = "pcie_received_bytes_total", "pcie_transmitted_bytes_total"
UNCOVERED, THROTTLED = "counters_uncovered_seconds_total", "throttle_seconds_total"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Running]]:
    """Watch three GPUs with one daemon for the tests of this file that leave all as it was."""
    node = Node(tmp_path_factory.mktemp("three"), 3)
    with node.running(config=CONFIG) as running:
        yield node, running


@pytest.fixture
def node(three: tuple[Node, Running]) -> Node:
    """Have all GPUs answer and all values known."""
    node, running = three
    node.heal()
    for gpu in "012":
        wait_for(lambda gpu=gpu: of(running, gpu, "nvlink_links_up") == 18, what="links up")
        wait_for(lambda gpu=gpu: of(running, gpu, "performance_state") == 0, what="state")
    return node


@pytest.fixture
def running(three: tuple[Node, Running]) -> Running:
    """Return the daemon that watches the three."""
    return three[1]


def of(running: Running, gpu: str, name: str, *parts: str) -> float | None:
    """Return a value of a GPU, None if the series is absent."""
    return running.value(f"gpuwatch_gpu_{name}", f'gpu="{gpu}"', *parts)


def say(node: Node, dev: int, **answers: Any) -> None:
    """Have one GPU's calls answer from now on; `__` in a name stands for `:`."""
    now = node.script.now_ms()
    for fn, val in answers.items():
        node.script.step(now, fn.replace("__", ":"), dev=dev, val=val)
    node.script.write(node.directory / "script")


def test_values_in_base_units(node: Node, running: Running) -> None:
    """Each value is served in its base unit, of its own GPU alone."""
    say(
        node,
        1,
        nvmlDeviceGetMemoryInfo_v2=(2**37, 2**30, 2**36, 2**35),
        nvmlDeviceGetTotalEccErrors__corrected__volatile=3,
        nvmlDeviceGetTotalEccErrors__uncorrected__volatile=4,
        nvmlDeviceGetTotalEccErrors__corrected__aggregate=50,
        nvmlDeviceGetTotalEccErrors__uncorrected__aggregate=60,
        nvmlDeviceGetRemappedRows=(7, 8, 1, 1),
        nvmlDeviceGetClockInfo__video=1200,
        nvmlDeviceGetPerformanceState=8,
        nvmlDeviceGetMarginTemperature=-5,
        nvmlDeviceGetTotalEnergyConsumption=7_500,
        nvmlDeviceGetFieldValues__230=4,
        nvmlDeviceGetRetiredPages_v2__single_bit=[(4096, 1), (8192, 2)],
        nvmlDeviceGetRetiredPages_v2__double_bit=[],
        nvmlDeviceGetRetiredPagesPendingStatus=1,
        nvmlDeviceGetCurrPcieLinkGeneration=4,
        nvmlDeviceGetCurrPcieLinkWidth=8,
        nvmlDeviceGetPcieReplayCounter=11,
        nvmlDeviceGetNvLinkState__3=0,
        nvmlDeviceGetGpuFabricInfo=(0, 0, 0, 0, 0, 0, 2),
        nvmlDeviceGetFieldValues__161=21,
        nvmlDeviceGetFieldValues__162=22,
        nvmlDeviceGetFieldValues__163=23,
        nvmlDeviceGetComputeRunningProcesses=[(77, 0, 0, 0), (78, 0, 0, 0)],
        nvmlDeviceGetGraphicsRunningProcesses=[(78, 0, 0, 0), (79, 0, 0, 0)],
    )
    expected: dict[tuple[str, ...], float] = {
        ("memory_size_bytes",): 2**37,
        ("memory_reserved_bytes",): 2**30,
        ("memory_free_bytes",): 2**36,
        ("memory_used_bytes",): 2**35,
        ("ecc_errors_total", 'type="corrected"'): 3,
        ("ecc_errors_total", 'type="uncorrected"'): 4,
        ("ecc_lifetime_errors_total", 'type="corrected"'): 50,
        ("ecc_lifetime_errors_total", 'type="uncorrected"'): 60,
        ("remapped_rows_total", 'type="corrected"'): 7,
        ("remapped_rows_total", 'type="uncorrected"'): 8,
        ("row_remap_pending",): 1,
        ("row_remap_failed",): 1,
        ("clock_hertz", 'clock="video"'): 1.2e9,
        ("performance_state",): 8,
        ("temperature_margin_celsius",): -5,
        ("energy_joules_total",): 7.5,
        ("recovery_action",): 4,
        ("pcie_link_generation",): 4,
        ("pcie_link_width_lanes",): 8,
        ("pcie_replays_total",): 11,
        ("nvlink_links_up",): 17,
        ("fabric_state",): 2,
        ("nvlink_errors_total", 'type="replay"'): 21,
        ("nvlink_errors_total", 'type="recovery"'): 22,
        ("nvlink_errors_total", 'type="crc"'): 23,
        ("processes",): 3,
    }
    others = {name: of(running, "2", *name) for name in expected}
    for name, value in expected.items():
        wait_for(
            lambda name=name, value=value: (
                of(running, "1", *name) == pytest.approx(value, rel=1e-6)
            ),
            what=f"{name} {value}, not {of(running, '1', *name)}",
        )
    still = {"memory_size_bytes": 85899345920, "performance_state": 0, "nvlink_links_up": 18}
    for name, value in still.items():
        assert others[(name,)] == pytest.approx(value, rel=1e-6)
        assert of(running, "2", name) == pytest.approx(value, rel=1e-6)


def moving(node: Node, dev: int, received: float, transmitted: float) -> None:
    """Have the PCIe counters of a GPU move at these bytes per second."""
    now = node.script.now_ms()
    for fn, rate in ((FIELD + ":198", received), (FIELD + ":197", transmitted)):
        node.script.step(now, fn, dev=dev, val={"per_second": rate})
    node.script.write(node.directory / "script")


def test_pcie_bytes_over_many_wraps(node: Node, running: Running) -> None:
    """What comes to the GPU is received; over wraps it adds up, less what was uncovered."""
    moving(node, 1, 55e9, 3e9)
    settled = running.status()["ticks_closed"]
    wait_for(lambda: running.status()["ticks_closed"] >= settled + 6)
    early, before, late = time.monotonic(), running.scrape(), time.monotonic()
    wait_for(lambda: time.monotonic() > late + 3)
    start, after, end = time.monotonic(), running.scrape(), time.monotonic()
    ours = [name for name in after if name.startswith("gpuwatch_gpu_") and 'gpu="1"' in name]
    rise = {name.partition("{")[0][13:]: after[name] - before[name] for name in ours}
    # The page is up to a tick and its delivery old, the first as the second.
    shortest, longest = start - late - 1.5, end - early + 1.5
    assert rise[RECEIVED] > 20 * 2**32
    for name, rate in ((RECEIVED, 55e9), (TRANSMITTED, 3e9)):
        assert rate * (shortest - rise[UNCOVERED]) <= rise[name] <= rate * longest
    assert rise[RECEIVED] / rise[TRANSMITTED] == pytest.approx(55 / 3, rel=0.02)


def test_nvlink_bytes_are_what_they_rose_by(node: Node, running: Running) -> None:
    """NVML's KiB, in bytes since the daemon's start, of each GPU's own."""
    name = "nvlink_received_bytes_total"
    before, other = of(running, "1", name), of(running, "2", name)
    say(node, 1, nvmlDeviceGetFieldValues__139=10**12)
    wait_for(lambda: of(running, "1", name) > before + 5e14, what="what is read holds still")
    settled = of(running, "1", name)
    say(node, 1, nvmlDeviceGetFieldValues__139=10**12 + 3000)
    wait_for(lambda: of(running, "1", name) == settled + 3000 * 1024, what="3000 KiB more")
    assert of(running, "2", name) < other + 5e14


def test_a_missed_wrap_is_told_and_not_guessed(node: Node, running: Running) -> None:
    """While a call takes long the bytes are not known: that time counts as uncovered."""
    moving(node, 2, 1e9, 1e9)
    before, total = of(running, "2", UNCOVERED), of(running, "2", RECEIVED)
    node.now("nvmlDeviceGetTotalEnergyConsumption", dev=2, takes_ms=400, times=2)
    wait_for(lambda: of(running, "2", UNCOVERED) > before + 0.5, what="uncovered")
    settled = of(running, "2", RECEIVED)
    assert settled >= total
    wait_for(lambda: of(running, "2", RECEIVED) > settled + 1e9, what="going on")


@pytest.mark.parametrize(
    "answer",
    [
        {"ret": "NOT_SUPPORTED"},
        {"val": {"value": 5.5, "type": "double"}},
        {"val": 2**32 - 1},
        {"val": {"value": 2**64 - 1, "type": "ulonglong"}},
        {"val": {"value": -1, "type": "slonglong"}},
    ],
    ids=["error", "fraction", "marker", "marker of 64 bits", "negative"],
)
def test_pcie_bytes_that_are_none(node: Node, running: Running, answer: dict[str, Any]) -> None:
    """No such answer moves the total; afterwards it goes on from where it was."""
    moving(node, 1, 1e9, 1e9)
    before, uncovered = of(running, "1", RECEIVED), of(running, "1", UNCOVERED)
    node.now(FIELD + ":198", dev=1, **answer)
    wait_for(lambda: of(running, "1", UNCOVERED) > uncovered + 0.5)
    stopped = of(running, "1", RECEIVED)
    assert stopped - before < 60e9
    node.heal()
    wait_for(lambda: of(running, "1", RECEIVED) > stopped, what="going on")
    assert of(running, "1", RECEIVED) < stopped + 60e9


def test_throttled_time_is_the_drivers(node: Node, running: Running) -> None:
    """It begins at 0 with the daemon, whatever the driver has counted before, and never falls."""
    rate = {"start": 10**17, "per_second": 5e8}
    start = {reason: of(running, "1", THROTTLED, reason) for reason in ("cap", "hw_thermal")}
    assert set(start.values()) <= {0.0, start["cap"]}
    node.now(FIELD + ":74", dev=1, val=10**17)
    node.now(FIELD + ":270", dev=1, val=10**17)
    time.sleep(2.5)  # past the first read of the new values: the jump is the script's, not time
    base = of(running, "1", THROTTLED, "sw_power_cap")
    node.now(FIELD + ":74", dev=1, val=rate)
    node.now(FIELD + ":270", dev=1, val={**rate, "per_second": 1e9})
    wait_for(lambda: of(running, "1", THROTTLED, "sw_power_cap") > base + 1)
    node.now(FIELD + ":74", dev=1, val={"per_second": -1e8})  # falls back a little
    highest, end = base + 1, time.monotonic() + 2.5
    while time.monotonic() < end:
        value = of(running, "1", THROTTLED, "sw_power_cap")
        assert value >= highest
        highest = value
    assert highest < base + 30
    info = ("gpuwatch_signal_source_info", "gpu_throttle_seconds_total", "sw_power_cap")
    assert running.value(*info, 'source="nvml_counters"') == 1
    assert of(running, "2", THROTTLED, "sw_power_cap") == 0


def test_a_peak_between_polls(node: Node, running: Running) -> None:
    """Forty milliseconds of power show in the extremes of the driver's own samples."""
    now = node.script.now_ms()
    for t_ms, milliwatts in ((0, 300_000), (600, 950_000), (640, 300_000)):
        node.script.step(now + t_ms, "nvmlDeviceGetSamples:power", dev=1, val=milliwatts)
    node.script.write(node.directory / "script")
    wait_for(lambda: of(running, "1", "power_sample_watts_max") == 950)
    assert of(running, "1", "power_sample_watts_min") == 300
    assert of(running, "2", "power_sample_watts_max") == 310
    wait_for(lambda: of(running, "1", "power_sample_watts") == 300)


def test_hardware_totals_are_passed_through(node: Node, running: Running) -> None:
    """A counter that the hardware resets begins anew on the page as well."""
    say(node, 1, nvmlDeviceGetTotalEnergyConsumption=10**12)
    wait_for(lambda: of(running, "1", "energy_joules_total") == 10**9)
    say(node, 1, nvmlDeviceGetTotalEnergyConsumption=5000)
    wait_for(lambda: of(running, "1", "energy_joules_total") == 5)


def test_a_gpu_lost_and_back(node: Node, running: Running) -> None:
    """It loses its series while the others go on; one source tells the event, and it returns."""
    lost, back = len(running.events("gpu_lost")), len(running.events("gpu_returned"))
    total = of(running, "1", RECEIVED)
    node.now("any", "GPU_IS_LOST", dev=1)
    for name in ("performance_state", "memory_used_bytes", "nvlink_links_up", "power_sample_watts"):
        wait_for(lambda name=name: of(running, "1", name) is None, what=f"no {name}")
        assert of(running, "2", name) is not None
    assert len(running.events("gpu_lost")) == lost + 1
    node.heal()
    wait_for(lambda: of(running, "1", "performance_state") == 0)
    wait_for(lambda: of(running, "1", "power_limit_watts", "enforced") == 700)
    wait_for(lambda: of(running, "1", RECEIVED) > total, what="bytes going on")
    assert len(running.events("gpu_returned")) == back + 1
    assert running.value("gpuwatch_child_restarts_total", 'duty="counters"') == 0


def test_a_call_that_does_not_return(tmp_path: Path) -> None:
    """The GPU is left alone by this sampler; its fast samples and all other GPUs go on."""
    node = Node(tmp_path, 2)
    with node.running(config=CONFIG) as running:
        wait_for(lambda: of(running, "1", "performance_state") == 0)
        node.now("nvmlDeviceGetTotalEnergyConsumption", dev=1, takes_ms=-1)
        wait_for(lambda: of(running, "1", "hung", 'duty="counters"') == 1, what="hung")
        wait_for(lambda: of(running, "0", "performance_state") == 0)
        assert of(running, "1", "performance_state") is None
        assert of(running, "1", "hung", 'duty="state"') == 0
        assert of(running, "1", "temperature_celsius", "core") == 41
        assert of(running, "0", "hung", 'duty="counters"') == 0
        node.heal()
        wait_for(lambda: of(running, "1", "hung", 'duty="counters"') == 0, 60, "answers again")
        wait_for(lambda: of(running, "1", "performance_state") == 0)

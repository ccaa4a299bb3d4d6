"""The simulated host and its kernel log: quiet, but for what the scenario does to them."""

import pytest
from running import Running, wait_for
from simulated_node import SimulatedNode
from ticks import firing, window

from gpuwatch.alerts import AlertEngine
from gpuwatch.host_signals import IO_COLUMNS, KMSG_COLUMNS, PRESSURE_COLUMNS
from gpuwatch.rules import RULES
from gpuwatch.scenario import SICK
from gpuwatch.signals import Entity
from gpuwatch.sources.simulated import SimulatedState
from gpuwatch.sources.simulated_host import SimulatedHost

IO = Entity("resource", "io")
SOME = 'host_pressure_seconds_total{kind="some"}'
FAST = "[state]\nperiod_ms = 10.0\n[simulated]\nfault_after_seconds = 2.0\n"


def test_it_has_the_groups_of_a_real_host(monkeypatch):
    """So all behind them runs as it does live."""
    node = SimulatedNode(monkeypatch, source=SimulatedHost)
    columns = {group.name: group.columns for group in node.opened.groups}
    assert columns["pressure"] == PRESSURE_COLUMNS
    assert columns["io"] == IO_COLUMNS
    assert set(columns) == {"pressure", "io", "blocked"}
    assert all(column.signal.name == "kmsg_events_total" for column in KMSG_COLUMNS)


def test_a_healthy_host_is_under_no_pressure(monkeypatch):
    """Storage delivers, and hardly any work waits for it."""
    ticks = SimulatedNode(monkeypatch, source=SimulatedHost).ticks(20)
    assert sum(tick.window(IO, SOME).increase for tick in ticks) < 0.05 * 20
    read = [tick.window(Entity("host", ""), IO_COLUMNS[0].name).increase for tick in ticks]
    assert sum(read) == pytest.approx(2.4e9 * 20, rel=0.1)


@pytest.mark.parametrize(("name", "starves"), [("starved", True), ("healthy", False)])
def test_a_starved_node_starves(monkeypatch, name, starves):
    """Its GPUs' gaps and its host's pressure are told apart from a healthy node's by the rule."""
    seconds = 60
    host = SimulatedNode(monkeypatch, name, SimulatedHost).ticks(seconds)
    gpus = SimulatedNode(monkeypatch, name, SimulatedState, gpus=1, period_ms=25.0)
    rules = [rule for rule in RULES if rule.name == "input_starved"]
    engine = AlertEngine(rules, {"input_starved": {"window_seconds": 60.0}}, None, "")
    for tick, beside in zip(gpus.ticks(seconds), host, strict=True):
        tick.windows |= beside.windows
        for gpu in gpus.gpus:
            tick.windows[gpu]["gpu_processes"] = window(tick.start_ns, tick.end_ns, 1.0)
        engine.judge(tick)
    assert firing(engine) == ({"input_starved"} if starves else set())


def test_a_gpu_off_the_bus_is_told_by_the_log_and_lost(tmp_path):
    """One critical Xid of one GPU, which does not answer any more."""
    with Running(tmp_path, "--source", "simulated:xid-79", config=FAST) as running:
        gpu = f'gpu="{SICK}"'
        wait_for(lambda: running.value("gpuwatch_gpu_xid_errors_total", gpu, 'xid="79"') == 1)
        wait_for(lambda: running.value("gpuwatch_gpu_up", gpu) == 0)
        wait_for(lambda: running.alert("gpu_xid", str(SICK)))
        assert running.alert("gpu_xid", str(SICK))["state"] == "firing"
        (told,), (fault,) = running.events("xid"), running.events("scenario_fault")
        assert told["time_ns"] == fault["time_ns"]
        assert told["detail"].startswith("79: critical: ")
        assert running.value("gpuwatch_kmsg_up") == 1
        assert running.value("gpuwatch_gpu_xid_errors_total", 'gpu="0"', 'xid="79"') == 0

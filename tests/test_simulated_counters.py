"""The simulated node's counters: they fit what the job does, and show the fault of a scenario."""

import pytest
from simulated_node import SimulatedNode

from gpuwatch.alerts import AlertEngine
from gpuwatch.rules import RULES
from gpuwatch.scenario import SICK
from gpuwatch.signals import Kind
from gpuwatch.sources.simulated_counters import ABSENT, SimulatedCounters
from gpuwatch.window import TICK_NS

STEP_TICKS = 52  # ten steps of 1.3 s
LINKS, WIDTH = "gpu_nvlink_links_up", "gpu_pcie_link_width_lanes"
ENERGY, POWER = "gpu_energy_joules_total", "gpu_power_sample_watts"
SENT = "gpu_nvlink_transmitted_bytes_total"


def counted(ticks, gpu, name):
    """Return by how much a counter rose."""
    return sum(tick.window(gpu, name).increase for tick in ticks)


def test_everything_is_told_of_every_gpu(monkeypatch):
    """Each column of the real source has a value, but for what these GPUs do not have."""
    node = SimulatedNode(monkeypatch, source=SimulatedCounters, gpus=2)
    last = node.ticks(15)[-4]  # power is delivered every half second

    columns = [column for group in node.opened.groups for column in group.columns]
    for column in columns:
        window = last.window(column.entity, column.name)
        assert (window.covered_ns > 0) == (column.signal.name not in ABSENT), column.name
    assert {column.entity for column in columns} == set(node.gpus)
    assert any(column.signal.kind is Kind.COUNTER for column in columns)


def test_counters_fit_what_the_job_does(monkeypatch):
    """Energy is the integral of power; NVLinks carry most in the fifth of a step that is theirs."""
    node = SimulatedNode(monkeypatch, source=SimulatedCounters, gpus=2)
    ticks = node.ticks(30)
    steps, gpu = ticks[8 : 8 + STEP_TICKS * 1], node.gpus[0]

    watts = sum(tick.window(gpu, POWER).integral for tick in ticks[8:]) / TICK_NS / len(ticks[8:])
    assert watts == pytest.approx(0.8 * 560 + 0.2 * 380, rel=0.02)
    joules = counted(ticks[4:], gpu, ENERGY)  # told every 5 s
    assert joules == pytest.approx(25 * watts, rel=0.05)
    rate = counted(steps, gpu, SENT) / (len(steps) * TICK_NS * 1e-9)
    assert rate == pytest.approx(1024 * (0.8 * 2e7 + 0.2 * 2.4e8), rel=0.15)
    for tick in ticks[8:]:
        assert tick.window(gpu, 'gpu_ecc_errors_total{type="uncorrected"}').increase == 0


@pytest.mark.parametrize(
    ("scenario", "column", "whole", "less"),
    [("nvlink-down", LINKS, 18, 17), ("pcie-degraded", WIDTH, 16, 8)],
)
def test_a_link_that_is_less_than_it_was(monkeypatch, scenario, column, whole, less):
    """From the fault on one GPU has fewer links or lanes, the others all of theirs."""
    node = SimulatedNode(monkeypatch, scenario, SimulatedCounters, fault_seconds=15.0)
    ticks = node.ticks(32)
    seen = [tick.window(node.gpus[SICK], column).last for tick in ticks[1:]]

    # Links are looked at every ten seconds.
    assert seen[0] == whole
    assert seen[15 * 4] == less
    assert seen[-1] == whole
    for gpu in set(node.gpus) - {node.gpus[SICK]}:
        assert {tick.window(gpu, column).last for tick in ticks[1:]} == {whole}


def test_a_degraded_pcie_link_becomes_a_warning(monkeypatch):
    """The rule about PCIe fires for the GPU that was struck, and no other rule for any."""
    node = SimulatedNode(monkeypatch, "pcie-degraded", SimulatedCounters, gpus=3)
    engine = AlertEngine(RULES, {"gpu_pcie_degraded": {"for_seconds": 5.0}}, None, "")
    for tick in node.ticks(100):
        engine.judge(tick)

    fired = {(one.rule, one.entity) for one in engine.alerts() if one.state == "firing"}
    assert fired == {("gpu_pcie_degraded", node.gpus[2])}

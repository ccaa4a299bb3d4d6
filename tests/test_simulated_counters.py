"""The simulated counters: the groups of the real ones, and a story that fits the other sources."""

import pytest
from running import Running, only, wait_for
from simulated_node import SimulatedNode

from gpuwatch.gpu_readings import GROUPS
from gpuwatch.scenario import SICK
from gpuwatch.sources.simulated_counters import SimulatedCounters

PCIE, NVLINK = "gpu_pcie_received_bytes_total", "gpu_nvlink_received_bytes_total"


def node_of(monkeypatch, name="healthy", **options):
    return SimulatedNode(monkeypatch, name, SimulatedCounters, **options)


def test_every_cell_is_there_and_plausible(monkeypatch):
    """Each GPU has the columns of a real one, and a value for all but what new GPUs lack."""
    node = node_of(monkeypatch, gpus=2)
    last = node.ticks(3.0)[-4]  # power comes twice a second
    columns = [column for group in node.opened.groups for column in group.columns]
    cells = {cell for group in GROUPS for call in group.calls() for cell in call.cells}
    for gpu in node.gpus:
        ours = [column for column in columns if column.entity == gpu]
        assert cells < {(column.signal, column.label) for column in ours}
        for column in ours:
            known = last.window(gpu, column.name).covered_ns > 0
            assert known != column.name.startswith("gpu_retired_pages"), column.name


def test_bytes_and_energy_move_and_nothing_is_missed(monkeypatch):
    """Counters grow at steady rates, PCIe is read in time, and power comes every 20 ms."""
    node = node_of(monkeypatch, gpus=2)
    ticks = node.ticks(20)
    gpu = node.gpus[0]
    rises = {name: sum(t.window(gpu, name).increase for t in ticks) for name in (PCIE, NVLINK)}
    assert 1e10 < rises[PCIE] < 1e11
    assert 5e11 < rises[NVLINK] < 5e12
    energy = sum(tick.window(gpu, "gpu_energy_joules_total").increase for tick in ticks)
    assert 15 * 380 < energy < 20 * 560
    for tick in ticks[4:-4]:
        assert tick.window(gpu, PCIE).covered_ns == tick.end_ns - tick.start_ns
        assert tick.window(gpu, "gpu_power_sample_watts").samples == pytest.approx(12.5, abs=1)


@pytest.mark.parametrize(
    ("scenario", "name", "healthy", "faulty"),
    [
        ("nvlink-down", "gpu_nvlink_links_up", 18, 17),
        ("pcie-degraded", "gpu_pcie_link_width_lanes", 16, 8),
        ("thermal", "gpu_temperature_margin_celsius", 31, -2),
    ],
)
def test_a_fault_strikes_one_gpu(monkeypatch, scenario, name, healthy, faulty):
    """It is seen at the next read of the slow groups, of the sick GPU alone, and it passes."""
    node = node_of(monkeypatch, scenario, fault_seconds=15.0)
    ticks = node.ticks(40)
    for number, gpu in enumerate(node.gpus):
        seen = {tick.window(gpu, name).last for tick in ticks[8:]}
        assert seen == ({healthy, faulty} if number == SICK else {healthy})
    assert ticks[-1].window(node.gpus[SICK], name).last == healthy


def test_throttled_time_lasts_as_long_as_the_fault(monkeypatch):
    """The driver's count of it grows by the fault's time and then stays."""
    node = node_of(monkeypatch, "thermal", fault_seconds=10.0)
    ticks = node.ticks(30)
    name = 'gpu_throttle_seconds_total{reason="hw_thermal_slowdown"}'
    rises = [sum(tick.window(gpu, name).increase for tick in ticks) for gpu in node.gpus]
    assert rises == pytest.approx([10.0 if number == SICK else 0.0 for number in range(4)], abs=1.1)


def test_a_lost_gpu_tells_nothing(monkeypatch):
    """All its cells are unknown, and those of the others are not."""
    node = node_of(monkeypatch, "gpu-lost", fault_after=2.0)
    last = node.ticks(15)[-4]
    for group in node.opened.groups:
        for column in group.columns:
            if column.name in (PCIE, "gpu_processes", "gpu_power_sample_watts"):
                covered = last.window(column.entity, column.name).covered_ns
                assert (covered > 0) == (column.entity != node.gpus[SICK])


def test_the_page_of_a_simulated_node(tmp_path):
    """Limits, modes and counters are served; NVLinks that go down become an alert."""
    config = only("nvml_state", "nvml_counters") + (
        "[state]\nperiod_ms = 10\n[simulated]\ngpus = 3\nfault_after_seconds = 1.0\n"
    )
    arguments = ("--source", "simulated:nvlink-down")
    with Running(tmp_path, *arguments, config=config) as running:
        wait_for(lambda: running.value("gpuwatch_gpu_nvlink_links_up", 'gpu="2"') == 17)
        assert running.value("gpuwatch_gpu_nvlink_links_up", 'gpu="1"') == 18
        assert running.value("gpuwatch_gpu_power_limit_watts", 'gpu="1"', "enforced") == 700
        assert running.value("gpuwatch_gpu_mode_info", 'gpu="1"', 'persistence_mode="on"') == 1
        first = running.value("gpuwatch_gpu_nvlink_received_bytes_total", 'gpu="1"')
        wait_for(
            lambda: running.value("gpuwatch_gpu_nvlink_received_bytes_total", 'gpu="1"') > first
        )

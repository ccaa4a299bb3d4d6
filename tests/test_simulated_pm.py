"""Hardware counters of a simulated node: plausible milliseconds, and what becomes of them."""

import itertools
from dataclasses import replace

import pytest
from running import Running, wait_for
from simulated_node import BASE, SimulatedNode

from gpuwatch.clock import SECOND_NS
from gpuwatch.config import load
from gpuwatch.control import request
from gpuwatch.pm_signals import DRAM_LIMIT, NVLINK_LIMIT, columns_of
from gpuwatch.pulse import Pulse
from gpuwatch.ring import HEADER_BYTES, RingSchema
from gpuwatch.signals import Column
from gpuwatch.source import Context
from gpuwatch.sources import SOURCES
from gpuwatch.sources import load as sources
from gpuwatch.sources.simulated_pm import SimulatedPm
from gpuwatch.summation import row_dtype
from gpuwatch.window import TICK_NS

MS = 1_000_000
LIMITS = ((DRAM_LIMIT, 4.917e12), (NVLINK_LIMIT, 4.78e11))
DRAM, NVLINK, GAPS = "gpu_dram_load_ratio", "gpu_nvlink_load_ratio", "gpu_idle_gap_seconds"
READ, RECEIVED = "gpu_dram_read_bytes_total", "gpu_pcie_received_bytes_total"


def test_each_millisecond_has_a_row_and_no_counter_falls(monkeypatch):
    """Rows come in order, a millisecond apart, whatever the scenario."""
    for name in ("healthy", "starved"):
        node = SimulatedNode(monkeypatch, name, SimulatedPm, gpus=2, fault_after=0.5)
        for schema, rows in node.rows(3):
            assert set(rows["time_ns"][1:] - rows["time_ns"][:-1]) == {MS}
            assert (rows["integers"][1:] >= rows["integers"][:-1]).all()
            assert len(rows) > 2_000
            assert schema.gauges == 4


def test_a_step_has_bursts_that_no_mean_shows(monkeypatch):
    """Memory and NVLink are near their limit for a part of the time, and idle for another."""
    node = SimulatedNode(monkeypatch, "healthy", SimulatedPm, gpus=1)
    limits = tuple((Column(node.gpus[0], limit), most) for limit, most in LIMITS)
    node.opened = replace(node.opened, constants=limits)
    ticks, gpu = node.ticks(6), node.gpus[0]
    for name, low, high in ((DRAM, 0.05, 0.3), (NVLINK, 0.1, 0.3)):
        sums = [0] * 14
        for tick in ticks:
            found = tick.histograms.get(gpu, {}).get(name)
            sums = [a + b for a, b in zip(sums, found.nanoseconds if found else sums, strict=True)]
        assert low < sum(sums[10:]) / sum(sums) < high, name  # above 0.8
    gaps = [gap for tick in ticks for gap in tick.gaps.get(gpu, ())]
    assert len(gaps) >= 3
    assert set(gaps) == {0.014}


@pytest.mark.parametrize("name", ["gpu-lost", "gpu-hang", "xid-79"])
def test_a_gpu_that_is_gone_counts_nothing(monkeypatch, name):
    """Its counters are not known, those of the others go on, and nothing hangs."""
    node = SimulatedNode(monkeypatch, name, SimulatedPm, gpus=3, fault_after=2.0)
    lengths = [len(rows) for _, rows in node.rows(6)]
    assert max(lengths[:2]) > 5000
    assert lengths[2] < 2600
    assert node.now_ns > BASE + 2 * SECOND_NS


def test_rings_of_eight_gpus_stay_within_their_memory(monkeypatch, tmp_path):
    """All rings together, with the hardware counters there are by default, take at most 64 MB."""
    config = load(None, {"paths": {"runtime": str(tmp_path), "state": str(tmp_path)}}, "simulated")
    context = Context({"config": config, "ready_ns": BASE}, Pulse.create(1))
    size = 0
    for source in itertools.chain(*(sources(duty, simulated=True) for duty in SOURCES)):
        for group in source().open(context).groups:
            if source is SimulatedPm:  # it shows them all
                columns = columns_of(group.columns[0].entity, "default")
            else:
                columns = group.columns
            schema = RingSchema("r", "d", "s", columns, group.period_ns)
            rows = config["ring"]["seconds"] * SECOND_NS // group.period_ns + 1
            size += 2 * HEADER_BYTES + rows * row_dtype(schema).itemsize
    assert size <= 64_000_000


def test_hardware_counters_on_the_page_and_released(tmp_path):
    """They feed their metrics; when they are released, NVML goes on with the totals it has."""
    with Running(tmp_path, "--source", "simulated", config="[simulated]\ngpus = 2\n") as running:
        gpu = 'gpu="1"'
        source = ("gpuwatch_signal_source_info", f'signal="{RECEIVED}"')
        wait_for(lambda: (running.value(f"gpuwatch_{DRAM}_count", gpu) or 0) > 1e6)
        wait_for(lambda: (running.value(f"gpuwatch_{GAPS}_count", gpu) or 0) > 0)
        assert running.value(*source, 'source="pm"') == 1
        before = running.value(f"gpuwatch_{RECEIVED}", gpu)
        asked = {"command": "release", "what": "counters", "seconds": 60}
        request(running.runtime / "control.sock", asked, 30)
        wait_for(lambda: running.value(*source, 'source="nvml_counters"') == 1)
        assert running.value("gpuwatch_released", 'what="counters"') == 1
        assert running.value(f"gpuwatch_{READ}", gpu) is None
        wait_for(lambda: running.value(f"gpuwatch_{RECEIVED}", gpu) > before)
        asked = {"command": "resume", "what": "counters"}
        request(running.runtime / "control.sock", asked, 30)
        wait_for(lambda: running.value(f"gpuwatch_{READ}", gpu) is not None)
        assert running.value(f"gpuwatch_{RECEIVED}", gpu) > before


def test_a_tick_holds_as_many_milliseconds_as_it_is_long(monkeypatch):
    """None is missing and none counts twice."""
    node = SimulatedNode(monkeypatch, "healthy", SimulatedPm, gpus=1)
    tick = node.ticks(3)[8]
    window = tick.windows[node.gpus[0]][READ]
    assert (window.samples, window.missing, window.covered_ns) == (250, 0, TICK_NS)

"""A counter that two rings have is drawn from the finer one."""

from pathlib import Path

import numpy as np

from gpuwatch.clock import ClockTriple
from gpuwatch.codec import Head, RowsBlock
from gpuwatch.feeders import coarser
from gpuwatch.gpu_signals import NVLINK_RECEIVED, PCIE_RECEIVED, POWER
from gpuwatch.pm_signals import columns_of
from gpuwatch.recorded import Recorded
from gpuwatch.recording import RecordingWriter
from gpuwatch.ring import RingSchema
from gpuwatch.signals import Column, Entity
from gpuwatch.summation import row_dtype
from gpuwatch.timeline import Grid, Timeline

GPU, OTHER = Entity("gpu", "0"), Entity("gpu", "1")


def test_the_ring_with_more_rows_has_the_counter():
    """Of each entity alone; gauges, and rings of the same period, stay as they are."""
    fine = (columns_of(GPU, "default"), 10**6)
    slow = [((Column(gpu, PCIE_RECEIVED), Column(gpu, POWER)), 10**9) for gpu in (GPU, OTHER)]
    assert coarser([slow[0], fine, slow[1], fine]) == [{0}, set(), set(), set()]
    links = ((Column(GPU, POWER), Column(GPU, NVLINK_RECEIVED)), 10**9)
    assert coarser([links, fine]) == [{1}, set()]
    assert coarser([slow[0], slow[0]]) == [set(), set()]


def test_a_recording_shows_the_coarser_one_where_the_finer_has_nothing(tmp_path: Path) -> None:
    """As while hardware counters are kept for who asks: NVML goes on."""
    start, second, milliseconds = 10**12, 10**9, 10**6
    columns = (Column(GPU, PCIE_RECEIVED),)
    fine = RingSchema("pm.pm0", "pm", "pm", columns, milliseconds)
    slow = RingSchema("counters.pcie0", "counters", "nvml_counters", columns, 50 * milliseconds)

    def block(ring: int, schema: RingSchema, floor: int, rate: int) -> RowsBlock:
        rows = np.zeros(second // schema.period_ns, row_dtype(schema))
        rows["time_ns"] = floor + np.arange(len(rows)) * schema.period_ns
        rows["integers"][:, 0] = rate * rows["time_ns"] // second
        return RowsBlock(ring, schema.period_ns, floor, rows)

    head = Head(
        start_ns=start,
        end_ns=start + 3 * second,
        rings=(fine, slow),
        entities=(),
        constants={},
        clocks=(ClockTriple(0, 0, 0),),
        config={},
        host={},
        boot_id="b",
        created_realtime_ns=5,
    )
    with RecordingWriter(tmp_path / "one.gwr", head) as writer:
        for number in range(3):
            floor = start + number * second
            if number == 1:
                writer.rows(block(0, fine, floor, 5_000_000))
            writer.rows(block(1, slow, floor, 1_000_000))
    recorded = Recorded(tmp_path / "one.gwr")
    timeline = Timeline(Grid(start, second // 2, 6))
    recorded.put(timeline, lambda line: True)
    recorded.close()
    (line,) = timeline.series()
    assert line["mean"] == [1e6, 1e6, 5e6, 5e6, 1e6, 1e6]

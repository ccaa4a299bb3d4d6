"""A counter that two rings have is drawn from the finer one."""

from pathlib import Path

import numpy as np
import pytest

from gpuwatch.clock import ClockTriple, monotonic_ns
from gpuwatch.codec import Head, RowsBlock
from gpuwatch.feeders import coarser
from gpuwatch.gpu_signals import NVLINK_RECEIVED, PCIE_RECEIVED, POWER
from gpuwatch.lookback import Lookback
from gpuwatch.pm_signals import columns_of
from gpuwatch.recorded import Recorded
from gpuwatch.recording import RecordingWriter
from gpuwatch.ring import RingSchema, RingWriter
from gpuwatch.signals import UNKNOWN_INTEGER, Column, Entity
from gpuwatch.summation import row_dtype
from gpuwatch.timeline import Grid, Timeline

GPU, OTHER = Entity("gpu", "0"), Entity("gpu", "1")
MS, SECOND = 10**6, 10**9
BYTES = (Column(GPU, PCIE_RECEIVED),)
NVML = RingSchema("counters.pcie0", "counters", "nvml_counters", BYTES, 50 * MS)


def hardware(period_ms: int) -> RingSchema:
    """Return what hardware counters of this interval have: they are the finer ring at any."""
    return RingSchema("pm.pm0", "pm", "pm", BYTES, period_ms * MS, 500 * MS)


def test_the_ring_with_more_rows_has_the_counter():
    """Of each entity alone; gauges, and rings of the same period, stay as they are."""
    fine = (columns_of(GPU, "default"), 10**6)
    slow = [((Column(gpu, PCIE_RECEIVED), Column(gpu, POWER)), 10**9) for gpu in (GPU, OTHER)]
    assert coarser([slow[0], fine, slow[1], fine]) == [{0}, set(), set(), set()]
    links = ((Column(GPU, POWER), Column(GPU, NVLINK_RECEIVED)), 10**9)
    assert coarser([links, fine]) == [{1}, set()]
    assert coarser([slow[0], slow[0]]) == [set(), set()]


@pytest.mark.parametrize("period_ms", [1, 100])
def test_a_recording_shows_the_coarser_one_where_the_finer_has_nothing(
    tmp_path: Path, period_ms: int
) -> None:
    """As while hardware counters are kept for who asks: NVML goes on."""
    start, second = 10**12, 10**9
    fine, slow = hardware(period_ms), NVML

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


@pytest.mark.parametrize("period_ms", [1, 100])
def test_the_page_shows_the_coarser_one_where_the_finer_has_nothing(
    tmp_path: Path, period_ms: int
) -> None:
    """NVML is asked until hardware counters deliver, and again while they are away for a time."""
    end = monotonic_ns() // SECOND * SECOND
    start, told = end - 6 * SECOND, (1, 2, 4, 5)  # the seconds of which the counters tell
    paths = []
    for schema, rate in ((NVML, 1_000_000), (hardware(period_ms), 5_000_000)):
        ring = RingWriter(tmp_path / schema.name, schema, 10.0)
        paths.append(str(ring.path))
        for time_ns in range(start, end, schema.period_ns):
            count = rate * (time_ns - start) // SECOND
            mine = ((time_ns - start) // SECOND in told) is (schema is not NVML)
            if mine or schema is NVML:
                ring.append(time_ns, 0.0, 0.0, (count if mine else UNKNOWN_INTEGER,))
        ring.advance(end)
    look = Lookback()
    rings = look.rings(paths, {})
    timeline = Timeline(Grid(start + look.offset_ns, SECOND // 2, 12))
    looked = look.put(timeline, lambda line: True, rings, "")
    look.close()
    (line,) = timeline.series()
    expected = [1e6 if second not in told else 5e6 for second in range(6) for _ in range(2)]
    assert line["mean"] == pytest.approx(expected)
    assert looked.source == "ring"

"""Finely sampled rings: the same windows as of all others, their loads, gaps, and who gives way."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.cells import Cells
from gpuwatch.gpu_signals import PCIE_RECEIVED
from gpuwatch.pm_signals import DRAM_LIMIT, GRAPHICS_BUSY, NVLINK_LIMIT, columns_of
from gpuwatch.ring import RingSchema
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Entity
from gpuwatch.summation import RingWindows, row_dtype
from gpuwatch.totals import Totals
from gpuwatch.window import TICK_NS, Tick

MS = 1_000_000
SECOND = 1000 * MS
START = 28_000_000_000_000
GPU = Entity("gpu", "0")
SCHEMA = RingSchema("pm.pm0", "pm", "pm", columns_of(GPU, "full"), MS, 500 * MS)
COUNTERS = SCHEMA.integers
SLOW = RingSchema(
    "counters.pcie0", "counters", "nvml_counters", (Column(GPU, PCIE_RECEIVED),), SECOND
)
RECEIVED = PCIE_RECEIVED.name
SHARE = "gpu_clock_share_hertz"


def pack(schema, rows):
    """Return rows (time, integers, gauges) as a ring has them."""
    made = np.zeros(len(rows), row_dtype(schema))
    for index, (time_ns, integers, gauges) in enumerate(rows):
        made[index] = (time_ns, 0.0, 1e-5, integers, gauges, index + 1)
    return made


def summed(windows, rows, ticks, taken=()):
    """Return so many ticks of the rows."""
    found = []
    windows.add(rows.tobytes())
    for number in range(ticks):
        tick = Tick(START + number * TICK_NS, START + (number + 1) * TICK_NS)
        tick.constants[GPU] = {DRAM_LIMIT.name: 4e12, NVLINK_LIMIT.name: 4e11}
        tick.taken |= set(taken)
        windows.close(tick)
        found.append(tick)
    return found


@st.composite
def stretches(draw):
    """Return rows as hardware gives them, with gaps, resets and cells that are not known."""
    steps = draw(st.lists(st.sampled_from([1] * 20 + [2, 3, 90, 600]), min_size=2, max_size=400))
    begin = draw(st.integers(-3, 3)) + draw(st.sampled_from([0, 0, 300]))
    time_ns, counts, rows = START + begin * MS, [0] * COUNTERS, []
    wild = draw(st.booleans())
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    for step in steps:
        counts = [count + int(seed.integers(0, 10**9)) for count in counts]
        shown, gauges = list(counts), [*seed.random(4).tolist()]
        gauges[1] *= 2e9
        if wild and seed.random() < 0.02:
            shown[seed.integers(COUNTERS)] = UNKNOWN_INTEGER
            gauges[seed.integers(4)] = [math.nan, -1.0, math.inf][seed.integers(3)]
        if wild and seed.random() < 0.01:
            counts = [0] * COUNTERS
        rows.append((time_ns, shown, gauges))
        time_ns += step * MS
    return pack(SCHEMA, rows), (rows[-1][0] - START) // TICK_NS + 2


@settings(max_examples=60, deadline=None)
@given(stretches())
def test_arrays_give_the_windows_that_loops_give(stretch):
    """Exactly, but for the order in which an integral's parts are added."""
    rows, ticks = stretch
    ticks = min(ticks, 39)  # before the fortieth nothing is calibrated
    dense, plain = RingWindows(SCHEMA), RingWindows(SCHEMA)
    assert dense.dense
    plain._cells = Cells(SCHEMA)
    for one, other in zip(summed(dense, rows, ticks), summed(plain, rows, ticks), strict=True):
        assert one.windows[GPU].keys() == other.windows[GPU].keys()
        for name, window in one.windows[GPU].items():
            expected = other.windows[GPU][name]
            assert window.integral == pytest.approx(expected.integral, rel=1e-12)
            assert repr(replace(window, integral=0.0)) == repr(replace(expected, integral=0.0))
        for name, histogram in other.histograms.get(GPU, {}).items():
            assert one.histograms[GPU][name].nanoseconds == histogram.nanoseconds


def steady(milliseconds, *, first=0, read=0, received=0, sent=0, copied=0, busy=1.0, skip=()):
    """Return rows each millisecond in which so many bytes moved in each; `busy` may be a list."""
    rows, counts = [], [0] * COUNTERS
    for place in range(milliseconds):
        for index, moved in ((0, read), (4, received), (5, sent), (6, copied)):
            counts[index] += moved
        if place in skip:
            continue
        share = busy[place] if isinstance(busy, list) else busy
        rows.append((START + (first + place) * MS, list(counts), (share, 1.5e9, 0.5, 0.25)))
    return pack(SCHEMA, rows)


def test_a_load_is_the_bytes_of_an_interval_by_the_most_there_can_be():
    """Memory counts both ways together, NVLink the busier direction."""
    rows = steady(500, read=2_000_000_000, received=100_000_000, sent=300_000_000)
    ticks = summed(RingWindows(SCHEMA), rows, 2)
    found = ticks[1].histograms[GPU]
    assert found["gpu_dram_load_ratio"].nanoseconds[6] == TICK_NS  # up to 0.5
    assert found["gpu_nvlink_load_ratio"].nanoseconds[9] == TICK_NS  # up to 0.8
    assert found["gpu_dram_load_ratio"].integral == pytest.approx(0.5 * TICK_NS)
    assert found["gpu_tensor_load_ratio"].nanoseconds[4] == TICK_NS


def test_time_that_was_not_sampled_is_in_no_load():
    """What moved in it is not known."""
    rows = steady(500, read=1_000_000_000, skip=range(300, 400))
    tick = summed(RingWindows(SCHEMA), rows, 2)[1]
    assert sum(tick.histograms[GPU]["gpu_dram_load_ratio"].nanoseconds) == TICK_NS - 101 * MS
    assert tick.windows[GPU]["gpu_dram_read_bytes_total"].covered_ns == TICK_NS - 99 * MS


def test_without_a_limit_there_is_no_load():
    """A share of something that is not known is not known."""
    windows = RingWindows(SCHEMA)
    windows.add(steady(250, read=10**9).tobytes())
    tick = Tick(START, START + TICK_NS)
    windows.close(tick)
    assert set(tick.histograms[GPU]) == {SHARE, "gpu_tensor_load_ratio"}


def test_each_interval_is_a_sample_also_where_values_change_more_rarely():
    """Each is counted anew by the hardware: a value that comes again is no old one."""
    windows = RingWindows(SCHEMA)
    busy = [0.2 + 0.1 * (place // 3 % 2) for place in range(45 * 250)]
    ticks = summed(windows, steady(len(busy), busy=busy, skip=range(10_900, 10_910)), 45)
    windows_of_busy = [tick.windows[GPU][GRAPHICS_BUSY.name] for tick in ticks]
    found = [(window.samples, window.missing) for window in windows_of_busy[1:]]
    assert found == [(250, 0)] * 42 + [(240, 10), (250, 0)]
    assert windows.refresh_seconds == {}


def test_idle_gaps_are_counted_when_they_end_across_ticks():
    """One that began before anybody looked is not counted, nor one that goes on."""
    busy = [0.0] * 100 + [1.0] * 50 + [0.0] * 3 + [0.5] * 47 + [0.005] * 400 + [1.0] * 100
    busy += [0.0] * 50
    ticks = summed(RingWindows(SCHEMA), steady(750, busy=busy), 3)
    assert [tick.gaps[GPU] for tick in ticks] == [[0.003], [], [0.4]]


def test_a_gap_that_was_not_seen_as_a_whole_is_not_counted():
    """Its length is not known."""
    busy = [1.0] * 100 + [0.0] * 300 + [1.0] * 100 + [0.0] * 10 + [1.0] * 240
    rows = steady(750, busy=busy, skip=range(150, 160))
    assert [tick.gaps[GPU] for tick in summed(RingWindows(SCHEMA), rows, 3)] == [[], [], [0.01]]


def test_one_counter_has_one_feeder_at_a_time():
    """What is sampled finely is not counted again, and no byte twice when it ends."""
    fine, slow = RingWindows(SCHEMA), RingWindows(SLOW)
    totals, seen = Totals(), []
    totals.attach([*SCHEMA.columns, *SLOW.columns])
    # Both see 1.024 GB a second; the fine one from the second to the fourth second only.
    fine.add(steady(2000, first=1000, copied=1_024_000).tobytes())
    reads = [(START + n * SECOND + 100 * MS, (n * 1_024_000_000,), ()) for n in range(7)]
    slow.add(pack(SLOW, reads).tobytes())
    for number in range(28):
        tick = Tick(START + number * TICK_NS, START + (number + 1) * TICK_NS)
        for ring in (fine, slow):
            ring.close(tick)
        totals.add(tick)
        seen.append(totals.counters[GPU, RECEIVED] / 1.024e9)
    assert seen == sorted(seen)
    assert seen[11] == pytest.approx(2 - 0.001)  # what came at once with the first row
    assert seen[27] == pytest.approx(2 - 0.001 + 3)
    assert totals.uncovered_ns[GPU, RECEIVED] > 0


def test_rows_that_come_after_their_tick_was_closed_are_in_no_total():
    """What another source has told of meanwhile is not counted again, and no load has it."""
    fine, slow = RingWindows(SCHEMA), RingWindows(SLOW)
    totals, loads = Totals(), 0
    totals.attach([*SCHEMA.columns, *SLOW.columns])
    # 1.024 MB each millisecond, of which the fine one tells late from the first second on.
    rows = steady(6000, read=10**9, copied=1_024_000)
    reads = [(START + n * 100 * MS, (n * 102_400_000,), ()) for n in range(10, 30)]
    slow.add(pack(SLOW, reads).tobytes())
    fine.add(rows[:1000].tobytes())
    for number in range(24):
        if number == 14:
            fine.add(rows[1000:].tobytes())
        tick = Tick(START + number * TICK_NS, START + (number + 1) * TICK_NS)
        tick.constants[GPU] = {DRAM_LIMIT.name: 4e12}
        for ring in (fine, slow):
            ring.close(tick)
        totals.add(tick)
        found = tick.histograms.get(GPU, {}).get("gpu_dram_load_ratio")
        loads += sum(found.nanoseconds) if found else 0
    # In seconds: the first one, what the slow one has seen from 1.0 to 2.9, and from 3.5 on.
    assert totals.counters[GPU, RECEIVED] / 1.024e9 == pytest.approx(0.999 + 1.9 + 2.5)
    assert totals.counters[GPU, "gpu_dram_read_bytes_total"] == pytest.approx(3.499e12)
    assert totals.uncovered_ns[GPU, "gpu_dram_read_bytes_total"] == 2500 * MS - 1 * MS
    assert loads == 3499 * MS


def test_rows_that_say_late_that_nothing_is_read_are_heard():
    """A ring that rests is not waited for, and the next row begins anew."""
    windows = RingWindows(SCHEMA)
    summed(windows, steady(200), 2)
    rest = pack(SCHEMA, [(START + 300 * MS, (UNKNOWN_INTEGER,) * COUNTERS, (UNKNOWN_GAUGE,) * 4)])
    rest["late"] = math.nan
    windows.add(rest.tobytes())
    windows.close(Tick(START + 2 * TICK_NS, START + 3 * TICK_NS))
    assert windows.ended
    windows.add(steady(250, first=1000, read=10**9).tobytes())
    tick = Tick(START + 4 * TICK_NS, START + 5 * TICK_NS)
    windows.close(tick)
    window = tick.windows[GPU]["gpu_dram_read_bytes_total"]
    assert (window.covered_ns, window.missing) == (TICK_NS, 0)


def test_the_clock_that_hardware_counts_feeds_its_histogram_alone(monkeypatch):
    """The one that the driver tells gives way, so that no microsecond is counted twice."""
    tick = summed(RingWindows(SCHEMA), steady(250), 1)[0]
    assert (GPU, SHARE) in tick.taken
    assert sum(tick.histograms[GPU][SHARE].nanoseconds) == TICK_NS


def test_lost_clock_is_of_the_clock_that_hardware_counts():
    """Where it is known; else of the one that the driver tells."""
    totals = Totals()
    totals.attach(SCHEMA.columns)
    tick = summed(RingWindows(SCHEMA), steady(250), 1)[0]
    tick.constants[GPU]['gpu_clock_limit_hertz{clock="sm"}'] = 2e9
    busy = tick.windows[GPU][GRAPHICS_BUSY.name]
    tick.windows[GPU]["gpu_utilization_ratio"] = busy
    tick.windows[GPU]['gpu_clock_hertz{clock="sm"}'] = replace(busy, integral=2e9 * TICK_NS)
    totals.add(tick)
    assert totals.lost_clock_ns[GPU] == TICK_NS // 4


def test_nothing_known_of_hardware_counters_is_unknown():
    """A ring without a value tells no window, no load and no gap, and takes nothing."""
    unknown = (UNKNOWN_INTEGER,) * COUNTERS
    rows = [(START + n * MS, unknown, (UNKNOWN_GAUGE,) * 4) for n in range(250)]
    tick = summed(RingWindows(SCHEMA), pack(SCHEMA, rows), 1)[0]
    assert tick.taken == set()
    assert all(window.covered_ns == 0 for window in tick.windows[GPU].values())
    assert tick.gaps[GPU] == []

"""Windows: what is summed up of rows, against a slow and simple recount."""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.ring import RingSchema
from gpuwatch.signals import (
    UNKNOWN_GAUGE,
    UNKNOWN_INTEGER,
    Column,
    Entity,
    Histogram,
    Kind,
    Signal,
)
from gpuwatch.slots import MARGIN_NS
from gpuwatch.summation import HOLD_PERIODS, RingWindows, row_dtype
from gpuwatch.window import TICK_NS, Tick, Window, put

MS = 1_000_000
START = 7_000_000_000_000
PERIOD = 10 * MS
GPU = Entity("gpu", "0")
BITS = Signal("throttle", "B.", Kind.BITS, "", label="reason", bits=((0, "a"), (3, "b")))
COUNT = Signal("joules_total", "C.", Kind.COUNTER, "joules", scale=0.001)
CLOCK = Signal(
    "hertz",
    "G.",
    Kind.GAUGE,
    "hertz",
    label="clock",
    bounds=(0.0, 100.0),
    histogram=Histogram("share_hertz", "H.", (10.0, 50.0), label="sm"),
)
SLOW = Signal("watts", "G.", Kind.GAUGE, "watts", bounds=(0.5, 1e4), refresh_seconds=0.1)
FREE = Signal("ratio", "G.", Kind.GAUGE, "ratio")
COLUMNS = (
    Column(GPU, BITS),
    Column(GPU, COUNT),
    Column(GPU, CLOCK, "sm"),
    Column(GPU, SLOW),
    Column(GPU, FREE),
)
SCHEMA = RingSchema("state.fast", "state", "nvml_state", COLUMNS, PERIOD)
NAMES = (
    'throttle{reason="a"}',
    'throttle{reason="b"}',
    "joules_total",
    'hertz{clock="sm"}',
    "watts",
    "ratio",
)
GAUGES = st.one_of(
    st.floats(0, 120, width=32),
    st.sampled_from([math.nan, 127.0, -1.0, 0.0, math.inf, -math.inf, 255.0]),
)


def pack(rows, schema=SCHEMA):
    """Return rows (due, late, integers, gauges) as a ring has them."""
    made = np.zeros(len(rows), row_dtype(schema))
    for index, (due, late, integers, gauges) in enumerate(rows):
        made[index] = (due + late, late * 1e-9, 0.0, integers, gauges, index + 1)
    return made


@st.composite
def stretches(draw):
    """Return rows as a sampler makes them: late, with reads skipped, cells wild, and cuts."""
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 1, 1, 2, 3, 7, 40]), min_size=1, max_size=120))
    due = START + draw(st.integers(0, 3 * PERIOD))
    counter = draw(st.integers(0, 10**6))
    rows = []
    for step in steps:
        late = draw(st.integers(0, PERIOD - MARGIN_NS - 1))  # later ones may miss their own tick
        counter = draw(st.one_of(st.integers(0, 500).map(counter.__add__), st.integers(0, 50)))
        bits = draw(st.one_of(st.sampled_from([0, 1, 8, 9]), st.just(UNKNOWN_INTEGER)))
        count = draw(st.one_of(st.just(counter), st.just(UNKNOWN_INTEGER)))
        rows.append((due, late, (bits, count), tuple(draw(GAUGES) for _ in range(3))))
        due += step * PERIOD
    ticks = (rows[-1][0] - START) // TICK_NS + draw(st.integers(1, 3))
    return rows, min(ticks, 39)  # before the fortieth tick nothing is calibrated


def summed(rows, edges):
    """Return the windows of each tick between the edges, as dictionaries by name."""
    windows = RingWindows(SCHEMA)
    packed = pack(rows)
    found = []
    for start, end in itertools.pairwise(edges):
        inside = packed[(packed["time_ns"] >= start) & (packed["time_ns"] < end)]
        if start == edges[0]:
            inside = packed[packed["time_ns"] < end]
        windows.add(inside.tobytes())
        tick = Tick(start, end)
        windows.close(tick)
        found.append(tick)
    return found


def total(ticks, name):
    return functools.reduce(Window.merge, (tick.windows[GPU][name] for tick in ticks))


def spans(rows, start, end):
    """Yield (row, nanoseconds that it stands for between start and end)."""
    times = [due + late for due, late, _, _ in rows]
    for index, row in enumerate(rows):
        following = times[index + 1] if index + 1 < len(rows) else end
        until = min(following, times[index] + HOLD_PERIODS * PERIOD, end)
        if times[index] < end:
            yield row, max(0, until - max(start, times[index]))


def slots(rows, known, width, start, end):
    """Return refresh slots that ended before `end`, from the first row on, with a value or not."""
    first = rows[0][0]
    caught = {(row[0] - first) // width for row in rows if row[0] + row[1] < end and known(row)}
    count = (end - first + MARGIN_NS) // width
    found = sum(slot < count for slot in caught)
    return found, count - found


def recount(rows, start, end, known, value, width=PERIOD):
    """Return what a window must say of a gauge, by exact integers and plain loops."""
    parts = [(value(row), span) for row, span in spans(rows, start, end) if span and known(row)]
    covered = sum(span for _, span in parts)
    samples, missing = slots(rows, known, width, start, end)
    return {
        "covered_ns": covered,
        "samples": samples,
        "missing": missing,
        "minimum": min((v for v, _ in parts), default=math.nan),
        "maximum": max((v for v, _ in parts), default=math.nan),
        "integral": math.fsum(v * span for v, span in parts),
        "last": parts[-1][0] if parts else math.nan,
    }


def same(window, expected):
    """Compare exactly, but for integrals, and for values as their shortest float32."""
    for key in ("covered_ns", "samples", "missing"):
        assert getattr(window, key) == expected[key], key
    assert window.integral == pytest.approx(expected["integral"], rel=1e-12, abs=1e-12)
    for key in ("minimum", "maximum", "last"):
        found, wanted = getattr(window, key), expected[key]
        assert np.float32(found) == np.float32(wanted) or (math.isnan(found) and wanted != wanted)


@settings(deadline=None, max_examples=120)
@given(stretches())
def test_gauges_agree_with_a_recount(stretch):
    """Summed tick by tick and merged, a gauge is what one pass over the whole time gives."""
    rows, count = stretch
    start, end = START, START + count * TICK_NS
    ticks = summed(rows, [start + n * TICK_NS for n in range(count + 1)])
    for place, (name, width) in enumerate(
        [('hertz{clock="sm"}', PERIOD), ("watts", 100 * MS), ("ratio", PERIOD)]
    ):
        low, high = COLUMNS[2 + place].signal.bounds or (-1e38, 1e38)

        def known(row, place=place, low=low, high=high):
            return low <= row[3][place] <= high

        expected = recount(rows, start, end, known, lambda row, place=place: row[3][place], width)
        same(total(ticks, name), expected)


@settings(deadline=None, max_examples=120)
@given(stretches())
def test_bits_agree_with_a_recount(stretch):
    """Active time, edges and coverage of each bit; the state before the first row is no edge."""
    rows, count = stretch
    start, end = START, START + count * TICK_NS
    ticks = summed(rows, [start + n * TICK_NS for n in range(count + 1)])
    for bit, name in ((0, NAMES[0]), (3, NAMES[1])):

        def known(row):
            return row[2][0] != UNKNOWN_INTEGER

        def active(row, bit=bit):
            return float(row[2][0] >> bit & 1)

        window = total(ticks, name)
        same(window, recount(rows, start, end, known, active))
        states = [active(row) for row in rows if row[0] + row[1] < end and known(row)]
        raised = sum(a < b for a, b in itertools.pairwise(states))
        assert window.increase == raised


@settings(deadline=None, max_examples=120)
@given(stretches())
def test_counters_agree_with_a_recount(stretch):
    """The rise over ticks is the rise of all; a fall is a reset, risen from 0 since."""
    rows, count = stretch
    start, end = START, START + count * TICK_NS
    ticks = summed(rows, [start + n * TICK_NS for n in range(count + 1)])
    window = total(ticks, "joules_total")

    def known(row):
        return row[2][1] != UNKNOWN_INTEGER

    values = [row[2][1] for row in rows if row[0] + row[1] < end and known(row)]
    rise = sum(b - a if b >= a else b for a, b in itertools.pairwise(values))
    expected = recount(rows, start, end, known, lambda row: row[2][1])
    assert (window.covered_ns, window.samples, window.missing) == (
        expected["covered_ns"],
        expected["samples"],
        expected["missing"],
    )
    assert window.increase == pytest.approx(rise * 0.001, rel=1e-12, abs=1e-12)
    if values:
        assert window.last == pytest.approx(values[-1] * 0.001)


@settings(deadline=None, max_examples=80)
@given(stretches(), st.data())
def test_cuts_and_the_order_of_merging_change_nothing(stretch, data):
    """Any cuts, merged in any order of neighbours, give the windows of the uncut time."""
    rows, count = stretch
    end = START + count * TICK_NS
    cuts = data.draw(st.lists(st.integers(START + 1, end - 1), max_size=6, unique=True))
    pieces = summed(rows, [START, *sorted(cuts), end])
    (whole,) = summed(rows, [START, end])
    for name in NAMES:
        parts = [tick.windows[GPU][name] for tick in pieces]
        while len(parts) > 1:
            place = data.draw(st.integers(0, len(parts) - 2))
            parts[place : place + 2] = [parts[place].merge(parts[place + 1])]
        merged, uncut = parts[0], whole.windows[GPU][name]
        assert (merged.start_ns, merged.end_ns) == (uncut.start_ns, uncut.end_ns)
        assert (merged.covered_ns, merged.samples) == (uncut.covered_ns, uncut.samples)
        assert merged.missing == uncut.missing
        assert merged.integral == pytest.approx(uncut.integral, rel=1e-12, abs=1e-12)
        assert merged.increase == pytest.approx(uncut.increase, rel=1e-12, abs=1e-12)
        extremes = ("minimum", "maximum", "last")
        if name == "joules_total":
            extremes = ("last",)
        np.testing.assert_array_equal(
            [getattr(merged, key) for key in extremes], [getattr(uncut, key) for key in extremes]
        )


@settings(deadline=None, max_examples=60)
@given(stretches())
def test_histograms_hold_the_covered_time(stretch):
    """Buckets add up to the covered time, by bounds inclusive, and the integral is the gauge's."""
    rows, count = stretch
    start, end = START, START + count * TICK_NS
    (tick,) = summed(rows, [start, end])
    found = tick.histograms[GPU]["share_hertz"]
    buckets = [0, 0, 0]
    for row, span in spans(rows, start, end):
        value = row[3][0]
        if 0.0 <= value <= 100.0:
            buckets[0 if value <= 10 else 1 if value <= 50 else 2] += span
    assert list(found.nanoseconds) == buckets
    assert sum(buckets) == tick.windows[GPU]['hertz{clock="sm"}'].covered_ns
    assert found.integral == tick.windows[GPU]['hertz{clock="sm"}'].integral


def one(value, due, late=0, bits=0):
    return (START + due, late, (bits, UNKNOWN_INTEGER), (value, UNKNOWN_GAUGE, UNKNOWN_GAUGE))


def window_of(rows, name='hertz{clock="sm"}', ticks=1):
    edges = [START + n * TICK_NS for n in range(ticks + 1)]
    return [tick.windows[GPU][name] for tick in summed(rows, edges)]


def test_a_value_holds_two_periods_and_no_longer():
    """After that the time is uncovered, also in the tick after."""
    (first, second) = window_of([one(40.0, 245 * MS)], ticks=2)
    assert (first.covered_ns, second.covered_ns) == (5 * MS, 15 * MS)
    assert (first.mean, second.mean) == (40.0, 40.0)
    (third,) = window_of([one(40.0, 10 * MS)])
    assert (third.covered_ns, third.integral) == (20 * MS, 40.0 * 20 * MS)


def test_an_unknown_value_ends_the_one_before():
    """What a failed read says is that nothing is known, from then on."""
    (window,) = window_of([one(40.0, 0), one(UNKNOWN_GAUGE, 5 * MS), one(60.0, 10 * MS)])
    assert window.covered_ns == 5 * MS + 20 * MS
    assert (window.minimum, window.maximum) == (40.0, 60.0)


def test_nothing_known_is_not_zero():
    """A tick without a value has no statistics at all."""
    (window,) = window_of([one(127.0, n * PERIOD) for n in range(25)])
    assert (window.covered_ns, window.samples, window.missing) == (0, 0, 25)
    assert all(math.isnan(x) for x in (window.minimum, window.maximum, window.mean, window.last))


def test_every_read_is_a_sample_whatever_its_lateness():
    """No read is taken for missing because its lateness was rounded."""
    lates = np.random.default_rng(3).integers(20_000, PERIOD, 2500).tolist()
    rows = [one(40.0, n * PERIOD, late) for n, late in enumerate(lates)]
    windows = window_of(rows, ticks=39)
    assert sum(window.missing for window in windows) == 0


def test_samples_count_refreshes_and_not_reads():
    """A value that the driver renews every 100 ms gives ten samples a second, read or not."""
    rows = [
        (START + n * PERIOD, 0, (0, 0), (40.0, 300.0, UNKNOWN_GAUGE))
        for n in range(100)
        if not 30 <= n < 50
    ]
    windows = window_of(rows, "watts", ticks=4)
    assert sum(window.samples for window in windows) == 8
    assert sum(window.missing for window in windows) == 2


def test_samples_follow_the_measured_refresh():
    """Once the refresh was measured it is what counts, not the declaration."""
    rows = [
        (START + n * PERIOD, 0, (0, 0), (40.0, 300.0 + n // 5 % 2, UNKNOWN_GAUGE))
        for n in range(1200)
    ]
    windows = window_of(rows, "watts", ticks=44)
    assert sum(window.samples for window in windows[:4]) == 10
    assert sum(window.samples for window in windows[40:]) == 20


def test_bits_not_declared_are_shown():
    """A newer driver's reason is not lost, and stays once seen."""
    rows = [one(1.0, 0, bits=0), one(1.0, 100 * MS, bits=1 << 9)]
    ticks = summed(rows, [START, START + TICK_NS, START + 2 * TICK_NS])
    name = 'throttle{reason="unknown_0x200"}'
    assert ticks[0].windows[GPU][name].integral == 20 * MS
    assert ticks[0].windows[GPU][name].increase == 1
    assert ticks[1].windows[GPU][name].covered_ns == 0


def test_bits_active_from_the_first_row_are_no_edge():
    """What was on before anyone looked did not begin now; one that comes back did."""
    rows = [one(1.0, 0, bits=1), one(1.0, 10 * MS, bits=0), one(1.0, 20 * MS, bits=9)]
    (a,) = window_of(rows, NAMES[0])
    (b,) = window_of(rows, NAMES[1])
    assert (a.increase, b.increase) == (1, 1)
    assert a.integral == 10 * MS + 20 * MS


def test_time_before_the_first_row_is_not_missing():
    """A sampler that was just started has not missed what was before it."""
    rows = [one(40.0, 200 * MS + n * PERIOD) for n in range(5)]
    windows = RingWindows(SCHEMA)
    windows.add(pack(rows).tobytes())
    tick = Tick(START, START + TICK_NS)
    windows.close(tick)
    window = tick.windows[GPU]['hertz{clock="sm"}']
    assert (window.samples, window.missing) == (5, 0)
    assert tick.rows[0].missing == 0
    assert tick.rows[0].late_seconds.tolist() == [0.0] * 5


def test_rows_that_come_late_are_missing_but_no_counter_is_lost():
    """A row of a tick that was closed counts for nothing but the totals."""
    windows = RingWindows(SCHEMA)
    rows = [(START + n * PERIOD, 0, (0, 100 * n), (40.0, 1.0, 1.0)) for n in range(50)]
    packed = pack(rows)
    windows.add(packed[:20].tobytes())
    first, second = Tick(START, START + TICK_NS), Tick(START + TICK_NS, START + 2 * TICK_NS)
    windows.close(first)
    windows.add(packed[20:].tobytes())
    windows.close(second)
    a, b = (tick.windows[GPU]['hertz{clock="sm"}'] for tick in (first, second))
    assert (a.samples, a.missing, b.samples, b.missing) == (20, 5, 25, 0)
    assert a.covered_ns == 210 * MS
    rises = [tick.windows[GPU]["joules_total"].increase for tick in (first, second)]
    assert sum(rises) == pytest.approx(49 * 100 * 0.001)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=6))
def test_two_feeders_of_one_tick_add_up(values):
    """A child and its successor share a tick: their covered times add, extremes are of both."""
    tick = Tick(START, START + TICK_NS)
    for place, value in enumerate(values):
        start = START + place * MS
        part = Window.steady(start, start + MS, float(value))
        put(tick, GPU, "hertz", replace(part, start_ns=START, end_ns=START + TICK_NS))
    window = tick.windows[GPU]["hertz"]
    assert window.covered_ns == len(values) * MS
    assert (window.minimum, window.maximum) == (min(values), max(values))
    assert window.mean == pytest.approx(sum(values) / len(values))


@settings(deadline=None, max_examples=120)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 300), st.integers(0, 10**6), st.sampled_from([1.0, 2.5, math.nan])
        ),
        min_size=1,
        max_size=8,
    )
)
def test_ticks_without_a_row_are_summed_as_all_others(reads):
    """A slow ring's windows do not depend on the short way taken while nothing comes."""
    period = 1000 * MS
    plain = (Column(GPU, COUNT), Column(GPU, SLOW), Column(GPU, FREE))
    with_bits = (Column(GPU, BITS), *plain)  # never summed the short way
    found = []
    for columns in (plain, with_bits):
        schema = RingSchema("slow", "state", "nvml_state", columns, period)
        windows = RingWindows(schema)
        rows = np.zeros(len(reads), row_dtype(schema))
        for number, (late_ms, count, value) in enumerate(reads):
            row = rows[number]
            row["time_ns"] = START + number * period + late_ms * MS
            row["late"] = late_ms / 1000
            row["integers"][-1] = UNKNOWN_INTEGER if count % 7 == 0 else count
            row["integers"][:-1] = 0
            row["gauges"] = value
        windows.add(rows.tobytes())
        ticks = [Tick(START + n * TICK_NS, START + (n + 1) * TICK_NS) for n in range(50)]
        for tick in ticks:
            windows.close(tick)
        found.append(
            [
                (repr(tick.windows[GPU][column.name]), tick.rows[0].missing)
                for tick in ticks
                for column in plain
            ]
        )
    assert found[0] == found[1]

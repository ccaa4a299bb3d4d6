"""Timelines: what is shown of a stretch of time is what the samples say, step by step."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS
from gpuwatch.errors import RequestError
from gpuwatch.signals import Column, Entity, Kind, Signal
from gpuwatch.summation import HOLD_PERIODS
from gpuwatch.timeline import MAX_CELLS, Grid, Held, Line, Timeline
from gpuwatch.window import TICK_NS

UNIT = 50 * MILLISECOND_NS  # all times of the reference are whole multiples of it
GPU = Entity("gpu", "0")
POWER = Line.of(Column(GPU, Signal("power_watts", "P.", Kind.GAUGE, "watts", bounds=(0, 1000))))
BYTES = Line.of(Column(GPU, Signal("bytes_total", "B.", Kind.COUNTER, "bytes")))
BITS = Signal("held_active", "H.", Kind.BITS, "", label="reason", bits=((0, "idle"), (2, "cap")))
REASONS = Line.of(Column(GPU, BITS))
LINES = [REASONS, BYTES, POWER]

unknown = st.just(math.nan)
cells = st.tuples(
    st.sampled_from([0.0, 1.0, 4.0, 5.0, 8.0, float(0xFFFFFFFF), -1.0, math.nan]),
    unknown | st.integers(0, 10**6).map(float),
    unknown | st.sampled_from([0.0, 0.1, 123.456, 749.642, 1000.0, 1000.5]).map(np.float32),
)
rows = st.lists(st.tuples(st.integers(1, 12), cells), min_size=1, max_size=40)


def timeline_of(grid, times, values, period_ns, until_ns, cuts=()):
    """Return the series by name, of rows that come in pieces cut at these rows."""
    timeline = Timeline(grid)
    held = Held(timeline, LINES)
    for low, high in zip([0, *cuts], [*cuts, len(times)], strict=True):
        held.add(times[low:high], values[:, low:high], period_ns)
    held.finish(until_ns)
    return {series["name"]: series for series in timeline.series()}


def reference(grid, times, values, period_ns, until_ns):
    """Return for each name and step the values of each unit of time in it; None is unknown."""
    times = [int(time) // UNIT for time in times]
    hold = HOLD_PERIODS * period_ns // UNIT
    states, counts, powers = values
    found = {"power_watts": {}, "bytes_total": {}}
    names = {0: "idle", 2: "cap", 3: "unknown_0x8"}
    found |= {f'held_active{{reason="{name}"}}': {} for name in names.values()}
    for unit in range(grid.start_ns // UNIT, grid.end_ns // UNIT):
        row = max((i for i, time in enumerate(times) if time <= unit), default=None)
        newest = row == len(times) - 1
        if row is None or unit >= times[row] + hold or (newest and unit >= until_ns // UNIT):
            row = None
        if row is not None and 0 <= powers[row] <= 1000:
            found["power_watts"][unit] = powers[row]
        if row is not None and states[row] >= 0 and states[row] != 0xFFFFFFFF:
            for bit, name in names.items():
                active = float(int(states[row]) >> bit & 1)
                found[f'held_active{{reason="{name}"}}'][unit] = active
        known = [i for i in range(len(times)) if not math.isnan(counts[i])]
        for one, other in pairwise(known):
            gap = times[other] - times[one]
            if times[one] <= unit < times[other] and gap <= max(hold, TICK_NS // UNIT):
                rise = counts[other] - counts[one]
                rise = counts[other] if rise < 0 else rise
                found["bytes_total"][unit] = rise / (gap * UNIT / SECOND_NS)
    return found


@settings(deadline=None, max_examples=150)
@given(rows, st.integers(1, 6), st.integers(0, 30), st.integers(1, 9), st.data())
def test_each_step_is_what_the_rows_say(made, period, start, step, data):
    """Minimum, maximum and mean of any rows in any steps, however the rows come in pieces."""
    times = np.cumsum([gap for gap, _ in made]).astype(np.int64) * UNIT
    values = np.array([cells for _, cells in made], np.float64).T
    grid = Grid(start * UNIT, step * UNIT, 12)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(times)), max_size=4)))
    until_ns = int(times[-1]) + data.draw(st.integers(0, 3)) * UNIT
    series = timeline_of(grid, times, values, period * UNIT, until_ns, cuts)
    expected = reference(grid, times, values, period * UNIT, until_ns)
    for name, units in expected.items():
        if name not in series:  # a bit without a name that never was set
            assert "unknown" in name
            continue
        for number in range(grid.steps):
            first = grid.start_ns // UNIT + number * step
            held = [units[unit] for unit in range(first, first + step) if unit in units]
            shown = [series[name][what][number] for what in ("min", "mean", "max")]
            if not held:
                assert shown == [None] * 3
                continue
            mean = sum(held) / len(held)
            assert shown[1] == pytest.approx(mean, rel=1e-6, abs=1e-12)
            if name == "bytes_total":
                assert shown[0] == shown[1] == shown[2]
            else:
                assert [np.float32(shown[0]), np.float32(shown[2])] == [min(held), max(held)]
                assert shown[0] <= shown[1] <= shown[2]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=60), st.integers(1, 500))
def test_rates_times_time_are_the_increase(rises, points):
    """What a counter rose by is in its rates, whole, however fine the steps are."""
    times = np.arange(len(rises), dtype=np.int64) * 100 * MILLISECOND_NS
    counts = np.cumsum(rises).astype(float)
    timeline = Timeline(Grid.of(0.0, float(times[-1] / SECOND_NS), points))
    held = Held(timeline, [BYTES])
    held.add(times, counts.reshape(1, -1), 100 * MILLISECOND_NS)
    (series,) = timeline.series()
    total = sum(rate for rate in series["mean"] if rate is not None)
    grid = timeline.grid
    # The last step may reach beyond the last read: its rate is that of what is known of it.
    beyond = series["mean"][-1] * (grid.end_ns - int(times[-1])) / SECOND_NS
    increase = counts[-1] - counts[0]
    assert total * grid.step_ns / SECOND_NS - beyond == pytest.approx(increase, rel=1e-6, abs=1e-6)


def test_values_read_as_float32_are_shown_as_they_were_read():
    """0.1 is 0.1 and not 0.10000000149."""
    read = [0.1, 749.642, 1.98e9, 8.589935e10, 16777216.0, 1e-30, 3.4e38, 0.0]
    times = np.arange(len(read), dtype=np.int64) * MILLISECOND_NS
    line = Line.of(Column(GPU, Signal("any_watts", "A.", Kind.GAUGE, "watts")))
    timeline = Timeline(Grid(0, MILLISECOND_NS, len(read)))
    held = Held(timeline, [line])
    held.add(times, np.array([read], np.float32).astype(np.float64), MILLISECOND_NS)
    held.finish(len(read) * MILLISECOND_NS)
    (series,) = timeline.series()
    assert series["min"] == series["mean"] == series["max"] == read


def test_rows_out_of_order_are_put_in_order():
    """A foreign file may have them as it likes."""
    times = np.array([3, 1, 2], np.int64) * UNIT
    values = np.array([[0.0] * 3, [30.0, 10.0, 20.0], [3.0, 1.0, 2.0]])
    series = timeline_of(Grid(0, UNIT, 5), times, values, UNIT, 5 * UNIT)
    assert series["power_watts"]["mean"] == [None, 1.0, 2.0, 3.0, 3.0]
    assert series["bytes_total"]["mean"] == [None, 200.0, 200.0, None, None]


@pytest.mark.parametrize(
    ("start", "end", "points", "says"),
    [
        (math.nan, 2.0, 5, "start"),
        (1.0, math.inf, 5, "end"),
        (-1.0, 2.0, 5, "start"),
        (2.0, 2.0, 5, "end"),
        (3.0, 2.0, 5, "end"),
        (1.0, 1e10, 5, "end"),
        (1.0, 2.0, 0, "points"),
        (1.0, 2.0, 2001, "points"),
    ],
)
def test_no_grid_is_made_of_nonsense(start, end, points, says):
    """One line names what is wrong."""
    with pytest.raises(RequestError, match=f"^{says}: .*") as caught:
        Grid.of(start, end, points)
    assert "\n" not in str(caught.value)


def test_no_step_is_shorter_than_a_millisecond():
    """Nothing is sampled faster; there are fewer steps then."""
    grid = Grid.of(1000.0, 1000.0105, 2000)
    assert (grid.step_ns, grid.steps) == (MILLISECOND_NS, 11)


def test_too_much_at_once_is_refused():
    """Memory is bounded: many lines need fewer points."""
    timeline = Timeline(Grid(0, UNIT, 2000))
    keys = [(Entity("gpu", str(number)), "power_watts") for number in range(MAX_CELLS // 2000 + 1)]
    with pytest.raises(RequestError, match="fewer"):
        timeline.put(keys, np.array([0]), np.array([UNIT]), np.zeros((len(keys), 1)))

"""Timelines: rows of any pace become minimum, maximum and mean in each step of one grid of time.

Everything is weighted by time, as in windows: a value holds until the next read, two periods at
most, and what is not known covers nothing. A counter becomes its rate: what it rose by between two
reads is spread evenly over the time between them. A set of bits becomes one line for each bit, its
mean the share of time in which it was set.

Times are wall time in nanoseconds; values are float64 in the signal's unit, NaN unknown.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpuwatch.cells import FINITE, MARKER
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS
from gpuwatch.errors import RequestError
from gpuwatch.signals import Column, Entity, Kind, Signal, Total, column_name
from gpuwatch.summation import HOLD_PERIODS
from gpuwatch.window import TICK_NS, Floats

Times = npt.NDArray[np.int64]
Key = tuple[Entity, str]

MAX_POINTS = 2000
MAX_CELLS = 1_000_000  # of all lines together
MAX_SECONDS = 9e9  # int64 nanoseconds end in the year 2262
AT_ONCE = 1_000_000  # numbers worked on in one go
DIGITS = 7  # of a mean; float32 has as many


@dataclass(frozen=True, slots=True)
class Grid:
    """`steps` steps of `step_ns` from `start_ns` on."""

    start_ns: int
    step_ns: int
    steps: int

    @classmethod
    def of(cls, start: float, end: float, points: int) -> "Grid":
        """Return the grid of `points` steps, or fewer of a millisecond, between two unix times.

        Raises RequestError.
        """
        for name, value in (("start", start), ("end", end)):
            if not 0 <= value <= MAX_SECONDS:
                raise RequestError(f"{name}: {value} is no time: give unix seconds")
        if not start < end:
            raise RequestError(f"end: {end} is not after start, {start}")
        if not 1 <= points <= MAX_POINTS:
            raise RequestError(f"points: {points}: give 1 to {MAX_POINTS}")
        start_ns, end_ns = round(start * SECOND_NS), round(end * SECOND_NS)
        step_ns = max(MILLISECOND_NS, -(-(end_ns - start_ns) // points))
        return cls(start_ns, step_ns, max(1, -(-(end_ns - start_ns) // step_ns)))

    @property
    def end_ns(self) -> int:
        """The end of the last step."""
        return self.start_ns + self.steps * self.step_ns

    def part(self, from_ns: int, to_ns: int) -> tuple[slice, Times]:
        """Return the steps that share time with this stretch, and their edges; maybe none."""
        first = max(0, (from_ns - self.start_ns) // self.step_ns)
        last = min(self.steps, -((self.start_ns - to_ns) // self.step_ns))
        edges = np.arange(first, max(first, last) + 1, dtype=np.int64) * self.step_ns
        return slice(first, max(first, last)), edges + self.start_ns


class Line(NamedTuple):
    """A column, with its name made."""

    entity: Entity
    name: str
    signal: Signal
    label: str

    @classmethod
    def of(cls, column: Column) -> "Line":
        """Return a column's line."""
        return cls(column.entity, column.name, column.signal, column.label)

    @property
    def key(self) -> Key:
        """What it is known by."""
        return self.entity, self.name


class Timeline:
    """Collects lines on a grid, from pieces of rows in any order."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._numbers: dict[Key, int] = {}
        self._rates: set[Key] = set()
        self._integral = np.zeros((0, grid.steps))
        self._covered = np.zeros((0, grid.steps))
        self._low = np.zeros((0, grid.steps))
        self._high = np.zeros((0, grid.steps))

    def put(self, keys: Sequence[Key], starts: Times, ends: Times, values: Floats) -> None:
        """Take values that each stand from their start to their end, in order and apart.

        `values` has a line for each of `keys` and a place for each start. Raises RequestError if
        these are too many lines for the grid.
        """
        where = self._where(keys)
        if not len(starts) or not len(keys):
            return
        steps, edges = self.grid.part(int(starts[0]), int(ends[-1]))
        if len(edges) < 2:
            return
        at_once = max(1, AT_ONCE // (len(starts) + len(edges)))
        for first in range(0, len(keys), at_once):
            lines = where[first : first + at_once]
            part = _reduced(edges, starts, ends, values[first : first + at_once])
            self._integral[lines, steps] += part.integral
            self._covered[lines, steps] += part.covered
            self._low[lines, steps] = np.fmin(self._low[lines, steps], part.low)
            self._high[lines, steps] = np.fmax(self._high[lines, steps], part.high)

    def put_rates(self, keys: Sequence[Key], starts: Times, ends: Times, rates: Floats) -> None:
        """Take rates, of which only the mean means something."""
        self._rates.update(keys)
        self.put(keys, starts, ends, rates)

    def fill(self, other: "Timeline") -> None:
        """Take the rates of another timeline of this grid for time of which nothing is known here.

        Of a step that is known in part they stand for the rest.
        """
        where = self._where([*other._numbers])
        self._rates |= other._rates
        room = np.clip(self.grid.step_ns - self._covered[where], 0.0, other._covered)
        share = np.divide(room, other._covered, out=np.zeros_like(room), where=room > 0)
        self._integral[where] += other._integral * share
        self._covered[where] += room

    def put_bit(self, key: Key, like: Key) -> None:
        """Begin the line of a bit that was never set where that of its set `like` is known."""
        if key not in self._numbers:
            new, other = self._where([key, like])
            self._covered[new] = self._covered[other]
            known = self._covered[other] > 0
            self._low[new] = self._high[new] = np.where(known, 0.0, math.nan)

    def series(self) -> Iterator[dict[str, Any]]:
        """Yield each line as plain data, None where it is not known."""
        at_once = max(1, AT_ONCE // 4 // self.grid.steps)
        for first in range(0, len(self._numbers), at_once):
            chosen = slice(first, first + at_once)
            covered = self._covered[chosen]
            mean = np.full(covered.shape, math.nan)
            np.divide(self._integral[chosen], covered, out=mean, where=covered > 0)
            mean = _rounded(mean, DIGITS)
            low, high = _shortest(self._low[chosen]), _shortest(self._high[chosen])
            keys = list(islice(self._numbers, first, first + at_once))
            rates = np.array([[key in self._rates] for key in keys])
            mean = np.where(rates, mean, np.clip(mean, low, high))
            low, high = np.where(rates, mean, low), np.where(rates, mean, high)
            numbers = zip(keys, low.tolist(), high.tolist(), mean.tolist(), strict=True)
            for (entity, name), *values in numbers:
                least, most, usual = map(_plain, values)
                yield {
                    "entity": list(entity),
                    "name": name,
                    "min": least,
                    "max": most,
                    "mean": usual,
                }

    def _where(self, keys: Sequence[Key]) -> npt.NDArray[np.intp]:
        """Return the lines' numbers; those not seen before are appended."""
        new = [key for key in dict.fromkeys(keys) if key not in self._numbers]
        if new:
            count = len(self._numbers) + len(new)
            if count * self.grid.steps > MAX_CELLS:
                raise RequestError(
                    f"points: {count} lines of {self.grid.steps} steps are too many:"
                    " ask for fewer points, signals or entities"
                )
            self._numbers.update(zip(new, range(len(self._numbers), count), strict=True))
            more = np.zeros((len(new), self.grid.steps))
            self._integral = np.concatenate([self._integral, more])
            self._covered = np.concatenate([self._covered, more])
            self._low = np.concatenate([self._low, more + math.nan])
            self._high = np.concatenate([self._high, more + math.nan])
        return np.array([self._numbers[key] for key in keys], np.intp)


class Held:
    """The rows of one ring, in order: puts into a timeline what they say of the time they hold.

    `lines` are the columns of the rows that are added. A row waits for the next one, or for
    `finish`. For exactness at the start give one row from before it.
    """

    def __init__(self, timeline: Timeline, lines: Sequence[Line]) -> None:
        self._timeline = timeline
        self._lines = lines
        self._times = np.empty(0, np.int64)  # of rows kept: counters need those that still hold
        self._values = np.empty((len(lines), 0))
        self._hold_ns = 0
        kinds = [line.signal.kind for line in lines]
        self._gauges = [index for index, kind in enumerate(kinds) if kind is Kind.GAUGE]
        self._counters = [index for index, kind in enumerate(kinds) if kind is Kind.COUNTER]
        # By bit; those that are not declared are named when they are seen first.
        self._labels: dict[int, dict[int, str]] = {
            index: dict(lines[index].signal.bits)
            for index, kind in enumerate(kinds)
            if kind is Kind.BITS
        }
        bounds = [lines[index].signal.bounds or FINITE for index in self._gauges]
        self._lowest = np.array([[low] for low, _ in bounds]).reshape(-1, 1)
        self._highest = np.array([[high] for _, high in bounds]).reshape(-1, 1)

    def add(self, times: Times, values: Floats, period_ns: int) -> None:
        """Take rows: a line of values for each column."""
        if not len(times):
            return
        kept = len(self._times)
        times = np.concatenate([self._times, times])
        values = np.concatenate([self._values, values], axis=1)
        if np.any(np.diff(times) < 0):  # a foreign file
            order = np.argsort(times, kind="stable")
            times, values = times[order], values[:, order]
        self._hold_ns = HOLD_PERIODS * period_ns
        last = max(0, kept - 1)
        self._put_held(times[last:], values[:, last:], int(times[-1]))
        self._put_rates(times, values, kept)
        rate_hold_ns = max(self._hold_ns, TICK_NS)
        keep = min(len(times) - 1, int(times.searchsorted(times[-1] - rate_hold_ns)))
        self._times, self._values = times[keep:], values[:, keep:]

    def finish(self, until_ns: int) -> None:
        """Say that no row has come up to that time: the last one stands, if it still holds."""
        if len(self._times):
            self._put_held(self._times[-1:], self._values[:, -1:], until_ns)

    def _put_held(self, times: Times, values: Floats, until_ns: int) -> None:
        """Put gauges and bits: each row until the next, the last one until `until_ns`."""
        ends = np.append(times[1:], max(until_ns, int(times[-1])))
        ends = np.minimum(ends, times + self._hold_ns)
        shown = values[self._gauges]
        with np.errstate(invalid="ignore"):
            inside = (shown >= self._lowest) & (shown <= self._highest)
        keys = [self._lines[index].key for index in self._gauges]
        self._timeline.put(keys, times, ends, np.where(inside, shown, math.nan))
        for index, labels in self._labels.items():
            line, states = self._lines[index], values[index]
            known = (states >= 0) & (states != MARKER)
            whole = np.where(known, states, 0).astype(np.int64)
            keys = [(line.entity, column_name(line.signal, label)) for label in labels.values()]
            seen = int(np.bitwise_or.reduce(whole))
            for bit in range(seen.bit_length()):
                if seen >> bit & 1 and bit not in labels:
                    labels[bit] = f"unknown_0x{1 << bit:x}"
                    keys.append((line.entity, column_name(line.signal, labels[bit])))
                    self._timeline.put_bit(keys[-1], like=keys[0])
            bits = np.array([*labels], np.int64).reshape(-1, 1)
            sets = np.where(known, whole >> bits & 1, math.nan)
            self._timeline.put(keys, times, ends, sets)

    def _put_rates(self, times: Times, values: Floats, fresh: int) -> None:
        """Put the rates of counters between reads, up to those from row `fresh` on."""
        hold_ns = max(self._hold_ns, TICK_NS)
        lines = [self._lines[index] for index in self._counters]
        put_rates(self._timeline, lines, times, values[self._counters], hold_ns, fresh)


def put_rates(
    timeline: Timeline,
    lines: Sequence[Line],
    times: Times,
    counts: Floats,
    hold_ns: int,
    fresh: int,
    recounted: Collection[Total] = (),
) -> None:
    """Put the rates of counters between two reads that are at most `hold_ns` apart.

    `counts` has a line for each of `lines`. Stretches up to rows before number `fresh` were put
    already. A counter that fell was reset, and has risen from 0 since; one whose total is among
    `recounted` may have been counted from earlier on by another, so its rate is not known there.
    """
    known = np.isfinite(counts)
    whole = known.all(axis=1)
    groups = [np.flatnonzero(whole), *(np.array([index]) for index in np.flatnonzero(~whole))]
    for chosen in groups:
        if not len(chosen):
            continue
        some = known[chosen[0]]
        at, read = times[some], counts[np.ix_(chosen, some)]
        spans = np.diff(at)
        fits = (spans > 0) & (spans <= hold_ns) & (np.flatnonzero(some)[1:] >= fresh)
        anew = np.array([[lines[index].signal.total in recounted] for index in chosen])
        resets = np.where(anew, math.nan, read[:, 1:])
        rises = np.where(read[:, 1:] < read[:, :-1], resets, np.diff(read, axis=1))
        rates = rises[:, fits] / (spans[fits] / SECOND_NS)
        keys = [lines[index].key for index in chosen]
        timeline.put_rates(keys, at[:-1][fits], at[1:][fits], rates)


class _Reduced(NamedTuple):
    integral: Floats
    covered: Floats
    low: Floats
    high: Floats


def _reduced(edges: Times, starts: Times, ends: Times, values: Floats) -> _Reduced:
    """Return what the values are in each step: value x ns, ns known, least, most."""
    within = np.concatenate([starts, ends])
    within = np.minimum(np.maximum(within, edges[0]), edges[-1])
    bounds = np.sort(np.concatenate([edges, within]))
    begins, spans = bounds[:-1], np.diff(bounds)
    row = starts.searchsorted(begins, "right") - 1
    stands = (row >= 0) & (begins < ends[row]) & (spans > 0)
    spans = np.where(stands, spans, 0).astype(np.float64)
    parts = values[:, row]
    parts[:, ~stands] = math.nan
    known = ~np.isnan(parts)
    first = begins.searchsorted(edges[:-1])
    return _Reduced(
        np.add.reduceat(np.where(known, parts, 0.0) * spans, first, axis=1),
        np.add.reduceat(known * spans, first, axis=1),
        np.fmin.reduceat(parts, first, axis=1),
        np.fmax.reduceat(parts, first, axis=1),
    )


def _shortest(values: Floats) -> Floats:
    """Return what was read as float32 by the shortest decimal that is this float32, else as is."""
    shown = values
    for digits in (9, 8, 7, 6):
        decimal = _rounded(values, digits)
        with np.errstate(over="ignore"):
            same = decimal.astype(np.float32) == values.astype(np.float32)
        shown = np.where(same & (values == values.astype(np.float32)), decimal, shown)
    return shown


def _rounded(values: Floats, digits: int) -> Floats:
    """Return the values to so many significant digits; NaN and 0 as they are."""
    shown = values.copy()
    at = np.isfinite(values) & (values != 0)
    found = values[at]
    places = digits - 1 - np.floor(np.log10(np.abs(found))).astype(int)
    power = 10.0 ** np.abs(places)
    shown[at] = np.where(
        places >= 0, np.rint(found * power) / power, np.rint(found / power) * power
    )
    return shown


def _plain(values: list[float]) -> list[float | None]:
    return [None if value != value else value for value in values]


def lines_of(columns: Iterable[Column]) -> list[Line]:
    """Return the columns' lines."""
    return [Line.of(column) for column in columns]

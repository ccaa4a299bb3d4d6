"""Cells: the windows that the cells of one ring make in one tick, column by column.

Each row has its span, the nanoseconds of the tick that it stands for; a cell that is not known
covers none of them. All of it is plain Python: few rows come in a tick, and calls of numpy would
cost more than the arithmetic.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import compress, pairwise
from operator import mul
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gpuwatch.ring import RingSchema
from gpuwatch.signals import UNKNOWN_INTEGER, Entity, Kind, column_name
from gpuwatch.slots import Slots
from gpuwatch.window import Tick, TimeHistogram, Window, put, put_histogram

FINITE = (-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max))
MARKER = 0xFFFFFFFF  # all ones of 32 bits, and those of 64: drivers' words for no bits known

T = TypeVar("T", int, float)


class HeldCell(NamedTuple):
    """What one row says of a column for as long as it stands; NaN is unknown."""

    entity: Entity
    name: str
    value: float
    per_ns: float  # what each nanosecond adds to the integral


class Part(NamedTuple):
    """A tick, and how its rows stand in it."""

    tick: Tick
    spans: Sequence[int]
    total_ns: int
    slots: Slots


class Cells:
    """The columns of one ring; the last row of a tick is the first one of the next.

    `last` has of each integer column the last value that was known.
    """

    def __init__(self, schema: RingSchema) -> None:
        self._columns = schema.columns
        self._names = [(column.entity, column.name) for column in schema.columns]
        self._bounds = [column.signal.bounds or FINITE for column in schema.columns]
        self._integers = schema.integers
        self.last = [UNKNOWN_INTEGER] * schema.integers
        self._counters = {
            name: index
            for index, name in enumerate(self._names)
            if schema.columns[index].signal.kind is Kind.COUNTER
        }
        self._left: set[int] = set()  # counters that a finer source tells of
        self._bits = {
            index: {bit: column_name(column.signal, label) for bit, label in column.signal.bits}
            for index, column in enumerate(schema.columns)
            if column.signal.kind is Kind.BITS
        }
        self._histograms = {
            index: column.signal.histogram
            for index, column in enumerate(schema.columns)
            if column.signal.histogram and column.signal.histogram.label == column.label
        }

    def put(self, tick: Tick, rows: npt.NDArray[Any], spans: Sequence[int], slots: Slots) -> None:
        """Put the windows of the rows into the tick, to which the slots are turned."""
        part = Part(tick, spans, sum(spans), slots)
        columns = rows["integers"].T.tolist() + rows["gauges"].T.tolist()
        self._give_way(tick)
        for index, values in enumerate(columns):
            if index in self._left and self._leave(tick, index, values):
                continue
            if index >= self._integers:
                self._put_gauge(part, index, values)
            elif index in self._bits:
                self._put_bits(part, index, values)
            else:
                self._put_counter(part, index, values)

    def are_plain(self, tick: Tick) -> bool:
        """Whether each column makes one window of the tick and no more."""
        self._give_way(tick)
        return not self._bits and not self._histograms and not self._left

    def _give_way(self, tick: Tick) -> None:
        """Leave the counters that a finer source has told of in this tick."""
        if tick.taken and not tick.taken.isdisjoint(self._counters):
            self._left |= {self._counters[name] for name in tick.taken & self._counters.keys()}

    def _leave(self, tick: Tick, index: int, values: list[Any]) -> bool:
        """Say whether a counter is left in this tick; it counts again from its next read on."""
        if self._names[index] in tick.taken:
            self.last[index] = UNKNOWN_INTEGER
            return True
        if len(values) > 1:
            self._left.discard(index)
        values[0] = UNKNOWN_INTEGER  # what was read before is in what the other has told
        return False

    def held(self, row: npt.NDArray[Any]) -> list[HeldCell]:
        """Return plain cells as they are while one row stands."""
        cells = []
        for index, value in enumerate((*row["integers"].tolist(), *row["gauges"].tolist())):
            low, high = self._bounds[index]
            shown, per_ns = math.nan, 0.0
            if index < self._integers:
                if value != UNKNOWN_INTEGER:
                    shown = value * self._columns[index].signal.scale
            elif low <= value <= high:
                shown, per_ns = shortest(value), value
            cells.append(HeldCell(*self._names[index], shown, per_ns))
        return cells

    def _put_gauge(self, part: Part, index: int, values: Sequence[float]) -> None:
        tick, spans, covered_ns, slots = part
        low, high = self._bounds[index]
        minimum, maximum, integral = min(values), max(values), sum(map(mul, values, spans))
        known = None
        # The integral of what is no number is none either.
        if not (low <= minimum and maximum <= high and integral == integral) or 0 in spans:
            known = [low <= value <= high for value in values]
            spans = [span if is_known else 0 for span, is_known in zip(spans, known, strict=True)]
            values, spans = list(compress(values, spans)), list(filter(None, spans))
            minimum, maximum = min(values, default=math.nan), max(values, default=math.nan)
            covered_ns, integral = sum(spans), float(sum(map(mul, values, spans)))
        caught, missed = slots.count(index, known and known[1:])
        window = Window(
            tick.start_ns,
            tick.end_ns,
            covered_ns,
            caught,
            missed,
            shortest(minimum),
            shortest(maximum),
            integral,
            shortest(values[-1]) if values else math.nan,
        )
        entity, name = self._names[index]
        put(tick, entity, name, window)
        histogram = self._histograms.get(index)
        if histogram is not None and (entity, histogram.name) not in tick.taken:
            nanoseconds = [0] * (len(histogram.bounds) + 1)
            for value, span in _durations(values, spans).items():
                nanoseconds[bisect_left(histogram.bounds, value)] += span
            found = TimeHistogram(tuple(nanoseconds), integral)
            put_histogram(tick, entity, histogram.name, found)

    def _put_bits(self, part: Part, index: int, values: Sequence[int]) -> None:
        tick, spans, covered_ns, slots = part
        known = None
        if min(values) < 0 or MARKER in values:
            known = [value >= 0 and value != MARKER for value in values]
            values, spans = list(compress(values, known)), list(compress(spans, known))
            covered_ns = sum(spans)
        caught, missed = slots.count(index, known and known[1:])
        changes = (pair for pair in pairwise(self._after(index, values)) if pair[0] != pair[1])
        raised = Counter(~one & other for one, other in changes)
        held = {state: span for state, span in _durations(values, spans).items() if span}
        last = next(compress(reversed(values), reversed(spans)), 0)
        for bit, name in self._names_of_bits(index, values):
            active_ns = sum(span for state, span in held.items() if state >> bit & 1)
            window = Window(
                tick.start_ns,
                tick.end_ns,
                covered_ns,
                caught,
                missed,
                float(active_ns == covered_ns) if held else math.nan,
                float(active_ns > 0) if held else math.nan,
                float(active_ns),
                float(last >> bit & 1) if held else math.nan,
                float(sum(times for bits, times in raised.items() if bits >> bit & 1)),
            )
            put(tick, self._columns[index].entity, name, window)

    def _names_of_bits(self, index: int, states: Iterable[int]) -> Iterable[tuple[int, str]]:
        """Return the names of bits; those the declaration lacks are named when first seen."""
        names = self._bits[index]
        for state in set(states):
            for bit in range(state.bit_length()):
                if state >> bit & 1 and bit not in names:
                    signal = self._columns[index].signal
                    names[bit] = column_name(signal, f"unknown_0x{1 << bit:x}")
        return names.items()

    def _put_counter(self, part: Part, index: int, values: Sequence[int]) -> None:
        tick, spans, covered_ns, slots = part
        known = None
        if UNKNOWN_INTEGER in values:
            known = [value != UNKNOWN_INTEGER for value in values]
            values, covered_ns = list(compress(values, known)), sum(compress(spans, known))
        caught, missed = slots.count(index, known and known[1:])
        scale = self._columns[index].signal.scale
        rise = _rise(self._after(index, values))
        window = Window(
            tick.start_ns,
            tick.end_ns,
            covered_ns,
            caught,
            missed,
            min(values) * scale if values else math.nan,
            max(values) * scale if values else math.nan,
            0.0,
            values[-1] * scale if values else math.nan,
            rise * scale,
        )
        put(tick, *self._names[index], window)

    def _after(self, index: int, values: Sequence[int]) -> Sequence[int]:
        """Return known integers with the last one before them, and keep their last one."""
        before = self.last[index]
        if values:
            self.last[index] = values[-1]
        return values if before == UNKNOWN_INTEGER else [before, *values]


def _rise(counts: Sequence[int]) -> int:
    """Return how much a counter rose; one that fell was reset and has risen from 0 since."""
    return sum(other - one if other >= one else other for one, other in pairwise(counts))


def _durations(values: Sequence[T], spans: Sequence[int]) -> dict[T, int]:
    """Return for how long each value stood."""
    if values and values.count(values[0]) == len(values):
        return {values[0]: sum(spans)}
    found: dict[T, int] = {}
    for value, span in zip(values, spans, strict=True):
        found[value] = found.get(value, 0) + span
    return found


@lru_cache(maxsize=4096)
def shortest(value: float) -> float:
    """Return the shortest decimal that is this float32: 3201000000, not 3200999936."""
    return float(str(np.float32(value)))

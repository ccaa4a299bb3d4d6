"""Loads: how close the bytes of each millisecond came to the most there can be, and idle gaps.

Of a time that was not sampled nothing is said, nor of an idle gap whose begin or end lies in it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpuwatch.clock import SECOND_NS
from gpuwatch.pm_signals import GRAPHICS_BUSY, LOADS, Load
from gpuwatch.ring import RingSchema
from gpuwatch.signals import UNKNOWN_INTEGER, Entity
from gpuwatch.window import Tick, TimeHistogram, put_histogram

IDLE_RATIO = 0.01  # of an interval: with no more than this at work the GPU is idle
HOLD_PERIODS = 2  # rows further apart leave a time between them that was not sampled

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Fine:
    """The rows of a tick, column by column; the first row is the last one before the tick.

    `spans` is for how long each stands, `known` whether a counter is, in two rows that follow each
    other, and did not fall.
    """

    def __init__(self, apart: Integers, counts: Integers, gauges: Floats, spans: Integers) -> None:
        self.apart = apart  # nanoseconds from each row to the next
        self.counts = counts
        self.gauges = gauges
        self.spans = spans
        self.rises = np.diff(counts)
        self.known = self.rises >= 0
        if UNKNOWN_INTEGER in counts:
            there = counts != UNKNOWN_INTEGER
            self.known &= there[:, 1:] & there[:, :-1]


def time_histogram(values: Floats, spans: Integers, bounds: Sequence[float]) -> TimeHistogram:
    """Return for how long each value stood, by inclusive bounds."""
    places = np.searchsorted(bounds, values)
    sums = np.bincount(places, weights=spans, minlength=len(bounds) + 1)
    return TimeHistogram(tuple(map(int, sums.tolist())), float((values * spans).sum()))


class Loads:
    """The loads and the idle gaps of one ring; ticks come in order."""

    def __init__(self, schema: RingSchema) -> None:
        places = {(column.entity, column.name): i for i, column in enumerate(schema.columns)}
        entities = dict.fromkeys(column.entity for column in schema.columns)
        self._loads: list[tuple[Entity, Load, list[int], Floats]] = []
        for entity in entities:
            for load in LOADS:
                found = [places[entity, name] for name in load.counters if (entity, name) in places]
                if len(found) == len(load.counters):
                    scales = [[schema.columns[index].signal.scale] for index in found]
                    self._loads.append((entity, load, found, np.array(scales)))
        self._gaps = {
            entity: IdleGaps(places[entity, GRAPHICS_BUSY.name] - schema.integers)
            for entity in entities
            if (entity, GRAPHICS_BUSY.name) in places
        }

    def put(self, tick: Tick, fine: Fine, period_ns: int) -> None:
        """Put what ended in the tick into it."""
        sampled = (fine.apart > 0) & (fine.apart <= HOLD_PERIODS * period_ns)
        for entity, load, columns, scales in self._loads:
            limit = tick.constant(entity, load.limit)
            if not limit or not len(sampled):
                continue
            usable = sampled & fine.known[columns].all(axis=0)
            moved, lasted = fine.rises[columns] * scales, fine.apart
            if not usable.all():
                moved, lasted = moved[:, usable], lasted[usable]
            moved = moved.max(axis=0) if load.each else moved.sum(axis=0)
            ratios = moved / (lasted * (limit * 1e-9))
            found = time_histogram(ratios, lasted, load.histogram.bounds)
            put_histogram(tick, entity, load.histogram.name, found)
        for entity, gaps in self._gaps.items():
            ended = gaps.ended(tick, fine.gauges[gaps.gauge], fine.spans)
            tick.gaps.setdefault(entity, []).extend(ended)


class IdleGaps:
    """Follows the gaps of one GPU; `gauge` is the place of its activity in a row."""

    def __init__(self, gauge: int) -> None:
        self.gauge = gauge
        self._idle_ns: int | None = None  # so long by now; None: nobody knows since when

    def ended(self, tick: Tick, busy: Floats, spans: Integers) -> list[float]:
        """Return the seconds of each gap that ended in the tick."""
        known = (busy >= 0) & (spans > 0)
        idle, spans = busy[known] <= IDLE_RATIO, spans[known]
        if int(spans.sum()) != tick.end_ns - tick.start_ns:
            self._idle_ns = None if not len(idle) or idle[-1] else 0
            return []
        starts = np.flatnonzero(np.diff(idle, prepend=not idle[0]))
        lasted, gaps = np.add.reduceat(spans, starts).tolist(), []
        for is_idle, span in zip(idle[starts].tolist(), lasted, strict=True):
            if is_idle:
                self._idle_ns = None if self._idle_ns is None else self._idle_ns + span
                continue
            if self._idle_ns:
                gaps.append(self._idle_ns / SECOND_NS)
            self._idle_ns = 0
        return gaps

"""Loads: how close the bytes of each millisecond came to the most there can be, and idle gaps.

Of a time that was not sampled nothing is said, nor of an idle gap whose begin or end lies in it.
"""

from collections.abc import Sequence
from typing import Any

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


def time_histogram(
    values: npt.NDArray[np.float64], spans: Integers, bounds: Sequence[float]
) -> TimeHistogram:
    """Return for how long each value stood, by inclusive bounds."""
    places = np.searchsorted(bounds, values)
    sums = np.bincount(places, weights=spans, minlength=len(bounds) + 1)
    return TimeHistogram(tuple(map(int, sums.tolist())), float((values * spans).sum()))


class Loads:
    """The loads and the idle gaps of one ring; ticks come in order."""

    def __init__(self, schema: RingSchema) -> None:
        places = {(column.entity, column.name): i for i, column in enumerate(schema.columns)}
        entities = dict.fromkeys(column.entity for column in schema.columns)
        self._loads: list[tuple[Entity, Load, list[int], npt.NDArray[np.float64]]] = []
        for entity in entities:
            for load in LOADS:
                found = [places[entity, name] for name in load.counters if (entity, name) in places]
                if len(found) == len(load.counters):
                    scales = np.array([schema.columns[index].signal.scale for index in found])
                    self._loads.append((entity, load, found, scales))
        self._gaps = {
            entity: IdleGaps(places[entity, GRAPHICS_BUSY.name] - schema.integers)
            for entity in entities
            if (entity, GRAPHICS_BUSY.name) in places
        }

    def put(self, tick: Tick, rows: npt.NDArray[Any], spans: Integers, period_ns: int) -> None:
        """Put what ended in the tick into it: the first row is the last one before the tick."""
        times = np.diff(rows["time_ns"])
        for entity, load, columns, scales in self._loads:
            limit = tick.constant(entity, load.limit)
            if not limit or not len(times):
                continue
            counts = rows["integers"][:, columns]
            known = (counts != UNKNOWN_INTEGER).all(axis=1)
            rises = np.diff(counts, axis=0)
            sampled = known[1:] & known[:-1] & (rises >= 0).all(axis=1)
            sampled &= (times > 0) & (times <= HOLD_PERIODS * period_ns)
            moved, lasted = rises[sampled] * scales, times[sampled]
            moved = moved.max(axis=1) if load.each else moved.sum(axis=1)
            ratios = moved / (lasted * (limit * 1e-9))
            found = time_histogram(ratios, lasted, load.histogram.bounds)
            put_histogram(tick, entity, load.histogram.name, found)
        for entity, gaps in self._gaps.items():
            ended = gaps.ended(tick, rows["gauges"][:, gaps.gauge], spans)
            tick.gaps.setdefault(entity, []).extend(ended)


class IdleGaps:
    """Follows the gaps of one GPU; `gauge` is the place of its activity in a row."""

    def __init__(self, gauge: int) -> None:
        self.gauge = gauge
        self._idle_ns: int | None = None  # so long by now; None: nobody knows since when

    def ended(self, tick: Tick, busy: npt.NDArray[np.float32], spans: Integers) -> list[float]:
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

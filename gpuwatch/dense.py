"""Cells of a ring whose rows come by the hundred in a tick: all columns at once, by arrays.

What is not plain (a cell that is not known, a counter that fell) goes the way of all other rings,
so both give the same windows. A column that is told of here is taken: the tick does not count it
again from a source that reads the same more seldom.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuwatch.cells import Cells, Part, shortest
from gpuwatch.loads import Fine, Loads, time_histogram
from gpuwatch.ring import RingSchema
from gpuwatch.signals import UNKNOWN_INTEGER, Kind
from gpuwatch.slots import Slots
from gpuwatch.window import Tick, Window, put, put_histogram


def is_dense(schema: RingSchema) -> bool:
    """Say whether a ring is to be summed up this way: hardware samples it, and counts."""
    kinds = {column.signal.kind for column in schema.columns}
    return bool(schema.delivery_ns) and Kind.COUNTER in kinds and Kind.BITS not in kinds


class DenseCells(Cells):
    """The columns of one ring, which may not be bit sets."""

    def __init__(self, schema: RingSchema) -> None:
        super().__init__(schema)
        self._loads = Loads(schema)

    def are_plain(self, tick: Tick) -> bool:
        """Return False: a tick without rows is unusual here."""
        return False

    def put(self, tick: Tick, rows: npt.NDArray[Any], spans: Sequence[int], slots: Slots) -> None:
        """Put the windows of the rows into the tick, to which the slots are turned."""
        part, stands = Part(tick, spans, sum(spans), slots), np.array(spans, np.int64)
        fine = Fine(
            np.diff(rows["time_ns"]),
            np.ascontiguousarray(rows["integers"].T),
            np.ascontiguousarray(rows["gauges"].T, np.float64),
            stands,
        )
        self._put_counters(part, fine)
        self._put_gauges(part, fine)
        self._loads.put(tick, fine, slots.period_ns)
        if len(rows) == 1:  # what was read before the tick stands for some of it
            return
        for entity, name in self._names:
            window = tick.window(entity, name)
            if window is not None and window.covered_ns:
                tick.taken.add((entity, name))
        for index, histogram in self._histograms.items():
            entity = self._names[index][0]
            found = tick.histograms.get(entity, {}).get(histogram.name)
            if found is not None and any(found.nanoseconds):
                tick.taken.add((entity, histogram.name))

    def _put_counters(self, part: Part, fine: Fine) -> None:
        counts = fine.counts
        plain = np.logical_and.reduce(fine.known, axis=1)
        for index, (first, last) in enumerate(counts[:, [0, -1]].tolist()):
            follows = self.last[index] in (first, UNKNOWN_INTEGER)
            if not plain[index] or not follows or first == UNKNOWN_INTEGER:
                self._put_counter(part, index, counts[index].tolist())
                continue
            self.last[index] = last
            caught, missed = part.slots.count(index)
            scale = self._columns[index].signal.scale
            window = Window(
                part.tick.start_ns,
                part.tick.end_ns,
                part.total_ns,
                caught,
                missed,
                first * scale,
                last * scale,
                0.0,
                last * scale,
                (last - first) * scale,
            )
            put(part.tick, *self._names[index], window)

    def _put_gauges(self, part: Part, fine: Fine) -> None:
        values, spans = fine.gauges, fine.spans
        if not spans.all():
            values, spans = values[:, spans > 0], spans[spans > 0]
        if not len(spans):
            for gauge, row in enumerate(fine.gauges.tolist(), self._integers):
                self._put_gauge(part, gauge, row)
            return
        rows = zip(
            values.min(axis=1).tolist(),
            values.max(axis=1).tolist(),
            (values * spans).sum(axis=1).tolist(),
            values[:, -1].tolist(),
            strict=True,
        )
        for gauge, (minimum, maximum, integral, last) in enumerate(rows):
            index = self._integers + gauge
            low, high = self._bounds[index]
            if not (low <= minimum and maximum <= high):  # so is what is no number
                self._put_gauge(part, index, fine.gauges[gauge].tolist())
                continue
            caught, missed = part.slots.count(index)
            window = Window(
                part.tick.start_ns,
                part.tick.end_ns,
                part.total_ns,
                caught,
                missed,
                shortest(minimum),
                shortest(maximum),
                integral,
                shortest(last),
            )
            entity, name = self._names[index]
            put(part.tick, entity, name, window)
            histogram = self._histograms.get(index)
            if histogram is not None:
                found = time_histogram(values[gauge], spans, histogram.bounds)
                put_histogram(part.tick, entity, histogram.name, found)

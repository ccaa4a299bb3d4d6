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
from gpuwatch.loads import Loads, time_histogram
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
        part = Part(tick, spans, sum(spans), slots)
        self._put_counters(part, rows["integers"])
        self._put_gauges(part, rows["gauges"])
        self._loads.put(tick, rows, np.array(spans, np.int64), slots.period_ns)
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

    def _put_counters(self, part: Part, counts: npt.NDArray[np.int64]) -> None:
        plain = (counts != UNKNOWN_INTEGER).all(axis=0) & (np.diff(counts, axis=0) >= 0).all(axis=0)
        for index, (is_plain, first, last) in enumerate(
            zip(plain.tolist(), counts[0].tolist(), counts[-1].tolist(), strict=True)
        ):
            if not is_plain or self._last[index] not in (first, UNKNOWN_INTEGER):
                self._put_counter(part, index, counts[:, index].tolist())
                continue
            self._last[index] = last
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

    def _put_gauges(self, part: Part, values: npt.NDArray[np.float32]) -> None:
        spans = np.array(part.spans, np.int64)
        stand = values[spans > 0].astype(np.float64)
        if not len(stand):
            for index, column in enumerate(values.T.tolist(), self._integers):
                self._put_gauge(part, index, column)
            return
        spans = spans[spans > 0]
        lowest, highest = stand.min(axis=0).tolist(), stand.max(axis=0).tolist()
        integrals = (stand * spans[:, None]).sum(axis=0).tolist()
        for gauge, (minimum, maximum, integral) in enumerate(
            zip(lowest, highest, integrals, strict=True)
        ):
            index = self._integers + gauge
            low, high = self._bounds[index]
            if not (low <= minimum and maximum <= high):  # so is what is no number
                self._put_gauge(part, index, values[:, gauge].tolist())
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
                shortest(float(stand[-1, gauge])),
            )
            entity, name = self._names[index]
            put(part.tick, entity, name, window)
            histogram = self._histograms.get(index)
            if histogram is not None:
                found = time_histogram(stand[:, gauge], spans, histogram.bounds)
                put_histogram(part.tick, entity, histogram.name, found)

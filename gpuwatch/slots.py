"""Slots: how many refreshes of each column of a ring were caught, and how many were not.

Time is cut, from the ring's first row on, into slots as long as a column's refresh (or the ring's
period, if that is longer). A slot with a known value in it is a sample, however many reads fell
into it; one without is missing.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpuwatch.window import Tick

MARGIN_NS = 1000  # a row's lateness is a float32: it may be due this much before its slot
MAX_LATE_SECONDS = 1e6  # as no sampler ever was: a foreign recording

Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Slots:
    """Counts the slots of one ring's columns; ticks come in order."""

    def __init__(self, refresh_ns: Integers) -> None:
        self.refresh_ns = refresh_ns  # by column; 0: each read is a refresh
        self.epoch_ns: int | None = None
        self._open = np.zeros(len(refresh_ns), np.bool_)  # whether the slot in progress has a value

    def none_ends(self, tick: Tick, period_ns: int) -> bool:
        """Say whether no column's slot ends in the tick; False before the first row."""
        if self.epoch_ns is None:
            return False
        widths = np.maximum(self.refresh_ns, period_ns)
        start, end = tick.start_ns - self.epoch_ns, tick.end_ns - self.epoch_ns
        return bool((start // widths == end // widths).all())

    def count(
        self, tick: Tick, rows: npt.NDArray[Any], known: Bools, period_ns: int
    ) -> tuple[Integers, Integers]:
        """Return, per column, slots that ended in the tick with and without a value.

        `known` is by row and column. A row belongs to the slot of the time it was due, so lateness
        does not lose a slot.
        """
        columns = known.shape[1]
        late = rows["late"].astype(np.float64)
        late = np.minimum(np.where(late > 0, late, 0.0), MAX_LATE_SECONDS)  # NaN counts as 0
        due = rows["time_ns"] - np.rint(late * 1e9).astype(np.int64)
        if self.epoch_ns is None:  # before its first row nobody planned to read
            if not len(due):
                return np.zeros(columns, np.int64), np.zeros(columns, np.int64)
            self.epoch_ns = int(due[0]) - MARGIN_NS
        due = due - self.epoch_ns
        widths = np.maximum(self.refresh_ns, period_ns)
        if columns and (widths == widths[0]).all():
            return self._count_alike(tick, due, known, int(widths[0]), slice(None))
        samples, missing = np.zeros(columns, np.int64), np.zeros(columns, np.int64)
        for width in np.unique(widths):
            alike = np.flatnonzero(widths == width)
            found = self._count_alike(tick, due, known[:, alike], int(width), alike)
            samples[alike], missing[alike] = found
        return samples, missing

    def _count_alike(
        self, tick: Tick, due: Integers, known: Bools, width: int, columns: slice | Integers
    ) -> tuple[Integers, Integers]:
        """Count for columns of one slot width."""
        assert self.epoch_ns is not None
        first = max(0, (tick.start_ns - self.epoch_ns) // width)
        end = (tick.end_ns - self.epoch_ns) // width
        edges = (due // width).searchsorted(np.arange(first, end + 2))
        sums = np.zeros((len(due) + 1, known.shape[1]), np.int64)
        known.cumsum(axis=0, out=sums[1:])
        caught = sums[edges[1:]] > sums[edges[:-1]]
        caught[0] |= self._open[columns]
        self._open[columns] = caught[-1]
        samples = caught[:-1].sum(axis=0)
        return samples, (end - first) - samples

"""Slots: how many refreshes of each column of a ring were caught, and how many were not.

Time is cut, from the ring's first row on, into slots as long as a column's refresh (or the ring's
period, if that is longer). A slot with a known value in it is a sample, however many reads fell
into it; one without is missing.
"""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from gpuwatch.clock import SECOND_NS

MANY = 64  # rows, of which arrays are faster than loops
MARGIN_NS = 1000  # a row's lateness is a float32: it may be due this much before its slot
MAX_LATE_SECONDS = 1e6  # no sampler ever was later: a foreign recording
NEVER = -1  # nanoseconds after the first row


class _Cut(NamedTuple):
    """A tick cut into slots of one width."""

    first: int  # the slot in progress at its start
    end: int  # and at its end
    rows: list[int]  # the slot of each row
    begun: dict[int, int]  # how many slots after this one have a row


NO_CUT = _Cut(0, 0, [], {})


class Slots:
    """Counts the slots of one ring's columns; ticks come in order.

    `idle`: no row came in the tick and no slot ended. `most_missing` is of any column. `period_ns`
    is the time between rows as of the latest turn.
    """

    def __init__(self, refresh_ns: Sequence[int]) -> None:
        self.epoch_ns: int | None = None
        self.idle = True
        self.most_missing = 0
        self._refresh_ns = list(refresh_ns)  # by column; 0: each read is a refresh
        self._newest = [NEVER] * len(refresh_ns)  # when the newest known value was due
        self.period_ns = 0
        self._widths: list[int] = []  # by column
        self._due: list[int] = []
        self._cuts: dict[int, _Cut] = {}
        self._next_ns = 0  # when the next slot ends

    def set_refresh(self, index: int, refresh_ns: int) -> None:
        """Take a column's refresh as it was measured."""
        self._refresh_ns[index] = refresh_ns
        self.period_ns = 0

    def rest(self) -> None:
        """Say that nobody plans to read until the next row comes."""
        self.epoch_ns, self.idle = None, True
        self._newest = [NEVER] * len(self._newest)

    def turn(
        self,
        start_ns: int,
        end_ns: int,
        times: Sequence[int],
        late: Sequence[float],
        period_ns: int,
    ) -> None:
        """Turn to the next stretch; its rows were read at `times`, so many seconds too late.

        A row belongs to the slot of the time it was due, so lateness does not lose a slot.
        """
        self.most_missing = 0
        if self.epoch_ns is None and not times:  # before its first row nobody planned to read
            return
        self.idle = not times and end_ns < self._next_ns and period_ns == self.period_ns
        if self.idle:
            return
        due = _due(times, late)
        if self.epoch_ns is None:
            self.epoch_ns = due[0] - MARGIN_NS
        if self.period_ns != period_ns:
            self.period_ns = period_ns
            self._widths = [max(refresh_ns, period_ns) for refresh_ns in self._refresh_ns]
            self._cuts = dict.fromkeys(self._widths, NO_CUT)
        start, end = start_ns - self.epoch_ns, end_ns - self.epoch_ns
        self._due = [time_ns - self.epoch_ns for time_ns in due]
        for width in self._cuts:
            rows = _divided(self._due, width)
            self._cuts[width] = _Cut(max(0, start // width), end // width, rows, {})
        ends = ((cut.end + 1) * width for width, cut in self._cuts.items())
        self._next_ns = self.epoch_ns + min(ends, default=0)

    def count(self, index: int, known: Sequence[bool] | None = None) -> tuple[int, int]:
        """Return a column's slots that ended in the tick with and without a value.

        `known` says of each row whether its cell is; None is all of them. To be called once a tick.
        """
        if self.idle:
            return 0, 0
        width = self._widths[index]
        first, end, slots, begun = self._cuts[width]
        due = self._due
        before = max(self._newest[index] // width, first - 1)
        if known is not None:
            slots, due, begun = list(compress(slots, known)), list(compress(due, known)), {}
        if before not in begun:
            begun[before] = len({slot for slot in slots if slot > before})
        if due:
            self._newest[index] = max(self._newest[index], due[-1])
        samples = begun[before] + (before >= first) - (self._newest[index] // width >= end)
        missing = end - first - samples
        self.most_missing = max(self.most_missing, missing)
        return samples, missing


def _due(times: Sequence[int], late: Sequence[float]) -> list[int]:
    """Return when each row was due."""
    if len(times) > MANY:
        seconds = np.array(late)
        seconds[~((seconds > 0) & (seconds < MAX_LATE_SECONDS))] = 0.0
        due: list[int] = (np.array(times) - np.rint(seconds * SECOND_NS).astype(np.int64)).tolist()
        return due
    return [
        time_ns - round(seconds * SECOND_NS) if 0 < seconds < MAX_LATE_SECONDS else time_ns
        for time_ns, seconds in zip(times, late, strict=True)
    ]


def _divided(due: list[int], width: int) -> list[int]:
    if len(due) > MANY:
        slots: list[int] = (np.array(due) // width).tolist()
        return slots
    return [time_ns // width for time_ns in due]

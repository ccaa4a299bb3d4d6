"""Increases of a counter by when they came: how much it rose over any span of the latest time."""

from bisect import bisect_right
from collections import deque
from operator import itemgetter


class Rises:
    """Keeps the increases of the latest `reach_ns`; what is younger than `delay_ns` is open yet.

    Only increases take room, so a day of a counter that rarely moves costs nothing. They are kept
    as totals so far, so that asking for a span takes no adding up.
    """

    def __init__(self, reach_ns: int, delay_ns: int = 0) -> None:
        self._reach_ns = reach_ns
        self._delay_ns = delay_ns
        self._end_ns = 0
        self._before = 0.0  # the total of what is older than the rows
        self._rows: deque[tuple[int, float]] = deque()

    def push(self, end_ns: int, increase: float) -> None:
        """Take the increase of the time up to `end_ns`."""
        rows = self._rows
        while rows and rows[-1][0] >= end_ns:  # data time went back: a recording began again
            rows.pop()
        while rows and rows[0][0] <= end_ns - self._reach_ns:
            self._before = rows.popleft()[1]
        if increase:
            rows.append((end_ns, (rows[-1][1] if rows else self._before) + increase))
        self._end_ns = end_ns

    def over(self, span_ns: int) -> float:
        """Return the increase over the latest span that is settled."""
        newest = self._end_ns - self._delay_ns
        return self._total(newest) - self._total(newest - span_ns)

    def _total(self, time_ns: int) -> float:
        """Return all increases up to a time."""
        index = bisect_right(self._rows, time_ns, key=itemgetter(0))
        return self._rows[index - 1][1] if index else self._before

    def drop_open(self) -> None:
        """Have what is open yet count for nothing."""
        while self._rows and self._rows[-1][0] > self._end_ns - self._delay_ns:
            self._rows.pop()

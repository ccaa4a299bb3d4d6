"""Increases of a counter by when they came: how much it rose over any span of the latest time."""

from collections import deque


class Rises:
    """Keeps the increases of the latest `reach_ns`; what is younger than `delay_ns` is open yet.

    Only increases take room, so a day of a counter that rarely moves costs nothing.
    """

    def __init__(self, reach_ns: int, delay_ns: int = 0) -> None:
        self._reach_ns = reach_ns
        self._delay_ns = delay_ns
        self._end_ns = 0
        self._rows: deque[tuple[int, float]] = deque()

    def push(self, end_ns: int, increase: float) -> None:
        """Take the increase of the time up to `end_ns`."""
        rows = self._rows
        while rows and rows[-1][0] >= end_ns:  # data time went back: a recording began again
            rows.pop()
        while rows and rows[0][0] <= end_ns - self._reach_ns:
            rows.popleft()
        if increase:
            rows.append((end_ns, increase))
        self._end_ns = end_ns

    def over(self, span_ns: int) -> float:
        """Return the increase over the latest span that is settled."""
        newest = self._end_ns - self._delay_ns
        oldest, total = newest - span_ns, 0.0
        for end_ns, increase in reversed(self._rows):
            if end_ns <= oldest:
                break
            if end_ns <= newest:
                total += increase
        return total

    def drop_open(self) -> None:
        """Have what is open yet count for nothing."""
        while self._rows and self._rows[-1][0] > self._end_ns - self._delay_ns:
            self._rows.pop()

"""A ledger: exact sums over the ticks of the latest minute, by key.

All integers: what is added is taken away exactly, so no sum can drift, and a key whose ticks have
passed is gone.
"""

from collections import deque
from collections.abc import Mapping

from gpuwatch.clock import SECOND_NS
from gpuwatch.window import Window

Key = tuple[str, str]
Row = dict[Key, int]
Windows = Mapping[str, Window]

WINDOW_NS = 60 * SECOND_NS
TIME: Key = ("time", "")  # nanoseconds that the sums are over


class Ledger:
    """Sums by key; `row` is what the newest tick has added to them."""

    __slots__ = ("_rows", "row", "sums")

    def __init__(self) -> None:
        self.sums: Row = {}
        self.row: Row = {}
        self._rows: deque[tuple[int, Row]] = deque()

    def turn(self, end_ns: int) -> None:
        """Begin the row of the next tick."""
        rows = self._rows
        while rows and rows[-1][0] >= end_ns:  # data time went back: a recording began again
            self._take(rows.pop()[1])
        while rows and rows[0][0] <= end_ns - WINDOW_NS:
            self._take(rows.popleft()[1])
        self.row = {}
        rows.append((end_ns, self.row))

    def put(self, key: Key, value: int, row: Row | None = None) -> None:
        """Add to the newest tick, or to the one of a row that is still within the minute."""
        if value:
            row = self.row if row is None else row
            row[key] = row.get(key, 0) + value
            self.sums[key] = self.sums.get(key, 0) + value

    def _take(self, row: Row) -> None:
        sums = self.sums
        for key, value in row.items():
            left = sums.get(key, 0) - value
            if left:
                sums[key] = left
            else:
                sums.pop(key, None)


def highest(windows: Windows, name: str) -> float | None:
    """Return a column's highest value in the tick, None if unknown."""
    window = windows.get(name)
    return None if window is None or not window.covered_ns else window.maximum


def risen(windows: Windows, name: str) -> int:
    """Return how much a counter rose in the tick, 0 if that is not known."""
    window = windows.get(name)
    return 0 if window is None else round(window.increase)

"""The burst: the highest rate of a counter between two reads, over the trailing minute."""

import math
from collections import deque

from gpuwatch.clock import SECOND_NS

REACH_SECONDS = 60
BRACKET = 10  # a read may take this part of the time since the last one, else it says no rate


class Burst:
    """Rates of one counter. Some devices renew it less often than it is read.

    A rise then belongs to all the time since the renewal before, which is known from how close
    together rises have come.
    """

    def __init__(self) -> None:
        self._count: int | None = None
        self._read_ns = 0
        self._rose_ns = 0
        self._renewal_ns: float = math.inf
        self._second = 0
        self._peaks: deque[tuple[int, float]] = deque()  # (second, rate), falling rates

    def add(self, start_ns: int, end_ns: int, count: int, limit: float) -> None:
        """Take a count that was read between two times; rates above `limit` are no rates."""
        now = (start_ns + end_ns) // 2
        if self._count is None:
            self._count, self._read_ns, self._rose_ns = count, now, now
            return
        since_read, since_rise = now - self._read_ns, now - self._rose_ns
        if (end_ns - start_ns) * BRACKET > since_read:
            return  # nobody knows when within the read it was counted
        rise, self._count, self._read_ns = count - self._count, count, now
        if not rise and now // SECOND_NS == self._second:
            return
        rate = 0.0
        if rise > 0:
            self._renewal_ns = min(self._renewal_ns, since_rise)
            rate = rise * SECOND_NS / min(since_rise, max(since_read, self._renewal_ns))
            self._rose_ns = now
        self._second = second = now // SECOND_NS
        peaks = self._peaks
        while peaks and peaks[0][0] <= second - REACH_SECONDS:
            peaks.popleft()
        if rate <= limit:
            while peaks and peaks[-1][1] <= rate:
                peaks.pop()
            peaks.append((second, rate))

    @property
    def peak(self) -> float:
        """The highest rate of the trailing minute up to the newest read; NaN before the second."""
        return self._peaks[0][1] if self._peaks else math.nan

"""Time. Everything runs on CLOCK_MONOTONIC; wall time is derived here and only when exporting."""

import time
from collections.abc import Sequence
from typing import NamedTuple

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000
STEP_NS = SECOND_NS  # realtime moving against monotonic by more than this is a step

monotonic_ns = time.monotonic_ns


class ClockTriple(NamedTuple):
    """The same instant on three clocks, in nanoseconds."""

    monotonic_ns: int
    realtime_ns: int
    boottime_ns: int

    def wall_ns(self, time_ns: int) -> int:
        """Return the wall time of the monotonic instant `time_ns`."""
        return self.realtime_ns + time_ns - self.monotonic_ns


def read_clocks() -> ClockTriple:
    """Read the three clocks as close together as Python can: monotonic before and after."""
    before = time.monotonic_ns()
    realtime = time.clock_gettime_ns(time.CLOCK_REALTIME)
    boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    after = time.monotonic_ns()
    return ClockTriple((before + after) // 2, realtime, boottime)


def wall_ns(triples: Sequence[ClockTriple], time_ns: int) -> int:
    """Return the wall time of `time_ns` by the newest triple not after it, else the oldest.

    `triples` are in order of time; at least one is needed.
    """
    best = triples[0]
    for triple in triples:
        if triple.monotonic_ns <= time_ns:
            best = triple
    return best.wall_ns(time_ns)


def wall_text(realtime_ns: int) -> str:
    """Return a wall time as people and logs write it, in UTC to a millisecond."""
    seconds, rest = divmod(realtime_ns, SECOND_NS)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1_000_000:03d}Z"


class ClockWatch:
    """Notices steps of the wall clock and suspends of the machine between two looks."""

    def __init__(self) -> None:
        self._last = read_clocks()

    def look(self) -> tuple[int, int]:
        """Return (step_ns, suspend_ns) since the last look; 0 when neither passed a second."""
        now = read_clocks()
        passed = now.monotonic_ns - self._last.monotonic_ns
        suspend = now.boottime_ns - self._last.boottime_ns - passed
        step = now.realtime_ns - self._last.realtime_ns - passed - suspend
        self._last = now
        return (
            step if abs(step) > STEP_NS else 0,
            suspend if suspend > STEP_NS else 0,
        )

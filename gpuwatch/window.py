"""Windows: what a column did in a tick of 250 ms of data time, and how windows merge.

Statistics are time-weighted; time without a known value is uncovered, never smoothed over.
`samples` counts the refreshes of the signal that were caught, so reading one value a hundred times
weighs nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpuwatch.signals import Entity, Event

TICK_NS = 250_000_000
STARTING_NS = 10_000_000_000  # no source is called down in the first seconds of all
LATE_PERIODS = 10  # a read this late is no longer one of its own time
BUSY_RATIO = 0.2  # above this share of activity a GPU is busy
ACTIVITY = ("gpu_sm_active_ratio", "gpu_utilization_ratio")  # the first that is known counts

Floats = npt.NDArray[np.float64]


# Not frozen: a tick has a thousand of them, and to make frozen ones takes several times as long.
@dataclass(slots=True)
class Window:
    """A column from `start_ns` up to `end_ns` on the monotonic clock; never changed once made.

    `covered_ns` is the time with a known value; `minimum`, `maximum` and `last` are NaN when there
    was none. `integral` is value x nanoseconds over the covered time. `samples` counts the
    refreshes caught and `missing` those that were not. `increase` is a counter's rise, or how
    often a bit was raised; 0 for gauges.
    """

    start_ns: int
    end_ns: int
    covered_ns: int
    samples: int
    missing: int
    minimum: float
    maximum: float
    integral: float
    last: float
    increase: float = 0.0

    @property
    def mean(self) -> float:
        """Time-weighted mean over the covered time, NaN if there is none."""
        return self.integral / self.covered_ns if self.covered_ns else math.nan

    @classmethod
    def steady(cls, start_ns: int, end_ns: int, value: float) -> "Window":
        """Return the window of a value known for all of the time."""
        span = end_ns - start_ns
        return cls(start_ns, end_ns, span, 1, 0, value, value, value * span, value)

    def merge(self, later: "Window") -> "Window":
        """Return the window over both; associative (sums exactly, integrals to 1e-12)."""
        return Window(
            start_ns=min(self.start_ns, later.start_ns),
            end_ns=max(self.end_ns, later.end_ns),
            covered_ns=self.covered_ns + later.covered_ns,
            samples=self.samples + later.samples,
            missing=self.missing + later.missing,
            minimum=_least(self.minimum, later.minimum),
            maximum=-_least(-self.maximum, -later.maximum),
            integral=self.integral + later.integral,
            last=self.last if math.isnan(later.last) else later.last,
            increase=self.increase + later.increase,
        )


def _least(one: float, other: float) -> float:
    if math.isnan(one):
        return other
    return one if math.isnan(other) or one <= other else other


class TimeHistogram(NamedTuple):
    """Nanoseconds spent in each bucket (one more than bounds), and value x nanoseconds."""

    nanoseconds: tuple[int, ...]
    integral: float

    def plus(self, other: "TimeHistogram") -> "TimeHistogram":
        """Return the histogram of both, which have the same bounds."""
        pairs = zip(self.nanoseconds, other.nanoseconds, strict=True)
        return TimeHistogram(tuple(map(sum, pairs)), self.integral + other.integral)


class Rows(NamedTuple):
    """The rows a ring delivered in a tick: how late each was and how long its read took."""

    duty: str
    source: str
    period_ns: int
    late_seconds: Floats
    read_seconds: Floats
    missing: int


@dataclass(slots=True)
class Tick:
    """Everything known about one tick of data time: what rules judge and metrics are made of.

    `links` are the entities that serve another one: the interfaces of an RDMA port. `gaps` are the
    seconds of each idle gap of a GPU that ended. `taken` are columns and histograms of which a
    source has told that samples finely: no other one counts them again.
    """

    start_ns: int
    end_ns: int
    windows: dict[Entity, dict[str, Window]] = field(default_factory=dict)
    constants: dict[Entity, dict[str, float]] = field(default_factory=dict)
    histograms: dict[Entity, dict[str, TimeHistogram]] = field(default_factory=dict)
    rows: list[Rows] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    links: Mapping[Entity, tuple[Entity, ...]] = field(default_factory=dict)
    gaps: dict[Entity, list[float]] = field(default_factory=dict)
    taken: set[tuple[Entity, str]] = field(default_factory=set)

    def window(self, entity: Entity, name: str) -> Window | None:
        """Return the window of a column, None if no ring has the column."""
        return self.windows.get(entity, {}).get(name)

    def constant(self, entity: Entity, name: str) -> float | None:
        """Return a value that does not change while the source is open, None if unknown."""
        return self.constants.get(entity, {}).get(name)

    def activity(self, entity: Entity) -> float | None:
        """Return the share of the tick in which a GPU worked, None if it is not known."""
        for name in ACTIVITY:
            window = self.window(entity, name)
            if window is not None and window.covered_ns:
                return window.mean
        return None

    def lateness(self, source: str) -> dict[str, Window]:
        """Return how many of a source's reads came late: a window over reads, not over time.

        Its covered "nanoseconds" are reads and its integral those that were late by more than ten
        periods, so windows of several ticks merge to the share of all reads. Empty if there were
        no reads.
        """
        rows = [rows for rows in self.rows if rows.source == source]
        reads = sum(len(part.late_seconds) for part in rows)
        if not reads:
            return {}
        late = sum(
            int(np.count_nonzero(part.late_seconds * 1e9 > LATE_PERIODS * part.period_ns))
            for part in rows
            if len(part.late_seconds)
        )
        share = late / reads
        window = Window(self.start_ns, self.end_ns, reads, reads, 0, share, share, late, share)
        return {"source_late_ratio": window}

    def busy(self, entity: Entity) -> bool:
        """Say whether a GPU worked for more than a fifth of the tick; not known is not busy."""
        return (self.activity(entity) or 0.0) > BUSY_RATIO


def put(tick: Tick, entity: Entity, name: str, window: Window) -> None:
    """Add a column's window to a tick; two feeders in one tick (a restarted child) add up."""
    windows = tick.windows.setdefault(entity, {})
    other = windows.get(name)
    windows[name] = other.merge(window) if other else window


def put_histogram(tick: Tick, entity: Entity, name: str, histogram: TimeHistogram) -> None:
    """Add time to a histogram of the tick."""
    histograms = tick.histograms.setdefault(entity, {})
    before = histograms.get(name)
    histograms[name] = before.plus(histogram) if before else histogram

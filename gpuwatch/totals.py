"""Totals: what only grows while the daemon lives, and what the trailing minute looked like.

Fed with every closed tick, in order of time. Time is kept as integer nanoseconds and divided when
it is shown, so nothing is lost to rounding and no total falls; the one exception is a hardware
counter, which is passed through and falls when the hardware resets it: that is an event.
"""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gpuwatch.clock import SECOND_NS, read_clocks
from gpuwatch.kernel_log import PCIE_ERROR, XID, told
from gpuwatch.pm_signals import GPC_CLOCK, IDLE_GAPS, LOADS
from gpuwatch.signals import Column, Entity, Event, Kind, Total, column_name
from gpuwatch.window import TICK_NS, Floats, Rows, Tick, TimeHistogram, Window

TRAILING_TICKS = 60 * SECOND_NS // TICK_NS

SM_CLOCK = 'gpu_clock_hertz{clock="sm"}'
LIVE_CLOCK = column_name(*GPC_CLOCK)  # the same as hardware counters tell it
SM_CLOCK_LIMIT = 'gpu_clock_limit_hertz{clock="sm"}'

DURATION_BOUNDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 1.0)
COUNTERS_RESET = "counters_reset"
LOAD_BOUNDS = {load.histogram.name: load.histogram.bounds for load in LOADS}
NOTHING = (math.nan, math.nan, 0.0, 0.0)  # minimum, maximum, integral, covered nanoseconds

Key = tuple[Entity, str]


@lru_cache(maxsize=1024)
def seconds_name(bit: str) -> str:
    """Return the column that a driver's count of a bit's time has.

    For `gpu_throttle_active{reason="sync_boost"}` it is
    `gpu_throttle_seconds_total{reason="sync_boost"}`.
    """
    stem, brace, label = bit.partition("{")
    return f"{stem.removesuffix('_active')}_seconds_total{brace}{label}"


class Statistics(NamedTuple):
    """A column over the trailing 60 s of data time: extremes and time-weighted mean."""

    minimum: float
    maximum: float
    mean: float


class Durations:
    """A histogram that counts events by how long each took, in seconds."""

    def __init__(self, bounds: tuple[float, ...] = DURATION_BOUNDS) -> None:
        self.bounds = bounds
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(self.bounds) + 1, np.int64)
        self._sum_ns = 0

    def add(self, seconds: Floats) -> None:
        """Count durations; what is not finite is left out, below 0 counts as 0."""
        seconds = np.maximum(seconds[np.isfinite(seconds)], 0.0)
        buckets = self._bounds.searchsorted(seconds)
        self._counts = self._counts + np.bincount(buckets, minlength=len(self._counts))
        self._sum_ns += int((seconds * SECOND_NS).astype(np.int64).sum())

    @property
    def cumulative(self) -> list[int]:
        """Events at or below each bound, then all of them."""
        counts: list[int] = self._counts.cumsum().tolist()
        return counts

    @property
    def sum(self) -> float:
        """Seconds of all events together."""
        return self._sum_ns / SECOND_NS


class TimeShares:
    """A histogram of time: every microsecond with a known value counts as one observation."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._total = TimeHistogram((0,) * (len(bounds) + 1), 0.0)

    def add(self, histogram: TimeHistogram) -> None:
        """Add the time of one tick."""
        self._total = self._total.plus(histogram)

    @property
    def cumulative(self) -> list[int]:
        """Whole microseconds at or below each bound, then all; the remainder stays in `self`."""
        total = 0
        return [(total := total + time) // 1000 for time in self._total.nanoseconds]

    @property
    def sum(self) -> float:
        """Value x microseconds."""
        return self._total.integral / 1000


class Trailing:
    """The windows of the last minute of chosen columns: one array row a tick, used in turn."""

    def __init__(self) -> None:
        self._index: dict[Key, int] = {}
        self._windows = np.empty((len(NOTHING), TRAILING_TICKS, 0))
        self._last_tick = 0
        self._statistics: list[Statistics] = []

    def attach(self, entity: Entity, name: str) -> None:
        """Follow one more column."""
        if (entity, name) not in self._index:
            self._index[entity, name] = len(self._index)
            self._windows = np.pad(self._windows, ((0, 0), (0, 0), (0, 1)))
            self._windows[:, :, -1] = np.reshape(NOTHING, (-1, 1))

    def add(self, tick: Tick) -> None:
        """Take in a tick; ticks left out since the last one count as not covered."""
        if not self._index:
            return
        number = tick.end_ns // TICK_NS
        if number < self._last_tick:
            self._last_tick = number - TRAILING_TICKS  # time began anew: forget everything
        oldest_new = max(self._last_tick, number - TRAILING_TICKS) + 1
        passed = np.arange(oldest_new, number + 1) % TRAILING_TICKS
        self._windows[:, passed] = np.reshape(NOTHING, (-1, 1, 1))
        self._last_tick = number
        found = [
            (one.minimum, one.maximum, one.integral, one.covered_ns)
            if one is not None and one.covered_ns
            else NOTHING
            for one in (tick.window(entity, name) for entity, name in self._index)
        ]
        self._windows[:, number % TRAILING_TICKS] = np.transpose(found)
        minimum, maximum, integral, covered = self._windows
        covered = covered.sum(axis=0)
        known = np.where(covered > 0, covered, math.nan)
        rows = zip(
            np.fmin.reduce(minimum).tolist(),
            np.fmax.reduce(maximum).tolist(),
            (integral.sum(axis=0) / known).tolist(),
            strict=True,
        )
        self._statistics = [Statistics(*row) for row in rows]

    def get(self, entity: Entity, name: str) -> Statistics | None:
        """Return the statistics of a column, None while it has no known value in the minute."""
        index = self._index.get((entity, name), len(self._statistics))
        if index >= len(self._statistics) or math.isnan(self._statistics[index].mean):
            return None
        return self._statistics[index]


class BitTotal(NamedTuple):
    """How long one bit was set, and how often it was raised."""

    active_ns: int = 0
    events: int = 0


@dataclass(frozen=True, slots=True)
class EventTotal:
    """How often something was told since the daemon's start, and the wall time of the last."""

    count: int = 0
    last_seconds: float = 0.0


class Totals:
    """Everything that grows, by entity and column name; only `add` and `note` change it.

    `bits`: one per reason of a bit set. `lost_clock_ns`: clock withheld while the GPU was busy,
    as time at the full clock; absent while the clock's limit is not known. `counters`: in their
    unit, as their signal's `total` says, NaN before the first value. `uncovered_ns`: time of
    which a counter does not know what happened. `shares`: time histograms, by the histogram's
    name. `gaps`: how long the idle gaps of a GPU were. `late` by duty, `read` and `missing` by
    source; `events` by event name. `xids` by code and `pcie_errors` by severity: what the
    kernel log told.

    Events from before `since_ns`, the daemon's start, are not counted.
    """

    def __init__(self, since_ns: int = 0) -> None:
        self._since_ns = since_ns
        self.xids: dict[Key, EventTotal] = {}
        self.pcie_errors: dict[Key, EventTotal] = {}
        self.bits: dict[Key, BitTotal] = {}
        self.lost_clock_ns: dict[Entity, int] = {}
        self.counters: dict[Key, float] = {}
        self.uncovered_ns: dict[Key, int] = {}
        self._totals: defaultdict[Entity, dict[str, Total]] = defaultdict(dict)
        self._covered: defaultdict[Entity, dict[str, set[str]]] = defaultdict(dict)  # by ring
        self._carried: dict[Key, float] = {}  # what is added to what a later sampler counts
        self.shares: dict[Key, TimeShares] = {}
        self.gaps: dict[Entity, Durations] = {}
        self.late: dict[str, Durations] = {}
        self.read: dict[str, Durations] = {}
        self.missing: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.trailing = Trailing()
        self.bit_seconds: set[Key] = set()  # counters whose increase is in `bits`
        self._bit_prefixes: dict[Entity, tuple[str, ...]] = {}

    def attach(self, columns: Iterable[Column], ring: str = "") -> None:
        """Start following columns, declared values at 0; those known already stay as they are.

        What a ring of that name had before and has not now is not read any more, and not missed.
        """
        covered: defaultdict[Entity, set[str]] = defaultdict(set)
        for column in columns:
            entity, signal, label = column
            if signal.kind is Kind.COUNTER:
                self.counters.setdefault((entity, column.name), math.nan)
                self._totals[entity][column.name] = signal.total
                if signal.total is Total.COVERED:
                    covered[entity].add(column.name)
            elif signal.kind is Kind.BITS:
                prefix = signal.name + "{"
                known = self._bit_prefixes.get(entity, ())
                self._bit_prefixes[entity] = tuple(dict.fromkeys((*known, prefix)))
                for _, value in signal.bits:
                    name = column_name(signal, value)
                    self.bits.setdefault((entity, name), BitTotal())
                    self.bit_seconds.add((entity, seconds_name(name)))
            if label in signal.statistics:
                self.trailing.attach(entity, column.name)
            histogram = signal.histogram
            if histogram is not None and histogram.label == label:
                self.shares.setdefault((entity, histogram.name), TimeShares(histogram.bounds))
        for entity, names in covered.items():
            rings = self._covered[entity]
            gone = rings.get(ring, set()) - names
            rings[ring] = names
            for name in gone.difference(*rings.values()):
                del self._totals[entity][name]

    def note(self, events: Iterable[Event]) -> None:
        """Take in what the kernel log told, also what was told to an earlier daemon."""
        counts = {XID: self.xids, PCIE_ERROR: self.pcie_errors}
        for event in events:
            said = told(event.detail) if event.name in counts else None
            if said is not None:
                totals, key = counts[event.name], (event.entity, said.code)
                before = totals.get(key, EventTotal())
                times = said.times if event.time_ns >= self._since_ns else 0
                seconds = read_clocks().wall_ns(event.time_ns) / SECOND_NS
                totals[key] = EventTotal(before.count + times, max(seconds, before.last_seconds))

    def frozen(self) -> "Totals":
        """Return the totals as they are now, for another thread to read at leisure."""
        found = copy.copy(self)
        found.xids, found.pcie_errors = self.xids.copy(), self.pcie_errors.copy()
        found.bits, found.lost_clock_ns = self.bits.copy(), self.lost_clock_ns.copy()
        found.counters, found.uncovered_ns = self.counters.copy(), self.uncovered_ns.copy()
        found.missing, found.events = self.missing.copy(), self.events.copy()
        found.shares = {key: copy.copy(shares) for key, shares in self.shares.items()}
        found.gaps = {entity: copy.copy(gaps) for entity, gaps in self.gaps.items()}
        found.late = {duty: copy.copy(late) for duty, late in self.late.items()}
        found.read = {source: copy.copy(read) for source, read in self.read.items()}
        found.trailing = copy.copy(self.trailing)
        return found

    def add(self, tick: Tick) -> list[Event]:
        """Take in a closed tick; return an event for each entity whose totals had to fall."""
        fell = self._add_counters(tick)
        self._add_bits(tick)
        for entity, windows in tick.windows.items():
            live = windows.get(LIVE_CLOCK)
            clock = live if live and live.covered_ns else windows.get(SM_CLOCK)
            self._add_lost_clock(tick, entity, clock)
        for entity, histograms in tick.histograms.items():
            for name, histogram in histograms.items():
                if name in LOAD_BOUNDS:  # once there is one: it wants the limit, too
                    self.shares.setdefault((entity, name), TimeShares(LOAD_BOUNDS[name]))
                if (entity, name) in self.shares:
                    self.shares[entity, name].add(histogram)
        for entity, gaps in tick.gaps.items():
            self.gaps.setdefault(entity, Durations(IDLE_GAPS.bounds)).add(np.array(gaps))
        self._add_rows(tick.rows)
        self.events.update(event.name for event in tick.events)
        self.trailing.add(tick)
        return [
            Event(tick.end_ns, entity, COUNTERS_RESET, ", ".join(names))
            for entity, names in fell.items()
        ]

    def _add_rows(self, rows: Iterable[Rows]) -> None:
        late: defaultdict[str, list[Floats]] = defaultdict(list)
        read: defaultdict[str, list[Floats]] = defaultdict(list)
        for part in rows:
            late[part.duty].append(part.late_seconds)
            read[part.source].append(part.read_seconds)
            self.missing[part.source] += part.missing
        for durations, added in ((self.late, late), (self.read, read)):
            for name, seconds in added.items():
                durations.setdefault(name, Durations()).add(np.concatenate(seconds))

    def _add_counters(self, tick: Tick) -> dict[Entity, list[str]]:
        """Take in counters; return the names of those that the hardware has reset."""
        fell: defaultdict[Entity, list[str]] = defaultdict(list)
        tick_ns = tick.end_ns - tick.start_ns
        for entity, totals in self._totals.items():
            windows = tick.windows.get(entity, {})
            for name, kind in totals.items():
                key, window = (entity, name), windows.get(name)
                if window is not None and not math.isnan(window.last):
                    before, total = self.counters[key], window.last
                    if kind is not Total.HARDWARE:
                        total = self._total(key, kind, before, window)
                    elif total < before:
                        fell[entity].append(name)
                    self.counters[key] = total
                if kind is Total.COVERED and not math.isnan(self.counters[key]):
                    covered_ns = window.covered_ns if window else 0
                    before_ns = self.uncovered_ns.get(key, 0)
                    self.uncovered_ns[key] = before_ns + tick_ns - covered_ns
        return fell

    def _total(self, key: Key, kind: Total, before: float, window: Window) -> float:
        """Return what a counter that never falls is now that its window has a value."""
        since = 0.0 if math.isnan(before) else before
        if kind is not Total.CARRIED:
            return since + window.increase
        total = window.last + self._carried.get(key, 0.0)
        if total < since:  # a new sampler has begun with the hardware's number
            total = since + window.increase
            self._carried[key] = total - window.last
        return total

    def _add_bits(self, tick: Tick) -> None:
        for entity, prefixes in self._bit_prefixes.items():
            windows = tick.windows.get(entity, {})
            for name, window in windows.items():
                if name.startswith(prefixes):
                    active_ns, events = self.bits.get((entity, name), BitTotal())
                    # The driver's own count of the same time is better, where it has one.
                    driver = seconds_name(name)
                    if math.isnan(self.counters.get((entity, driver), math.nan)):
                        active_ns += int(window.integral)
                    elif driver in windows:
                        active_ns += round(windows[driver].increase * SECOND_NS)
                    events += int(window.increase)
                    self.bits[entity, name] = BitTotal(active_ns, events)

    def _add_lost_clock(self, tick: Tick, entity: Entity, clock: Window | None) -> None:
        limit = tick.constant(entity, SM_CLOCK_LIMIT)
        if clock is None or not limit:
            return
        lost = 0
        if tick.busy(entity):
            # Above the limit (a clock read while it was being changed) is not a gain.
            lost = max(0, round(clock.covered_ns - clock.integral / limit))
        self.lost_clock_ns[entity] = self.lost_clock_ns.get(entity, 0) + lost

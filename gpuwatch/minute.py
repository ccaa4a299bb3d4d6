"""The minute: what a view of the node draws of the last 60 s, second by second.

Kept beside the windows because a view that begins to look wants the minute before it at once, and
because a rate needs more than the newest value. Fed with every closed tick, in order of time.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from gpuwatch.clock import SECOND_NS, read_clocks
from gpuwatch.gpu_signals import (
    CLOCK,
    NVLINK_RECEIVED,
    NVLINK_TRANSMITTED,
    PCIE_RECEIVED,
    PCIE_TRANSMITTED,
    POWER,
    REASONS,
    THROTTLE,
)
from gpuwatch.host_signals import IO_READ, IO_WRITTEN, PRESSURE
from gpuwatch.network_signals import DIRECTIONS
from gpuwatch.signals import Column, Entity, Kind, column_name
from gpuwatch.window import Tick

SECONDS = 60
QUIET_NS = 2 * SECOND_NS  # a counter that has not risen for so long stands still
SHOWN = frozenset(
    {
        *(signal.name for signal in (POWER, THROTTLE, IO_READ, IO_WRITTEN, PRESSURE)),
        *(signal.name for signal in (NVLINK_RECEIVED, NVLINK_TRANSMITTED)),
        *(signal.name for signal in (PCIE_RECEIVED, PCIE_TRANSMITTED)),
        *(f"rdma_port_data_{direction}_bytes_total" for direction in DIRECTIONS),
    }
)
SHOWN_CLOCKS = frozenset({"sm"})
NO_FAULTS = frozenset({"gpu_idle", "applications_clocks", "display_clocks"})
PROCESSOR_TIME = "process_cpu_seconds_total"  # of a duty

Key = tuple[Entity, str]


class Minute:
    """Means of gauges, shares of bits and rates of counters in each of the last 60 seconds."""

    def __init__(self) -> None:
        self._index: dict[Key, int] = {}
        self._counters: list[Key] = []
        self._others: list[Key] = []
        self._sums = np.zeros((SECONDS, 0))  # value x nanoseconds
        self._known_ns = np.zeros((SECONDS, 0))
        self._end_ns = 0  # of the newest tick
        self._since_ns: dict[Key, int] = {}  # up to when it is known how a counter rose
        self._processor_seconds: dict[str, float] = {}

    @property
    def _second(self) -> int:
        return (self._end_ns - 1) // SECOND_NS

    def attach(self, columns: Iterable[Column]) -> None:
        """Follow those of the columns that are shown."""
        for entity, signal, label in columns:
            if signal.kind is Kind.BITS and signal.name in SHOWN:
                reasons = [reason for _, reason in REASONS if reason not in NO_FAULTS]
                for reason in reasons:
                    self._follow((entity, column_name(signal, reason)), self._others)
            elif signal.name in SHOWN or (signal.name == CLOCK.name and label in SHOWN_CLOCKS):
                counter = signal.kind is Kind.COUNTER
                key = (entity, column_name(signal, label))
                self._follow(key, self._counters if counter else self._others)

    def add(self, tick: Tick) -> None:
        """Take in a closed tick."""
        self._turn(tick.end_ns)
        row = self._second % SECONDS
        for entity, name in self._others:
            window = tick.window(entity, name)
            if window is not None and window.covered_ns:
                index = self._index[entity, name]
                self._sums[row, index] += window.integral
                self._known_ns[row, index] += window.covered_ns
        for key in self._counters:
            window = tick.window(*key)
            if window is None or math.isnan(window.last):
                self._since_ns.pop(key, None)
            else:
                self._rise(key, window.increase)

    def add_processor_time(self, duty: str, seconds: float) -> None:
        """Take in how much CPU time a duty has used until the newest tick."""
        key = (Entity("duty", duty), PROCESSOR_TIME)
        self._follow(key, [])
        before = self._processor_seconds.get(duty, seconds)
        self._processor_seconds[duty] = seconds
        self._rise(key, seconds - before)

    def series(self) -> dict[str, Any]:
        """Return {"start", "end", "step", "series"} as `/api/v1/series` does, means alone.

        Times are unix seconds; a value is None where nothing is known.
        """
        order = [(self._second + 1 + place) % SECONDS for place in range(SECONDS)]
        known = self._known_ns[order]
        means = np.where(known > 0, self._sums[order] / np.maximum(known, 1.0), math.nan)
        means = np.where(np.abs(means) < 1e6, means.round(4), means.round())
        rows = [[None if x != x else x for x in row] for row in means.T.tolist()]
        end = read_clocks().wall_ns((self._second + 1) * SECOND_NS) / SECOND_NS
        return {
            "start": end - SECONDS,
            "end": end,
            "step": 1.0,
            "series": [
                {"entity": list(entity), "name": name, "mean": rows[index]}
                for (entity, name), index in self._index.items()
            ],
        }

    def _follow(self, key: Key, group: list[Key]) -> None:
        if key not in self._index:
            self._index[key] = len(self._index)
            self._sums = np.pad(self._sums, ((0, 0), (0, 1)))
            self._known_ns = np.pad(self._known_ns, ((0, 0), (0, 1)))
            group.append(key)

    def _turn(self, end_ns: int) -> None:
        """Begin the second in which the tick lies, and forget what is older than a minute."""
        before, second = self._second, (end_ns - 1) // SECOND_NS
        if second < before:  # time began anew
            before = second - SECONDS
            self._since_ns.clear()
        passed = np.arange(max(before, second - SECONDS) + 1, second + 1) % SECONDS
        self._sums[passed] = 0.0
        self._known_ns[passed] = 0.0
        self._end_ns = end_ns

    def _rise(self, key: Key, amount: float) -> None:
        """Spread a counter's rise over the time since it rose last.

        Of a counter that is read once a second three ticks of four know nothing new: that is no
        rate of 0.
        """
        # What rose before the first look is of a time of which nothing is known.
        start_ns = self._since_ns.setdefault(key, self._end_ns)
        span_ns = self._end_ns - start_ns
        if span_ns <= 0 or (not amount and span_ns < QUIET_NS):
            return
        self._since_ns[key] = self._end_ns
        index, rate = self._index[key], amount / span_ns * SECOND_NS
        start_ns = max(start_ns, (self._second - SECONDS + 1) * SECOND_NS)
        while start_ns < self._end_ns:
            second = start_ns // SECOND_NS
            part_ns = min(self._end_ns, (second + 1) * SECOND_NS) - start_ns
            self._sums[second % SECONDS, index] += rate * part_ns
            self._known_ns[second % SECONDS, index] += part_ns
            start_ns += part_ns

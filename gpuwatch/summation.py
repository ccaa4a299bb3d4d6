"""Summation: the rows of a ring become windows, tick by tick.

A value holds until the next read, at most two periods; after that its time is uncovered. Samples
are counted in slots of the signal's refresh, as declared and then as measured.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuwatch.calibration import RefreshEstimator
from gpuwatch.clock import SECOND_NS
from gpuwatch.ring import RingSchema
from gpuwatch.signals import UNKNOWN_INTEGER, Column, Kind, column_name
from gpuwatch.slots import Bools, Integers, Slots
from gpuwatch.window import Floats, Rows, Tick, TimeHistogram, Window, put

HOLD_PERIODS = 2
CALIBRATION_TICKS = 40

MOST = np.iinfo(np.int64).max
FINITE = (-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max))


def row_dtype(schema: RingSchema) -> np.dtype[Any]:
    """Return the numpy layout of a ring's rows, as `RingSchema.row_format` packs them."""
    integers = 16
    gauges = integers + 8 * schema.integers
    sequence = gauges + 4 * (schema.gauges + schema.gauges % 2)
    return np.dtype(
        {
            "names": ["time_ns", "late", "read", "integers", "gauges", "sequence"],
            "formats": [
                "<i8",
                "<f4",
                "<f4",
                ("<i8", (schema.integers,)),
                ("<f4", (schema.gauges,)),
                "<i8",
            ],
            "offsets": [0, 8, 12, integers, gauges, sequence],
            "itemsize": sequence + 8,
        }
    )


class RingWindows:
    """Turns the rows of one ring into windows; rows come in order, ticks are closed in order."""

    def __init__(self, schema: RingSchema) -> None:
        self.schema = schema
        self.period_ns = schema.period_ns
        self._dtype = row_dtype(schema)
        self._pending = np.empty(0, self._dtype)
        self._held = np.empty(0, self._dtype)  # the last row before the tick to come
        self._integer_columns = schema.columns[: schema.integers]
        self._gauge_columns = schema.columns[schema.integers :]
        bounds = [column.signal.bounds or FINITE for column in self._gauge_columns]
        self._low = np.array([low for low, _ in bounds], np.float64)
        self._high = np.array([high for _, high in bounds], np.float64)
        self._is_bits = np.array(
            [c.signal.kind is Kind.BITS for c in self._integer_columns], np.bool_
        )
        self._bits: list[int] = np.flatnonzero(self._is_bits).tolist()
        self._is_plain = not self._bits and not any(
            column.signal.histogram for column in schema.columns
        )
        self._last_integers = np.full(schema.integers, UNKNOWN_INTEGER, np.int64)
        self._unknown_bits: dict[int, set[int]] = {}
        self._slots = Slots(
            np.array([int(c.signal.refresh_seconds * SECOND_NS) for c in schema.columns], np.int64)
        )
        self._estimator = RefreshEstimator(schema.gauges)
        self._ticks = 0
        self.achieved_seconds: float | None = None  # time between rows in the newest tick

    def refresh_seconds(self) -> dict[Column, float]:
        """Return the refresh of each gauge that calibration has measured."""
        found = {}
        for index, column in enumerate(self._gauge_columns):
            refresh = self._estimator.refresh_ns(index)
            if refresh is not None:
                found[column] = refresh / SECOND_NS
        return found

    @property
    def newest_ns(self) -> int | None:
        """Time of the newest row there was, None before the first."""
        rows = self._pending if len(self._pending) else self._held
        return int(rows["time_ns"][-1]) if len(rows) else None

    @property
    def oldest_ns(self) -> int | None:
        """Time of the first row not yet closed, None if there is none."""
        return int(self._pending["time_ns"][0]) if len(self._pending) else None

    def add(self, rows: bytes) -> npt.NDArray[Any]:
        """Take rows as the ring reader returns them; return them as a structured array."""
        array = np.frombuffer(rows, self._dtype)
        self._pending = np.concatenate([self._pending, array]) if len(self._pending) else array
        return array

    def close(self, tick: Tick) -> None:
        """Sum up the rows before the tick's end and put the windows into the tick."""
        if self._is_steady(tick):
            self._close_steady(tick)
            return
        split = int(np.searchsorted(self._pending["time_ns"], tick.end_ns))
        fresh, self._pending = self._pending[:split], self._pending[split:]
        rows = np.concatenate([self._held, fresh])
        if len(rows):
            self._held = rows[-1:]
        times = rows["time_ns"].astype(np.int64)
        limits = times + HOLD_PERIODS * self.period_ns
        ends = np.minimum(np.append(times[1:], tick.end_ns), np.minimum(limits, tick.end_ns))
        spans = np.maximum(ends - np.maximum(times, tick.start_ns), 0)

        gauges = rows["gauges"].astype(np.float64)
        known = (gauges >= self._low) & (gauges <= self._high)
        integers = rows["integers"]
        known_integers = (integers != UNKNOWN_INTEGER) & ~(self._is_bits & _is_marker(integers))
        known_cells = np.concatenate([known_integers, known], axis=1)
        samples, missing = self._slots.count(tick, rows, known_cells, self.period_ns)
        split = self.schema.integers
        self._calibrate(fresh)
        if self.schema.gauges:
            self._close_gauges(tick, gauges, known, spans, samples[split:], missing[split:])
        for index in self._bits:
            cells = (integers[:, index], known_integers[:, index], spans)
            counts = (int(samples[index]), int(missing[index]))
            self._close_bits(tick, index, self._integer_columns[index], *cells, *counts)
        if self.schema.integers > len(self._bits):
            self._close_counters(tick, integers, known_integers, spans, samples, missing)
        tick.rows.append(
            Rows(
                self.schema.duty,
                self.schema.source,
                self.period_ns,
                fresh["late"].astype(np.float64),
                fresh["read"].astype(np.float64),
                int(missing.max(initial=0)) if not len(fresh) else self._skipped(tick, fresh),
            )
        )

    def _is_steady(self, tick: Tick) -> bool:
        """Say whether the held row stands for all of the tick, and no slot ends in it."""
        if not len(self._held) or not self._is_plain:
            return False
        if len(self._pending) and self._pending["time_ns"][0] < tick.end_ns:
            return False
        time_ns = int(self._held["time_ns"][0])
        if time_ns > tick.start_ns or time_ns + HOLD_PERIODS * self.period_ns < tick.end_ns:
            return False
        return self._slots.none_ends(tick, self.period_ns)

    def _close_steady(self, tick: Tick) -> None:
        """Put the windows of a tick without a row: most ticks of a slow ring."""
        row, start_ns, end_ns = self._held[0], tick.start_ns, tick.end_ns
        span = end_ns - start_ns
        for column, count in zip(self._integer_columns, row["integers"].tolist(), strict=True):
            known = count != UNKNOWN_INTEGER
            last = float(count) * column.signal.scale if known else math.nan
            covered = span if known else 0
            window = Window(start_ns, end_ns, covered, 0, 0, last, last, 0.0, last)
            put(tick, column.entity, column.name, window)
        gauges = row["gauges"]
        known_gauges = (gauges >= self._low) & (gauges <= self._high)
        for index, column in enumerate(self._gauge_columns):
            value = _shortest(gauges[index]) if known_gauges[index] else math.nan
            covered = span if known_gauges[index] else 0
            integral = float(gauges[index]) * covered if covered else 0.0
            window = Window(start_ns, end_ns, covered, 0, 0, value, value, integral, value)
            put(tick, column.entity, column.name, window)
        self._calibrate(self._pending[:0])
        nothing = np.empty(0)
        tick.rows.append(
            Rows(self.schema.duty, self.schema.source, self.period_ns, nothing, nothing, 0)
        )

    def _calibrate(self, fresh: npt.NDArray[Any]) -> None:
        """Count samples by measured refreshes; they are looked at anew every few seconds."""
        self._estimator.add(fresh["time_ns"], fresh["gauges"], self.period_ns)
        if len(fresh) > 1:
            span = int(fresh["time_ns"][-1] - fresh["time_ns"][0])
            self.achieved_seconds = span / (len(fresh) - 1) / SECOND_NS
        self._ticks += 1
        if self._ticks % CALIBRATION_TICKS:
            return
        for index in range(self.schema.gauges):
            refresh = self._estimator.refresh_ns(index)
            if refresh is not None:
                self._slots.refresh_ns[self.schema.integers + index] = refresh

    def _skipped(self, tick: Tick, fresh: npt.NDArray[Any]) -> int:
        """Return how many planned reads of the tick did not happen."""
        start_ns = max(tick.start_ns, self._slots.epoch_ns or 0)
        return max(0, (tick.end_ns - start_ns) // self.period_ns - len(fresh))

    def _close_gauges(
        self,
        tick: Tick,
        values: Floats,
        known: Bools,
        spans: Integers,
        samples: Integers,
        missing: Integers,
    ) -> None:
        weights = spans[:, None] * known
        live = weights > 0
        covered = weights.sum(axis=0)
        integrals = (np.where(known, values, 0.0) * weights).sum(axis=0)
        minimum = np.where(live, values, np.inf).min(axis=0, initial=np.inf)
        maximum = np.where(live, values, -np.inf).max(axis=0, initial=-np.inf)
        for index, column in enumerate(self._gauge_columns):
            seen = covered[index] > 0
            rows = np.flatnonzero(live[:, index])
            put(
                tick,
                column.entity,
                column.name,
                Window(
                    tick.start_ns,
                    tick.end_ns,
                    int(covered[index]),
                    int(samples[index]),
                    int(missing[index]),
                    _shortest(minimum[index]) if seen else math.nan,
                    _shortest(maximum[index]) if seen else math.nan,
                    float(integrals[index]),
                    _shortest(values[rows[-1], index]) if seen else math.nan,
                ),
            )
            histogram = column.signal.histogram
            if histogram is not None and histogram.label == column.label:
                buckets = np.searchsorted(histogram.bounds, values[rows, index])
                counts = np.bincount(
                    buckets, weights[rows, index].astype(np.float64), len(histogram.bounds) + 1
                )
                old = tick.histograms.setdefault(column.entity, {}).get(histogram.name)
                total = counts.astype(np.int64) + (old.nanoseconds if old else 0)
                tick.histograms[column.entity][histogram.name] = TimeHistogram(
                    tuple(total.tolist()), float(integrals[index]) + (old.integral if old else 0.0)
                )

    def _close_bits(
        self,
        tick: Tick,
        index: int,
        column: Column,
        values: Integers,
        known: Bools,
        spans: Integers,
        samples: int,
        missing: int,
    ) -> None:
        bits = list(column.signal.bits)
        bits += self._bits_not_declared(index, column, values[known])
        weights = spans * known
        covered = int(weights.sum())
        live = weights > 0
        states = values[known]
        first = self._last_integers[index]
        steps = (
            np.concatenate([[first if first != UNKNOWN_INTEGER else states[0]], states])
            if (len(states))
            else states
        )
        if len(states):
            self._last_integers[index] = states[-1]
        raised = ~steps[:-1] & steps[1:]
        for bit, label in bits:
            active = (values >> bit) & 1
            seen = active[live]
            put(
                tick,
                column.entity,
                column_name(column.signal, label),
                Window(
                    tick.start_ns,
                    tick.end_ns,
                    covered,
                    samples,
                    missing,
                    float(seen.min()) if covered else math.nan,
                    float(seen.max()) if covered else math.nan,
                    float((active * weights).sum()),
                    float(seen[-1]) if covered else math.nan,
                    float(((raised >> bit) & 1).sum()),
                ),
            )

    def _bits_not_declared(
        self, index: int, column: Column, states: Integers
    ) -> list[tuple[int, str]]:
        """Return bits the declaration lacks, from when they were first seen on."""
        declared = {bit for bit, _ in column.signal.bits}
        known = self._unknown_bits.setdefault(index, set())
        union = int(np.bitwise_or.reduce(states)) if len(states) else 0
        known |= {bit for bit in range(63) if union >> bit & 1} - declared
        return [(bit, f"unknown_0x{1 << bit:x}") for bit in sorted(known)]

    def _close_counters(
        self,
        tick: Tick,
        values: Integers,
        known: Bools,
        spans: Integers,
        samples: Integers,
        missing: Integers,
    ) -> None:
        covered = (spans @ known).tolist()
        rises = self._rises(values, known)
        lowest = np.where(known, values, MOST).min(axis=0, initial=MOST).tolist()
        highest = np.where(known, values, 0).max(axis=0, initial=0).tolist()
        some: list[bool] = np.atleast_1d(known.any(axis=0)).tolist()
        last = self._last_integers.tolist()
        for index, column in enumerate(self._integer_columns):
            if self._is_bits[index]:
                continue
            scale = column.signal.scale
            window = Window(
                tick.start_ns,
                tick.end_ns,
                covered[index],
                int(samples[index]),
                int(missing[index]),
                lowest[index] * scale if some[index] else math.nan,
                highest[index] * scale if some[index] else math.nan,
                0.0,
                last[index] * scale if some[index] else math.nan,
                rises[index] * scale,
            )
            put(tick, column.entity, column.name, window)

    def _rises(self, values: Integers, known: Bools) -> list[int]:
        """Return how much each counter rose, and keep where it stands.

        A counter that fell was reset by the hardware and has risen from 0 since.
        """
        before = self._last_integers
        if known.all() and (before >= 0).all():
            steps = np.diff(values, axis=0, prepend=before[None])
            self._last_integers = values[-1].copy()
            risen = np.where(steps >= 0, steps, values).sum(axis=0)
            return list(map(int, risen))
        rises = []
        for index in range(values.shape[1]):
            if self._is_bits[index]:
                rises.append(0)
                continue
            states = values[known[:, index], index]
            if before[index] >= 0:
                states = np.concatenate([before[index : index + 1], states])
            steps = np.diff(states)
            rises.append(int(np.where(steps >= 0, steps, states[1:]).sum()))
            if len(states):
                before[index] = states[-1]
        return rises


def _is_marker(bits: Integers) -> Bools:
    """Say which words of bits are all ones of 32 or 64 bits: drivers' markers for no value."""
    marker: Bools = (bits < 0) | (bits == 0xFFFFFFFF)
    return marker


def _shortest(value: np.float64) -> float:
    """Return the shortest decimal that is this float32: 3201000000, not 3200999936."""
    return float(str(np.float32(value)))

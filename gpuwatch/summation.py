"""Summation: the rows of a ring become windows, tick by tick.

A value holds until the next read, at most two periods; after that its time is uncovered. Samples
are counted in slots of the signal's refresh, as declared and then, but for `dense` rings, as
measured.
"""

import math
from collections.abc import Sequence
from operator import sub
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuwatch.calibration import RefreshEstimator
from gpuwatch.cells import Cells, HeldCell
from gpuwatch.clock import SECOND_NS
from gpuwatch.dense import DenseCells, is_dense
from gpuwatch.ring import RingSchema
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Kind
from gpuwatch.slots import MANY, Slots
from gpuwatch.window import TICK_NS, Rows, Tick, Window, put

HOLD_PERIODS = 2
CALIBRATION_TICKS = 40
NEVER_NS = -(2**62)  # the time of the row before the first one
NO_ROWS = np.empty(0)


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


def reach_ns(last_ns: int, period_ns: int) -> int:
    """Return how far a ring's data go whose last row is at `last_ns`, as far as rows can tell.

    It is taken to be written to for two periods after a row, and for one tick at least.
    """
    return last_ns + max(HOLD_PERIODS * period_ns, TICK_NS)


class RingWindows:
    """Turns the rows of one ring into windows; rows come in order, ticks are closed in order.

    `ended` says that nothing is read any more: such a ring is not to be closed. `dense` rings are
    to be closed before all others, which leave to them what both tell of. `achieved_seconds` is the
    time between rows in the newest tick that had two. `refresh_seconds` has by name the refresh of
    gauges, the longest one of a name, as calibration has measured it; it looks anew every few
    seconds, and not at `dense` rings.
    """

    def __init__(self, schema: RingSchema) -> None:
        self.schema = schema
        self.period_ns = schema.period_ns
        self.ended = False
        self.achieved_seconds: float | None = None
        self.refresh_seconds: dict[str, float] = {}
        # The last row before the tick to come, which is held, and then those not closed yet.
        self._rows = np.zeros(1, row_dtype(schema))
        self._rows["time_ns"] = NEVER_NS
        self._rows["integers"] = UNKNOWN_INTEGER
        self._rows["gauges"] = UNKNOWN_GAUGE
        self._held: list[HeldCell] | None = None  # its cells, once they were looked at
        # By integer column: what it rose by in evidence, None if there was none.
        self._left: npt.NDArray[np.int64] | None = None
        self.dense = is_dense(schema)
        self._cells = DenseCells(schema) if self.dense else Cells(schema)
        self._slots = Slots([int(c.signal.refresh_seconds * SECOND_NS) for c in schema.columns])
        self._estimator = RefreshEstimator(schema.gauges)
        self._not_estimated: list[npt.NDArray[Any]] = []
        self._ticks = 0

    @property
    def reach_ns(self) -> int:
        """How far the rows summed up so far tell of a ring that is written to."""
        return reach_ns(int(self._rows["time_ns"][0]), self.period_ns)

    @property
    def newest_ns(self) -> int | None:
        """Time of the newest row there was, None before the first."""
        time_ns = int(self._rows["time_ns"][-1])
        return None if time_ns == NEVER_NS else time_ns

    @property
    def oldest_ns(self) -> int | None:
        """Time of the first row not yet closed, None if there is none."""
        return int(self._rows["time_ns"][1]) if len(self._rows) > 1 else None

    def add(self, rows: bytes) -> None:
        """Take rows as the ring reader returns them."""
        fresh: npt.NDArray[Any] = np.frombuffer(rows, self._rows.dtype)
        if self._left is not None or np.isnan(fresh["late"]).any():
            fresh = self._without_evidence(fresh)
        self.ended = self.ended and not len(fresh)
        self._rows = np.frombuffer(self._rows.tobytes() + fresh.tobytes(), self._rows.dtype)

    def _without_evidence(self, fresh: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return rows without evidence, and counters as if they had stood still meanwhile.

        Its time is over, and windows tell of nothing in it.
        """
        known = fresh["integers"] != UNKNOWN_INTEGER
        some = known.any(axis=1) | ~np.isnan(fresh["gauges"]).all(axis=1)
        evidence: npt.NDArray[np.bool_] = np.isnan(fresh["late"]) & some
        if self._left is None:
            if not evidence.any():
                return fresh
            self._left = np.zeros(self.schema.integers, np.int64)
        fresh = fresh.copy()
        for index, column in enumerate(self.schema.columns[: self.schema.integers]):
            counts = fresh["integers"][known[:, index], index]
            if column.signal.kind is not Kind.COUNTER or not len(counts):
                continue
            last = self._last_count(index)
            first = counts[:1] if last == UNKNOWN_INTEGER else np.array([last]) + self._left[index]
            rises = np.maximum(np.diff(counts, prepend=first), 0)
            left = self._left[index] + np.cumsum(rises * evidence[known[:, index]])
            fresh["integers"][known[:, index], index] = counts - left
            self._left[index] = left[-1]
        kept: npt.NDArray[Any] = fresh[~evidence]
        return kept

    def _last_count(self, index: int) -> int:
        """Return the last value of a counter that was known, in rows not closed yet or before."""
        counts = self._rows["integers"][:, index]
        counts = counts[counts != UNKNOWN_INTEGER]
        return int(counts[-1]) if len(counts) else self._cells.last[index]

    def close(self, tick: Tick) -> None:
        """Sum up the rows before the tick's end and put the windows into the tick.

        Rows of a `dense` ring from before the tick are in no window: their time is uncovered.
        """
        if self.dense:
            self._pass_over(tick.start_ns)
        oldest_ns = self.oldest_ns
        if oldest_ns is not None and oldest_ns < tick.end_ns:
            rows = self._sum_up(tick)
        else:
            rows = self._go_on(tick)
        tick.rows.append(rows)
        self._ticks += 1
        if self._ticks % CALIBRATION_TICKS == 0:
            self._calibrate()

    def _pass_over(self, start_ns: int) -> None:
        """Let counters go on from the newest row before a tick, as if all before it were closed.

        Those rows came after a stall, or while nobody planned to read: another ring may have told
        of the same bytes, and minutes of them would look like the work of one tick.
        """
        newest = int(self._rows["time_ns"].searchsorted(start_ns)) - 1
        if newest < 1:
            return
        counts = self._rows["integers"][: newest + 1]
        for index, known in enumerate((counts != UNKNOWN_INTEGER).T):
            if known.any():
                self._cells.last[index] = int(counts[known, index][-1])
        self._rows, self._held = self._rows[newest:], None
        if math.isnan(self._rows["late"][0]):
            self._slots.rest()
            self.ended = len(self._rows) == 1

    def _sum_up(self, tick: Tick) -> Rows:
        """Sum up a tick with rows."""
        schema, slots = self.schema, self._slots
        split = int(self._rows["time_ns"].searchsorted(tick.end_ns))
        rows, fresh = self._rows[:split], self._rows[1:split]
        times, late = rows["time_ns"].tolist(), fresh["late"].tolist()
        ends = math.isnan(late[-1])
        end_ns = times[-1] if ends else tick.end_ns
        slots.turn(tick.start_ns, end_ns, times[1:], late, self.period_ns)
        self._cells.put(tick, rows, self._spans(tick, times), slots)
        self._rows, self._held = self._rows[split - 1 :], None
        self.ended = ends and len(self._rows) == 1
        start_ns = max(tick.start_ns, slots.epoch_ns or 0)
        if ends:
            slots.rest()
            fresh = fresh[:-1]
        # What hardware samples is renewed with each row: its refresh is as declared.
        if schema.gauges and len(fresh) and not self.dense:
            self._not_estimated.append(fresh)
        if len(fresh) > 1:
            self.achieved_seconds = (times[len(fresh)] - times[1]) / (len(fresh) - 1) / SECOND_NS
        missing = max(0, (end_ns - start_ns) // self.period_ns - len(fresh))
        lateness, read = fresh["late"].astype(np.float64), fresh["read"].astype(np.float64)
        return Rows(schema.duty, schema.source, self.period_ns, lateness, read, missing)

    def _go_on(self, tick: Tick) -> Rows:
        """Sum up a tick without rows: most ticks of a slow ring."""
        schema, slots = self.schema, self._slots
        slots.turn(tick.start_ns, tick.end_ns, (), (), self.period_ns)
        time_ns = int(self._rows["time_ns"][0])
        stands = time_ns <= tick.start_ns and tick.end_ns <= time_ns + HOLD_PERIODS * self.period_ns
        if stands and self._cells.are_plain(tick):
            self._repeat(tick)
        else:
            self._cells.put(tick, self._rows[:1], self._spans(tick, [time_ns]), slots)
        missing = slots.most_missing
        return Rows(schema.duty, schema.source, self.period_ns, NO_ROWS, NO_ROWS, missing)

    def _repeat(self, tick: Tick) -> None:
        """Put the windows of a tick for all of which one row stands."""
        start_ns, end_ns = tick.start_ns, tick.end_ns
        if self._held is None:
            self._held = self._cells.held(self._rows[0])
        for index, (entity, name, value, per_ns) in enumerate(self._held):
            known_ns = 0 if math.isnan(value) else end_ns - start_ns
            caught, missed = self._slots.count(index)
            integral = per_ns * known_ns
            window = Window(
                start_ns, end_ns, known_ns, caught, missed, value, value, integral, value
            )
            put(tick, entity, name, window)

    def _spans(self, tick: Tick, times: Sequence[int]) -> list[int]:
        """Return for how many nanoseconds of the tick each row stands."""
        hold_ns = HOLD_PERIODS * self.period_ns
        if len(times) > MANY:
            starts = np.array(times)
            ends = starts + np.clip(np.diff(starts, append=tick.end_ns), 0, hold_ns)
            stands: list[int] = np.maximum(ends - np.maximum(starts, tick.start_ns), 0).tolist()
            return stands
        gaps = map(sub, (*times[1:], tick.end_ns), times)
        spans = [min(gap, hold_ns) if gap > 0 else 0 for gap in gaps]
        for index, time_ns in enumerate(times):
            if time_ns >= tick.start_ns:
                break
            spans[index] = max(0, time_ns + spans[index] - tick.start_ns)
        return spans

    def _calibrate(self) -> None:
        """Count samples by refreshes as rows now show them."""
        rows, self._not_estimated = self._not_estimated, []
        if not rows:
            return
        times = np.concatenate([part["time_ns"] for part in rows])
        values = np.concatenate([part["gauges"] for part in rows])
        self._estimator.add(times, values, self.period_ns)
        found: dict[str, float] = {}
        for gauge, column in enumerate(self.schema.columns[self.schema.integers :]):
            refresh_ns = self._estimator.refresh_ns(gauge)
            if refresh_ns is not None:
                self._slots.set_refresh(self.schema.integers + gauge, refresh_ns)
                found[column.name] = max(refresh_ns / SECOND_NS, found.get(column.name, 0.0))
        self.refresh_seconds = found

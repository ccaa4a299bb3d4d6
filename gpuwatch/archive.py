"""The archive: a thread of the daemon that writes history and keeps the state directory small.

A tick only adds a row and hands a batch over now and then: a disk that is slow, full or gone costs
rows, which are counted, and holds up nobody.
"""

import contextlib
import errno
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuwatch import byte_history
from gpuwatch.byte_history import ByteHistory
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, read_clocks
from gpuwatch.codec import Constants, Head
from gpuwatch.history import FILE_NS, SINCE_START, SORT
from gpuwatch.history_writer import Batch, HistoryWriter, columns_of
from gpuwatch.kernel_log import XID
from gpuwatch.quota import Limits, is_full, sweep
from gpuwatch.ring import RingSchema
from gpuwatch.signals import Column, Entity, Event, Kind
from gpuwatch.source import EntityInfo
from gpuwatch.window import TICK_NS, Floats, Tick, Window

log = logging.getLogger("gpuwatch.archive")

BATCH_NS = 30 * SECOND_NS
FULL_NS = 5 * SECOND_NS  # how often a full disk is looked at
DRIFT_NS = 10 * MILLISECOND_NS  # the wall clock of a file is no further off
WAITING = 4  # batches that a slow disk may be behind
CLOSE_SECONDS = 3.0
HISTORY: Mapping[str, Limits] = {
    "off": Limits(days=0, size=0),
    "week": Limits(days=7, size=1_600_000_000),
    "month": Limits(days=30, size=7_600_000_000),
}
BYTES: Mapping[str, Limits] = {
    "off": Limits(days=0, size=0),
    "week": Limits(days=1, size=400_000_000),
    "month": Limits(days=1, size=400_000_000),
}
MADE_UP = Limits(days=1, size=200_000_000, files=100)  # it may lie in memory

Layout = list[tuple[Entity, list[str]]]


class _Work(NamedTuple):
    """What the thread is to do: rows to write, rings to take bytes of, recordings that stay."""

    batch: Batch | None
    rings: Sequence[Path]
    kept: Collection[str]


class Archive:
    """Takes rows and events from the daemon's thread, and does the rest in its own.

    `full`: so little of the disk is free that nothing is written. `fault` is "" or one line: why
    history is not written now. `rows` and `rows_lost` are counted since the start.
    """

    def __init__(self, state: Path, config: Mapping[str, Any], boot_id: str, made_up: bool) -> None:
        keep, recorder = config["history"]["keep"], config["recorder"]
        recordings = Limits(recorder["keep_days"], recorder["keep_bytes"], recorder["keep_count"])
        self.full = False
        self.fault = ""
        self.rows = 0
        self.rows_lost = 0
        self._on = keep != "off"
        self._state = state
        self._free_ratio = float(recorder["free_ratio"])
        self._limits = {
            ("history", ".gwh"): HISTORY[keep],
            (f"history/{byte_history.NAME}", ".gwh"): BYTES[keep],
            ("recordings", ".gwr"): recordings,
        }
        if made_up:
            self._limits = {name: limits.within(MADE_UP) for name, limits in self._limits.items()}
        self._boot_id = boot_id
        self._wanted: dict[tuple[Entity, str], Column] = {}
        self._columns: dict[tuple[Entity, str], Column] = {}
        self._risen: dict[tuple[Entity, str], float] = {}
        self._counters: Layout = []
        self._gauges: Layout = []
        self._clocks = read_clocks()
        self._head: Head | None = None
        self._shape: tuple[Any, ...] = ()  # what the head was made of
        self._times: list[int] = []
        self._counts: list[Floats] = []
        self._means: list[Floats] = []
        self._events: list[Event] = []
        self._handed_ns = 0
        self._queue: queue.Queue[_Work | None] = queue.Queue(WAITING)
        self._writer = HistoryWriter(state / "history", boot_id)
        self._bytes = ByteHistory(state / "history" / byte_history.NAME, boot_id)
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    def attach(self, columns: Iterable[Column]) -> None:
        """Keep these columns from now on."""
        parts = (part for column in columns for part in columns_of(column))
        self._wanted = {(part.entity, part.name): part for part in parts}
        self._lay_out()

    def _count(self, entity: Entity, name: str, window: Window) -> float:
        """Return a counter; one that two sources may feed is what it has risen by since the start.

        They count from different numbers, and each change would look like a rise.
        """
        key = entity, name
        since_start = self._columns[key].signal.total in SINCE_START
        if not since_start or math.isnan(window.last):
            return window.last
        self._risen[key] = self._risen.get(key, 0.0) + window.increase
        return self._risen[key]

    def add(self, tick: Tick) -> None:
        """Take in a closed tick."""
        if not self._on:
            return
        counts: list[float] = []
        for entity, names in self._counters:
            windows = tick.windows.get(entity, {})
            for name in names:
                window = windows.get(name)
                counts.append(self._count(entity, name, window) if window else math.nan)
        means: list[float] = []
        for entity, names in self._gauges:
            windows = tick.windows.get(entity, {})
            for name in names:
                window = windows.get(name)
                covered = window.covered_ns if window else 0
                means.append(window.integral / covered if window and covered else math.nan)
        self._times.append(tick.end_ns)
        self._counts.append(np.array(counts))
        self._means.append(np.array(means))

    def note(self, event: Event) -> None:
        """Take in an event."""
        if self._on:
            self._events.append(event)

    def is_due(self, now_ns: int) -> bool:
        """Say whether it is time to hand over."""
        return now_ns - self._handed_ns >= (FULL_NS if self.full else BATCH_NS)

    def hand_over(
        self,
        infos: Sequence[EntityInfo],
        constants: Constants,
        kept: Collection[str],
        *,
        rings: Sequence[Path] = (),
        stepped: bool = False,
    ) -> None:
        """Have everything written that was taken in, and the bytes that are in `rings`.

        If the clock has `stepped` just now, that has the wall time from before the step.
        """
        now = read_clocks()
        drift_ns = abs(self._clocks.wall_ns(now.monotonic_ns) - now.realtime_ns)
        if drift_ns > DRIFT_NS and not stepped:
            self._clocks = now
        self._handed_ns = now.monotonic_ns
        batch = None
        if self._times:
            head = self._head_of(list(infos), constants)
            batch = Batch(head, self._times, self._counts, self._means, self._events)
            self._times, self._counts, self._means, self._events = [], [], [], []
        try:
            self._queue.put_nowait(_Work(batch, rings, kept))
        except queue.Full:
            self._tell(f"{self._state}: the disk does not keep up")
            self.rows_lost += len(batch.times) if batch else 0
        if self._columns.keys() != self._wanted.keys():  # some are gone
            self._columns, self._counters, self._gauges = {}, [], []
            self._lay_out()

    def close(self) -> None:
        """Wait for what was handed over to be written, unless the disk hangs."""
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _lay_out(self) -> None:
        """Append the wanted columns that rows do not have yet."""
        new = [column for key, column in self._wanted.items() if key not in self._columns]
        for column in new:
            self._columns[column.entity, column.name] = column
            layout = self._counters if column.signal.kind is Kind.COUNTER else self._gauges
            if not layout or layout[-1][0] != column.entity:
                layout.append((column.entity, []))
            layout[-1][1].append(column.name)

    def _head_of(self, infos: list[EntityInfo], constants: Constants) -> Head:
        """Return the head of the rows taken in: the one before, unless something has changed."""
        shape = (tuple(self._columns), infos, constants, self._clocks)
        if (
            self._head is None
            or shape != self._shape
            or self._times[-1] - self._head.start_ns > FILE_NS
        ):
            uname = os.uname()
            parts = [
                self._columns[entity, name]
                for layout in (self._counters, self._gauges)
                for entity, names in layout
                for name in names
            ]
            self._shape = shape
            self._head = Head(
                start_ns=self._times[0],
                end_ns=self._times[0],
                rings=(RingSchema(SORT, SORT, SORT, tuple(parts), TICK_NS),),
                entities=tuple(infos),
                constants=constants,
                clocks=(self._clocks,),
                host={"hostname": uname.nodename, "kernel": uname.release},
                boot_id=self._boot_id,
                created_realtime_ns=self._clocks.wall_ns(self._times[-1]),
            )
        return self._head

    # In the thread.

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            full, rows = False, self.rows
            try:
                full = self._do(work)
                if full:
                    fault = f"{self._state}: less than {self._free_ratio:.0%} is free"
                elif work.batch is not None or self.full:
                    fault = ""
                else:  # nothing was tried
                    fault = self.fault
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                fault = f"{error.filename or self._state}: {error.strerror}"
            except Exception as error:  # the one guard: the next batch may be well
                log.error("history failed", exc_info=error)
                fault = f"{self._state}: {error!r}"
            self.full = full
            if fault and work.batch is not None and self.rows == rows:
                self.rows_lost += len(work.batch.times)
            self._tell(fault)

    def _do(self, work: _Work) -> bool:
        """Keep the limits, then write; return whether there is no room to. Raises OSError."""
        now_ns = read_clocks().realtime_ns
        kept = {*work.kept, self._writer.name, self._bytes.name}
        for (name, suffix), limits in self._limits.items():
            # What applications do to themselves is the least of what was recorded.
            sweep(self._state / name, suffix, limits, now_ns, kept, first=f"-{XID}-")
        if is_full(self._state, self._free_ratio):
            return True
        if work.batch is not None:
            self._writer.directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            self.rows += self._writer.write(work.batch)
            self._bytes.write(work.rings, work.batch.head)
        return False

    def _tell(self, fault: str) -> None:
        if fault != self.fault:
            log.warning("history: %s", f"{fault}: not written" if fault else "written again")
        self.fault = fault

"""A task: a group of a source with the ring its rows go to."""

import math
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpuwatch.child import Child
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.ring import MAX_BYTES, W_WATERMARK, RingSchema, RingWriter
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER
from gpuwatch.source import Group

ENDED_AT_MOST = 512  # rings: a layout that flaps must not fill memory
ENDED_BYTES = MAX_BYTES


@dataclass(slots=True)
class Task:
    """A group with its ring; `period_ns` is the time between its reads, or drains, now.

    In `standby` rows come only when they are asked for.
    """

    source: str
    group: Group
    writer: RingWriter
    period_ns: int
    standby: bool = False

    @classmethod
    def of(cls, source: str, group: Group, writer: RingWriter) -> "Task":
        """Return the task of a group at its own pace."""
        return cls(source, group, writer, group.delivery_ns if group.drain else group.period_ns)

    def scale(self, scale: float) -> float:
        """Read so many times more rarely, or not at all; return the scale that came of it.

        Hardware that samples by itself does so in coarser steps.
        """
        group = self.group
        if group.pace is not None:
            now_ns = monotonic_ns()
            pace = group.pace(scale)
            if pace.standby and not self.standby:
                self._rest(now_ns)
            self.standby = pace.standby
            self.writer.set_period(pace.period_ns)
            return pace.scale
        if scale:
            self.period_ns = int((group.delivery_ns if group.drain else group.period_ns) * scale)
            if group.drain is None:
                self.writer.set_period(self.period_ns)
        return scale

    def drain(self, now_ns: int) -> None:
        """Write what the hardware has sampled by itself since the last time.

        Each row took its part of the time that the drain took. Those of a standby are evidence:
        nobody has planned them, and what is told of their time stays as it is.
        """
        rows = self.group.rows(now_ns)
        read_seconds = (monotonic_ns() - now_ns) * 1e-9 / max(len(rows), 1)
        late_seconds = math.nan if self.standby else 0.0
        for time_ns, cells in rows:
            self.writer.append(time_ns, late_seconds, read_seconds, cells)
        if rows and self.standby:
            self._rest(rows[-1][0] + 1)  # the hardware goes on: the next row is little later
        self.writer.words[W_WATERMARK] = rows[-1][0] if rows else now_ns

    def end(self, now_ns: int) -> None:
        """Write a last row and let go of the ring."""
        self._rest(now_ns)
        self.writer.advance(now_ns)
        self.writer.close()

    def _rest(self, now_ns: int) -> None:
        """Write a row in which nothing is known, not even how late: nothing is read now."""
        schema = self.writer.schema
        unknown = (UNKNOWN_INTEGER,) * schema.integers + (UNKNOWN_GAUGE,) * schema.gauges
        self.writer.append(now_ns, math.nan, 0.0, unknown)


class _Ended(NamedTuple):
    """The file of a ring that is written no more, and when it goes."""

    until_ns: int
    path: Path
    size: int


class Rings:
    """Makes and ends the rings of one sampler; their files carry its generation.

    A ring that has ended is kept for as long as it would reach back, unless there are very many.
    """

    def __init__(self, child: Child, duty: str) -> None:
        self.keep_seconds = float(child.config["ring"]["seconds"])
        self._prefix = f"{duty}.{child.generation}"
        self._duty = duty
        self._directory = Path(child.settings["ring_directory"])
        self._made: Counter[str] = Counter()
        self._ended: deque[_Ended] = deque()

    def task(self, source: str, group: Group) -> Task:
        """Return a task with a new ring. Raises OSError if there is no space for it."""
        schema = RingSchema(
            name=f"{self._duty}.{group.name}",
            duty=self._duty,
            source=source,
            columns=group.columns,
            period_ns=group.period_ns,
            delivery_ns=group.delivery_ns,
        )
        # Readers may still want what the group's earlier ring holds.
        number = f"~{self._made[group.name]}" if group.name in self._made else ""
        path = self._directory / f"{self._prefix}.{group.name}{number}.ring"
        path.unlink(missing_ok=True)
        try:
            writer = RingWriter(path, schema, self.keep_seconds)
        except OSError as fault:
            fault.filename = fault.filename or str(self._directory)
            raise
        self._made[group.name] += 1
        return Task.of(source, group, writer)

    def end(self, task: Task, now_ns: int) -> None:
        """End a task's ring; its file stays for a while."""
        path, size = task.writer.path, 0
        with suppress(OSError):  # a stranger removed it
            size = path.stat().st_size
        task.end(now_ns)
        self._ended.append(_Ended(now_ns + int(self.keep_seconds * SECOND_NS), path, size))
        self.sweep(now_ns)

    def sweep(self, now_ns: int) -> None:
        """Remove the files of rings that ended long ago, or that are too many."""
        ended = self._ended
        while ended and (
            ended[0].until_ns <= now_ns
            or len(ended) > ENDED_AT_MOST
            or sum(one.size for one in ended) > ENDED_BYTES
        ):
            ended.popleft().path.unlink(missing_ok=True)

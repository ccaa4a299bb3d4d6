"""History: one row each quarter second of every signal, kept for days, readable while it grows.

`state/history/*.gwh` are files of blocks (see `codec`): a head, then rows and events. A file is
called by the wall time of its first row, holds an hour at most, and has one set of columns and one
offset between the monotonic and the wall clock: whatever changes one of them begins a new file.

A cell is the smallest honest form of what a signal did in its quarter second:

- gauge: the time-weighted mean over the time with a known value;
- counter: the hardware's count at the end, or what it has risen by since the daemon's start, for
  signals whose total is one of `SINCE_START`: such a one falls only where another daemon begins;
- bits: for each declared bit a gauge, the share of the known time in which it was set.

Unknown cells are NaN. Where there are no rows nobody watched, or a file was cut short.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gpuwatch.clock import SECOND_NS
from gpuwatch.codec import (
    ROWS_HEAD_BYTES,
    BlockReader,
    Head,
    damaged,
    decode_columns,
    decode_events,
    decode_head,
    decode_rows_head,
)
from gpuwatch.errors import RecordingError
from gpuwatch.quota import stamped_ns
from gpuwatch.signals import Column, Entity, Event, Total
from gpuwatch.window import TICK_NS

SORT = "history"
HEAD, ROWS, EVENTS = b"HEAD", b"ROWS", b"EVNT"
SUFFIX = ".gwh"
FILE_NS = 3600 * SECOND_NS
FOREVER_NS = 2**63 - 1
SINCE_START = (Total.COVERED, Total.INCREASE)  # each daemon counts these from 0

T = TypeVar("T")


class Piece(NamedTuple):
    """Rows of one stretch of time, and the columns that were asked for.

    `time_ns` is wall time (nanoseconds since 1970, UTC): the end of the quarter second that a row
    is of. `values` has a line for each row and a place for each column, in the signal's unit;
    NaN is unknown. `head` has the entities' labels, the constants, the host and its boot.
    """

    head: Head
    columns: tuple[Column, ...]
    time_ns: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


class History:
    """Reads a history directory, also while a daemon writes to it. Memory stays at one block.

    All times are wall time in nanoseconds. `faults` gets a line for each file that makes no sense
    or cannot be read, each time it is met; what comes before the fault is given all the same.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.faults: list[str] = []

    def read(
        self,
        from_ns: int,
        to_ns: int,
        *,
        entities: Collection[Entity] | None = None,
        signals: Collection[str] | None = None,
    ) -> Iterator[Piece]:
        """Yield the rows from `from_ns` up to `to_ns`, in the order in which they were written.

        `entities` and `signals` choose columns, None all of them; a signal is given by its name
        (`gpu_clock_hertz`: all its labels) or its column's (`gpu_clock_hertz{clock="sm"}`). Pieces
        are not empty, at most a few hundred rows long, and may have other columns than the piece
        before. After a step of the wall clock times may lie before those of the piece before.
        """

        def chosen(column: Column) -> bool:
            return (entities is None or column.entity in entities) and (
                signals is None or column.name in signals or column.signal.name in signals
            )

        for path in self._files(from_ns, to_ns):
            for piece in self._pieces(path, chosen, (from_ns, to_ns)):
                inside = (piece.time_ns >= from_ns) & (piece.time_ns < to_ns)
                if inside.any():
                    times, values = piece.time_ns[inside], piece.values[inside]
                    yield piece._replace(time_ns=times, values=values)

    def events(self, from_ns: int, to_ns: int) -> Iterator[Event]:
        """Yield what happened in that time; `time_ns` of these events is wall time."""

        def decode(head: Head, raw: bytes, path: Path) -> list[Event]:
            offset = offset_ns(head)
            events = decode_events(raw, path)
            return [replace(event, time_ns=event.time_ns + offset) for event in events]

        for path in self._files(from_ns, to_ns):
            for events in self._blocks(path, EVENTS, decode):
                yield from (event for event in events if from_ns <= event.time_ns < to_ns)

    def heads(self, from_ns: int, to_ns: int) -> list[Head]:
        """Return the heads of the files that may have something of that time."""
        paths = self._files(from_ns, to_ns)
        return [head for path in paths for head in self._blocks(path, HEAD, lambda head, *_: head)]

    def columns(self, from_ns: int, to_ns: int) -> list[Column]:
        """Return the columns that files of that time have, each once."""
        heads = self.heads(from_ns, to_ns)
        return list(dict.fromkeys(column for head in heads for column in head.rings[0].columns))

    def gaps(self, from_ns: int, to_ns: int) -> list[tuple[int, int]]:
        """Return the stretches of that time of which there are no rows, as (start, end)."""
        gaps = []
        reached = from_ns
        for piece in self.read(from_ns, to_ns, signals=()):
            starts = piece.time_ns - TICK_NS
            ends = np.maximum.accumulate(np.append(reached, piece.time_ns))
            for index in np.flatnonzero(starts - ends[:-1] > TICK_NS // 2):
                gaps.append((int(ends[index]), int(starts[index])))
            reached = int(ends[-1])
        if to_ns - reached > TICK_NS:
            gaps.append((reached, to_ns))
        return gaps

    def newest(self) -> Piece | None:
        """Return the newest rows, without columns, None if there are none."""
        for path in reversed(self._files(0, FOREVER_NS)):
            *_, last = None, *self._pieces(path, lambda _: False, (0, FOREVER_NS))
            if last is not None:
                return last
        return None

    def span(self) -> tuple[int, int] | None:
        """Return the times of the oldest row and of the newest, None if there are no rows."""
        oldest = next(self.read(0, FOREVER_NS, signals=()), None)
        newest = self.newest()
        if oldest is None or newest is None:
            return None
        return int(oldest.time_ns[0]), int(newest.time_ns[-1])

    def _files(self, from_ns: int, to_ns: int) -> list[Path]:
        """Return the files that may have something of that time, in the order of writing."""
        found = []
        for path in self.directory.glob(f"*{SUFFIX}"):
            start_ns = stamped_ns(path.name)
            if start_ns is None or start_ns >= to_ns:
                continue
            if start_ns + SECOND_NS + FILE_NS >= from_ns:
                found.append((start_ns, len(path.name), path))
        return [path for *_, path in sorted(found)]  # of one second: Z, Z-1, ..., Z-10

    def _pieces(
        self, path: Path, chosen: Callable[[Column], bool], within: tuple[int, int]
    ) -> Iterator[Piece]:
        """Yield a file's rows, without most of those that are not `within` a stretch of time."""
        wanted: dict[int, Column] | None = None  # a file has one head

        def decode(head: Head, raw: bytes, path: Path) -> Piece:
            nonlocal wanted
            if wanted is None:
                columns = enumerate(head.rings[0].columns)
                wanted = {index: column for index, column in columns if chosen(column)}
            due, values = decode_columns(raw, head.rings, [*wanted], path)
            return Piece(head, tuple(wanted.values()), due + offset_ns(head), values)

        pieces = self._blocks(path, ROWS, decode, within)
        return (piece for piece in pieces if len(piece.time_ns))

    def _blocks(
        self,
        path: Path,
        kind: bytes,
        decode: Callable[[Head, bytes, Path], T],
        within: tuple[int, int] | None = None,
    ) -> Iterator[T]:
        """Yield what a file's blocks of a kind mean."""
        try:
            with contextlib.closing(BlockReader(path, SORT)) as file:
                first = next(file.blocks(file.start, (HEAD, kind)), None)
                if first is None or first.kind != HEAD:
                    raise damaged(path, "it does not begin with its head")
                head = decode_head(first.raw, path)
                if len(head.rings) != 1 or not head.clocks:
                    raise damaged(path, "its head")
                start, end = first.end, None
                if within is not None:
                    start, end = self._stretch(file, first.end, head, within)
                blocks = (first,) if kind == HEAD else file.blocks(start, (kind,))
                for block in blocks:
                    if end is not None and block.start >= end:
                        break
                    yield decode(head, block.raw, path)
        except RecordingError as error:
            if path.exists():  # else it was removed for its age meanwhile
                self.faults.append(str(error))

    def _stretch(
        self, file: BlockReader, start: int, head: Head, within: tuple[int, int]
    ) -> tuple[int, int | None]:
        """Return where in a file the rows of a time begin, and where they end, None if nowhere.

        Only how each block begins is looked at: in a file rows are in order.
        """
        from_ns, to_ns = (bound - offset_ns(head) for bound in within)
        if from_ns <= head.start_ns and to_ns >= head.start_ns + 2 * FILE_NS:
            return start, None  # the whole file, or nearly
        for block in file.blocks(start, (ROWS,), ROWS_HEAD_BYTES):
            floor_ns = decode_rows_head(block.raw, file.path).floor_ns
            if floor_ns <= from_ns:
                start = block.start
            elif floor_ns >= to_ns:
                return start, block.start
        return start, None


def offset_ns(head: Head) -> int:
    """Return what turns a monotonic time of the file into wall time."""
    return head.clocks[0].wall_ns(0)

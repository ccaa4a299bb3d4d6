"""Writes history: a batch of rows after the other, in files of an hour.

A file has its name as soon as its first batch is written. A batch that cannot be written whole is
taken back, so that a file ends with a whole block, also on a full disk.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpuwatch.codec import (
    Head,
    RowArray,
    RowsBlock,
    encode_block,
    encode_json,
    encode_rows,
    first_line,
    write_all,
)
from gpuwatch.history import EVENTS, HEAD, ROWS, SORT, SUFFIX, History, offset_ns
from gpuwatch.quota import stamp
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Event, Kind
from gpuwatch.summation import row_dtype
from gpuwatch.window import Floats

FILE_MODE = 0o640


class Batch(NamedTuple):
    """Rows to be written, and the head of the file they belong to: another one is another file.

    `counters` and `gauges` are the cells, a list for each row, in the order of the head's columns;
    a row that is shorter is from before its last columns were there.
    """

    head: Head
    times: Sequence[int]
    counters: Sequence[Floats]
    gauges: Sequence[Floats]
    events: Sequence[Event]


def columns_of(column: Column) -> list[Column]:
    """Return what history keeps of a column: the bits of a set each have one of their own."""
    entity, signal, _ = column
    if signal.kind is not Kind.BITS:
        return [column]
    share = replace(signal, kind=Kind.GAUGE, bits=())
    return [Column(entity, share, label) for _, label in signal.bits]


class HistoryWriter:
    """The one writer of a history directory; what it holds of this boot already is left out."""

    def __init__(self, directory: Path, boot_id: str) -> None:
        self.directory = directory
        self.name = ""  # of the file that is being written
        self._boot_id = boot_id
        self._head: Head | None = None  # of the open file
        self._descriptor: int | None = None
        self._size = 0
        self._last_ns: int | None = None  # time of the newest row there is, of this boot
        self._found_ns = 0  # the same of earlier daemons

    def write(self, batch: Batch) -> int:
        """Write a batch and return how many rows it had that are new. Raises OSError."""
        return self.write_rows(batch.head, _packed(batch), batch.events)

    def write_rows(self, head: Head, rows: RowArray, events: Sequence[Event] = ()) -> int:
        """Write rows of the head's one ring; return how many of them are new. Raises OSError."""
        last_ns = self._last_row_ns()
        rows = rows[rows["time_ns"] > last_ns]
        events = [event for event in events if event.time_ns > self._found_ns]
        if not len(rows):
            return 0
        removed = self._descriptor is not None and not os.fstat(self._descriptor).st_nlink
        if head is not self._head or removed:
            self._begin(head, int(rows["time_ns"][0]))
        data = b"" if self._size else first_line(SORT) + _json(HEAD, head.to_json())
        if events:
            data += _json(EVENTS, [event.to_json() for event in events])
        block = RowsBlock(0, head.rings[0].period_ns, int(rows["time_ns"][0]), rows)
        self._append(data + encode_block(ROWS, encode_rows(block)))
        self._last_ns = int(rows["time_ns"][-1])
        return len(rows)

    def close(self) -> None:
        """Let go of the file; the next batch begins another."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._head, self._descriptor, self.name, self._size = None, None, "", 0

    def _last_row_ns(self) -> int:
        """Return the monotonic time of the newest row that is there of this boot."""
        if self._last_ns is None:
            newest = History(self.directory).newest()
            if newest is not None and newest.head.boot_id == self._boot_id:
                self._found_ns = int(newest.time_ns[-1]) - offset_ns(newest.head)
            self._last_ns = self._found_ns
        return self._last_ns

    def _begin(self, head: Head, first_ns: int) -> None:
        self.close()
        name = stamp(first_ns + offset_ns(head))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        number = 0
        while self._descriptor is None:
            self.name = f"{name}-{number}{SUFFIX}" if number else f"{name}{SUFFIX}"
            number += 1
            with contextlib.suppress(FileExistsError):
                self._descriptor = os.open(self.directory / self.name, flags, FILE_MODE)
        self._head = head

    def _append(self, data: bytes) -> None:
        assert self._descriptor is not None
        try:
            write_all(self._descriptor, data)
        except OSError as error:
            path = self.directory / self.name
            if self._size:
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
            else:
                path.unlink(missing_ok=True)
                self.close()
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._size += len(data)


def _json(kind: bytes, value: object) -> bytes:
    return encode_block(kind, encode_json(value))


def _packed(batch: Batch) -> RowArray:
    """Return the rows as a ring would hold them; a counter's cells are whole numbers."""
    (schema,) = batch.head.rings
    rows = np.zeros(len(batch.times), row_dtype(schema))
    rows["time_ns"] = batch.times
    rows["sequence"] = np.arange(1, len(rows) + 1)
    counters = np.full((len(rows), schema.integers), np.nan)
    rows["gauges"] = UNKNOWN_GAUGE
    for index, cells in enumerate(batch.counters):
        counters[index, : len(cells)] = cells
    for index, cells in enumerate(batch.gauges):
        rows["gauges"][index, : len(cells)] = cells
    scales = np.array([column.signal.scale for column in schema.columns[: schema.integers]])
    known = np.isfinite(counters)
    counts = np.rint(np.where(known, counters, 0.0) / scales).astype(np.int64)
    rows["integers"] = np.where(known, counts, UNKNOWN_INTEGER)
    return rows

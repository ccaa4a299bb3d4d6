"""Byte history: what RDMA ports carried, at the pace at which it was read, kept for a day.

In a row of a quarter second a burst of 20 ms is a slightly higher rate. So the counts of bytes are
kept as their rings have them, 10 to 100 times a second, in `history/bytes`: files like those of
history, and read like them. They are taken out of the rings every half minute, which costs a tick
nothing, and what was missed once is there the next time.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpuwatch.codec import Head, RowArray
from gpuwatch.errors import ConfigError
from gpuwatch.history_writer import HistoryWriter
from gpuwatch.ring import RingReader, RingSchema
from gpuwatch.signals import Kind
from gpuwatch.summation import row_dtype
from gpuwatch.window import TICK_NS

NAME = "bytes"  # of the directory, within that of history


def kept_of(schema: RingSchema) -> list[int]:
    """Return which columns of a ring are kept: bytes of ports, if it has rows often enough."""
    return [
        index
        for index, (entity, signal, _) in enumerate(schema.columns)
        if entity.kind == "rdma_port"
        and signal.kind is Kind.COUNTER
        and signal.unit == "bytes"
        and schema.period_ns < TICK_NS
    ]


class _Taken(NamedTuple):
    """What a ring has that is new, and the number of its last row."""

    path: Path
    schema: RingSchema
    rows: RowArray
    number: int


class ByteHistory:
    """The one writer of the directory."""

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._writer = HistoryWriter(directory, boot_id)
        self._read: dict[Path, int] = {}  # number of the newest row that was written, by ring
        self._head: Head | None = None
        self._heads: dict[RingSchema, Head] = {}

    @property
    def name(self) -> str:
        """The file that is being written, "" if there is none."""
        return self._writer.name

    def write(self, rings: Sequence[Path], head: Head) -> int:
        """Write what is new in these rings; return how many rows that is.

        `head` is that of history's present file: with another one other files begin here, too.
        Raises OSError.
        """
        if head is not self._head:
            self._head, self._heads = head, {}
        self._read = {path: self._read.get(path, 0) for path in rings}
        written = 0
        for taken in sorted(self._take(rings), key=lambda taken: int(taken.rows["time_ns"][0])):
            schema = taken.schema
            if schema not in self._heads:
                ports = {column.entity for column in schema.columns}
                infos = tuple(info for info in head.entities if info.entity in ports)
                self._heads[schema] = replace(head, rings=(schema,), entities=infos, constants={})
            self._writer.directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            written += self._writer.write_rows(self._heads[schema], taken.rows)
            self._read[taken.path] = taken.number
        return written

    def _take(self, rings: Sequence[Path]) -> Iterator[_Taken]:
        for path in rings:
            with suppress(OSError, ConfigError), closing(RingReader(path)) as reader:
                first, packed = reader.read(self._read[path])
                found = np.frombuffer(packed, row_dtype(reader.schema))
                kept = kept_of(reader.schema)
                if not len(found) or not kept:
                    continue
                columns = tuple(reader.schema.columns[index] for index in kept)
                schema = replace(reader.schema, columns=columns)
                rows = np.zeros(len(found), row_dtype(schema))
                for field in ("time_ns", "late", "sequence"):
                    rows[field] = found[field]
                rows["integers"] = found["integers"][:, kept]
                yield _Taken(path, schema, rows, first + len(found))

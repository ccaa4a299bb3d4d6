"""A ring: rows in one memory-mapped file, one writer, many readers, no locks.

File: a header page of int64 words, the schema as JSON, then the rows. A row is
`time_ns, late_seconds, read_seconds, integer cells, gauge cells, sequence`. The sequence number is
written last, and the head after it, so a reader that checks both sees only whole rows: it drops
what was lapped while it copied and stops at a row whose number is not the expected one (a store
not yet visible, as processors with weak ordering allow). A row whose lateness is NaN was not
planned. With nothing known in it, the ring has ended, until there are planned ones again. Else it
is evidence, which hardware had kept until somebody asked for it: of its time no window tells.

Rows are assigned as whole byte strings: `struct.pack_into` clears the target first, which a reader
in another process can see (prometheus-client found this in its own memory-mapped files).
"""

import json
import mmap
import os
import re
import struct
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpuwatch.clock import SECOND_NS, ClockTriple, read_clocks
from gpuwatch.errors import ConfigError
from gpuwatch.paths import open_regular
from gpuwatch.signals import Column, Entity, Kind, Signal, checked_name

MAGIC = int.from_bytes(b"GWRING01", "little")
HEADER_BYTES = 4096
MAX_BYTES = 64 * 1024 * 1024
FINEST_NS = 1_000_000  # rows that come faster reach back less far: a ring is no larger for them
PERIODS_NS = range(10_000, 10**15)  # shorter ones would make millions of slots of a tick
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}")
TRIPLES = 16
TRIPLE_PERIOD_NS = 10 * SECOND_NS
TRIPLE_DRIFT_NS = 10_000_000  # the wall clock was moved: keep a triple from before and after

# Header words, by index.
W_MAGIC, W_SCHEMA_BYTES, W_CAPACITY, W_ROW_BYTES, W_ROWS_OFFSET = range(5)
W_HEAD, W_WATERMARK, W_HEARTBEAT, W_PERIOD, W_TRIPLE_COUNT = range(5, 10)
W_TRIPLES = 16

# A folder per runtime directory, of mode 0750, whose owner is checked.

ADVICE = "delete it and restart the daemon"
# What rebuilding a schema from the bytes of a foreign file can end in.
SHAPE_ERRORS = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    struct.error,
)


def checked_period(period_ns: int) -> int:
    """Return a time between rows; ValueError if no sampler could ever keep it."""
    if int(period_ns) not in PERIODS_NS:
        raise ValueError(f"period of {period_ns} ns")
    return int(period_ns)


def _checked_file_name(text: str) -> str:
    """Return a ring's name, which a replay uses for a file; ValueError if it leads elsewhere."""
    if not FILE_NAME.fullmatch(text):
        raise ValueError(f"name {text!r}")
    return text


@dataclass(frozen=True, slots=True)
class RingSchema:
    """What a ring's rows hold: immutable for the life of the file.

    `columns` has the integer kinds (counter, bits) before the gauges. `period_ns` is the planned
    time between rows; `delivery_ns` is how long after its time a row may arrive.
    """

    name: str
    duty: str
    source: str
    columns: tuple[Column, ...]
    period_ns: int
    delivery_ns: int = 0
    integers: int = field(init=False)

    def __post_init__(self) -> None:
        integer = [column.signal.kind is not Kind.GAUGE for column in self.columns]
        object.__setattr__(self, "integers", sum(integer))
        assert integer == sorted(integer, reverse=True), f"{self.name}: gauges before integers"

    @property
    def gauges(self) -> int:
        """Number of float32 cells in a row."""
        return len(self.columns) - self.integers

    def rows(self, keep_seconds: float) -> int:
        """Return how many rows a ring has for so long, if it may be as large."""
        return max(4, int(keep_seconds * SECOND_NS / max(self.period_ns, FINEST_NS)) + 1)

    @property
    def row_format(self) -> str:
        """The row as `struct` writes it: little endian, a multiple of 8 bytes."""
        pad = "4x" if self.gauges % 2 else ""
        return f"<qff{self.integers}q{self.gauges}f{pad}q"

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain data; each signal is declared once."""
        numbers: dict[Signal, int] = {}
        for column in self.columns:
            numbers.setdefault(column.signal, len(numbers))
        return {
            "name": self.name,
            "duty": self.duty,
            "source": self.source,
            "period_ns": self.period_ns,
            "delivery_ns": self.delivery_ns,
            "signals": [signal.to_json() for signal in numbers],
            "columns": [
                [list(column.entity), numbers[column.signal], column.label]
                for column in self.columns
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RingSchema":
        """Rebuild a schema; KeyError, TypeError, ValueError or IndexError if it is not one."""
        signals = [Signal.from_json(signal) for signal in data["signals"]]
        return cls(
            name=_checked_file_name(data["name"]),
            duty=checked_name(data["duty"]),
            source=str(data["source"]),
            columns=tuple(
                Column(Entity.from_json(entity), signals[index], str(label))
                for entity, index, label in data["columns"]
            ),
            period_ns=checked_period(data["period_ns"]),
            delivery_ns=int(data["delivery_ns"]),
        )

    def with_entities(self, names: Mapping[Entity, Entity]) -> "RingSchema":
        """Return the schema with entities renamed; those not in `names` stay."""
        return replace(
            self,
            columns=tuple(
                column._replace(entity=names.get(column.entity, column.entity))
                for column in self.columns
            ),
        )


class RingWriter:
    """The one writer of a ring. The file's space is taken up front, so a full disk shows here.

    Raises OSError when the file cannot be made (no space, no permission).
    """

    def __init__(self, path: Path, schema: RingSchema, keep_seconds: float) -> None:
        self.path = path
        self.schema = schema
        packer = struct.Struct(schema.row_format)
        text = json.dumps(schema.to_json()).encode()
        rows_offset = -(-(HEADER_BYTES + len(text)) // HEADER_BYTES) * HEADER_BYTES
        rows = min(schema.rows(keep_seconds), (MAX_BYTES - rows_offset) // packer.size)
        size = rows_offset + rows * packer.size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._map[HEADER_BYTES : HEADER_BYTES + len(text)] = text
        self.words = memoryview(self._map)[:HEADER_BYTES].cast("q")
        self._pack = packer.pack
        self._row_bytes = packer.size
        self._rows_offset = rows_offset
        self._capacity = rows
        self._head = 0
        self._triples: list[ClockTriple] = []
        self.words[W_SCHEMA_BYTES] = len(text)
        self.words[W_CAPACITY] = rows
        self.words[W_ROW_BYTES] = packer.size
        self.words[W_ROWS_OFFSET] = rows_offset
        self.words[W_PERIOD] = schema.period_ns
        self.note_clocks()
        self.advance(self._triples[-1].monotonic_ns)
        self.words[W_MAGIC] = MAGIC
        self._start = self.words[: W_ROWS_OFFSET + 1].tolist()

    def append(
        self, time_ns: int, late_seconds: float, read_seconds: float, cells: Sequence[float]
    ) -> None:
        """Write one row; `cells` in the order of the schema's columns."""
        head = self._head
        offset = self._rows_offset + head % self._capacity * self._row_bytes
        head += 1
        self._map[offset : offset + self._row_bytes] = self._pack(
            time_ns, late_seconds, read_seconds, *cells, head
        )
        self._head = head
        self.words[W_HEAD] = head

    def advance(self, watermark_ns: int) -> None:
        """Say that every row up to `watermark_ns` is written, and that the writer lives."""
        self.words[W_WATERMARK] = watermark_ns
        self.words[W_HEARTBEAT] = watermark_ns

    def set_period(self, period_ns: int) -> None:
        """Publish the present time between rows; readers hold values by it."""
        self.words[W_PERIOD] = period_ns

    def note_clocks(self) -> None:
        """Keep a clock triple every ten seconds, and at once when the wall clock was moved."""
        now = read_clocks()
        if self._triples:
            last = self._triples[-1]
            drift = abs(last.wall_ns(now.monotonic_ns) - now.realtime_ns)
            age = now.monotonic_ns - last.monotonic_ns
            if drift < TRIPLE_DRIFT_NS and age < TRIPLE_PERIOD_NS:
                return
        self._triples = [*self._triples, now][-TRIPLES:]
        for index, triple in enumerate(self._triples):
            start = W_TRIPLES + 3 * index
            for word, value in enumerate(triple):
                self.words[start + word] = value
        self.words[W_TRIPLE_COUNT] = len(self._triples)

    @property
    def intact(self) -> bool:
        """Whether a reader can still find and open the file: a stranger may have been there."""
        try:
            whole = self.path.stat().st_size == len(self._map)
        except OSError:
            return False
        return whole and self.words[: W_ROWS_OFFSET + 1].tolist() == self._start

    def close(self) -> None:
        """Let go of the file; it stays for readers."""
        self.words.release()
        self._map.close()


class RingReader:
    """Reads a ring's rows; safe beside a writer that is running, stopped or killed.

    Raises ConfigError if the file is not a ring of this version, OSError if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size < HEADER_BYTES:
                raise ConfigError(f"{path}: too short for a gpuwatch ring: {ADVICE}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(self._map)
        self._words = view[:HEADER_BYTES].cast("q")
        try:
            if self._words[W_MAGIC] != MAGIC:
                raise ValueError("magic number")
            text = view[HEADER_BYTES : HEADER_BYTES + self._words[W_SCHEMA_BYTES]]
            self.schema = RingSchema.from_json(json.loads(bytes(text)))
            self.row_bytes = struct.calcsize(self.schema.row_format)
            self.capacity = self._words[W_CAPACITY]
            self._rows_offset = self._words[W_ROWS_OFFSET]
            end = self._rows_offset + self.capacity * self.row_bytes
            if (
                self._words[W_ROW_BYTES] != self.row_bytes
                or self._rows_offset < HEADER_BYTES
                or self.capacity <= 0
                or end > len(view)
                or self._words[W_PERIOD] not in PERIODS_NS
            ):
                raise ValueError("sizes")
            self._start = self._map[: 8 * (W_ROWS_OFFSET + 1)]
        except SHAPE_ERRORS as error:
            self._words.release()
            raise ConfigError(
                f"{path}: not a gpuwatch ring ({str(error) or type(error).__name__}): {ADVICE}"
            ) from error
        finally:
            view.release()

    @property
    def intact(self) -> bool:
        """Whether the header still says what it said at first: a stranger may have written there.

        What is left of a ring that is not is worth nothing.
        """
        if self._is_cut:
            return False
        start = self._map[: len(self._start)]
        return start == self._start and self._words[W_PERIOD] in PERIODS_NS

    @property
    def _is_cut(self) -> bool:
        """Whether the file is shorter than what is mapped: to touch the rest ends the process."""
        return self._map.size() < len(self._map)

    @property
    def head(self) -> int:
        """Number of rows ever written."""
        return self._words[W_HEAD]

    @property
    def watermark_ns(self) -> int:
        """Every row up to this monotonic time is written."""
        return self._words[W_WATERMARK]

    @property
    def heartbeat_ns(self) -> int:
        """When the writer last showed that it lives, on the monotonic clock."""
        return self._words[W_HEARTBEAT]

    @property
    def period_ns(self) -> int:
        """The present time between rows."""
        return self._words[W_PERIOD]

    def clock_triples(self) -> list[ClockTriple]:
        """Return the kept clock triples, oldest first."""
        count = min(max(self._words[W_TRIPLE_COUNT], 0), TRIPLES)
        words = self._words[W_TRIPLES : W_TRIPLES + 3 * count].tolist()
        triples = [ClockTriple(*words[i : i + 3]) for i in range(0, len(words), 3)]
        return sorted(triples)

    def before(self, time_ns: int) -> int:
        """Return how many rows were written before `time_ns`, by the rows that are left.

        Looks at some twenty rows, however many there are.
        """
        head = self.head
        first = max(0, head - self.capacity + 1)
        return first + bisect_left(range(first, head), time_ns, key=self._time_ns)

    def _time_ns(self, index: int) -> int:
        offset = self._rows_offset + index % self.capacity * self.row_bytes
        return int.from_bytes(self._map[offset : offset + 8], "little", signed=True)

    def read(self, after: int, until: int | None = None) -> tuple[int, bytes]:
        """Return (first, rows): whole rows in order, from row number `after` + 1 on.

        `first` is the number before the first row returned; it is above `after` by the rows that
        were overwritten before they could be read. Rows are numbered from 1; `until` is the last
        one wanted, None for all there are.
        """
        if self._is_cut:
            return max(after, 0), b""
        head = self.head if until is None else min(until, self.head)
        first = max(after, head - self.capacity + 1, 0)
        if first >= head:
            return max(after, 0), b""
        rows = self._copy(first, head)
        # The writer may meanwhile have begun the row after its head, in the oldest row's place.
        oldest = self.head - self.capacity + 1
        if oldest > first:
            drop = min(oldest, head) - first
            rows = rows[drop * self.row_bytes :]
            first += drop
        numbers = memoryview(rows).cast("q")[self.row_bytes // 8 - 1 :: self.row_bytes // 8]
        for index, number in enumerate(numbers):
            if number != first + index + 1:
                return first, rows[: index * self.row_bytes]
        return first, rows

    def newest(self) -> bytes:
        """Return the newest row, nothing if there is none or it was overwritten meanwhile."""
        head = self.head
        return self.read(head - 1, head)[1]

    def _copy(self, first: int, head: int) -> bytes:
        start, end = first % self.capacity, head % self.capacity
        offset, size = self._rows_offset, self.row_bytes
        if start < end:
            return self._map[offset + start * size : offset + end * size]
        tail = self._map[offset + start * size : offset + self.capacity * size]
        return tail + self._map[offset : offset + end * size]

    def close(self) -> None:
        """Let go of the file."""
        self._words.release()
        self._map.close()

"""The block codec of recordings and history: files that stay readable when they are cut short.

A file is one line (`gpuwatch <what> <format>`), then blocks: kind (4 bytes), payload length, raw
length and CRC-32 (u32 each, little endian), payload (zstandard). The CRC covers the kind, both
lengths and the payload, so no part of a damaged block is ever believed: reading ends before it.

Rows are packed by column: integers as differences, floats as XOR with the value before, then byte
by byte (all first bytes, all second bytes, ...), so slow signals cost zstandard almost nothing.
A row's time is packed as the time it was due: time less lateness lies on an even grid.
"""

import json
import os
import struct
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpuwatch import __version__
from gpuwatch.clock import ClockTriple
from gpuwatch.errors import ConfigError, RecordingError
from gpuwatch.paths import open_regular
from gpuwatch.ring import PERIODS_NS, SHAPE_ERRORS, RingSchema
from gpuwatch.signals import UNKNOWN_INTEGER, Column, Event, valid
from gpuwatch.source import EntityInfo, constant_from_json, constant_to_json
from gpuwatch.summation import row_dtype

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FORMAT = 1
MAX_RAW_BYTES = 64 * 1024 * 1024
ROWS_PER_BLOCK = 8192
LEVEL = 3
MAX_LATE_SECONDS = 1e6

_HEADER = struct.Struct("<4sIII")
_ROWS = struct.Struct("<IIqqq")  # as RowsHead has them
ROWS_HEAD_BYTES = _ROWS.size

RowArray = npt.NDArray[Any]

Constants = Mapping[str, Sequence[tuple[Column, float]]]


@dataclass(frozen=True, slots=True)
class Head:
    """What a file of rows says of itself: times are monotonic, entities as in its rings.

    `constants` are, per duty, the values that do not change. `clocks` turn times into wall time.
    """

    start_ns: int
    end_ns: int
    rings: tuple[RingSchema, ...]
    entities: tuple[EntityInfo, ...] = ()
    constants: Constants = field(default_factory=dict)
    clocks: tuple[ClockTriple, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    host: Mapping[str, str] = field(default_factory=dict)
    boot_id: str = ""
    created_realtime_ns: int = 0
    version: str = __version__

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "version": self.version,
            "created_realtime_ns": self.created_realtime_ns,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "boot_id": self.boot_id,
            "host": dict(self.host),
            "config": dict(self.config),
            "clocks": [list(triple) for triple in self.clocks],
            "rings": [schema.to_json() for schema in self.rings],
            "entities": [info.to_json() for info in self.entities],
            "constants": {
                duty: [constant_to_json(column, value) for column, value in values]
                for duty, values in self.constants.items()
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Head":
        """Rebuild it; one of SHAPE_ERRORS if `data` is no head."""
        rings = tuple(RingSchema.from_json(schema) for schema in data["rings"])
        return cls(
            start_ns=_instant_ns(data["start_ns"]),
            end_ns=_instant_ns(data["end_ns"]),
            rings=rings,
            entities=tuple(EntityInfo.from_json(info) for info in data["entities"]),
            constants={
                str(duty): [constant_from_json(value) for value in values]
                for duty, values in data["constants"].items()
            },
            clocks=tuple(ClockTriple(*map(_instant_ns, triple)) for triple in data["clocks"]),
            config=dict(data["config"]),
            host={valid(key): valid(value) for key, value in data["host"].items()},
            boot_id=str(data["boot_id"]),
            created_realtime_ns=int(data["created_realtime_ns"]),
            version=str(data["version"]),
        )


def _instant_ns(value: Any) -> int:
    """Return a time of a clock; ValueError if it is beyond what clocks tell, years of 292."""
    if not 0 <= (time_ns := int(value)) < 2**63:
        raise ValueError(f"time of {time_ns} ns")
    return time_ns


class Block(NamedTuple):
    """One whole block, and the offsets of its first byte and of the byte after it."""

    kind: bytes
    raw: bytes
    start: int
    end: int


class RowsHead(NamedTuple):
    """How a rows block begins: as RowsBlock, with the number of rows and that of the first."""

    ring: int
    rows: int
    first: int
    period_ns: int
    floor_ns: int


class RowsBlock(NamedTuple):
    """Rows of one ring in order of time, laid out as `summation.row_dtype` says.

    `ring` counts the file's ring schemas. `period_ns` is the time between rows that was in force.
    No row in this block or any later one is before `floor_ns`, whatever its ring.
    """

    ring: int
    period_ns: int
    floor_ns: int
    rows: RowArray

    @property
    def rows_bytes(self) -> bytes:
        """The rows as a ring holds them."""
        return self.rows.tobytes()


def first_line(what: str) -> bytes:
    """Return what a file of blocks begins with; `what` is its sort, such as `recording`."""
    return f"gpuwatch {what} {FORMAT}\n".encode()


def encode_block(kind: bytes, raw: bytes) -> bytes:
    """Return a whole block; `kind` is 4 bytes, `raw` at most MAX_RAW_BYTES."""
    assert len(kind) == 4
    assert len(raw) <= MAX_RAW_BYTES
    payload = zstd.compress(raw, LEVEL)
    header = _HEADER.pack(kind, len(payload), len(raw), 0)[:-4]
    crc = zlib.crc32(payload, zlib.crc32(header))
    return header + crc.to_bytes(4, "little") + payload


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`. Raises OSError, on a full disk after a part of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class BlockReader:
    """Reads a file of blocks, also one that is still being written.

    Raises RecordingError if the file cannot be opened or is not of this sort and format.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        line = first_line(what)
        try:
            self._file = open_regular(path)
            found = self._file.readline(2 * len(line))
        except OSError as error:
            raise RecordingError(
                f"{path}: {error.strerror}: give the path of a gpuwatch {what}"
            ) from error
        except ConfigError as error:
            raise RecordingError(
                f"{path}: not a regular file: give the path of a gpuwatch {what}"
            ) from error
        self.start = len(found)
        if found != line:
            self.close()
            name, _, number = line.rstrip().rpartition(b" ")
            other = found[len(name) :].strip()
            if found.startswith(name + b" ") and other.isdigit() and int(other) > int(number):
                raise RecordingError(
                    f"{path}: written by a newer gpuwatch (format {int(other)}, this one reads "
                    f"{FORMAT}): upgrade gpuwatch"
                )
            raise RecordingError(f"{path}: not a gpuwatch {what}: give the path of one")

    def blocks(
        self, offset: int, kinds: Collection[bytes] = (), most: int = MAX_RAW_BYTES
    ) -> Iterator[Block]:
        """Yield whole blocks from `offset` (`start`, or a block's `end`) to the first damage.

        With `kinds` all others are passed over unread. Of each block at most the first `most` bytes
        are given. Raises RecordingError when the file system fails.
        """
        try:
            size = os.fstat(self._file.fileno()).st_size
            while block := self._read(offset, size, kinds, most):
                if not kinds or block.kind in kinds:
                    yield block
                offset = block.end
        except OSError as error:
            raise RecordingError(
                f"{self.path}: {error.strerror}: copy the file and retry"
            ) from error

    def _read(self, offset: int, size: int, kinds: Collection[bytes], most: int) -> Block | None:
        self._file.seek(offset)
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        kind, length, raw_length, crc = _HEADER.unpack(header)
        end = offset + _HEADER.size + length
        # Lengths are believed only once the CRC has been seen: ask for no absurd memory before.
        if end > size or raw_length > MAX_RAW_BYTES or length > 2 * MAX_RAW_BYTES:
            return None
        if kinds and kind not in kinds:
            return Block(kind, b"", offset, end)
        payload = self._file.read(length)
        if zlib.crc32(payload, zlib.crc32(header[:-4])) != crc:
            return None
        try:
            if zstd.get_frame_info(payload).decompressed_size != raw_length:
                return None
            raw = zstd.ZstdDecompressor().decompress(payload, min(raw_length, most))
        except zstd.ZstdError:
            return None
        return Block(kind, raw, offset, end)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def encode_json(value: Any) -> bytes:
    """Return a JSON block's raw bytes."""
    return json.dumps(value, separators=(",", ":")).encode()


def decode_json(raw: bytes, path: Path) -> Any:
    """Return a JSON block's value. Raises RecordingError."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "a block is not JSON") from error


def decode_list(raw: bytes, path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON block that lists some. Raises RecordingError."""
    data = decode_json(raw, path)
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise damaged(path, "a list")
    return data


def decode_events(raw: bytes, path: Path) -> list[Event]:
    """Return the events of a block. Raises RecordingError."""
    try:
        return [Event.from_json(data) for data in decode_list(raw, path)]
    except SHAPE_ERRORS as error:
        raise damaged(path, "an event") from error


def decode_head(raw: bytes, path: Path) -> Head:
    """Return the head of a block. Raises RecordingError."""
    try:
        return Head.from_json(decode_json(raw, path))
    except SHAPE_ERRORS as error:
        raise damaged(path, "its head") from error


def damaged(path: Path, what: str) -> RecordingError:
    """Return the error for a block that is whole but makes no sense."""
    return RecordingError(f"{path}: damaged or not written by gpuwatch: {what}: use another file")


def rows_per_block(schema: RingSchema) -> int:
    """Return how many rows of a ring go into one block at most."""
    return max(1, min(ROWS_PER_BLOCK, MAX_RAW_BYTES // 4 // row_dtype(schema).itemsize))


def encode_rows(block: RowsBlock) -> bytes:
    """Return a rows block's raw bytes; the rows' numbers must be consecutive."""
    rows = block.rows
    first = int(rows["sequence"][0]) if len(rows) else 0
    head = _ROWS.pack(block.ring, len(rows), first, block.period_ns, block.floor_ns)
    due = rows["time_ns"] - _late_ns(rows["late"])
    whole = np.diff(np.vstack([due, rows["integers"].T]), axis=1, prepend=0)
    small = np.vstack([rows["late"], rows["read"], rows["gauges"].T]).view(np.uint32)
    small[:, 1:] ^= small[:, :-1].copy()
    return head + _shuffle(whole) + _shuffle(small)


def decode_rows_head(raw: bytes, path: Path) -> RowsHead:
    """Return how a rows block begins, of its first ROWS_HEAD_BYTES. Raises RecordingError."""
    try:
        return RowsHead(*_ROWS.unpack_from(raw))
    except struct.error as error:
        raise damaged(path, "rows fit no ring") from error


def decode_rows(raw: bytes, schemas: tuple[RingSchema, ...], path: Path) -> RowsBlock:
    """Return the rows as they were. Raises RecordingError if they fit no ring."""
    head, schema, whole_raw, small_raw = _split(raw, schemas, path)
    ring, count, first, period_ns, floor_ns = head
    whole = _restore(whole_raw, np.dtype(np.int64)).cumsum(axis=1)
    floats = np.bitwise_xor.accumulate(_restore(small_raw, np.dtype(np.uint32)), axis=1)
    floats = floats.view(np.float32)
    rows = np.zeros(count, row_dtype(schema))
    rows["late"], rows["read"], rows["gauges"] = floats[0], floats[1], floats[2:].T
    rows["time_ns"] = whole[0] + _late_ns(rows["late"])
    rows["integers"] = whole[1:].T
    rows["sequence"] = np.arange(count, dtype=np.int64) + np.int64(first)
    return RowsBlock(ring, period_ns, floor_ns, rows)


def decode_columns(
    raw: bytes, schemas: tuple[RingSchema, ...], wanted: Sequence[int], path: Path
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the times of rows, and of the wanted columns alone the cells in their unit.

    `wanted` are numbers of columns, rising. The cells have a line for each row; unknown ones are
    NaN, bits are as they were counted. Raises RecordingError.
    """
    _, schema, whole_raw, small_raw = _split(raw, schemas, path)
    integers = schema.integers
    counters = [index for index in wanted if index < integers]
    gauges = [index for index in wanted if index >= integers]
    lines = [0, *(1 + index for index in counters)]
    whole = _restore(whole_raw[lines], np.dtype(np.int64)).cumsum(axis=1)
    lines = [0, *(2 + index - integers for index in gauges)]
    small = np.bitwise_xor.accumulate(_restore(small_raw[lines], np.dtype(np.uint32)), axis=1)
    late, *_ = floats = small.view(np.float32)
    scales = np.array([[schema.columns[index].signal.scale] for index in counters])
    counts = np.where(whole[1:] == UNKNOWN_INTEGER, np.nan, whole[1:] * scales.reshape(-1, 1))
    return whole[0] + _late_ns(late), np.concatenate([counts, floats[1:]]).T


def _split(
    raw: bytes, schemas: tuple[RingSchema, ...], path: Path
) -> tuple[RowsHead, RingSchema, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return a rows block's numbers, its ring, and its shuffled lines of 8 and of 4 bytes."""
    try:
        head = RowsHead(*_ROWS.unpack_from(raw))
        ring, count, _, period_ns, _ = head
        schema = schemas[ring]
        whole_lines, small_lines = 1 + schema.integers, 2 + schema.gauges
        split = _ROWS.size + whole_lines * 8 * count
        if len(raw) != split + small_lines * 4 * count or period_ns not in PERIODS_NS:
            raise ValueError("sizes")
    except (struct.error, IndexError, ValueError) as error:
        raise damaged(path, "rows fit no ring") from error
    data = np.frombuffer(raw, np.uint8)
    whole = data[_ROWS.size : split].reshape(whole_lines, 8, count)
    return head, schema, whole, data[split:].reshape(small_lines, 4, count)


def _late_ns(late: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return lateness in whole nanoseconds; any fixed value where there is no sensible one."""
    with np.errstate(invalid="ignore"):
        seconds = np.nan_to_num(late.astype(np.float64))
    limited = np.clip(seconds, -MAX_LATE_SECONDS, MAX_LATE_SECONDS)
    return (limited * 1e9).astype(np.int64)


def _shuffle(lines: npt.NDArray[Any]) -> bytes:
    """Return, line by line, all first bytes, then all second bytes, and so on."""
    parts = np.ascontiguousarray(lines).view(np.uint8).reshape(*lines.shape, lines.itemsize)
    return parts.transpose(0, 2, 1).tobytes()


def _restore(shuffled: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the values of lines that were shuffled."""
    lines, _, count = shuffled.shape
    return np.ascontiguousarray(shuffled.transpose(0, 2, 1)).view(dtype).reshape(lines, count)

"""Recordings: rows, events and alerts of a stretch of time in one file, at full resolution.

`python -m gpuwatch.recording` is the recorder, a one-off child: it copies what the rings hold, so
saving evidence costs the samplers and the daemon nothing. A file carries its final name only when
it is whole; until then `.tmp` follows it, readable up to its last whole block. Rows are written in
slices of a second over all rings, so a file cut short is cut in time, and replay can stream.
"""

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from gpuwatch.clock import SECOND_NS, ClockTriple
from gpuwatch.codec import (
    BlockReader,
    Head,
    RowArray,
    RowsBlock,
    damaged,
    decode_events,
    decode_head,
    decode_list,
    decode_rows,
    encode_block,
    encode_json,
    encode_rows,
    first_line,
    rows_per_block,
    write_all,
)
from gpuwatch.errors import ConfigError, GpuwatchError, RecordingError
from gpuwatch.quota import is_full
from gpuwatch.ring import SHAPE_ERRORS, RingReader, RingSchema
from gpuwatch.signals import Entity, Event
from gpuwatch.source import EntityInfo, constant_from_json
from gpuwatch.summation import row_dtype

SORT = "recording"
HEAD, ROWS, EVENTS, ALERTS, END = b"HEAD", b"ROWS", b"EVNT", b"ALRT", b"END\0"
CANARIES = b"CNRY"  # who does not know this kind passes over it
SLICE_NS = SECOND_NS
FILE_MODE = 0o640
NICE = 10  # a job on the node goes first, evidence can wait a little


class EventsBlock(NamedTuple):
    """Events, in order of time."""

    events: list[Event]


class AlertsBlock(NamedTuple):
    """Alerts as plain data."""

    alerts: list[dict[str, Any]]


class RecordingWriter:
    """Writes a recording; as a context manager it completes the file unless an exception left it.

    Raises OSError (a full disk) from every call; what was written before stays readable in
    `temporary`.
    """

    def __init__(self, path: Path, head: Head) -> None:
        self.path = path
        self.temporary = path.with_suffix(path.suffix + ".tmp")
        self.head = head
        self.bytes = 0
        self._counts = {"rows": 0, "events": 0, "alerts": 0}
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.temporary, flags, FILE_MODE)
        try:
            os.fchmod(self._descriptor, FILE_MODE)
            self._write(first_line(SORT))
            self._block(HEAD, encode_json(head.to_json()))
        except OSError:
            self.abandon()
            self.temporary.unlink(missing_ok=True)
            raise

    def rows(self, block: RowsBlock) -> None:
        """Write rows, in as many blocks as they need; floors must not fall from call to call."""
        size = rows_per_block(self.head.rings[block.ring])
        for start in range(0, len(block.rows), size):
            part = block._replace(rows=block.rows[start : start + size])
            self._block(ROWS, encode_rows(part))
        self._counts["rows"] += len(block.rows)

    def events(self, events: Sequence[Event]) -> None:
        """Write events; before the rows they belong to, or replay cannot show them in time."""
        self._block(EVENTS, encode_json([event.to_json() for event in events]))
        self._counts["events"] += len(events)

    def alerts(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Write alerts as plain data."""
        self._block(ALERTS, encode_json([dict(alert) for alert in alerts]))
        self._counts["alerts"] += len(alerts)

    def canaries(self, courses: Sequence[Mapping[str, Any]]) -> None:
        """Write the readings of canaries, as `courses` describes them."""
        self._block(CANARIES, encode_json(courses))

    def close(self) -> None:
        """Complete the file, make it durable and give it its final name."""
        try:
            self._block(END, encode_json(self._counts))
            os.fsync(self._descriptor)
        finally:
            self.abandon()
        self.temporary.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def abandon(self) -> None:
        """Let go of the file as it is, under its temporary name."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _block(self, kind: bytes, raw: bytes) -> None:
        self._write(encode_block(kind, raw))

    def _write(self, data: bytes) -> None:
        try:
            write_all(self._descriptor, data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.temporary)) from error
        self.bytes += len(data)


class RecordingReader:
    """Reads a recording, whole or cut short; iterate it any number of times.

    After an iteration `complete` says whether it came to the end block, and `end_ns` up to when
    nothing is missing: of a file that was cut short the last part, at most a second more than what
    is not there. Memory stays at one block.
    Raises RecordingError: not a recording, no whole block, or one that makes no sense.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.complete = False
        self.end_ns = 0
        self._file = BlockReader(path, SORT)
        try:
            first = next(self._file.blocks(self._file.start), None)
            if first is None:
                raise RecordingError(f"{path}: holds no whole block: use another recording")
            if first.kind != HEAD:
                raise damaged(path, "it does not begin with its head")
            self._rows_start = first.end
            self.head = decode_head(first.raw, path)
        except RecordingError:
            self.close()
            raise

    def __iter__(self) -> Iterator[RowsBlock | EventsBlock | AlertsBlock]:
        self.complete, self.end_ns = False, self.head.start_ns
        for block in self._file.blocks(self._rows_start):
            if block.kind == ROWS:
                rows = decode_rows(block.raw, self.head.rings, self.path)
                self.end_ns = rows.floor_ns
                yield rows
            elif block.kind == EVENTS:
                yield EventsBlock(decode_events(block.raw, self.path))
            elif block.kind == ALERTS:
                yield AlertsBlock(decode_list(block.raw, self.path))
            elif block.kind == END:
                self.complete, self.end_ns = True, self.head.end_ns
                return

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class _Taken(NamedTuple):
    """What one ring holds of the time asked for."""

    schema: RingSchema
    period_ns: int
    watermark_ns: int
    clocks: list[ClockTriple]
    rows: RowArray


def record(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Save what the rings hold from `since_ns` up to `until_ns`; return path, rows and bytes.

    Settings: `output`, `rings` (paths), `since_ns`, `until_ns`; optional `names` (pairs of
    entities: as in the rings, as recorded), `entities`, `constants` (per duty), `events`, `alerts`,
    `canaries`, `config`, `host`. A ring that has gone is left out. Rows are taken from all rings
    first, and compressed afterwards: memory is bounded by the rings' size, and nothing is
    overwritten meanwhile.

    Raises RecordingError if no ring has such a row, OSError if the file cannot be written, or if
    less of the disk is free than `free_ratio` (optional).
    """
    output = Path(settings["output"])
    free_ratio = float(settings.get("free_ratio", 0))
    if is_full(output.parent, free_ratio):
        fault = f"less than {free_ratio:.0%} of the disk is free"
        raise OSError(errno.ENOSPC, fault, str(output.parent))
    names = {Entity(*old): Entity(*new) for old, new in settings.get("names", ())}
    since, until = int(settings["since_ns"]), int(settings["until_ns"])
    taken = []
    for path in settings["rings"]:
        with suppress(OSError, ConfigError):
            taken.append(_take(Path(path), names, since, until))
    held = [ring.rows["time_ns"] for ring in taken if len(ring.rows)]
    if not held:
        raise RecordingError(f"{output}: no ring has rows of that time: ask for a later one")
    start = max(since, int(min(times[0] for times in held)))
    last = max(int(times[-1]) + 1 for times in held)
    end = min(until, max(last, *(ring.watermark_ns for ring in taken)))
    uname = os.uname()
    infos = [EntityInfo.from_json(info) for info in settings.get("entities", ())]
    head = Head(
        start_ns=start,
        end_ns=end,
        rings=tuple(ring.schema for ring in taken),
        entities=tuple(replace(info, entity=names.get(info.entity, info.entity)) for info in infos),
        constants={
            duty: [
                constant_from_json([names.get(Entity(*entity), entity), *rest])
                for entity, *rest in values
            ]
            for duty, values in settings.get("constants", {}).items()
        },
        clocks=tuple(sorted({triple for ring in taken for triple in ring.clocks})),
        config=settings.get("config", {}),
        host=settings.get("host", {"hostname": uname.nodename, "kernel": uname.release}),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        created_realtime_ns=time.time_ns(),
    )
    writer = RecordingWriter(output, head)
    try:
        with writer:
            writer.events([Event.from_json(event) for event in settings.get("events", ())])
            writer.alerts(settings.get("alerts", ()))
            if courses := settings.get("canaries"):
                writer.canaries(courses)
            for floor in range(start, end, SLICE_NS):
                for index, ring in enumerate(taken):
                    low, high = np.searchsorted(ring.rows["time_ns"], [floor, floor + SLICE_NS])
                    if high > low:
                        part = ring.rows[low:high]
                        writer.rows(RowsBlock(index, ring.period_ns, floor, part))
    except OSError:  # on a full disk a part that nobody was told of only takes room
        writer.temporary.unlink(missing_ok=True)
        raise
    rows = sum(map(len, held))
    return {"path": str(output), "rows": rows, "bytes": writer.bytes}


def _take(path: Path, names: Mapping[Entity, Entity], since: int, until: int) -> _Taken:
    reader = RingReader(path)
    try:
        schema = reader.schema.with_entities(names)
        watermark = reader.watermark_ns
        _, packed = reader.read(0)
        rows = np.frombuffer(packed, row_dtype(schema))
        low, high = np.searchsorted(rows["time_ns"], [since, until])
        return _Taken(
            schema, reader.period_ns, watermark, reader.clock_triples(), rows[low:high].copy()
        )
    finally:
        reader.close()


def run(work: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Do what the settings on standard input say; answer with one line of JSON.

    An answer may have `error`, and `full` if there was no room.
    """
    with suppress(OSError):  # a service may be forbidden to
        os.nice(NICE)
    try:
        result = work(json.load(sys.stdin.buffer))
    except GpuwatchError as error:
        result = {"error": str(error)}
    except OSError as error:
        fix = "make room there or choose another state directory (--path.state)"
        result = {"error": f"{error.filename or 'recording'}: {error.strerror}: {fix}"}
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            result["full"] = True
    except SHAPE_ERRORS as error:
        result = {"error": f"recorder settings: {type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(run(record))

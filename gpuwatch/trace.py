"""A Perfetto trace as packets: tracks, and what happens on them.

The messages are those of Google's package `perfetto`, which follows the format, weighs 2 MB and
needs protobuf alone; nothing else of it is used. Packets are compressed some thousands at a time.
"""

import hashlib
import json
import sys
import zlib
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from gpuwatch.errors import ConfigError
from gpuwatch.extract import Array, Extract, Times
from gpuwatch.families import ENTITY_LABELS
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Entity

SEQUENCE = 1
REALTIME, MONOTONIC, BOOTTIME = 1, 3, 6  # BuiltinClock
CLEARED = 1  # SEQ_INCREMENTAL_STATE_CLEARED: defaults begin here
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.Type
EXPLICIT = 3  # order of child tracks: by their ranks


class Trace:
    """A trace file that is being written. Raises OSError."""

    def __init__(self, path: Path) -> None:
        try:
            from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as messages
        except ImportError as error:
            raise ConfigError(
                "--to perfetto: its messages are missing:"
                f" {sys.executable} -m pip install 'gpuwatch[export]'"
            ) from error
        self._messages: Any = messages
        self._file = path.open("wb")
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError) if kind else nullcontext():  # that the disk is full was told
            self._file.close()

    def begin(self, clock: int, trace_clock: int, snapshots: Iterable[Mapping[int, int]]) -> None:
        """Say by which clock all times are, which is that of the trace, and what clocks showed."""
        first = self._add()
        first.trusted_packet_sequence_id = SEQUENCE
        first.sequence_flags = CLEARED
        first.trace_packet_defaults.timestamp_clock_id = clock
        for times in snapshots:
            snapshot = self._add().clock_snapshot
            snapshot.primary_trace_clock = trace_clock
            for one, time_ns in times.items():
                snapshot.clocks.add(clock_id=one, timestamp=time_ns)

    def track(self, uuid: int, name: str, parent: int, rank: int, about: str) -> Any:
        """Declare a track and return its descriptor."""
        packet = self._add()
        packet.trusted_packet_sequence_id = SEQUENCE
        track = packet.track_descriptor
        track.uuid, track.name, track.description = uuid, name, about
        if parent:
            track.parent_uuid = parent
        track.sibling_order_rank = rank
        track.child_ordering = EXPLICIT
        return track

    def event(self, kind: int, track: int, time_ns: int) -> Any:
        """Add an event to a track and return it."""
        packet = self._add()
        packet.timestamp = time_ns
        packet.trusted_packet_sequence_id = SEQUENCE
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        return event

    def slice(self, track: int, name: str, start_ns: int, end_ns: int) -> None:
        """Add a slice."""
        self.event(BEGIN, track, start_ns).name = name
        self.event(END, track, end_ns)

    def points(self, track: int, times: Times, values: Array) -> None:
        """Add points to a counter."""
        whole = values.dtype == np.int64
        for time_ns, value in zip(times.tolist(), values.tolist(), strict=True):
            event = self.event(COUNTER, track, time_ns)
            if not whole:
                event.double_counter_value = value
            elif value != UNKNOWN_INTEGER:
                event.counter_value = value
            else:
                event.double_counter_value = UNKNOWN_GAUGE

    def flush(self, least: int = 1) -> None:
        """Write the packets that wait, if there are so many."""
        if len(self._kept.packet) >= least:
            packed = self._messages.Trace()
            packed.packet.add().compressed_packets = zlib.compress(self._kept.SerializeToString())
            self._file.write(packed.SerializeToString())
            self._begin()

    def _begin(self) -> None:
        # A new message each time: one that is cleared keeps its memory.
        self._kept = self._messages.Trace()
        self._add = self._kept.packet.add


class Tracks:
    """Declares tracks when they are first needed: one without events says nothing.

    `node` is the track of the whole node, above all others.
    """

    def __init__(self, trace: Trace, extract: Extract) -> None:
        self._trace = trace
        self._extract = extract
        self._declared: dict[tuple[str, ...], int] = {}
        self._ranks = {entity: rank for rank, entity in enumerate(_in_order(extract))}
        about = extract.about()
        about = {key: about[key] for key in ("sort", "file", "gpuwatch", "host", "boot_id")}
        name = f"gpuwatch {extract.head.host.get('hostname', '')}".strip()
        self.node, _ = self._get(("",), name, 0, 0, json.dumps(about))

    def entity(self, entity: Entity) -> int:
        """Return an entity's track."""
        known = self._declared.get(("", *entity))
        if known is not None:
            return known
        labels = self._extract.labels.get(entity, {})
        name = str(entity)
        if entity.kind == "gpu":
            name = f"GPU {entity.id}" + (f" ({labels['uuid']})" if "uuid" in labels else "")
        about = ", ".join(f"{key}={value}" for key, value in labels.items())
        rank = self._ranks.setdefault(entity, len(self._ranks))
        return self._get(("", *entity), name, self.node, rank, about)[0]

    def below(self, parent: int, name: str, rank: int, about: str = "") -> int:
        """Return the track of that name below another one."""
        return self._get((str(parent), name), name, parent, rank, about)[0]

    def counter(self, parent: int, column: Column, name: str, rank: int) -> int:
        """Return the track of a counter."""
        uuid, track = self._get((str(parent), name), name, parent, rank, column.signal.help)
        if track is not None:
            track.counter.unit_name = column.signal.unit
            track.counter.y_axis_share_key = column.name  # all GPUs on one scale
        return uuid

    def _get(
        self, key: tuple[str, ...], name: str, parent: int, rank: int, about: str
    ) -> tuple[int, Any]:
        """Return a track's uuid, and its descriptor if it is new."""
        uuid = self._declared.get(key)
        if uuid is not None:
            return uuid, None
        # The same in each trace of a node's boot and in no other: traces may be merged.
        text = json.dumps([dict(self._extract.head.host), self._extract.head.boot_id, key])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        uuid = self._declared[key] = int.from_bytes(digest) >> 1
        return uuid, self._trace.track(uuid, name, parent, rank, about)


def _in_order(extract: Extract) -> list[Entity]:
    """Return the entities as tracks are to follow each other: GPU 10 after GPU 9."""
    columns = (column for table in extract.tables for column in table.columns)
    entities = {*extract.labels, *(column.entity for column in columns)}
    kinds = {kind: place for place, kind in enumerate(ENTITY_LABELS)}
    return sorted(entities, key=lambda e: (kinds.get(e.kind, len(kinds)), len(e.id), e))

"""Reads a Perfetto trace back, by the messages of the format alone."""

import math
import zlib
from bisect import bisect_right
from typing import NamedTuple

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as messages

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.Type


class Point(NamedTuple):
    """A value that a counter has from then on."""

    time_ns: int
    value: float | int


class Slice(NamedTuple):
    """A stretch of time."""

    start_ns: int
    end_ns: int
    name: str


class Instant(NamedTuple):
    """Something that happened, with what is said of it."""

    time_ns: int
    name: str
    detail: dict[str, str]


class Track(NamedTuple):
    """What is on a track, in order of time, and its declaration."""

    declared: messages.TrackDescriptor
    points: list[Point]
    slices: list[Slice]
    instants: list[Instant]

    def value(self, time_ns):
        """Return the counter's value at a time, NaN before its first."""
        place = bisect_right(self.points, time_ns, key=lambda point: point.time_ns)
        return self.points[place - 1].value if place else math.nan

    def covers(self, time_ns):
        """Say whether a slice covers an instant."""
        place = bisect_right(self.slices, time_ns, key=lambda found: found.start_ns)
        return place > 0 and time_ns < self.slices[place - 1].end_ns


def packets(path):
    """Return the packets of a trace, unpacked, those that are compressed as well."""
    found = []
    for packet in messages.Trace.FromString(path.read_bytes()).packet:
        if packet.compressed_packets:
            found += messages.Trace.FromString(zlib.decompress(packet.compressed_packets)).packet
        else:
            found.append(packet)
    return found


def read_trace(path):
    """Return the clock of a trace's times, its snapshots of clocks, and its tracks by path."""
    clock, snapshots, declared, events = None, [], {}, {}
    for packet in packets(path):
        if packet.HasField("trace_packet_defaults"):
            clock = packet.trace_packet_defaults.timestamp_clock_id
        if packet.HasField("clock_snapshot"):
            clocks = packet.clock_snapshot.clocks
            snapshots.append({one.clock_id: one.timestamp for one in clocks})
        if packet.HasField("track_descriptor"):
            assert packet.track_descriptor.uuid not in declared
            declared[packet.track_descriptor.uuid] = packet.track_descriptor
        if packet.HasField("track_event"):
            events.setdefault(packet.track_event.track_uuid, []).append(packet)
    assert events.keys() <= declared.keys()
    tracks = {}
    for uuid, track in declared.items():
        names = [track.name]
        while track.parent_uuid:
            track = declared[track.parent_uuid]
            names.insert(0, track.name)
        assert tuple(names) not in tracks, names
        tracks[tuple(names)] = _track(declared[uuid], events.get(uuid, []))
    return clock, snapshots, tracks


def _track(declared, found):
    track = Track(declared, [], [], [])
    open_slices = []
    for packet in sorted(found, key=lambda packet: packet.timestamp):  # stable, as importers are
        event = packet.track_event
        if event.type == COUNTER:
            whole = event.HasField("counter_value")
            value = event.counter_value if whole else event.double_counter_value
            track.points.append(Point(packet.timestamp, value))
        elif event.type == BEGIN:
            open_slices.append((packet.timestamp, event.name))
        elif event.type == END:
            start_ns, name = open_slices.pop()
            track.slices.append(Slice(start_ns, packet.timestamp, name))
        elif event.type == INSTANT:
            detail = {note.name: note.string_value for note in event.debug_annotations}
            track.instants.append(Instant(packet.timestamp, event.name, detail))
    assert not open_slices
    return track

"""Replay: a recording as the feeder, so windows and alerts come about again at any speed.

`ticks` sums a recording up at full speed. `python -m gpuwatch.replay` stands in for the samplers:
it fills rings like the recorded ones in real time and for ever. Both get their rows from
`Playback`, so their windows are the same but for the time.
"""

import itertools
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpuwatch import pulse as page
from gpuwatch.child import Child, no_room
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.control import Connection, Message, Server
from gpuwatch.errors import RecordingError, SourceUnavailable
from gpuwatch.manifest import links_of
from gpuwatch.playback import Playback, Step
from gpuwatch.recording import RecordingReader
from gpuwatch.ring import RingWriter
from gpuwatch.signals import Entity, Event
from gpuwatch.source import constant_to_json
from gpuwatch.summation import RingWindows, reach_ns
from gpuwatch.window import STARTING_NS, TICK_NS, Tick, Window

BATCH_SECONDS = 0.005
EVENTS_KEPT = 1000


def ticks(reader: RecordingReader, loop_for_seconds: float | None = None) -> Iterator[Tick]:
    """Yield a recording's ticks as fast as they can be summed up.

    With `loop_for_seconds` the recording is repeated until that much data time has passed.
    Raises RecordingError if it holds no whole tick or makes no sense.
    """
    playback = Playback(reader)
    windows = [RingWindows(schema) for schema in playback.tracks]
    in_order = sorted(windows, key=lambda ring: not ring.dense)  # as in the feed of a daemon
    constants: dict[Entity, dict[str, float]] = {}
    for column, value in itertools.chain.from_iterable(reader.head.constants.values()):
        constants.setdefault(column.entity, {})[column.name] = value
    links = links_of(reader.head.entities)
    heard: set[str] = set()
    end_ns = playback.start_ns + int((loop_for_seconds or 0) * SECOND_NS)
    for step in playback.steps(0, loop=loop_for_seconds is not None):
        if loop_for_seconds is not None and step.end_ns > end_ns:
            return
        tick = Tick(
            step.start_ns, step.end_ns, constants=constants, events=step.events, links=links
        )
        for piece in step.pieces:
            windows[piece.track].period_ns = piece.period_ns
            windows[piece.track].add(piece.rows.tobytes())
        fed: dict[str, bool] = {}
        for ring in in_order:
            if ring.ended:
                continue
            ring.close(tick)
            has_data = len(tick.rows[-1].late_seconds) > 0 or ring.reach_ns >= tick.end_ns
            fed[ring.schema.source] = fed.get(ring.schema.source, False) or has_data
        heard |= {source for source, up in fed.items() if up}
        for source, up in fed.items():
            if source not in heard and tick.end_ns < playback.start_ns + STARTING_NS:
                continue  # as in the feed of a daemon
            tick.windows[Entity("source", source)] = {
                "source_up": Window.steady(tick.start_ns, tick.end_ns, float(up)),
                **tick.lateness(source),
            }
        yield tick


class Live:
    """Puts a recording's rows into rings when they are due, as its samplers once did.

    Raises OSError if there is no space for the rings.
    """

    def __init__(self, child: Child, reader: RecordingReader) -> None:
        self.child = child
        self.head = reader.head
        self.playback = Playback(reader)
        self.runtime = Path(child.config["paths"]["runtime"])
        self.duties = list(dict.fromkeys(schema.duty for schema in self.playback.tracks))
        self._unpack = [struct.Struct(ring.row_format).iter_unpack for ring in self.playback.tracks]
        self._reach = [0] * len(self.playback.tracks)
        self._events: deque[Message] = deque(maxlen=EVENTS_KEPT)
        self._event_number = 0
        self._listeners: set[Connection] = set()
        self._writers = self._make_rings()

    def _make_rings(self) -> list[RingWriter]:
        directory = Path(self.child.settings["ring_directory"])
        keep_seconds = float(self.child.config["ring"]["seconds"])
        writers: list[RingWriter] = []
        paths: set[Path] = set()
        for index, schema in enumerate(self.playback.tracks):
            group = schema.name.removeprefix(f"{schema.duty}.")
            path = directory / f"{schema.duty}.{self.child.generation}.{group}.ring"
            if path in paths:  # the recorded sampler came back with other columns
                path = path.with_suffix(f".{index}.ring")
            paths.add(path)
            path.unlink(missing_ok=True)
            writers.append(RingWriter(path, schema, keep_seconds))
        return writers

    def run(self) -> int:
        """Play until told to stop or abandoned; return the exit status.

        Raises RecordingError if the recording holds no whole tick or makes no sense,
        SourceUnavailable if somebody removed a ring.
        """
        name = f"{{}}.{self.child.generation}.sock"
        servers = [Server(self.runtime / name.format(duty), 0o600) for duty in self.duties]
        try:
            return self._loop(servers)
        finally:
            for server in servers:
                server.close()

    def _loop(self, servers: list[Server]) -> int:
        shift = (monotonic_ns() - self.playback.start_ns) // TICK_NS * TICK_NS
        announced = False
        for step in self.playback.steps(shift, loop=True):
            rows, events = self._due(step), deque(step.events)
            now = 0
            while now < step.end_ns:
                now = monotonic_ns()
                if self.child.stopping or not self.child.current:
                    return 0
                self._write(rows, min(now, step.end_ns))
                while events and events[0].time_ns <= now:
                    self._tell(servers[0], events.popleft())
                for server in servers:
                    # Events are told once, by the first duty, whoever they were recorded of.
                    self._listen(server, self._events if server is servers[0] else ())
                if now < step.end_ns:
                    if not announced:
                        self._write_manifests()
                        announced = True
                    self.child.beat(page.RUNNING)
                    time.sleep(BATCH_SECONDS)
            for writer in self._writers:
                if not writer.intact:
                    raise SourceUnavailable(f"{writer.path}: removed or overwritten: starting anew")
                writer.note_clocks()
        return 0

    def _due(self, step: Step) -> deque[tuple[int, int, int, tuple[Any, ...]]]:
        """Return the step's rows as (time, track, period, row), in order of time."""
        rows = [
            (row[0], piece.track, piece.period_ns, row)
            for piece in step.pieces
            for row in self._unpack[piece.track](piece.rows.tobytes())
        ]
        rows.sort(key=lambda due: due[0])
        return deque(rows)

    def _write(self, rows: deque[tuple[int, int, int, tuple[Any, ...]]], now_ns: int) -> None:
        """Append the rows up to now, and say how far each ring's data go."""
        while rows and rows[0][0] <= now_ns:
            time_ns, track, period_ns, (_, late, read, *cells, _) = rows.popleft()
            self._writers[track].set_period(period_ns)
            self._writers[track].append(time_ns, late, read, cells)
            self._reach[track] = reach_ns(time_ns, period_ns)
        for writer, reach in zip(self._writers, self._reach, strict=True):
            writer.advance(min(now_ns, reach))

    def _tell(self, server: Server, event: Event) -> None:
        """Hand an event to who asked for events, and keep it for who asks later."""
        self._event_number += 1
        message = {"event": event.to_json(), "sequence": self._event_number}
        self._events.append(message)
        self._listeners &= set(server.connections)
        for connection in self._listeners:
            connection.send(message)

    def _listen(self, server: Server, told: Iterable[Message]) -> None:
        """Answer as a sampler does; a recording cannot be read faster or slower."""
        for connection, message in server.poll():
            match message:
                case {"command": "events", "after": int(after)}:
                    connection.send({"state": {"sources": self._sources(), "errors": {}}})
                    for event in told:
                        if event["sequence"] > after:
                            connection.send(event)
                    self._listeners.add(connection)
                case {"command": "stop"}:
                    self.child.stopping = True
                case _:
                    connection.send({"error": "a replay only takes the commands events and stop"})

    def _sources(self, duty: str | None = None) -> dict[str, dict[str, str]]:
        return {
            schema.source: {"state": "on", "reason": ""}
            for schema in self.playback.tracks
            if duty in (None, schema.duty)
        }

    def _write_manifests(self) -> None:
        """Announce one duty for each that was recorded, with entities numbered as recorded."""
        tracks = list(zip(self.playback.tracks, self._writers, strict=True))
        seen = {
            duty: {c.entity for ring, _ in tracks if ring.duty == duty for c in ring.columns}
            for duty in self.duties
        }
        everywhere = set().union(*seen.values())
        for duty in self.duties:
            mine = seen[duty]
            about = {
                "sources": self._sources(duty),
                "entities": [
                    info.to_json()
                    for info in self.head.entities
                    if info.entity in mine or info.entity not in everywhere
                ],
                "constants": [
                    constant_to_json(column, value)
                    for column, value in self.head.constants.get(duty, ())
                ],
            }
            rings = [writer.path for ring, writer in tracks if ring.duty == duty]
            self.child.announce(duty, rings, about)


def main() -> int:
    """Replay the file in the settings until told to stop."""
    child = Child()
    file = child.config["source"]["file"]
    try:
        reader = RecordingReader(Path(file))
        return Live(child, reader).run()
    except (RecordingError, SourceUnavailable) as fault:
        return child.unavailable(str(fault))
    except OSError as fault:
        return child.unavailable(no_room(fault))


if __name__ == "__main__":
    sys.exit(main())

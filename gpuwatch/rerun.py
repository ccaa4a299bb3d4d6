"""A rerun: what the status page would have said at each second of a recording, by today's rules.

The recording is played once, as far as anybody asks for, and what was found is kept compressed. Of
a long one every second state goes whenever there are too many.
"""

import itertools
import json
import time
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuwatch import __version__
from gpuwatch.alerts import AlertEngine
from gpuwatch.clock import SECOND_NS, wall_text
from gpuwatch.courses import Course, worst
from gpuwatch.errors import RequestError
from gpuwatch.lost_time import LostTime
from gpuwatch.playback import Playback
from gpuwatch.presence import Presence
from gpuwatch.recording import RecordingReader
from gpuwatch.replay import ticks
from gpuwatch.rules import RULES
from gpuwatch.signals import Event
from gpuwatch.snapshot import Snapshot, SourceState
from gpuwatch.status import describe
from gpuwatch.totals import Totals
from gpuwatch.verdict import judge
from gpuwatch.window import TICK_NS, Tick

STATES = 3600
EVENTS_KEPT = 10_000
EVENTS_SHOWN = 200  # by a status, the newest
SECONDS_AT_ONCE = 8.0


class Rerun:
    """The states of one recording; `offset_ns` turns its times into wall time.

    `canaries` are the readings in it.

    Raises RecordingError if it makes no sense.
    """

    def __init__(
        self,
        path: Path,
        rules: Mapping[str, Mapping[str, Any]],
        offset_ns: int,
        canaries: Sequence[Course] = (),
    ) -> None:
        self._path = path
        self._canaries = canaries
        self._offset_ns = offset_ns
        self._reader = RecordingReader(path)
        self._engine = AlertEngine(RULES, rules, None, "")
        self._lost_time = LostTime(self._reader.head.entities)
        self._presence = Presence()
        self._ticks = ticks(self._reader)
        self._played = 0
        self._start_ns = Playback(self._reader).start_ns
        self._reached_ns = 0
        self._every = SECOND_NS // TICK_NS
        self._times: list[int] = []
        self._states: list[bytes] = []
        self._events: list[Event] = []
        self._done = False

    def at(self, wall_ns: int | None) -> dict[str, Any]:
        """Return the status at that time, None for the end; what is before the start is the first.

        Raises RequestError if it takes longer than some seconds: the next call goes on from there.
        """
        time_ns = None if wall_ns is None else wall_ns - self._offset_ns
        begin = time.monotonic()
        while not self._done and (
            not self._times or time_ns is None or self._reached_ns <= time_ns
        ):
            tick = next(self._ticks, None)
            if tick is None:
                self._done = True
                break
            self._take(tick)
            if time.monotonic() - begin > SECONDS_AT_ONCE:
                seconds = (self._reached_ns - self._start_ns) / SECOND_NS
                message = f"{self._path.name}: judged up to {seconds:.0f} s so far: ask again"
                raise RequestError(message, 503)
        known = len(self._times) if time_ns is None else bisect_right(self._times, time_ns)
        index = max(0, known - 1)
        state: dict[str, Any] = json.loads(zlib.decompress(self._states[index]))
        times = [event.time_ns for event in self._events]
        so_far = self._events[: bisect_right(times, max(time_ns or 0, self._times[index]))]
        state["events"] = [
            {**event.to_json(), "time": wall_text(event.time_ns + self._offset_ns)}
            for event in so_far[-EVENTS_SHOWN:]
        ]
        if self._canaries:
            until = (self._times[index] + self._offset_ns) / SECOND_NS
            state["canaries"] = {"changes": 0, "worst": worst(self._canaries, until)}
        return state

    def _take(self, tick: Tick) -> None:
        """Judge a tick, and keep what is known after it once a second, and after the first."""
        self._played += 1
        self._reached_ns = tick.end_ns
        self._events += sorted(
            [*tick.events, *self._engine.judge(tick)], key=lambda event: event.time_ns
        )
        del self._events[:-EVENTS_KEPT]
        self._lost_time.add(tick)
        if self._played % self._every != 1:
            return
        state = describe(self._snapshot(tick))
        del state["events"]
        if "hostname" in (host := self._reader.head.host):
            state = {"hostname": host["hostname"], **state}
        self._times.append(tick.end_ns)
        self._states.append(zlib.compress(json.dumps(state).encode(), 1))
        if len(self._states) > STATES:
            self._every *= 2
            self._times, self._states = self._times[::2], self._states[::2]

    def _snapshot(self, tick: Tick) -> Snapshot:
        head = self._reader.head
        alerts = self._engine.alerts()
        periods: dict[str, float] = {}
        for ring in head.rings:
            period = ring.period_ns / SECOND_NS
            periods[ring.source] = min(period, periods.get(ring.source, period))
        about = {
            "version": __version__,
            "source": {"kind": "replay-file", "scenario": "", "file": self._path.name},
            "recording": {
                "name": self._path.name,
                "start": (head.start_ns + self._offset_ns) / SECOND_NS,
                "end": (head.end_ns + self._offset_ns) / SECOND_NS,
            },
            "ready": True,
            "ticks_closed": self._played,
            "time_ns": tick.end_ns,
            "realtime_ns": tick.end_ns + self._offset_ns,
            "released": {},
            "sources": {name: {"state": "on", "reason": ""} for name in periods},
            "children": [],
            "state": {"path": "", "fault": "", "history_fault": ""},
        }
        shown = Snapshot(
            totals=Totals(head.start_ns),
            ticks=(tick,),
            constants=list(itertools.chain.from_iterable(head.constants.values())),
            entities=list(head.entities),
            losses=self._lost_time.all(),
            alerts=[replace(alert, recording=self._path.name) for alert in alerts],
            sources={name: SourceState(period_seconds=p) for name, p in periods.items()},
            verdict=judge(alerts),
            about=about,
        )
        return self._presence.complete(shown)

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()

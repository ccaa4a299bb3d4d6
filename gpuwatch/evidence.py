"""The flight recorder: saves what the rings hold when a rule sees something, and when asked to.

A recording begins some seconds before what set it off and ends some seconds after; whatever else is
seen meanwhile shares it. A child writes it, one at a time, so a burst of alerts costs no more.
"""

import functools
import json
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwatch.clock import SECOND_NS, monotonic_ns, read_clocks
from gpuwatch.control import Message
from gpuwatch.feed import Feed, entities_of
from gpuwatch.quota import stamp, stamped_ns
from gpuwatch.siblings import Done
from gpuwatch.signals import HOST, Entity, Event
from gpuwatch.source import constant_to_json
from gpuwatch.status import alert_json

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon

log = logging.getLogger("gpuwatch.evidence")

DEADLINE_SECONDS = 120.0
SETTLE_NS = SECOND_NS  # after this all rows and events of an instant are there
MARGIN_NS = 5 * SECOND_NS  # what a ring is about to overwrite cannot be counted on
NAMES_KEPT = 100
NAME_LENGTH = 120
CRASH = "crash"
REASONS = ("quiet", "disk_full", "failed")

_NOT_IN_NAMES = re.compile(r"[^\w.]+")

Key = tuple[str, Entity]


@dataclass(slots=True)
class _Take:
    """A recording to be made of the time from `since_ns` up to `until_ns`."""

    name: str
    since_ns: int
    until_ns: int
    keys: list[Key] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """What it shows, in words."""
        return ", ".join(f"{rule} on {entity}" for rule, entity in self.keys)


class FlightRecorder:
    """Decides what is recorded.

    `saved` counts recordings that were completed, `skipped` by reason those that were wanted and
    are not there.
    """

    def __init__(self, daemon: "Daemon") -> None:
        config = daemon.config["recorder"]
        self.saved = 0
        self.skipped: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._daemon = daemon
        self._directory = daemon.state / "recordings"
        self._free_ratio = config["free_ratio"]
        self._before_ns = int(config["before_seconds"] * SECOND_NS)
        self._after_ns = int(config["after_seconds"] * SECOND_NS)
        self._reach_ns = int(daemon.config["ring"]["seconds"]) * SECOND_NS - MARGIN_NS
        self._quiet_ns = int(config["quiet_seconds"] * SECOND_NS)
        self._rules = {rule.name for rule in daemon.engine.rules if rule.record}
        self._takes: deque[_Take] = deque()
        self._running: _Take | None = None
        self._names: deque[str] = deque(maxlen=NAMES_KEPT)
        # The newest recording of each, also of earlier daemons; its name tells its time.
        self._newest = {
            (row.rule, Entity(row.entity_kind, row.entity_id)): row.recording
            for row in daemon.store.load_alerts()
            if row.recording
        }

    @property
    def kept(self) -> set[str]:
        """The recordings that no limit may remove: those of alerts that fire."""
        return {a.recording for a in self._daemon.engine.alerts() if a.state == "firing"} - {""}

    def hear(self, events: Iterable[Event]) -> None:
        """Plan a recording of what rules said, if they ask for one."""
        for event in events:
            rule, _, what = event.name.rpartition("_")
            if rule in self._rules and what in ("detected", "firing"):
                self._plan((rule, event.entity), event.time_ns)

    def look(self, now_ns: int) -> None:
        """Start the next recording when its time is over."""
        if self._running is not None or not self._takes:
            return
        if now_ns >= self._takes[0].until_ns + SETTLE_NS:
            self._start(self._takes.popleft())

    def request(self, last_seconds: float, answer: Callable[[Message], object]) -> None:
        """Save the last seconds at once; `answer` gets the path, or the error."""
        now = read_clocks()
        name = self._name(now.realtime_ns, "request")
        since_ns = now.monotonic_ns - int(last_seconds * SECOND_NS)
        take = _Take(name, since_ns, now.monotonic_ns)

        def done(result: Message) -> None:
            said = _said(result)
            self.saved += "path" in said
            answer(said)

        self._spawn("recorder", self._settings(self._daemon.feed, take), done)

    def salvage(self, crashed: Path) -> None:
        """Save what a gpuwatch that was killed has left: its rings, unfinished recordings."""
        settings: dict[str, Any] = {"unfinished": self._unfinished()}
        if crashed.is_dir():
            settings |= {"crashed": str(crashed), "recording": self._of_crash(crashed)}
        if any(settings.values()):
            self._spawn("salvage", settings, self._salvaged)

    def _plan(self, key: Key, time_ns: int) -> None:
        if any(key in take.keys for take in (*self._takes, self._running) if take):
            return
        wall_ns = read_clocks().wall_ns(time_ns)
        newest = self._newest.get(key, "")
        age_ns = wall_ns - (stamped_ns(newest) or 0)
        if 0 <= age_ns < self._quiet_ns:
            self.skipped["quiet"] += 1
            self._daemon.engine.set_recording(*key, newest)  # a restart may have forgotten it
            return
        take = self._takes[-1] if self._takes else None
        if take is None or time_ns > take.until_ns:
            name = self._name(wall_ns, f"{key[0]}-{key[1]}")
            take = _Take(name, time_ns - self._before_ns, time_ns)
            self._takes.append(take)
        take.keys.append(key)
        until_ns = min(time_ns + self._after_ns, take.since_ns + self._reach_ns)
        take.until_ns = max(take.until_ns, until_ns)

    def _start(self, take: _Take) -> None:
        if self._daemon.archive.full:
            self._miss(take, "disk_full", self._daemon.archive.fault)
            return
        self._running = take
        settings = self._settings(self._daemon.feed, take)
        self._spawn("recorder", settings, functools.partial(self._finish, take))

    def _finish(self, take: _Take, result: Message) -> None:
        """Tell what became of a recording; of one that took too long a part may be left."""
        said = _said(result)
        self._running = None
        if "path" in said:
            self.saved += 1
            text = f"{take.cause}; {said['rows']} rows, {said['bytes']} bytes"
            self._tell(take.name, text, take.keys)
            return
        self._miss(take, "disk_full" if said.get("full") else "failed", said["error"])
        if unfinished := self._unfinished():
            done = functools.partial(self._salvaged, keys={take.name: take.keys})
            self._spawn("salvage", {"unfinished": unfinished}, done)

    def _miss(self, take: _Take, reason: str, text: str) -> None:
        self.skipped[reason] += 1
        event = Event(monotonic_ns(), HOST, "recording_failed", f"{text}; of {take.cause}")
        self._daemon.note(event)

    def _tell(self, name: str, text: str, keys: Iterable[Key]) -> None:
        """Say that there is a recording, also to the alerts it is of."""
        for key in keys:
            self._newest[key] = name
            self._daemon.engine.set_recording(*key, name)
        self._daemon.note(Event(monotonic_ns(), HOST, "recording_saved", f"{name}: {text}"))

    def _salvaged(self, result: Message, keys: Mapping[str, Sequence[Key]] = {}) -> None:
        said = _said(result)
        for name in said.get("adopted", ()):
            self._tell(name, "cut short, its recorder was killed", keys.get(name, ()))
        if "saved" in said:
            self.saved += 1
            name, rows = Path(said["saved"]["path"]).name, said["saved"]["rows"]
            text = f"{name}: {rows} rows from before gpuwatch was killed"
            self._daemon.note(Event(monotonic_ns(), HOST, "rings_saved", text))
        if "error" in said:
            log.warning("left by a gpuwatch that was killed, and lost: %s", said["error"])

    def _unfinished(self) -> list[str]:
        busy = f"{self._running.name}.tmp" if self._running else ""
        return [str(path) for path in self._directory.glob("*.gwr.tmp") if path.name != busy]

    def _of_crash(self, crashed: Path) -> dict[str, Any] | None:
        """Return the recorder's settings for rings that were left, None if none are wanted."""
        feed = Feed(crashed, self._daemon.store, {}, 0.0)
        feed.look_for_manifests()
        readers = [ring.reader for ring in feed.rings.values()]
        if not readers:
            return None
        wall_ns = read_clocks().wall_ns(max(reader.heartbeat_ns for reader in readers))
        take = _Take(self._name(wall_ns, CRASH), 0, monotonic_ns())
        settings = self._settings(feed, take)
        settings["rings"] = [str(path) for path in crashed.glob("*.ring")]  # also of older children
        for reader in readers:
            reader.close()
        before = [stamped_ns(path.name) or 0 for path in self._directory.glob(f"*-{CRASH}*.gwr")]
        if before and 0 <= wall_ns - max(before) < self._quiet_ns:
            self.skipped["quiet"] += 1  # one that is killed again and again must not fill the disk
            return None
        return settings

    def _name(self, wall_ns: int, what: str) -> str:
        """Return a file name that nobody has: several of one second are numbered."""
        base = f"{stamp(wall_ns)}-{_NOT_IN_NAMES.sub('-', what)[:NAME_LENGTH]}"
        numbers = ("", *(f"-{number}" for number in range(2, NAMES_KEPT + 2)))
        name = next(f"{base}{number}.gwr" for number in numbers if base + number not in self._names)
        self._names.append(name.removesuffix(".gwr"))
        return name

    def _settings(self, feed: Feed, take: _Take) -> dict[str, Any]:
        daemon = self._daemon
        manifests = feed.manifests.values()
        alerts = [
            {**alert_json(alert), "recording": take.name if mine else alert.recording}
            for alert in daemon.engine.alerts()
            for mine in [(alert.rule, alert.entity) in take.keys]
            if mine or alert.state != "inactive"
        ]
        return {
            "output": str(self._directory / take.name),
            "rings": feed.ring_paths(),
            "since_ns": take.since_ns,
            "until_ns": take.until_ns,
            "names": [[old, new] for m in manifests for old, new in m.names.items()],
            "entities": [info.to_json() for info in entities_of(manifests)],
            "constants": {
                m.duty: [constant_to_json(column, value) for column, value in m.constants]
                for m in manifests
            },
            "events": self._sampled_events(take),
            "alerts": alerts,
            "config": daemon.config,
            "free_ratio": self._free_ratio,
        }

    def _sampled_events(self, take: _Take) -> list[dict[str, Any]]:
        """Return what happened, without what the rules said of it: a replay judges again."""
        rules = {rule for rule, _ in self._daemon.engine.transitions}
        return [
            event.to_json()
            for event in self._daemon.events
            if take.since_ns <= event.time_ns < take.until_ns
            and event.name.rpartition("_")[0] not in rules
        ]

    def _spawn(self, kind: str, settings: Mapping[str, Any], done: Done) -> None:
        try:
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._daemon.supervisor.spawn(kind, settings, DEADLINE_SECONDS, done)
        except OSError as error:
            fault = f"{error.filename or 'recorder'}: {error.strerror}: make it writable"
            done({"output": json.dumps({"error": fault})})


def _said(result: Message) -> dict[str, Any]:
    """Return what a child said in its last line."""
    try:
        said: dict[str, Any] = json.loads(result["output"].splitlines()[-1])
    except (ValueError, IndexError):
        late = f"not done in {DEADLINE_SECONDS:g} s" if result.get("late") else "see the log"
        return {"error": f"the recorder ended without a word: {late}"}
    return said

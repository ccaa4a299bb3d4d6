"""The flight recorder: saves what the rings hold when a rule sees something, and when asked to.

Children do the work: a recorder copies rings into a file, a salvage looks after what a gpuwatch or
a recorder left that was killed.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwatch.clock import SECOND_NS, monotonic_ns, read_clocks
from gpuwatch.control import Message
from gpuwatch.courses import Course, within
from gpuwatch.feed import Feed
from gpuwatch.kernel_log import XID, told
from gpuwatch.manifest import entities_of
from gpuwatch.place import names_of
from gpuwatch.siblings import Done
from gpuwatch.signals import HOST, Entity, Event
from gpuwatch.source import STANDBY, EntityInfo, constant_to_json
from gpuwatch.standings import Standings
from gpuwatch.status import alert_json
from gpuwatch.takes import SUFFIX, Key, Take, Takes

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon

DEADLINE_SECONDS = 120.0
CANARIES_SECONDS = 86_400.0  # before a recording: what canaries found is in it
ASK_NS = 30 * SECOND_NS  # the least between two times that hardware is asked as rules stir
PATIENCE_NS = 5 * SECOND_NS  # with hardware that was asked
CRASH, REQUEST = "crash", "request"  # in the place of a rule in a recording's name
REASONS = ("quiet", "disk_full", "failed")


class FlightRecorder:
    """Has recordings made, and tells alerts which one shows them.

    `saved` counts recordings that were completed, `skipped` by reason those that were wanted and
    were not made.
    """

    def __init__(self, daemon: "Daemon") -> None:
        self.saved = 0
        self.skipped: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._daemon = daemon
        self._directory = daemon.state / "recordings"
        self._rules = {rule.name for rule in daemon.engine.rules if rule.record}
        newest = {
            (row.rule, Entity(row.entity_kind, row.entity_id)): row.recording
            for row in daemon.store.load_alerts()
            if row.recording
        }
        names = [path.name.removesuffix(".tmp") for path in self._directory.glob(f"*{SUFFIX}*")]
        config = daemon.config
        self._takes = Takes(config["recorder"], config["ring"]["seconds"], newest, names)
        self._asked_ns = 0  # when hardware was asked for what it keeps because a rule stirred
        self._awaited: list[tuple[int, Take, Done]] = []  # since when, of hardware that was asked
        self._told: set[Key] = set()  # alerts that know their recording since this start
        self._busy: set[str] = set()  # recordings that a child works on
        self._cut: dict[str, list[Key]] = {}  # those whose child failed, with what they show

    @property
    def kept(self) -> set[str]:
        """The recordings that no limit may remove: those of alerts that fire, or are about to."""
        return {a.recording for a in self._daemon.engine.alerts() if a.state != "inactive"} - {""}

    def hear(self, events: Iterable[Event]) -> None:
        """Plan a recording of what rules said, if they ask for one, and of each Xid."""
        clocks = read_clocks()
        if self._daemon.engine.stirred and clocks.monotonic_ns - self._asked_ns > ASK_NS:
            self._asked_ns = clocks.monotonic_ns
            self._ask()
        for event in events:
            key = self._key_of(event)
            if key is None:
                continue
            if not self._takes.plan(key, event.time_ns, clocks.wall_ns(event.time_ns)):
                self.skipped["quiet"] += 1
                self._show([key], self._takes.newest[key])

    def _key_of(self, event: Event) -> Key | None:
        """Return what an event is to be recorded as, None if it is not."""
        rule, _, what = event.name.rpartition("_")
        if rule in self._rules and what in ("detected", "firing"):
            return rule, event.entity
        # An application's own: no rule asks for it. A new daemon is told again of earlier ones.
        is_new = event.name == XID and event.time_ns >= self._daemon.started_ns
        said = told(event.detail) if is_new else None
        return (XID, event.entity) if said and said.level == "info" else None

    def look(self, now_ns: int) -> None:
        """Start the next recording once its time is over, and those that waited for hardware."""
        for waiting in list(self._awaited):
            since_ns, awaited, answer = waiting
            if self._delivered(since_ns) or now_ns - since_ns > PATIENCE_NS:
                self._awaited.remove(waiting)
                self._record(awaited, answer)
        take = self._takes.begin(now_ns)
        if take is None:
            return

        def done(said: Message) -> None:
            self._takes.running = None
            if "path" in said:
                self._show(take.keys, take.name)
                text = f"{take.cause}; {said['rows']} rows, {said['bytes']} bytes"
                self._tell("recording_saved", f"{take.name}: {text}")
            elif said.get("full"):  # again and again, for as long as the disk is
                self.skipped["disk_full"] += 1
                self._tell("recording_skipped", f"{said['error']}; of {take.cause}")
            else:
                self.skipped["failed"] += 1
                self._cut[take.name] = take.keys
                self._tell("recording_failed", f"{said['error']}; of {take.cause}")

        archive = self._daemon.archive
        if archive.full:
            done({"error": archive.fault, "full": True})
        else:
            self._record_whole(take, done)

    def request(self, last_seconds: float, answer: Done) -> None:
        """Save the last seconds; `answer` gets the path, or the error."""
        now = read_clocks()
        name = self._takes.name(now.realtime_ns, REQUEST)
        since_ns = now.monotonic_ns - int(last_seconds * SECOND_NS)
        self._record_whole(Take(name, since_ns, now.monotonic_ns), answer)

    def salvage(self, crashed: Path | None = None) -> None:
        """Have saved what somebody left who was killed: recordings, and rings in `crashed`."""
        paths = [p for p in self._directory.glob(f"*{SUFFIX}.tmp") if p.stem not in self._busy]
        settings: dict[str, Any] = {"unfinished": [str(path) for path in paths]}
        if crashed is not None and crashed.is_dir():
            settings |= {"crashed": str(crashed), "recording": self._of_crash(crashed)}
        elif not paths:
            return

        def done(said: Message) -> None:
            for name in said.get("adopted", ()):
                self._show(self._cut.pop(name, []), name)
                self._tell("recording_saved", f"{name}: cut short, its recorder was killed")
            if "saved" in said:
                self.saved += 1
                name, rows = Path(said["saved"]["path"]).name, said["saved"]["rows"]
                text = f"{name}: {rows} rows from before gpuwatch was killed"
                self._tell("rings_saved", text)
            if "error" in said:
                self._tell("recording_failed", f"{said['error']}; what was left is lost")

        self._spawn("salvage", settings, done)

    def _of_crash(self, crashed: Path) -> dict[str, Any] | None:
        """Return the recorder's settings for rings that were left, None if none are wanted."""
        feed = Feed(crashed, self._daemon.store, {}, 0.0)
        feed.look_for_manifests()
        readers = [ring.reader for ring in feed.rings.values()]
        heartbeat_ns = max((reader.heartbeat_ns for reader in readers), default=0)
        for reader in readers:
            reader.close()
        wall_ns = read_clocks().wall_ns(heartbeat_ns)
        before = [path.name for path in self._directory.glob(f"*-{CRASH}*{SUFFIX}")]
        if not readers:
            return None
        if any(self._takes.is_quiet(name, wall_ns) for name in before):
            self.skipped["quiet"] += 1  # who is killed again and again must not fill the disk
            return None
        settings = self._settings(feed, Take(self._takes.name(wall_ns, CRASH), 0, heartbeat_ns))
        settings["rings"] = [str(path) for path in crashed.glob("*.ring")]  # also of older children
        return settings

    def _record_whole(self, take: Take, done: Done) -> None:
        """Make a recording, with what hardware keeps for who asks."""
        if self._ask():
            self._awaited.append((monotonic_ns(), take, done))
        else:
            self._record(take, done)

    def _ask(self) -> bool:
        """Have samplers in standby read what their hardware has kept; False if there are none."""
        states, asked = self._daemon.feed.states, False
        for duty, manifest in self._daemon.feed.live.items():
            if any(states.get(source) == STANDBY for source in manifest.sources):
                asked = self._daemon.samplers.send(duty, {"command": "latest"}) or asked
        return asked

    def _delivered(self, since_ns: int) -> bool:
        """Say whether all that was asked for at a time is in the rings."""
        readers = (ring.reader for ring in self._daemon.feed.rings.values() if ring.current)
        return all(
            reader.watermark_ns >= since_ns + reader.schema.delivery_ns
            for reader in readers
            if reader.schema.delivery_ns
        )

    def _record(self, take: Take, done: Done) -> None:
        def finished(said: Message) -> None:
            self.saved += "path" in said
            self._busy.discard(take.name)
            done(said)
            if "error" in said:
                self.salvage()

        self._busy.add(take.name)
        self._spawn("recorder", self._settings(self._daemon.feed, take), finished)

    def _settings(self, feed: Feed, take: Take) -> dict[str, Any]:
        daemon = self._daemon
        manifests = feed.manifests.values()
        known = entities_of(manifests)
        here = {info.entity for info in known}
        ended = [info for info in feed.ended.values() if info.entity not in here]
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
            "names": [[old, new] for old, new in names_of(feed).items()],
            "entities": [info.to_json() for info in [*known, *ended]],
            "constants": {
                m.duty: [constant_to_json(column, value) for column, value in m.constants]
                for m in manifests
            },
            "events": self._sampled_events(take),
            "alerts": alerts,
            "canaries": self._canaries(take, known),
            "config": daemon.config,
            "free_ratio": daemon.config["recorder"]["free_ratio"],
        }

    def _canaries(self, take: Take, known: Iterable[EntityInfo]) -> list[Course]:
        """Return what canaries found within the recording and in the day before."""
        standings = self._daemon.standings
        if not standings.courses:  # after a crash: nobody has looked yet
            gpus = [info for info in known if info.entity.kind == "gpu"]
            uuids = {info.labels["uuid"]: info.entity for info in gpus if info.labels.get("uuid")}
            standings = Standings()
            standings.look(self._daemon.baseline, uuids)
        clocks = read_clocks()
        since, until = (
            clocks.wall_ns(time_ns) / SECOND_NS for time_ns in (take.since_ns, take.until_ns)
        )
        return within(standings.courses, since - CANARIES_SECONDS, until)

    def _sampled_events(self, take: Take) -> list[dict[str, Any]]:
        """Return what happened, without what the rules said of it: a replay judges again."""
        rules = {rule for rule, _ in self._daemon.engine.transitions}
        return [
            event.to_json()
            for event in self._daemon.events
            if take.since_ns <= event.time_ns < take.until_ns
            and event.name.rpartition("_")[0] not in rules
        ]

    def _spawn(self, kind: str, settings: dict[str, Any], done: Done) -> None:
        """Have a child do something; `done` gets what it said."""
        try:
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._daemon.supervisor.spawn(
                kind, settings, DEADLINE_SECONDS, lambda result: done(_said(kind, result))
            )
        except OSError as error:
            place = error.filename or f"the {kind} cannot be started"
            done({"error": f"{place}: {error.strerror}: make it writable"})

    def _show(self, keys: Iterable[Key], name: str) -> None:
        """Tell alerts the recording that shows them, those that do not know it."""
        for key in keys:
            if key not in self._told or self._takes.newest.get(key) != name:
                self._takes.newest[key] = name
                self._told.add(key)
                self._daemon.engine.set_recording(*key, name)

    def _tell(self, event: str, detail: str) -> None:
        self._daemon.note(Event(monotonic_ns(), HOST, event, detail))


def _said(kind: str, result: Message) -> dict[str, Any]:
    """Return what a child said in its last line."""
    try:
        said: dict[str, Any] = json.loads(result["output"].splitlines()[-1])
    except (ValueError, IndexError):
        late = f"killed after {DEADLINE_SECONDS:g} s" if result.get("late") else "see the log"
        return {"error": f"the {kind} ended without a word: {late}"}
    return said

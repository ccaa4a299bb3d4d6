"""Alerts: the engine turns what rules say of each tick into pending, firing, resolved.

Everything runs on data time (the end of a tick), so a recording gives the same alerts at any
speed. What a rule cannot know changes nothing: state and timers stay.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from gpuwatch.clock import SECOND_NS, read_clocks
from gpuwatch.rule import Rule, Severity, Verdict, View
from gpuwatch.signals import HOST, Entity, Event

if TYPE_CHECKING:
    from gpuwatch.window import Tick

State = Literal["inactive", "pending", "firing"]

TRANSITIONS = ("pending", "firing", "resolved")
QUIET_NS = 10 * SECOND_NS  # a sight is detected again after it was away for this long


@dataclass(slots=True)  # not frozen: there are hundreds in a tick
class Alert:
    """A rule's answer for one entity; never changed.

    `value` is the latest one judged, None before the first. `since_ns` is when the present state
    began, on the monotonic clock; negative if it is older than the machine's start. `verdict` is
    what should become of the node while it fires.
    """

    rule: str
    entity: Entity
    severity: Severity
    value: float | None
    limit: float
    since_ns: int
    state: State
    sticky: bool
    recording: str = ""
    next_step: str = ""
    detail: str = ""
    verdict: Verdict = "ok"


class AlertRow(NamedTuple):
    """An alert's state as it is stored, with the wall time at which it began."""

    rule: str
    entity_kind: str
    entity_id: str
    state: str
    since_realtime_ns: int
    boot_id: str
    value: float | None
    acknowledged: bool
    recording: str


class AlertStore(Protocol):
    """Where alerts outlive the daemon. Neither method raises: a fault is the store's to tell."""

    def save_alerts(self, rows: Sequence[AlertRow]) -> None:
        """Keep these rows in place of earlier ones of the same rule and entity."""

    def load_alerts(self) -> list[AlertRow]:
        """Return the rows kept."""


@dataclass(slots=True)
class _Watch:
    """One rule on one entity."""

    rule: Rule
    entity: Entity
    view: View
    since_ns: int
    state: State = "inactive"
    held_ns: int = 0  # judged time in breach while pending
    judged: float | None = None  # what was compared with the limit
    value: float | None = None  # what is shown
    known: bool = False
    seen_ns: int | None = None  # when `detect` last said yes
    restored: bool = False
    acknowledged: bool = False
    recording: str = ""

    def detected(self, tick: "Tick") -> bool:
        """Say whether this tick is the first of a sight; it ends with ten seconds without."""
        if self.rule.detect is None or not self.rule.detect(self.view):
            return False
        before, self.seen_ns = self.seen_ns, tick.end_ns
        return before is None or not 0 <= tick.end_ns - before <= QUIET_NS

    def judge(self, tick: "Tick") -> str:
        """Judge the tick; return the state it came to, or "" if it stays."""
        value = self.rule.judge(self.view)
        shown = self.rule.show(self.view) if self.rule.show else value
        self.known = value is not None and not math.isnan(value)
        if value is None or not self.known:
            return ""
        tick_ns = tick.end_ns - tick.start_ns
        self.judged, self.value = value, shown
        self.view.judged_ns += tick_ns
        self.since_ns = min(self.since_ns, tick.end_ns)  # data time may go back
        breached = self.rule.breached(value)
        if self.state == "firing":
            return "" if breached or not self._may_resolve(tick.end_ns) else self._end(tick)
        if not breached:
            return "" if self.state == "inactive" else self._end(tick)
        before = self.state
        if before == "inactive":
            self.state, self.since_ns, self.held_ns = "pending", tick.end_ns, 0
        else:
            self.held_ns += tick_ns
        if self.held_ns >= self.rule.for_seconds * SECOND_NS:
            self.state, self.since_ns = "firing", tick.end_ns
            self.restored = self.acknowledged = False
        return "" if self.state == before else self.state

    def _may_resolve(self, now_ns: int) -> bool:
        return (
            now_ns - self.since_ns >= self.rule.hold_seconds * SECOND_NS
            and (self.view.settled or not self.restored)
            and (self.acknowledged or not self.rule.sticky)
        )

    def _end(self, tick: "Tick") -> str:
        ended = "resolved" if self.state == "firing" else "inactive"
        self.state, self.since_ns = "inactive", tick.end_ns
        return ended

    @property
    def detail(self) -> str:
        """The rule's meaning, and what is special about this alert now."""
        if self.state == "inactive":
            return self.rule.help
        parts = [self.rule.help]
        if not self.known:
            parts.append("Not judged now: no data.")
        if self.state == "firing" and self.rule.sticky and not self.acknowledged:
            parts.append("Stays until it is acknowledged or the machine boots.")
        return " ".join(parts)


class AlertEngine:
    """Judges every tick by every enabled rule, for each entity of the rule's kind.

    An entity once seen stays known, so a GPU that vanished keeps its answers. `overrides` is the
    config's `rules` table: per rule `enabled`, `window_seconds`, `limit`, `for_seconds` and
    `hold_seconds`. With a `store` each change is kept, and alerts that were firing are firing
    again from the start; sticky ones end with the boot they came up in. `stirred` says whether in
    the newest tick a rule that asks for recordings was detected, went pending or fired.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        overrides: Mapping[str, Mapping[str, Any]],
        store: AlertStore | None,
        boot_id: str,
    ) -> None:
        self.rules = configured(rules, overrides)
        self.transitions: Counter[tuple[str, str]] = Counter(
            {(rule.name, to): 0 for rule in self.rules for to in TRANSITIONS}
        )
        self.detections: Counter[str] = Counter(
            {rule.name: 0 for rule in self.rules if rule.detect}
        )
        self._store = store
        self._boot_id = boot_id
        self._watches: dict[tuple[str, Entity], _Watch] = {}
        self._siblings: dict[str, list[View]] = {rule.name: [] for rule in self.rules}
        self._entities: set[Entity] = set()
        self._events: list[Event] = []
        self.stirred = False
        self.know(HOST, 0)
        if store is not None:
            self._restore(store.load_alerts())

    def know(self, entity: Entity, now_ns: int) -> None:
        """Give an entity its alerts, inactive since `now_ns`; nothing if it has them."""
        if entity in self._entities:
            return
        self._entities.add(entity)
        for rule in self.rules:
            if rule.per == entity.kind:
                view = View(rule, entity, self._siblings[rule.name])
                watch = _Watch(rule, entity, view, now_ns)
                self._watches[rule.name, entity] = watch

    def judge(self, tick: "Tick") -> list[Event]:
        """Judge a tick; return what was detected and which alerts changed."""
        for entity in (*tick.windows, *_told_of(tick)):
            self.know(entity, tick.end_ns)
        changed, self.stirred = [], False
        for watch in self._watches.values():
            watch.view.look(tick)
            if watch.rule.measure:
                watch.view.measured = watch.rule.measure(watch.view)
        for watch in self._watches.values():
            if detected := watch.detected(tick):
                self.detections[watch.rule.name] += 1
                self._tell(watch, "detected", tick.end_ns)
            reached = watch.judge(tick)
            roused = detected or reached in ("pending", "firing")
            self.stirred = self.stirred or (roused and watch.rule.record)
            if reached:
                changed.append(watch)
                self._count(watch, reached, tick.end_ns)
        self._save(changed)
        events, self._events = self._events, []
        return events

    def alerts(self) -> list[Alert]:
        """Return the answer of every enabled rule for every entity known, inactive ones too."""
        return [
            Alert(
                rule=watch.rule.name,
                entity=watch.entity,
                severity=watch.rule.severity,
                value=watch.value,
                limit=watch.rule.limit,
                since_ns=watch.since_ns,
                state=watch.state,
                sticky=watch.rule.sticky,
                recording=watch.recording,
                next_step=watch.rule.next_step,
                detail=watch.detail,
                verdict=watch.rule.advice(watch.value if watch.judged is None else watch.judged),
            )
            for watch in self._watches.values()
        ]

    def acknowledge(self, entity: Entity | None = None) -> int:
        """Let sticky alerts (of one entity, or all) resolve once recovered; return how many.

        Acknowledging before the recovery counts too, for the alert that is firing now. Alerts
        from before a restart on what has not been seen since, a GPU taken out, end at once.
        """
        found = [
            watch
            for watch in self._watches.values()
            if watch.rule.sticky
            and watch.state == "firing"
            and not watch.acknowledged
            and entity in (None, watch.entity)
        ]
        for watch in found:
            watch.acknowledged = True
        gone = [
            watch
            for watch in self._watches.values()
            if watch.state == "firing"
            and watch.restored
            and not watch.view.judged_ns
            and entity in (None, watch.entity)
        ]
        now_ns = read_clocks().monotonic_ns
        for watch in gone:
            watch.state, watch.since_ns = "inactive", now_ns
            self._count(watch, "resolved", now_ns)
        changed = [*found, *(watch for watch in gone if watch not in found)]
        self._save(changed)
        return len(changed)

    def drop_pending(self) -> None:
        """End what is pending and cannot be judged: what it is about was left to another tool."""
        for watch in self._watches.values():
            if watch.state == "pending" and not watch.known:
                watch.state = "inactive"

    def set_recording(self, rule: str, entity: Entity, recording: str) -> None:
        """Name the recording that shows the alert; it stays until there is a newer one."""
        watch = self._watches.get((rule, entity))
        if watch is not None:
            watch.recording = recording
            self._save([watch])

    def _restore(self, rows: Iterable[AlertRow]) -> None:
        now = read_clocks()
        ended = []
        for row in rows:
            if row.state != "firing":
                continue
            entity = Entity(row.entity_kind, row.entity_id)
            self.know(entity, now.monotonic_ns)
            watch = self._watches.get((row.rule, entity))
            if watch is None:  # the rule is off now: it must not come back with an old alert
                ended.append(row._replace(state="inactive"))
                continue
            watch.value = row.value
            watch.recording = row.recording
            if watch.rule.sticky and row.boot_id != self._boot_id:
                self._count(watch, "resolved", now.monotonic_ns)
                self._save([watch])
                continue
            age_ns = max(0, now.realtime_ns - row.since_realtime_ns)
            watch.since_ns = now.monotonic_ns - age_ns
            watch.state = "firing"
            watch.restored = True
            watch.acknowledged = bool(row.acknowledged)
        if ended and self._store is not None:
            self._store.save_alerts(ended)

    def _count(self, watch: _Watch, reached: str, now_ns: int) -> None:
        """Count and tell a transition; a pending alert that comes to nothing is none."""
        if reached in TRANSITIONS:
            self.transitions[watch.rule.name, reached] += 1
            self._tell(watch, reached, now_ns)

    def _tell(self, watch: _Watch, what: str, now_ns: int) -> None:
        detail = ""
        if what != "detected" and watch.judged is not None:
            detail = f"{watch.judged:.4g}, limit {watch.rule.limit:g}, {watch.rule.severity}"
            if watch.rule.show is not None and watch.value is not None:
                detail += f", value {watch.value:.4g}"
        self._events.append(Event(now_ns, watch.entity, f"{watch.rule.name}_{what}", detail))

    def _save(self, watches: Sequence[_Watch]) -> None:
        if self._store is None or not watches:
            return
        now = read_clocks()
        self._store.save_alerts(
            [
                AlertRow(
                    rule=watch.rule.name,
                    entity_kind=watch.entity.kind,
                    entity_id=watch.entity.id,
                    state=watch.state,
                    since_realtime_ns=now.wall_ns(watch.since_ns),
                    boot_id=self._boot_id,
                    value=watch.value,
                    acknowledged=watch.acknowledged,
                    recording=watch.recording,
                )
                for watch in watches
            ]
        )


def _told_of(tick: "Tick") -> set[Entity]:
    """Return what only events may speak of: a GPU that left the bus, a device without samples."""
    kinds = ("gpu", "pci_device")
    return {event.entity for event in tick.events if event.entity.kind in kinds}


def configured(
    rules: Iterable[Rule], overrides: Mapping[str, Mapping[str, Any]]
) -> tuple[Rule, ...]:
    """Return the enabled rules with the config's numbers in place of their own."""
    result = []
    for rule in rules:
        changes = dict(overrides.get(rule.name, {}))
        if changes.pop("enabled", True):
            result.append(replace(rule, **changes))
    return tuple(result)

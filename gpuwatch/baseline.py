"""Baselines: what each GPU's canaries have given before, and how a new reading compares.

A baseline belongs to a GPU, by uuid, or the host; to a canary and its shape; and to an environment
(driver, power limit, ...). Another environment is another epoch: it begins a baseline of its own,
and the old one stays, for comparison and for the day it comes back. The statistics are those of
`judgement`. All calls come from one thread.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from gpuwatch import baseline_table as table
from gpuwatch.baseline_table import Entry, Kept, Taken, epoch
from gpuwatch.canary_reading import CanaryReading, Shape
from gpuwatch.canary_text import Peers, Standing, said, value_of
from gpuwatch.courses import AHEAD_SECONDS, COURSES, READINGS, SHOWN_SECONDS, CourseLog
from gpuwatch.database import Connection
from gpuwatch.expected import expected
from gpuwatch.judgement import Kind, Opinion, Point
from gpuwatch.signals import HOST, Entity
from gpuwatch.soundness import Computer, Computers, Soundness, numbers
from gpuwatch.store import Store

NOISY = 0.03  # repetitions of one run that differ more are no evidence
PEER_SECONDS = 6 * 3600.0  # a peer's reading that is older says nothing of now
PEER_LOSS = 0.01  # less of it is no loss
STALE_SECONDS = 7 * 86_400.0  # a course without a newer reading is not judged
BY_CLOCK = ("matmul", "memory")  # copies over a link do not follow the SM clock
UNSAVED = 1000  # readings that wait for a file that cannot be written


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a reading says, and how sure that is.

    `kind`: "no_baseline", fewer than six readings in this environment; "normal"; "suspect", slow
    or wrong, not confirmed; "regression", confirmed; "unknown", the reading is no evidence.
    `ratio` is the reading by the baseline, `expected_ratio` by what a healthy card of the model
    gives: of both less than 1 is slower, None is not known. `loss` is what a confirmed regression
    takes, a share. `cause` says what it looks like: "low_clock", "slow_at_full_clock",
    "creeping", "wrong_result", or "" where that is not known. `peers` says who has it. `retest`
    asks to read again within seconds. `text` says all that in a line.
    """

    kind: Kind
    ratio: float | None = None
    expected_ratio: float | None = None
    loss: float | None = None
    cause: str = ""
    peers: Peers = ""
    retest: bool = False
    text: str = ""


class Baseline:
    """The baselines of this host, in the store's file.

    `fires` says whether an alert about a GPU (or, for the host, about any) fires, of warning or
    worse: what is read then is kept and judged, but moves no baseline. `log` has the last readings.
    """

    def __init__(self, store: Store, fires: Callable[[Entity], bool] = lambda _: False) -> None:
        self._store = store
        self._fires = fires
        self.log = CourseLog()
        self._unsaved: deque[Callable[[Connection], None]] = deque(maxlen=UNSAVED)
        self._load(store.run(table.load) or (), store.run(table.load_results) or {})
        entries = sorted(self._entries.values(), key=lambda entry: entry.newest)[-COURSES:]
        recent = [one for one in entries if one.newest >= time.time() - SHOWN_SECONDS]
        load = partial(table.load_recent, entries=recent, most=READINGS)
        for entry, readings in store.run(load) or ():
            self.log.put(entry, readings)
        for reading in store.run(table.load_failed) or ():
            self.log.fail(reading)

    @classmethod
    def of(
        cls, entries: Iterable[Entry], results: Mapping[Computer, list[tuple[float, bool]]]
    ) -> "Baseline":
        """Return the baselines that were read from a file, to look at them."""
        found = cls(Store(None))
        found._load(entries, results)
        return found

    def take(
        self,
        courses: Iterable[Kept],
        *,
        replace: bool = False,
        advance: Callable[[], object] = lambda: None,
    ) -> tuple[int, int]:
        """Take in courses of an exported file; return how many were taken, and how many left.

        One that is here already stays, unless `replace`. `advance` is called after each.
        """
        taken = left = 0
        for entry, readings in courses:
            if entry.key in self._entries and not replace:
                left += 1
                continue
            taken += 1
            self._entries[entry.key] = entry
            self.log.put(entry, readings)
            self._save(partial(_replace, entry=entry, readings=readings))
            results = [
                (reading.time, reading.result == "ok")
                for reading, *_ in readings
                if reading.canary == "integrity" or reading.result == "wrong"
            ]
            if results:
                self._soundness.known[entry.computer] = Soundness.of(results)
            advance()
        self._find_current()
        return taken, left

    def _load(
        self, entries: Iterable[Entry], results: Mapping[Computer, list[tuple[float, bool]]]
    ) -> None:
        self._entries = {entry.key: entry for entry in entries}
        self._soundness = Computers(results)
        self._find_current()

    def _find_current(self) -> None:
        self._losses: list[tuple[Entry, float, bool]] | None = None  # known until the next reading
        self._current: dict[tuple[Entity, Shape, str], Entry] = {}
        latest = time.time() + AHEAD_SECONDS
        entries = sorted(self._entries.values(), key=lambda one: (one.newest <= latest, one.newest))
        for entry in entries:  # those of a clock that was ahead come first: all others count more
            self._current[entry.place] = entry

    def add(self, reading: CanaryReading) -> Judgement:
        """Keep a reading and judge it; a run without a result is kept alone."""
        if reading.result in ("failed", "aborted"):
            self.log.fail(reading)
            self._save(partial(table.save_failed, reading=reading))
            what = reading.detail or "no result"
            return Judgement(kind="unknown", text=f"{reading.result}: {what}")
        entry, frozen = self._entry(reading), self._fires(reading.entity)
        judgement = self._judge(reading, entry, frozen)
        taken = Taken(reading, frozen, judgement.kind)
        self.log.add(entry, taken)
        self._save(partial(table.save, entry=entry, readings=[taken]))
        return judgement

    def _judge(self, reading: CanaryReading, entry: Entry, frozen: bool) -> Judgement:
        self._losses = None
        opinion = add_reading(entry, reading, frozen=frozen)
        if reading.result == "wrong" or reading.canary == "integrity":
            return self._judge_result(reading, entry)
        if opinion.kind == "unknown":
            text = (
                "no value"
                if reading.value is None
                else f"spread {100 * (reading.spread or 0.0):.1f} %"
            )
            return Judgement(kind="unknown", text=f"{text}: no evidence")
        peers = self.peers(entry) if opinion.kind in ("suspect", "regression") else ""
        found = expected(reading)
        return Judgement(
            kind=opinion.kind,
            ratio=opinion.ratio,
            expected_ratio=reading.speed / found if reading.speed and found else None,
            loss=opinion.loss,
            cause=opinion.cause,
            peers=peers,
            retest=opinion.retest,
            text=said(entry, opinion, peers, self._former(entry)),
        )

    def peers(self, entry: Entry) -> Peers:
        """Say whether a course is slow alone, or the other GPUs of the model too."""
        own = _ratio(entry)
        loss = entry.course.loss or (0.0 if own is None else 1 - own)
        ratios = [
            ratio
            for (entity, shape, _), other in self._current.items()
            if shape == entry.shape
            and entity != entry.entity
            and other.model == entry.model
            and (ratio := _ratio(other, entry.newest)) is not None
        ]
        if not ratios or entry.entity.kind != "gpu":
            return ""
        return "whole_node" if 1 - median(ratios) >= max(PEER_LOSS, loss / 2) else "one_gpu"

    def facts(
        self, gpus: Mapping[str, Entity], now: float | None = None
    ) -> dict[Entity, dict[str, float]]:
        """Return what rules judge, by entity; `gpus` are those that are here, by uuid.

        `canary_loss_ratio` is what a confirmed regression of that canary takes from the GPU or the
        host, 0 while there is none; absent while there is no baseline in the present environment.
        A loss that the whole node shares is `canary_node_loss_ratio` of the host instead.
        `canary_wrong_results` is 1 while a GPU, or the host's GPUs together, are known to compute
        wrong results, else 0.
        """
        now = time.time() if now is None else now
        found: dict[Entity, dict[str, float]] = {}
        shared: list[float] = []
        if self._losses is None:
            self._losses = [
                (entry, loss, self._is_shared(entry, loss))
                for entry in self._newest_shapes()
                if (loss := entry.course.loss) is not None
            ]
        for entry, loss, whole in self._losses:
            entity = HOST if entry.entity == HOST else gpus.get(entry.entity.id)
            if entity is None or now - entry.newest > STALE_SECONDS:
                continue
            if entity != HOST:
                shared.append(loss if whole else 0.0)
                loss = 0.0 if whole else loss
            name = f'canary_loss_ratio{{canary="{entry.shape.canary}"}}'
            values = found.setdefault(entity, {})
            values[name] = max(loss, values.get(name, 0.0))
        if shared:
            found.setdefault(HOST, {})["canary_node_loss_ratio"] = max(shared)
        here = {gpu.id for gpu in gpus.values()}
        for (about, of), soundness in self._soundness.known.items():
            entity = HOST if about == HOST else gpus.get(about.id)
            if entity is not None and numbers(of) <= here:
                values = found.setdefault(entity, {})
                wrong = max(values.get("canary_wrong_results", 0.0), float(soundness.confirmed))
                values["canary_wrong_results"] = wrong
        return found

    def _is_shared(self, entry: Entry, loss: float) -> bool:
        """Say whether the node has a loss; once all get well again, it stays what it was."""
        ratio = _ratio(entry)
        if not loss:
            entry.shared = False
        elif ratio is None or 1 - ratio >= PEER_LOSS:
            entry.shared = self.peers(entry) == "whole_node"
        return entry.shared

    def newest(self, uuid: str) -> float | None:
        """Return when a GPU last gave a reading, unix seconds; None if it never did.

        One of the future is of a clock that was wrong.
        """
        latest = time.time() + AHEAD_SECONDS
        times = [entry.newest for entry in self._entries.values() if entry.entity.id == uuid]
        return max((time for time in times if time <= latest), default=None)

    def is_seeded(self, about: Entity, canary: str) -> bool:
        """Say whether a canary has all its baselines in the present environment.

        Of a GPU those of what it gave alone.
        """
        found = [
            entry
            for entry in self._newest_shapes()
            if entry.entity == about and entry.shape.canary == canary
            if about == HOST or entry.shape.gpus == 1
        ]
        if about == HOST:  # of other GPUs of it there may be others
            found = sorted(found, key=lambda entry: entry.newest)[-1:]
        return bool(found) and all(entry.course.baseline() for entry in found)

    def standings(self) -> list[Standing]:
        """Return how every course stands, those of one GPU together, the current ones first."""
        found = [self._standing(entry) for entry in self._entries.values()]
        return sorted(found, key=lambda one: (one.entity, one.shape, not one.current, -one.newest))

    def _standing(self, entry: Entry) -> Standing:
        course, canary = entry.course, entry.shape.canary
        baseline, ratio = course.baseline(), _ratio(entry)
        speed = course.recent[-1].speed if course.recent else None
        if speed is None and course.accepted:
            speed = course.accepted[-1].speed
        environment = json.loads(entry.environment)
        found = expected(_example(entry, environment))
        state = "learning" if baseline is None else "regression" if course.alarm else "normal"
        soundness = self._soundness.known.get(entry.computer)
        if canary == "integrity":
            state = "wrong" if soundness and soundness.confirmed else "normal"
        return Standing(
            entity=entry.entity,
            shape=entry.shape,
            environment=environment,
            model=entry.model,
            state=state,
            current=self._current[entry.place] is entry,
            newest=entry.newest,
            readings=entry.readings,
            baseline=None if baseline is None else value_of(canary, baseline.level),
            last=None if speed is None else value_of(canary, speed),
            ratio=ratio,
            expected_ratio=speed / found if speed and found else None,
            spread=course.spread,
            loss=course.loss,
            cause=course.cause,
            peers=self.peers(entry) if course.alarm else "",
        )

    def _entry(self, reading: CanaryReading) -> Entry:
        entry = Entry(reading.entity, reading.shape, epoch(reading.environment))
        entry = self._entries.setdefault(entry.key, entry)
        self._current[entry.place] = entry
        return entry

    def _former(self, entry: Entry) -> Entry | None:
        """Return the newest course of another environment that has a baseline, None if none has."""
        others = [
            other
            for other in self._entries.values()
            if other.key[:-1] == entry.key[:-1] and other is not entry
            if other.place == entry.place and other.course.baseline()
        ]
        return max(others, key=lambda other: other.newest, default=None)

    def _newest_shapes(self) -> list[Entry]:
        """Return the course of each canary that runs now: its size is a setting, and may change."""
        newest: dict[tuple[object, ...], Entry] = {}
        for (entity, shape, gpus), entry in self._current.items():
            key = (entity, shape._replace(size=0), gpus)
            if key not in newest or newest[key].newest < entry.newest:
                newest[key] = entry
        return list(newest.values())

    def _judge_result(self, reading: CanaryReading, entry: Entry) -> Judgement:
        right = reading.result == "ok"
        known = self._soundness.push(entry.computer, reading.time, right=right)
        what = f": {reading.detail}" if reading.detail and reading.result == "wrong" else ""
        if known.confirmed:
            text = f"wrong results, {len(known.wrong)} within a week{what}"
            return Judgement(kind="regression", cause="wrong_result", text=text)
        if known.suspect:
            text = f"one wrong result, not confirmed{what}"
            return Judgement(kind="suspect", cause="wrong_result", retest=True, text=text)
        return Judgement(kind="normal", text="results are right")

    def _save(self, work: Callable[[Connection], None]) -> None:
        self._unsaved.append(work)
        waiting = list(self._unsaved)
        if self._store.run(lambda file: _write(file, waiting)):
            self._unsaved.clear()


def _write(file: Connection, waiting: Iterable[Callable[[Connection], None]]) -> bool:
    for work in waiting:
        work(file)
    return True


def _replace(file: Connection, entry: Entry, readings: Sequence[Taken]) -> None:
    table.remove(file, entry)
    table.save(file, entry, readings)


def add_reading(entry: Entry, reading: CanaryReading, *, frozen: bool) -> Opinion:
    """Take a reading into its course; one that is no evidence is counted there alone."""
    entry.model = reading.model or entry.model
    entry.newest = reading.time
    entry.readings += 1
    noisy = reading.spread is not None and reading.spread > NOISY
    if reading.speed is None or reading.result != "ok" or noisy:
        return Opinion("unknown")
    per_hertz = reading.value_per_hertz if reading.canary in BY_CLOCK else None
    point = Point(reading.time, reading.speed, per_hertz, reading.clock_hertz)
    return entry.course.push(point, frozen=frozen)


def _ratio(entry: Entry, when: float | None = None) -> float | None:
    """Return the last look of a course, or that nearest to a time, by its baseline.

    None where there is none, or none of that time. Peers do not run at once, and are compared as
    they were at the same time.
    """
    baseline, recent = entry.course.baseline(), entry.course.recent
    if baseline is None or not recent:
        return None
    look = recent[-1]
    if when is not None:
        look = min(recent, key=lambda look: abs(look.time - when))
        if abs(look.time - when) > PEER_SECONDS:
            return None
    return look.speed / baseline.level


def _example(entry: Entry, environment: Mapping[str, str]) -> CanaryReading:
    """Return a reading that stands for all of a course."""
    return CanaryReading(
        entity=entry.entity,
        time=entry.newest,
        model=entry.model,
        environment=environment,
        **entry.shape._asdict(),
    )

"""Standings: how all courses of canaries stand, with their last readings, to be shown and kept."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpuwatch.baseline import Baseline
from gpuwatch.baseline_table import Entry
from gpuwatch.canary_metrics import Sample, samples
from gpuwatch.canary_reading import UNITS, CanaryReading, Shape
from gpuwatch.canary_text import Standing, standing_text, value_of
from gpuwatch.clock import SECOND_NS
from gpuwatch.courses import (
    AHEAD_SECONDS,
    COURSES,
    SHOWN_SECONDS,
    Course,
    Noted,
    reading_json,
    worst,
)
from gpuwatch.errors import RecordingError
from gpuwatch.expected import figure
from gpuwatch.recorded import Recorded
from gpuwatch.signals import HOST, Entity

NOTHING: Mapping[Any, int] = MappingProxyType({})
RENEW_SECONDS = 3600.0  # what becomes too old to be shown goes without another reading


class Standings:
    """What is known of canaries as plain data, made anew only when there are other readings.

    `courses` and `samples`, their metrics, are never changed, only replaced: another thread may
    read them. `brief` is what the status says of it, {} without any reading. With a `recording`,
    which is replayed, it is what that holds, as if it had just ended.
    """

    def __init__(self, recording: str = "") -> None:
        self._recorded = _recorded(recording) if recording else ()
        self.courses: Sequence[Course] = ()
        self.samples: Sequence[Sample] = ()
        self.brief: Mapping[str, Any] = {}
        self._made_of: tuple[Any, ...] = ()

    def look(
        self,
        baseline: Baseline,
        gpus: Mapping[str, Entity],
        runs: Mapping[tuple[str, str], int] = NOTHING,
        skips: Mapping[tuple[str, str], int] = NOTHING,
        now: float | None = None,
    ) -> None:
        """Take in what there is; `gpus` are those that are here, by uuid.

        `runs` and `skips` are the ledger's counts.
        """
        now = time.time() if now is None else now
        changes = (baseline.log.changes, tuple(gpus.items()), now // RENEW_SECONDS)
        made_of = (*changes, sum(runs.values()), sum(skips.values()))
        if made_of == self._made_of:
            return
        if changes != self._made_of[: len(changes)] and (baseline.log.changes or self._recorded):
            self._show(baseline, gpus, now)
        self._made_of = made_of
        self.samples = samples(self.courses, runs, skips)

    def _show(self, baseline: Baseline, gpus: Mapping[str, Entity], now: float) -> None:
        self.courses = [
            *(
                {**one, "entity": list(gpus.get(one["uuid"], one["entity"]))}
                for one in self._recorded
            ),
            *_courses(baseline, gpus, now - SHOWN_SECONDS, now + AHEAD_SECONDS),
        ]
        brief = {"changes": baseline.log.changes, "worst": worst(self.courses, now)}
        self.brief = brief if self.courses else {}


def _recorded(path: str) -> Sequence[Course]:
    """Return what a recording holds of canaries, () if it cannot be read: its replay says so."""
    try:
        recorded = Recorded(Path(path))
    except RecordingError:
        return ()
    shift = time.time() - recorded.end_ns / SECOND_NS
    recorded.close()
    return [
        {
            **course,
            "readings": [
                {**reading, "time": reading["time"] + shift} for reading in course["readings"]
            ],
            "environments": [
                {**one, "since": one["since"] + shift} for one in course["environments"]
            ],
        }
        for course in recorded.canaries
    ]


def _courses(
    baseline: Baseline, gpus: Mapping[str, Entity], since: float, until: float
) -> list[Course]:
    current = [one for one in baseline.standings() if one.current]
    standings = {(one.entity, one.shape): one for one in reversed(current)}  # the newest of each
    log = baseline.log
    failed = {key: list(runs) for key, runs in log.failed.items()}
    found = []
    for (entity, shape), noted in log.readings.items():
        runs = failed.get((entity, shape.canary), [])
        newest = [one for one in (*noted, *map(Noted, runs)) if since <= one.reading.time < until]
        standing = standings.get((entity, shape))
        if newest and standing is not None:
            newest.sort(key=lambda one: one.reading.time)
            found.append(_course(newest, standing, gpus))
    for (entity, canary), runs in failed.items():
        newest = [Noted(run) for run in runs if since <= run.time < until]
        alone = not any((entity, canary) == (about, shape[0]) for about, shape in log.readings)
        if newest and alone:
            found.append(_without_result(newest, gpus))
    found.sort(key=lambda one: one["readings"][-1]["time"], reverse=True)
    order = list(UNITS)
    return sorted(
        found[:COURSES],
        key=lambda one: (
            order.index(one["canary"]),
            *_shape(one),
            len(one["entity"][1]),
            one["entity"],
        ),
    )


def _shape(course: Course) -> Shape:
    return Shape(*(course[name] for name in Shape._fields))


def _about(reading: CanaryReading, shape: Shape, gpus: Mapping[str, Entity]) -> dict[str, Any]:
    """Return of what a course is; a GPU that is here by its number."""
    entity, uuid = reading.entity, "" if reading.entity == HOST else reading.entity.id
    return {
        **shape._asdict(),
        "unit": UNITS[shape.canary],
        "entity": list(gpus.get(uuid, entity)),
        "uuid": uuid,
        "model": reading.model,
    }


def _course(noted: Sequence[Noted], standing: Standing, gpus: Mapping[str, Entity]) -> Course:
    canary = standing.shape.canary
    environments: list[dict[str, Any]] = []
    places: dict[str, tuple[int, float | None]] = {}  # by environment: its place, the level there
    readings = []
    place, level = 0, None
    for reading, entry, kind in noted:
        if entry is not None:
            if entry.environment not in places:
                about, level = _environment(entry, reading)
                places[entry.environment] = (len(environments), level)
                environments.append(about)
            place, level = places[entry.environment]
        ratio = reading.speed / level if reading.speed and level else None
        readings.append(reading_json(reading, kind, ratio, place))
    if not environments:
        environments.append(_nowhere(noted[0].reading))
    kinds = [one.kind for one in noted if one.entry is not None]
    suspect = standing.state == "normal" and kinds[-1:] == ["suspect"]
    state = "suspect" if suspect else standing.state
    return {
        **_about(noted[-1].reading, standing.shape, gpus),
        "model": standing.model,
        "state": state,
        "text": _text(standing, state),
        "loss": standing.loss,
        "cause": standing.cause,
        "peers": standing.peers,
        "ratio": None if canary == "integrity" else standing.ratio,
        "expected_ratio": standing.expected_ratio,
        "environments": environments,
        "readings": readings,
    }


def _environment(entry: Entry, reading: CanaryReading) -> tuple[dict[str, Any], float | None]:
    """Return an environment with its baseline and what is expected, and the baseline's speed.

    What integrity takes is no matter of speed: it has no baseline.
    """
    canary = entry.shape.canary
    baseline = None if canary == "integrity" else entry.course.baseline()
    limit = entry.course.limit
    expected = figure(reading)
    about = None
    if expected:
        about = {**asdict(expected), "value": expected.value}
        del about["part"]
    found = {
        "since": reading.time,
        "settings": json.loads(entry.environment),
        "baseline": value_of(canary, baseline.level) if baseline else None,
        "limit": value_of(canary, limit) if baseline and limit and limit > 0 else None,
        "expected": about,
    }
    return found, baseline.level if baseline else None


def _nowhere(reading: CanaryReading) -> dict[str, Any]:
    known = {"baseline": None, "limit": None, "expected": None}
    return {"since": reading.time, "settings": {}, **known}


def _without_result(noted: Sequence[Noted], gpus: Mapping[str, Entity]) -> Course:
    """Return a course of which no run has come to its end."""
    last = noted[-1].reading
    names = ("loss", "ratio", "expected_ratio")
    return {
        **_about(last, last.shape, gpus),
        "state": "failed",
        "text": f"{last.result}: {last.detail}" if last.detail else last.result,
        "cause": "",
        "peers": "",
        **dict.fromkeys(names),
        "environments": [_nowhere(noted[0].reading)],
        "readings": [reading_json(reading, "", None, 0) for reading, *_ in noted],
    }


def _text(standing: Standing, state: str) -> str:
    """Return how a course stands, in words."""
    if state == "wrong":
        return "wrong results"
    if state == "suspect":
        return "suspect: not confirmed"
    return standing_text(standing, state)

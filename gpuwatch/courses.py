"""Courses: the last readings of canaries, as they are shown, recorded and exported.

A course is one canary, in one shape, on one GPU or the host: here over all environments it ran in,
each of which has a baseline of its own. As plain data a course is a dict that nobody changes:

`canary`, `size`, `dtype`, `direction`, `gpus`, `unit`, `entity`, `uuid`, `model`; how it stands, as
`state`, `loss`, `cause`, `peers`, `ratio`, `expected_ratio`, and in words `text`; `environments`,
each with `since`, its `settings`, `baseline`, the `limit` beyond which a reading is slow, and what
is `expected` (`value`, `peak`, `confidence`, `source`); and `readings`, oldest first, of which
`environment` is a place in that list. Values are in the unit, None is not known.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from gpuwatch.baseline_table import FAILED_KEPT, Entry, Taken
from gpuwatch.canary_reading import UNITS, CanaryReading, Shape
from gpuwatch.signals import Entity, valid

SHOWN_SECONDS = 7 * 86_400.0
COURSES = 300  # those with the newest readings
READINGS = 100  # of each course: two days of every half hour
AHEAD_SECONDS = 60.0  # of the clock: what is later is of a clock that was wrong
LATEST = 9e9  # unix seconds, in the year 2255: what is later is no time
MEASURED = (
    "time",
    "result",
    "value",
    "spread",
    "clock_hertz",
    "power_watts",
    "temperature_celsius",
    "throttle_seconds",
    "seconds",
    "detail",
)
STATES = ("learning", "normal", "suspect", "regression", "wrong", "failed")

Course = Mapping[str, Any]


class Noted(NamedTuple):
    """A reading, and the course in its environment; of a run without a result there is none.

    `kind` is that of what was judged of it, "" if that is not known.
    """

    reading: CanaryReading
    entry: Entry | None = None
    kind: str = ""


class CourseLog:
    """The last readings of each course; `changes` rises whenever there are others.

    `failed` are runs without a result, by entity and canary: they have no shape.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.readings: dict[tuple[Entity, Shape], deque[Noted]] = {}
        self.failed: dict[tuple[Entity, str], deque[CanaryReading]] = {}

    def add(self, entry: Entry, taken: Taken) -> None:
        """Note what was read just now."""
        self.changes += 1
        course = self.readings.setdefault((entry.entity, entry.shape), deque(maxlen=READINGS))
        course.append(Noted(taken.reading, entry, taken.kind))

    def fail(self, reading: CanaryReading) -> None:
        """Note a run without a result."""
        self.changes += 1
        of_canary = (reading.entity, reading.canary)
        self.failed.setdefault(of_canary, deque(maxlen=FAILED_KEPT)).append(reading)

    def put(self, entry: Entry, readings: Iterable[Taken]) -> None:
        """Have these in place of all that are here of their course in that environment."""
        self.changes += 1
        before = self.readings.get((entry.entity, entry.shape), ())
        kept = [one for one in before if one.entry and one.entry.key != entry.key]
        found = [*kept, *(Noted(one.reading, entry, one.kind) for one in readings)]
        found.sort(key=lambda one: one.reading.time)
        self.readings[entry.entity, entry.shape] = deque(found, READINGS)


def reading_json(reading: CanaryReading, kind: str, ratio: float | None, place: int) -> Course:
    """Return a reading of a course as plain data; `ratio` is by the baseline: less is slower."""
    told = {name: getattr(reading, name) for name in MEASURED}
    return {**told, "ratio": ratio, "judged": kind or None, "environment": place}


def course_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a course as it is, made sure that it is one.

    TypeError, KeyError, ValueError or OverflowError if it is none, or of a canary that is not
    known here.
    """
    environments = [
        {
            "since": _time(one["since"]),
            "settings": {valid(name): valid(text) for name, text in one["settings"].items()},
            "baseline": _number(one["baseline"]),
            "limit": _number(one["limit"]),
            "expected": _expected(one["expected"]),
        }
        for one in data["environments"]
    ]
    readings = []
    for one in data["readings"]:
        reading = CanaryReading.from_json({**data, **one, "environment": {}})
        place, judged = int(one["environment"]), one["judged"]
        _time(reading.time)
        if not 0 <= place < len(environments):
            raise ValueError(f"environment {place}")
        kind = "" if judged is None else valid(judged)
        readings.append(reading_json(reading, kind, _number(one["ratio"]), place))
    if not readings or data["state"] not in STATES:
        raise ValueError("readings")
    return {
        **reading.shape._asdict(),
        "unit": UNITS[reading.canary],
        "entity": list(reading.entity),
        "uuid": valid(data["uuid"]),
        "model": reading.model,
        "state": data["state"],
        "text": valid(data["text"]),
        "cause": valid(data["cause"]),
        "peers": valid(data["peers"]),
        **{name: _number(data[name]) for name in ("loss", "ratio", "expected_ratio")},
        "environments": environments,
        "readings": readings,
    }


def courses_from_json(data: Iterable[Mapping[str, Any]]) -> list[Course]:
    """Return those that are courses this gpuwatch knows, and leave out all others."""
    found: list[Course] = []
    for one in data:
        with suppress(TypeError, KeyError, ValueError, AttributeError, OverflowError):
            found.append(course_from_json(one))
    return found


def within(courses: Iterable[Course], since: float, until: float) -> list[Course]:
    """Return the courses with their readings of that time, unix seconds, if they have some."""
    found: list[Course] = []
    for course in courses:
        readings = [one for one in course["readings"] if since <= one["time"] <= until]
        if readings:
            found.append({**course, "readings": readings})
    return found


def worst(courses: Iterable[Course], until: float) -> list[dict[str, Any]]:
    """Return of each canary where it went worst by its newest readings up to a time.

    Wrong results are worse than slow ones; a canary of which nothing is to be said is left out.
    """
    found: dict[str, tuple[tuple[bool, float], dict[str, Any]]] = {}
    for course in courses:
        before = (one for one in reversed(course["readings"]) if one["time"] <= until)
        newest = next((one for one in before if one["result"] in ("ok", "wrong")), None)
        if newest is None:
            continue
        right, ratio = newest["result"] == "ok", newest["ratio"]
        rank = (right, 1.0 if ratio is None else ratio)
        if course["canary"] not in found or rank < found[course["canary"]][0]:
            keys = ("canary", "size", "dtype", "direction", "gpus", "unit", "entity")
            told = {name: newest[name] for name in ("time", "result", "value", "ratio")}
            found[course["canary"]] = (rank, {**{key: course[key] for key in keys}, **told})
    return [found[canary][1] for canary in UNITS if canary in found]


def _expected(told: Any) -> dict[str, Any] | None:
    if told is None:
        return None
    numbers = {name: _number(told[name]) for name in ("value", "peak")}
    return {**numbers, **{name: valid(told[name]) for name in ("confidence", "source")}}


def _number(told: Any) -> float | None:
    value = None if told is None else float(told)
    return value if value is not None and math.isfinite(value) else None


def _time(told: Any) -> float:
    if not 0 <= (time := float(told)) < LATEST:
        raise ValueError(f"time {time}")
    return time

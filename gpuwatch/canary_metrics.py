"""Metrics of canaries: their newest values, how these compare, and what became of runs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpuwatch.courses import Course
from gpuwatch.signals import HOST, Entity, quote

VALUES = {"flops_per_second": "flops_per_second", "bytes_per_second": "bandwidth_bytes_per_second"}
RATIOS = {"ratio": "baseline_ratio", "expected_ratio": "expected_ratio"}


class Sample(NamedTuple):
    """A value of a metric, without the prefix; `fragment` are labels beside the entity's."""

    name: str
    entity: Entity
    fragment: str
    value: float


def samples(
    courses: Iterable[Course],
    runs: Mapping[tuple[str, str], int],
    skips: Mapping[tuple[str, str], int],
) -> list[Sample]:
    """Return all that is known; `runs` and `skips` are the ledger's counts."""
    found = [
        Sample("canary_runs_total", HOST, _labels(canary=canary, result=result), count)
        for (canary, result), count in runs.items()
    ]
    found += [
        Sample("canary_skipped_total", HOST, _labels(canary=canary, reason=reason), count)
        for (canary, reason), count in skips.items()
    ]
    return [*found, *_of_courses(courses)]


def _of_courses(courses: Iterable[Course]) -> Iterator[Sample]:
    """Yield what the courses of GPUs that are here, and of the host, gave last.

    Of courses that differ in size alone, or of the host in number of GPUs, it is the one that ran
    last.
    """
    newest: dict[tuple[Entity, str, str, str, str], Course] = {}
    ran: dict[tuple[Entity, str], Course] = {}  # the newest run of each canary
    right: dict[tuple[Entity, str], float] = {}
    for course in sorted(courses, key=lambda one: float(one["readings"][-1]["time"])):
        entity = Entity.from_json(course["entity"])
        if course["uuid"] and entity.id == course["uuid"]:
            continue  # it is not here
        of_canary = entity, course["canary"]
        at_once = str(course["gpus"]) if course["gpus"] > 1 and entity != HOST else ""
        newest[*of_canary, course["dtype"], course["direction"], at_once] = course
        ran[of_canary] = course["readings"][-1]
        good = [one["time"] for one in course["readings"] if one["result"] == "ok"]
        right[of_canary] = max([right.get(of_canary, 0.0), *good])
    for (entity, canary, dtype, direction, at_once), course in newest.items():
        labels = _labels(canary=canary, dtype=dtype, direction=direction, at_once=at_once)
        good = [one for one in course["readings"] if one["result"] == "ok" and one["value"]]
        if good and course["unit"] in VALUES:
            name = f"canary_{VALUES[course['unit']]}"
            yield Sample(name, entity, labels, good[-1]["value"])
        for key, name in RATIOS.items():
            if course[key] is not None:
                yield Sample(f"canary_{name}", entity, labels, course[key])
    for (entity, canary), reading in ran.items():
        if reading["seconds"] is not None:
            labels = _labels(canary=canary)
            yield Sample("canary_duration_seconds", entity, labels, reading["seconds"])
    for (entity, canary), time in right.items():
        if time:
            labels = _labels(canary=canary)
            yield Sample("canary_last_success_timestamp_seconds", entity, labels, time)


def _labels(**labels: str) -> str:
    return ",".join(f"{name}={quote(value)}" for name, value in labels.items() if value)

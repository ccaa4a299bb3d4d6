"""What is said of canaries: how a course stands, and what a reading means in a line."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpuwatch.baseline_table import Entry
from gpuwatch.canary_reading import UNITS, Shape
from gpuwatch.judgement import SEED, Opinion
from gpuwatch.signals import Entity

Peers = Literal["one_gpu", "whole_node", ""]

CHANGES = 3  # of an environment, named at most
CAUSES: Mapping[str, str] = {
    "low_clock": "the clock was low",
    "slow_at_full_clock": "slow at its full clock",
    "creeping": "little by little",
}
WHO: Mapping[str, str] = {"one_gpu": "this GPU alone", "whole_node": "the whole node"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a course stands: what `gpuwatch baseline show` tells of it.

    `baseline` and `last` are in the canary's unit; `state` is "learning", "normal",
    "regression" or "wrong" results; `current` is False of environments that are past.
    """

    entity: Entity
    shape: Shape
    environment: Mapping[str, str]
    model: str
    state: str
    current: bool
    newest: float
    readings: int
    baseline: float | None
    last: float | None
    ratio: float | None
    expected_ratio: float | None
    spread: float | None
    loss: float | None
    cause: str
    peers: Peers


def value_of(canary: str, speed: float) -> float:
    """Return a speed in the canary's unit."""
    return 1 / speed if UNITS[canary] == "seconds" else speed


def written(canary: str, value: float) -> str:
    """Return a value of a canary as people write it."""
    unit = UNITS[canary]
    if unit == "flops_per_second":
        return f"{value / 1e12:.4g} TFLOPS"
    return f"{value / 1e9:.4g} GB/s" if unit == "bytes_per_second" else f"{value:.3g} s"


def shape_text(shape: Shape) -> str:
    """Return a shape as people write it, "-" of a run that came to none."""
    size = f"{shape.size >> 20}MiB" if shape.size >= 1 << 20 else str(shape.size or "")
    gpus = f"{shape.gpus}GPUs" if shape.gpus > 1 else ""
    return " ".join(filter(None, (size, shape.dtype, shape.direction, gpus))) or "-"


def standing_text(standing: Standing, state: str) -> str:
    """Return a state with how much slower the course is, by what and where, if that is known."""
    if not standing.loss:
        return state
    loss = f"{100 * standing.loss:.1f} % slower"
    parts = (loss, CAUSES.get(standing.cause, ""), WHO.get(standing.peers, ""))
    return f"{state}: {', '.join(filter(None, parts))}"


def said(entry: Entry, opinion: Opinion, peers: Peers, former: Entry | None) -> str:
    """Return what an opinion says; `former` is the course of the environment before."""
    course, canary = entry.course, entry.shape.canary
    baseline = course.baseline()
    if baseline is None or opinion.ratio is None:
        text = f"learning: {len(course.accepted)} of {SEED} readings"
        before = former.course.baseline() if former else None
        if former is None or before is None:
            return text
        level = written(canary, value_of(canary, before.level))
        return f"{text}; before {_changes(former, entry)} its baseline was {level}"
    creeping = course.alarm == "creep" and course.reference
    level = written(canary, value_of(canary, creeping or baseline.level))
    if opinion.kind == "normal":
        return f"{opinion.ratio:.3f} of its baseline, {level}"
    if opinion.kind == "suspect":
        return f"{100 - 100 * opinion.ratio:.1f} % under its baseline, {level}: not confirmed"
    what = [
        f"{100 * (opinion.loss or 0.0):.1f} % under its baseline, {level}",
        CAUSES.get(opinion.cause, ""),
        WHO.get(peers, ""),
    ]
    return ", ".join(filter(None, what))


def _changes(before: Entry, now: Entry) -> str:
    """Say what is another environment: `driver 570.1 -> 580.2`."""
    old, new = json.loads(before.environment), json.loads(now.environment)
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    parts = [f"{name} {old.get(name, '?')} -> {new.get(name, '?')}" for name in names[:CHANGES]]
    return ", ".join([*parts, *(["..."] if len(names) > CHANGES else [])])

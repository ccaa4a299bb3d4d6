"""The exported file of baselines: JSON with a schema and a version that only grow."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpuwatch import document
from gpuwatch.baseline import add_reading
from gpuwatch.baseline_table import Entry, Kept, Taken, epoch
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.errors import ConfigError

SCHEMA, VERSION = "gpuwatch-baseline", 1
MAX_BYTES = 128 << 20  # of eight GPUs with all that is kept: 60 MB
# What all readings of a course share; the rest is of each.
SHARED = ("entity", "canary", "size", "dtype", "direction", "gpus", "model", "environment")


def dump(courses: Sequence[Kept], written: str) -> str:
    """Return the file's text; `written` is the wall time of the export."""
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "written": written,
        "courses": [_course(entry, readings) for entry, readings in courses],
    }
    return json.dumps(content, allow_nan=False, indent=1) + "\n"


def load(path: Path, advance: Callable[[], object] = lambda: None) -> list[Kept]:
    """Read a file, and judge its readings anew; `advance` is called after each course.

    Raises ConfigError if it cannot be read, is of another schema or version, or has something that
    no export writes: one line that names the place.
    """
    content = document.load(
        path,
        SCHEMA,
        VERSION,
        max_bytes=MAX_BYTES,
        otherwise="no baselines: make one with `gpuwatch baseline export`",
    )
    courses = content.get("courses")
    if not isinstance(courses, list):
        raise ConfigError(f"{path}: courses: must be a list")
    found = []
    for number, course in enumerate(courses):
        found.append(_kept(path, number, course))
        advance()
    return found


def _course(entry: Entry, readings: Sequence[Taken]) -> dict[str, Any]:
    return {
        "entity": list(entry.entity),
        **entry.shape._asdict(),
        "model": entry.model,
        "environment": json.loads(entry.environment),
        "reference": entry.course.reference,
        "readings": [
            {
                **{name: value for name, value in told.items() if name not in SHARED},
                "frozen": frozen,
            }
            for reading, frozen, _ in readings
            for told in [reading.to_json()]
        ],
    }


def _kept(path: Path, number: int, told: Any) -> Kept:
    place = f"{path}: courses[{number}]"
    try:
        shared = {name: told[name] for name in SHARED}
        readings = list(told["readings"])
        reference = None if told["reference"] is None else float(told["reference"])
        if reference is not None and not 0 < reference < math.inf:
            raise ValueError(f"reference {reference}")
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ConfigError(f"{place}: {_fault(error)}") from error
    found = []
    for place_of, one in enumerate(readings):
        try:
            reading = CanaryReading.from_json({**one, **shared})
            found.append(Taken(reading, bool(one.get("frozen"))))
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ConfigError(f"{place}.readings[{place_of}]: {_fault(error)}") from error
    if not found:
        raise ConfigError(f"{place}: no readings: remove it")
    found.sort(key=lambda one: one.reading.time)
    first = found[0].reading
    entry = Entry(first.entity, first.shape, epoch(first.environment), first.model)
    for place_of, (reading, frozen, _) in enumerate(found):
        kind = add_reading(entry, reading, frozen=frozen).kind
        if reading.canary != "integrity":  # which is no matter of speed
            found[place_of] = Taken(reading, frozen, kind)
    if reference is not None:
        entry.course.reference = max(reference, entry.course.reference or 0.0)
    return Kept(entry, found)


def _fault(error: Exception) -> str:
    text = " ".join(str(error).split())[:120]
    return f"{text} is missing" if isinstance(error, KeyError) else text

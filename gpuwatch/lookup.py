"""Looks up facts that may be anything: what a driver, a file or a recording tells, as plain data.

They are taken only if they are what is asked for: what is missing, of another kind or a marker for
"no value" is None, and nothing raises.
"""

import math
from collections.abc import Mapping
from typing import Any

LARGEST = 2**62  # drivers mark what they do not know by numbers near 2^63
MARKERS = frozenset({2**32 - 1, *range(2**31 - 16, 2**31)})  # and near 2^31, and by 2^32 - 1


def look_up(facts: Any, *path: str) -> Any:
    """Return what lies there, None if nothing does."""
    for key in path:
        facts = facts.get(key) if isinstance(facts, Mapping) else None
    return facts


def number(facts: Any, *path: str) -> float | None:
    """Return a number that is none below 0."""
    value = look_up(facts, *path)
    if isinstance(value, bool) or not isinstance(value, int | float) or value in MARKERS:
        return None
    return float(value) if math.isfinite(value) and 0 <= value < LARGEST else None


def count(facts: Any, *path: str) -> int | None:
    """Return a whole number that is none below 0."""
    value = number(facts, *path)
    return int(value) if value is not None and value == int(value) else None


def flag(facts: Any, *path: str) -> bool | None:
    """Return what is true or false, told as such or as 1 or 0."""
    value = look_up(facts, *path)
    return bool(value) if isinstance(value, bool | int) and value in (0, 1) else None


def text(facts: Any, *path: str) -> str | None:
    """Return a text of at least a letter."""
    value = look_up(facts, *path)
    return value if isinstance(value, str) and value.strip() else None


def tables(facts: Any, *path: str) -> list[Mapping[str, Any]] | None:
    """Return a list of tables."""
    value = look_up(facts, *path)
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
        return None
    return list(value)

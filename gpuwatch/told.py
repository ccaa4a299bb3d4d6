"""Told: what a status says, read as if a stranger had written it, and as a terminal may have it.

A status comes from a daemon of another version, or from a recording of another machine: anything
may be missing or of another type, and no name in it may steer the terminal.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

TEXT = 2000  # characters of one text, at most


def mapping(told: Any) -> Mapping[str, Any]:
    """Return a JSON object, {} of anything else."""
    return told if isinstance(told, dict) else {}


def mappings(told: Any) -> list[Mapping[str, Any]]:
    """Return the JSON objects of a list, [] of anything else."""
    return [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []


def texts(told: Any) -> list[str]:
    """Return a list's members as texts, [] of anything else."""
    return [text(one) for one in told] if isinstance(told, list) else []


def text(told: Any) -> str:
    """Return a text or an integer as a terminal may have it: one line, nothing but signs.

    What is no sign (control characters, escapes, marks that turn the direction of writing) becomes
    a question mark; anything else is "".
    """
    if isinstance(told, bool) or not isinstance(told, str | int):
        return ""
    if isinstance(told, int):
        told = str(told) if abs(told) < 1e18 else "?"
    return "".join(sign if sign.isprintable() else "?" for sign in told[:TEXT])


def number(told: Any) -> float | None:
    """Return a finite number, None of anything else."""
    if isinstance(told, bool) or not isinstance(told, int | float):
        return None
    try:
        value = float(told)
    except OverflowError:  # an integer too large for a float
        return None
    return value if math.isfinite(value) else None


def entity(told: Any) -> tuple[str, str]:
    """Return an entity's kind and id; both "" of anything else."""
    parts = texts(told)
    return (parts[0], parts[1]) if len(parts) == 2 else ("", "")


class Minute:
    """The series of the last minute, as `/api/v1/series` answers: means, oldest first."""

    def __init__(self, told: Any) -> None:
        self._means: dict[tuple[tuple[str, str], str], list[float | None]] = {}
        for series in mappings(mapping(told).get("series")):
            means = series.get("mean")
            if isinstance(means, list):
                name = series.get("name")
                key = (entity(series.get("entity")), name if isinstance(name, str) else "")
                self._means[key] = [number(mean) for mean in means[-3600:]]

    def means(self, kind: str, identifier: str, name: str) -> Sequence[float | None]:
        """Return a column's means, () if it is not there."""
        return self._means.get(((kind, identifier), name), ())

    def recent(self, kind: str, identifier: str, name: str, seconds: int = 3) -> float | None:
        """Return the mean of the newest seconds that are known, None if they are too old."""
        means = list(self.means(kind, identifier, name))[-seconds - 2 :]
        known = [mean for mean in means if mean is not None][-seconds:]
        return sum(known) / len(known) if known else None

    def entities(self, kind: str) -> list[str]:
        """Return the ids of a kind of which there are series, in order of appearance."""
        return list(dict.fromkeys(one for (found, one), _ in self._means if found == kind))

    def names(self, kind: str, identifier: str, prefix: str) -> list[str]:
        """Return the names of an entity's series that begin so."""
        return [
            name
            for own, name in self._means
            if own == (kind, identifier) and name.startswith(prefix)
        ]


def share(value: float | None) -> str:
    """Return a ratio in percent."""
    return "-" if value is None else f"{value * 100:.0f}%"


def scaled(value: float | None, unit: float, digits: int = 0) -> str:
    """Return a value in a unit."""
    return "-" if value is None else f"{value / unit:.{digits}f}"


def rate(value: float | None) -> str:
    """Return bytes per second in GB/s with three digits."""
    if value is None:
        return "-"
    giga = value / 1e9
    return f"{giga:.0f}" if giga >= 99.95 else f"{giga:.1f}" if giga >= 9.995 else f"{giga:.2f}"


def span(seconds: float | None) -> str:
    """Return a span of time as people write it."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"

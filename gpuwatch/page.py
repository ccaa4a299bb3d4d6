"""A page of samples in the Prometheus text format 0.0.4.

Source of the format: Prometheus documentation, "Exposition formats", text-based format. A sample
whose value is not finite is not known and stays out: nothing that is measured here is infinite.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Line(NamedTuple):
    """A sample without its value: the family it belongs to, and the text before the value."""

    family: str
    prefix: str


class Page:
    """The series of one rendering, by family; what is unknown, double or too much stays out."""

    def __init__(self, limit: int) -> None:
        self.families: dict[str, dict[str, str]] = {}
        self.duplicates: list[tuple[str, str, float]] = []  # line, kept value, dropped value
        self.dropped = 0
        self._room = limit

    def put(self, line: Line, value: float) -> None:
        """Add a sample."""
        if not math.isfinite(value):
            return
        family, prefix = line
        samples = self.families.setdefault(family, {})
        if prefix in samples:
            self.duplicates.append((prefix, samples[prefix], value))
        elif self._room < 1:
            self.dropped += 1
        else:
            self._room -= 1
            samples[prefix] = number(value)

    def put_histogram(self, lines: Sequence[Line], values: Sequence[float]) -> None:
        """Add all samples of one histogram, or none of them."""
        if lines[0].prefix in self.families.get(lines[0].family, ()):
            self.put(lines[0], values[0])
        elif len(lines) > self._room:
            self.dropped += len(lines)
        else:
            for line, value in zip(lines, values, strict=True):
                self.put(line, value)

    def text(self, headers: Mapping[str, str]) -> str:
        """Return the page, families in the order of `headers`."""
        parts = []
        for family, header in headers.items():
            samples = self.families.get(family)
            if samples:
                parts.append(header)
                parts += [f"{prefix}{value}\n" for prefix, value in samples.items()]
        return "".join(parts)


def number(value: float) -> str:
    """Return a finite number as Prometheus parses it, exactly."""
    return repr(int(value)) if isinstance(value, int) else repr(float(value))


def header(family: str, kind: str, text: str) -> str:
    """Return the HELP and TYPE lines of a family; `text` must not be empty."""
    assert text, family
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {family} {escaped}\n# TYPE {family} {kind}\n"

"""Charts of a report as SVG: what each GPU gave beside what is expected, and sweeps over sizes."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from statistics import median

from gpuwatch.verify import Finding
from gpuwatch.verify_text import amount, title

WIDTH, LEFT, RIGHT, ROW, BAR = 440, 64, 350, 20, 13
PLOT_HEIGHT, TOP = 140, 14
MEASURED = ("bytes_per_second", "flops_per_second", "seconds", "celsius", "watts", "hertz")


def charts(findings: Sequence[Finding]) -> str:
    """Return the charts of what was measured, "" if there is nothing to draw."""
    groups: dict[str, list[Finding]] = {}
    for found in findings:
        groups.setdefault(title(found), []).append(found)
    drawn: list[str] = []
    for group in groups.values():
        drawn += _sweeps(group)
        measured = [one for one in group if isinstance(one.value, int | float)]
        measured.sort(key=lambda one: (len(one.entity), one.entity))  # gpu10 after gpu9
        if len(measured) > 1 and measured[0].unit in MEASURED:
            drawn.append(_bars(measured))
    return "".join(drawn)


def _figure(caption: str, height: float, content: str) -> str:
    caption = escape(caption)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{caption}">{content}</svg>'
        "</figure>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _bars(group: Sequence[Finding]) -> str:
    """Return a bar for each place; a dashed line is what is expected, a plain one the median."""
    unit = group[0].unit
    values = [float(one.value or 0.0) for one in group]
    wanted = [float(x.expectation) for x in group if isinstance(x.expectation, int | float)]
    scale = (RIGHT - LEFT) / (max(values + wanted) or 1.0)
    parts = []
    for row, (found, value) in enumerate(zip(group, values, strict=True)):
        y = row * ROW
        parts.append(_text(LEFT - 6, y + BAR - 1, found.entity, "end"))
        width = max(0.0, value * scale)
        parts.append(
            f'<rect x="{LEFT}" y="{y + 1}" width="{width:.1f}" height="{BAR}"'
            f' class="{found.verdict}"/>'
        )
        parts.append(_text(RIGHT + 8, y + BAR - 1, amount(value, unit)))
        if isinstance(found.expectation, int | float):
            x = LEFT + found.expectation * scale
            parts.append(_line(x, y - 2, x, y + ROW - 4, "expected"))
    height = len(group) * ROW
    x = LEFT + median(values) * scale
    parts.append(_line(x, 0, x, height, "median"))
    expected = ""
    if wanted:
        sources = ", ".join(dict.fromkeys(one.source for one in group if one.source))
        expected = f"; dashed: expected{f' ({sources})' if sources else ''}"
    caption = f"{title(group[0])}; line: median, {amount(median(values), unit)}{expected}"
    return _figure(caption, height + 4, "".join(parts))


def _sweeps(group: Sequence[Finding]) -> Iterator[str]:
    for found in group:
        curve = [(x, y) for x, y in found.curve if x > 0 and y >= 0]
        if len(curve) > 1:
            yield _sweep(found, sorted(curve))


def _sweep(found: Finding, curve: Sequence[tuple[float, float]]) -> str:
    """Return a value by size, the size on a logarithmic axis."""
    first, last = math.log2(curve[0][0]), math.log2(curve[-1][0])
    highest = max(y for _, y in curve) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - first) / ((last - first) or 1.0)
        return LEFT + share * (RIGHT - LEFT), TOP + (1 - y / highest) * PLOT_HEIGHT

    points = [place(x, y) for x, y in curve]
    bottom = TOP + PLOT_HEIGHT
    parts = [
        _line(LEFT, bottom, RIGHT, bottom, ""),
        _line(LEFT, TOP, RIGHT, TOP, ""),
        _text(LEFT - 6, TOP + 4, amount(highest, found.unit), "end", "axis"),
        _text(LEFT - 6, bottom + 4, "0", "end", "axis"),
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points),
    ]
    every = math.ceil(len(curve) / 6)
    for (size, _), (x, _) in list(zip(curve, points, strict=True))[::every]:
        parts.append(_text(x, bottom + 18, _size(size), "middle", "axis"))
    caption = f"{title(found)}, {found.entity}: by size"
    return _figure(caption, bottom + 26, "".join(parts))


def _size(count: float) -> str:
    for name, one in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= one:
            return f"{count / one:g} {name}"
    return f"{count:g} B"

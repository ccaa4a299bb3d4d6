"""A report as text for a terminal of 80 columns: a table, and what to do about the rest."""

import datetime
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from gpuwatch.verify import VERDICTS, Finding
from gpuwatch.verify_report import Report

WIDTH = 80
COLUMNS = (22, 10, 20, 16)  # and the verdict
FORCED = " forced"  # after a verdict; it is taken from the first column
HEADER = ("CHECK", "WHERE", "VALUE", "EXPECTED", "VERDICT")
THUMB = "Rules of thumb of the trade, which count for nothing above:"
# What one of a unit is shown as, and by how much less it is.
SHOWN = {
    "flops_per_second": ("TFLOPS", 1e12),
    "bytes_per_second": ("GB/s", 1e9),
    "hertz": ("MHz", 1e6),
    "watts": ("W", 1.0),
    "celsius": ("C", 1.0),
    "seconds": ("s", 1.0),
    "joules": ("J", 1.0),
    "lanes": ("lanes", 1.0),
}
LOOKS = {
    "board": "another board than was sold",
    "busy": "somebody else",
    "clock": "a low clock",
    "kernel": "the chip, or the code it runs",
}
BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def amount(value: float | str | None, unit: str) -> str:
    """Return a value as people write it, "-" if it is not known."""
    if value is None or isinstance(value, str):
        return value or "-"
    if unit == "bytes":
        name, one = next((one for one in BYTES if abs(value) >= one[1]), BYTES[-1])
        return f"{_number(value / one)} {name}"
    if unit == "ratio":
        return f"{100 * value:.1f} %"
    name, one = SHOWN.get(unit, (unit, 1.0))
    return f"{_number(value / one)} {name}".rstrip()


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def title(found: Finding) -> str:
    """Return the check and what it measured."""
    return f"{found.name} {found.measure}".strip()


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of a report; the last one has the verdict.

    Whatever programs, disks and files are named, a terminal is told nothing but letters.
    """
    for line in _lines(report):
        yield "".join(one if one.isprintable() else "?" for one in line)


def _lines(report: Report) -> Iterator[str]:
    judged = [found for found in report.judged if found.verdict != "SKIP"]
    sound = [
        found for found in judged if found.verdict == "PASS" and found.name in report.static_checks
    ]
    yield from _table([found for found in judged if found not in sound], sound)
    for groups in alike(found for found in judged if found.verdict != "PASS"):
        yield from ("", *_explained(groups))
    yield from _skipped([found for found in report.judged if found.verdict == "SKIP"])
    if thumbs := report.rules_of_thumb:
        yield from ("", THUMB, *_table(thumbs))
        for groups in alike(found for found in thumbs if found.verdict in ("WARN", "FAIL")):
            yield from ("", *_explained(groups))
    if report.compared:
        yield from ("", *_compared(report.compared))
    yield ""
    for note in notes(report):
        yield from _wrapped(note)
    yield summary(report)


def notes(report: Report) -> Iterator[str]:
    """Yield what a reader must know of the report as a whole."""
    if report.node.forced:
        yield "Forced: somebody else was on the GPUs, so no figure is a measure of them."
    if report.undecided:
        yield f"Essential, and not known: {', '.join(report.undecided)}"
    if report.left_out:
        yield f"Not asked: {', '.join(report.left_out)}"


def summary(report: Report) -> str:
    """Return the verdict of the whole in a line."""
    judged = report.judged
    counts = ", ".join(
        f"{count} {one}" for one in VERDICTS if (count := sum(x.verdict == one for x in judged))
    )
    gpus = len(report.node.gpus)
    forced = " (forced)" if report.node.forced else ""
    cards = f"{gpus} GPU{'s' * (gpus != 1)}"
    mode = "deep" if report.node.deep else "quick"
    time = f"{mode}, {report.seconds:.0f} s"
    return f"{report.verdict}{forced}: {cards}: {counts or 'nothing was judged'} ({time})"


def merged(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Return findings that differ in place and value alone together, the worst first."""

    def key(found: Finding) -> tuple[Any, ...]:
        place = VERDICTS.index(found.verdict)
        return place, order[title(found)], found.unit, str(found.expectation), found.reason

    findings = list(findings)
    titles = dict.fromkeys(title(found) for found in findings)
    order = {name: number for number, name in enumerate(titles)}
    return [list(group) for _, group in groupby(sorted(findings, key=key), key=key)]


def alike(findings: Iterable[Finding]) -> list[list[list[Finding]]]:
    """Return groups of findings together whose explanation differs in numbers alone."""
    together: dict[tuple[Any, ...], list[list[Finding]]] = {}
    for group in merged(findings):
        one = group[0]
        where = places([found.entity for found in group])
        reason = re.sub(r"[\d.]+", "", one.reason)
        key = one.verdict, one.name, where, one.cause, one.next_step, reason
        together.setdefault(key, []).append(group)
    return list(together.values())


def heading(groups: Sequence[Sequence[Finding]]) -> str:
    """Return what is wrong, and where."""
    names = [title(group[0]) for group in groups]
    names[1:] = [group[0].measure for group in groups[1:]]
    return f"{', '.join(names)}, {places([found.entity for found in groups[0]])}"


def explanation(groups: Sequence[Sequence[Finding]]) -> Iterator[tuple[str, str]]:
    """Yield what was seen, why that is no PASS and what to do, each with its label."""
    found = groups[0][0]
    for group in groups:
        name = f"{group[0].measure}: " if len(groups) > 1 and group[0].measure else ""
        if told := _seen(group):
            yield "is", f"{name}{told}"
    if found.reason:
        looks = f" (looks like: {LOOKS.get(found.cause, found.cause)})" if found.cause else ""
        yield "why", f"{found.reason}{looks}"
    if found.next_step:
        yield "next", found.next_step


def _seen(group: Sequence[Finding]) -> str:
    """Return what was found and what should be; "" where neither is known."""
    found = group[0]
    if found.value is None and found.expectation is None:
        return ""
    if found.expectation is None:
        return values(group)
    source = f", {found.source}" if found.source else ""
    return f"{values(group)}; expected {amount(found.expectation, found.unit)}{source}"


def _table(findings: Sequence[Finding], sound: Sequence[Finding] = ()) -> Iterator[str]:
    """Yield a row for what differs in place alone; of a check in `sound`, one for all of it."""
    if some := [*findings, *sound]:
        yield _row(HEADER, some[0].forced).removesuffix(FORCED)
    rest = merged(findings)
    bad = [group for group in rest if group[0].verdict != "PASS"]
    yield from _rows(bad)
    for name in dict.fromkeys(found.name for found in sound):
        own = [found for found in sound if found.name == name]
        entities = [found.entity for found in own]
        gpus = [entity for entity in entities if entity.startswith("gpu")]
        measures = len({found.measure for found in own})
        cells = (name, places(gpus or entities), f"{measures} as expected", "", "PASS")
        yield _row(cells, own[0].forced)
    yield from _rows(rest[len(bad) :])


def _rows(groups: Iterable[Sequence[Finding]]) -> Iterator[str]:
    for group in groups:
        one = group[0]
        cells = (
            title(one),
            places([found.entity for found in group]),
            values(group),
            amount(one.expectation, one.unit) if one.expectation is not None else "-",
            one.verdict,
        )
        yield _row(cells, one.forced)


def _row(cells: Sequence[str], forced: bool) -> str:
    mark = FORCED if forced else ""
    widths = (COLUMNS[0] - len(mark), *COLUMNS[1:])
    columns = (_short(cell, width).ljust(width) for cell, width in zip(cells, widths, strict=False))
    return " ".join((*columns, *cells[len(COLUMNS) :])) + mark


def _short(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return f"..{text[2 - width :]}" if text.startswith("/") else f"{text[: width - 2]}.."


def places(entities: Sequence[str]) -> str:
    """Return gpu0, gpu1, gpu2, gpu5 as gpu0-2,5; what is no GPU as how many there are."""
    entities = list(dict.fromkeys(entities))
    numbers = sorted(int(found[1]) for one in entities if (found := re.fullmatch(r"gpu(\d+)", one)))
    if len(entities) == 1:
        return entities[0]
    if len(numbers) < len(entities):
        return f"{len(entities)} pairs" if "-" in entities[0] else f"{len(entities)} places"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return "gpu" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def values(group: Sequence[Finding]) -> str:
    """Return the value of findings of one measure, or from which to which they reach."""
    told = [found.value for found in group if found.value is not None]
    unit = group[0].unit
    numbers = [value for value in told if not isinstance(value, str)]
    if not told:
        return "-"
    if len(numbers) == len(told):
        low, high = amount(min(numbers), unit), amount(max(numbers), unit)
        number, _, its_unit = low.partition(" ")
        return low if low == high else f"{number if high.endswith(its_unit) else low} to {high}"
    texts = dict.fromkeys(amount(value, unit) for value in told)
    return next(iter(texts)) if len(texts) == 1 else f"{len(texts)} different"


def _explained(groups: Sequence[Sequence[Finding]]) -> Iterator[str]:
    found = groups[0][0]
    forced = " (forced)" if found.forced else ""
    yield from _wrapped(f"{found.verdict}{forced}  {heading(groups)}")
    for label, text in explanation(groups):
        yield from _wrapped(text, f"    {label}:".ljust(10))


def excuse(found: Finding) -> str:
    """Return why something was skipped, and what to do if there is something."""
    step = found.next_step if found.next_step != "nothing" else ""
    return "; next: ".join(filter(None, (found.reason, step)))


def _skipped(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield what the node does not have in short, what is so for one reason together."""
    reasons: dict[str, list[Finding]] = {}
    for found in findings:
        reasons.setdefault(excuse(found), []).append(found)
    if reasons:
        yield ""
    for told, group in reasons.items():
        names = list(dict.fromkeys(title(found) for found in group))
        where = f", {places([found.entity for found in group])}" if len(names) == 1 else ""
        text = f"SKIP  {', '.join(names)}{where}: {told}"
        yield from textwrap.wrap(text, WIDTH, subsequent_indent="      ")


def _wrapped(text: str, first: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )


def _compared(compared: Mapping[str, Any]) -> Iterator[str]:
    yield comparison(compared)
    for one in compared["changes"]:
        yield from _wrapped(change_text(one), "  ")


def comparison(compared: Mapping[str, Any]) -> str:
    """Return with which report it is compared, and the verdict of that."""
    when = datetime.datetime.fromtimestamp(compared["time"], datetime.UTC)
    told = f"{compared['verdict']}:" if compared["changes"] else "nothing is different"
    return f"Compared with {compared['file']} of {when:%Y-%m-%d %H:%M} UTC: {told}"


def change_text(one: Mapping[str, Any]) -> str:
    """Return a change in a line."""
    before, now = (amount(one[key], one["unit"]) for key in ("before", "now"))
    share = ""
    if one["kind"] == "value" and one["unit"] and isinstance(one["before"], int | float):
        share = f" ({100 * (one['now'] / one['before'] - 1):+.1f} %)" if one["before"] else ""
    return (
        f"{'WARN  ' if one['worse'] else ''}{one['entity']} {one['what']}: {before} -> {now}{share}"
    )

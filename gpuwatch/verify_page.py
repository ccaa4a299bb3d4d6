"""A report as one HTML page that needs nothing else: no script, no file, no network.

Whatever a driver, a host or a file named is text in it, and its policy lets no other style in.
"""

import base64
import datetime
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from gpuwatch.verify import Finding
from gpuwatch.verify_charts import charts
from gpuwatch.verify_report import Report
from gpuwatch.verify_text import (
    alike,
    amount,
    change_text,
    comparison,
    excuse,
    explanation,
    heading,
    merged,
    notes,
    places,
    summary,
    title,
    values,
)

DATA = Path(__file__).with_name("data")
THUMB = "They are what the trade goes by, and count for nothing in the verdict."
GPU_COLUMNS = ("name", "pci_bus_id", "uuid", "serial", "vbios", "fault")
COLUMNS = ("Check", "Where", "Value", "Expected", "From", "Verdict")


def page(report: Report) -> str:
    """Return the page."""
    style = (DATA / "verify.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    when = datetime.datetime.fromtimestamp(report.time, datetime.UTC)
    judged = report.judged
    checked = [found for found in judged if found.verdict != "SKIP"]
    faults = [found for found in checked if found.verdict != "PASS"]
    drawn = charts([found for found in judged if found.name not in report.static_checks])
    parts = {
        "style": style,
        "style_hash": f"sha256-{digest}",
        "verdict": report.verdict,
        "host": escape(str(report.host.get("name") or "host")),
        "summary": escape(summary(report)),
        "notes": _paragraphs(notes(report)),
        "facts": "".join(_facts(report)),
        "gpus": _section("GPUs", _table(("GPU", *GPU_COLUMNS), _gpus(report))),
        "faults": _section("What is wrong, and what to do", _explained(faults)),
        "charts": _section("Measured", drawn and f'<div class="charts">{drawn}</div>'),
        "findings": _section("All that was checked", _table(COLUMNS, _rows(checked))),
        "skipped": _section("Skipped", _paragraphs(_skipped(judged))),
        "thumbs": _section("Rules of thumb", _thumbs(report.rules_of_thumb)),
        "compared": _section("Compared with an earlier report", _paragraphs(_compared(report))),
        "time": f"{when:%Y-%m-%d %H:%M:%S} UTC",
    }
    return Template((DATA / "verify.html").read_text()).substitute(parts)


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{heading}</h2>{content}</section>" if content else ""


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def _facts(report: Report) -> Iterator[str]:
    for name, value in {**report.host, **report.versions}.items():
        if value is not None:
            shown = amount(value, "bytes") if name.endswith("_bytes") else str(value)
            what = name.removesuffix("_bytes").replace("_", " ")
            yield f"<dt>{escape(what)}</dt><dd>{escape(shown)}</dd>"


def _gpus(report: Report) -> Iterator[list[str]]:
    for gpu in report.node.gpus:
        yield [str(gpu["gpu"]), *(escape(str(gpu.get(name) or "-")) for name in GPU_COLUMNS)]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f"<th>{escape(cell.replace('_', ' '))}</th>" for cell in header)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _rows(findings: Iterable[Finding]) -> Iterator[list[str]]:
    for group in merged(findings):
        one = group[0]
        where = places([found.entity for found in group])
        expected = amount(one.expectation, one.unit)
        texts = (title(one), where, values(group), expected, one.source)
        yield [*map(escape, texts), _verdict(one)]


def _verdict(found: Finding) -> str:
    forced = " forced" if found.forced else ""
    return f'<span class="verdict {found.verdict}">{found.verdict}</span>{forced}'


def _explained(findings: Iterable[Finding]) -> str:
    parts = []
    for groups in alike(findings):
        parts.append(f"<h3>{_verdict(groups[0][0])} {escape(heading(groups))}</h3>")
        told = explanation(groups)
        parts.append(_paragraphs(f"{label.capitalize()}: {text}" for label, text in told))
    return "".join(parts)


def _thumbs(thumbs: Sequence[Finding]) -> str:
    if not thumbs:
        return ""
    odd = _explained(found for found in thumbs if found.verdict in ("WARN", "FAIL"))
    return _paragraphs([THUMB]) + _table(COLUMNS, _rows(thumbs)) + odd


def _skipped(judged: Iterable[Finding]) -> Iterator[str]:
    for group in merged(found for found in judged if found.verdict == "SKIP"):
        found = group[0]
        yield f"{title(found)}, {places([one.entity for one in group])}: {excuse(found)}"


def _compared(report: Report) -> Iterator[str]:
    if report.compared is not None:
        yield comparison(report.compared)
        yield from map(change_text, report.compared["changes"])

"""A report as one HTML page that needs nothing else: no script, no file, no network.

Whatever a driver, a host or a file named is text in it, and its policy lets no other style in.
"""

import base64
import datetime
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    excuse,
    heading,
    merged,
    places,
    reason,
    seen,
    summary,
    title,
    values,
)

DATA = Path(__file__).with_name("data")
FORCED = "Forced: somebody else was on the GPUs, so no figure here is a measure of them."
THUMB = "They are what the trade goes by, and count for nothing in the verdict."
COLUMNS = ("Check", "Where", "Value", "Expected", "From", "Verdict")


def page(report: Report) -> str:
    """Return the page."""
    style = (DATA / "verify.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    when = datetime.datetime.fromtimestamp(report.time, datetime.UTC)
    judged = report.judged
    checked = [found for found in judged if found.verdict != "SKIP"]
    thumbs = [found for found in report.findings if found.thumb]
    looked = {one.check.name for one in report.ran if one.check.phase == "static"}
    drawn = charts([found for found in report.judged if found.name not in looked])
    parts = {
        "style": style,
        "style_hash": f"sha256-{digest}",
        "verdict": report.verdict,
        "host": escape(str(report.host.get("name") or "host")),
        "summary": escape(summary(report)),
        "notes": "".join(_notes(report)),
        "facts": "".join(_facts(report)),
        "gpus": _section("GPUs", _table(("GPU", *GPU), _gpus(report))),
        "faults": _section("What is wrong, and what to do", "".join(_faults(judged))),
        "charts": _section("Measured", drawn and f'<div class="charts">{drawn}</div>'),
        "findings": _section("All that was checked", _table(COLUMNS, _rows(checked))),
        "skipped": _section("Skipped", "".join(_skipped(judged))),
        "thumbs": _section(
            "Rules of thumb",
            thumbs and f"<p>{THUMB}</p>{_table(COLUMNS, _rows(thumbs))}",
        ),
        "compared": _section("Compared with an earlier report", "".join(_compared(report))),
        "time": f"{when:%Y-%m-%d %H:%M:%S} UTC",
    }
    return Template((DATA / "verify.html").read_text()).substitute(parts)


def _section(heading: str, content: object) -> str:
    return f"<section><h2>{heading}</h2>{content}</section>" if content else ""


def _notes(report: Report) -> Iterator[str]:
    if report.node.forced:
        yield f'<p class="WARN">{FORCED}</p>'
    if report.undecided:
        yield f"<p>Essential, and not known: {escape(', '.join(report.undecided))}</p>"
    if report.left_out:
        yield f"<p>Not asked: {escape(', '.join(report.left_out))}</p>"


def _facts(report: Report) -> Iterator[str]:
    for name, value in {**report.host, **report.versions}.items():
        if value is not None:
            shown = amount(value, "bytes") if name.endswith("_bytes") else str(value)
            what = name.removesuffix("_bytes").replace("_", " ")
            yield f"<dt>{escape(what)}</dt><dd>{escape(shown)}</dd>"


GPU = ("name", "pci_bus_id", "uuid", "serial", "vbios", "fault")


def _gpus(report: Report) -> Iterator[list[str]]:
    for gpu in report.node.gpus:
        yield [str(gpu["gpu"]), *(escape(str(gpu.get(name) or "-")) for name in GPU)]


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


def _faults(judged: Iterable[Finding]) -> Iterator[str]:
    for groups in alike(found for found in judged if found.verdict not in ("PASS", "SKIP")):
        found = groups[0][0]
        yield f"<h3>{_verdict(found)} {escape(heading(groups))}</h3>"
        for group in groups:
            name = f"{group[0].measure}: " if len(groups) > 1 and group[0].measure else ""
            told = seen(group)
            yield f"<p>{escape(name + told)}</p>" if told else ""
        for label, text in (("Why", reason(found)), ("Next", found.next_step)):
            yield f"<p>{label}: {escape(text)}</p>" if text else ""


def _skipped(judged: Iterable[Finding]) -> Iterator[str]:
    for group in merged(found for found in judged if found.verdict == "SKIP"):
        found = group[0]
        about = f"{title(found)}, {places([one.entity for one in group])}: {excuse(found)}"
        yield f"<p>{escape(about)}</p>"


def _compared(report: Report) -> Iterator[str]:
    compared: Mapping[str, object] | None = report.compared
    if compared is None:
        return
    yield f"<p>{escape(str(compared['file']))}</p>"
    changes = compared["changes"]
    assert isinstance(changes, list)
    yield "".join(f"<p>{escape(change_text(one))}</p>" for one in changes) or "<p>Nothing.</p>"

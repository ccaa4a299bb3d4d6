"""The view's alerts, the worst first, with the causes and the next step; and what slows GPUs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from gpuwatch import told
from gpuwatch.view_gpus import SEVERITIES, STYLES

STATES = ("firing", "pending")
INDENT = " " * 9

Told = list[tuple[str, str]]  # what was told already: an entity and its cause, a recording


@dataclass(slots=True)
class _Block:
    """Lines that belong together, and how bad it is what they say."""

    severity: str
    lines: list[Text] = field(default_factory=list)


def alerts(status: Mapping[str, Any], width: int, room: int | None) -> list[Text]:
    """Return the alerts in at most `room` lines, then what slows GPUs beside them.

    What there is no room for is counted in one line more.
    """
    told_already: Told = [("", _own(status))]
    blocks = [
        _alert(alert, width, told_already)
        for state in STATES
        for severity in SEVERITIES
        for alert in told.mappings(status.get("alerts"))
        if alert.get("state") == state and _severity(alert) == severity
    ]
    blocks += _slowed(status, told_already)
    shown: list[Text] = []
    left: list[_Block] = []
    for block in blocks:
        if left or (room is not None and shown and len(shown) + len(block.lines) > room):
            left.append(block)
        else:
            shown += block.lines
    if left:
        counts = Counter(block.severity for block in left)
        more = ", ".join(f"{count} {severity}" for severity, count in counts.items())
        shown.append(Text(f"and {more}: a shows all", style="dim"))
    return shown


def _severity(alert: Mapping[str, Any]) -> str:
    severity = told.text(alert.get("severity"))
    return severity if severity in SEVERITIES else SEVERITIES[-1]


def _alert(alert: Mapping[str, Any], width: int, told_already: Told) -> _Block:
    severity, firing = _severity(alert), alert.get("state") == "firing"
    entity = " ".join(filter(None, told.entity(alert.get("entity"))))
    line = Text()
    if firing:
        line.append(f"{severity:<8} ", style=STYLES[severity])
    else:
        line.append(f"{'pending':<8} ", style="dim")
    line.append(told.text(alert.get("rule")), style="bold" if firing else "")
    line.append(" ".join(filter(None, (f" {entity}", told.text(alert.get("place"))))))
    value, limit = told.number(alert.get("value")), told.number(alert.get("limit"))
    if value is not None and limit is not None:
        line.append(f"  {value:.4g}, limit {limit:.4g}", style="dim")
    if since := told.text(alert.get("since")):
        line.append(f"  since {since[11:19] or since}Z", style="dim")
    if not firing:
        return _Block("pending", [line])
    lines = [line]
    for cause in told.mappings(alert.get("causes")):
        key = (entity, told.text(cause.get("cause")))
        if key not in told_already:
            told_already.append(key)
            lines += _wrapped(f"lost time: {_cause(cause)}", width)
    if step := told.text(alert.get("next_step")):
        lines += _wrapped(step, width)
    recording = ("", told.text(alert.get("recording")))
    if recording not in told_already and recording[1]:
        told_already.append(recording)
        lines.append(Text(f"{INDENT}recording {recording[1]}", style="dim"))
    return _Block(severity, lines)


def _own(status: Mapping[str, Any]) -> str:
    """Return the name of the recording that is shown, "" of a running node."""
    return told.text(told.mapping(status.get("recording")).get("name"))


def _cause(cause: Mapping[str, Any]) -> str:
    """Return a cause as "42% power limit: evidence"; its share is of the last minute."""
    share = told.number(cause.get("share"))
    text = told.text(cause.get("text")) or told.text(cause.get("cause")).replace("_", " ")
    return text if share is None else f"{told.share(share)} {text}"


def _slowed(status: Mapping[str, Any], told_already: Told) -> list[_Block]:
    """Return what slows GPUs most, unless an alert has said so; those with one cause together."""
    together: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for gpu in told.mappings(status.get("gpus")):
        number = told.text(gpu.get("gpu"))
        for cause in told.mappings(gpu.get("causes"))[:1]:
            name = told.text(cause.get("cause"))
            if (f"gpu {number}", name) not in told_already:
                together.setdefault(name, []).append((number, cause))
    blocks = []
    for gpus in together.values():
        worst, cause = max(gpus, key=lambda one: told.number(one[1].get("share")) or 0.0)
        line = Text("slowed   ", style=STYLES["info"])
        line.append(f"GPU {' '.join(number for number, _ in gpus)}", style="default")
        several = f" (GPU {worst})" if len(gpus) > 1 else ""
        line.append(f"  {_cause(cause)}{several}", style="default")
        blocks.append(_Block("slowed", [line]))
    return blocks


def _wrapped(text: str, width: int) -> list[Text]:
    """Return a text below an alert, in two lines at most."""
    room = max(10, width - len(INDENT))
    first, rest = text, ""
    if len(text) > room:
        at = text.rfind(" ", 0, room + 1)
        at = at if at > 0 else room
        first, rest = text[:at], text[at:].lstrip()
    return [Text(f"{INDENT}{part}") for part in (first, rest) if part]

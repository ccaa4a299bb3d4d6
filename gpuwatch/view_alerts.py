"""The view's alerts, the worst first, with the next step and the causes; and what slows GPUs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from gpuwatch import told
from gpuwatch.view_gpus import SEVERITIES, STYLES

STATES = ("firing", "pending")


@dataclass(slots=True)
class _Block:
    """Lines that belong together, and how bad it is what they say."""

    severity: str
    lines: list[Text] = field(default_factory=list)


def alerts(status: Mapping[str, Any], width: int, room: int | None) -> list[Text]:
    """Return the alerts, the worst first, in at most so many lines; and what slows GPUs."""
    blocks = [
        _alert(alert, width)
        for state in STATES
        for severity in SEVERITIES
        for alert in told.mappings(status.get("alerts"))
        if alert.get("state") == state and _severity(alert) == severity
    ]
    blocks += _slowed(status, width)
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


def _alert(alert: Mapping[str, Any], width: int) -> _Block:
    severity, state = _severity(alert), told.text(alert.get("state"))
    style = STYLES[severity] if state == "firing" else "dim"
    entity = " ".join(filter(None, told.entity(alert.get("entity"))))
    line = Text()
    line.append(f"{severity:<8}" if state == "firing" else f"{state:<8}", style=style)
    line.append(" ")
    line.append(told.text(alert.get("rule")), style="bold")
    line.append(" ".join(filter(None, (f" {entity}", told.text(alert.get("place"))))))
    value, limit = told.number(alert.get("value")), told.number(alert.get("limit"))
    if value is not None and limit is not None:
        line.append(f"  {value:.4g}, limit {limit:.4g}", style="dim")
    if since := told.text(alert.get("since")):
        line.append(f"  since {since[11:19] or since}Z", style="dim")
    lines = [line]
    for cause in told.mappings(alert.get("causes")):
        lines += _wrapped(f"because {_cause(cause)}", width)
    if state == "firing" and (step := told.text(alert.get("next_step"))):
        lines += _wrapped(step, width)
    return _Block(severity if state == "firing" else "pending", lines)


def _cause(cause: Mapping[str, Any]) -> str:
    share = told.number(cause.get("share"))
    name = told.text(cause.get("cause")).replace("_", " ")
    text = told.text(cause.get("text"))
    return f"{name} {'' if share is None else told.share(share)}".rstrip() + (
        f": {text}" if text else ""
    )


def _slowed(status: Mapping[str, Any], width: int) -> list[_Block]:
    """Return what slows GPUs most; GPUs with the same cause together."""
    together: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for gpu in told.mappings(status.get("gpus")):
        for cause in told.mappings(gpu.get("causes"))[:1]:
            name = told.text(cause.get("cause"))
            together.setdefault(name, []).append((told.text(gpu.get("gpu")), cause))
    blocks = []
    for gpus in together.values():
        worst, cause = max(gpus, key=lambda one: told.number(one[1].get("share")) or 0.0)
        several = f" (GPU {worst})" if len(gpus) > 1 else ""
        line = Text("slowed   ", style="cyan")
        line.append(f"GPU {' '.join(number for number, _ in gpus)}", style="not bold default")
        line.append(f"  {_cause(cause)}{several}", style="default")
        blocks.append(_Block("slowed", [line]))
    return blocks


def _wrapped(text: str, width: int) -> list[Text]:
    """Return a text below an alert, in two lines at most."""
    room = max(10, width - 9)
    first, _, rest = text, "", ""
    if len(text) > room:
        at = text.rfind(" ", 0, room + 1)
        at = at if at > 0 else room
        first, rest = text[:at], text[at:].lstrip()
    return [Text(f"{'':9}{part}") for part in (first, rest) if part]

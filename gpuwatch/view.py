"""The view: a node in a terminal, as lines, from what `/api/v1/status` says and the last minute.

Pure: the same status, minute, width and looks give the same lines. What is not known is "-".
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.text import Text

from gpuwatch import told
from gpuwatch.view_alerts import alerts
from gpuwatch.view_gpus import SORTS, STYLES, Sort, gpus_of, ordered, table

EVENTS_SHOWN = 10
VERDICTS = {"ok": "bold green", "watch": "bold yellow"}  # the others ask for a person
COLUMNS = """
Columns; what is not known is "-", the rest is as in /api/v1/status
  STATE      ok; critical, warning: the worst alert that fires; lost: does not
             answer; hung: left alone, for a call to it did not return;
             released: left to another tool; of a MIG instance its profile
  UTIL       share of time in which a kernel ran
  SM MHz     SM clock / highest SM clock
  THROTTLED  share of the last 3 s in which the driver held the clock down
  POWER W    board power / enforced limit
  TEMP C     core / memory
  MEM GiB    memory in use / size
  DRAM       share of memory bandwidth in use; SM: of the SMs; TENSOR: of time
             in which tensor cores worked
  NVLINK     received ↓ and transmitted ↑, mean of the last 3 s; PCIE too
  CLOCK 60s  the last minute of the SM clock, from 0 to its limit; POWER 60s
             of the power; blank where it is not known
"""


@dataclass(slots=True)
class Looks:
    """How the view is looked at: what keys change."""

    sort: int = 0  # a place in SORTS
    help: bool = False
    paused: bool = False
    all_alerts: bool = False
    keys: str = ""  # what they do, for the page of help

    @property
    def order(self) -> Sort:
        """The order of the GPUs."""
        return SORTS[self.sort % len(SORTS)]

    def press(self, key: str) -> bool:
        """Take a key; False if it means nothing here."""
        match key:
            case "s":
                self.sort += 1
            case "?" | "h":
                self.help = not self.help
            case "a":
                self.all_alerts = not self.all_alerts
            case _:
                return False
        return True


class Picture(NamedTuple):
    """Lines, none wider than the terminal: `head` always stays, `body` may be scrolled."""

    head: list[Text]
    body: list[Text]


def picture(
    status: Mapping[str, Any],
    minute: Mapping[str, Any],
    size: tuple[int, int],
    looks: Looks,
) -> Picture:
    """Return the view of a node, or of a recording, for a terminal of `size`, (columns, lines).

    With 0 lines all is shown, however long it becomes.
    """
    width, height = max(1, size[0]), size[1]
    history = told.Minute(minute)
    gpus = gpus_of(status, history)
    head = [_head(status, [gpu.state for gpu in gpus], looks)]
    if looks.help:
        page = [Text(line) for line in (looks.keys + COLUMNS).splitlines()]
        return Picture(_fit(head, width), _fit(page, width))
    # Of a small terminal alerts take what the GPUs leave, but a few lines whatever they leave.
    left = min(height // 3, height - len(gpus) - 3)
    room = None if looks.all_alerts or not height else max(4, left)
    body = alerts(status, width, room)
    if gpus:
        body += table(ordered(gpus, looks.order), width)
    else:
        released = told.mapping(status.get("released")).get("gpus") is True
        why = "GPUs are released until `gpuwatch resume gpus`" if released else "no GPU is known"
        body.append(Text(why, style="cyan" if released else "dim"))
    for section in (
        _ports(status, history, width),
        _host(status, history, width),
        _canaries(status, width),
        _sources(status, history, width),
        _events(status),
    ):
        body += section
    return Picture(_fit(head, width), _fit(body, width))


def slider(now: float, start: float, end: float, width: int, *, playing: bool) -> Text:
    """Return where in a recording, from `start` to `end` in unix seconds, we are."""
    share = (now - start) / (end - start) if end > start else 0.0
    line = Text("▶ " if playing else "‖ ", style="bold")
    line.append(f"{_clock(now * 1e9)}  {_passed(now - start)} of {_passed(end - start)}  ")
    room = width - line.cell_len
    if room >= 10:
        at = round(share * (room - 1))
        line.append(f"{'━' * at}●{'─' * (room - 1 - at)}", style="not bold")
    line.truncate(width)
    return line


def _passed(seconds: float) -> str:
    whole = int(max(0.0, seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def foot(fault: str, keys: str) -> Text:
    """Return the last line: what keys there are, or why there is nothing new."""
    return Text(told.text(fault), style="reverse") if fault else Text(keys, style="dim")


def _fit(lines: Iterable[Text], width: int) -> list[Text]:
    found = []
    for line in lines:
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
        found.append(line)
    return found


def _head(status: Mapping[str, Any], states: Sequence[str], looks: Looks) -> Text:
    verdict = told.text(status.get("verdict")) or "not known yet"
    recording = told.text(told.mapping(status.get("recording")).get("name"))
    name = recording or told.text(status.get("hostname")) or "this node"
    line = Text(name, style="bold")
    line.append("  ")
    line.append(verdict, style=VERDICTS.get(verdict, "bold red reverse"))
    silent = sum(state in ("lost", "hung") for state in states)
    count = f"{len(states) - silent} of {len(states)}" if silent else f"{len(states)}"
    models = {told.text(gpu.get("name")) for gpu in told.mappings(status.get("gpus"))}
    model = models.pop() if len(models) == 1 else ""
    line.append(f"  {count} {model or 'GPUs'}", style="not bold")
    line.append(f"  {_clock(status.get('realtime_ns'))}", style="not bold")
    if looks.paused:
        line.append("  ")
        line.append("paused", style="reverse")
    if looks.order is not SORTS[0]:
        line.append(f"  by {looks.order.name}", style="not bold")
    source = told.mapping(status.get("source"))
    kind = told.text(source.get("kind")) or "nvml"
    if kind != "nvml" and not recording:
        what = " ".join(filter(None, (kind, told.text(source.get("scenario")))))
        line.append("  ")
        line.append(f"not this node's: {what}", style="reverse not bold")
    return line


def _clock(realtime_ns: Any) -> str:
    nanoseconds = told.number(realtime_ns)
    if nanoseconds is None or not 0 <= nanoseconds < 4e18:
        return "-"
    return time.strftime("%H:%M:%SZ", time.gmtime(nanoseconds / 1e9))


def _ports(status: Mapping[str, Any], minute: told.Minute, width: int) -> list[Text]:
    """Return the RDMA ports, as many beside each other as there is room for."""
    cells = []
    for port in told.mappings(status.get("ports")):
        device, number = (told.text(port.get(key)) for key in ("device", "port"))
        values, identifier = told.mapping(port.get("values")), f"{device}/{number}"
        up, rate = (
            told.number(values.get(f"rdma_{key}")) for key in ("port_up", "rate_bytes_per_second")
        )
        enabled = told.number(values.get("rdma_port_enabled"))
        state = "-" if up is None else "up" if up else "off" if enabled == 0 else "DOWN"
        ways = [
            told.rate(minute.recent("rdma_port", identifier, f"rdma_port_data_{way}_bytes_total"))
            for way in ("received", "transmitted")
        ]
        near = told.text(port.get("gpu"))
        cell = Text(f"{identifier:<9} ")
        cell.append(f"{state:<4}", style=STYLES["critical"] if state == "DOWN" else "green")
        cell.append(f" {'-' if rate is None else f'{rate * 8e-9:.0f}G':>4}")
        cell.append(f" {ways[0]:>4}↓ {ways[1]:>4}↑")
        cell.append(f" GPU {near}" if near else "", style="dim")
        cells.append(cell)
    if not cells:
        return []
    own = min(width, max(cell.cell_len for cell in cells))
    beside = max(1, (width + 3) // (own + 3))
    lines = [Text("RDMA PORTS, GB/s", style="bold")]
    for start in range(0, len(cells), beside):
        line = Text()
        for cell in cells[start : start + beside]:
            cell.truncate(own, overflow="ellipsis", pad=True)
            line = Text("   ").join([line, cell]) if line.plain else cell
        lines.append(line)
    return lines


def _host(status: Mapping[str, Any], minute: told.Minute, width: int) -> list[Text]:
    """Return for what the host's work waited, and what its storage moved."""
    waits = []
    for resource in minute.entities("resource"):
        some, full = (
            minute.recent("resource", resource, f'host_pressure_seconds_total{{kind="{kind}"}}')
            for kind in ("some", "full")
        )
        if some is not None:
            whole = "" if full is None else f" ({told.share(full)} all)"
            waits.append(f"{resource} {told.share(some)}{whole}")
    parts = [f"waits for {', '.join(waits)}"] if waits else []
    for storage in ("disk", "nfs", "lustre"):
        read, written = (
            minute.recent("host", "", f'host_io_{way}_bytes_total{{storage="{storage}"}}')
            for way in ("read", "written")
        )
        if read or written or (storage == "disk" and read is not None):
            parts.append(f"{storage} {told.rate(read)} read {told.rate(written)} written GB/s")
    values = told.mapping(told.mapping(status.get("host")).get("values"))
    blocked = told.number(values.get("host_gpu_processes_blocked"))
    if blocked:
        parts.append(f"{blocked:.0f} processes blocked on a GPU")
    return _flow("HOST", parts, width)


def _canaries(status: Mapping[str, Any], width: int) -> list[Text]:
    """Return where each canary went worst, by how much of its baseline it gave, and how old."""
    now = (told.number(status.get("realtime_ns")) or 0.0) / 1e9
    parts = []
    for one in told.mappings(told.mapping(status.get("canaries")).get("worst")):
        kind, identifier = told.entity(one.get("entity"))
        place = f"GPU {identifier}" if kind == "gpu" else kind
        ratio, when = told.number(one.get("ratio")), told.number(one.get("time"))
        right = "WRONG" if one.get("result") == "wrong" else "right"
        shape = [told.text(one.get(name)) for name in ("canary", "dtype", "direction")]
        words = [*filter(None, shape), right if ratio is None else f"{ratio:.3f}", place]
        age = None if when is None else max(0.0, now - when)
        parts.append(" ".join([*words, told.span(age)]))
    return _flow("CANARIES", parts, width)


def _flow(head: str, parts: Sequence[str], width: int) -> list[Text]:
    """Return parts one after the other, in as many lines as they take; [] of none."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 2 + len(part) <= width:
            lines[-1].append(f"  {part}", style="not bold")
        else:
            line = Text(head if not lines else " " * len(head), style="bold")
            lines.append(line.append(f"  {part}", style="not bold"))
    return lines


def _sources(status: Mapping[str, Any], minute: told.Minute, width: int) -> list[Text]:
    """Return how well the sources are read, and what it costs."""
    sources = told.mapping(status.get("sources"))
    if not sources:
        return []
    lines = [Text(f"{'SOURCE':<14} {'STATE':<11} {'PERIOD':>8} {'ACHIEVED':>8} {'AGE':>8} ERRORS")]
    lines[0].stylize("bold")
    for name, source in sources.items():
        one = told.mapping(source)
        state = told.text(one.get("state"))
        spans = [
            told.span(told.number(one.get(f"{key}_seconds")))
            for key in ("period", "period_achieved", "age")
        ]
        errors = told.mapping(one.get("errors"))
        line = Text(f"{told.text(name):<14} ")
        line.append(f"{state:<11}", style="" if state in ("on", "off") else STYLES["warning"])
        line.append(" " + " ".join(f"{text:>8}" for text in spans) + " ")
        line.append(
            ", ".join(
                f"{told.text(error)} {told.scaled(told.number(count), 1.0)}"
                for error, count in errors.items()
            )
        )
        line.append(told.text(one.get("reason")), style="dim")
        lines.append(line)
    costs = [
        f"{duty} {cost * 100:.1f}%"
        for duty in minute.entities("duty")
        for cost in [minute.recent("duty", duty, "process_cpu_seconds_total", 10)]
        if cost is not None
    ]
    return [*lines, *_flow("COST OF A CORE", costs, width)]


def _events(status: Mapping[str, Any]) -> list[Text]:
    events = told.mappings(status.get("events"))[-EVENTS_SHOWN:]
    lines = [Text("EVENTS", style="bold")] if events else []
    for event in reversed(events):
        entity = " ".join(filter(None, told.entity(event.get("entity"))))
        when, detail = told.text(event.get("time")), told.text(event.get("detail"))
        line = Text(f"{when[11:19] or when} ", style="dim")
        line.append(f"{told.text(event.get('name'))} {entity}", style="default not dim")
        line.append(f": {detail}" if detail else "", style="default not dim")
        lines.append(line)
    return lines

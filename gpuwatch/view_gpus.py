"""The view's table of GPUs: a row each, as many columns as the terminal is wide."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import Any, NamedTuple

from rich.text import Text

from gpuwatch import told

SM_CLOCK = 'gpu_clock_hertz{clock="sm"}'
SM_CLOCK_LIMIT = 'gpu_clock_limit_hertz{clock="sm"}'
POWER, POWER_LIMIT = "gpu_power_watts", 'gpu_power_limit_watts{limit="enforced"}'
CORE, MEMORY = (f'gpu_temperature_celsius{{sensor="{part}"}}' for part in ("core", "memory"))
REASON = 'gpu_throttle_active{reason="'
REASONS = {  # as short as they are still understood
    "sw_power_cap": "power cap",
    "hw_slowdown": "hw slowdown",
    "sw_thermal_slowdown": "sw thermal",
    "hw_thermal_slowdown": "hw thermal",
    "hw_power_brake": "power brake",
    "sync_boost": "sync boost",
}
UNTOLD = frozenset({"gpu_idle", "applications_clocks", "display_clocks"})  # slow nobody down
HARDWARE = frozenset({"hw_thermal_slowdown", "hw_power_brake"})  # each raises hw_slowdown too
STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
SEVERITIES = tuple(STYLES)
BLOCKS = "▁▂▃▄▅▆▇█"
GIBI = 2**30
NARROW, WIDE = 100, 160
SPARE = 7  # columns from this order on are left out while nothing of them is known
LEAST_SPARK, MOST_SPARK = 10, 60


class Sort(NamedTuple):
    """An order of the rows: what it is called, and by what, greatest first."""

    name: str
    key: "Callable[[Gpu], float | None]"


@dataclass(slots=True)
class Gpu:
    """One GPU as the status tells of it."""

    number: str
    state: str
    style: str
    values: Mapping[str, Any]
    minute: told.Minute
    instances: "list[Gpu]" = field(default_factory=list)  # of MIG

    def value(self, name: str) -> float | None:
        """Return the newest value of a column, None if it is not known."""
        return told.number(self.values.get(name))

    def rate(self, name: str) -> float | None:
        """Return a counter's rate over the newest seconds, None if it is not known."""
        return self.minute.recent("gpu", self.number, name)

    @property
    def rank(self) -> float:
        """How bad its state is."""
        order = ("lost", "hung", *SEVERITIES[:2])
        return float(len(order) - order.index(self.state)) if self.state in order else 0.0

    def reasons(self) -> list[tuple[float | None, str]]:
        """Return the reasons for which it is slowed, with their share of time, greatest first."""
        names = self.minute.names("gpu", self.number, REASON)
        shares = {name: self.rate(name) for name in names}
        active = {
            name[len(REASON) : -2]: share if shares else None
            for name in (shares or self.values)
            if isinstance(name, str) and name.startswith(REASON)
            for share in [shares[name] if shares else self.value(name)]
            if share is not None and share > 0.0
        }
        if active.keys() & HARDWARE:
            active.pop("hw_slowdown", None)
        found = [(share, name) for name, share in active.items() if name not in UNTOLD]
        return sorted(found, key=lambda one: (-(one[0] or 0.0), one[1]))


SORTS = (
    Sort("GPU", lambda gpu: None),
    Sort("state", lambda gpu: gpu.rank),
    Sort("slowest", lambda gpu: _negative(gpu.value(SM_CLOCK))),
    Sort("power", lambda gpu: gpu.value(POWER)),
    Sort("temperature", lambda gpu: gpu.value(CORE)),
    Sort("utilization", lambda gpu: gpu.value("gpu_utilization_ratio")),
)


class _Part(NamedTuple):
    """A column: its head, and what it says of a GPU; the others give way to a lower `order`."""

    head: str
    order: int
    cell: Callable[[Gpu], Text]
    left: bool = False
    least: int = 0
    most: int = 20


def gpus_of(status: Mapping[str, Any], minute: told.Minute) -> list[Gpu]:
    """Return the GPUs of a status, in its order."""
    released = told.mapping(status.get("released")).get("gpus") is True
    worst: dict[str, str] = {}
    for alert in told.mappings(status.get("alerts")):
        kind, identifier = told.entity(alert.get("entity"))
        severity = told.text(alert.get("severity"))
        if kind in ("gpu", "gpu_instance") and alert.get("state") == "firing":
            number = identifier.partition("/")[0]
            known = [one for one in (worst.get(number), severity) if one in SEVERITIES]
            worst[number] = min(known, key=SEVERITIES.index, default="")
    found = []
    for one in told.mappings(status.get("gpus")):
        number, values = told.text(one.get("gpu")), told.mapping(one.get("values"))
        state, style = _state(one.get("up", 1), values, worst.get(number, ""))
        if released:
            state, style = "released", "cyan"
        instances = [
            _instance(number, part, minute) for part in told.mappings(one.get("instances"))
        ]
        found.append(Gpu(number, state, style, values, minute, instances))
    return found


def _instance(number: str, told_of: Mapping[str, Any], minute: told.Minute) -> Gpu:
    """Return a MIG instance as a row of its own: the profile in place of the state."""
    name, profile = (told.text(told_of.get(key)) for key in ("gpu_instance", "profile"))
    values = {
        key.replace("gpu_instance_", "gpu_", 1): value
        for key, value in told.mapping(told_of.get("values")).items()
    }
    return Gpu(f"{number}/{name}", profile, "dim", values, minute)


def _state(up: Any, values: Mapping[str, Any], severity: str) -> tuple[str, str]:
    if any(name.startswith("gpu_hung") and told.number(values[name]) for name in values):
        return "hung", STYLES["critical"]
    if up is None:
        return "?", "dim"
    if not up:
        return "lost", STYLES["critical"]
    if severity in ("critical", "warning"):
        return severity, STYLES[severity]
    return "ok", "green"


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


def ordered(gpus: Sequence[Gpu], sort: Sort) -> list[Gpu]:
    """Return GPUs in that order, each with its instances; those not known of come last."""

    def key(gpu: Gpu) -> tuple[float, int, str]:
        value = sort.key(gpu)
        number = int(gpu.number) if gpu.number.isdecimal() and len(gpu.number) < 9 else 10**9
        return (math.inf if value is None else -value, number, gpu.number)

    return [row for gpu in sorted(gpus, key=key) for row in (gpu, *gpu.instances)]


def table(gpus: Sequence[Gpu], width: int) -> list[Text]:
    """Return the table's lines, its head first; none is wider than `width`."""
    gap = 1 if width < WIDE else 2
    parts = [part._replace(most=16) if width < NARROW else part for part in PARTS]
    cells = [[part.cell(gpu) for gpu in gpus] for part in parts]
    known = [
        part.order < SPARE or any(cell.plain != "-" for cell in column)
        for part, column in zip(parts, cells, strict=True)
    ]
    parts, cells = list(compress(parts, known)), list(compress(cells, known))
    widths = [
        min(part.most, max(part.least, len(part.head), *(cell.cell_len for cell in column)))
        for part, column in zip(parts, cells, strict=True)
    ]
    chosen: list[int] = []
    room = width
    for index in sorted(range(len(parts)), key=lambda place: parts[place].order):
        if widths[index] + gap <= room + gap * (not chosen):
            chosen.append(index)
            room -= widths[index] + gap
    chosen.sort()
    lines = [Text(style="bold"), *(Text() for _ in gpus)]
    for index in chosen:
        part, own = parts[index], widths[index]
        for line, cell in zip(lines, [Text(part.head), *cells[index]], strict=True):
            _append(line, cell, own, gap, left=part.left)
    _append_sparks(lines, gpus, room, gap)
    for line in lines:
        line.rstrip()
        line.truncate(width)
    return lines


def _append(line: Text, cell: Text, width: int, gap: int, *, left: bool) -> None:
    cell = cell.copy()
    cell.truncate(width, overflow="ellipsis")
    space = " " * (width - cell.cell_len)
    if line.cell_len:
        line.append(" " * gap)
    for piece in (cell, space) if left else (space, cell):
        line.append(piece)


def _append_sparks(lines: Sequence[Text], gpus: Sequence[Gpu], room: int, gap: int) -> None:
    """Draw the last minute where there is room: the SM clock, then the power as well."""
    both = room >= 2 * (30 + gap)
    width = min(MOST_SPARK, (room - gap) // 2 if both else room - gap)
    if width < LEAST_SPARK:
        return
    for head, name, limit in (
        ("CLOCK 60s", SM_CLOCK, SM_CLOCK_LIMIT),
        ("POWER 60s", POWER, POWER_LIMIT),
    )[: 1 + both]:
        drawn = [Text(head)]
        # A GPU that does not answer tells no limit: that of the others is as good.
        limits = [gpu.value(limit) for gpu in gpus]
        most = max(filter(None, limits), default=None)
        for gpu, own in zip(gpus, limits, strict=True):
            means = gpu.minute.means("gpu", gpu.number, name)
            drawn.append(Text(spark(means, own or most, width), style="cyan"))
        for line, cell in zip(lines, drawn, strict=True):
            _append(line, cell, width, gap, left=True)


def spark(means: Sequence[float | None], limit: float | None, width: int) -> str:
    """Draw values as blocks from 0 to the limit, the newest at the right; unknown is a space.

    Without a limit the greatest value stands for it.
    """
    cells = max(1, min(width, len(means)))
    edges = [place * len(means) // cells for place in range(cells + 1)]
    groups = [means[start:end] for start, end in pairwise(edges)]
    known = [[mean for mean in group if mean is not None] for group in groups]
    top = max([limit or 0.0, *(mean for group in known if not limit for mean in group)])
    drawn = ""
    for group in known:
        if not group:
            drawn += " "
            continue
        share = max(0.0, min(1.0, sum(group) / len(group) / top)) if top > 0 else 0.0
        drawn += BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))]
    return drawn.rjust(width)


def _of(value: str, limit: str, tells_limit: bool = True) -> str:
    return f"{value}/{limit}" if tells_limit and limit != "-" else value


def _clock(gpu: Gpu) -> Text:
    now, limit = gpu.value(SM_CLOCK), gpu.value(SM_CLOCK_LIMIT)
    return Text(_of(told.scaled(now, 1e6), told.scaled(limit, 1e6)))


def _power(gpu: Gpu) -> Text:
    now, limit = gpu.value(POWER), gpu.value(POWER_LIMIT)
    near = now is not None and limit is not None and now >= 0.97 * limit
    text = _of(told.scaled(now, 1.0), told.scaled(limit, 1.0))
    return Text(text, style="yellow" if near else "")


def _temperature(gpu: Gpu) -> Text:
    core, memory, margin = (
        gpu.value(name) for name in (CORE, MEMORY, "gpu_temperature_margin_celsius")
    )
    text = _of(told.scaled(core, 1.0), told.scaled(memory, 1.0))
    style = "" if margin is None or margin > 5 else "yellow" if margin > 0 else "bold red"
    return Text(text, style=style)


def _memory(gpu: Gpu) -> Text:
    used, size = (gpu.value(f"gpu_memory_{part}_bytes") for part in ("used", "size"))
    return Text(_of(told.scaled(used, GIBI), told.scaled(size, GIBI)))


def _slowed(gpu: Gpu) -> Text:
    reasons = gpu.reasons()
    style = STYLES["warning"] if reasons else "dim"
    text = " ".join(
        f"{REASONS.get(name, told.text(name).replace('_', ' '))}"
        + ("" if share is None else f" {told.share(share)}")
        for share, name in reasons
    )
    known = any(name.startswith(REASON) for name in gpu.values)
    return Text(text or ("no" if known else "-"), style=style)


def _share(name: str) -> Callable[[Gpu], Text]:
    return lambda gpu: Text(told.share(gpu.value(name)))


def _traffic(link: str) -> Callable[[Gpu], Text]:
    def cell(gpu: Gpu) -> Text:
        received, transmitted = (
            gpu.rate(f"gpu_{link}_{way}_bytes_total") for way in ("received", "transmitted")
        )
        if received is None and transmitted is None:
            return Text("-")
        return Text(f"{told.rate(received):>4}↓ {told.rate(transmitted):>4}↑")

    return cell


PARTS = (
    _Part("GPU", 0, lambda gpu: Text(gpu.number), most=6),
    _Part("STATE", 1, lambda gpu: Text(gpu.state, style=gpu.style), left=True, least=8, most=8),
    _Part("UTIL", 4, _share("gpu_utilization_ratio"), most=6),
    _Part("SM MHz", 2, _clock, least=9, most=11),
    _Part("THROTTLED", 3, _slowed, left=True, least=16, most=30),
    _Part("POWER W", 5, _power, least=7, most=11),
    _Part("TEMP C", 6, _temperature, most=9),
    _Part("MEM GiB", 7, _memory, most=9),
    _Part("DRAM", 8, _share("gpu_dram_active_ratio"), most=6),
    _Part("SM", 9, _share("gpu_sm_active_ratio"), most=6),
    _Part("TENSOR", 10, _share("gpu_tensor_active_ratio"), most=6),
    _Part("NVLINK GB/s", 11, _traffic("nvlink"), most=13),
    _Part("PCIE GB/s", 12, _traffic("pcie"), most=13),
)

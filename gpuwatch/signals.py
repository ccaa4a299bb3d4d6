"""The vocabulary: signals, the entities they belong to, columns, and events.

One name everywhere: a column is written as PromQL writes it, without the `gpuwatch_` prefix, for
example `gpu_clock_hertz{clock="sm"}`, in rings, recordings, rules, the status page and metrics.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

UNKNOWN_INTEGER = -(2**63)
UNKNOWN_GAUGE = math.nan
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # of metrics and labels, as Prometheus takes them

BITS = range(63)  # of a set: the sign means that nothing is known
MOST_SECONDS = 1e6  # between two renewals of a value

BASE_UNITS = frozenset(
    {
        "",
        "bytes",
        "celsius",
        "flops_per_second",
        "bytes_per_second",
        "hertz",
        "info",
        "joules",
        "lanes",
        "ratio",
        "seconds",
        "watts",
    }
)


def checked_name(text: str) -> str:
    """Return a name from a file; ValueError if it can be none of a metric or a label."""
    if not NAME.fullmatch(text):
        raise ValueError(f"name {text!r}")
    return text


def valid(text: object) -> str:
    """Return text from a file or a child as valid Unicode: users and devices choose any bytes.

    What the system gave as no UTF-8 is shown as a backslash and a number, and stays distinct.
    """
    return str(text).encode(errors="backslashreplace").decode()


class Kind(StrEnum):
    """How a cell is stored and summed up."""

    GAUGE = "gauge"  # float32 in a ring, NaN when unknown
    COUNTER = "counter"  # int64 in a ring, UNKNOWN_INTEGER when unknown; never falls
    BITS = "bits"  # int64 bit set, expanded to one 0/1 column per bit in the window


class Total(StrEnum):
    """What is published of a counter."""

    HARDWARE = "hardware"  # the hardware's own count, passed through
    CARRIED = "carried"  # its sampler's count, which a new sampler may begin lower: never falls
    INCREASE = "increase"  # its increase since the daemon's start
    COVERED = "covered"  # the same; what happened while it was not read is lost, and told


@dataclass(frozen=True, slots=True)
class Histogram:
    """Share of time a gauge spends at or below each bound, published as `name`."""

    name: str
    help: str
    bounds: tuple[float, ...]
    label: str = ""  # the label value of the signal that feeds it


@dataclass(frozen=True, slots=True)
class Signal:
    """One thing that is measured, in base units.

    `bounds` are the plausible values, inclusive: a value outside is a sentinel or a fault of the
    driver and counts as unknown. `bits` maps a bit's number to its label value. `statistics` are
    the label values whose minimum, maximum and mean over the trailing minute are published.
    `scale` turns the stored integer of a counter into `unit`, and `total` says what of it is
    published. `refresh_seconds` is how often the
    hardware renews the value, until calibration has measured it.
    """

    name: str
    help: str
    kind: Kind
    unit: str
    label: str | None = None
    bounds: tuple[float, float] | None = None
    bits: tuple[tuple[int, str], ...] = ()
    statistics: tuple[str, ...] = ()
    histogram: Histogram | None = None
    scale: float = 1.0
    total: Total = Total.HARDWARE
    refresh_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the declaration as plain data, as manifests and recordings keep it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Signal":
        """Rebuild a declaration; TypeError, KeyError or ValueError if `data` is not one."""
        fields = dict(data)
        fields["name"] = checked_name(fields["name"])
        if fields["label"] is not None:
            fields["label"] = checked_name(fields["label"])
        fields["help"], fields["unit"] = valid(fields["help"]), valid(fields["unit"])
        if not fields["help"] or not 0 <= float(fields["refresh_seconds"]) < MOST_SECONDS:
            raise ValueError("help or refresh_seconds")
        if not math.isfinite(fields.get("scale", 1.0)):
            raise ValueError("scale")
        fields["kind"] = Kind(fields["kind"])
        fields["total"] = Total(fields["total"])
        if fields["bounds"] is not None:
            low, high = map(float, fields["bounds"])
            fields["bounds"] = low, high
        fields["bits"] = tuple((int(bit), valid(value)) for bit, value in fields["bits"])
        if any(bit not in BITS for bit, _ in fields["bits"]):
            raise ValueError("bits")
        fields["statistics"] = tuple(fields["statistics"])
        if fields["histogram"] is not None:
            histogram = dict(fields["histogram"])
            histogram["name"] = checked_name(histogram["name"])
            histogram["bounds"] = tuple(histogram["bounds"])
            fields["histogram"] = Histogram(**histogram)
        return cls(**fields)


class Entity(NamedTuple):
    """What a signal belongs to: ("gpu", "0"), ("source", "nvml_state"), ("host", "")."""

    kind: str
    id: str

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> "Entity":
        """Rebuild an entity; TypeError or ValueError if `data` is not one."""
        kind, identifier = data
        return cls(checked_name(kind), valid(identifier))

    def __str__(self) -> str:
        return f"{self.kind} {self.id}" if self.id else self.kind


HOST = Entity("host", "")


class Column(NamedTuple):
    """One column of a ring: a signal of an entity, with at most one label value."""

    entity: Entity
    signal: Signal
    label: str = ""

    @property
    def name(self) -> str:
        """The column's name as PromQL writes it, without prefix and entity."""
        return column_name(self.signal, self.label)


def column_name(signal: Signal, label: str) -> str:
    """Return `name` or `name{label="value"}`."""
    if signal.label is None:
        return signal.name
    return f"{signal.name}{{{signal.label}={quote(label)}}}"


def quote(value: str) -> str:
    r"""Return a label value in quotes, escaped as the text exposition format wants it.

    Source: Prometheus text format 0.0.4, which escapes backslash, double quote and line feed.
    """
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at an instant, on the monotonic clock."""

    time_ns: int
    entity: Entity
    name: str
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the event as plain data."""
        return {
            "time_ns": self.time_ns,
            "entity": list(self.entity),
            "name": self.name,
            "detail": self.detail,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Event":
        """Rebuild an event; TypeError, KeyError or ValueError if `data` is not one."""
        return cls(
            int(data["time_ns"]),
            Entity.from_json(data["entity"]),
            valid(data["name"]),
            valid(data["detail"]),
        )

"""The page under dcgm-exporter's names, for dashboards and alerts that were made for it.

Made of the same snapshot as the page of metrics, and only when somebody asks for it. What DCGM
calls a field, and in which unit it has it, is data: `data/dcgm.toml`. Labels are those of
dcgm-exporter's template (internal/pkg/rendermetrics), with the host under both names that it has
given it. What is not known is absent.
"""

import math
import re
import socket
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gpuwatch.clock import SECOND_NS
from gpuwatch.gpu_signals import THROTTLE, THROTTLE_SECONDS
from gpuwatch.page import Line, Page, header
from gpuwatch.signals import Entity, Kind, Total, column_name, quote, valid
from gpuwatch.snapshot import Snapshot
from gpuwatch.xid import UNKNOWN, catalogue

TABLE = Path(__file__).with_name("data") / "dcgm.toml"
RATE_SECONDS = 10  # some counters are read once a second
SERIES_LIMIT = 10_000
XIDS = "gpu_xid_last_timestamp_seconds"
XID = re.compile(r"\d{1,9}", re.ASCII)  # a recording may say anything


class Field(NamedTuple):
    """A field of DCGM; what its parts mean is said in the table."""

    names: tuple[str, ...]
    columns: tuple[str, ...]
    type: str
    help: str
    factor: float = 1.0
    rate: bool = False
    instance: str = ""


class Counts(NamedTuple):
    """The counters of a snapshot, for rates: as in `Totals`, up to `end_ns`."""

    end_ns: int
    counters: Mapping[tuple[Entity, str], float]
    uncovered_ns: Mapping[tuple[Entity, str], int]


class Past:
    """The counters of the last seconds; has to see each snapshot."""

    def __init__(self) -> None:
        self._kept: deque[Counts] = deque(maxlen=RATE_SECONDS + 1)

    def add(self, shown: Snapshot) -> Sequence[Counts]:
        """Return the counters of each of the ten seconds before the snapshot, oldest first."""
        if shown.ticks:
            end_ns = shown.ticks[0].end_ns
            if not self._kept or end_ns - self._kept[-1].end_ns >= SECOND_NS:
                totals = shown.totals
                self._kept.append(Counts(end_ns, totals.counters, totals.uncovered_ns))
        return tuple(self._kept)


@cache
def fields() -> tuple[Field, ...]:
    """Return the table."""
    tables: list[dict[str, Any]] = tomllib.loads(TABLE.read_text())["field"]
    return tuple(
        Field(**{**table, "names": tuple(table["names"]), "columns": tuple(table["columns"])})
        for table in tables
    )


def render(shown: Snapshot, before: Sequence[Counts] = ()) -> bytes:
    """Return the page; rates are those since the first of `before` that knows the counter."""
    values = _Values(shown, before)
    page, headers = Page(SERIES_LIMIT), {}
    entities = list(_labelled(shown))
    divided = {labels["gpu"] for entity, labels in entities if entity.kind == "gpu_instance"}
    for field in fields():
        headers.update({name: header(name, field.type, field.help) for name in field.names})
        for entity, labels in entities:
            # A GPU's work is shown once: of its instances, where it has some.
            if field.instance and entity.kind == "gpu" and labels["gpu"] in divided:
                continue
            for value, more in values.of(entity, field):
                text = ",".join(f"{key}={quote(one)}" for key, one in {**labels, **more}.items())
                for name in field.names:
                    page.put(Line(name, f"{name}{{{text}}} "), _converted(value, field))
    return page.text(headers).encode("utf-8", "replace")


def _converted(value: float, field: Field) -> float:
    """Return a value in DCGM's unit, as an integer where it is one: scripts read these, too.

    A gauge has no more than the seven digits of a float32.
    """
    value *= field.factor
    value = float(f"{value:.7g}") if field.type == "gauge" else round(float(value), 6)
    return int(value) if value.is_integer() else value


def _labelled(shown: Snapshot) -> Iterator[tuple[Entity, dict[str, str]]]:
    """Yield each GPU and each MIG instance with its labels; a label that is not known is left out.

    An instance has its GPU's, as with dcgm-exporter.
    """
    host = valid(socket.gethostname())
    for info in shown.entities:
        if info.entity.kind not in ("gpu", "gpu_instance"):
            continue
        number = info.labels.get("gpu", info.entity.id)
        gpu = shown.labels.get(Entity("gpu", number), {})
        of_instance = info.labels if info.entity.kind == "gpu_instance" else {}
        labels = {
            "gpu": number,
            "UUID": gpu.get("uuid"),
            "pci_bus_id": _bus_id(gpu.get("pci_bus_id", "")),
            "device": f"nvidia{number}",
            "modelName": gpu.get("name"),
            "GPU_I_PROFILE": of_instance.get("profile"),
            "GPU_I_ID": of_instance.get("gpu_instance"),
            "Hostname": host,
            "hostname": host,
            "DCGM_FI_DRIVER_VERSION": gpu.get("driver"),
        }
        yield info.entity, {key: value for key, value in labels.items() if value}


def _bus_id(address: str) -> str:
    """Return a PCI address as NVML spells it, 00000000:1B:00.0, from the kernel's 0000:1b:00.0."""
    domain, colon, rest = address.partition(":")
    return f"{domain:0>8}{colon}{rest}".upper() if colon else ""


class _Values:
    """The values of a snapshot by entity and field."""

    def __init__(self, shown: Snapshot, before: Sequence[Counts]) -> None:
        self._shown = shown
        self._before = before
        self._signals = {(column.entity, column.name): column.signal for column in shown.columns}
        self._constants = {
            (column.entity, column.name): value
            for column, value in shown.constants
            if shown.gpus_up.get(column.entity) != 0
        }
        self._heard = set(shown.xids_heard())

    def of(self, entity: Entity, field: Field) -> Iterator[tuple[float, Mapping[str, str]]]:
        """Yield the value in our unit, if it is known, and labels of its own."""
        columns = field.columns
        if entity.kind == "gpu_instance":
            columns = (field.instance,) if field.instance else ()
        if columns == (XIDS,):
            yield from self._xid(entity)
            return
        take = self._rate if field.rate else self._value
        values = [take(entity, name) for name in columns]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            yield sum(known), {}

    def _value(self, entity: Entity, name: str) -> float | None:
        if name == THROTTLE.name:
            return self._reasons(entity)
        if name.startswith(THROTTLE_SECONDS.name):
            return self._throttled(entity, name)
        signal = self._signals.get((entity, name))
        if signal is None:
            return self._constants.get((entity, name))
        if signal.kind is Kind.COUNTER:
            return self._shown.totals.counters.get((entity, name))
        window = self._shown.live(entity, name)
        return window.last if window else None

    def _reasons(self, entity: Entity) -> float | None:
        """Return the bits of all reasons that were active at any time in the newest window."""
        mask = 0
        for bit, reason in THROTTLE.bits:
            window = self._shown.live(entity, column_name(THROTTLE, reason))
            if window is None:
                return None
            mask |= int(window.maximum) << bit
        return mask

    def _throttled(self, entity: Entity, name: str) -> float | None:
        active = THROTTLE.name + name.removeprefix(THROTTLE_SECONDS.name)
        total = self._shown.totals.bits.get((entity, active))
        if total is None or self._shown.released.get("gpus"):
            return None
        return total.active_ns / SECOND_NS

    def _rate(self, entity: Entity, name: str) -> float | None:
        """Return a counter's increase a second over the last ten, None while it is not read."""
        key, totals = (entity, name), self._shown.totals
        signal = self._signals.get(key)
        known = (one for one in self._before if not math.isnan(one.counters.get(key, math.nan)))
        before = next(known, None)
        if before is None or signal is None or self._shown.live(entity, name) is None:
            return None
        passed_ns = self._shown.ticks[0].end_ns - before.end_ns
        if signal.total is Total.COVERED:  # what happened in other time is not in the counter
            passed_ns -= totals.uncovered_ns.get(key, 0) - before.uncovered_ns.get(key, 0)
        rise = totals.counters.get(key, math.nan) - before.counters[key]
        if passed_ns <= 0 or not rise >= 0:  # a counter that was reset; NaN
            return None
        return rise / passed_ns * SECOND_NS

    def _xid(self, gpu: Entity) -> Iterator[tuple[float, Mapping[str, str]]]:
        """Yield the newest Xid's code; 0 only if somebody would have told of one."""
        told = [
            (total.last_seconds, int(code))
            for (entity, code), total in self._shown.totals.xids.items()
            if entity == gpu and total.last_seconds and XID.fullmatch(code)
        ]
        if told:
            _, code = max(told)
            yield code, {"err_code": str(code), "err_msg": _meanings().get(code, UNKNOWN.meaning)}
        elif gpu in self._heard:
            yield 0, {"err_code": "0", "err_msg": "No Error"}


@cache
def _meanings() -> dict[int, str]:
    return {code: entry.meaning for code, entry in catalogue().items()}

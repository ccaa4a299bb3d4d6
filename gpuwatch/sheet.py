"""Sheets: the tables of an extract with one type for each column, as Parquet and CSV have them.

A column of a ring is one column here, in its signal's unit. A bit set is its number, and a column
for each declared bit beside it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gpuwatch.extract import (
    ALERTS,
    CANARIES,
    EVENTS,
    Array,
    Extract,
    Moment,
    Rows,
    Table,
    bit_name,
    in_unit,
    known,
)
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Kind

MOMENTS_AT_ONCE = 10_000

Type = Literal["time", "int64", "float32", "float64", "bool", "text"]


class Field(NamedTuple):
    """A column of a sheet; `about` says what is known of it, in words."""

    name: str
    type: Type
    about: Mapping[str, str] = {}


class Cells(NamedTuple):
    """Values of one field, and which of them are known."""

    values: Array
    known: npt.NDArray[np.bool_]


class Sink(Protocol):
    """Takes sheets."""

    def begin(self, name: str, fields: Sequence[Field]) -> None:
        """Begin a sheet."""

    def add(self, name: str, cells: Sequence[Cells]) -> None:
        """Add rows to it: cells for each field."""


TIMES = (
    Field("time", "time", {"help": "Wall time."}),
    Field("monotonic_ns", "int64", {"help": "CLOCK_MONOTONIC of the node, in nanoseconds."}),
)
READS = (
    Field("late_seconds", "float32", {"help": "How late the read began.", "unit": "seconds"}),
    Field("read_seconds", "float32", {"help": "How long the read took.", "unit": "seconds"}),
)
EVENT_FIELDS = (
    *TIMES,
    *(Field(name, "text") for name in ("entity_kind", "entity_id", "event", "detail")),
)
ALERT_FIELDS = (
    *TIMES,
    *(Field(name, "text") for name in ("entity_kind", "entity_id", "alert", "severity", "state")),
    Field("value", "float64"),
    Field("limit", "float64"),
    *(Field(name, "text") for name in ("detail", "next_step", "recording", "verdict")),
)
# Of fields without a unit those that are numbers are in that of the field `unit`.
CANARY_FIELDS = (
    TIMES[0],
    *(Field(name, "text") for name in ("entity_kind", "entity_id", "uuid", "canary")),
    *(Field(name, "int64") for name in ("size", "gpus")),
    *(Field(name, "text") for name in ("dtype", "direction", "result", "judged")),
    Field("value", "float64", {"help": "What the canary gave, in `unit`."}),
    Field("unit", "text"),
    Field("ratio", "float64", {"help": "By the baseline; less is slower.", "unit": "ratio"}),
    Field("baseline", "float64", {"help": "In the environment of the reading."}),
    Field("limit", "float64", {"help": "From which on a reading is slow."}),
    Field("expected", "float64", {"help": "What a healthy card of the model gives."}),
    Field("spread", "float64", {"unit": "ratio"}),
    *(
        Field(f"{name}_{unit}", "float64", {"unit": unit})
        for name, unit in (
            ("clock", "hertz"),
            ("power", "watts"),
            ("temperature", "celsius"),
            ("throttle", "seconds"),
        )
    ),
    Field("seconds", "float64", {"help": "Of its run, from its context to its end."}),
    *(Field(name, "text") for name in ("model", "settings", "detail")),
)


def fields_of(extract: Extract, table: Table) -> list[Field]:
    """Return the fields of a table's sheet."""
    fields = [*TIMES, *(READS if extract.has_reads else ())]
    for column, name in zip(table.columns, table.names, strict=True):
        about = _about(column, table)
        if column.signal.kind is Kind.BITS:
            numbers = {str(bit): label for bit, label in column.signal.bits}
            fields.append(Field(name, "int64", {**about, "bits": json.dumps(numbers)}))
            fields += [
                Field(bit_name(name, column, label), "bool", about)
                for _, label in column.signal.bits
            ]
        else:
            fields.append(Field(name, _type(column), about))
    return fields


def cells_of(table: Table, rows: Rows) -> Iterator[Cells]:
    """Yield the cells of rows, field by field."""
    for times in (rows.wall_ns, rows.time_ns):
        yield Cells(times, known(times))
    for seconds in rows.reads.values():
        yield Cells(seconds, known(seconds))
    for column, values in zip(table.columns, rows.cells, strict=True):
        there = known(values)
        yield Cells(in_unit(column, values), there)
        for bit, _ in column.signal.bits:
            yield Cells(values >> bit & 1 == 1, there)


def moment_cells(moments: Sequence[Moment], fields: Sequence[Field]) -> Iterator[Cells]:
    """Yield the cells of events, alerts or readings, field by field."""
    for field in fields:
        found = [_cell(moment, field) for moment in moments]
        there = np.array([value is not None for value in found])
        values = np.array(found, object)
        if field.type in ("time", "int64"):
            values = np.where(there, values, UNKNOWN_INTEGER).astype(np.int64)
        elif field.type == "float64":
            values = np.where(there, values, UNKNOWN_GAUGE).astype(np.float64)
        yield Cells(values, there)


def put_sheets(extract: Extract, sink: Sink) -> dict[str, Any]:
    """Give a sink all of an extract; return what is known beside it, as plain data.

    A table that has no rows is not begun.
    """
    begun: dict[str, Sequence[Field]] = {}

    def put(name: str, fields: Sequence[Field], cells: Iterable[Cells]) -> None:
        if name not in begun:
            sink.begin(name, fields)
            begun[name] = fields
        sink.add(name, list(cells))

    sheets = [fields_of(extract, table) for table in extract.tables]
    for rows in extract.rows():
        table = extract.tables[rows.table]
        put(table.name, sheets[rows.table], cells_of(table, rows))
    for name, fields, moments in (
        (EVENTS, EVENT_FIELDS, extract.events()),
        (ALERTS, ALERT_FIELDS, extract.alerts()),
        (CANARIES, CANARY_FIELDS, extract.canaries()),
    ):
        while part := list(islice(moments, MOMENTS_AT_ONCE)):
            put(name, fields, moment_cells(part, fields))
    tables = {
        name: [{"name": field.name, "type": field.type, **field.about} for field in fields]
        for name, fields in begun.items()
    }
    return {**extract.about(), "missing": extract.missing, "tables": tables}


def write_about(about: Mapping[str, Any], output: Path) -> None:
    """Write what is known beside the tables into their directory."""
    text = json.dumps(about, indent=1, ensure_ascii=False)
    (output / "about.json").write_text(f"{text}\n", encoding="utf-8")


def _cell(moment: Moment, field: Field) -> Any:
    """Return what a moment says under a name, None if nothing."""
    match field.name:
        case "time":
            return None if moment.wall_ns == UNKNOWN_INTEGER else moment.wall_ns
        case "monotonic_ns":
            return moment.time_ns
        case "entity_kind" | "entity_id":
            return moment.entity.kind if field.name == "entity_kind" else moment.entity.id
        case "event" | "alert" | "canary":
            return moment.name
    value = moment.detail.get(field.name)
    if isinstance(value, Mapping):  # of what is expected the value alone, of settings all
        value = value["value"] if field.type == "float64" else json.dumps(value, sort_keys=True)
    if field.type in ("float64", "int64"):
        return value if isinstance(value, int | float) else None
    return None if value is None else str(value)


def _type(column: Column) -> Type:
    if column.signal.kind is Kind.GAUGE:
        return "float32"
    return "int64" if column.signal.scale == 1.0 else "float64"


def _about(column: Column, table: Table) -> dict[str, str]:
    signal = column.signal
    about = {
        "help": signal.help,
        "unit": signal.unit,
        "kind": signal.kind.value,
        "entity": f"{column.entity.kind}/{column.entity.id}",
        "period_seconds": f"{table.period_ns / 1e9:g}",
    }
    if table.span_ns and signal.kind is Kind.GAUGE:
        about["mean_over_seconds"] = f"{table.span_ns / 1e9:g}"
    if signal.kind is Kind.COUNTER and signal.scale != 1.0:
        about["scale"] = repr(signal.scale)  # value / scale is the hardware's own count
    return about

"""An extract: what of a recording or of history is to be exported, table by table.

A table has a row for each read of a ring, or for each quarter second of history. Cells are as in
a ring: int64 for counters and bits, float32 for gauges. What gpuwatch holds for unknown is unknown
here, so that nobody has to know its sentinels: a value outside its signal's plausible bounds, and a
bit set that is a driver's word for no answer. Memory stays at one block.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from gpuwatch.cells import FINITE, MARKER
from gpuwatch.clock import wall_text
from gpuwatch.codec import Head
from gpuwatch.errors import RecordingError
from gpuwatch.families import ENTITY_LABELS
from gpuwatch.signals import (
    UNKNOWN_GAUGE,
    UNKNOWN_INTEGER,
    Column,
    Entity,
    Event,
    Kind,
    column_name,
    quote,
)

EVENTS, ALERTS, CANARIES = "events", "alerts", "canaries"
FOREVER = (-(2**63), 2**63 - 1)

Array = npt.NDArray[Any]
Times = npt.NDArray[np.int64]


class Table(NamedTuple):
    """Columns that were read together, every `period_ns`.

    `names` are those of the columns as PromQL writes them, with their entity. `span_ns` is 0 where
    a row is of an instant; else a gauge is the mean of that much time before the row's.
    """

    name: str
    columns: tuple[Column, ...]
    names: tuple[str, ...]
    period_ns: int
    span_ns: int = 0


class Rows(NamedTuple):
    """Rows of one table in order of time.

    `time_ns` is monotonic, `wall_ns` since 1970, UNKNOWN_INTEGER if no clock tells. `cells` has an
    array for each column. `reads` are the rows' own measures in seconds, by name: how late the read
    was and how long it took.
    """

    table: int
    period_ns: int
    time_ns: Times
    wall_ns: Times
    cells: list[Array]
    reads: Mapping[str, npt.NDArray[np.float32]]


class Moment(NamedTuple):
    """Something at an instant: an event, an alert or a canary's reading, as plain data."""

    time_ns: int
    wall_ns: int
    entity: Entity
    name: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """What of a file is wanted; what is empty means all.

    `signals` are names of signals or columns, `entities` are `kind` or `kind/id`, `tables` names of
    tables. `since_ns` up to `until_ns` is wall time.
    """

    signals: Sequence[str] = ()
    entities: Sequence[str] = ()
    tables: Sequence[str] = ()
    since_ns: int = FOREVER[0]
    until_ns: int = FOREVER[1]

    def has_table(self, name: str) -> bool:
        """Say whether a table is wanted."""
        return not self.tables or name in self.tables

    def has_entity(self, entity: Entity) -> bool:
        """Say whether an entity is wanted."""
        names = (entity.kind, f"{entity.kind}/{entity.id}")
        return not self.entities or any(name in self.entities for name in names)

    def has_column(self, column: Column) -> bool:
        """Say whether a column is wanted; a bit set is if one of its bits is."""
        signal = column.signal
        names = {signal.name, column.name}
        names |= {column_name(signal, label) for _, label in signal.bits}
        return self.has_entity(column.entity) and (
            not self.signals or not names.isdisjoint(self.signals)
        )

    def is_inside(self, wall_ns: int) -> bool:
        """Say whether an instant is wanted."""
        return self.since_ns <= wall_ns < self.until_ns


@dataclass(slots=True)
class Extract(ABC):
    """What was chosen of one file or directory; exports read it once.

    `sort` is the file's. `is_steady`: whether `time_ns` goes on through all rows, as it does within
    a boot. `has_reads`: whether rows say how they were read. `head` tells of host, clocks and
    config, `labels` of entities. Once all rows were read `counts` (by table) and `span` (wall
    time of the first and the last) are theirs, and `missing` has a line for each part that should
    be there; `moments` counts events, alerts and readings of canaries.
    """

    sort: ClassVar[str]
    is_steady: ClassVar[bool]
    has_reads: ClassVar[bool]
    path: Path
    choice: Choice
    head: Head
    labels: dict[Entity, Mapping[str, str]]
    tables: list[Table] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    moments: int = 0
    span: tuple[int, int] | None = None

    def rows(self) -> Iterator[Rows]:
        """Yield the rows of all tables, none of them empty. Raises RecordingError."""
        for rows in self._rows():
            inside = (rows.wall_ns >= self.choice.since_ns) & (rows.wall_ns < self.choice.until_ns)
            if not inside.all():
                rows = rows._replace(
                    time_ns=rows.time_ns[inside],
                    wall_ns=rows.wall_ns[inside],
                    cells=[cells[inside] for cells in rows.cells],
                    reads={name: values[inside] for name, values in rows.reads.items()},
                )
            if len(rows.time_ns):
                if self.head.clocks:
                    first, last = self.span or FOREVER[::-1]
                    low, high = int(rows.wall_ns.min()), int(rows.wall_ns.max())
                    self.span = min(first, low), max(last, high)
                self.counts[self.tables[rows.table].name] += len(rows.time_ns)
                yield rows

    @abstractmethod
    def _rows(self) -> Iterator[Rows]:
        """Yield the rows of the chosen tables, also outside of the time that was chosen."""

    @abstractmethod
    def there(self) -> tuple[int, int] | None:
        """Return the wall time of what is there, whatever is chosen; None if it is not known."""

    def events(self) -> Iterator[Moment]:
        """Yield what happened to the chosen entities. Raises RecordingError."""
        inside = (m for m in self._events() if self.choice.is_inside(m.wall_ns))
        return self._chosen_moments(inside, EVENTS)

    def alerts(self) -> Iterator[Moment]:
        """Yield the alerts of the chosen entities, by their beginning. Raises RecordingError."""
        return self._chosen_moments(self._alerts(), ALERTS)

    def canaries(self) -> Iterator[Moment]:
        """Yield the readings of canaries on the chosen entities, course by course."""
        inside = (m for m in self._canaries() if self.choice.is_inside(m.wall_ns))
        return self._chosen_moments(inside, CANARIES)

    def _canaries(self) -> Iterator[Moment]:
        """Yield all readings; history has none."""
        return iter(())

    @abstractmethod
    def _events(self) -> Iterator[Moment]:
        """Yield all events."""

    @abstractmethod
    def _alerts(self) -> Iterator[Moment]:
        """Yield all alerts."""

    def _chosen_moments(self, moments: Iterable[Moment], table: str) -> Iterator[Moment]:
        for moment in moments if self.choice.has_table(table) else ():
            if self.choice.has_entity(moment.entity):
                self.moments += 1
                yield moment

    def about(self) -> dict[str, Any]:
        """Return what is known beside the samples, as plain data."""
        head = self.head
        return {
            "sort": self.sort,
            "file": self.path.name,
            "gpuwatch": head.version,
            "host": dict(head.host),
            "boot_id": head.boot_id,
            "clocks": [triple._asdict() for triple in head.clocks],
            "entities": [
                {"kind": entity.kind, "id": entity.id, "labels": dict(labels)}
                for entity, labels in self.labels.items()
            ],
            "constants": {
                name: value
                for values in head.constants.values()
                for name, value in zip(
                    full_names([column for column, _ in values], self.labels),
                    (value for _, value in values),
                    strict=True,
                )
            },
            "config": dict(head.config),
        }


def event_moment(event: Event, wall_ns: int) -> Moment:
    """Return an event as a moment."""
    return Moment(event.time_ns, wall_ns, event.entity, event.name, {"detail": event.detail})


def chosen_tables(
    found: Iterable[Table], choice: Choice, labels: Mapping[Entity, Mapping[str, str]], path: Path
) -> dict[int, Table]:
    """Return the chosen tables by their place in `found`, of each the chosen columns.

    `found` need no column names. Raises RecordingError, telling what there is, if a table, signal
    or entity that is asked for is nowhere, or nothing is left.
    """
    found = list(found)
    columns = [column for table in found for column in table.columns]
    known_names = {name for column in columns for name in _names_of(column)}
    entities = {*(column.entity for column in columns), *labels}
    known_entities = {f"{entity.kind}/{entity.id}" for entity in entities}
    known_kinds = {entity.kind for entity in entities}
    known_tables = {table.name for table in found} | {EVENTS, ALERTS, CANARIES}
    _check(path, "table", choice.tables, known_tables, known_tables)
    _check(path, "signal", choice.signals, known_names, {c.signal.name for c in columns})
    _check(path, "entity", choice.entities, known_entities | known_kinds, known_entities)
    tables = {}
    for place, table in enumerate(found):
        wanted = [column for column in table.columns if choice.has_column(column)]
        if wanted and choice.has_table(table.name):
            names = tuple(full_names(wanted, labels))
            tables[place] = table._replace(columns=tuple(wanted), names=names)
    if not tables and not {EVENTS, ALERTS, CANARIES} & set(choice.tables):
        raise RecordingError(
            f"{path}: no column is of these signals, entities and tables together: ask for fewer"
        )
    return tables


def full_names(
    columns: Iterable[Column], labels: Mapping[Entity, Mapping[str, str]]
) -> Iterator[str]:
    """Yield columns' names with their entities' labels, no two of them the same."""
    taken = set()
    for column in columns:
        entity, signal, label = column
        keys = ENTITY_LABELS.get(entity.kind, (entity.kind,))
        own = keys[0] if len(keys) == 1 else entity.kind
        values = {own: entity.id, **labels.get(entity, {})}
        pairs = [(key, values[key]) for key in keys if key in values and key != "uuid"]
        if signal.label is not None and signal.kind is not Kind.BITS:
            pairs.append((signal.label, label))
        name, number = promql(signal.name, pairs), 0
        while name in taken:  # a MIG instance has the numbers of one that has ended, say
            number += 1
            name = promql(signal.name, [*pairs, ("id", entity.id + f"-{number}" * (number > 1))])
        taken.add(name)
        yield name


def promql(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return a name with its labels as PromQL writes it."""
    text = ",".join(f"{key}={quote(value)}" for key, value in pairs)
    return f"{name}{{{text}}}" if text else name


def bit_name(name: str, column: Column, label: str) -> str:
    """Return the name of one bit of a set whose name with its entity is `name`."""
    pair = f"{column.signal.label}={quote(label)}"
    return f"{name[:-1]},{pair}}}" if name.endswith("}") else f"{name}{{{pair}}}"


def cleaned(column: Column, values: Array) -> Array:
    """Return cells of a ring with all that counts as unknown marked as such."""
    kind = column.signal.kind
    if kind is Kind.GAUGE:
        low, high = np.array(column.signal.bounds or FINITE)  # not rounded to the cells' float32
        known = (values >= low) & (values <= high)
        return values if known.all() else np.where(known, values, np.float32(UNKNOWN_GAUGE))
    if kind is Kind.BITS:
        known = (values >= 0) & (values != MARKER)
        return values if known.all() else np.where(known, values, UNKNOWN_INTEGER)
    return values


def known(values: Array) -> npt.NDArray[np.bool_]:
    """Return which cells are known."""
    if values.dtype == np.int64:
        return np.asarray(values != UNKNOWN_INTEGER)
    return ~np.isnan(values)


def in_unit(column: Column, values: Array) -> Array:
    """Return cells in the signal's unit, unknown ones as they are.

    A counter that the hardware counts in another unit becomes float64: exact up to 2^53 counts.
    """
    if column.signal.kind is not Kind.COUNTER or column.signal.scale == 1.0:
        return values
    return np.where(known(values), values * column.signal.scale, UNKNOWN_GAUGE)


def outside(path: Path, start_ns: int, end_ns: int) -> RecordingError:
    """Return the error for a time of which there is nothing."""
    there = f"{wall_text(start_ns)} to {wall_text(end_ns)}"
    return RecordingError(f"{path}: has nothing of that time: ask for some of {there}")


def _names_of(column: Column) -> set[str]:
    signal = column.signal
    bits = {column_name(signal, label) for _, label in signal.bits}
    return {signal.name, column.name} | bits


def _check(path: Path, what: str, asked: Iterable[str], known: set[str], told: set[str]) -> None:
    """Raise RecordingError for a name that is nowhere."""
    for name in asked:
        if name not in known:
            there = ", ".join(get_close_matches(name, known, 3) or sorted(told))
            raise RecordingError(f"{path}: has no {what} {name!r}: try {there}")

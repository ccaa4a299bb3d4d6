"""What of history is to be exported: a row for each quarter second, in one table."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from gpuwatch.codec import Head, RowsBlock, decode_rows
from gpuwatch.errors import RecordingError
from gpuwatch.extract import (
    Array,
    Choice,
    Extract,
    Moment,
    Rows,
    Table,
    chosen_tables,
    event_moment,
)
from gpuwatch.history import FOREVER_NS, ROWS, SORT, History, offset_ns
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Entity, Kind
from gpuwatch.window import TICK_NS

_Key = tuple[Entity, str, Kind, str]


class HistoryExtract(Extract):
    """A history directory, or one file of it; times go back where the wall clock was set back.

    Raises RecordingError if there is no history of that time, or nothing of what is chosen.
    """

    sort: ClassVar[str] = SORT
    is_steady: ClassVar[bool] = False
    has_reads: ClassVar[bool] = False

    def __init__(self, path: Path, choice: Choice) -> None:
        self._files = _Files(path)
        self._bounds = max(0, choice.since_ns), min(choice.until_ns, FOREVER_NS)
        heads = self._files.heads(*self._bounds)
        if not heads:
            fault = next(iter(self._files.faults), f"{path}: holds no history: give state/history")
            raise RecordingError(fault)
        labels = {info.entity: info.labels for head in heads for info in head.entities}
        super().__init__(path, choice, heads[-1], labels)
        columns: dict[_Key, Column] = {}
        for head in heads:
            for column in head.rings[0].columns:
                other = columns.setdefault(_key(column), column)
                if abs(column.signal.scale) < abs(other.signal.scale):  # whole counts stay whole
                    columns[_key(column)] = column
        found = Table(SORT, tuple(columns.values()), (), TICK_NS, TICK_NS)
        self.tables = list(chosen_tables([found], choice, labels, path).values())

    def there(self) -> tuple[int, int] | None:
        """Return the wall time of the first row and of the last, None if there are none."""
        return self._files.span()

    def _events(self) -> Iterator[Moment]:
        for event in self._files.events(*self._bounds):
            yield event_moment(event, event.time_ns)

    def _alerts(self) -> Iterator[Moment]:
        return iter(())  # what alerts did is among the events

    def _rows(self) -> Iterator[Rows]:
        self._files.faults.clear()
        for head, block in self._files.rows(*self._bounds):
            times = block.rows["time_ns"]
            if self.tables and len(times):
                cells = self._cells(head.rings[0].columns, block)
                yield Rows(0, block.period_ns, times, times + offset_ns(head), cells, {})
        self.missing += self._files.faults

    def _cells(self, columns: tuple[Column, ...], block: RowsBlock) -> list[Array]:
        """Return the cells of the table's columns, unknown where this file has no such column."""
        places = {_key(column): place for place, column in enumerate(columns)}
        integers = block.rows["integers"].shape[1]
        cells = []
        for column in self.tables[0].columns:
            place = places.get(_key(column))
            if place is None:
                gauge = column.signal.kind is Kind.GAUGE
                unknown = np.float32(UNKNOWN_GAUGE) if gauge else np.int64(UNKNOWN_INTEGER)
                cells.append(np.full(len(block.rows), unknown))
            elif place < integers:
                counts = block.rows["integers"][:, place]
                cells.append(_rescaled(counts, columns[place].signal.scale, column.signal.scale))
            else:
                cells.append(block.rows["gauges"][:, place - integers])
        return cells


class _Files(History):
    """History as its files have it: rows with all their columns; also one file alone."""

    def rows(self, from_ns: int, to_ns: int) -> Iterator[tuple[Head, RowsBlock]]:
        """Yield the rows of these files."""

        def decode(head: Head, raw: bytes, path: Path) -> tuple[Head, RowsBlock]:
            return head, decode_rows(raw, head.rings, path)

        for path in self._files(from_ns, to_ns):
            yield from self._blocks(path, ROWS, decode)

    def _files(self, from_ns: int, to_ns: int) -> list[Path]:
        if self.directory.is_file():
            return [self.directory]
        return super()._files(from_ns, to_ns)


def _key(column: Column) -> _Key:
    """Return what makes columns of two files one: sources of a counter may differ in its scale."""
    return column.entity, column.name, column.signal.kind, column.signal.unit


def _rescaled(counts: Array, scale: float, other: float) -> Array:
    """Return counts of `scale` as counts of another scale."""
    if scale == other or not other:
        return counts
    rescaled = counts * (scale / other)
    fits = (counts != UNKNOWN_INTEGER) & (np.abs(rescaled) < 2.0**63)
    return np.where(fits, np.rint(np.where(fits, rescaled, 0.0)).astype(np.int64), UNKNOWN_INTEGER)

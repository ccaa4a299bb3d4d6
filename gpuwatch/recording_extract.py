"""What of a recording is to be exported: its rows as the rings held them."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gpuwatch.clock import SECOND_NS, ClockTriple, wall_text
from gpuwatch.codec import Block, BlockReader, RowsBlock, damaged, decode_events, decode_list
from gpuwatch.courses import courses_from_json
from gpuwatch.extract import ALERTS as ALERTS_TABLE
from gpuwatch.extract import CANARIES as CANARIES_TABLE
from gpuwatch.extract import EVENTS as EVENTS_TABLE
from gpuwatch.extract import (
    Choice,
    Extract,
    Moment,
    Rows,
    Table,
    Times,
    chosen_tables,
    cleaned,
    event_moment,
)
from gpuwatch.recording import ALERTS, CANARIES, EVENTS, SORT, RecordingReader
from gpuwatch.ring import SHAPE_ERRORS
from gpuwatch.signals import UNKNOWN_INTEGER, Entity


class RecordingExtract(Extract):
    """A recording; rings of the same columns (a sampler that was restarted) are one table.

    Raises RecordingError if it is none, or has nothing of what is chosen.
    """

    sort: ClassVar[str] = SORT
    is_steady: ClassVar[bool] = True
    has_reads: ClassVar[bool] = True

    def __init__(self, path: Path, choice: Choice) -> None:
        with closing(RecordingReader(path)) as reader:
            head = reader.head
        labels = {info.entity: info.labels for info in head.entities}
        super().__init__(path, choice, head, labels)
        try:
            self._clocks = _Walls(head.clocks)
        except OverflowError as error:
            raise damaged(path, "its clocks") from error
        tracks = list(dict.fromkeys(head.rings))
        found = [
            Table(name, track.columns, (), track.period_ns)
            for name, track in zip(_numbered([t.name for t in tracks]), tracks, strict=True)
        ]
        chosen = chosen_tables(found, choice, labels, path)
        self.tables = list(chosen.values())
        places = [tracks.index(schema) for schema in head.rings]
        numbers = {place: number for number, place in enumerate(chosen)}
        self._tables = [numbers.get(place) for place in places]  # by ring, None is not wanted
        self._cells = [  # by ring, the places of the columns that are wanted
            [place for place, column in enumerate(ring.columns) if choice.has_column(column)]
            for ring in head.rings
        ]

    def there(self) -> tuple[int, int] | None:
        """Return the wall time of what is there; reads all of it. None if no clock tells."""
        if not self.head.clocks:
            return None
        with closing(RecordingReader(self.path)) as reader:
            for _ in reader:
                pass
        start_ns, end_ns = self._walls([self.head.start_ns, reader.end_ns])
        return start_ns, end_ns

    def _events(self) -> Iterator[Moment]:
        for block in self._blocks(EVENTS):
            events = decode_events(block.raw, self.path)
            try:
                walls = self._walls([event.time_ns for event in events])
            except OverflowError as error:
                raise damaged(self.path, "an event") from error
            yield from map(event_moment, events, walls)

    def _alerts(self) -> Iterator[Moment]:
        for block in self._blocks(ALERTS):
            for alert in decode_list(block.raw, self.path):
                try:
                    moment = self._alert(alert)
                except SHAPE_ERRORS as error:
                    raise damaged(self.path, "an alert") from error
                yield moment

    def _canaries(self) -> Iterator[Moment]:
        offset_ns = self._walls([0])[0] if self.head.clocks else 0
        for block in self._blocks(CANARIES):
            for course in courses_from_json(decode_list(block.raw, self.path)):
                entity = Entity.from_json(course["entity"])
                for reading in course["readings"]:
                    wall_ns = round(reading["time"] * SECOND_NS)
                    detail = {**course, **course["environments"][reading["environment"]], **reading}
                    yield Moment(wall_ns - offset_ns, wall_ns, entity, course["canary"], detail)

    def _rows(self) -> Iterator[Rows]:
        with closing(RecordingReader(self.path)) as reader:
            for block in reader:
                if isinstance(block, RowsBlock) and len(block.rows):
                    table = self._tables[block.ring]
                    if table is not None:
                        yield self._chosen(block, table)
        if not reader.complete:
            self.missing.append(self._cut(reader.end_ns))

    def _chosen(self, block: RowsBlock, table: int) -> Rows:
        ring, rows = self.head.rings[block.ring], block.rows
        cells = []
        for place in self._cells[block.ring]:
            integer = place < ring.integers
            values = rows["integers" if integer else "gauges"]
            values = values[:, place if integer else place - ring.integers]
            cells.append(cleaned(ring.columns[place], values))
        times = rows["time_ns"]
        walls = self._clocks.of(times)
        reads = {"late_seconds": rows["late"], "read_seconds": rows["read"]}
        return Rows(table, block.period_ns, times, walls, cells, reads)

    def _cut(self, end_ns: int) -> str:
        head = self.head
        lost, all_ = (head.end_ns - end_ns) / SECOND_NS, (head.end_ns - head.start_ns) / SECOND_NS
        since = f" from {wall_text(self._walls([end_ns])[0])} on" if head.clocks else ""
        return f"{self.path}: cut short: the last {lost:.1f} of {all_:.1f} s{since} are missing"

    def _alert(self, data: dict[str, Any]) -> Moment:
        time_ns = int(data["since_ns"])
        entity = Entity.from_json(data["entity"])
        detail = {key: value for key, value in data.items() if key not in ("rule", "entity")}
        return Moment(time_ns, self._walls([time_ns])[0], entity, str(data["rule"]), detail)

    def _walls(self, times: Sequence[int]) -> list[int]:
        found: list[int] = self._clocks.of(np.array(times, np.int64)).tolist()
        return found

    def _blocks(self, kind: bytes) -> Iterator[Block]:
        with closing(BlockReader(self.path, SORT)) as file:
            yield from file.blocks(file.start, (kind,))


class _Walls:
    """Wall time by the newest clock triple not after an instant, else the oldest."""

    def __init__(self, clocks: Sequence[ClockTriple]) -> None:
        self._since = np.array([triple.monotonic_ns for triple in clocks], np.int64)
        self._offsets = np.array([triple.wall_ns(0) for triple in clocks], np.int64)

    def of(self, times: Times) -> Times:
        """Return the wall time of each instant, UNKNOWN_INTEGER if there are no clocks."""
        if not len(self._since):
            return np.full(len(times), UNKNOWN_INTEGER)
        newest = np.maximum(np.searchsorted(self._since, times, "right") - 1, 0)
        return np.asarray(times + self._offsets[newest])


def _numbered(names: Sequence[str]) -> list[str]:
    """Return the names, with a number those that something before has."""
    taken = [EVENTS_TABLE, ALERTS_TABLE, CANARIES_TABLE]
    for name in names:
        numbered = (f"{name}-{number}" for number in count(2))
        taken.append(next(one for one in chain([name], numbered) if one not in taken))
    return taken[3:]

"""A recording that is looked into: where each of its blocks is, so that only those wanted are read.

Memory is the index alone and one block, whatever the file's size. Times are wall time, by the
newest of the recording's clocks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuwatch.clock import SECOND_NS
from gpuwatch.codec import (
    ROWS_HEAD_BYTES,
    BlockReader,
    damaged,
    decode_columns,
    decode_head,
    decode_list,
    decode_rows_head,
)
from gpuwatch.courses import Course, courses_from_json
from gpuwatch.errors import RecordingError
from gpuwatch.feeders import coarser, pace_ns
from gpuwatch.recording import ALERTS, CANARIES, END, HEAD, ROWS, SLICE_NS, SORT
from gpuwatch.ring import SHAPE_ERRORS, RingSchema
from gpuwatch.signals import Entity, valid
from gpuwatch.summation import HOLD_PERIODS
from gpuwatch.timeline import Held, Line, Timeline, lines_of
from gpuwatch.window import TICK_NS

KINDS = (ROWS, ALERTS, CANARIES, END)


class _Place(NamedTuple):
    """Where a block of rows is; no row of it is before `floor_ns`."""

    floor_ns: int
    period_ns: int
    offset: int


class Recorded:
    """An opened recording. `start_ns` and `end_ns` are what it holds, without what was cut off.

    Raises RecordingError: not a recording, no whole block, or one that makes no sense.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.alerts: list[dict[str, Any]] = []
        self.canaries: list[Course] = []
        self.complete = False
        self._file = BlockReader(path, SORT)
        try:
            self._index()
        except RecordingError:
            self.close()
            raise

    def _index(self) -> None:
        first = next(self._file.blocks(self._file.start), None)
        if first is None or first.kind != HEAD:
            raise damaged(self.path, "it does not begin with its head")
        self.head = decode_head(first.raw, self.path)
        self.lines = [lines_of(schema.columns) for schema in self.head.rings]
        self._places: list[list[_Place]] = [[] for _ in self.head.rings]
        self.offset_ns = self.head.clocks[-1].wall_ns(0) if self.head.clocks else 0
        end_ns = self.head.start_ns
        for block in self._file.blocks(first.end, KINDS, ROWS_HEAD_BYTES):
            if block.kind == END:
                self.complete, end_ns = True, self.head.end_ns
            elif block.kind == ALERTS:
                whole = next(self._file.blocks(block.start))
                self.alerts += decode_list(whole.raw, self.path)
            elif block.kind == CANARIES:
                whole = next(self._file.blocks(block.start))
                self.canaries += courses_from_json(decode_list(whole.raw, self.path))
            else:
                rows = decode_rows_head(block.raw, self.path)
                if rows.ring >= len(self._places):
                    raise damaged(self.path, "rows fit no ring")
                place = _Place(rows.floor_ns, rows.period_ns, block.start)
                self._places[rows.ring].append(place)
                end_ns = rows.floor_ns
        self.start_ns = self.head.start_ns + self.offset_ns
        self.end_ns = end_ns + self.offset_ns

    def put(self, timeline: Timeline, wanted: Callable[[Line], bool]) -> None:
        """Put the wanted columns into a timeline. Raises RecordingError.

        A counter that a finer ring has too is put where that one has no rows.
        """
        left = coarser((schema.columns, pace_ns(schema)) for schema in self.head.rings)
        for ring, (schema, lines) in enumerate(zip(self.head.rings, self.lines, strict=True)):
            chosen = [index for index, line in enumerate(lines) if wanted(line)]
            finer = {
                place: self._floors_of_finer(schema, index)
                for place, index in enumerate(chosen)
                if index in left[ring]
            }
            if not chosen:
                continue
            held = Held(timeline, [lines[index] for index in chosen])
            hold_ns = max(HOLD_PERIODS * schema.period_ns, TICK_NS) + SLICE_NS
            from_ns = timeline.grid.start_ns - self.offset_ns - hold_ns
            to_ns = timeline.grid.end_ns - self.offset_ns + hold_ns
            for place in self._between(ring, from_ns, to_ns):
                block = next(self._file.blocks(place.offset), None)
                if block is None:  # damaged since it was indexed
                    break
                times, values = decode_columns(block.raw, self.head.rings, chosen, self.path)
                low, high = times.searchsorted([from_ns, to_ns])
                part = values[low:high].T
                for line, floors in finer.items():
                    if place.floor_ns in floors:
                        part[line] = np.nan
                held.add(times[low:high] + self.offset_ns, part, place.period_ns)
            held.finish(self.end_ns)

    def _floors_of_finer(self, schema: RingSchema, index: int) -> set[int]:
        """Return where blocks begin of rings that have a column of another ring, with more rows."""
        entity, name = schema.columns[index].entity, schema.columns[index].name
        return {
            place.floor_ns
            for other, places in zip(self.head.rings, self._places, strict=True)
            if pace_ns(other) < pace_ns(schema)
            and any((one.entity, one.name) == (entity, name) for one in other.columns)
            for place in places
        }

    def _between(self, ring: int, from_ns: int, to_ns: int) -> list[_Place]:
        """Return the blocks of a ring that may have rows of that time."""
        places = [place for place in self._places[ring] if place.floor_ns < to_ns]
        before = [place.floor_ns for place in places if place.floor_ns <= from_ns]
        latest = max(before, default=from_ns)
        return [place for place in places if place.floor_ns >= latest]

    def listed(self) -> dict[str, Any]:
        """Return what a list of recordings says of it: unix times, what set it off, bytes.

        Raises RecordingError if the alert that set it off makes no sense.
        """
        name = self.path.name
        _, _, rest = name.removesuffix(self.path.suffix).partition("-")
        rule, entity = rest.partition("-")[0], None
        mine = next((alert for alert in self.alerts if alert.get("recording") == name), None)
        if mine is not None:
            try:
                rule, entity = valid(mine["rule"]), list(Entity.from_json(mine["entity"]))
            except SHAPE_ERRORS as error:
                raise damaged(self.path, "an alert") from error
        return {
            "name": name,
            "start": self.start_ns / SECOND_NS,
            "end": self.end_ns / SECOND_NS,
            "bytes": self.path.stat().st_size,
            "rule": rule,
            "entity": entity,
            "complete": self.complete,
        }

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

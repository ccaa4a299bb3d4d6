"""Playback: a recording as one tick of rows after the other, moved in time, once or for ever.

Both replays, at full speed and in real time, take their rows from here, so they get the same
windows. Between two rounds lies one tick in which nothing is known (the seam): a row of unknown
cells opens it, so no value is held across. Counters go on.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpuwatch.codec import RowArray, RowsBlock
from gpuwatch.errors import RecordingError
from gpuwatch.recording import EventsBlock, RecordingReader
from gpuwatch.ring import RingSchema
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Event, Kind
from gpuwatch.summation import row_dtype
from gpuwatch.window import TICK_NS


class Piece(NamedTuple):
    """Rows of one track, in order of time, and the time between rows that was in force."""

    track: int
    period_ns: int
    rows: RowArray


class Step(NamedTuple):
    """What a recording holds of one tick."""

    start_ns: int
    pieces: list[Piece]
    events: list[Event]

    @property
    def end_ns(self) -> int:
        """Where the next step starts."""
        return self.start_ns + TICK_NS


class Playback:
    """The whole ticks of a recording, one after the other, once or for ever.

    `tracks` are the rings to feed: rings of the same schema (a sampler that was restarted) are
    one track.
    """

    def __init__(self, reader: RecordingReader) -> None:
        self.reader = reader
        self.tracks: list[RingSchema] = list(dict.fromkeys(reader.head.rings))
        self._track_of = [self.tracks.index(schema) for schema in reader.head.rings]
        self.start_ns = -(-reader.head.start_ns // TICK_NS) * TICK_NS
        self._counters = [_Counters(schema) for schema in self.tracks]
        self._periods = [schema.period_ns for schema in self.tracks]

    def steps(self, shift_ns: int, loop: bool) -> Iterator[Step]:
        """Yield the recording moved by `shift_ns`; for ever, with seams, if told to loop.

        Raises RecordingError if it holds no whole tick.
        """
        while True:
            end = self.start_ns
            for step in self._round():
                end = step.end_ns
                yield self._moved(step, shift_ns)
            if end == self.start_ns:
                raise RecordingError(f"{self.reader.path}: shorter than a tick: record for longer")
            if not loop:
                return
            yield Step(end + shift_ns, self._seam(end + shift_ns), [])
            shift_ns += end + TICK_NS - self.start_ns

    def _round(self) -> Iterator[Step]:
        """Yield the ticks as recorded; one that was cut short ends where all rings have rows."""
        start, floor = self.start_ns, self.start_ns
        waiting: list[Piece] = []
        events: list[Event] = []
        for block in self.reader:
            if isinstance(block, EventsBlock):
                events += block.events
            elif isinstance(block, RowsBlock):
                floor = block.floor_ns
                while start + TICK_NS <= floor:
                    yield _cut(start, waiting, events)
                    start += TICK_NS
                if len(block.rows):
                    track = self._track_of[block.ring]
                    waiting.append(Piece(track, block.period_ns, block.rows))
        while start + TICK_NS <= self.reader.end_ns:
            yield _cut(start, waiting, events)
            start += TICK_NS

    def _moved(self, step: Step, shift_ns: int) -> Step:
        pieces = []
        for piece in step.pieces:
            rows = piece.rows.copy()
            rows["time_ns"] += shift_ns
            self._counters[piece.track].carry_on(rows["integers"])
            self._periods[piece.track] = piece.period_ns
            pieces.append(piece._replace(rows=rows))
        events = [replace(event, time_ns=event.time_ns + shift_ns) for event in step.events]
        return Step(step.start_ns + shift_ns, pieces, events)

    def _seam(self, start_ns: int) -> list[Piece]:
        pieces = []
        for index, schema in enumerate(self.tracks):
            self._counters[index].start_again()
            rows = np.zeros(1, row_dtype(schema))
            rows["time_ns"] = start_ns
            rows["integers"] = UNKNOWN_INTEGER
            rows["gauges"] = UNKNOWN_GAUGE
            pieces.append(Piece(index, self._periods[index], rows))
        return pieces


def _cut(start_ns: int, waiting: list[Piece], events: list[Event]) -> Step:
    """Take one tick out of `waiting`; what is before it goes, what is after it stays."""
    end_ns = start_ns + TICK_NS
    pieces = []
    for piece in waiting:
        low, high = np.searchsorted(piece.rows["time_ns"], [start_ns, end_ns])
        if high > low:
            pieces.append(piece._replace(rows=piece.rows[low:high]))
    waiting[:] = [piece for piece in waiting if piece.rows["time_ns"][-1] >= end_ns]
    pieces.sort(key=lambda piece: int(piece.rows["time_ns"][0]))
    inside = [event for event in events if start_ns <= event.time_ns < end_ns]
    return Step(start_ns, pieces, sorted(inside, key=lambda event: event.time_ns))


class _Counters:
    """Makes a track's counters go on over the seam; a reset by the hardware gives the same rise."""

    def __init__(self, schema: RingSchema) -> None:
        signals = [column.signal for column in schema.columns[: schema.integers]]
        self._columns = [i for i, signal in enumerate(signals) if signal.kind is Kind.COUNTER]
        self._recorded = np.full(schema.integers, UNKNOWN_INTEGER, np.int64)  # the last ones
        self._given = self._recorded.copy()
        self._offsets = np.zeros(schema.integers, np.int64)

    def start_again(self) -> None:
        """Say that the next rows are the recording's first."""
        self._recorded[:] = UNKNOWN_INTEGER

    def carry_on(self, integers: npt.NDArray[np.int64]) -> None:
        """Add to each counter what makes it go on from its last value before the seam."""
        for index in self._columns:
            known = integers[:, index] != UNKNOWN_INTEGER
            values = integers[known, index]
            if len(values):
                falls = np.flatnonzero(values[1:] < values[:-1]) + 1
                parts = [self._part(index, part) for part in np.split(values, falls)]
                integers[known, index] = np.concatenate(parts)

    def _part(self, index: int, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return what is given for values that do not fall among themselves."""
        first, recorded, given = values[0], self._recorded[index], self._given[index]
        with np.errstate(over="ignore"):
            if recorded == UNKNOWN_INTEGER:
                self._offsets[index] = 0 if given == UNKNOWN_INTEGER else given - first
            elif first < recorded:  # it was reset and has risen from 0 since
                self._offsets[index] = 0 if first < given else given
        result: npt.NDArray[np.int64] = values + self._offsets[index]
        self._recorded[index], self._given[index] = values[-1], result[-1]
        return result

"""Perfetto: one trace, as https://ui.perfetto.dev and its trace processor open it.

A node is a track with one for each entity below it, and there a counter for each column in its
unit, a slice for each time a bit was set, events, alerts and runs of canaries. A counter has a
point wherever it changes, and the last one before: between them it holds. A trace cannot say that a
value is not known: the counter is NaN there, which is NULL in SQL and drawn as 0, and a slice
beside it says so.

Times are those of the node's monotonic clock; snapshots of its clocks relate them to the others, so
traces of the same node fall into place. History spans boots, so its times are wall time.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuwatch.clock import SECOND_NS
from gpuwatch.extract import (
    ALERTS,
    CANARIES,
    EVENTS,
    Array,
    Extract,
    Moment,
    Rows,
    Times,
    in_unit,
    known,
)
from gpuwatch.feeders import coarser
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Kind
from gpuwatch.summation import reach_ns
from gpuwatch.trace import BEGIN, BOOTTIME, END, INSTANT, MONOTONIC, REALTIME, Trace, Tracks

Mask = npt.NDArray[np.bool_]

FIRST = -1  # rank of what stands above the columns
SHAPE = ("size", "dtype", "direction", "gpus")
CANARY_NOTES = (
    *SHAPE,
    *("result", "judged", "value", "unit", "ratio", "baseline", "limit", "spread", "clock_hertz"),
    *("power_watts", "temperature_celsius", "throttle_seconds", "seconds", "detail"),
    *("time", "settings"),
)
PACKETS_KEPT = 20_000  # before they are compressed and written: some megabytes


class Perfetto:
    """Writes a trace with the messages of Perfetto, which the extra `export` brings."""

    name = "perfetto"

    def write(self, extract: Extract, output: Path) -> None:
        """Make the file."""
        with Trace(output) as trace:
            _Timeline(extract, trace).write()


class _Line:
    """A column as it goes on, called `name`. A counter that is never known is not there."""

    def __init__(self, trace: Trace, tracks: Tracks, column: Column, name: str, rank: int) -> None:
        self._trace = trace
        self._tracks = tracks
        self._column = column
        self._name = name
        self._rank = 2 * rank  # between two is room for the time in which it is not known
        self._last: Array | None = None
        self._seen = False
        self._unknown_ns: int | None = None

    def add(self, times: Times, values: Array) -> None:
        """Add cells in order of time."""
        there = known(values)
        last = values[:1] if self._last is None else self._last
        changed = _changes(np.concatenate([last, values]))
        self._mark(times, there)
        if self._seen or there.any():
            first = 0 if self._seen else int(there.argmax())
            changed[first] |= not self._seen
            self._seen = True
            self._draw(times[first:], values[first:], changed[first:])
        self._last = values[-1:]

    def finish(self, end_ns: int) -> None:
        """Say that nothing comes any more."""
        if self._seen and self._unknown_ns is not None:
            self._trace.slice(self._gap, "not known", self._unknown_ns, end_ns)

    def _draw(self, times: Times, values: Array, changed: Mask) -> None:
        """Add points where the value changes, before that, and at the last cell."""
        keep = np.append(changed[1:], True)
        keep = changed | (keep & known(values))
        parent = self._tracks.entity(self._column.entity)
        track = self._tracks.counter(parent, self._column, self._name, self._rank)
        self._trace.points(track, times[keep], in_unit(self._column, values[keep]))

    def _mark(self, times: Times, there: Mask) -> None:
        """Add slices for the times that are over in which it was not known."""
        last = there[0] if self._last is None else known(self._last)[0]
        if self._last is None and not there[0]:
            self._unknown_ns = int(times[0])
        for index in np.flatnonzero(np.diff(there, prepend=last)).tolist():
            time_ns = int(times[index])
            if self._unknown_ns is None:
                self._unknown_ns = time_ns
            else:
                self._trace.slice(self._gap, "not known", self._unknown_ns, time_ns)
                self._unknown_ns = None

    @property
    def unknown(self) -> Any:
        """A cell that is not known."""
        gauge = self._column.signal.kind is Kind.GAUGE
        return np.float32(UNKNOWN_GAUGE) if gauge else np.int64(UNKNOWN_INTEGER)

    @property
    def _gap(self) -> int:
        """The track of the times in which it is not known."""
        entity = self._tracks.entity(self._column.entity)
        return self._tracks.below(entity, f"{self._name} not known", self._rank + 1)


class _Bits(_Line):
    """A bit set: each bit that is ever set is a track of slices."""

    def __init__(self, trace: Trace, tracks: Tracks, column: Column, name: str, rank: int) -> None:
        super().__init__(trace, tracks, column, name, rank)
        self._names = dict(column.signal.bits)
        self._set: set[int] = set()

    def finish(self, end_ns: int) -> None:
        """End what is still set."""
        self._seen = True  # no slice at all would say that no bit was ever set
        super().finish(end_ns)
        for bit in self._set:
            self._trace.event(END, self._track(bit), end_ns)

    def _draw(self, times: Times, values: Array, changed: Mask) -> None:
        for index in np.flatnonzero(changed).tolist():
            value, time_ns = int(values[index]), int(times[index])
            now = set(_bits(value)) if value != UNKNOWN_INTEGER else set()
            for bit in self._set - now:
                self._trace.event(END, self._track(bit), time_ns)
            for bit in now - self._set:
                event = self._trace.event(BEGIN, self._track(bit), time_ns)
                event.name = self._label(bit)
            self._set = now

    def _track(self, bit: int) -> int:
        entity = self._tracks.entity(self._column.entity)
        group = self._tracks.below(entity, self._name, self._rank, self._column.signal.help)
        return self._tracks.below(group, self._label(bit), bit)

    def _label(self, bit: int) -> str:
        return self._names.get(bit, f"unknown_0x{1 << bit:x}")


class _Timeline:
    """Puts an extract into a trace."""

    def __init__(self, extract: Extract, trace: Trace) -> None:
        self._extract = extract
        self._trace = trace
        self._tracks = Tracks(trace, extract)
        ranks = count()
        left = coarser((table.columns, table.period_ns) for table in extract.tables)
        self._lines = [
            [
                _line(trace, self._tracks, column, place in places, table.name, next(ranks))
                for place, column in enumerate(table.columns)
            ]
            for table, places in zip(extract.tables, left, strict=True)
        ]
        self._until: dict[int, int] = {}  # by table, until when its last row holds
        self._start_ns = self._end_ns = 0  # from the first row to just after the last

    def write(self) -> None:
        """Write all of it."""
        extract = self._extract
        self._begin()
        for rows in extract.rows():
            times = rows.time_ns if extract.is_steady else rows.wall_ns
            self._start_ns = self._start_ns or int(times[0])
            self._end_ns = max(self._end_ns, int(times[-1]) + 1)
            self._add(rows, times)
            self._trace.flush(PACKETS_KEPT)
        for table, until_ns in self._until.items():
            if until_ns < self._end_ns:  # others went on
                for line in self._lines[table]:
                    line.add(np.array([until_ns]), np.array([line.unknown]))
        for line in chain(*self._lines):
            line.finish(self._end_ns)
        for name, moments in ((EVENTS, extract.events()), (ALERTS, extract.alerts())):
            for moment in moments:
                self._note(name, moment)
                self._trace.flush(PACKETS_KEPT)
        self._note_canaries()
        self._trace.flush()

    def _begin(self) -> None:
        head = self._extract.head
        if not self._extract.is_steady:
            self._trace.begin(REALTIME, REALTIME, [{REALTIME: 1}])  # from 1970 on
            return
        since = [triple.monotonic_ns for triple in head.clocks]
        newest = max(bisect_right(since, head.start_ns) - 1, 0)
        snapshots = [
            {
                MONOTONIC: triple.monotonic_ns,
                REALTIME: triple.realtime_ns,
                BOOTTIME: triple.boottime_ns,
            }
            for triple in head.clocks[newest:]
        ]
        self._trace.begin(MONOTONIC if snapshots else BOOTTIME, BOOTTIME, snapshots)

    def _add(self, rows: Rows, times: Times) -> None:
        """Add rows; where none came for too long, nothing is known."""
        table = self._extract.tables[rows.table]
        hold_ns = table.span_ns or reach_ns(0, rows.period_ns)
        holds = np.append(self._until.get(rows.table, times[0]), times + hold_ns)
        self._until[rows.table] = int(holds[-1])
        gaps = np.flatnonzero(times - holds[:-1] > table.span_ns // 2)
        times = np.insert(times, gaps, holds[gaps])
        for line, values in zip(self._lines[rows.table], rows.cells, strict=True):
            # A mean is of the time before, a counter is of the instant.
            shift_ns = table.span_ns if values.dtype == np.float32 else 0
            cells = np.insert(values, gaps, line.unknown) if len(gaps) else values
            line.add(times - shift_ns, cells)

    def _note_canaries(self) -> None:
        """Add readings: all from the start on, and of each course the newest from before."""
        before = {}
        for moment in self._extract.canaries():
            expected = moment.detail["expected"]
            shown = {name: moment.detail[name] for name in CANARY_NOTES}
            told = moment._replace(detail={**shown, "expected": expected and expected["value"]})
            if moment.time_ns < self._start_ns:
                before[moment.entity, moment.name, *(shown[name] for name in SHAPE)] = told
            else:
                self._note(CANARIES, told)
        for told in before.values():
            self._note(CANARIES, told)

    def _note(self, track: str, moment: Moment) -> None:
        """Add an instant, or a run as a slice; what is older is shown where the trace begins."""
        time_ns = moment.time_ns if self._extract.is_steady else moment.wall_ns
        if track == ALERTS:
            time_ns = min(max(time_ns, self._start_ns), self._end_ns)
        elif track == CANARIES:
            end_ns = time_ns + round((moment.detail["seconds"] or 0.0) * SECOND_NS)
            time_ns = max(time_ns, self._start_ns)
        below = self._tracks.below(self._tracks.entity(moment.entity), track, FIRST)
        lasts = track == CANARIES and end_ns > time_ns
        event = self._trace.event(BEGIN if lasts else INSTANT, below, time_ns)
        event.name = moment.name
        if lasts:
            self._trace.event(END, below, end_ns)
        for key, value in moment.detail.items():
            if value is not None and value != "":
                note = event.debug_annotations.add()
                note.name = key
                note.string_value = value if isinstance(value, str) else json.dumps(value)


def _line(
    trace: Trace, tracks: Tracks, column: Column, coarser: bool, table: str, rank: int
) -> _Line:
    """Make a line; it is named by its table as well if another one has the column more finely."""
    bits = column.signal.kind is Kind.BITS
    name = column.signal.name if bits else column.name
    name = f"{name} of {table}" if coarser else name
    return (_Bits if bits else _Line)(trace, tracks, column, name, rank)


def _changes(values: Array) -> Mask:
    """Return of each value but the first whether it differs from the one before."""
    there = known(values)
    both = there[1:] & there[:-1]
    return np.asarray((there[1:] != there[:-1]) | (both & (values[1:] != values[:-1])))


def _bits(value: int) -> Iterator[int]:
    return (bit for bit in range(value.bit_length()) if value >> bit & 1)

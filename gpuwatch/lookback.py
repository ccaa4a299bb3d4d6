"""What the running node has done: rings as far as they reach back, history from before them.

Rings are read beside their writers, only the rows and columns wanted; history is read as it lies on
the disk. Rings count on the monotonic clock: their wall time is that of now.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from gpuwatch import byte_history
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, read_clocks
from gpuwatch.errors import GpuwatchError
from gpuwatch.feeders import coarser, pace_ns
from gpuwatch.history import FOREVER_NS, SINCE_START, History, Piece
from gpuwatch.ring import RingReader, RingSchema
from gpuwatch.signals import UNKNOWN_INTEGER, Entity, Kind, column_name
from gpuwatch.summation import HOLD_PERIODS, row_dtype
from gpuwatch.timeline import Held, Key, Line, Timeline, lines_of, put_rates
from gpuwatch.window import TICK_NS, Floats

ALIVE_NS = 2 * SECOND_NS  # a ring that was not written to for so long is nobody's
ROWS_AT_ONCE = 2000  # of history
FIRST_ROWS = 8  # the writer may just overwrite them: then as many times more

Wanted = Callable[[Line], bool]


class Looked(NamedTuple):
    """Where what was put comes from, `history`, `ring` or both, and up to when nothing is missing.

    `until_ns` is 0 if no ring is written to.
    """

    source: str
    until_ns: int


class Ring:
    """An open ring, with its lines named as others know its entities."""

    def __init__(self, path: str, names: Mapping[Entity, Entity]) -> None:
        self.reader = RingReader(Path(path))
        self.schema: RingSchema = self.reader.schema.with_entities(names)
        self.lines = lines_of(self.schema.columns)
        self._dtype = row_dtype(self.schema)

    def put(self, timeline: Timeline, chosen: Sequence[int], offset_ns: int) -> int:
        """Put the chosen columns into a timeline; return how far the ring's data go."""
        reader, grid = self.reader, timeline.grid
        watermark_ns, period_ns = reader.watermark_ns, reader.period_ns
        hold_ns = max(HOLD_PERIODS * period_ns, TICK_NS)
        from_ns, to_ns = grid.start_ns - offset_ns - hold_ns, grid.end_ns - offset_ns + hold_ns
        _, packed = reader.read(max(0, reader.before(from_ns) - 1), reader.before(to_ns) + 1)
        rows = np.frombuffer(packed, self._dtype)
        held = Held(timeline, [self.lines[index] for index in chosen])
        held.add(rows["time_ns"] + offset_ns, self._values(rows, chosen), period_ns)
        held.finish(watermark_ns + offset_ns)
        return watermark_ns

    def _values(self, rows: np.ndarray[Any, Any], chosen: Sequence[int]) -> Floats:
        values = np.empty((len(chosen), len(rows)))
        integers = self.schema.integers
        for line, index in enumerate(chosen):
            if index >= integers:
                values[line] = rows["gauges"][:, index - integers]
            else:
                counts = rows["integers"][:, index]
                values[line] = counts * self.schema.columns[index].signal.scale
                values[line, counts == UNKNOWN_INTEGER] = np.nan
        return values

    @property
    def ended(self) -> bool:
        """Whether nothing is read into it now, if it is written to at all."""
        newest = np.frombuffer(self.reader.newest(), self._dtype)
        return bool(np.isnan(newest["late"]).any())

    @property
    def oldest_ns(self) -> int | None:
        """Time of the oldest row that is left, None if there is none."""
        reader, count = self.reader, FIRST_ROWS
        while reader.head and count < FIRST_ROWS * reader.capacity:
            _, packed = reader.read(0, max(0, reader.head - reader.capacity) + count)
            if packed:
                return int(np.frombuffer(packed, self._dtype)["time_ns"][0])
            count *= FIRST_ROWS  # the writer, or one that caught up, has taken their places
        return None


class Lookback:
    """The rings and the history of a node. Rings stay open as long as they are named again."""

    def __init__(self) -> None:
        self.offset_ns = 0  # what turns times of rings into wall time
        self._rings: dict[str, Ring] = {}
        self._names: Mapping[Entity, Entity] = {}

    def rings(self, paths: Sequence[str], names: Mapping[Entity, Entity]) -> list[Ring]:
        """Return the rings of these files; `names` are their entities as others know them."""
        now = median(read_clocks().wall_ns(0) for _ in range(3))
        if abs(now - self.offset_ns) > MILLISECOND_NS:  # else it stays, so that samples do
            self.offset_ns = int(now)
        if self._names != names:
            self._close_but(())
            self._names = names
        self._close_but(paths)
        for path in paths:
            if path not in self._rings:
                with contextlib.suppress(OSError, GpuwatchError):  # it has gone since
                    self._rings[path] = Ring(path, names)
        return [ring for ring in self._rings.values() if ring.reader.intact]

    def put(
        self,
        timeline: Timeline,
        wanted: Wanted,
        rings: Sequence[Ring],
        history: str,
        **chosen: Collection[Any] | None,
    ) -> Looked:
        """Put what rings hold, and history from before them.

        `chosen` are the entities and signals that History.read is to choose.
        """
        grid, offset_ns = timeline.grid, self.offset_ns
        since: dict[Key, int] = {}
        reached, sources = [], []
        spare = Timeline(grid)  # counters that a finer ring has too: for where it has nothing
        beats = max((ring.reader.heartbeat_ns for ring in rings), default=0) - ALIVE_NS
        # One that has ended leaves its counters to others, as it does in windows.
        told = [
            ring.schema.columns if ring.reader.heartbeat_ns > beats and not ring.ended else ()
            for ring in rings
        ]
        paces = [pace_ns(ring.schema) for ring in rings]
        left = coarser(zip(told, paces, strict=True))
        for ring, places in zip(rings, left, strict=True):
            chosen_here = [index for index, line in enumerate(ring.lines) if wanted(line)]
            indices = [index for index in chosen_here if index not in places]
            oldest_ns = ring.oldest_ns if chosen_here else None
            if oldest_ns is None:
                continue
            sources = ["ring"]
            if len(indices) < len(chosen_here):
                ring.put(spare, [index for index in chosen_here if index in places], offset_ns)
            if not indices:
                continue
            start_ns = oldest_ns + offset_ns
            for index in indices:
                for key in _keys(ring.lines[index]):
                    since[key] = min(start_ns, since.get(key, start_ns))
            reached.append(ring.put(timeline, indices, offset_ns) + offset_ns)
        newest_ns = max(reached, default=0)
        until_ns = min((ns for ns in reached if ns > newest_ns - ALIVE_NS), default=0)
        finer: dict[Key, int] = {}
        if history and grid.step_ns < TICK_NS:
            finer = _put_bytes(timeline, Path(history) / byte_history.NAME, since, chosen)
            since |= finer
        latest_ns = max(since.values(), default=grid.end_ns)
        cells = None
        if history and grid.start_ns < latest_ns:
            pieces = History(Path(history)).read(
                grid.start_ns, min(grid.end_ns, latest_ns) + TICK_NS, **chosen
            )
            for piece in pieces:
                if cells is None or not cells.fits(piece):
                    if cells:
                        cells.flush()
                    cells = _Cells(timeline, piece, since)
                cells.add(piece)
            if cells:
                cells.flush()
        timeline.fill(spare)
        if cells or finer:
            sources = ["history", *sources]
        return Looked("+".join(sources), until_ns)

    def _close_but(self, kept: Collection[str]) -> None:
        for path in [path for path in self._rings if path not in kept]:
            self._rings.pop(path).reader.close()

    def close(self) -> None:
        """Let go of all rings."""
        self._close_but(())


def _put_bytes(
    timeline: Timeline, directory: Path, since: Mapping[Key, int], chosen: Mapping[str, Any]
) -> dict[Key, int]:
    """Put the bytes of ports as they were read, from before the rings; return since when."""
    grid, held, columns = timeline.grid, None, None
    first: dict[Key, int] = {}
    for piece in History(directory).read(grid.start_ns - TICK_NS, grid.end_ns + TICK_NS, **chosen):
        lines = lines_of(piece.columns)
        keys = [line.key for line in lines]
        if not keys:  # none of these are bytes of ports
            break
        inside = piece.time_ns <= min(since.get(key, FOREVER_NS) for key in keys)
        if not inside.any():
            continue
        if held is None or columns != piece.columns:
            held, columns = Held(timeline, lines), piece.columns
        times = piece.time_ns[inside]
        held.add(times, piece.values[inside].T, piece.head.rings[0].period_ns)
        for key in keys:
            first.setdefault(key, int(times[0]))
    return first


class _Cells:
    """Rows of history, in order: each cell stands for its own quarter second."""

    def __init__(self, timeline: Timeline, piece: Piece, since: Mapping[Key, int]) -> None:
        self._timeline = timeline
        self._piece = piece
        self._lines = lines_of(piece.columns)
        kinds = [line.signal.kind is Kind.COUNTER for line in self._lines]
        self._counters = [index for index, counter in enumerate(kinds) if counter]
        self._gauges = [index for index, counter in enumerate(kinds) if not counter]
        self._keys = [line.key for line in self._lines]
        self._since = np.array([[since.get(key, FOREVER_NS)] for key in self._keys], np.int64)
        self._times = np.empty(0, np.int64)
        self._counts = np.empty((len(self._counters), 0))
        self._waiting: list[Piece] = []  # many rows at once cost little more than a few

    def fits(self, piece: Piece) -> bool:
        """Say whether a piece has the same columns."""
        if piece.head is not self._piece.head and piece.columns != self._piece.columns:
            return False
        self._piece = piece
        return True

    def add(self, piece: Piece) -> None:
        """Take a piece's rows, to be put with others."""
        before = self._waiting[-1:]
        if before and piece.time_ns[0] <= before[0].time_ns[-1]:  # the clock was set back
            self.flush()
        self._waiting.append(piece)
        if sum(len(one.time_ns) for one in self._waiting) >= ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Put the rows that wait; what rings know better is left out."""
        if not self._waiting:
            return
        times = np.concatenate([piece.time_ns for piece in self._waiting])
        values = np.concatenate([piece.values.T for piece in self._waiting], axis=1)
        self._waiting = []
        values[times > self._since.reshape(-1, 1)] = np.nan
        keys = [self._keys[index] for index in self._gauges]
        self._timeline.put(keys, times - TICK_NS, times, values[self._gauges])
        lines = [self._lines[index] for index in self._counters]
        kept = len(self._times)
        times = np.concatenate([self._times, times])
        counts = np.concatenate([self._counts, values[self._counters]], axis=1)
        hold_ns = HOLD_PERIODS * TICK_NS
        put_rates(self._timeline, lines, times, counts, hold_ns, kept, SINCE_START)
        self._times, self._counts = times[-HOLD_PERIODS:], counts[:, -HOLD_PERIODS:]


def _keys(line: Line) -> list[Key]:
    """Return what history calls a column: a set of bits has one for each."""
    signal = line.signal
    if signal.kind is not Kind.BITS:
        return [line.key]
    return [(line.entity, column_name(signal, bit)) for _, bit in signal.bits]

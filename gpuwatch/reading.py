"""A row of driver calls: each fills its own cells, and each fails on its own.

What fails is asked for again, ever more rarely, and never counts as "not supported" for good:
drivers answer NOT_SUPPORTED now and then of what they have.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml

from gpuwatch import nvml
from gpuwatch import pulse as page
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.roster import Gpu, Roster
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Kind, Signal

TRIES, SILENT_NS = 3, 3 * SECOND_NS  # failures in a row, over so long, until a call is left alone
REST_NS, LONGEST_REST_NS = 60 * SECOND_NS, 600 * SECOND_NS


@dataclass(frozen=True, slots=True)
class Call:
    """A driver call and the cells it fills.

    `read` takes a GPU's handle and returns a value for each of `cells`, as the signal is stored:
    counters before their scale. None is what it knows to be unknown. It may raise NVMLError.
    """

    name: str
    cells: tuple[tuple[Signal, str], ...]
    read: Callable[[Any], Sequence[float | None]]


class Patience:
    """When to ask again for what fails."""

    __slots__ = ("_failures", "_rest_ns", "_since_ns", "_until_ns")

    def __init__(self) -> None:
        self.answered()

    def answered(self) -> None:
        """Note that it answered."""
        self._failures = self._since_ns = self._until_ns = 0
        self._rest_ns = REST_NS

    def failed(self, now_ns: int) -> None:
        """Note a failure: the third in a row, over three seconds, brings a rest of a minute.

        Each try after a rest that fails too doubles the next one, up to ten minutes.
        """
        self._failures += 1
        self._since_ns = self._since_ns or now_ns
        if self._failures >= TRIES and now_ns - self._since_ns >= SILENT_NS:
            self._until_ns = now_ns + self._rest_ns
            self._rest_ns = min(2 * self._rest_ns, LONGEST_REST_NS)

    def rests(self, now_ns: int) -> bool:
        """Say whether it is to be left alone."""
        return now_ns < self._until_ns


@dataclass(slots=True)
class Asked:
    """A call in its row: the signals and places of its cells, and how it has answered."""

    call: Call
    places: tuple[tuple[Signal, int], ...]
    patience: Patience = field(default_factory=Patience)


class Row:
    """The cells of one GPU that are read together: `columns`, integer kinds first."""

    def __init__(self, roster: Roster, gpu: Gpu, calls: Sequence[Call]) -> None:
        self._roster = roster
        self._gpu = gpu
        cells = [cell for call in calls for cell in call.cells]
        cells.sort(key=lambda cell: cell[0].kind is Kind.GAUGE)
        self.columns = tuple(Column(gpu.entity, *cell) for cell in cells)
        self._unknown: list[float] = [
            UNKNOWN_GAUGE if signal.kind is Kind.GAUGE else UNKNOWN_INTEGER for signal, _ in cells
        ]
        self._values = list(self._unknown)
        self._asked = [
            Asked(call, tuple((cell[0], cells.index(cell)) for cell in call.cells))
            for call in calls
        ]

    def read(self) -> Sequence[float]:
        """Make the calls and return all cells; the list is the same every time."""
        gpu, values = self._gpu, self._values
        values[:] = self._unknown
        if gpu.handle is None:
            return values
        self._roster.words[page.READING] = gpu.index
        for asked in self._asked:
            now = monotonic_ns()
            if asked.patience.rests(now):
                continue
            try:
                self._take(asked, asked.call.read(gpu.handle))
                asked.patience.answered()
            except pynvml.NVMLError as error:
                self._roster.failed(gpu, asked.call.name, error.value)
                if error.value in nvml.GONE:
                    values[:] = self._unknown
                    break
                asked.patience.failed(now)
        self._roster.words[page.READING] = page.NOT_READING
        return values

    def _take(self, asked: Asked, answers: Sequence[float | None]) -> None:
        for (signal, place), answer in zip(asked.places, answers, strict=True):
            if answer is None:
                continue
            if plausible(signal, answer):
                self._values[place] = int(answer) if signal.kind is Kind.COUNTER else answer
            else:
                self._roster.failed(self._gpu, asked.call.name, pynvml.NVML_ERROR_NO_DATA)


def plausible(signal: Signal, value: float) -> bool:
    """Say whether a value can be one of the signal, and is no marker for "no value"."""
    if signal.kind is Kind.COUNTER:
        return nvml.is_count(value)
    low, high = signal.bounds or (-math.inf, math.inf)
    return low <= value <= high

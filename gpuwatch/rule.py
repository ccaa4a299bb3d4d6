"""What a rule is: a name, a meaning and a judge; and the view of the ticks that a judge gets.

Judges are pure and see data time only. To add a rule: write it into a tuple in `rules/`. Needs no
numpy: the config takes its defaults from the rules.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gpuwatch.clock import SECOND_NS
from gpuwatch.rises import Rises
from gpuwatch.signals import Entity, Event

if TYPE_CHECKING:
    from gpuwatch.window import Tick, Window

Severity = Literal["critical", "warning", "info"]
Verdict = Literal["ok", "watch", "drain", "reset", "reboot"]
BY_SEVERITY: Mapping[Severity, Verdict] = {"critical": "drain", "warning": "watch", "info": "ok"}

BUSY_REACH_NS = 3600 * SECOND_NS  # busy time older than this is no longer judged
BILLION = 10**9
NOTHING: "Mapping[str, Window]" = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is judged, of which kind of entity, and what it means.

    `judge` returns the value that is compared with `limit`: breached at `limit` and above, or
    with `at_most` at `limit` and below; None is unknown. `show` returns the value to publish
    where that is another one. `window_seconds` is what the view's sums run over, 0 if the tick
    alone is judged. `detect` says whether the tick shows the thing at all: an event, no alert.
    `record` asks for a recording when it is detected or fires. Once firing, an alert stays so for
    `hold_seconds`; a sticky one until it was acknowledged or the machine booted, too.
    `measure` is what entities of the kind are compared by: it is taken of all of them, as their
    views' `measured`, before any is judged.
    `verdict` is what should become of the node while the rule fires, where its severity does not
    say it; a mapping goes by the value that was judged.
    `help` is the meaning and `next_step` the operator's next step, a sentence each.
    """

    name: str
    severity: Severity
    per: str  # kind of entity: gpu, source, host
    help: str
    next_step: str
    judge: "Callable[[View], float | None]"
    limit: float
    at_most: bool = False
    window_seconds: float = 0.0
    for_seconds: float = 0.0
    hold_seconds: float = 120.0
    sticky: bool = False
    show: "Callable[[View], float | None] | None" = None
    measure: "Callable[[View], Any] | None" = None
    detect: "Callable[[View], bool] | None" = None
    record: bool = False
    verdict: "Verdict | Mapping[float, Verdict] | None" = None

    def advice(self, value: float | None) -> Verdict:
        """Return what should become of the node while the rule fires with this value."""
        found = self.verdict
        if found is not None and not isinstance(found, str):
            found = None if value is None else found.get(value)
        return found or BY_SEVERITY[self.severity]

    def breached(self, value: float) -> bool:
        """Say whether a judged value is beyond the limit."""
        return value <= self.limit if self.at_most else value >= self.limit


class _Sum:
    """A sum over the latest `span_ns` of counted time within `reach_ns` of data time.

    All integers: what is added is taken away exactly, so the sum cannot drift.
    """

    __slots__ = ("_reach_ns", "_rows", "_span_ns", "counted_ns", "value")

    def __init__(self, span_ns: int, reach_ns: int) -> None:
        self.counted_ns = 0
        self.value = 0
        self._span_ns = span_ns
        self._reach_ns = reach_ns
        self._rows: deque[tuple[int, int, int]] = deque()

    def push(self, end_ns: int, counted_ns: int, value: int) -> None:
        rows = self._rows
        while rows and rows[-1][0] >= end_ns:  # data time went back: a recording began again
            self._take(rows.pop())
        if counted_ns:
            rows.append((end_ns, counted_ns, value))
            self.counted_ns += counted_ns
            self.value += value
        oldest = end_ns - self._reach_ns
        while rows and (rows[0][0] <= oldest or self.counted_ns - rows[0][1] >= self._span_ns):
            self._take(rows.popleft())

    def _take(self, row: tuple[int, int, int]) -> None:
        self.counted_ns -= row[1]
        self.value -= row[2]


class View:
    """What a judge sees: one entity at one tick, and sums over the rule's window.

    `share`, `busy_share`, `mean` and `rise` take the tick in when called: a judge calls the same
    ones, once each, at every tick. They are None while the entity does not have the column.
    `rises`, `peak` and `fell` do so too, and `part`, `lasting` and `told` for what no column has.
    `siblings` are the views of all entities of the kind under the same rule, this one too, and
    `measured` what the rule's `measure` said of this entity in this tick.
    """

    tick: "Tick"

    def __init__(self, rule: Rule, entity: Entity, siblings: "list[View] | None" = None) -> None:
        self.entity = entity
        self.siblings = [] if siblings is None else siblings
        self.siblings.append(self)
        self.measured: Any = None
        self.judged_ns = 0  # data time with an answer, as the engine counts it
        self._window_ns = round(rule.window_seconds * SECOND_NS)
        self._names: list[str] = []
        self._columns: dict[str, list[str]] = {}
        self._sums: dict[tuple[str, str], _Sum] = {}
        self._rises: dict[tuple[str, ...], Rises] = {}
        self._peaks: dict[str, float] = {}
        self._lasts: dict[str, float] = {}
        self._since_ns: dict[str, int] = {}
        self._told: dict[str, deque[tuple[int, int]]] = {}

    @property
    def window_seconds(self) -> float:
        """What the sums run over."""
        return self._window_ns / SECOND_NS

    def look(self, tick: "Tick") -> None:
        """Turn to the next tick; a window is never shorter than one."""
        self.tick = tick
        self._windows = tick.windows.get(self.entity, NOTHING)
        tick_ns = tick.end_ns - tick.start_ns
        if tick_ns > self._window_ns:
            self._window_ns = tick_ns

    def window(self, name: str) -> "Window | None":
        """Return the entity's column in this tick, None if it has no such column now.

        The columns of the interfaces of an RDMA port are the port's, too: all of them together.
        """
        found = self._windows.get(name)
        if found is None:
            for entity in self.tick.links.get(self.entity, ()):
                other = self.tick.window(entity, name)
                found = found.merge(other) if found and other else found or other
        return found

    def columns(self, signal: str) -> list[str]:
        """Return the names of the entity's columns of a signal, one for each label value."""
        names = list(self._windows)
        if names != self._names:  # they hardly ever change, and are many
            self._names, self._columns = names, {}
        if signal not in self._columns:
            start = signal + "{"
            self._columns[signal] = [name for name in names if name.startswith(start)]
        return self._columns[signal]

    def constant(self, name: str) -> float | None:
        """Return a value that does not change while its source is open, None if unknown."""
        return self.tick.constant(self.entity, name)

    def active(self, name: str) -> bool:
        """Say whether a 0/1 column was 1 for any time of the tick."""
        window = self.window(name)
        return window is not None and window.integral > 0

    def highest(self, name: str) -> float | None:
        """Return the column's highest value in the tick, None if unknown."""
        window = self.window(name)
        return None if window is None or not window.covered_ns else window.maximum

    @property
    def busy(self) -> bool:
        """Whether the GPU worked for more than a fifth of the tick."""
        return self.tick.busy(self.entity)

    def share(self, name: str) -> float | None:
        """Return the active time of a 0/1 column over the whole window.

        Uncovered time is not active.
        """
        window = self.window(name)
        return self.part(name, round(window.integral) if window else None)

    def part(self, name: str, active_ns: int | None) -> float | None:
        """Return the share of the whole window that the ticks' `active_ns` make.

        For time that no column has alone; None is a tick of which nothing is known.
        """
        total = self._sum("share", name, self._window_ns)
        total.push(self.tick.end_ns, active_ns or 0, active_ns or 0)
        return None if active_ns is None else total.value / self._window_ns

    def busy_share(self, name: str) -> float | None:
        """Return the active time of a 0/1 column over the latest busy time within an hour.

        It is a share of the whole window even while less busy time has been seen.
        """
        window = self.window(name)
        total = self._sum("busy_share", name, BUSY_REACH_NS)
        busy_ns = self.tick.end_ns - self.tick.start_ns if window and self.busy else 0
        total.push(self.tick.end_ns, busy_ns, round(window.integral) if window else 0)
        return total.value / self._window_ns if window else None

    def mean(self, name: str) -> float | None:
        """Return the time-weighted mean over the window's covered time, None if there is none."""
        window = self.window(name)
        total = self._sum("mean", name, self._window_ns)
        if window:
            total.push(self.tick.end_ns, window.covered_ns, round(window.integral))
        else:
            total.push(self.tick.end_ns, 0, 0)
        return total.value / total.counted_ns if window and total.counted_ns else None

    def rise(self, *names: str) -> float | None:
        """Return the increase of a counter, or of several together, over the window, in its unit.

        None while none is known. What was counted before the first read is no increase, nor is a
        reset.
        """
        windows = [window for name in names if (window := self.window(name))]
        total = self._sum("rise", names[0], self._window_ns)
        billionths = round(sum(window.increase for window in windows) * BILLION)
        covered_ns = max((window.covered_ns for window in windows), default=0)
        total.push(self.tick.end_ns, covered_ns, billionths)
        return total.value / BILLION if windows and total.counted_ns else None

    def rises(self, *names: str, delay_seconds: float = 0.0) -> "Rises | None":
        """Return the increases of a counter, or of several together, by when they came.

        None while none is known. They reach back over the rule's window. `delay_seconds` is how
        long an increase is held back, so that it may turn out to count for nothing.
        """
        windows = [window for name in names if (window := self.window(name))]
        if not windows:
            return None
        found = self._rises.get(names)
        if found is None:
            delay_ns = round(delay_seconds * SECOND_NS)
            found = self._rises[names] = Rises(self._window_ns + delay_ns, delay_ns)
        found.push(self.tick.end_ns, sum(window.increase for window in windows))
        return found

    def peak(self, name: str) -> float | None:
        """Return the highest value that a column had since the start, None if it never had one."""
        now = self.highest(name)
        if now is not None:
            self._peaks[name] = max(now, self._peaks.get(name, now))
        return self._peaks.get(name)

    def fell(self, name: str) -> bool:
        """Say whether a column was lower at some time of the tick than before."""
        window = self.window(name)
        if window is None or not window.covered_ns:
            return False
        before, self._lasts[name] = self._lasts.get(name, window.last), window.last
        return window.minimum < before or window.last < window.maximum

    def lasting(self, what: str, holds: bool) -> int:
        """Return for how long something holds already, to the tick's end; 0 if it does not."""
        if not holds:
            self._since_ns.pop(what, None)
            return 0
        tick = self.tick
        since_ns = min(self._since_ns.get(what, tick.start_ns), tick.start_ns)
        self._since_ns[what] = since_ns
        return tick.end_ns - since_ns

    def told(self, name: str, times: Callable[[Event], int]) -> Sequence[tuple[int, int]]:
        """Return when and how often the entity's events of a name were told in the window.

        `times` says how many such things an event tells of, 0 to leave it out.
        """
        end_ns = self.tick.end_ns
        oldest_ns = end_ns - self._window_ns
        rows = self._told.setdefault(name, deque())
        while rows and rows[-1][0] > end_ns:  # data time went back
            rows.pop()
        for event in self.tick.events:
            if event.entity == self.entity and event.name == name and event.time_ns > oldest_ns:
                count = times(event)
                if count:
                    rows.append((min(event.time_ns, end_ns), count))
        while rows and rows[0][0] <= oldest_ns:
            rows.popleft()
        return rows

    def _sum(self, method: str, name: str, reach_ns: int) -> _Sum:
        total = self._sums.get((method, name))
        if total is None:
            total = self._sums[method, name] = _Sum(self._window_ns, reach_ns)
        return total

    @property
    def settled(self) -> bool:
        """Whether a whole window (of busy time, or the hour it may lie in) has been judged."""
        busy = all(
            total.counted_ns >= self._window_ns
            for (method, _), total in self._sums.items()
            if method == "busy_share"
        )
        return self.judged_ns >= (self._window_ns if busy else BUSY_REACH_NS)

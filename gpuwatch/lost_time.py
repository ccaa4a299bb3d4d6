"""Lost time: what each tick took from a GPU, and what else happened in it, over the last minute.

Two kinds of time are lost, never in the same tick: clock withheld while the GPU was busy, as
`gpu_lost_clock_seconds_total` counts it, and waits of a job, half a second or longer, in which its
GPU was not busy. Each nanosecond of it is put down to one cause at most, and a cause gets no more
than the time in which it was seen. Pure and in data time: the same ticks give the same sums.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuwatch.clock import SECOND_NS
from gpuwatch.gpu_signals import HUNG, THROTTLE
from gpuwatch.ledger import TIME, WINDOW_NS, Key, Ledger, Row, Windows, highest
from gpuwatch.link_time import NEVER_NS, LinkTime
from gpuwatch.rules.gpu import HW_THERMAL, POWER_BRAKE, POWER_CAP, SW_THERMAL
from gpuwatch.rules.host import GAP_NS, IDLE_RATIO, PRESSURE_RATIO, SOME
from gpuwatch.rules.work import SM_CLOCK
from gpuwatch.signals import Entity, column_name
from gpuwatch.source import EntityInfo
from gpuwatch.window import ACTIVITY, BUSY_RATIO, Tick

WORK_REACH_NS = 600 * SECOND_NS  # a GPU that has not worked for longer is not slowed but unused
START_NS = 10 * SECOND_NS  # in which the processes of a job come up
MOMENT = 0.01  # of a tick; a clock this close to its limit is not low

CLOCK_LIMIT = 'gpu_clock_limit_hertz{clock="sm"}'
POWER, MARGIN = "gpu_power_watts", "gpu_temperature_margin_celsius"
CORE, MEMORY = (f'gpu_temperature_celsius{{sensor="{part}"}}' for part in ("core", "memory"))
MEMORY_MAX = 'gpu_temperature_threshold_celsius{threshold="memory_max"}'
HW_SLOWDOWN, IDLE, SETTING, DISPLAY, SYNC_BOOST = (
    column_name(THROTTLE, reason)
    for reason in ("hw_slowdown", "gpu_idle", "applications_clocks", "display_clocks", "sync_boost")
)
# The clock event reasons of each cause.
REASONS: Mapping[str, tuple[str, ...]] = {
    "power_cap": (POWER_CAP,),
    "heat": (HW_THERMAL, SW_THERMAL),
    "power_brake": (POWER_BRAKE,),
    "hw_slowdown": (HW_SLOWDOWN,),
    "clock_setting": (SETTING, DISPLAY),
    "sync_boost": (SYNC_BOOST,),
    "idle_clock": (IDLE,),
}
NAMED = (HW_THERMAL, POWER_BRAKE)  # with either of them hw_slowdown is on as well
# What is averaged over the time in which a cause was seen.
AVERAGED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*REASONS, "low_clock"), (SM_CLOCK,)),
    **dict.fromkeys(("power_cap", "power_brake"), (SM_CLOCK, POWER)),
    "heat": (SM_CLOCK, CORE, MEMORY, MARGIN),
}
_AVERAGED = {
    cause: tuple((name, ("sum", f"{cause} {name}"), ("over", f"{cause} {name}")) for name in names)
    for cause, names in AVERAGED.items()
}
HUNGS = tuple(column_name(HUNG, duty) for duty in ("state", "counters"))
TELLING = ("gpu_up", *HUNGS, SM_CLOCK, IDLE, *ACTIVITY)  # without any a tick was not seen
PRESSURES = {f"{name}_pressure": Entity("resource", name) for name in ("io", "cpu", "memory")}

BUSY, WAIT, SHARED = ("time", "busy"), ("time", "wait"), ("time", "shared")
NEW_REASON = f'{THROTTLE.name}{{{THROTTLE.label}="unknown_'  # a bit that has no name yet
NOT_READ = ""  # in the place of a new reason: no reasons were read


@dataclass(frozen=True, slots=True)
class Loss:
    """What the last minute of a GPU came to; nothing of it changes later.

    `sums` are integers: nanoseconds by ("lost", cause), by ("on", reason), by ("blind", cause)
    where a reason was on and the loss is not known, by ("unexplained", new reason or NOT_READ), by
    ("low", cause) where no reason was on, by ("unsure", cause) where several were, by ("seen" and
    "in_waits" and "at_work", cause) of what waits coincide with; value x nanoseconds by ("sum",
    "cause column") over the nanoseconds of ("over", "cause column"); increases by ("rise", column).
    `near` are the RDMA ports and interfaces beside the GPU, `processes_before` those that the job
    began with. After `job_ended` packets are lost on peers that are no more.
    """

    entity: Entity
    tick: Tick
    sums: Mapping[Key, int]
    near: tuple[Entity, ...]
    links_expected: float | None
    processes_before: float | None
    job_ended: bool


class LostTime:
    """Fed with every closed tick, in order of time; knows every GPU that ticks speak of."""

    def __init__(self, entities: Iterable[EntityInfo] = ()) -> None:
        self._gpus: dict[Entity, _Gpu] = {}
        self._near: dict[str, tuple[Entity, ...]] = {}
        self._tick = Tick(0, 0)
        self._late_ns: dict[str, int] = {}  # pressure that a tick had no room for
        self.attach(entities)

    def attach(self, entities: Iterable[EntityInfo]) -> None:
        """Learn from the labels which RDMA ports and interfaces are near which GPU."""
        near: dict[str, tuple[Entity, ...]] = {}
        for info in entities:
            if info.entity.kind in ("rdma_port", "interface"):
                for number in filter(None, info.labels.get("gpu", "").split(",")):
                    near[number] = (*near.get(number, ()), info.entity)
        self._near = near
        for gpu in self._gpus.values():
            gpu.links.near = near.get(gpu.entity.id, ())

    def add(self, tick: Tick) -> None:
        """Take in a tick."""
        if tick.start_ns != self._tick.end_ns:
            self._late_ns.clear()
        self._tick = tick
        for entity in tick.windows:
            if entity.kind == "gpu" and entity not in self._gpus:
                self._gpus[entity] = _Gpu(entity, self._near.get(entity.id, ()))
        pressures = {cause: self._pressed_ns(tick, cause) for cause in PRESSURES}
        for gpu in list(self._gpus.values()):
            gpu.turn(tick)
            windows = tick.windows.get(gpu.entity)
            if windows is not None:
                gpu.add(tick, windows, pressures)
            elif not gpu.ledger.sums:
                del self._gpus[gpu.entity]

    def _pressed_ns(self, tick: Tick, cause: str) -> int | None:
        """Return for how long some work on the host waited for a resource, None if unknown.

        Reads do not fall on the ends of ticks, so a tick may show some of the time before it.
        """
        window = tick.window(PRESSURES[cause], SOME)
        if window is None or not window.covered_ns:
            return None
        tick_ns = tick.end_ns - tick.start_ns
        waited_ns = round(window.increase * SECOND_NS) + self._late_ns.get(cause, 0)
        self._late_ns[cause] = min(max(0, waited_ns - tick_ns), tick_ns // 2)
        return min(tick_ns, waited_ns)

    def of(self, entity: Entity) -> Loss | None:
        """Return what the minute of a GPU came to, None of any other entity."""
        gpu = self._gpus.get(entity)
        if gpu is None:
            return None
        return Loss(
            entity,
            self._tick,
            gpu.ledger.sums.copy(),
            gpu.links.near,
            gpu.links.links_expected,
            gpu.processes_before,
            self._tick.end_ns - gpu.links.job_ended_ns < WINDOW_NS,
        )

    def all(self) -> dict[Entity, Loss]:
        """Return what the minute came to of every GPU."""
        return {entity: loss for entity in self._gpus if (loss := self.of(entity))}


class _Gpu:
    """A GPU: its sums, and what must be remembered beside them."""

    def __init__(self, entity: Entity, near: tuple[Entity, ...]) -> None:
        self.entity = entity
        self.ledger = Ledger()
        self.links = LinkTime(entity, near, self.ledger)
        self.processes_before: float | None = None
        self._end_ns = 0
        self._worked_ns = NEVER_NS  # the end of the last busy tick
        self._began_ns = NEVER_NS  # when the processes that it has began to work
        self._gap_ns = 0
        self._short: list[tuple[Row, Row]] = []  # of a gap that may be none yet

    def turn(self, tick: Tick) -> None:
        """Turn to the next tick."""
        if tick.start_ns < self._end_ns:  # data time went back
            self._worked_ns = self._began_ns = NEVER_NS
            self.processes_before = None
            self.links.restart()
        if tick.start_ns != self._end_ns:
            self._end_gap()
        self._end_ns = tick.end_ns
        self.ledger.turn(tick.end_ns)

    def add(self, tick: Tick, windows: Windows, pressures: Mapping[str, int | None]) -> None:
        """Take in the tick turned to; `pressures` are nanoseconds of it, None if unknown."""
        tick_ns, put = tick.end_ns - tick.start_ns, self.ledger.put
        if all(highest(windows, name) is None for name in TELLING):
            self._end_gap()
            return
        put(TIME, tick_ns)
        silent_ns = _silent_ns(windows)
        if silent_ns:
            put(("lost", "not_answering"), silent_ns)
            self._end_gap()
            return
        activity = tick.activity(self.entity)
        busy = activity is not None and activity > BUSY_RATIO
        processes = highest(windows, "gpu_processes")
        self._look_at_processes(tick, processes, busy=busy)
        self._look_at_clock(tick, windows, activity)
        seen = self.links.look(tick, windows, self._gap_ns)
        if busy:
            self._worked_ns = tick.end_ns
            put(BUSY, tick_ns)
            for cause, pressed_ns in pressures.items():
                if pressed_ns:
                    put(("at_work", cause), pressed_ns)
        at_work = tick.end_ns - self._worked_ns < WORK_REACH_NS
        if busy or activity is None or not processes or not at_work:
            self._end_gap()
        else:
            self._wait(tick_ns, activity, seen, pressures)

    def _end_gap(self) -> None:
        self._gap_ns = 0
        self._short.clear()

    def _look_at_processes(self, tick: Tick, processes: float | None, *, busy: bool) -> None:
        """Notice processes that joined those of a job at work."""
        if processes is None:
            return
        if not processes:
            self.processes_before, self._began_ns = None, NEVER_NS
        elif busy:
            if self._began_ns == NEVER_NS:
                self._began_ns = tick.start_ns
            before = self.processes_before
            if before is None or tick.end_ns - self._began_ns <= START_NS:
                self.processes_before = max(before or 0.0, processes)
            elif processes > before:
                self.ledger.put(SHARED, tick.end_ns - tick.start_ns)

    def _look_at_clock(self, tick: Tick, windows: Windows, activity: float | None) -> None:
        """Put the clock that was lost down to the reasons that were on."""
        put, on = self.ledger.put, self._reasons_on(windows)
        clock, limit = windows.get(SM_CLOCK), tick.constant(self.entity, CLOCK_LIMIT)
        lost_ns: int | None = None
        if activity is not None and activity <= BUSY_RATIO:
            lost_ns = 0
        elif activity is not None and clock is not None and clock.covered_ns and limit:
            # Above the limit (a clock read while it was being changed) is not a gain.
            lost_ns = max(0, round(clock.covered_ns - clock.integral / limit))
        if lost_ns:
            self._share_out(tick, windows, lost_ns, on)
        for cause, on_ns in on.items():
            self._average(windows, cause, on_ns)
            if lost_ns is None:
                put(("blind", cause), on_ns)

    def _reasons_on(self, windows: Windows) -> dict[str, int]:
        """Return by cause for how long of the tick a reason of it was on, 0 left out."""
        on: dict[str, int] = {}
        for cause, reasons in REASONS.items():
            for reason in reasons:
                window = windows.get(reason)
                if window is not None and window.integral:
                    on_ns = round(window.integral)
                    self.ledger.put(("on", reason), on_ns)
                    on[cause] = max(on.get(cause, 0), on_ns)
        if "hw_slowdown" in on:
            named = [windows[reason].integral for reason in NAMED if reason in windows]
            on["hw_slowdown"] -= round(sum(named))
            if on["hw_slowdown"] <= 0:
                del on["hw_slowdown"]
        return on

    def _share_out(self, tick: Tick, windows: Windows, lost_ns: int, on: dict[str, int]) -> None:
        """Share lost clock out: to reasons by time, but no more than they were on; then the rest.

        Windows do not say whether the clock was low just while a reason was on. It is taken to
        have been, for reasons and clocks come about together.
        """
        put, tick_ns = self.ledger.put, tick.end_ns - tick.start_ns
        all_on_ns, rest_ns = sum(on.values()), lost_ns
        given_ns = min(lost_ns, all_on_ns)
        for cause, on_ns in on.items():
            part_ns = given_ns * on_ns // all_on_ns
            put(("lost", cause), part_ns)
            rest_ns -= part_ns
            if all_on_ns > tick_ns:
                put(("unsure", cause), part_ns)
        known = windows.get(IDLE)
        if known is None or not known.covered_ns:
            put(("lost", "unexplained"), rest_ns)
            put(("unexplained", NOT_READ), rest_ns)
            return
        new = rest_ns > MOMENT * tick_ns and next(
            (name for name in windows if name.startswith(NEW_REASON) and windows[name].integral), ""
        )
        if new:
            put(("lost", "unexplained"), rest_ns)
            put(("unexplained", new), rest_ns)
            return
        cause = "heat" if _is_at_limit(tick, self.entity, windows) else "low_clock"
        put(("lost", cause), rest_ns)
        if rest_ns > MOMENT * tick_ns:
            low_ns = max(rest_ns, tick_ns - all_on_ns)
            put(("low", cause), low_ns)
            self._average(windows, cause, low_ns)

    def _average(self, windows: Windows, cause: str, ns: int) -> None:
        """Keep what the GPU was like while a cause was seen."""
        for name, total, over in _AVERAGED[cause]:
            window = windows.get(name)
            if window is not None and window.covered_ns:
                self.ledger.put(total, round(window.integral * ns / window.covered_ns))
                self.ledger.put(over, ns)

    def _wait(
        self,
        tick_ns: int,
        activity: float,
        seen: Mapping[str, int],
        pressures: Mapping[str, int | None],
    ) -> None:
        """Put a tick in which the job waited down to what was seen in it."""
        found = {cause: ns for cause, ns in seen.items() if ns}
        known = {cause: ns for cause, ns in pressures.items() if ns}
        found |= {cause: ns for cause, ns in known.items() if ns >= PRESSURE_RATIO * tick_ns}
        idle = activity < IDLE_RATIO
        row: Row = {}
        if idle or found:  # a light load is no wait by itself
            lost_ns = rest_ns = round((1 - activity) * tick_ns)
            all_ns = max(tick_ns, sum(found.values()))
            row[WAIT] = tick_ns
            row |= {("in_waits", cause): ns for cause, ns in known.items()}
            for cause, ns in found.items():
                row["seen", cause] = ns
                row["lost", cause] = lost_ns * ns // all_ns
                rest_ns -= row["lost", cause]
            if idle:
                told = None not in (pressures["io_pressure"], pressures["cpu_pressure"])
                row["lost", "no_work" if told and not found else "unexplained"] = rest_ns
        self._gap_ns += tick_ns
        self._short.append((self.ledger.row, row))
        if self._gap_ns >= GAP_NS:  # it counts from its beginning
            for place, values in self._short:
                for key, value in values.items():
                    self.ledger.put(key, value, place)
            self._short.clear()


def _silent_ns(windows: Windows) -> int:
    """Return for how long the GPU did not answer, or was left alone for a call that hangs."""
    up, silent_ns = windows.get("gpu_up"), 0.0
    if up is not None:
        silent_ns = up.covered_ns - up.integral
    for name in HUNGS:
        window = windows.get(name)
        if window is not None:
            silent_ns = max(silent_ns, window.integral)
    return round(silent_ns)


def _is_at_limit(tick: Tick, entity: Entity, windows: Windows) -> bool:
    """Say whether core or memory was as hot as it may be."""
    memory, most = windows.get(MEMORY), tick.constant(entity, MEMORY_MAX)
    if memory is not None and most is not None and memory.maximum >= most:
        return True
    margin = windows.get(MARGIN)
    return margin is not None and margin.minimum <= 0

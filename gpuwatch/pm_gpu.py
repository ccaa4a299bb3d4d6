"""One GPU whose counters are sampled: begun, drained into rows, paced, tried again when refused.

Slower than COARSEST_NS helps little, as what remains is the process. So there the hardware samples
finely and keeps the latest seconds, which take no processor until they are asked for.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpuwatch import cupti as api
from gpuwatch import pm_metrics
from gpuwatch import pulse as page
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns, read_clocks
from gpuwatch.cuda import Cuda, CudaError
from gpuwatch.cupti import APPEND_MODE_SINCE, Cupti, CuptiError
from gpuwatch.cupti_library import Library
from gpuwatch.errors import SourceUnsupported
from gpuwatch.pm_clock import SysClock
from gpuwatch.pm_session import MIB, Device, Drained, Sample, Session
from gpuwatch.pm_signals import columns_of
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Entity, Event, Kind
from gpuwatch.source import Findings, Group, Pace, TimedRow

DELIVERY_NS = SECOND_NS // 2
COARSEST_NS = 10 * MILLISECOND_NS  # that the budget leads to, where a coarser one was not planned
LATEST_BYTES = 16 * MIB  # of buffer to keep the latest in: memory of this process, for each GPU
LATEST_NS = MILLISECOND_NS  # the interval there, or the planned one if that is longer
STANDBY_TIMES = 2  # slower than the coarsest interval, as the budget counts steps
STRETCH_MOST = 16  # an interval of the sys clock may last so many times the wanted one
INTERVALS_NS = {
    "100us": MILLISECOND_NS // 10,
    "1ms": MILLISECOND_NS,
    "10ms": 10 * MILLISECOND_NS,
    "100ms": 100 * MILLISECOND_NS,
}
# The first time sooner: who has the counters may be a sampler that was left behind in a call, and
# it gives back those of other GPUs a moment later.
RETRY_NS, FIRST_RETRY_NS = 10 * SECOND_NS, SECOND_NS
# By the beginning of a chip's name (cupti_pmsampling.h): those that sample by the sys clock alone,
# and those whose buffer keeps the oldest alone.
NO_TIME_TRIGGER, NO_LATEST = ("TU", "GA100"), ("TU",)
DEAREST_SECONDS = 200e-6  # of a core for one sample: a metric that costs more is left out
JUDGED_SAMPLES = 1000
LARGEST = 2**62  # of a total: it goes on from 0, as after a reset; 11 days of an H200's memory
MOST_OF_A_SAMPLE = 1e15  # bytes, or hertz: more is a fault
ROUNDING = 1.02  # a share of what is possible may come out a little above 1
STALE_NS = SECOND_NS // 10  # the newest sample is no older, but for its interval

TAKEN = dict.fromkeys(
    (api.HARDWARE_BUSY, api.INVALID_OPERATION), "counters are taken by another profiler"
) | dict.fromkeys((api.UNKNOWN, api.OUT_OF_MEMORY), "another profiler may have the counters")
# What stays as it is until somebody changes it, and what to do.
REFUSALS = {
    33: "a virtual GPU gives no counters: have vGPU profiling turned on for this machine",
    35: "counters are for administrators only: give CAP_SYS_ADMIN (CAP_PERFMON from driver 565"
    " on), or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
    40: "a virtual GPU gives no counters: have vGPU profiling turned on for this machine",
    41: "no counters while confidential computing is on",
    42: "a mining GPU has no counters",
    43: "no counters of the whole GPU while MIG is on",
    44: "no counters while SLI is on",
    45: "no counters in WSL",
    46: "the CUPTI library does not know this chip: install a newer one, not newer than the driver",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What all GPUs of a sampler share: the libraries, what is to be sampled, where to tell.

    `gpus` is how many there are, `words` are those of the pulse.
    """

    cuda: Cuda
    cupti: Cupti
    library: Library
    chosen_set: str
    interval_ns: int
    gpus: int
    words: memoryview
    findings: Findings


class Watched:
    """One GPU: its sampling while it runs, else why it does not and when it is tried again.

    `reason` is why it did not before, which has been told.
    """

    def __init__(self, plan: Plan, index: int, bus_id: str, reason: str = "") -> None:
        self.index = index
        self.entity = Entity("gpu", bus_id)
        self.reason = reason
        self.lasting = False  # only somebody can change it
        self.retry_ns = 0
        self.group: Group | None = None
        self.interval_ns = plan.interval_ns
        self.standby = False  # keeps the latest rows, for who asks
        self._asked = False
        self._stretch = 1  # an interval has lasted so many times the wanted one
        self._clock = SysClock()
        self._plan = plan
        self._device: Device | None = None
        self._choice = pm_metrics.Choice((), {})
        self._session: Session | None = None
        self._begun_ns = 0
        self._off = False
        self._dear: dict[str, str] = {}  # columns that cost too much
        self._row_ns = 0
        self._cost: list[float] = [0.0, 0.0]  # seconds of a core, samples
        self._totals: dict[str, int] = {}

    @property
    def period_ns(self) -> int:
        """The longest time between rows that follow each other."""
        return self.interval_ns * self._stretch

    def start(self) -> None:
        """Begin to sample, or note why not. The group stays once there is one."""
        plan = self._plan
        plan.words[page.READING] = self.index
        try:
            try:
                self._begin()
            except CuptiError as fault:
                # Once, after the last process on the GPU has ended.
                if (fault.call, fault.result) != ("cuptiPmSamplingStart", api.UNKNOWN):
                    raise
                self._begin()
            self.reason, self.lasting = "", False
        except (CudaError, CuptiError, SourceUnsupported) as fault:
            self._fail(fault)
        finally:
            plan.words[page.READING] = page.NOT_READING

    def _begin(self) -> None:
        plan = self._plan
        if self._device is None:
            device = Device(plan.cupti, plan.cuda.device(self.entity.id))
            self._choice = pm_metrics.choose(plan.chosen_set, self._dear, device.passes)
            if not self._choice.metrics:
                raise SourceUnsupported(f"{device.chip} has none of the metrics")
            self._device = device
        metrics = self._choice.metrics
        self._session = Session(
            self._device,
            tuple(metric.name for metric in metrics),
            sum(metric.bytes for metric in metrics),
            self.interval_ns,
            sys_hertz=self._clock.hertz if self._device.chip.startswith(NO_TIME_TRIGGER) else 0.0,
            latest_bytes=LATEST_BYTES if self.standby else 0,
        )
        self._begun_ns = monotonic_ns()
        columns = columns_of(self.entity, plan.chosen_set, self._choice.without)
        place = {metric.column: (number, metric.scale) for number, metric in enumerate(metrics)}
        self._cells = [
            (*place[column.name], column.name if column.signal.kind is Kind.COUNTER else "")
            for column in columns
        ]
        self._totals = {column.name: self._totals.get(column.name, 0) for column in columns}
        if self.group is None or self.group.columns != columns:
            self.group = Group(
                f"pm{self.index}",
                columns,
                plan.interval_ns,
                phase_ns=self.index * DELIVERY_NS // plan.gpus,
                delivery_ns=DELIVERY_NS,
                drain=self.drain,
                pace=self.pace,
                ask=self.ask,
            )
        left = "".join(f"; without {name}: {why}" for name, why in self._choice.without.items())
        every = f"every {self.interval_ns / MILLISECOND_NS:g} ms"
        every += " by the sys clock" * bool(self._session.cycles)
        every += ", the latest kept for who asks," * self.standby
        self._tell(f"{len(metrics)} metrics {every} with CUPTI {plan.library.name}{left}")

    def _fail(self, fault: Exception) -> None:
        before, result = self.reason, getattr(fault, "result", None)
        self.stop()
        self.retry_ns = monotonic_ns() + (RETRY_NS if before else FIRST_RETRY_NS)
        self.lasting = isinstance(fault, SourceUnsupported) or result in REFUSALS
        self.reason = REFUSALS.get(result or 0, str(fault))
        if isinstance(fault, CuptiError):
            self._plan.findings.errors[str(fault)] += 1
            if result in TAKEN and fault.call != "cuptiPmSamplingDecodeData":
                self.reason = f"{TAKEN[result]}: {fault}"
        self._device = None  # what may be had is asked anew
        if self.reason != before:
            self._tell(f"unavailable: {self.reason}")

    def stop(self) -> None:
        """Give the counters back."""
        words = self._plan.words
        before, words[page.READING] = words[page.READING], self.index
        try:
            self.let_go()
        finally:
            words[page.READING] = before

    def let_go(self) -> None:
        """Give the counters back from another thread than the one that reads."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def drain(self) -> Sequence[TimedRow]:
        """Return what has come since the last time, a row for each interval."""
        if self._session is None or (self.standby and not self._asked):
            return ()
        plan, session = self._plan, self._session
        self._asked = False
        plan.words[page.READING] = self.index
        began_ns, cpu = monotonic_ns(), time.thread_time()
        try:
            drained = session.drain()
        except CuptiError as fault:
            self._fail(fault)
            if monotonic_ns() - self._begun_ns > RETRY_NS:
                self.retry_ns = 0
            return ()
        finally:
            plan.words[page.READING] = page.NOT_READING
        self._cost[0] += time.thread_time() - cpu
        self._cost[1] += len(drained.samples)
        if drained.left_out and not self.standby:  # there it is what the latest have taken over
            plan.findings.errors["too_long"] += drained.left_out
        if drained.overflow:
            plan.findings.errors["overflow"] += 1
        anew = bool(session.cycles) and self._look_at_clock(session.cycles, drained.samples)
        if drained.overflow or anew:
            self.stop()
            self.start()
        return self._rows(drained, began_ns)

    def _look_at_clock(self, cycles: int, samples: Sequence[Sample]) -> bool:
        """Follow the sys clock; say whether its cycles make another interval than the wanted."""
        longest_ns = max((one.end_ns - one.start_ns for one in samples), default=0)
        stretch = -(-longest_ns // self.interval_ns)
        self._stretch = max(self._stretch, min(stretch, STRETCH_MOST))
        return self._clock.look(cycles, samples, monotonic_ns())

    def _rows(self, drained: Drained, began_ns: int) -> list[TimedRow]:
        """Return rows at the ends of intervals: totals up to then, and means of the interval."""
        rows: list[TimedRow] = []
        if not drained.samples:
            return rows
        now = read_clocks()
        shift_ns = now.monotonic_ns - now.realtime_ns
        newest_ns = drained.samples[-1].end_ns + shift_ns
        # The newest is of the drain itself, else the wall clock was moved meanwhile. After an
        # overflow the oldest are left, of whenever the buffer was emptied last.
        oldest_ns = began_ns - STALE_NS - 2 * self.period_ns
        if not oldest_ns < newest_ns <= now.monotonic_ns and not drained.overflow:
            shift_ns += now.monotonic_ns - newest_ns
        for sample in drained.samples:
            time_ns = sample.end_ns + shift_ns
            if not self._row_ns < time_ns <= now.monotonic_ns:  # or the clock was moved
                self._plan.findings.errors["out_of_order"] += 1
                continue
            self._row_ns = time_ns
            rows.append((time_ns, self._row(sample.values)))
        return rows

    def _row(self, values: Sequence[float]) -> list[float]:
        cells: list[float] = []
        totals = self._totals
        for number, scale, counter in self._cells:
            value = values[number] * scale
            if not 0 <= value < MOST_OF_A_SAMPLE:  # or it is no number
                self._plan.findings.errors["implausible"] += 1
                cells.append(UNKNOWN_INTEGER if counter else UNKNOWN_GAUGE)
            elif counter:
                totals[counter] = total = (totals[counter] + round(value)) % LARGEST
                cells.append(total)
            else:
                cells.append(1.0 if scale != 1 and 1 < value < ROUNDING else value)
        return cells

    def ask(self) -> None:
        """Have the next drain return what was kept, if it is kept for who asks."""
        self._asked = True

    def pace(self, scale: float) -> Pace:
        """Sample so many times more rarely, in steps of ten, or keep the latest, or do nothing."""
        planned_ns = self._plan.interval_ns
        self._off = scale == 0
        if self._off:
            self.stop()
            return Pace(1.0, planned_ns)
        slowest_ns = max(planned_ns, COARSEST_NS)
        interval_ns = planned_ns * int(10 ** math.ceil(math.log10(max(scale, 1.0)) - 1e-9))
        standby = interval_ns > slowest_ns and self._can_keep_latest
        interval_ns = max(planned_ns, LATEST_NS) if standby else min(interval_ns, slowest_ns)
        idle = self._session is None and not self.reason
        if (interval_ns, standby) != (self.interval_ns, self.standby) or idle:
            self.interval_ns, self.standby, self._stretch = interval_ns, standby, 1
            self.stop()
            if not self.reason:
                self.start()
        # Ten planned intervals are forty steps of the budget, a minute each: what was too dear is
        # not tried again sooner, also where the planned one is long.
        slower = max(STANDBY_TIMES * slowest_ns, slowest_ns + 10 * planned_ns)
        slower = slower if standby else interval_ns
        return Pace(slower / planned_ns, self.period_ns, standby)

    @property
    def _can_keep_latest(self) -> bool:
        chip = self._device.chip if self._device else ""
        return self._plan.library.version >= APPEND_MODE_SINCE and not chip.startswith(NO_LATEST)

    def upkeep(self, now_ns: int) -> None:
        """Try again what failed; leave out the metric that is worth least if all cost too much."""
        if self._off:
            return
        if self.reason and now_ns >= self.retry_ns:
            self.start()
        seconds, samples = self._cost
        if samples < JUDGED_SAMPLES:
            return
        self._cost = [0.0, 0.0]
        metrics = self._choice.metrics
        if seconds / samples > DEAREST_SECONDS and len(metrics) > 1:
            why = f"a sample took {seconds / samples * 1e6:.0f} us of a core with it"
            self._dear[metrics[-1].column] = why
            self.stop()
            self._device = None
            self.start()

    def _tell(self, detail: str) -> None:
        event = Event(monotonic_ns(), self.entity, "pm_mode", detail)
        self._plan.findings.events.append(event)

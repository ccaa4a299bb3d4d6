"""PM sampling: a GPU's own counters each millisecond, for the whole GPU, from outside of its jobs.

The hardware samples by itself. Twice a second what it has written is decoded into the ring, each
row with the hardware's own time, which is the end of its interval. What no interval covers is in no
total: a row is then later than an interval after the one before.

Counters belong to one program at a time. While another has them, or a GPU refuses for another
reason, that GPU has no rows and is tried again; the others go on.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gpuwatch import cupti as api
from gpuwatch import pm_metrics
from gpuwatch import pulse as page
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns, read_clocks
from gpuwatch.cuda import Cuda, CudaError
from gpuwatch.cupti import Cupti, CuptiError
from gpuwatch.cupti_library import Library, choose, toolkits, wheels
from gpuwatch.errors import SourceUnavailable, SourceUnsupported
from gpuwatch.pm_session import Device, Drained, Session
from gpuwatch.pm_signals import columns_of
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Entity, Event, Kind
from gpuwatch.source import Context, EntityInfo, Findings, Group, Opened, TimedRow
from gpuwatch.topology import own_gpus

DELIVERY_NS = SECOND_NS // 2
INTERVALS_NS = {
    "100us": MILLISECOND_NS // 10,
    "1ms": MILLISECOND_NS,
    "10ms": 10 * MILLISECOND_NS,
    "100ms": 100 * MILLISECOND_NS,
}
RETRY_NS = 10 * SECOND_NS
LOOK_SECONDS = 0.3
# Chips without a trigger by time (cupti_pmsampling.h), by the beginning of their name.
NO_TIME_TRIGGER = ("TU", "GA100")
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


class Watched:
    """One GPU: its sampling while it runs, else why it does not and when it is tried again."""

    def __init__(self, source: "Pm", index: int, bus_id: str) -> None:
        self.index = index
        self.entity = Entity("gpu", bus_id)
        self.reason = ""
        self.lasting = False  # only somebody can change it
        self.retry_ns = 0
        self.group: Group | None = None
        self.interval_ns = source.interval_ns
        self._source = source
        self._device: Device | None = None
        self._choice = pm_metrics.Choice((), {})
        self._session: Session | None = None
        self._begun_ns = 0
        self._off = False
        self._dear: dict[str, str] = {}  # columns that cost too much
        self._row_ns = 0
        self._cost: list[float] = [0.0, 0.0]  # seconds of a core, samples
        self._totals: dict[str, int] = {}

    def start(self) -> None:
        """Begin to sample, or note why not. The group stays once there is one."""
        source = self._source
        source.words[page.READING] = self.index
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
            source.words[page.READING] = page.NOT_READING

    def _begin(self) -> None:
        source = self._source
        if self._device is None:
            device = Device(source.cupti, source.cuda.device(self.entity.id))
            if device.chip.startswith(NO_TIME_TRIGGER):
                raise SourceUnsupported(f"{device.chip} cannot sample by time")
            self._choice = pm_metrics.choose(source.chosen_set, self._dear, device.passes)
            if not self._choice.metrics:
                raise SourceUnsupported(f"{device.chip} has none of the metrics")
            self._device = device
        metrics = self._choice.metrics
        self._session = Session(
            self._device,
            tuple(metric.name for metric in metrics),
            sum(metric.bytes for metric in metrics),
            self.interval_ns,
        )
        self._begun_ns = monotonic_ns()
        columns = columns_of(self.entity, source.chosen_set, self._choice.without)
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
                source.interval_ns,
                phase_ns=self.index * DELIVERY_NS // source.gpus,
                delivery_ns=DELIVERY_NS,
                drain=self.drain,
                pace=self.pace,
            )
        left = "".join(f"; without {name}: {why}" for name, why in self._choice.without.items())
        every = f"every {self.interval_ns / MILLISECOND_NS:g} ms"
        self._tell(f"{len(metrics)} metrics {every} with CUPTI {source.library.name}{left}")

    def _fail(self, fault: Exception) -> None:
        before, result = self.reason, getattr(fault, "result", None)
        self.stop()
        self.retry_ns = monotonic_ns() + RETRY_NS
        self.lasting = isinstance(fault, SourceUnsupported) or result in REFUSALS
        self.reason = REFUSALS.get(result or 0, str(fault))
        if isinstance(fault, CuptiError):
            self._source.findings.errors[str(fault)] += 1
            if result in TAKEN and fault.call != "cuptiPmSamplingDecodeData":
                self.reason = f"{TAKEN[result]}: {fault}"
        self._device = None  # what may be had is asked anew
        if self.reason != before:
            self._tell(f"unavailable: {self.reason}")

    def stop(self) -> None:
        """Give the counters back."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def drain(self) -> Sequence[TimedRow]:
        """Return what has come since the last time, a row for each interval."""
        if self._session is None:
            return ()
        source, session = self._source, self._session
        source.words[page.READING] = self.index
        began_ns, cpu = monotonic_ns(), time.thread_time()
        try:
            drained = session.drain()
        except CuptiError as fault:
            self._fail(fault)
            if monotonic_ns() - self._begun_ns > RETRY_NS:
                self.retry_ns = 0
            return ()
        finally:
            source.words[page.READING] = page.NOT_READING
        self._cost[0] += time.thread_time() - cpu
        self._cost[1] += len(drained.samples)
        if drained.left_out:
            source.findings.errors["too_long"] += drained.left_out
        if drained.overflow:
            source.findings.errors["overflow"] += 1
            self.stop()
            self.start()
        return self._rows(drained, began_ns)

    def _rows(self, drained: Drained, began_ns: int) -> list[TimedRow]:
        """Return rows at the ends of intervals: totals up to then, and means of the interval."""
        rows: list[TimedRow] = []
        if not drained.samples:
            return rows
        now = read_clocks()
        shift_ns = now.monotonic_ns - now.realtime_ns
        newest_ns = drained.samples[-1].end_ns + shift_ns
        # The newest is of the drain itself, else the wall clock was moved meanwhile.
        oldest_ns = began_ns - STALE_NS - 2 * self.interval_ns
        if not oldest_ns < newest_ns <= now.monotonic_ns:
            shift_ns += now.monotonic_ns - newest_ns
        for sample in drained.samples:
            time_ns = sample.end_ns + shift_ns
            if time_ns <= self._row_ns:
                self._source.findings.errors["out_of_order"] += 1
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
                self._source.findings.errors["implausible"] += 1
                cells.append(UNKNOWN_INTEGER if counter else UNKNOWN_GAUGE)
            elif counter:
                totals[counter] = total = (totals[counter] + round(value)) % LARGEST
                cells.append(total)
            else:
                cells.append(1.0 if scale != 1 and 1 < value < ROUNDING else value)
        return cells

    def pace(self, scale: float) -> int:
        """Sample so many times more rarely, in steps of ten, or not at all; return the interval."""
        planned_ns = self._source.interval_ns
        self._off = scale == 0
        if self._off:
            self.stop()
            return planned_ns
        slower = int(10 ** math.ceil(math.log10(max(scale, 1.0)) - 1e-9))
        interval_ns = min(planned_ns * slower, max(INTERVALS_NS.values()))
        idle = self._session is None and not self.reason
        if interval_ns != self.interval_ns or idle:
            self.interval_ns = interval_ns
            self.stop()
            if not self.reason:
                self.start()
        return interval_ns

    def upkeep(self, now_ns: int) -> None:
        """Try again what failed; leave out the metric that is worth least if all cost too much."""
        if self.reason and not self._off and now_ns >= self.retry_ns:
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
        self._source.findings.events.append(event)


class Pm:
    """Source of the duty `pm`: a group for each GPU whose counters could be had."""

    name = "pm"

    def __init__(self) -> None:
        self.findings = Findings()
        self._closed = threading.Event()
        self._guard: threading.Thread | None = None

    def open(self, context: Context) -> Opened:
        """Load the library and begin to sample each GPU.

        Raises SourceUnsupported if no GPU can be sampled until somebody changes something,
        SourceUnavailable if the driver does not work.
        """
        settings = context.settings["config"]["pm"]
        self.words = context.pulse.words
        self.chosen_set: str = settings["set"]
        self.interval_ns = INTERVALS_NS[settings["interval"]]
        self._context = context
        self._show_only(context)
        self.cuda = Cuda()
        self.library = self._choose(settings["library"])
        try:
            self.cupti = self._load()
            self.cuda.initialise()
            self.cupti.call("cuptiProfilerInitialize")
            bus_ids = own_gpus(context.sysfs) or list(context.known) or self.cuda.bus_ids()
        except (CudaError, CuptiError) as fault:
            raise SourceUnavailable(f"pm: {fault}") from fault
        self._bus = set(bus_ids)
        bus_ids = [one for one in bus_ids if context.only in (None, one)]
        if not bus_ids:
            raise SourceUnavailable("pm: no NVIDIA GPU on this host: nothing to sample")
        self.gpus = len(bus_ids)
        context.pulse.set_names(bus_ids)
        watched = [Watched(self, index, bus_id) for index, bus_id in enumerate(bus_ids)]
        self._watched = [one for one in watched if one.entity.id not in context.excluded]
        if self._guard is None:
            self._guard = threading.Thread(target=self._let_others_go, daemon=True)
            self._guard.start()
        for one in self._watched:
            one.start()
        if self._watched and all(one.lasting for one in self._watched):
            raise SourceUnsupported(f"pm: {self._watched[0].reason}")
        self._told = self._seen()
        return self._opened()

    def _let_others_go(self) -> None:
        """Give back the counters of other GPUs once this process is left behind in a call."""
        generation = self.words[page.GENERATION]
        while not self._closed.wait(LOOK_SECONDS):
            if self.words[page.GENERATION] != generation:
                for one in self._watched:
                    if one.index != self.words[page.READING]:
                        one.stop()
                return

    def housekeep(self, now_ns: int) -> Opened | None:
        """Try again what failed. Raises SourceUnavailable when GPUs were plugged in."""
        for one in self._watched:
            one.upkeep(now_ns)
        if set(own_gpus(self._context.sysfs)) - self._bus:
            raise SourceUnavailable("pm: a GPU was plugged in: starting anew")
        told, self._told = self._told, self._seen()
        return self._opened() if told != self._told else None

    def close(self) -> None:
        """Give the counters back."""
        self._closed.set()
        for one in self._watched:
            one.stop()

    def _show_only(self, context: Context) -> None:
        """Have CUDA leave alone the GPUs that hang; numbers are asked for by address."""
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if not context.excluded and context.only is None:
            return
        shown = []
        for path in sorted((context.procfs / "driver/nvidia/gpus").glob("*/information")):
            bus_id = path.parent.name
            if bus_id not in context.excluded and context.only in (None, bus_id):
                lines = path.read_text(errors="replace").splitlines()
                shown += [line.split()[-1] for line in lines if line.startswith("GPU UUID:")]
        if shown:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)

    def _choose(self, configured: str) -> Library:
        """Return the library to load; raises SourceUnsupported if none fits."""
        try:
            driver = self.cuda.version
        except CudaError as fault:
            raise SourceUnavailable(f"pm: {fault}") from fault
        if not configured:
            return choose(driver, [*wheels(sys.path), *toolkits()])
        path = Path(configured)
        if not path.is_file():
            raise SourceUnsupported(f"pm: pm.library {path}: no such file: correct the config")
        return Library(api.UNTOLD, path)

    def _load(self) -> Cupti:
        """Return the library, if it is what it is taken for. Raises SourceUnsupported."""
        path, driver = self.library.path, self.cuda.version
        try:
            cupti = Cupti(path)
        except OSError as error:
            raise SourceUnsupported(f"pm: {path}: {error}: install it anew") from error
        version = max(cupti.version, self.library.version)
        if version == api.UNTOLD:
            raise SourceUnsupported(f"pm: {path}: tells no version: choose another library")
        if version[0] != driver[0] or version > driver:
            versions = [".".join(map(str, one)) for one in (version, driver)]
            raise SourceUnsupported(
                f"pm: {path}: CUPTI {versions[0]} does not fit a driver for CUDA {versions[1]}:"
                " choose one of its major version that is not newer"
            )
        self.library = Library(version, path)
        return cupti

    def _seen(self) -> list[tuple[str, Group | None]]:
        return [(one.reason, one.group) for one in self._watched]

    def _opened(self) -> Opened:
        watched = self._watched
        reasons = {one.reason: one.entity.id for one in reversed(watched) if one.reason}
        return Opened(
            tuple(one.group for one in watched if one.group is not None),
            tuple(EntityInfo(one.entity, {"pci_bus_id": one.entity.id}) for one in watched),
            reason="; ".join(f"{bus_id}: {why}" for why, bus_id in reasons.items()),
        )

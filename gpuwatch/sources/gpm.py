"""GPM: how much of SMs, tensor cores and memory bandwidth was used; Hopper and newer.

NVML compares two samples that it took when asked. What a sample holds is renewed every 100.0 ms
(H200, driver 580), and two samples of one renewal give 0 or NaN instead of an error. So a sample is
taken only when more than 100 ms have passed since the last one, and one that gives NaN is taken
again later: the older one stays, so no time is lost.

A sample takes 0.28 ms of a core and comparing two of them 10 us, but 1.4 ms if the share of time
with any work is asked for, which goes to the GPU: so that one has samples of its own, more rarely.
The struct of a request has 13 kB, so it is made once.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pynvml

from gpuwatch import nvml
from gpuwatch import pulse as page
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.errors import SourceUnsupported
from gpuwatch.gpu_signals import ACTIVE_SIGNALS, GRAPHICS_ACTIVE
from gpuwatch.mig import CHANGED, Instance, Layout
from gpuwatch.mig_signals import INSTANCE_ACTIVE_SIGNALS, INSTANCE_GRAPHICS_ACTIVE
from gpuwatch.roster import Gpu, Roster
from gpuwatch.signals import UNKNOWN_GAUGE, Column, Signal
from gpuwatch.source import Context, Findings, Group, Opened


class Kind(NamedTuple):
    """Shares that are asked for together: `metrics` of NVML, in the order of the signals.

    They are read every `period_ns`, or `each_ns` for every GPU and instance if that is longer: so
    each kind takes less than 3 % of a core, however many there are.
    """

    suffix: str
    metrics: tuple[int, ...]
    of_gpu: tuple[Signal, ...]
    of_instance: tuple[Signal, ...]
    period_ns: int
    each_ns: int


KINDS = (
    Kind(
        "",
        (
            pynvml.NVML_GPM_METRIC_SM_UTIL,
            pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        ),
        ACTIVE_SIGNALS,
        INSTANCE_ACTIVE_SIGNALS,
        110 * MILLISECOND_NS,
        10 * MILLISECOND_NS,
    ),
    Kind(
        "-any",
        (pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,),
        (GRAPHICS_ACTIVE,),
        (INSTANCE_GRAPHICS_ACTIVE,),
        SECOND_NS,
        100 * MILLISECOND_NS,
    ),
)
STAGGER_NS = 7 * MILLISECOND_NS
CLOSEST_NS, WIDEST_NS = 101 * MILLISECOND_NS, SECOND_NS  # between two samples
WIDER_NS, CLOSER_NS = 50 * MILLISECOND_NS, MILLISECOND_NS  # after a NaN, after a value
RETRY_NS, SELDOM_NS = SECOND_NS, 60 * SECOND_NS  # after a failed call, after NOT_SUPPORTED


class Meter:
    """Two samples of a GPU, or of a MIG instance of it, and the row of what lay between them."""

    def __init__(
        self, roster: Roster, layout: Layout, gpu: Gpu, instance: Instance | None, kind: Kind
    ) -> None:
        self.gpu = gpu
        self.kind = kind
        self.name = f"gpm{gpu.index}{kind.suffix}"
        self.columns = tuple(Column(gpu.entity, signal) for signal in kind.of_gpu)
        if instance is not None:
            self.name = f"gpm{gpu.index}-{instance.number}{kind.suffix}"
            self.columns = tuple(Column(instance.entity, signal) for signal in kind.of_instance)
        self._instance = instance
        self._roster = roster
        self._layout = layout
        self._older, self._newer = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(kind.metrics)
        self._answers = [self._request.metrics[index] for index in range(len(kind.metrics))]
        for answer, metric in zip(self._answers, kind.metrics, strict=True):
            answer.metricId = metric
        self._spacing_ns = CLOSEST_NS
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was sampled before does not count."""
        self._row = [UNKNOWN_GAUGE] * len(self.columns)
        self._older_ns = self._next_ns = 0

    def read(self) -> Sequence[float]:
        """Return the newest shares; the last ones again where a sample would come too soon."""
        now = monotonic_ns()
        if now < self._next_ns:
            return self._row
        if self.gpu.handle is None:
            self.forget()
            return self._row
        self._roster.words[page.READING] = self.gpu.index
        try:
            self._measure()
        except pynvml.NVMLError as error:
            self._fail(error.value, now)
        finally:
            self._roster.words[page.READING] = page.NOT_READING
        return self._row

    def free(self) -> None:
        """Give the samples back."""
        for sample in (self._older, self._newer):
            pynvml.nvmlGpmSampleFree(sample)

    def _measure(self) -> None:
        if self._instance is None:
            pynvml.nvmlGpmSampleGet(self.gpu.handle, self._newer)
        else:
            pynvml.nvmlGpmMigSampleGet(self.gpu.handle, self._instance.number, self._newer)
        now = monotonic_ns()  # afterwards: the call may have waited for another's
        if self._older_ns:
            self._request.sample1, self._request.sample2 = self._older, self._newer
            pynvml.nvmlGpmMetricsGet(self._request)
            shares = [self._share(answer) for answer in self._answers]
            if _no_time_between(self._row, shares) and now - self._older_ns < WIDEST_NS:
                self._spacing_ns = min(self._spacing_ns + WIDER_NS, WIDEST_NS)
                self._next_ns = self._older_ns + self._spacing_ns
                return
            self._row = shares
            self._spacing_ns = max(self._spacing_ns - CLOSER_NS, CLOSEST_NS)
        self._older, self._newer = self._newer, self._older
        self._older_ns, self._next_ns = now, now + self._spacing_ns

    def _share(self, answer: Any) -> float:
        if not answer.nvmlReturn:
            return float(answer.value) * 0.01
        if answer.nvmlReturn not in nvml.ABSENT:
            self._roster.failed(self.gpu, f"GPM metric {answer.metricId}", answer.nvmlReturn)
        return UNKNOWN_GAUGE

    def _fail(self, result: int, now_ns: int) -> None:
        self.forget()
        self._next_ns = now_ns + (SELDOM_NS if result in nvml.ABSENT else RETRY_NS)
        if self._instance is not None and result in CHANGED:
            self._layout.doubt()
        self._roster.failed(self.gpu, "GPM", result)


def _no_time_between(before: Sequence[float], now: Sequence[float]) -> bool:
    """Say whether a share that was known is not a number now."""
    return any(math.isnan(new) > math.isnan(old) for old, new in zip(before, now, strict=True))


class Gpm:
    """Source of the duty `counters`: groups for each GPU, and for each MIG instance."""

    name = "gpm"

    def __init__(self) -> None:
        self.findings = Findings()

    def open(self, context: Context) -> Opened:
        """Find the GPUs and their MIG instances.

        Raises SourceUnavailable if there is no driver or no GPU, SourceUnsupported if none has GPM.
        """
        self._roster = Roster(self.findings, tells=False)
        self._roster.open(context)
        self._layout = Layout(self._roster)
        self._layout.look(monotonic_ns())
        self._supports: dict[Gpu, bool] = {}
        self._meters: dict[tuple[Gpu, Instance | None, Kind], Meter] = {}
        opened = self._opened()
        if self._supports and not any(self._supports.values()):
            self.close()
            raise SourceUnsupported("gpm: no GPU here has it: it came with Hopper")
        return opened

    def housekeep(self, now_ns: int) -> Opened | None:
        """See to lost and new GPUs, and to changed MIG instances.

        Raises SourceUnavailable when the driver was unloaded or replaced.
        """
        came = self._roster.upkeep(now_ns, self._answers)
        return self._opened() if self._layout.look(now_ns) or came else None

    def close(self) -> None:
        """Let go of the driver."""
        self._roster.close()

    def _answers(self, gpu: Gpu) -> bool:
        """Ask whether a GPU has GPM; False if it does not answer."""
        self._roster.words[page.READING] = gpu.index
        try:
            support = pynvml.nvmlGpmQueryDeviceSupport(gpu.handle)
            self._supports[gpu] = bool(support.isSupportedDevice)
        except pynvml.NVMLError as error:
            self._supports[gpu] = False
            if error.value not in nvml.ABSENT:
                self._roster.failed(gpu, "nvmlGpmQueryDeviceSupport", error.value)
            return error.value not in nvml.GONE
        finally:
            self._roster.words[page.READING] = page.NOT_READING
        return True

    def _opened(self) -> Opened:
        """Return what there is now; meters of what was there before go on."""
        before, self._meters = self._meters, {}
        for gpu in self._roster.gpus:
            if gpu.handle is not None and gpu not in self._supports:
                self._answers(gpu)
            if self._supports.get(gpu):
                for key in product([gpu], [None, *self._layout.of(gpu)], KINDS):
                    meter = before.pop(key, None)
                    self._meters[key] = meter or Meter(self._roster, self._layout, *key)
        for meter in before.values():
            meter.free()
        entities = len(self._meters) // len(KINDS)
        groups = []
        for order, meter in enumerate(self._meters.values()):
            period_ns = max(meter.kind.period_ns, meter.kind.each_ns * entities)
            phase_ns = order * STAGGER_NS % min(period_ns, SECOND_NS)
            groups.append(Group(meter.name, meter.columns, period_ns, meter.read, phase_ns))
        infos = [instance.info for instance in self._layout.devices]
        return Opened(tuple(groups), (*self._roster.infos(), *infos))

"""MIG: whether it is on, and the instances with the memory of each."""

from collections.abc import Callable, Sequence

import pynvml

from gpuwatch import nvml
from gpuwatch import pulse as page
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.mig import CHANGED, Instance, Layout
from gpuwatch.mig_signals import INSTANCE_MEMORY_SIGNALS, MIG_ENABLED
from gpuwatch.roster import Gpu, Roster
from gpuwatch.signals import UNKNOWN_GAUGE, Column
from gpuwatch.source import Context, Findings, Group, Opened

MODE_PERIOD_NS = 5 * SECOND_NS
MEMORY_PERIOD_NS = SECOND_NS
STAGGER_NS = 13 * MILLISECOND_NS
SETTINGS = ("current", "pending")
UNKNOWN_MODES = (UNKNOWN_GAUGE,) * len(SETTINGS)
UNKNOWN_MEMORY = (UNKNOWN_GAUGE,) * len(INSTANCE_MEMORY_SIGNALS)


class Mig:
    """Source of the duty `counters`: a group for each GPU's mode and each instance's memory."""

    name = "mig"

    def __init__(self) -> None:
        self.findings = Findings()
        self._roster = Roster(self.findings, tells=False)
        self._layout = Layout(self._roster)

    def open(self, context: Context) -> Opened:
        """Find the GPUs and their MIG instances.

        Raises SourceUnavailable if there is no driver or no GPU.
        """
        self._roster.open(context)
        self._layout.look(monotonic_ns())
        return self._opened()

    def housekeep(self, now_ns: int) -> Opened | None:
        """See to lost and new GPUs, and to changed instances.

        Raises SourceUnavailable when the driver was unloaded or replaced.
        """
        came = self._roster.upkeep(now_ns, self._answers)
        return self._opened() if self._layout.look(now_ns) or came else None

    def close(self) -> None:
        """Let go of the driver."""
        self._roster.close()

    def _answers(self, gpu: Gpu) -> bool:
        try:
            pynvml.nvmlDeviceGetMigMode(gpu.handle)
        except pynvml.NVMLError as error:
            return error.value not in nvml.GONE
        return True

    def _opened(self) -> Opened:
        modes = [
            Group(
                f"mig{gpu.index}",
                tuple(Column(gpu.entity, MIG_ENABLED, setting) for setting in SETTINGS),
                MODE_PERIOD_NS,
                self._mode_reader(gpu),
                phase_ns=gpu.index * STAGGER_NS % SECOND_NS,
            )
            for gpu in self._roster.gpus
        ]
        memories = [
            Group(
                f"mig{instance.gpu.index}-{instance.number}",
                tuple(Column(instance.entity, signal) for signal in INSTANCE_MEMORY_SIGNALS),
                MEMORY_PERIOD_NS,
                self._memory_reader(instance),
                phase_ns=order * STAGGER_NS % SECOND_NS,
            )
            for order, instance in enumerate(self._layout.devices)
        ]
        infos = [instance.info for instance in self._layout.devices]
        return Opened((*modes, *memories), (*self._roster.infos(), *infos))

    def _mode_reader(self, gpu: Gpu) -> Callable[[], Sequence[float]]:
        def read() -> Sequence[float]:
            if gpu.handle is None:
                return UNKNOWN_MODES
            self._roster.words[page.READING] = gpu.index
            try:
                current, pending = pynvml.nvmlDeviceGetMigMode(gpu.handle)
                return current, pending
            except pynvml.NVMLError as error:
                if error.value not in nvml.ABSENT:
                    self._roster.failed(gpu, "nvmlDeviceGetMigMode", error.value)
                return UNKNOWN_MODES
            finally:
                self._roster.words[page.READING] = page.NOT_READING

        return read

    def _memory_reader(self, instance: Instance) -> Callable[[], Sequence[float]]:
        gpu = instance.gpu

        def read() -> Sequence[float]:
            if gpu.handle is None:
                return UNKNOWN_MEMORY
            self._roster.words[page.READING] = gpu.index
            try:
                device = self._layout.devices[instance]
                memory = pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2)
                return memory.used, memory.free, memory.total
            except pynvml.NVMLError as error:
                self._roster.failed(gpu, "nvmlDeviceGetMemoryInfo", error.value)
                if error.value in CHANGED:
                    self._layout.doubt()
                return UNKNOWN_MEMORY
            finally:
                self._roster.words[page.READING] = page.NOT_READING

        return read

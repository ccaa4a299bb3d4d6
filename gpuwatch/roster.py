"""The roster: the GPUs of this host as one source sees them through NVML.

Found on the PCI bus, opened by address, given up when lost, tried again, and looked for anew when
the bus changes. An entity keeps its place for the life of the process.
"""

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from gpuwatch import nvml
from gpuwatch import pulse as page
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.errors import SourceUnavailable
from gpuwatch.signals import Column, Entity, Event
from gpuwatch.source import Context, EntityInfo, Findings
from gpuwatch.topology import numa_node, own_gpus

LOST_RETRY_NS = 5 * SECOND_NS
STRANGE_AFTER = 3  # tries at a GPU that was plugged in: a library may know only what was there


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU of the PCI list; `handle` is None while it cannot be used."""

    index: int
    bus_id: str
    excluded: bool
    handle: Any = None
    labels: dict[str, str] = field(default_factory=dict)
    constants: list[tuple[Column, float]] = field(default_factory=list)
    retry_ns: int = 0
    plugged: bool = False  # while the process ran
    tries: int = 0

    @property
    def entity(self) -> Entity:
        """The GPU by its PCI address; the daemon knows its number."""
        return Entity("gpu", self.bus_id)


class Roster:
    """`gpus` in the order of the bus; those plugged in later follow.

    `tells`: whether this source tells the events of GPUs and knows their identity; one of a host
    is enough.
    """

    def __init__(self, findings: Findings, *, tells: bool) -> None:
        self.gpus: list[Gpu] = []
        self._findings = findings
        self._tells = tells
        self._bus: set[str] = set()
        self._gone: dict[Gpu, int] = {}
        self._fatal = ""

    def open(self, context: Context) -> None:
        """Load the library and attach the GPUs of the PCI bus.

        Raises SourceUnavailable if there is no driver, no GPU, or library and driver differ.
        """
        self._context = context
        self.words = context.pulse.words
        try:
            # This touches no GPU; each is attached when its handle is asked for, so a sick one
            # spoils nothing for the others. With NO_ATTACH no handle is ever found (H200, 580).
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
            bus_ids = own_gpus(context.sysfs) or list(context.known) or nvml.bus_ids()
        except pynvml.NVMLError as error:
            raise SourceUnavailable(nvml.advice(error.value)) from error
        self._bus = self._devices()
        bus_ids = [bus_id for bus_id in bus_ids if context.only in (None, bus_id)]
        if not bus_ids:
            raise SourceUnavailable("nvml: no NVIDIA GPU on this host: nothing to sample")
        self._add(bus_ids, plugged=False)
        for gpu in self.gpus:
            if not gpu.excluded:
                self.attach(gpu)
        self.words[page.READING] = page.NOT_READING

    def close(self) -> None:
        """Let go of the driver."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def attach(self, gpu: Gpu) -> bool:
        """Get the GPU's handle and identity; False if it does not answer."""
        self.words[page.READING] = gpu.index
        try:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(gpu.bus_id)
            with contextlib.suppress(UnicodeDecodeError):
                gpu.labels["uuid"] = pynvml.nvmlDeviceGetUUID(handle)
        except pynvml.NVMLError as error:
            self._findings.errors[f"attach {nvml.reason(error.value)}"] += 1
            if not gpu.retry_ns:
                self.tell(gpu, "gpu_unreachable", nvml.reason(error.value))
            gpu.retry_ns = monotonic_ns() + LOST_RETRY_NS
            gpu.tries += 1
            if gpu.plugged and gpu.tries == STRANGE_AFTER:
                raise SourceUnavailable(
                    f"nvml: {gpu.bus_id} was plugged in: starting anew"
                ) from error
            return False
        gpu.handle = handle
        if self._tells:
            self._identify(gpu)
        return True

    def failed(self, gpu: Gpu, call: str, result: int) -> None:
        """Count a call that failed; what it says of GPU and driver is for the next upkeep."""
        self._findings.errors[f"{call} {nvml.reason(result)}"] += 1
        if result in nvml.DRIVER_GONE:
            self._fatal = nvml.advice(result)
        elif result in nvml.GONE:
            self._gone[gpu] = result

    def upkeep(self, now_ns: int, answers: Callable[[Gpu], bool]) -> bool:
        """Give up on GPUs that are gone, try lost ones again, take up new ones.

        Says whether one is back or new. `answers` is that of `look_again`. Raises
        SourceUnavailable if only a new process can go on.
        """
        if self._fatal:
            raise SourceUnavailable(self._fatal)
        gone, self._gone = self._gone, {}
        for gpu, result in gone.items():
            self.lose(gpu, nvml.reason(result), now_ns)
        returned = self.look_again(now_ns, answers)
        return self.plugged() or returned

    def lose(self, gpu: Gpu, reason: str, now_ns: int) -> None:
        """Give up on a GPU; it is tried again some seconds later."""
        gpu.handle = None
        gpu.retry_ns = now_ns + LOST_RETRY_NS
        self.tell(gpu, "gpu_lost", reason)

    def look_again(self, now_ns: int, answers: Callable[[Gpu], bool]) -> bool:
        """Try lost GPUs whose time has come; say whether one is back.

        `answers` reads from it: some give a handle to one that is still lost. Raises
        SourceUnavailable if only a new process can open a GPU that was plugged in.
        """
        returned = False
        for gpu in self.gpus:
            if gpu.handle is None and not gpu.excluded and now_ns >= gpu.retry_ns:
                if self.attach(gpu) and answers(gpu):
                    self.tell(gpu, "gpu_returned", "")
                    returned = True
                elif gpu.handle is not None:
                    gpu.handle = None
                    gpu.retry_ns = monotonic_ns() + LOST_RETRY_NS
                self.words[page.READING] = page.NOT_READING
        return returned

    def plugged(self) -> bool:
        """Take up GPUs that are new on the bus; say whether there are any."""
        devices = self._devices()
        if devices == self._bus or self._context.only is not None:
            return False
        self._bus = devices
        known = {gpu.bus_id for gpu in self.gpus}
        new = [bus_id for bus_id in own_gpus(self._context.sysfs) if bus_id not in known]
        self._add(new, plugged=True)
        for gpu in self.gpus[len(known) :]:
            self.tell(gpu, "gpu_plugged", "")
            self.attach(gpu)
        self.words[page.READING] = page.NOT_READING
        return bool(new)

    def infos(self) -> tuple[EntityInfo, ...]:
        """Return what is known of each GPU."""
        return tuple(
            EntityInfo(gpu.entity, {key: text for key, text in gpu.labels.items() if text})
            for gpu in self.gpus
        )

    def tell(self, gpu: Gpu, name: str, detail: str) -> None:
        """Note an event of a GPU."""
        if self._tells:
            self._findings.events.append(Event(monotonic_ns(), gpu.entity, name, detail))

    def _devices(self) -> set[str]:
        try:
            return set(os.listdir(self._context.sysfs / "bus/pci/devices"))  # noqa: PTH208 - names
        except OSError:
            return set()

    def _add(self, bus_ids: list[str], *, plugged: bool) -> None:
        for bus_id in bus_ids:
            gpu = Gpu(len(self.gpus), bus_id, bus_id in self._context.excluded, plugged=plugged)
            gpu.labels = {"pci_bus_id": bus_id, "numa": numa_node(self._context.sysfs, bus_id)}
            self.gpus.append(gpu)
        self._context.pulse.set_names([gpu.bus_id for gpu in self.gpus])

    def _identify(self, gpu: Gpu) -> None:
        for label, query in nvml.IDENTITY:
            # What a GPU has not is not listed, nor is what it spells in no known characters.
            with contextlib.suppress(pynvml.NVMLError, UnicodeDecodeError):
                gpu.labels[label] = str(query(gpu.handle))
        gpu.constants.clear()
        for signal, label, query in nvml.CONSTANTS:
            with contextlib.suppress(pynvml.NVMLError):
                value = query(gpu.handle)
                low, high = signal.bounds or (-math.inf, math.inf)
                if low <= value <= high:
                    gpu.constants.append((Column(gpu.entity, signal, label), value))

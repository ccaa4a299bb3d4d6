"""Xid errors as NVML tells them: what is left where the kernel log cannot be read.

NVML tells the code and the MIG instance, no process and no text, and not every code, so the daemon
takes what the kernel log tells where there is one, and counts nothing twice.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import pynvml

from gpuwatch import nvml
from gpuwatch import pulse as page
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.kernel_log import XID_BY_NVML, Found, of_xid
from gpuwatch.roster import Gpu, Roster
from gpuwatch.signals import Event
from gpuwatch.source import Findings
from gpuwatch.xid import Entry, Xid

WHOLE_GPU = 0xFFFFFFFF  # in the place of an instance (nvmlEventData_t of nvml.h)
EVENTS_A_LOOK = 100  # the rest waits for the next look: a storm must not hold up other reads
RETRY_NS = 60 * SECOND_NS

T = TypeVar("T")


class XidEvents:
    """Listens on a set of events for each GPU of the roster, while it can be used."""

    def __init__(self, roster: Roster, findings: Findings, catalogue: Mapping[int, Entry]) -> None:
        self._roster = roster
        self._catalogue = catalogue
        self._findings = findings
        self._sets: dict[Gpu, tuple[object, object]] = {}  # the handle it is for, and the set
        self._retry_ns: dict[Gpu, int] = {}

    def look(self) -> None:
        """Take what has come, without waiting; alike ones of a look are told as one event."""
        for gpu in self._roster.gpus:
            if gpu in self._sets and self._sets[gpu][0] is not gpu.handle:
                self._free(gpu)  # it was lost, or is back as another one
            if gpu.handle is None:
                self._retry_ns.pop(gpu, None)
                continue
            self._roster.words[page.READING] = gpu.index
            if gpu in self._sets or self._listen(gpu):
                self._take(gpu)
        self._roster.words[page.READING] = page.NOT_READING

    def hears(self, gpu: Gpu) -> bool:
        """Say whether the GPU's Xids are heard."""
        return gpu in self._sets

    def _listen(self, gpu: Gpu) -> bool:
        now = monotonic_ns()
        if now < self._retry_ns.get(gpu, 0):
            return False
        events = self._call(gpu, "nvmlEventSetCreate", pynvml.nvmlEventSetCreate)
        if events is None:
            return False
        self._sets[gpu] = (gpu.handle, events)

        def register() -> bool:
            kinds = pynvml.nvmlEventTypeXidCriticalError
            pynvml.nvmlDeviceRegisterEvents(gpu.handle, kinds, events)
            return True

        if self._call(gpu, "nvmlDeviceRegisterEvents", register) is None:
            self._free(gpu)
            return False
        return True

    def _take(self, gpu: Gpu) -> None:
        found: Counter[Found] = Counter()
        _, events = self._sets[gpu]
        for _ in range(EVENTS_A_LOOK):
            data = self._call(
                gpu, "nvmlEventSetWait_v2", lambda: pynvml.nvmlEventSetWait_v2(events, 0)
            )
            if data is None:
                break
            if data.eventType == pynvml.nvmlEventTypeXidCriticalError:
                error = Xid(
                    code=int(data.eventData),
                    address=gpu.bus_id,
                    gpu_instance=_part(data.gpuInstanceId),
                    compute_instance=_part(data.computeInstanceId),
                    pid=None,
                    cause=None,
                    text="Told by NVML",
                )
                found[of_xid(error, self._catalogue)] += 1
        now = monotonic_ns()
        self._findings.events += [
            Event(now, gpu.entity, XID_BY_NVML, one.detail(times)) for one, times in found.items()
        ]

    def _call(self, gpu: Gpu, name: str, call: Callable[[], T]) -> T | None:
        """Return what a call answers, None if it fails or nothing has come."""
        try:
            return call()
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            self._retry_ns[gpu] = monotonic_ns() + RETRY_NS
            if error.value not in nvml.ABSENT:
                self._roster.failed(gpu, name, error.value)
            return None

    def _free(self, gpu: Gpu) -> None:
        _, events = self._sets.pop(gpu)
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlEventSetFree(events)


def _part(number: int) -> int | None:
    """Return the number of a MIG instance, None for the whole GPU."""
    return None if number == WHOLE_GPU else number

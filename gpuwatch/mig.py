"""MIG: the instances that GPUs are divided into.

NVML lists MIG devices, one for each compute instance; memory and activity belong to the GPU
instance around it. Listing them takes no administrator, other than nvmlDeviceGetGpuInstances.
When the layout is changed, numbers are given again and old handles answer INVALID_ARGUMENT or
NOT_FOUND, or nothing tells: so the layout is looked at again every few seconds.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml

from gpuwatch import pulse as page
from gpuwatch.clock import SECOND_NS
from gpuwatch.nvml import ABSENT
from gpuwatch.roster import Gpu, Roster
from gpuwatch.signals import Entity
from gpuwatch.source import EntityInfo

LOOK_NS = 5 * SECOND_NS
CHANGED = frozenset({pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_FOUND})
# "NVIDIA H200 MIG 1c.3g.71gb" is a compute instance of one slice in a GPU instance 3g.71gb.
PROFILE = re.compile(r"MIG (?:\d+c\.)?(\S+)$")


@dataclass(frozen=True, slots=True)
class Instance:
    """A GPU instance, as it was when its number was given."""

    gpu: Gpu
    number: int
    labels: Mapping[str, str] = field(hash=False)

    @property
    def entity(self) -> Entity:
        """The instance by its GPU's PCI address and its number there."""
        return Entity("gpu_instance", f"{self.gpu.bus_id}/{self.number}")

    @property
    def info(self) -> EntityInfo:
        """What is known of it."""
        return EntityInfo(self.entity, self.labels)


class Layout:
    """The instances of a roster's GPUs, as they were when last looked at.

    `parts` has for each the handles of the MIG devices in it, `devices` the first of them.
    """

    def __init__(self, roster: Roster) -> None:
        self.parts: dict[Instance, list[Any]] = {}
        self._roster = roster
        self._next_ns = 0

    @property
    def devices(self) -> dict[Instance, Any]:
        """A handle in each instance."""
        return {instance: parts[0] for instance, parts in self.parts.items()}

    def doubt(self) -> None:
        """Look at the next occasion: an instance does not answer as it did."""
        self._next_ns = 0

    def look(self, now_ns: int) -> bool:
        """Look if it is time to; say whether there are other instances now."""
        if now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + LOOK_NS
        before, self.parts = self.parts, {}
        for gpu in self._roster.gpus:
            self.parts.update(self._look_at(gpu, before))
        return self.parts.keys() != before.keys()

    def of(self, gpu: Gpu) -> list[Instance]:
        """Return the instances of a GPU."""
        return [instance for instance in self.parts if instance.gpu is gpu]

    def _look_at(
        self, gpu: Gpu, before: Mapping[Instance, list[Any]]
    ) -> Mapping[Instance, list[Any]]:
        if gpu.handle is None:
            return {}
        self._roster.words[page.READING] = gpu.index
        try:
            return _instances(gpu)
        except pynvml.NVMLError as error:
            if error.value in ABSENT:
                return {}
            self._roster.failed(gpu, "MIG layout", error.value)
            return {instance: parts for instance, parts in before.items() if instance.gpu is gpu}
        finally:
            self._roster.words[page.READING] = page.NOT_READING


def _instances(gpu: Gpu) -> dict[Instance, list[Any]]:
    """Return what NVML lists now, in order of number; raises NVMLError."""
    devices: dict[int, list[Any]] = {}
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)):  # 0 if MIG is off
        try:
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, index)
            devices.setdefault(pynvml.nvmlDeviceGetGpuInstanceId(device), []).append(device)
        except pynvml.NVMLError as error:
            if error.value not in CHANGED:  # else a place with no device, or no longer
                raise
    return {
        Instance(gpu, number, _labels(parts)): parts for number, parts in sorted(devices.items())
    }


def _labels(devices: list[Any]) -> dict[str, str]:
    """Return what is known of the instance that these devices are in.

    A uuid is that of one device, so an instance of several has none.
    """
    labels = {}
    with contextlib.suppress(pynvml.NVMLError, UnicodeDecodeError):
        if found := PROFILE.search(pynvml.nvmlDeviceGetName(devices[0])):
            labels["profile"] = found[1]
    with contextlib.suppress(pynvml.NVMLError):
        attributes = pynvml.nvmlDeviceGetAttributes_v2(devices[0])
        labels["slices"] = str(attributes.gpuInstanceSliceCount)
    with contextlib.suppress(pynvml.NVMLError, UnicodeDecodeError):
        if len(devices) == 1:
            labels["uuid"] = pynvml.nvmlDeviceGetUUID(devices[0])
    return labels

"""What a GPU is made for and set to: limits, which are constants, and modes, which are labels.

An administrator may change some of them while gpuwatch runs, so they are looked at again.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml

from gpuwatch import nvml
from gpuwatch import pulse as page
from gpuwatch.gpu_health_signals import PCIE_GENERATION_LIMIT, PCIE_WIDTH_LIMIT
from gpuwatch.gpu_signals import CLOCK_LIMIT, POWER_LIMIT, THRESHOLD
from gpuwatch.pcie_counter import link_bytes_per_second
from gpuwatch.pm_signals import DRAM_LIMIT, NVLINK_LIMIT
from gpuwatch.reading import plausible
from gpuwatch.roster import Gpu, Roster
from gpuwatch.signals import Column, Signal
from gpuwatch.topology import own_link, slot_link

THRESHOLDS = ("shutdown", "slowdown", "memory_max", "core_max")  # nvmlTemperatureThresholds_t
# nvmlComputeMode_t and nvmlEnableState_t.
COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
NEITHER = (-1, -1)
LINK_SPEEDS = [  # megabytes per second of each link
    (pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
]
SWITCH = {0: "off", 1: "on"}


class Limits:
    """The limits and modes of one GPU as of the last look, which puts them into the roster.

    `bytes_per_second` is the most that the GPU's PCIe link can carry in one direction.
    """

    def __init__(self, roster: Roster, gpu: Gpu, sysfs: Path) -> None:
        self._roster = roster
        self._gpu = gpu
        self._sysfs = sysfs
        self.bytes_per_second = link_bytes_per_second(None, None)
        self.looked_ns = 0

    def look(self, now_ns: int) -> bool:
        """Ask for all of them; False if the GPU does not answer."""
        gpu = self._gpu
        self.looked_ns = now_ns
        self._gone = False
        self._roster.words[page.READING] = gpu.index
        constants = list(self._limits())
        modes = dict(self._modes())
        self._roster.words[page.READING] = page.NOT_READING
        if self._gone:
            return False
        gpu.constants[:] = [
            (Column(gpu.entity, signal, label), value)
            for signal, label, value in constants
            if value is not None and plausible(signal, value)
        ]
        gpu.labels.update(modes)
        return True

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return what a function answers, None if it fails or there is no such thing."""
        if self._gone:
            return None
        try:
            return getattr(pynvml, function)(self._gpu.handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value not in nvml.ABSENT:
                self._roster.failed(self._gpu, function, error.value)
            self._gone = error.value in nvml.GONE
            return None

    def _limits(self) -> Iterator[tuple[Signal, str, float | None]]:
        yield from self._power_limits()
        video = self._ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_VIDEO)
        yield CLOCK_LIMIT, "video", _scaled(video, 1e6)
        yield DRAM_LIMIT, "", self._dram_limit()
        yield NVLINK_LIMIT, "", self._nvlink_limit()
        for which, name in enumerate(THRESHOLDS):
            yield THRESHOLD, name, self._ask("nvmlDeviceGetTemperatureThreshold", which)
        yield from self._pcie_limits()

    def _power_limits(self) -> Iterator[tuple[Signal, str, float | None]]:
        low, high = self._ask("nvmlDeviceGetPowerManagementLimitConstraints") or NEITHER
        for name, milliwatts in (
            ("enforced", self._ask("nvmlDeviceGetEnforcedPowerLimit")),
            ("requested", self._ask("nvmlDeviceGetPowerManagementLimit")),
            ("default", self._ask("nvmlDeviceGetPowerManagementDefaultLimit")),
            ("min", low),
            ("max", high),
        ):
            yield POWER_LIMIT, name, _scaled(milliwatts, 1e-3)

    def _dram_limit(self) -> float | None:
        """Return what memory moves at its highest clock: twice a cycle, over its whole width.

        Source: bandwidthTest and deviceQuery of NVIDIA's cuda-samples, which reckon so.
        """
        megahertz = self._ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM)
        bits = self._ask("nvmlDeviceGetMemoryBusWidth")
        return megahertz * 1e6 * 2 * bits / 8 if megahertz and bits else None

    def _nvlink_limit(self) -> float | None:
        """Return what all NVLinks of the GPU move in one direction; None without any that is up."""
        total = 0.0
        for answer in self._ask("nvmlDeviceGetFieldValues", LINK_SPEEDS) or ():
            with suppress(pynvml.NVMLError):
                total += nvml.field(answer)
        return total * 1e6 or None

    def _pcie_limits(self) -> Iterator[tuple[Signal, str, float | None]]:
        """Find the lower of GPU and slot, but never less than the link is seen to do.

        What a virtual machine shows for a slot may be made up.
        """
        own = own_link(self._sysfs, self._gpu.bus_id)
        slot = slot_link(self._sysfs, self._gpu.bus_id)
        ask = self._ask
        generation = ask("nvmlDeviceGetGpuMaxPcieLinkGeneration") or own.generation
        lanes = own.lanes or ask("nvmlDeviceGetMaxPcieLinkWidth")
        self.bytes_per_second = link_bytes_per_second(generation, lanes)
        yield (
            PCIE_GENERATION_LIMIT,
            "",
            _lower(
                ask("nvmlDeviceGetCurrPcieLinkGeneration"),
                *(generation, ask("nvmlDeviceGetMaxPcieLinkGeneration"), slot.generation),
            ),
        )
        yield (
            PCIE_WIDTH_LIMIT,
            "",
            _lower(
                ask("nvmlDeviceGetCurrPcieLinkWidth"),
                *(lanes, ask("nvmlDeviceGetMaxPcieLinkWidth"), slot.lanes),
            ),
        )

    def _modes(self) -> Iterator[tuple[str, str]]:
        """Yield each mode by name; "" stands for one that the GPU has not."""
        ecc = self._ask("nvmlDeviceGetEccMode") or NEITHER
        mig = self._ask("nvmlDeviceGetMigMode") or NEITHER
        for label, words, number in (
            ("compute_mode", COMPUTE_MODES, self._ask("nvmlDeviceGetComputeMode")),
            ("ecc_mode", SWITCH, ecc[0]),
            ("ecc_mode_pending", SWITCH, ecc[1]),
            ("mig_mode", SWITCH, mig[0]),
            ("mig_mode_pending", SWITCH, mig[1]),
            ("persistence_mode", SWITCH, self._ask("nvmlDeviceGetPersistenceMode")),
        ):
            yield label, words.get(-1 if number is None else number, "")


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _lower(now: int | None, *limits: int | None) -> int | None:
    """Return the lowest limit that is known, at least what is seen now."""
    known = [limit for limit in limits if limit]
    return max(min(known), now or 0) if known else None

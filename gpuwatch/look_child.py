"""The child that looks at GPUs for a canary: who uses them, how fast they are clocked.

`python -m gpuwatch.look_child` gets {"sysfs", "numbers", "gpus", "period_seconds"} on standard
input and writes lines of JSON: {"opening"} before a GPU is touched; {"gpus", "here"}, what the
wanted GPUs are; then {"time_ns", "seen"} at every look, until nobody reads any more. A driver call
that hangs does so here, and nowhere else.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from gpuwatch import nvml
from gpuwatch.clock import monotonic_ns
from gpuwatch.gpu_limits import COMPUTE_MODES, SWITCH
from gpuwatch.gpu_readings import memory, process_ids
from gpuwatch.gpu_signals import REASONS
from gpuwatch.topology import numa_node, own_gpus

Answer = TypeVar("Answer")
EVERY = 10  # looks, one is at what the driver must ask the GPU for
# What slows a GPU down and is neither its power limit nor somebody's wish.
HELD_BACK = sum(
    1 << bit
    for bit, name in REASONS
    if name.startswith("hw_") or name in ("sync_boost", "sw_thermal_slowdown")
)


def main() -> int:
    """Look until nobody reads; 0 also without a driver, which is told."""
    settings = json.load(sys.stdin.buffer)
    try:
        handles = _open(settings)
        slow: dict[str, dict[str, Any]] = {}
        for number in itertools.count():
            if number % EVERY == 0:
                slow = {name: _slow_look(handle) for name, handle in handles.items()}
            seen = {name: _look(handle) | slow[name] for name, handle in handles.items()}
            _say({"time_ns": monotonic_ns(), "seen": seen})
            time.sleep(settings["period_seconds"])
    except pynvml.NVMLError as error:
        _say({"fault": nvml.advice(error.value)})
    except BrokenPipeError:
        pass  # nobody reads any more
    return 0


def _say(message: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _open(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tell what the wanted GPUs are; return their handles by number."""
    pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    sysfs, wanted = Path(settings["sysfs"]), settings["gpus"]
    numbers = dict(settings["numbers"])
    here = own_gpus(sysfs) or nvml.bus_ids()
    for bus_id in here:
        numbers.setdefault(bus_id, max(numbers.values(), default=-1) + 1)
    told, handles = [], {}
    for number, bus_id in sorted((numbers[bus_id], bus_id) for bus_id in here):
        if wanted and number not in wanted:
            continue
        _say({"opening": number})
        about: dict[str, Any] = {"gpu": number, "pci_bus_id": bus_id}
        try:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
            about |= _identity(handle) | {"numa": numa_node(sysfs, bus_id)}
            handles[str(number)] = handle
        except pynvml.NVMLError as error:
            about["fault"] = nvml.reason(error.value)
        told.append(about)
    _say({"gpus": told, "here": sorted(numbers[bus_id] for bus_id in here)})
    return handles


def _identity(gpu: Any) -> dict[str, Any]:
    """Return what a GPU is, and what its speed depends on; what it does not tell is left out."""
    ecc = ask(lambda: SWITCH.get(pynvml.nvmlDeviceGetEccMode(gpu)[0]))
    limit = ask(lambda: f"{pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3:g}")
    found = {
        "uuid": pynvml.nvmlDeviceGetUUID(gpu),
        "name": ask(lambda: pynvml.nvmlDeviceGetName(gpu)),
        "driver": ask(pynvml.nvmlSystemGetDriverVersion),
        "vbios": ask(lambda: pynvml.nvmlDeviceGetVbiosVersion(gpu)),
        "power_limit_watts": limit,
        "ecc": ecc,
        "locked_clocks": _application_clocks(gpu),
        "clock_limit_hertz": ask(
            lambda: pynvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.CLOCK_SM) * 1e6
        ),
    }
    return {name: value for name, value in found.items() if value is not None}


def _application_clocks(gpu: Any) -> str | None:
    """Return memory and graphics clock in MHz as somebody set them, None while they are default.

    What `nvidia-smi -lgc` locks cannot be read: NVML has no call for it. These calls are deprecated
    and will be gone with CUDA 14 (NVML reference, deprecated list).
    """
    kinds = (pynvml.NVML_CLOCK_MEM, pynvml.NVML_CLOCK_GRAPHICS)
    now = ask(lambda: [pynvml.nvmlDeviceGetApplicationsClock(gpu, kind) for kind in kinds])
    usual = ask(lambda: [pynvml.nvmlDeviceGetDefaultApplicationsClock(gpu, kind) for kind in kinds])
    return None if now is None or usual is None or now == usual else "/".join(map(str, now))


def first_look(gpu: Any) -> dict[str, Any]:
    """Return all that `busy.Seen` has."""
    return _look(gpu) | _slow_look(gpu)


def _slow_look(gpu: Any) -> dict[str, Any]:
    """Return what changes slowly or takes the GPU a moment; it is told until the next."""
    mode = ask(lambda: pynvml.nvmlDeviceGetComputeMode(gpu))
    return {
        "compute_mode": COMPUTE_MODES.get(-1 if mode is None else mode, ""),
        "mig": bool(ask(lambda: pynvml.nvmlDeviceGetMigMode(gpu)[0])),
        "utilization_ratio": ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
        "memory_used_bytes": ask(lambda: memory(gpu)[0]),
        "margin_celsius": ask(lambda: pynvml.nvmlDeviceGetMarginTemperature(gpu)),
        "pcie_generation": ask(lambda: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)),
        "pcie_lanes": ask(lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
    }


def _look(gpu: Any) -> dict[str, Any]:
    """Return what may change while a canary runs, of what the driver answers by itself."""
    watts = ask(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3)
    reasons = ask(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    kind = pynvml.NVML_TEMPERATURE_GPU
    return {
        "processes": ask(lambda: sorted(process_ids(gpu))),
        "clock_hertz": ask(lambda: pynvml.nvmlDeviceGetClockInfo(gpu, nvml.CLOCK_SM) * 1e6),
        "power_watts": watts,
        "temperature_celsius": ask(lambda: pynvml.nvmlDeviceGetTemperature(gpu, kind)),
        "throttled": None if reasons is None else bool(reasons & HELD_BACK),
        "reasons": reasons,
    }


def ask(call: Callable[[], Answer]) -> Answer | None:
    """Return what a call answers, None if it fails."""
    with contextlib.suppress(pynvml.NVMLError, UnicodeDecodeError):
        return call()
    return None


if __name__ == "__main__":
    sys.exit(main())

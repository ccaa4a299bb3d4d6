"""What each kind of NVML read costs its reader, and how often its value changes.

    python nvml_reads.py [--load] [--seconds 2]          a table of costs, idle or beside a load
    python nvml_reads.py --switch FILE                   read what the file names, until killed

With --switch it is the reader that `training_step.py --switch FILE` turns on and off: the file
holds a class and its rate, as `energy@10`, or nothing. Every class reads all GPUs of the host in
turn, spread over its period.
"""

import argparse
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml as nvml

ALL_LINKS = 0xFFFFFFFF
HERE = Path(__file__).parent

Read = Callable[[Any], Any]


def fields(*ids: int, scope: int = 0) -> Read:
    """Return a read of several fields in one call."""
    queries = [(number, scope) for number in ids]

    def read(gpu: Any) -> list[tuple[int, int, int]]:
        return [
            (answer.nvmlReturn, answer.valueType, answer.value.ullVal)
            for answer in nvml.nvmlDeviceGetFieldValues(gpu, queries)
        ]

    return read


class Gpm:
    """GPM as it should be read: structs made once, samples used in turn."""

    def __init__(self) -> None:
        self._samples: dict[int, list[Any]] = {}
        self._get = nvml.c_nvmlGpmMetricsGet_t()
        self._get.version = nvml.NVML_GPM_METRICS_GET_VERSION
        ids = (2, 5, 10)  # GRAPHICS_UTIL alone takes 1.4 ms
        self._get.numMetrics = len(ids)
        for index, number in enumerate(ids):
            self._get.metrics[index].metricId = number

    def sample(self, gpu: Any) -> None:
        key = ctypes.addressof(gpu.contents)
        if key not in self._samples:
            self._samples[key] = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        self._samples[key].reverse()
        nvml.nvmlGpmSampleGet(gpu, self._samples[key][1])

    def metrics(self, gpu: Any) -> list[float]:
        self._get.sample1, self._get.sample2 = self._samples[ctypes.addressof(gpu.contents)]
        result = nvml._nvmlGetFunctionPointer("nvmlGpmMetricsGet")(ctypes.byref(self._get))
        return [result, *(self._get.metrics[index].value for index in range(3))]


def power_points(gpu: Any) -> Any:
    return len(nvml.nvmlDeviceGetSamples(gpu, nvml.NVML_TOTAL_POWER_SAMPLES, 0)[1])


def link_states(gpu: Any) -> Any:
    return sum(nvml.nvmlDeviceGetNvLinkState(gpu, link) for link in range(18))


def processes(gpu: Any) -> Any:
    return len(nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu))


def fabric(gpu: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    return info.state, info.status, info.healthMask


def margin(gpu: Any) -> Any:
    return nvml.nvmlDeviceGetMarginTemperature(gpu)


GPM = Gpm()
SPACING = {"gpm": 0.11, "gpm_sample": 0.11}  # seconds between reads of a GPU; else 4 ms
CLASSES: dict[str, Read] = {
    "nvlink_bytes": fields(138, 139, scope=ALL_LINKS),
    "nvlink_errors": fields(160, 161, 162, 163),
    "pcie_bytes": fields(197, 198),
    "pcie_bytes_one": fields(197),
    "throttle_cached": fields(74, 76, 269),
    "throttle_rpc": fields(75, 270, 271),
    "energy": nvml.nvmlDeviceGetTotalEnergyConsumption,
    "energy_field": fields(83),
    "margin": margin,
    "pcie_replays": nvml.nvmlDeviceGetPcieReplayCounter,
    "pcie_link": lambda gpu: (
        nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    ),
    "power_points": power_points,
    "gpm": lambda gpu: (GPM.sample(gpu), GPM.metrics(gpu))[1],
    "gpm_sample": GPM.sample,
    "gpm_metrics": GPM.metrics,
    "memory": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2).used,
    "ecc": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, 0, 0),
    "ecc_lifetime": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 1),
    "remapped_rows": nvml.nvmlDeviceGetRemappedRows,
    "retired_pages": lambda gpu: list(nvml.nvmlDeviceGetRetiredPages(gpu, 0)),
    "recovery_action": fields(nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
    "link_states": link_states,
    "processes": processes,
    "graphics_processes": lambda gpu: len(nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(gpu)),
    "fabric": fabric,
    "thresholds": lambda gpu: [nvml.nvmlDeviceGetTemperatureThreshold(gpu, k) for k in range(4)],
    "power_limits": lambda gpu: (
        nvml.nvmlDeviceGetPowerManagementLimit(gpu),
        nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu),
        nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu),
    ),
    "max_clocks": lambda gpu: [nvml.nvmlDeviceGetMaxClockInfo(gpu, kind) for kind in range(4)],
    "mig_mode": nvml.nvmlDeviceGetMigMode,
    "compute_mode": nvml.nvmlDeviceGetComputeMode,
    "persistence": nvml.nvmlDeviceGetPersistenceMode,
    "ecc_mode": nvml.nvmlDeviceGetEccMode,
    "performance_state": nvml.nvmlDeviceGetPerformanceState,
    "video_clock": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, 3),
}


def gpus() -> list[Any]:
    nvml.nvmlInitWithFlags(nvml.NVML_INIT_FLAG_NO_GPUS)
    devices = Path("/sys/bus/pci/devices")
    found = []
    for device in sorted(devices.glob("*")):
        if (device / "vendor").read_text().strip() == "0x10de":
            try:
                found.append(nvml.nvmlDeviceGetHandleByPciBusId(device.name))
            except nvml.NVMLError:
                continue
    return found


def cost(
    read: Read, handles: list[Any], seconds: float, spacing: float
) -> tuple[list[float], Any, list[float]]:
    """Return each call's microseconds, the last answer, and seconds between changes of it."""
    times, changed, last, changes = [], 0.0, None, []
    answer: Any = None
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(times) < 400:
        for index, gpu in enumerate(handles):
            start = time.perf_counter()
            try:
                answer = read(gpu)
            except nvml.NVMLError as error:
                return [], str(error), []
            now = time.perf_counter()
            times.append((now - start) * 1e6)
            if index == 0 and str(answer) != last:
                if changed:
                    changes.append(now - changed)
                last, changed = str(answer), now
        time.sleep(spacing)
    return times, answer, changes


def table(handles: list[Any], seconds: float) -> None:
    print(f"{'class':20} {'p50 us':>9} {'p99 us':>9} {'change ms':>10}  answer")
    for name, read in CLASSES.items():
        times, answer, changes = cost(read, handles, seconds, SPACING.get(name, 0.004))
        if not times:
            print(f"{name:20} {answer}")
            continue
        times.sort()
        between = sorted(changes)[len(changes) // 2] * 1e3 if changes else float("nan")
        p99 = times[int(0.99 * (len(times) - 1))]
        print(
            f"{name:20} {times[len(times) // 2]:9.1f} {p99:9.1f} {between:10.1f}"
            f"  {str(answer)[:90]}"
        )
    sys.stdout.flush()


def switched(handles: list[Any], switch: Path) -> None:
    """Read the class that the file names at its rate, looking at the file every 5 ms."""
    turn = 0
    due = time.monotonic()
    while True:
        text = switch.read_text().strip()
        if not text:
            time.sleep(0.005)
            due = time.monotonic()
            continue
        name, rate = text.split("@")
        CLASSES[name](handles[turn % len(handles)])
        turn += 1
        due = max(due + 1 / float(rate) / len(handles), time.monotonic() - 0.1)
        while time.monotonic() < due and switch.read_text().strip() == text:
            time.sleep(max(0.0, min(0.005, due - time.monotonic())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--switch", type=Path)
    options = parser.parse_args()
    handles = gpus()
    if options.switch:
        switched(handles, options.switch)
        return 0
    job = None
    if options.load:
        seconds = str(options.seconds * len(CLASSES) + 30)
        job = subprocess.Popen([sys.executable, str(HERE / "load.py"), "--seconds", seconds])
        time.sleep(15)
    table(handles, options.seconds)
    if job:
        job.kill()
        job.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())

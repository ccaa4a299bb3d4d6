"""What is read of a GPU beside its cached state: which driver call fills which cells, how often.

Calls that the driver answers by itself take some microseconds; those that go to the GPU's firmware
take 0.1 to 3 ms (H200, driver 580), and the caller waits on a processor. Groups are cut so that a
read takes about 3 ms at most.
"""

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pynvml

from gpuwatch import gpu_health_signals as health
from gpuwatch import gpu_signals as signals
from gpuwatch import nvml
from gpuwatch.clock import SECOND_NS
from gpuwatch.reading import Call
from gpuwatch.signals import Signal

ALL_LINKS = 2**32 - 1  # as the scope of a field: the sum (H200, driver 580)
# What drivers answer of a link that a GPU does not have.
NO_LINK = nvml.ABSENT | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
# The driver's count of throttled time runs ahead and falls back by 0.1 s (H200, driver 580).
FALLS_BACK_NS = SECOND_NS

Cell = tuple[Signal, str]


class GroupOfCalls(NamedTuple):
    """Calls that are made together, once in a period; `calls` makes them, for one GPU."""

    name: str
    period_ns: int
    calls: Callable[[], Sequence[Call]]


def number(function: str, cell: Cell, *arguments: int, scale: float = 1) -> Call:
    """Return the call of a function that answers with one number."""

    def read(gpu: Any) -> Sequence[float]:
        return (getattr(pynvml, function)(gpu, *arguments) * scale,)

    return Call(function, (cell,), read)


def fields(cells: dict[int, Cell], scope: int = 0) -> Call:
    """Return the call that reads fields, by id, into a cell each; it fails if all of them do."""
    query = [(field_id, scope) for field_id in cells]

    def read(gpu: Any) -> Sequence[float | None]:
        answers = pynvml.nvmlDeviceGetFieldValues(gpu, query)
        values = [known(answer) for answer in answers]
        if values.count(None) == len(values):
            nvml.field(answers[0])
        return values

    name = ",".join(map(str, cells))
    return Call(f"nvmlDeviceGetFieldValues:{name}", tuple(cells.values()), read)


def known(answer: Any) -> float | None:
    """Return the number that the answer to a field query holds, None if it holds none."""
    with contextlib.suppress(pynvml.NVMLError):
        return nvml.field(answer)
    return None


def throttled(reasons: dict[int, str]) -> Call:
    """Return the call that reads the driver's counts of throttled time, by field."""
    call = fields({field: (signals.THROTTLE_SECONDS, reason) for field, reason in reasons.items()})
    highest = [0.0] * len(reasons)

    def read(gpu: Any) -> Sequence[float | None]:
        values = call.read(gpu)
        for place, value in enumerate(values):
            # One that falls back a little stays; one that falls far was reset.
            if value is not None and not 0 <= highest[place] - value <= FALLS_BACK_NS:
                highest[place] = value
        return [
            None if value is None else most for value, most in zip(values, highest, strict=True)
        ]

    return Call(call.name, call.cells, read)


def memory(gpu: Any) -> Sequence[float | None]:
    """Return memory used, free, reserved and in all; drivers before 510 do not tell reserved."""
    with contextlib.suppress(pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
        info = pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2)
        return info.used, info.free, info.reserved, info.total
    info = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    return info.used, info.free, None, info.total


def process_ids(gpu: Any) -> set[int]:
    """Return the processes of all lists: compute, graphics, MPS; one may be on several."""
    found = {one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    for function in (
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
        pynvml.nvmlDeviceGetMPSComputeRunningProcesses,
    ):
        with contextlib.suppress(pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
            found |= {one.pid for one in function(gpu)}
    return found


def processes(gpu: Any) -> Sequence[float]:
    """Return the number of processes."""
    return (len(process_ids(gpu)),)


def retired_pages(cause: int) -> Callable[[Any], Sequence[float]]:
    """Return the read of the number of pages that were retired for a cause."""
    return lambda gpu: (len(pynvml.nvmlDeviceGetRetiredPages_v2(gpu, cause)),)


def links_up(gpu: Any) -> Sequence[float]:
    """Return the number of NVLinks that are up; NVMLError if there are none at all."""
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(pynvml.nvmlDeviceGetNvLinkState(gpu, link))
        except pynvml.NVMLError as error:
            if error.value not in NO_LINK:
                raise
    if not states:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return (sum(states),)


def fabric(gpu: Any) -> Sequence[float]:
    """Return how far the GPU has joined the fabric."""
    info = pynvml.c_nvmlGpuFabricInfo_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(gpu, ctypes.byref(info))
    return (info.state,)


def cached() -> Sequence[Call]:
    """Return what the driver answers by itself."""
    ecc = "nvmlDeviceGetTotalEccErrors"
    return (
        throttled(
            {
                pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP: "sw_power_cap",
                pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST: "sync_boost",
                pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN: "sw_thermal_slowdown",
            }
        ),
        *(
            number(ecc, (signal, name), kind, lifetime)
            for lifetime, signal in enumerate((health.ECC_ERRORS, health.ECC_LIFETIME_ERRORS))
            for kind, name in enumerate(("corrected", "uncorrected"))
        ),
        Call(
            "nvmlDeviceGetRemappedRows",
            (
                (health.REMAPPED_ROWS, "corrected"),
                (health.REMAPPED_ROWS, "uncorrected"),
                (health.ROW_REMAP_PENDING, ""),
                (health.ROW_REMAP_FAILED, ""),
            ),
            pynvml.nvmlDeviceGetRemappedRows,
        ),
        Call(
            "nvmlDeviceGetMemoryInfo",
            tuple((signal, "") for signal in signals.MEMORY_SIGNALS),
            memory,
        ),
        Call("nvmlDeviceGetComputeRunningProcesses", ((signals.PROCESSES, ""),), processes),
        number(
            "nvmlDeviceGetClockInfo", (signals.CLOCK, "video"), pynvml.NVML_CLOCK_VIDEO, scale=1e6
        ),
        number("nvmlDeviceGetPerformanceState", (signals.PERFORMANCE_STATE, "")),
    )


def firmware() -> Sequence[Call]:
    """Return what the GPU's firmware must answer each second."""
    return (
        fields(
            {
                pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: (signals.NVLINK_RECEIVED, ""),
                pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: (signals.NVLINK_TRANSMITTED, ""),
            },
            ALL_LINKS,
        ),
        throttled(
            {
                pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN: "hw_thermal_slowdown",
                pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN: "hw_power_brake",
            }
        ),
    )


def slow() -> Sequence[Call]:
    """Return energy, which takes longest of all, and what seldom changes."""
    recovery = (health.RECOVERY_ACTION, "")
    return (
        number("nvmlDeviceGetTotalEnergyConsumption", (signals.ENERGY, "")),
        fields({pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: recovery}),
        *(
            Call(
                "nvmlDeviceGetRetiredPages_v2",
                ((health.RETIRED_PAGES, name),),
                retired_pages(cause),
            )
            for cause, name in enumerate(("single_bit", "double_bit"))
        ),
        number("nvmlDeviceGetRetiredPagesPendingStatus", (health.RETIRED_PAGES_PENDING, "")),
    )


def link() -> Sequence[Call]:
    """Return the state of the links to host and peers."""
    return (
        number("nvmlDeviceGetCurrPcieLinkGeneration", (health.PCIE_GENERATION, "")),
        number("nvmlDeviceGetCurrPcieLinkWidth", (health.PCIE_WIDTH, "")),
        number("nvmlDeviceGetPcieReplayCounter", (health.PCIE_REPLAYS, "")),
        Call("nvmlDeviceGetNvLinkState", ((health.NVLINKS_UP, ""),), links_up),
        Call("nvmlDeviceGetGpuFabricInfo", ((health.FABRIC_STATE, ""),), fabric),
    )


def link_errors() -> Sequence[Call]:
    """Return the errors of all NVLinks together."""
    errors = {
        pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY: "replay",
        pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY: "recovery",
        pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC: "crc",
    }
    cells = {field: (health.NVLINK_ERRORS, name) for field, name in errors.items()}
    return (fields(cells, ALL_LINKS),)


def margin() -> Sequence[Call]:
    """Return the distance to the temperature at which the GPU slows down."""
    return (number("nvmlDeviceGetMarginTemperature", (signals.MARGIN, "")),)


GROUPS = (
    GroupOfCalls("firmware", SECOND_NS, firmware),
    GroupOfCalls("cached", SECOND_NS, cached),
    GroupOfCalls("margin", 2 * SECOND_NS, margin),
    GroupOfCalls("slow", 5 * SECOND_NS, slow),
    GroupOfCalls("link", 10 * SECOND_NS, link),
    GroupOfCalls("link_errors", 10 * SECOND_NS, link_errors),
)

"""What every source that speaks NVML needs: its errors in words, and what a GPU is."""

import contextlib
from collections.abc import Callable
from typing import Any

import pynvml

from gpuwatch.gpu_signals import CLOCK_LIMIT
from gpuwatch.signals import Signal

CLOCK_SM, CLOCK_MEMORY = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
GONE = frozenset(
    {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_GPU_NOT_FOUND,
        pynvml.NVML_ERROR_RESET_REQUIRED,
    }
)
DRIVER_GONE = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
# What a GPU, a driver or its library answers of something that it does not have.
ABSENT = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
VALUE_MEMBERS = {  # of the union of values, by the type that is told with it
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}
# What stands for "no value" in counts: 32 bits all ones, and the numbers from 2^31 - 16 on with
# which DCGM and tools that follow it mark what is blank. Those of 64 bits are beyond the largest.
MARKERS = frozenset({2**32 - 1, *range(2**31 - 16, 2**31)})
LARGEST = 2**62
ERROR_NAMES = {
    value: name.removeprefix("NVML_ERROR_").lower()
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(value, int)
}

IDENTITY: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("name", pynvml.nvmlDeviceGetName),
    ("nvml_index", pynvml.nvmlDeviceGetIndex),
    ("minor", pynvml.nvmlDeviceGetMinorNumber),
    ("module_id", pynvml.nvmlDeviceGetModuleId),
    ("serial", pynvml.nvmlDeviceGetSerial),
    ("vbios", pynvml.nvmlDeviceGetVbiosVersion),
    ("driver", lambda _handle: pynvml.nvmlSystemGetDriverVersion()),
)
CONSTANTS: tuple[tuple[Signal, str, Callable[[Any], float]], ...] = (
    (CLOCK_LIMIT, "sm", lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, CLOCK_SM) * 1e6),
    (CLOCK_LIMIT, "memory", lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, CLOCK_MEMORY) * 1e6),
)


def bus_ids() -> list[str]:
    """Return addresses as NVML lists them: where a container hides the PCI bus."""
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        # A sick GPU that does not even tell its address must not hide the others.
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.append(kernel_address(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    return sorted(found)


def kernel_address(bus_id: Any) -> str:
    """Return a PCI address of NVML, whose domain has eight digits, as the kernel writes it."""
    domain, rest = str(bus_id).lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def number(union: Any, kind: int) -> float:
    """Return the number in a union of values, as one of this type; NVMLError if it is not known."""
    if kind not in VALUE_MEMBERS:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_DATA)
    value: float = getattr(union, VALUE_MEMBERS[kind])
    return value


def field(answer: Any) -> float:
    """Return the number that the answer to a field query holds; NVMLError if it holds none."""
    if answer.nvmlReturn:
        raise pynvml.NVMLError(answer.nvmlReturn)
    return number(answer.value, answer.valueType)


def count(answer: Any) -> int:
    """Return the count that the answer to a field query holds; NVMLError if it holds none."""
    value = field(answer)
    if not is_count(value):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_DATA)
    return int(value)


def is_count(value: float) -> bool:
    """Say whether a number can be a count, and is no marker for "no value"."""
    return 0 <= value < LARGEST and value == int(value) and value not in MARKERS


def reason(result: int) -> str:
    """Return the name of an NVML result, in small letters."""
    return str(ERROR_NAMES.get(result, f"error_{result}"))


def advice(result: int) -> str:
    """Return the line that tells a user why NVML does not work and what to do."""
    fix = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the NVIDIA driver",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the NVIDIA kernel module",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "library and kernel module are of different versions: reload the module or reboot"
        ),
        pynvml.NVML_ERROR_NO_PERMISSION: "allow this user to open /dev/nvidiactl",
    }.get(result, "see the kernel log")
    return f"nvml: {reason(result)}: {fix}"

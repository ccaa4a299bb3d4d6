"""A script in the line format that the library reads (described in script.c)."""

from __future__ import annotations

import re
import signal as signals
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from fake_nvml.functions import Function, resolve

STEP_KEYS = frozenset(
    ["t_ms", "fn", "dev", "arg", "ret", "signal", "val", "takes_ms", "times", "every_ms", "note"]
)
RATE_KEYS = frozenset({"start", "per_second", "wrap"})

# In the order of nvmlReturn_t, nvmlValueType_t and nvmlGpuVirtualizationMode_t.
_RETURNS = """
    SUCCESS UNINITIALIZED INVALID_ARGUMENT NOT_SUPPORTED NO_PERMISSION ALREADY_INITIALIZED NOT_FOUND
    INSUFFICIENT_SIZE INSUFFICIENT_POWER DRIVER_NOT_LOADED TIMEOUT IRQ_ISSUE LIBRARY_NOT_FOUND
    FUNCTION_NOT_FOUND CORRUPTED_INFOROM GPU_IS_LOST RESET_REQUIRED OPERATING_SYSTEM
    LIB_RM_VERSION_MISMATCH IN_USE MEMORY NO_DATA VGPU_ECC_NOT_SUPPORTED INSUFFICIENT_RESOURCES
    FREQ_NOT_SUPPORTED ARGUMENT_VERSION_MISMATCH DEPRECATED NOT_READY GPU_NOT_FOUND INVALID_STATE
    RESET_TYPE_NOT_SUPPORTED
"""
_VALUE_TYPES = "double uint ulong ulonglong slonglong int ushort"
_VIRTUALIZATION_MODES = "NONE PASSTHROUGH VGPU HOST_VGPU HOST_VSGA"


def _numbered(names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names.split())}


RETURNS = _numbered(_RETURNS) | {"UNKNOWN": 999, "crash": -1}
VALUE_TYPES = _numbered(_VALUE_TYPES)
VALUE_NAMES = {"nvmlDeviceGetVirtualizationMode": _numbered(_VIRTUALIZATION_MODES)}


def device_line(device: Mapping[str, Any]) -> str:
    """Put one device in a line."""
    line = f"device {device['uuid']} {device['pci']} {device['minor']} {device['name']}"
    if not re.fullmatch(r"device \S+ [0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f]+\.\d \d+ [ -~]+", line):
        raise ValueError(f"bad device: {dict(device)!r}")
    return line


def mig_line(mig: Mapping[str, Any], parent: Mapping[str, Any], place: int) -> str:
    """Put one MIG device, named after its profile, in a line; `place` is its parent's number."""
    name = f"{parent['name']} MIG {mig['slices']}g.{-(-mig['memory'] // 1024)}gb"
    return (
        f"mig {mig['uuid']} {place} {mig['gi']} {mig['ci']} {mig['slices']} {mig['memory']} {name}"
    )


def step_line(step: Mapping[str, Any], places: Mapping[Any, int]) -> str:
    """Put one step in a line; `places` has each device's number for the library."""
    if unknown := step.keys() - STEP_KEYS:
        raise ValueError(f"unknown keys {sorted(unknown)} in {dict(step)!r}")
    function, keys = resolve(step["fn"], step.get("arg"))
    dev = step.get("dev")
    if function.process_wide and dev is not None:
        raise ValueError(f"{function.name} is process-wide, it takes no dev")
    if dev not in (None, "all") and dev not in places:
        raise ValueError(f"there is no device {dev!r}")
    ret = RETURNS.get(step.get("ret", "SUCCESS"))
    if ret is None:
        raise ValueError(f"unknown return code {step['ret']!r}")
    signal = signals.Signals[step.get("signal", "SIGSEGV")] if ret == -1 else 0
    times, every_ms = step.get("times"), step.get("every_ms")
    if every_ms is not None and times is None:
        raise ValueError("every_ms says nothing without times")
    takes_ms = step.get("takes_ms", 0)
    if step["t_ms"] < 0 or (takes_ms < 0 and takes_ms != -1) or min(times or 0, every_ms or 0) < 0:
        raise ValueError(f"negative number in {dict(step)!r}")
    words = [
        "step",
        _ns(step["t_ms"]),
        ":".join([function.name, *keys]),
        "*" if dev in (None, "all") else places[dev],
        ret,
        int(signal),
        -1 if takes_ms == -1 else _ns(takes_ms),
        -1 if times is None else times,
        -1 if every_ms is None else _ns(times * every_ms),
        *_values(function, step.get("val"), places),
    ]
    return " ".join(map(str, words))


def _ns(ms: float) -> int:
    return ms * 1_000_000 if isinstance(ms, int) else round(ms * 1e6)


def _values(function: Function, val: Any, places: Mapping[Any, int]) -> list[str]:
    """Give the words of a value for the library: none, numbers, or a quote and a text."""
    if val is None:
        return []
    if function.parts == ("text",):
        if not isinstance(val, str) or re.search(r"[\0\n]", val):
            raise ValueError(f"{function.name} takes a line of text, not {val!r}")
        return ['"' + val]
    if function.parts == ("device",):
        return ["[", *(str(places[device]) for device in val)]
    if function.repeated:
        return ["[", *(word for record in val for word in _record(function, record, whole=True))]
    return _record(function, val)


def _is_rate(val: Any) -> bool:
    return isinstance(val, Mapping) and "per_second" in val and val.keys() <= RATE_KEYS


def _record(function: Function, val: Any, whole: bool = False) -> list[str]:
    """Give the words of one record; a part that is left out is "." for the default."""
    parts = function.parts
    if isinstance(val, Mapping) and not _is_rate(val):
        if val.keys() - set(parts) or (whole and len(val) < len(parts)):
            raise ValueError(f"{function.name} takes {parts}, not {dict(val)!r}")
        numbers = [val.get(part) for part in parts]
    elif isinstance(val, Sequence) and not isinstance(val, str):
        numbers = list(val)
    else:
        numbers = [val]
    if parts == ("value", "type"):
        return _field(*numbers)
    if len(numbers) != len(parts):
        raise ValueError(f"{function.name} takes {len(parts)} values, not {val!r}")
    if parts == ("float",):
        return [_double(*numbers)]
    names = VALUE_NAMES.get(function.name, {})
    return [_number(names.get(number, number) if names else number) for number in numbers]


def _field(value: Any, kind: str | int | None = None) -> list[str]:
    """Give a field value's eight bytes and, if it is known, its type."""
    if isinstance(kind, str):
        kind = VALUE_TYPES[kind.lower()]
    if isinstance(value, float) and kind is None:
        kind = VALUE_TYPES["double"]
    word = _double(value) if kind == VALUE_TYPES["double"] else _number(value)
    return [word] if kind is None else [word, _number(kind)]


def _double(value: float) -> str:
    return str(*struct.unpack("<Q", struct.pack("<d", value)))


def _number(number: Any) -> str:
    """Give an integer's low 64 bits, of which the library stores what fits the C type."""
    if number is None:
        return "."
    if _is_rate(number):
        start = str(number["start"] % 2**64) if "start" in number else ""
        return f"{start}+{float(number['per_second'])!r}%{number.get('wrap', 0)}"
    if not isinstance(number, int):
        raise ValueError(f"not an integer: {number!r}")
    return str(number % 2**64)

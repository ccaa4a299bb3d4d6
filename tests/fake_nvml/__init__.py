"""A fake NVML: a small C library that answers the real one's calls from a script.

Build it, write a script, and start the program under test with `environment()`:

    library = build(tmp_path)
    script = Script(devices=8).step(1000, "nvmlDeviceGetTemperature", "GPU_IS_LOST", dev=3)
    script.write(tmp_path / "script")
    subprocess.run([...], env=environment(tmp_path / "script", library))

What a step says holds for its function and device from `t_ms` on, until a newer step starts or
it is used up: after `times` uses by the process or, with `every_ms`, when times * every_ms have
passed. Then the step before it holds again; where none is left, the call succeeds with a plausible
value. Steps of the same time, function and device are answered in order, one a call, and the
last one stays. Of two steps of the same time, the one naming the device wins over "all", then the
one naming the function (and its key) over "any".

Time runs from an epoch that all processes share, the writing of the script unless given, so a
restarted program goes on where it was. A script may be written again at any time: processes
notice within 20 ms, and the unchanged steps at its head keep their counts of uses.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal as signals
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "nvml-script/1"
SOURCE = Path(__file__).parent
LIBRARY = "libnvidia-ml.so.1"
CFLAGS = ("-std=gnu17", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread",
          "-Wall", "-Wextra", f"-Wl,-soname,{LIBRARY}")  # fmt: skip

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
_STEP_KEYS = "t_ms fn dev ret signal val takes_ms times every_ms"


def _numbered(names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names.split())}


RETURNS = _numbered(_RETURNS) | {"UNKNOWN": 999, "crash": -1}
VALUE_TYPES = _numbered(_VALUE_TYPES)
VALUE_NAMES = {"nvmlDeviceGetVirtualizationMode": _numbered(_VIRTUALIZATION_MODES)}


class UnknownFunctionError(ValueError):
    """A script names a function that the fake does not have."""


@dataclass(frozen=True)
class Function:
    """One entry of functions.def: what its `dev` and `val` may be."""

    process_wide: bool
    parts: tuple[str, ...]  # the names of its values, in order; ("text",): a string
    repeated: bool = False  # `val` is a list of such records


def _read_functions() -> dict[str, Function]:
    """Collect every name that a script may use, from the table the library is made from."""
    found = {"any": Function(False, ())}
    line = re.compile(r"^(PROCESS|DEVICE|EVENT)(\w*)\((\w+)(?:, (\w+))?.*?\)(?: /\* (.*) \*/)?$")
    for match in filter(None, map(line.match, (SOURCE / "functions.def").read_text().split("\n"))):
        scope, kind, name, key, remark = match.groups()
        parts = tuple(remark.split()) if remark else ()
        if kind:
            parts = ("text",) if kind == "_TEXT" else ("value",)
        repeated = "..." in parts
        names = tuple(part for part in parts if part != "...")
        function = Function(scope == "PROCESS", names, repeated)
        found[name] = function
        if kind == "_KEY":
            found[f"{name}:{key}"] = function
    return found


FUNCTIONS = _read_functions()


def _resolve(name: str) -> tuple[str, Function]:
    """Find the library's own name of a function that a script may name in other ways."""
    if re.fullmatch(r"nvmlDeviceGetFieldValues:\d{1,3}", name) and int(name[25:]) < 512:
        return name, Function(False, ("value", "type"))
    other = {"first call after open": "firstCallAfterOpen", "nvmlInitWithFlags": "nvmlInit"}
    bare = re.sub(r"_v\d+$", "", name)
    for candidate in (name, other.get(name, ""), bare, f"{bare}_v2", f"{bare}_v3"):
        if candidate in FUNCTIONS:
            return candidate, FUNCTIONS[candidate]
    raise UnknownFunctionError(f"the fake NVML has no function {name!r}")


def default_devices(count: int) -> list[dict[str, Any]]:
    """Make H100s at the addresses where a common eight-GPU host has them."""
    buses = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
    return [
        {
            "i": i,
            "uuid": f"GPU-00000000-0000-4000-8000-{i:012d}",
            "pci": f"{i // 8:08X}:{buses[i % 8]:02X}:00.0",
            "minor": i,
            "name": "NVIDIA H100 80GB HBM3",
        }
        for i in range(count)
    ]


class Script:
    """What a fake NVML has for devices and answers, step by step.

    `devices` is a number of default ones or the list itself; a step's `dev` is a device's "i", and
    its place in the list is its NVML index.
    """

    def __init__(
        self,
        devices: int | Iterable[Mapping[str, Any]] = 1,
        steps: Iterable[Mapping[str, Any]] = (),
        epoch_ns: int | None = None,
    ) -> None:
        self.devices: list[dict[str, Any]] = (
            default_devices(devices) if isinstance(devices, int) else [dict(d) for d in devices]
        )
        self.steps: list[dict[str, Any]] = [dict(step) for step in steps]
        self.epoch_ns = epoch_ns

    def step(
        self,
        t_ms: float,
        fn: str,
        ret: str = "SUCCESS",
        *,
        dev: int | str | None = None,
        val: Any = None,
        takes_ms: float | None = None,
        times: int | None = None,
        every_ms: float | None = None,
        signal: str | None = None,
    ) -> Script:
        """Append a step (see the module) and return the script; `takes_ms=-1` hangs for ever."""
        step = {
            "t_ms": t_ms, "fn": fn, "dev": dev, "ret": ret, "signal": signal, "val": val,
            "takes_ms": takes_ms, "times": times, "every_ms": every_ms,
        }  # fmt: skip
        self.steps.append({key: value for key, value in step.items() if value is not None})
        return self

    def now_ms(self) -> float:
        """Tell the script's time, for a step that is to start at once."""
        return (time.monotonic_ns() - self._epoch()) / 1e6

    def to_json(self) -> dict[str, Any]:
        """Return the script as an nvml-script/1 document."""
        return {"format": FORMAT, "devices": self.devices, "steps": self.steps}

    def write(self, path: Path, *, strict: bool = True) -> list[str]:
        """Put the script where the library reads it, at once for all who have it open.

        Steps of functions that the fake lacks are an error or, if not `strict`, left out; returns
        the names left out. The first writing sets the epoch; later ones keep it.
        """
        lines, dropped = self._compile(strict)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        fresh.write_text("".join(f"{line}\n" for line in lines))
        # Files written within one tick of the kernel's clock would look the same.
        stamp = time.time_ns()
        os.utime(fresh, ns=(stamp, stamp))
        fresh.replace(path)
        return dropped

    def _epoch(self) -> int:
        if self.epoch_ns is None:
            self.epoch_ns = time.monotonic_ns()
        return self.epoch_ns

    def _compile(self, strict: bool) -> tuple[list[str], list[str]]:
        lines = ["nvml-lines 1", f"epoch {self._epoch()}", *map(_device_line, self.devices)]
        places = {device["i"]: place for place, device in enumerate(self.devices)}
        if len(places) != len(self.devices):
            raise ValueError("two devices have the same i")
        dropped = []
        for step in self.steps:
            try:
                lines.append(_step_line(step, places))
            except UnknownFunctionError:
                if strict:
                    raise
                dropped.append(step["fn"])
        return lines, dropped


def _device_line(device: Mapping[str, Any]) -> str:
    line = f"device {device['uuid']} {device['pci']} {device['minor']} {device['name']}"
    if not re.fullmatch(r"device \S+ [0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f]+\.\d \d+ [ -~]+", line):
        raise ValueError(f"bad device: {dict(device)!r}")
    return line


def _step_line(step: Mapping[str, Any], places: Mapping[int, int]) -> str:
    """Put one step in the library's line format (described in script.c)."""
    if unknown := step.keys() - set(_STEP_KEYS.split()):
        raise ValueError(f"unknown keys {sorted(unknown)} in {dict(step)!r}")
    name, function = _resolve(step["fn"])
    dev = step.get("dev")
    if function.process_wide and dev is not None:
        raise ValueError(f"{name} is process-wide, it takes no dev")
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
        name,
        "*" if dev in (None, "all") else places[dev],
        ret,
        int(signal),
        -1 if takes_ms == -1 else _ns(takes_ms),
        -1 if times is None else times,
        -1 if every_ms is None else _ns(times * every_ms),
        *_values(name, function, step.get("val")),
    ]
    return " ".join(map(str, words))


def _ns(ms: float) -> int:
    return ms * 1_000_000 if isinstance(ms, int) else round(ms * 1e6)


def _values(name: str, function: Function, val: Any) -> list[str]:
    """Give the words of a value for the library: none, numbers, or a quote and a text."""
    if val is None:
        return []
    if function.parts == ("text",):
        if not isinstance(val, str) or re.search(r"[\0\n]", val):
            raise ValueError(f"{name} takes a line of text, not {val!r}")
        return ['"' + val]
    records = val if function.repeated else [val]
    return [str(word) for record in records for word in _record(name, function, record)]


def _record(name: str, function: Function, val: Any) -> list[int]:
    if isinstance(val, Mapping):
        if val.keys() != set(function.parts):
            raise ValueError(f"{name} takes {function.parts}, not {dict(val)!r}")
        numbers = [val[part] for part in function.parts]
    elif isinstance(val, Sequence) and not isinstance(val, str):
        numbers = list(val)
    else:
        numbers = [val]
    if function.parts == ("value", "type"):
        return _field(*numbers)
    if len(numbers) != len(function.parts):
        raise ValueError(f"{name} takes {len(function.parts)} values, not {val!r}")
    names = VALUE_NAMES.get(name, {})
    return [_bits(names.get(number, number) if names else number) for number in numbers]


def _field(value: float, kind: str | int | None = None) -> list[int]:
    """Give a field value's eight bytes and, if it is known, its type."""
    if isinstance(kind, str):
        kind = VALUE_TYPES[kind.lower()]
    if isinstance(value, float) and kind is None:
        kind = VALUE_TYPES["double"]
    if kind == VALUE_TYPES["double"]:
        value = struct.unpack("<Q", struct.pack("<d", value))[0]
    return [_bits(value)] if kind is None else [_bits(value), _bits(kind)]


def _bits(number: Any) -> int:
    """Give an integer's low 64 bits, of which the library stores what fits the C type."""
    if not isinstance(number, int):
        raise ValueError(f"not an integer: {number!r}")
    return number % 2**64


def load(path: Path) -> Script:
    """Read an nvml-script/1 JSON file."""
    document = json.loads(path.read_text())
    if document["format"] != FORMAT:
        raise ValueError(f"{path} is of format {document['format']!r}, not {FORMAT}")
    return Script(document["devices"], document["steps"])


def build(directory: Path, *flags: str) -> Path:
    """Compile the library into `directory`; returns what belongs in LD_LIBRARY_PATH.

    `flags` go to the compiler. The result is kept in the temporary folder under the hash of all
    that it is made from, so that only the first build takes time.
    """
    compiler = os.environ.get("CC", "gcc")
    sources = sorted(SOURCE.glob("*.c"))
    parts = [compiler, *CFLAGS, *flags]
    parts += [file.read_text() for file in [*sources, *sorted(SOURCE.glob("*.[hd]*"))]]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = Path(tempfile.gettempdir()) / f"fake-nvml-{os.getuid()}-{digest}"
    if not (cache / LIBRARY).exists():
        cache.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            fresh = Path(scratch) / LIBRARY
            subprocess.run([compiler, *CFLAGS, *flags, "-o", fresh, *sources], check=True)
            fresh.replace(cache / LIBRARY)
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy2(cache / LIBRARY, directory / LIBRARY)
    return directory


def environment(
    script_path: Path, library_dir: Path, **extra: str | os.PathLike[str]
) -> dict[str, str]:
    """Return this process's environment with what lets a child find the fake and its script."""
    search = [str(library_dir), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(search),
        "FAKE_NVML_SCRIPT": str(script_path),
        **{name: os.fspath(value) for name, value in extra.items()},
    }

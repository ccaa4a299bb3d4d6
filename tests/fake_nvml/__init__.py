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

Some calls have keys: "nvmlDeviceGetClockInfo:sm", "nvmlDeviceGetNvLinkState:3",
"nvmlDeviceGetFieldValues:FIELD:SCOPE", "nvmlGpmMetricsGet:METRIC"; functions.def has all of them.
A key left out means any; fields and GPM metrics are the exception: without a key the step is about
the call as a whole, which then fails or takes time.

A number in `val` may be a rate, {"start": 0, "per_second": 5e9, "wrap": 2**32}: it starts when its
step does, without "start" from what it was until then. Of several parts those left out keep their
defaults. The ring of `nvmlDeviceGetSamples:power` has for each of its moments what the steps said
for that moment.

Three steps are not about a call but about what there is:

- "devices", val a list of devices' "i": those are there, in the order of their NVML index. A device
  that is gone answers GPU_IS_LOST and works again once it is back. Without a step all are there.
- "mig" of a device, val a list of {"gi", "ci", "uuid", "slices", "memory" (MiB)}: MIG is on, with
  those MIG devices in the order of their index (all but "gi" may be left out); without val it is
  off. A MIG device's UUID can be another step's `dev`; "all" does not mean it. A MIG device that is
  gone answers INVALID_ARGUMENT, or the error of a step about it.
- "driver", val a version: that kernel module is loaded from then on. Processes that have called
  nvmlInit before keep their library, so that nvmlInit answers LIB_RM_VERSION_MISMATCH to them.

`users` tells which processes have the library initialised.

Time runs from an epoch that all processes share, the writing of the script unless given, so a
restarted program goes on where it was. A script may be written again at any time: processes
notice within 20 ms, and the unchanged steps at its head keep their counts of uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fake_nvml.functions import FUNCTIONS, SOURCE, UnknownFunctionError
from fake_nvml.lines import RETURNS, device_line, mig_line, step_line

__all__ = [
    "FUNCTIONS",
    "RETURNS",
    "Script",
    "UnknownFunctionError",
    "build",
    "default_devices",
    "environment",
    "mig_uuid",
    "users",
]

FORMAT = "nvml-script/1"
FIRST_MIG = 64  # MAX_GPUS of fake.h
LIBRARY = "libnvidia-ml.so.1"
CFLAGS = ("-std=gnu17", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread",
          "-Wall", "-Wextra", f"-Wl,-soname,{LIBRARY}")  # fmt: skip


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
        arg: str | None = None,
        val: Any = None,
        takes_ms: float | None = None,
        times: int | None = None,
        every_ms: float | None = None,
        signal: str | None = None,
    ) -> Script:
        """Append a step (see the module) and return the script; `takes_ms=-1` hangs for ever."""
        step = {
            "t_ms": t_ms, "fn": fn, "dev": dev, "arg": arg, "ret": ret, "signal": signal,
            "val": val, "takes_ms": takes_ms, "times": times, "every_ms": every_ms,
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
        lines = ["nvml-lines 1", f"epoch {self._epoch()}", *map(device_line, self.devices)]
        places: dict[Any, int] = {device["i"]: place for place, device in enumerate(self.devices)}
        if len(places) != len(self.devices):
            raise ValueError("two devices have the same i")
        steps = [self._with_migs(step, places, lines) for step in self.steps]
        dropped = []
        for step in steps:
            try:
                lines.append(step_line(step, places))
            except UnknownFunctionError:
                if strict:
                    raise
                dropped.append(step["fn"])
        return lines, dropped

    def _with_migs(
        self, step: Mapping[str, Any], places: dict[Any, int], lines: list[str]
    ) -> Mapping[str, Any]:
        """Give the MIG devices of a "mig" step their lines and places, and name them by UUID."""
        if step["fn"] != "mig" or step.get("val") is None or step.get("dev") not in places:
            return step
        place = places[step["dev"]]
        uuids = []
        for given in step["val"]:
            mig = {"ci": 0, "slices": 1, "memory": 9728, **given}
            mig.setdefault("uuid", mig_uuid(step["dev"], mig["gi"], mig["ci"]))
            line = mig_line(mig, self.devices[place], place)
            if mig["uuid"] not in places:
                places[mig["uuid"]] = FIRST_MIG + sum(line.startswith("mig ") for line in lines)
                lines.append(line)
            elif line not in lines:
                raise ValueError(f"two MIG devices have the UUID {mig['uuid']}")
            uuids.append(mig["uuid"])
        return {**step, "val": uuids}


def mig_uuid(i: int, gi: int, ci: int = 0) -> str:
    """Return the UUID of a MIG device that is given none."""
    return f"MIG-00000000-0000-4000-8000-{i:04d}{gi:04d}{ci:04d}"


def users(script_path: Path) -> set[int]:
    """Return the processes that have the library initialised with the script there."""
    found = set()
    for path in (script_path.parent / "users").glob("*"):
        with contextlib.suppress(FileNotFoundError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.add(int(path.name))
    return found


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

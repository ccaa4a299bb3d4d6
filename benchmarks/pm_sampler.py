"""The product's own samplers under measurement, each started as the supervisor starts it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuwatch.clock import monotonic_ns
from gpuwatch.config import load
from gpuwatch.duty import CAPABILITIES
from gpuwatch.process import Process
from gpuwatch.ring import RingReader
from gpuwatch.siblings import SamplerChannels
from gpuwatch.sources import SOURCES
from gpuwatch.summation import row_dtype

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")
START_SECONDS = 30.0
SETTLE_SECONDS = 0.7
ARRIVE_SECONDS = 1.2  # until rows of a moment are in the ring
KEEP: list[str] = []  # capabilities of samplers, if others than the product leaves them
PRETEND: list[str] = []  # what loads are started with as well
ORIGIN = ["nvml"]  # what samplers read, as --source says it

generations = iter(range(1, 10_000))


def memory(process: int | str) -> dict[str, float]:
    """Return a process's PSS in MiB by mapping, those of less than half a MiB together."""
    found: dict[str, float] = {}
    name = ""
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = Path(words[5]).name if len(words) > 5 else f"anonymous {words[1]}"
            name = "ring" if name.endswith(".ring") else name
        elif words[0] == "Pss:":
            found[name] = found.get(name, 0.0) + int(words[1]) / 1024
    small = {name for name, size in found.items() if size < 0.5}
    large = {name: round(size, 1) for name, size in found.items() if name not in small}
    rest = round(sum(found[name] for name in small), 1)
    return dict(sorted(large.items(), key=lambda one: -one[1])) | {"rest": rest}


def collectors(*names: str) -> dict[str, bool]:
    """Return the config in which only these sources are on."""
    return {one: one in names for sources in SOURCES.values() for one in sources}


class Sampler:
    """One sampler; `reason` says why it has no rings."""

    def __init__(self, duty: str = "pm", source: str = "pm", sysfs: str = "/sys", **keys: Any):
        self.duty, self.source = duty, source
        self.generation = next(generations)
        self.directory = SHARED_MEMORY / f"gpuwatch-pm-{os.getpid()}-{self.generation}"
        self.directory.mkdir()
        overrides = {
            "collectors": collectors(source),
            "paths": {"runtime": str(self.directory), "sysfs": sysfs},
            duty: {"budget_ratio": 1.0, **keys},
        }
        settings = {
            "config": load(None, overrides, *ORIGIN),
            "ring_directory": str(self.directory),
            "ready_ns": monotonic_ns(),
            "excluded": [],
            "known": [],
        }
        start = time.monotonic()
        keep = KEEP or CAPABILITIES.get(duty, ())
        self.process = Process(
            ("gpuwatch.sampler", duty), settings, generation=self.generation, keep=keep
        )
        self.channel = SamplerChannels(self.directory)
        self.events: list[str] = []
        while not self.manifest() and time.monotonic() - start < START_SECONDS:
            if self.process.status is not None or self.process.phase == "unavailable":
                break
            time.sleep(0.01)
        self.start_seconds = time.monotonic() - start

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> float:
        """End it; return how long that took."""
        start = time.monotonic()
        self.process.terminate()
        while self.process.status is None and time.monotonic() - start < 20:
            time.sleep(0.005)
        shutil.rmtree(self.directory, ignore_errors=True)
        return time.monotonic() - start

    def manifest(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.directory / f"{self.duty}.json").read_text())
            return found
        return {}

    @property
    def reason(self) -> str:
        if self.process.phase == "unavailable":
            return self.process.pulse.names()[0]
        if self.process.status is not None:
            return f"ended with {self.process.status}"
        told = self.manifest().get("sources", {}).get(self.source, {})
        return f"{told.get('state')}: {told.get('reason')}" if told.get("reason") else ""

    def hear(self) -> dict[str, int]:
        """Take events; return the errors counted so far."""
        for _ in range(3):
            told = self.channel.poll({self.duty: self.generation})
            self.events += [f"{one.entity.id} {one.name}: {one.detail}" for _, one in told]
            time.sleep(0.06)
        return self.channel.total_errors(self.source)

    def pace(self, scale: float) -> None:
        self.hear()
        message = {"command": "interval", "source": self.source, "scale": scale}
        self.channel.send(self.duty, message)

    def cpu_seconds(self) -> float:
        """Return what its threads have used of a processor, to the nanosecond."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9

    def pss_mib(self) -> float:
        return sum(memory(self.process.pid).values())

    def readers(self) -> Iterator[RingReader]:
        for path in self.manifest().get("rings", []):
            reader = RingReader(Path(path))
            yield reader
            reader.close()

    def series(self, start_ns: int, end_ns: int) -> list["Series"]:
        """Return each ring's rows of that time."""
        return [Series(reader, start_ns, end_ns) for reader in self.readers()]

    def of_gpu(self, number: int, start_ns: int, end_ns: int) -> "Series":
        found = self.series(start_ns, end_ns)
        if number >= len(found):
            raise RuntimeError(f"{self.source} has no ring {number}: {self.reason or 'no reason'}")
        return found[number]


class Series:
    """The rows of one ring between two times."""

    def __init__(self, reader: RingReader, start_ns: int, end_ns: int) -> None:
        rows = np.frombuffer(reader.read(0)[1], row_dtype(reader.schema))
        rows = rows[(rows["time_ns"] >= start_ns) & (rows["time_ns"] <= end_ns)]
        self.period_ns = reader.period_ns
        self.times, self.late = rows["time_ns"], rows["late"]
        self.entity = reader.schema.columns[0].entity.id
        self.cells: dict[str, Any] = {}
        self.entity = reader.schema.columns[0].entity.id
        for index, column in enumerate(reader.schema.columns):
            kind = "integers" if index < reader.schema.integers else "gauges"
            place = index if kind == "integers" else index - reader.schema.integers
            self.cells[column.name] = rows[kind][:, place]

    def rise(self, name: str) -> int:
        """Return what a counter rose by."""
        return int(self.cells[name][-1] - self.cells[name][0]) if len(self.times) else 0

    def mean(self, name: str) -> float:
        values = self.cells[name][~np.isnan(self.cells[name])]
        return float(values.mean()) if len(values) else float("nan")

    def about(self) -> dict[str, Any]:
        """Return how many rows there are and how they lie in time, in milliseconds."""
        gaps = np.diff(self.times) / 1e6
        wide = gaps[gaps > 1.5 * self.period_ns / 1e6]
        quantiles = np.percentile(gaps, (0, 50, 99, 100)).round(4).tolist() if len(gaps) else []
        return {"rows": len(self.times), "spacing": quantiles, "gaps": len(wide),
                "uncovered": float(wide.sum())}  # fmt: skip


class Load:
    """A program of `pm_load.py`, which gets ready meanwhile and begins when told."""

    def __init__(self, what: str, seconds: float) -> None:
        command = [sys.executable, str(HERE / "pm_load.py"), what, "--seconds", str(seconds)]
        self.process = subprocess.Popen(
            [*command, *PRETEND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.what = what

    def ready(self) -> None:
        assert self.process.stdout
        line = self.process.stdout.readline().strip()
        if line != "ready":
            raise RuntimeError(f"{self.what} did not start: {line!r}")

    def go(self) -> None:
        """Have it work, if it is ready."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return what it did, once it has."""
        assert self.process.stdout
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def run(self) -> dict[str, Any]:
        """Have it work, once it is ready; return what it did."""
        self.ready()
        time.sleep(SETTLE_SECONDS)
        self.go()
        return self.answer()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=30)


@contextlib.contextmanager
def busy(seconds: float, *arguments: str) -> Iterator[None]:
    """Have all GPUs multiply matrices meanwhile."""
    command: Sequence[str] = [sys.executable, str(HERE / "load.py"), "--seconds", str(seconds)]
    if PRETEND:
        command = ["sleep", str(seconds)]
    process = subprocess.Popen([*command, *([] if PRETEND else arguments)])
    time.sleep(0.1 if PRETEND else 6)  # until it has begun
    try:
        yield
    finally:
        process.kill()
        process.wait()

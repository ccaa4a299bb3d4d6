"""The node under measurement: its daemon, its memory, who is on its GPUs, and what was started."""

import contextlib
import http.client
import json
import math
import operator
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pynvml
from canary_bench import TITLE, read
from measured import HERE, PORT, Host, scrape
from node_watch import listed
from pm_sampler import RingReader, Series

from gpuwatch.control import request
from gpuwatch.gpu_readings import memory

# Everything as it comes, but for canaries that come often, and disks of rented machines.
CONFIG = """
[recorder]
free_ratio = 0.01
[canary]
python = "{python}"
run = ["matmul", "memory", "pcie", "startup", "integrity", "allreduce"]
interval_seconds = 12.0
settle_seconds = 2.0
seed_seconds = 4.0
"""
RUNTIME = Path("/dev/shm/gw")
MEMORY_SECONDS = 5.0
PARTS = ("gpuwatch run", "gpuwatch.daemon", "gpuwatch.sampler", "gpuwatch.reader")


class Memory(threading.Thread):
    """Memory of the daemon's processes, canaries apart: (seconds, MiB by name), PSS and RSS."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.looks = pid, []

    def run(self) -> None:
        while True:
            with contextlib.suppress(psutil.Error):
                self.looks.append((time.monotonic(), self.look()))
            time.sleep(MEMORY_SECONDS)

    def look(self) -> dict[str, dict[str, float]]:
        top = psutil.Process(self.pid)
        found: dict[str, dict[str, float]] = {"pss": {}, "rss": {}}
        for one in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                words = one.cmdline()
                place = words.index("-m") + 1
                name = " ".join(words[place : place + 2])
                # A canary, its torch, and those who look at GPUs for it come and go.
                if name.startswith(PARTS):
                    told = one.memory_full_info()
                    for kind, sizes in found.items():
                        sizes[name] = sizes.get(name, 0.0) + getattr(told, kind) / 2**20
        return found

    def since(self, start: float) -> dict[str, Any]:
        """Return first and last look from a moment on, and slopes with their 95 % intervals."""
        looks = [(when, sizes) for when, sizes in self.looks if when >= start]
        if len(looks) < 4:
            return {"looks": len(looks)}
        hours = [when / 3600 for when, _ in looks]
        every = [sum(sizes["pss"].values()) for _, sizes in looks]
        resident = [sum(sizes["rss"].values()) for _, sizes in looks]
        first, last = looks[0][1]["pss"], looks[-1][1]["pss"]
        return {
            "start_mib": every[0],
            "end_mib": every[-1],
            "most_mib": max(every),
            "seconds": looks[-1][0] - looks[0][0],
            "mib_per_hour": slope(hours, every),
            "rss_mib_per_hour": slope(hours, resident),
            "mib_per_hour_of_each": {
                name: slope(hours, [sizes["pss"].get(name, 0.0) for _, sizes in looks])
                for name in last
            },
            "first": first,
            "last": last,
        }


def slope(times: list[float], values: list[float]) -> list[float]:
    """Return the slope of a line through values, between the ends of its 95 % interval.

    Neighbours are alike, so there are fewer independent values than values (first-order
    autocorrelation of what is left beside the line), and Student's t is of so many.
    """
    found, base = statistics.linear_regression(times, values)
    rest = [y - base - found * x for x, y in zip(times, values, strict=True)]
    squares = sum(one * one for one in rest)
    alike = sum(map(operator.mul, rest, rest[1:])) / squares if squares else 0.0
    alike = min(max(alike, 0.0), 0.95)
    freedom = max(len(values) * (1 - alike) / (1 + alike) - 2, 1.0)
    student = 1.96 + 2.37 / freedom + 2.82 / freedom**2  # to 4 % from three degrees on
    middle = statistics.fmean(times)
    half = student * math.sqrt(squares / freedom / sum((x - middle) ** 2 for x in times))
    return [found - half, found, found + half]


class Bench:
    """What parts have in common. `end` is when all must be over, on the monotonic clock."""

    def __init__(self, output: Path, end: float, gpus: int, pretend: bool) -> None:
        self.output, self.end, self.gpus, self.pretend = output, end, gpus, pretend
        self.flags = ["--pretend"] if pretend else []
        self.work = Path(tempfile.mkdtemp(prefix="gpuwatch-node-"))
        self.used_bytes = [] if pretend else used_bytes()  # with nobody there
        self.children: list[subprocess.Popen[str]] = []
        more = ["--path.runtime", str(RUNTIME)]
        if pretend:
            more += ["--source", "simulated"]
        self.host = Host(self.work, CONFIG.format(python=sys.executable), *more)
        self.host.runtime, self.host.control = RUNTIME, RUNTIME / "control.sock"
        self.memory = Memory(self.host.process.pid)
        self.memory.start()
        self.seen: list[list[Any]] = []
        self.partial: dict[str, Any] = {}  # what a part has found so far

    def watch(self, *flags: str) -> None:
        """Have `seen` tell who is on the GPUs, until the part ends."""
        watcher = self.start("node_watch.py", *self.flags, *flags, stdout=subprocess.PIPE)

        def hear() -> None:
            for line in watcher.stdout or ():
                self.seen.append(json.loads(line))

        threading.Thread(target=hear, daemon=True).start()

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def start(self, script: str, *flags: str, **how: Any) -> subprocess.Popen[str]:
        return self.begin([sys.executable, str(HERE / script), *flags], **how)

    def begin(self, command: list[str], **how: Any) -> subprocess.Popen[str]:
        """Start a process with a group of its own."""
        errors = (self.work / "errors.log").open("a")
        child = subprocess.Popen(command, stderr=errors, text=True, start_new_session=True, **how)
        self.children.append(child)
        return child

    def gpuwatch(self, *words: str, seconds: float) -> tuple[int, str]:
        """Run a command of gpuwatch beside the daemon; return its exit code and what it printed."""
        command = [sys.executable, "-m", "gpuwatch", *words, "--path.runtime", str(RUNTIME)]
        child = self.begin(command, stdout=subprocess.PIPE)
        text, _ = child.communicate(timeout=min(seconds, self.left))
        return child.returncode, text

    def end_children(self) -> None:
        """End what a part left behind."""
        while self.children:
            child = self.children.pop()
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)

    def errors(self) -> str:
        return read(str(self.work / "errors.log"))[-1500:]

    def ask(self, **message: Any) -> dict[str, Any]:
        return request(self.host.control, message, 30)

    def status(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
        connection.request("GET", "/api/v1/status")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return found

    def sources(self) -> list[str]:
        """Return the sources that deliver."""
        return [name for name, one in self.status()["sources"].items() if one["state"] == "on"]

    def child(self, duty: str) -> dict[str, Any]:
        return next(one for one in self.status()["children"] if one["duty"] == duty)

    def manifest(self, duty: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((RUNTIME / f"{duty}.json").read_text())
            return found
        return {}

    def rows(self, duty: str, start_ns: int, end_ns: int) -> list[tuple[str, Series]]:
        """Return the rows of that time in each ring of a sampler, with the ring's name."""
        found = []
        for path in self.manifest(duty).get("rings", ()):
            reader = RingReader(Path(path))
            found.append((reader.schema.name, Series(reader, start_ns, end_ns)))
            reader.close()
        return found

    def on_gpu(self) -> dict[int, tuple[list[int], list[int]]]:
        """Return the canaries and the others that are on each GPU now."""
        return {gpu: (canaries, others) for _, gpu, canaries, others in list(self.seen)}

    def wait(self, condition: Callable[[], Any], seconds: float) -> float | None:
        """Return the seconds until a condition held, None if it did not in time."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            with contextlib.suppress(OSError, ValueError, KeyError):
                if condition():
                    return time.monotonic() - start
            time.sleep(0.02)
        return None

    def close(self) -> dict[str, Any]:
        """Stop the daemon; return how that went, and what is left of it all."""
        start = time.monotonic()
        with contextlib.suppress(Exception):
            self.host.process.send_signal(signal.SIGTERM)
            self.host.process.wait(min(12.0, max(1.0, self.left - 2)))
        stopped, status = time.monotonic() - start, self.host.process.poll()
        time.sleep(0.3)
        on_gpus: list[list[int]] = []
        more_bytes: list[int] = []
        if not self.pretend:
            more_bytes = [
                now - then for now, then in zip(used_bytes(), self.used_bytes, strict=True)
            ]
            pynvml.nvmlInit()
            on_gpus = listed()
        named = [p for p in Path("/proc").glob("[0-9]*") if read(f"{p}/comm").strip() == TITLE]
        found = {
            "stop_seconds": stopped,
            "status": status,
            "runtime": [path.name for path in RUNTIME.glob("*")] if RUNTIME.exists() else [],
            "canaries": [path.name for path in named if not self.pretend],
            "on_gpus": sorted(pid for pids in on_gpus for pid in pids),
            "more_bytes": more_bytes,
            "errors": self.errors(),
        }
        self.kill()
        return found

    def kill(self) -> None:
        """End everything, whatever state it is in."""
        for child in (*self.children, self.host.process):
            with contextlib.suppress(OSError):
                if child.poll() is None:
                    child.kill() if child is self.host.process else os.killpg(child.pid, 9)
        log = read(str(self.work / "daemon.log"))
        (self.output / "daemon.log").write_text(log[-1_000_000:])
        for path in (self.work, RUNTIME):
            shutil.rmtree(path, ignore_errors=True)


def used_bytes() -> list[int]:
    """Return the memory in use on each GPU."""
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    found = [int(memory(gpu)[0] or 0) for gpu in gpus]
    pynvml.nvmlShutdown()
    return found


def quantiles(values: list[float], *shares: float) -> list[float]:
    """Return values at these shares of the way up."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares]


def rises(before: dict[str, float], name: str) -> dict[str, float]:
    """Return by how much each series of a counter rose since an earlier scrape."""
    now = scrape()
    found = {
        key: value - before.get(key, 0.0) for key, value in now.items() if key.startswith(name)
    }
    return {key.removeprefix(name): value for key, value in found.items() if value}

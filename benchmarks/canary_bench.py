"""The host on which canaries are measured: its GPUs by NVML, and the processes that are started."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pynvml

from gpuwatch.busy import Host
from gpuwatch.canaries import CANARIES
from gpuwatch.canary import Run, Task
from gpuwatch.canary_host import HOST_PIDS
from gpuwatch.clock import monotonic_ns
from gpuwatch.gpu_readings import memory, process_ids
from gpuwatch.look import PERIOD_SECONDS, Looks
from gpuwatch.session import Session

CHILD = Path(__file__).with_name("canary_child.py")
PASSED_ON = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
TITLE = "gpuwatch-canary"


def read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


class Sampler(threading.Thread):
    """What NVML says of memory and processes, about each 5 ms, beside the canaries."""

    def __init__(self, handles: list[Any]) -> None:
        super().__init__(daemon=True)
        self.handles = handles
        self.most: list[float] = [0.0] * len(handles)
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        self.who: dict[int, dict[str, str]] = {}
        self.ending = threading.Event()
        self.fault = ""

    def run(self) -> None:
        while not self.ending.wait(0.005):
            try:
                self._sample()
            except pynvml.NVMLError as error:
                self.fault = str(error)

    def _sample(self) -> None:
        for index, gpu in enumerate(self.handles):
            self.most[index] = max(self.most[index], memory(gpu)[0] or 0)
            for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                now = monotonic_ns()
                if one.pid not in self.first:
                    self.first[one.pid] = now
                    self.who[one.pid] = about(one.pid)
                self.last[one.pid] = now
                used = one.usedGpuMemory or 0
                self.bytes[one.pid] = max(self.bytes.get(one.pid, 0), used)


def about(pid: int) -> dict[str, str]:
    """Return what this host's /proc says of a process."""
    lines = read(f"/proc/{pid}/environ").split("\0")
    named = dict(line.partition("=")[::2] for line in lines)
    return {
        "comm": read(f"/proc/{pid}/comm").strip(),
        **{name: named.get(name, "-") for name in PASSED_ON},
    }


def workers(command: int) -> list[int]:
    """Return the processes of canaries that a command has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if read(f"{path}/comm").strip() == TITLE:
            with contextlib.suppress(OSError, IndexError):
                leader = os.getpgid(int(path.name))
                if int(read(f"/proc/{leader}/stat").rpartition(")")[2].split()[1]) == command:
                    found.append(int(path.name))
    return found


class Bench:
    """The host under test, and what parts have in common."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.cpu: bool = options.cpu
        self.readings: int = options.readings
        self.output: Path = options.output
        self.errors = (self.output / "errors.log").open("a+")
        self.end = time.monotonic() + options.seconds
        self.handles: list[Any] = []
        if not self.cpu:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self.handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        self.uuids = [pynvml.nvmlDeviceGetUUID(gpu) for gpu in self.handles]
        self.host_pids = str(Path("/proc/self/ns/pid").readlink()) == HOST_PIDS
        self.force = not self.cpu and not self.host_pids
        self.size = "tiny" if self.cpu else "full"
        self.ranks = 2 if self.cpu else len(self.uuids)
        self.started: list[subprocess.Popen[str]] = []
        self.where = ["--cpu"] if self.cpu else ["--force"] if self.force else []

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def listed(self) -> list[int]:
        return sorted({pid for gpu in self.handles for pid in process_ids(gpu)})

    def settle(self) -> float:
        """Wait until the GPUs look idle; return the seconds that took."""
        start = time.monotonic()
        while time.monotonic() - start < 6 and (
            self.listed()
            or any(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu > 2 for gpu in self.handles)
        ):
            time.sleep(0.05)
        return time.monotonic() - start

    @contextlib.contextmanager
    def sampled(self) -> Iterator[Sampler]:
        sampler = Sampler(self.handles)
        sampler.start()
        try:
            yield sampler
        finally:
            sampler.ending.set()
            sampler.join()

    def command(self, *names: str) -> subprocess.Popen[str]:
        """Start the canary command."""
        words = ["-m", "gpuwatch", "canary", "run", *names, "--json", *self.where]
        return self._start(words)

    def child(self, part: str, told: dict[str, Any], **how: Any) -> subprocess.Popen[str]:
        message = json.dumps({"cpu": self.cpu, "gpu": 0, **told})
        return self._start([str(CHILD), part, message], **how)

    def _start(self, words: list[str], **how: Any) -> subprocess.Popen[str]:
        command = [sys.executable, *words]
        self.started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True, **how)
        )
        return self.started[-1]

    def end_children(self) -> None:
        for one in self.started:
            if one.poll() is None:
                one.kill()
                one.wait()
        self.started.clear()

    def asked(self, part: str, **told: Any) -> Any:
        return self.result(self.child(part, told))

    def result(self, child: subprocess.Popen[str]) -> Any:
        """Return what a child tells at its end; RuntimeError, with its last words, if nothing."""
        text, _ = child.communicate()
        if child.returncode or not text.strip():
            self.errors.seek(0)
            words = self.errors.read()[-2000:]
            raise RuntimeError(f"a child ended with status {child.returncode}: {words}")
        return json.loads(text.strip().splitlines()[-1])

    def task(self, name: str, gpus: list[str], **more: Any) -> Task:
        processes = 2 if CANARIES[name].together else 1
        size = CANARIES[name].sizes[self.size]
        return Task(canary=name, size=size, gpus=gpus, processes=processes, **more)

    @contextlib.contextmanager
    def session(self, *wanted: int) -> Iterator[Session]:
        self.settle()
        with contextlib.ExitStack() as stack:
            looks = (
                None if self.cpu else stack.enter_context(closing(Looks(Path("/sys"), {}, wanted)))
            )
            host = Host(host_pids=self.host_pids)
            yield Session(sys.executable, self.size, looks, host=host, force=self.force)


def finished(run: Run) -> Any:
    while (outcome := run.poll()) is None:
        time.sleep(0.01)
    return outcome


def cost(looking: Looks) -> dict[str, float]:
    """Return what looks take of a processor, and of time."""
    pid = looking._popen.pid
    looking.poll()
    looking.forget()
    used, start = processor_seconds(pid), time.monotonic()
    while time.monotonic() - start < 3:
        time.sleep(0.1)
        looking.poll()
    seconds, used = time.monotonic() - start, processor_seconds(pid) - used
    count = len(next(iter(looking._seen.values()))) - 1
    return {
        "cpu_ratio": used / seconds,
        "looks_per_second": count / seconds,
        "cpu_ms_a_look": used / count * 1e3,
        "call_ms_a_look": (seconds / count - PERIOD_SECONDS) * 1e3,
    }


def processor_seconds(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((read(f"{task}/schedstat") or "0").split()[0]) for task in tasks) / 1e9

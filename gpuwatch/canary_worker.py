"""The process in which a canary runs: it gets torch and a device ready, times, and tells.

Run as a file by the interpreter that has torch, which may be the users' own (Python 3.9 or newer):
so nothing is imported but the standard library and torch, here and in `canaries`. Settings come as
one JSON object on standard input; lines of JSON go to standard output: {"phase", "rank"} as each
part of the work begins, {"reading"} for each result, {"error", "cause"} for what it could not do.
Standard output is kept for that alone: libraries print there.

A canary over several devices has a process for each, its rank. That of rank 0 starts the others,
in its process group; none outlives its parent.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable  # noqa: UP035 - also in a Python that is older

TITLE = b"gpuwatch-canary"
PR_SET_PDEATHSIG = 1
JOIN_SECONDS = 60
WARM_BURSTS = 5
LEAST_BURSTS = 5
MOST_LAUNCHES = 1000
STEADY_RATIO = 0.01  # by which groups of bursts may differ
REST_STEP_SECONDS = 0.01
MEASURE_SECONDS = 1.0  # of bursts, unless they are too few
ENVIRONMENT = "environment"  # the cause of what does not speak against the GPU
# What CUDA and NCCL say of a machine that is not ready, and what to do.
NOT_READY = (
    (
        r"Error 802|system not yet initialized",
        "CUDA error 802, NVLink is not ready: wait, or start the driver's own fabric manager",
    ),
    (
        r"No space left on device|shared memory segment",
        "no room in /dev/shm: give the container more of it (--shm-size 1g)",
    ),
    (
        r"driver on your system is too old|no kernel image",
        "torch is built for a newer driver or other GPUs: name another in [canary] python",
    ),
    (
        r"Error 80[34]",
        "the interpreter's CUDA does not fit driver or GPU: name another in [canary] python",
    ),
    (r"busy or unavailable", "the GPU is in use, or in exclusive mode: try again later"),
)
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree")


class Stopped(Exception):
    """The parent asked to stop."""


class NotReady(Exception):
    """The machine or the interpreter is not one where this canary can run."""


class Worker:
    """What a canary works with: `torch`, `device`, its settings, the clock and the parent's ear.

    `rank` of `ranks` processes; `size` is the edge of a matrix, or bytes.
    """

    torch: Any
    device: Any

    def __init__(self, settings: dict[str, Any], output: int) -> None:
        self.settings = settings
        self.rank: int = settings.get("rank", 0)
        self.ranks: int = settings["ranks"]
        self.on_gpu: bool = settings["device"] == "gpu"
        self.size: int = settings["size"]
        self.scratch = Path(settings["scratch"])
        self.stopping = False
        self.joined: Any = None
        self.siblings: list[subprocess.Popen[bytes]] = []
        self._output = output
        self._told = False

    def phase(self, name: str) -> None:
        """Say that the next part of the work begins; the parent gives each a deadline."""
        if self.stopping:
            raise Stopped
        self._say({"phase": name, "rank": self.rank})

    def tell(self, **reading: Any) -> None:
        """Hand a result over; `gpu` in it is the rank whose GPU it is about, -1 for the host."""
        versions = {"torch": self.torch.__version__, "cuda": self.torch.version.cuda}
        environment = {**versions, **reading.pop("environment", {})}
        base = {"size": self.size, "gpu": self.rank, "environment": environment}
        self._say({"reading": {**base, **reading}})

    def error(self, text: str, cause: str = "") -> None:
        """Say, once, why there is no result."""
        if not self._told:
            self._told = True
            self._say({"error": " ".join(text.split())[:400], "cause": cause})

    def _say(self, message: dict[str, Any]) -> None:
        # One write of less than a pipe takes at once, so that those of several ranks do not mix.
        os.write(self._output, json.dumps(message).encode() + b"\n")

    def generator(self, device: Any = None) -> Any:
        """Return random numbers that are the same in every run."""
        found = self.torch.Generator(device or self.device)
        return found.manual_seed(self.settings["seed"])

    def fitting(self, need: Callable[[int], int]) -> int:
        """Return the size, or a smaller one whose `need` of bytes is half of what is free."""
        size = self.size
        if self.on_gpu:
            free = self.torch.cuda.mem_get_info(self.device)[0]
            while need(size) > free / 2 and size > 1:
                size //= 2
        return size

    def measure(self, launch: Callable[[], object], count: int | None = None) -> dict[str, Any]:
        """Time a launch: `seconds`, the median over bursts, `spread`, and when that was.

        A burst takes 20 ms at most, or one launch. Those before the clock has settled do not count,
        and of the rest the first does not. `count` is launches in a burst, if ranks agreed on it.
        """
        together = count is not None
        self.phase("warm_up")
        if count is None:
            self.burst(launch, 1)
            count = self.launches(launch)
            self._settle(launch, count)
        else:  # all ranks make the same number of calls
            for _ in range(WARM_BURSTS):
                self.burst(launch, count)
        self.burst(launch, count)
        self.phase("measure")
        start = time.monotonic_ns()
        bursts: list[float] = []
        while len(bursts) < self.settings["bursts"]:
            bursts.append(self.burst(launch, count) / count)
            late = time.monotonic_ns() - start > MEASURE_SECONDS * 1e9
            if late and len(bursts) >= LEAST_BURSTS and not together:
                break
        seconds = statistics.median(bursts)
        return {
            "seconds": seconds,
            "spread": 1 - min(bursts) / seconds,
            "start_ns": start,
            "end_ns": time.monotonic_ns(),
        }

    def _settle(self, launch: Callable[[], object], count: int) -> None:
        """Keep the device at work until bursts take as long as those before.

        For `warm_seconds` at least, so that what NVML says of the clock is of that time as well,
        and for twice that at most.
        """
        least, start, before = self.settings["warm_seconds"], time.monotonic(), 0.0
        while True:
            group: list[float] = []
            end = time.monotonic() + least / 2
            while not group or time.monotonic() < end:
                group.append(self.burst(launch, count))
            lasted, took = time.monotonic() - start, statistics.median(group)
            steady = abs(before / took - 1) < STEADY_RATIO
            if lasted >= 2 * least or (steady and lasted >= least):
                return
            before = took

    def rest(self, since: float) -> None:
        """Leave the device alone, so that what it was given until then is no longer felt."""
        end = since + (self.settings["rest_seconds"] if self.on_gpu else 0)
        while time.monotonic() < end:
            if self.stopping:
                raise Stopped
            time.sleep(REST_STEP_SECONDS)

    def launches(self, launch: Callable[[], object]) -> int:
        """Return how many launches a burst has."""
        seconds = self.burst(launch, 1)
        return max(1, min(MOST_LAUNCHES, int(self.settings["burst_seconds"] / max(seconds, 1e-6))))

    def burst(self, launch: Callable[[], object], count: int) -> float:
        """Return the seconds that some launches take on the device."""
        if self.stopping:
            raise Stopped
        if not self.on_gpu:
            begin = time.perf_counter()
            for _ in range(count):
                launch()
            return time.perf_counter() - begin
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            launch()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def canary(self, name: str) -> Any:
        """Return the module of a canary; whoever runs this has no package `gpuwatch`."""
        path = Path(__file__).with_name("canaries") / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"gpuwatch_canary_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.on_gpu:
            self.torch.cuda.synchronize(self.device)

    def join(self) -> Any:
        """Meet the other ranks; return torch.distributed."""
        self.phase("join")
        distributed = self.torch.distributed
        if self.joined is None:
            self.joined = distributed.FileStore(str(self.scratch / "store"), self.ranks)
            distributed.init_process_group(
                "nccl" if self.on_gpu else "gloo",
                store=distributed.PrefixStore("group", self.joined),
                rank=self.rank,
                world_size=self.ranks,
                timeout=datetime.timedelta(seconds=JOIN_SECONDS),
            )
        return distributed

    def transports(self) -> list[str]:
        """Return how the ranks are joined, as NCCL logs it: P2P, SHM, NET/Socket, ..."""
        log = self.scratch / f"nccl.{os.getpid()}"
        text = log.read_text(errors="replace") if log.exists() else ""
        return sorted(set(re.findall(r"\] via (P2P|SHM|NET/\w+)", text)))

    def nccl(self) -> dict[str, str | None]:
        """Return the version of NCCL, and the algorithm of the last collective, if NCCL told it."""
        if not self.on_gpu:
            return {"algorithm": "gloo"}
        version = ".".join(map(str, self.torch.cuda.nccl.version()))
        log = self.scratch / f"nccl.{os.getpid()}"
        text = log.read_text(errors="replace") if log.exists() else ""
        found = re.findall(r"-> Algo (\w+) proto (\w+)", text)
        if not found:
            return {"nccl": version}
        name = found[-1][0].lower()
        if name.isdigit():  # older ones tell its number
            name = ALGORITHMS[int(name)] if int(name) < len(ALGORITHMS) else name
        return {"nccl": version, "algorithm": name}


def main() -> int:
    """Run the canary of the settings; 0 if it told all its results."""
    output = os.dup(1)
    os.dup2(2, 1)
    settings = json.load(sys.stdin)
    worker = Worker(settings, output)
    _be_seen_as(TITLE)
    _follow_parent(settings["parent"])
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
    status = 1
    try:
        _work(worker)
        status = 0
    except Stopped:
        worker.error("stopped")
    except NotReady as fault:
        worker.error(str(fault), ENVIRONMENT)
    except Exception as fault:  # noqa: BLE001 - the one guard: torch's errors become one line
        text = f"{type(fault).__name__}: {fault}"
        advice = [line for pattern, line in NOT_READY if re.search(pattern, text)]
        if advice:
            worker.error(advice[0], ENVIRONMENT)
        elif "out of memory" in text.lower():
            worker.error(f"out of memory at size {worker.size}: choose --size small")
        else:
            worker.error(text)
    # Not by way of torch's own end, which may wait for ever for a collective that hangs.
    os._exit(status)


def _work(worker: Worker) -> None:
    if worker.settings["cpus"]:  # before torch starts its threads
        _stay_on(worker.settings["cpus"])
    if worker.rank == 0:
        _start_siblings(worker)
    worker.phase("import")
    _import_torch(worker)
    worker.phase("context")
    start = time.monotonic_ns()
    _open_device(worker)
    worker.settings["context_ns"] = (start, time.monotonic_ns())
    worker.phase("prepare")
    worker.canary(worker.settings["canary"]).run(worker)
    worker.phase("end")
    for sibling in worker.siblings:
        if sibling.wait():
            raise RuntimeError(f"a rank ended with status {sibling.returncode}")


def _import_torch(worker: Worker) -> None:
    here = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != here]  # its names are none of torch's
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise NotReady(
            f"{sys.executable}: no torch ({error}): pip install 'gpuwatch[torch]', or name an"
            " interpreter that has it in [canary] python"
        ) from error
    worker.torch = torch
    if worker.on_gpu and torch.version.cuda is None:
        raise NotReady(
            f"{sys.executable}: torch {torch.__version__} is built without CUDA: install one with"
            " it, or name an interpreter that has it in [canary] python"
        )


def _open_device(worker: Worker) -> None:
    """Make the context and run a first kernel."""
    torch = worker.torch
    if worker.on_gpu:
        torch.cuda.init()
        if torch.cuda.device_count() <= worker.rank:
            raise NotReady(
                f"CUDA sees {torch.cuda.device_count()} of {worker.ranks} GPUs: see what"
                " torch.cuda.init() says with CUDA_VISIBLE_DEVICES"
                f"={os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
            )
        worker.device = torch.device("cuda", worker.rank)
        torch.cuda.set_device(worker.device)
    else:
        worker.device = torch.device("cpu")
        torch.set_num_threads(1)
    torch.ones(1, device=worker.device).add_(1)
    worker.synchronize()


def _start_siblings(worker: Worker) -> None:
    for rank in range(1, worker.ranks):
        sibling = subprocess.Popen(
            [sys.executable, *sys.argv],
            stdin=subprocess.PIPE,
            stdout=worker._output,
        )
        worker.siblings.append(sibling)
        assert sibling.stdin is not None
        settings = {**worker.settings, "rank": rank, "parent": os.getpid()}
        sibling.stdin.write(json.dumps(settings).encode())
        sibling.stdin.close()
        threading.Thread(target=_watch, args=(worker, sibling, rank), daemon=True).start()


def _watch(worker: Worker, sibling: subprocess.Popen[bytes], rank: int) -> None:
    """End this process if another rank fails: it would wait for it for ever."""
    status = sibling.wait()
    if status:
        worker.error(f"rank {rank} ended with status {status}")
        os._exit(1)


def _be_seen_as(title: bytes) -> None:
    """Put a name in the place of the command line, where ps finds it; see proc(5), arg_start."""
    try:
        Path("/proc/self/comm").write_bytes(title)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # its fields 48 and 49, after two
        if start > 0 and start + len(title) < end:
            ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)
    except (OSError, IndexError, ValueError):
        return  # a system that does not show them


def _follow_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before it could be watched
        os._exit(1)


def _stay_on(cpus: list[int]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return  # a container that has none of them: then it runs where it may


if __name__ == "__main__":
    sys.exit(main())

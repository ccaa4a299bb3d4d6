"""A canary's run: a child in a process group of its own, with a deadline for each of its phases.

What torch, CUDA or NCCL do to that child stays there: it may hang, crash, print what it likes or
start others; in the end the whole group is gone, or the run says that it is not.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from gpuwatch import told
from gpuwatch.canaries import CANARIES, LOADS
from gpuwatch.capabilities import follow
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.errors import ConfigError
from gpuwatch.process import cause, lives, started

WORKER = Path(__file__).with_name("canary_worker.py")
# Seconds that each phase may take; "import" of torch from a cold network disk takes longest.
DEADLINES: Mapping[str, float] = {
    "start": 20.0,
    "import": 120.0,
    "context": 30.0,
    "prepare": 20.0,
    "join": 30.0,
    "agree": 20.0,
    "warm_up": 10.0,
    "measure": 10.0,
    "leave": 10.0,
    "end": 10.0,
}
OTHER_SECONDS = 10.0
LONGEST_SECONDS = 300.0
# In these no GPU was asked for anything: what goes wrong there is the interpreter's.
BEFORE_GPU = ("start", "import")
# Phases that follow each other fast: one that lasts longer, when there is no more time, hangs. What
# comes before and after may take its time, as where a driver or NCCL is loaded slowly.
FAST = ("warm_up", "measure")
STILL_SECONDS = 3.0
GRACE_NS = int(0.3 * SECOND_NS)  # between a word and a kill
GONE_SECONDS = 2.0  # until what was killed has ended, unless it is in a driver call
BLOCK_BYTES = 64 * 1024
BLOCKS = 16  # at a time: there may be no end of it
LINES = 1000  # of one run
LINE_BYTES = 64 * 1024
TAIL_BYTES = 8 * 1024  # of what it says on standard error
# What makes a hang shorter, and ranks of one node find each other. All else of NCCL stays as the
# site has set it.
ANY_NCCL = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,TUNING",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
# By the node's own links alone.
NCCL = {
    **ANY_NCCL,
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",  # or one that the site has set would be missed
    "NCCL_NET_PLUGIN": "none",
}
# By its NICs alone, between all neighbours. Which network, plugin and NICs is left to the site.
NCCL_BY_NICS = {
    **ANY_NCCL,
    "NCCL_ALGO": "Ring",
    "NCCL_NET_DISABLE_INTRA": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_PXN_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}

Ended = Literal["ok", "failed", "aborted", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, and the readings it gave, as the child wrote them.

    `ended`: "ok"; "failed", it did not come to its end; "aborted", somebody needed the GPU;
    "skipped", this machine or interpreter cannot run it. `fault` is why, in a line. `stuck` are
    processes that a kill did not end: they hold a driver call. `context_ns` is when it began to
    make its context, 0 if it never did, and `seconds` how long it was from then to its end.
    """

    ended: Ended
    readings: Sequence[Mapping[str, Any]] = ()
    fault: str = ""
    stuck: Sequence[int] = ()
    context_ns: int = 0
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a run is to do: a canary at a size, on GPUs by uuid or on so many processes of the CPU.

    `cpus` are the processors to stay on, none for all. `seconds` is for how long a load goes on,
    `sizes` are those of a sweep instead of one `size`. No run takes longer than `longest_seconds`,
    whatever it says.
    """

    canary: str
    size: int
    gpus: Sequence[str] = ()
    processes: int = 1
    cpus: Sequence[int] = ()
    bursts: int = 10
    burst_seconds: float = 0.02
    warm_seconds: float = 0.2
    rest_seconds: float = 0.4
    seconds: float = 0.0
    sizes: Sequence[int] = ()
    longest_seconds: float = LONGEST_SECONDS
    deadlines: Mapping[str, float] = field(default_factory=lambda: DEADLINES)

    @property
    def ranks(self) -> int:
        """How many processes take part."""
        return len(self.gpus) or self.processes

    def settings(self, scratch: str) -> dict[str, Any]:
        """Return what the child is told."""
        return {
            "canary": self.canary,
            "size": self.size,
            "device": "gpu" if self.gpus else "cpu",
            "ranks": self.ranks,
            "cpus": list(self.cpus),
            "seed": 1,
            "bursts": self.bursts,
            "burst_seconds": self.burst_seconds,
            "warm_seconds": self.warm_seconds,
            "rest_seconds": self.rest_seconds,
            "seconds": self.seconds,
            "sizes": list(self.sizes) or [self.size],
            "scratch": scratch,
            "parent": os.getpid(),
        }


class Run:
    """One canary that runs; `poll` it until it gives its outcome. To be used in a `with` block.

    `python` is the interpreter, by an absolute path, `worker` the file that it runs. Raises
    ConfigError if that is no interpreter, OSError if nothing can be started.
    """

    def __init__(self, task: Task, python: str, worker: Path = WORKER) -> None:
        assert task.canary in CANARIES or task.canary in LOADS
        self.task = task
        self._python = python
        self._got_ready = False  # it, or another rank, has its interpreter and torch
        self._lines = 0
        self._readings: list[Mapping[str, Any]] = []
        self._error: tuple[str, str] | None = None
        self._stopped = ""
        self._kill_ns = self._context_ns = 0
        self._output = self._errors = b""
        with contextlib.ExitStack() as undo:
            self.scratch = tempfile.mkdtemp(prefix="gpuwatch-canary-")
            undo.callback(shutil.rmtree, self.scratch, ignore_errors=True)
            Path(self.scratch, "mps").mkdir()
            try:
                self._popen = started(
                    [python, str(worker)],
                    task.settings(self.scratch),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self._environment(),
                    cwd=self.scratch,
                    preexec_fn=follow(signal.SIGKILL),
                    process_group=0,
                )
            except OSError as error:
                if error.filename == python:
                    text = f"[canary] python {python}: {error.strerror}: name one with torch"
                    raise ConfigError(text) from error
                raise
            undo.pop_all()
        self.group = self._popen.pid
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._began_ns = monotonic_ns()
        self._phase("start")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        """Return the caller's environment, changed so that the run touches its own GPUs alone."""
        canary = CANARIES.get(self.task.canary)
        chosen = {
            **(NCCL_BY_NICS if canary and canary.by_nics else NCCL),
            "NCCL_DEBUG_FILE": f"{self.scratch}/nccl.%p",
            "CUDA_VISIBLE_DEVICES": ",".join(self.task.gpus),
            # A users' MPS server would share its fate with us; the driver looks for it by itself.
            "CUDA_MPS_PIPE_DIRECTORY": f"{self.scratch}/mps",
            "CUDA_MODULE_LOADING": "LAZY",
        }
        return {**os.environ, **chosen}

    def poll(self) -> Outcome | None:
        """Return the outcome once the run has ended, None before; never waits for long."""
        self._read()
        now = monotonic_ns()
        if self._popen.poll() is None:
            if self._kill_ns:
                return self._end() if now > self._kill_ns else None
            longest_ns = int(self.task.longest_seconds * SECOND_NS)
            if now > min(self._deadline_ns, self._began_ns + longest_ns):
                seconds = (now - self._phase_ns) / SECOND_NS
                still = self.phase in FAST and seconds > STILL_SECONDS
                hangs = still or now > self._deadline_ns
                what = "hangs" if hangs else f"not done in {self.task.longest_seconds:.0f} s"
                self._stopped = f"{what}: {seconds:.1f} s in phase {self.phase}"
                return self._end()
            return None
        return self._end()

    def stop(self, why: str) -> None:
        """Have it end within half a second, because somebody needs the GPU."""
        if not self._kill_ns:
            self._stopped = why
            self._kill_ns = monotonic_ns() + GRACE_NS
            self._error = ("", "aborted")
            self._signal(signal.SIGTERM)

    def kill(self) -> list[int]:
        """End all of its group; return the processes that have not ended soon after."""
        self._signal(signal.SIGKILL)
        end = time.monotonic() + GONE_SECONDS
        while (left := members(self.group)) and time.monotonic() < end:
            self._popen.poll()
            time.sleep(0.01)
        self._popen.poll()
        return left

    def owns(self, pid: int) -> bool:
        """Say whether a process is one of the run's, or has ended."""
        try:
            return os.getpgid(pid) == self.group
        except ProcessLookupError:
            return True

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)

    def _phase(self, name: str) -> None:
        self.phase = name
        self._phase_ns = monotonic_ns()
        if name == "context":
            self._context_ns = self._phase_ns
        seconds = self.task.deadlines.get(name, OTHER_SECONDS)
        self._deadline_ns = self._phase_ns + int(seconds * SECOND_NS)

    def _end(self) -> Outcome:
        status = self._popen.poll()  # of its own accord
        stuck = self.kill()
        self._read()
        text, why = self._error or ("", "")
        ended: Ended = "failed"
        if why == "aborted":
            ended, fault = "aborted", self._stopped
        elif self._stopped:
            fault = self._stopped
        elif text:
            ended, fault = "skipped" if why == "environment" else "failed", text
        elif status != 0:
            fault = f"ended by {cause(status or 0)} in phase {self.phase}{self._last_words()}"
        elif not self._readings:
            fault = "ended without a result"
        else:
            ended, fault = "ok", ""
        if ended == "failed" and not self._got_ready and not stuck:
            ended, fault = "skipped", f"{self._python}: {fault}: mend it, or [canary] python"
        if stuck:
            fault += f": process {stuck[0]} does not end when killed: reset the GPU or reboot"
        seconds = (monotonic_ns() - self._context_ns) / SECOND_NS if self._context_ns else None
        return Outcome(
            ended=ended,
            readings=self._readings,
            fault=told.text(" ".join(fault.split())),  # torch says it in lines and colours
            stuck=stuck,
            context_ns=self._context_ns,
            seconds=seconds,
        )

    def _last_words(self) -> str:
        lines = self._errors.decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""

    def _read(self) -> None:
        """Take in what has come."""
        out, errors = self._popen.stdout, self._popen.stderr
        assert out is not None
        assert errors is not None
        self._errors = (self._errors + _block(errors.fileno()))[-TAIL_BYTES:]
        for _ in range(BLOCKS):
            if not (block := _block(out.fileno())):
                return
            *lines, self._output = (self._output + block).split(b"\n")
            for line in lines:
                self._take(line)
            if len(self._output) > LINE_BYTES:
                self._take(self._output)
                self._output = b""

    def _take(self, line: bytes) -> None:
        self._lines += 1
        try:
            if self._lines > LINES:
                raise ValueError
            match json.loads(line):
                case {"phase": str(name), "rank": int(rank)}:
                    self._got_ready = self._got_ready or name not in BEFORE_GPU
                    if rank == 0:
                        self._phase(name)
                case {"reading": dict(reading)}:
                    self._got_ready = True
                    self._readings.append(reading)
                case {"error": str(text), "cause": str(why)}:
                    self._error = self._error or (text, why)
                case _:
                    raise ValueError
        except (ValueError, RecursionError):
            shown = line[:80].decode(errors="replace")
            self._stopped = self._stopped or f"says what is no result: {shown!r}"
            self._kill_ns = self._kill_ns or monotonic_ns()


def members(group: int) -> list[int]:
    """Return the processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            its_group = (path / "stat").read_text().rpartition(")")[2].split()[2]
            if int(its_group) == group and lives(path):
                found.append(int(path.name))
    return found


def _block(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, BLOCK_BYTES)
    except BlockingIOError:
        return b""

"""What holds for all canaries of a host: whether it lets them run, one session, who outlived one.

A session is whoever runs canaries: the daemon's job, or a user's command. It holds a lock in the
runtime directory for as long as it runs, which the kernel takes from it when it ends, however that
is.
"""

import contextlib
import fcntl
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuwatch.busy import Host, Obstacle, host_reason
from gpuwatch.canary_worker import TITLE
from gpuwatch.errors import ConfigError
from gpuwatch.paths import CONTROL, control_socket
from gpuwatch.process import lives
from gpuwatch.slurm import jobs

LOCK = "canary.lock"
MARK = "GPUWATCH_CANARY_LOCK"  # in the environment of a session's canaries
WAIT_SECONDS = 0.1
ASK_SECONDS = 0.5  # how often it is looked whether canaries are to run no more
LEAST_SECONDS = 0.3  # who only asks whether a session runs has the lock for a moment
RUNS_ALREADY = "canaries run already on this host: try again later"
HOST_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h: the host's own process ids
WITHOUT_CUDA = re.compile(r"^cuda\b.*= None$", re.MULTILINE)  # in torch/version.py
EXTRA = "pip install 'gpuwatch[torch]', or name an interpreter that has it in [canary] python"


def hindrance(config: Mapping[str, Any]) -> str:
    """Return why the daemon of this host runs no canaries by itself, "" if it does."""
    if config["source"]["kind"] != "nvml":
        return "the GPUs are made up or of a recording"
    if not config["canary"]["enabled"]:
        return "[canary] enabled is false"
    if not config["canary"]["run"]:
        return "[canary] run names none"
    if python := config["canary"]["python"]:
        fault = no_interpreter(python)
    else:
        found = importlib.util.find_spec("torch")
        fault = unfit_torch(found.origin if found else None)
    if fault:
        return fault
    if not _sees_host(Path(config["paths"]["procfs"])):
        return (
            "a container without the host's process ids cannot see who uses a GPU: start it with"
            " them (hostPID: true, --pid=host)"
        )
    return ""


def interpreter(configured: str) -> str:
    """Return the interpreter that canaries run with: gpuwatch's own if none is configured."""
    # Not resolved: an environment is known by its link.
    return str(Path(configured or sys.executable).absolute())


def no_interpreter(python: str) -> str:
    """Return why a program is no interpreter for canaries, "" if it may be."""
    if os.access(python, os.X_OK) and Path(python).is_file():
        return ""
    return f"[canary] python {python}: not an interpreter: name one with torch"


def unfit_torch(package: str | None) -> str:
    """Return why torch, by the file of the package, cannot run on GPUs, "" if it may."""
    if package is None:
        return f"no torch: {EXTRA}"
    with contextlib.suppress(OSError, ValueError):
        if WITHOUT_CUDA.search(Path(package).with_name("version.py").read_text()):
            return f"torch is built without CUDA: {EXTRA}"
    return ""


def present(procfs: Path, released: frozenset[str], own_job: str = "") -> Host:
    """Return what speaks against a canary now; `own_job` is Slurm's id of the job that asks."""
    return Host(host_pids=_sees_host(procfs), jobs=jobs(procfs) - {own_job}, released=released)


class NewJob:
    """Says which job of the scheduler has come since it was made, None if none has."""

    def __init__(self, procfs: Path, own_job: str = "") -> None:
        self._procfs, self._known = procfs, jobs(procfs) | {own_job}
        self._asked = time.monotonic()
        self._why: Obstacle | None = None

    def __call__(self) -> Obstacle | None:
        """Look, twice a second at most."""
        now = time.monotonic()
        if now - self._asked > ASK_SECONDS:
            self._asked = now
            self._why = host_reason(Host(jobs=jobs(self._procfs) - self._known))
        return self._why


def _sees_host(procfs: Path) -> bool:
    with contextlib.suppress(OSError):
        return str((procfs / "self/ns/pid").readlink()) == HOST_PIDS
    return False


def lock_of(config: Mapping[str, Any], flag: str | None) -> Path:
    """Return the lock of the daemon that runs, as `config` or --path.runtime (`flag`) say."""
    here = Path(config["paths"]["runtime"]) / CONTROL
    return (here if flag or here.exists() else control_socket(None)).with_name(LOCK)


@contextlib.contextmanager
def only_session(lock: Path, wait_seconds: float = 0.0) -> Iterator[bool]:
    """Hold the host's lock for the block; False if another session has it, for all of the wait.

    What is started meanwhile is marked as the session's by its environment. Raises ConfigError if
    the lock cannot be used.
    """
    try:
        descriptor = _opened(lock)
    except OSError as error:
        raise ConfigError(f"{lock}: {error.strerror}: run as root or set --path.runtime") from error
    os.environ[MARK] = str(lock)
    end = time.monotonic() + max(wait_seconds, LEAST_SECONDS)
    try:
        while not (taken := _take(descriptor)) and time.monotonic() < end:
            time.sleep(WAIT_SECONDS)
        yield taken
    finally:
        os.environ.pop(MARK, None)
        os.close(descriptor)


def session_runs(lock: Path) -> bool:
    """Say whether a session holds the lock; True as well if that cannot be known."""
    try:
        descriptor = _opened(lock)
    except OSError:
        return True
    try:
        return not _take(descriptor)
    finally:
        os.close(descriptor)


def _opened(lock: Path) -> int:
    """Open the lock for reading, which is enough, so that every user of the host heeds it."""
    with contextlib.suppress(FileNotFoundError):
        return os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    lock.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    os.fchmod(descriptor, 0o644)
    return descriptor


def _take(descriptor: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def processes(lock: Path) -> list[int]:
    """Return the processes of this lock's sessions; while none runs those that they left.

    Those of another user cannot be told from what only has their name, and are left out.
    """
    mark, found = f"{MARK}={lock}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if (path / "comm").read_bytes().strip() != TITLE or not lives(path):
                continue
            if (path / "stat").read_text().rpartition(")")[2].split()[0] in "DZ":
                # It may have no memory any more, or a driver call may keep others out of it.
                ours = path.stat().st_uid == os.geteuid()
            else:
                ours = mark in (path / "environ").read_bytes().split(b"\0")
            if ours:
                found.append(int(path.name))
    return found

"""Child processes: how they are started and ended; of one of the supervisor what its pulse says."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuwatch import pulse as page
from gpuwatch.capabilities import confine
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.pulse import Pulse

log = logging.getLogger("gpuwatch.supervisor")

MOST_BYTES = 1 << 30  # of memory of its own that a child may have: more is a leak


def settings_file(settings: Mapping[str, Any]) -> int:
    """Return a descriptor of an unnamed file that holds `settings` as JSON, at its start."""
    descriptor = os.memfd_create("gpuwatch-settings", os.MFD_CLOEXEC)
    os.write(descriptor, json.dumps(settings).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def started(
    command: Sequence[str], settings: Mapping[str, Any], **how: Any
) -> subprocess.Popen[bytes]:
    """Start a child that reads its settings on standard input; `how` is as Popen has it.

    Raises OSError.
    """
    stdin = settings_file(settings)
    try:
        child: subprocess.Popen[bytes] = subprocess.Popen(command, stdin=stdin, **how)
    finally:
        os.close(stdin)
    return child


def cause(status: int) -> str:
    """Say how a child ended, by its exit status as subprocess gives it."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def lives(path: Path) -> bool:
    """Say whether a process, by its directory of /proc, has not ended.

    One that was killed shows its first thread as dead while another is still in a driver call.
    """
    with contextlib.suppress(OSError):
        return any(
            (task / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            for task in (path / "task").iterdir()
        )
    return False


def own_bytes(pid: int) -> int:
    """Return the memory that a process shares with no file and nobody, 0 of one that has ended."""
    with contextlib.suppress(OSError, ValueError):
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    return 0


class Process:
    """One running child. `still_ns` is how long its pulse has shown no progress.

    That time is counted in the supervisor's own waking time, so a machine that stood still, or a
    supervisor that was not scheduled, does not look like a child that hangs. One that grows beyond
    1 GiB is killed.
    Raises OSError if it cannot be started: too many processes, files or too little memory.
    """

    LOOK_NS = 250_000_000

    def __init__(
        self,
        arguments: Sequence[str],
        settings: Mapping[str, Any],
        *,
        generation: int,
        keep: Sequence[str] = (),
        death_signal: signal.Signals = signal.SIGTERM,
        descriptors: Sequence[int] = (),
    ) -> None:
        self.generation = generation
        self.pulse = Pulse.create(generation)
        self.started_ns = monotonic_ns()
        self.still_ns = 0
        self._seen = (0, 0)
        self._looked_ns = self._weighed_ns = self.started_ns
        with contextlib.ExitStack() as undo:
            undo.callback(self.pulse.close)
            self._popen = started(
                [sys.executable, "-P", "-m", *arguments],
                {**settings, "generation": generation, "pulse": self.pulse.descriptor},
                pass_fds=(self.pulse.descriptor, *descriptors),
                preexec_fn=confine(keep, death_signal),
            )
            undo.pop_all()
        self.pid = self._popen.pid

    def look(self) -> None:
        """Note whether the pulse has moved since the last look, and end it if it grew too large."""
        now = monotonic_ns()
        if now - self._weighed_ns > SECOND_NS:
            self._weighed_ns = now
            if (size := own_bytes(self.pid)) > MOST_BYTES:
                self._weighed_ns = sys.maxsize  # told once
                log.error("child %d takes %d MiB of memory: killing it", self.pid, size >> 20)
                self._popen.kill()
        seen = (self.pulse.words[page.HEARTBEAT], self.pulse.words[page.READING])
        if seen != self._seen:
            self.still_ns = 0
        else:
            self.still_ns += min(now - self._looked_ns, self.LOOK_NS)
        self._seen, self._looked_ns = seen, now

    @property
    def phase(self) -> str:
        """The phase the child shows."""
        return self.pulse.phase

    @property
    def in_call(self) -> bool:
        """Whether it may be in a driver call: opening and closing are calls from end to end."""
        return self.phase in ("opening", "closing") or self.pulse.reading() is not None

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._popen.poll()

    @property
    def lived_ns(self) -> int:
        """How long ago it was started."""
        return monotonic_ns() - self.started_ns

    def abandon(self) -> None:
        """Give up on it without a kill: when its call returns it sees it is not current, and ends.

        A thread that spins in a driver call must not do so in front of everything else.
        """
        self.pulse.words[page.GENERATION] = -1
        with contextlib.suppress(OSError):
            os.sched_setscheduler(self.pid, os.SCHED_OTHER, os.sched_param(0))

    def terminate(self) -> None:
        """Ask it to end."""
        if self._popen.poll() is None:
            self._popen.terminate()

    def kill(self) -> None:
        """End it; only for a process that is in no driver call."""
        if self._popen.poll() is None:
            self._popen.kill()

    def close(self) -> None:
        """Let go of its pulse, once it has ended."""
        self.pulse.close()

"""One-off children that the daemon asks for: a recorder, canaries; each has a deadline.

The daemon may not start processes itself: the process that serves HTTP must stay small and safe.
"""

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

from gpuwatch.capabilities import confine
from gpuwatch.clock import SECOND_NS, monotonic_ns

MODULES = {
    "canaries": "gpuwatch.canary_job",
    "recorder": "gpuwatch.recording",
    "salvage": "gpuwatch.salvage",
}
GRACE_NS = 3 * SECOND_NS
OUTPUT_BYTES = 64 * 1024


class Job:
    """A running one-off child in a process group of its own."""

    def __init__(self, number: int, kind: str, settings: int, deadline_seconds: float) -> None:
        """Start it; `settings` is an open descriptor that becomes its standard input.

        Raises KeyError for an unknown kind, OSError if it cannot be started.
        """
        self.number = number
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULES[kind]],
            stdin=settings,
            stdout=subprocess.PIPE,
            preexec_fn=confine(),
            process_group=0,
        )
        assert self._popen.stdout is not None
        self._stdout = self._popen.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._output = b""
        self._deadline_ns = monotonic_ns() + int(deadline_seconds * SECOND_NS)
        self.awaited = True  # False once the daemon that asked has ended
        self._late = False

    def poll(self) -> dict[str, Any] | None:
        """Return the message for the daemon once the child has ended, None before."""
        self._read()
        status = self._popen.poll()
        if status is None:
            if monotonic_ns() > self._deadline_ns:
                self._late = True
                self.kill()
            return None
        self._read()
        self._stdout.close()
        return {
            "job": self.number,
            "status": status,
            "late": self._late,
            "output": self._output.decode(errors="replace"),
        }

    def end(self) -> None:
        """Ask it to end; after a grace it is killed."""
        if self._popen.poll() is None:
            self._popen.terminate()
        self._deadline_ns = min(self._deadline_ns, monotonic_ns() + GRACE_NS)

    def kill(self) -> None:
        """End the child and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._stdout.fileno(), OUTPUT_BYTES):
                self._output = (self._output + chunk)[-OUTPUT_BYTES:]

"""What every long-lived child does first: take its settings, heed signals, keep a pulse.

The supervisor hands settings over as JSON on an inherited descriptor (standard input), never on
the command line, where every user of the host could read them.
"""

import contextlib
import errno
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuwatch import pulse as page
from gpuwatch.clock import monotonic_ns
from gpuwatch.pulse import Pulse

EXIT_UNAVAILABLE = 75  # sysexits EX_TEMPFAIL: start me again, this is no crash
MAX_RETRY_SECONDS = 30.0


def no_room(fault: OSError) -> str:
    """Return the line about a file of the runtime directory that could not be made."""
    fix = "make it writable"
    if fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        fix = "free some space"
    elif fault.errno in (errno.EMFILE, errno.ENFILE):
        fix = "allow more of them (a systemd unit: LimitNOFILE=)"
    return f"{fault.filename or 'rings'}: {fault.strerror}: {fix}"


class Child:
    """The running child as the supervisor sees it."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = json.load(sys.stdin.buffer)
        self.config: dict[str, Any] = self.settings["config"]
        self.generation: int = self.settings["generation"]
        self.pulse = Pulse(self.settings["pulse"])
        self.stopping = False
        # An RDMA port has some 40 files; the usual limit of 1024 is that of select(), unused here.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with contextlib.suppress(OSError):  # so that the kernel's log of a kill says whom it was
            Path("/proc/self/comm").write_text("gpuwatch")
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the supervisor too
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.beat(page.STARTING)

    def _stop(self, _number: int, _frame: object) -> None:
        self.stopping = True

    def beat(self, phase: int) -> None:
        """Show the phase and that this process runs."""
        self.pulse.words[page.PHASE] = phase
        self.pulse.words[page.HEARTBEAT] = monotonic_ns()

    @property
    def current(self) -> bool:
        """False once the supervisor has abandoned this process: then it must not write."""
        return self.pulse.words[page.GENERATION] == self.generation

    def announce(self, duty: str, rings: Sequence[Path], about: Mapping[str, Any]) -> None:
        """Write the duty's manifest: which rings there are, and what is known of their content.

        Raises OSError if it cannot be written. Who hung and was abandoned, or outlived the
        supervisor, must not write over the manifest of a child that took over.
        """
        manifest = {
            "duty": duty,
            "generation": self.generation,
            "pid": os.getpid(),
            "rings": [str(path) for path in rings],
            **about,
        }
        path = Path(self.config["paths"]["runtime"]) / f"{duty}.json"
        temporary = path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(manifest))
        temporary.chmod(0o640)
        if self.current and not self.stopping:
            temporary.replace(path)

    def unavailable(self, reason: str) -> int:
        """Report `reason` until it is time for the next try; return the exit status.

        The wait doubles with each failed attempt. A new process tries, because a driver library
        once loaded keeps its version.
        """
        self.pulse.set_names([reason])
        self.pulse.words[page.READING] = page.NOT_READING
        wait = min(MAX_RETRY_SECONDS, 2.0 ** self.settings.get("attempt", 0))
        end = time.monotonic() + wait
        while not self.stopping and self.current and time.monotonic() < end:
            self.beat(page.UNAVAILABLE)
            time.sleep(min(0.1, wait))
        return EXIT_UNAVAILABLE

"""How far `gpuwatch verify` is: one line that changes on a terminal, else a line for each check."""

import sys
import time
from collections.abc import Iterable, Sequence

from gpuwatch.examination import Examination
from gpuwatch.verify import Check, Finding, worst

CLEAR = "\r\x1b[K"


class Progress:
    """Told on standard error, so that the report alone is on standard output."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self._count = len(checks)
        self._live = sys.stderr.isatty()
        self._begun = 0
        self._told = 0  # findings
        self._start = time.monotonic()
        self._check: Check | None = None
        if self._live:
            self._say("asking the driver ...", end="")

    def begin(self, check: Check, examination: Examination) -> None:
        """Say that a check begins, and what came of the one before."""
        self._done(examination)
        self._begun += 1
        self._check = check
        if self._live:
            seconds = time.monotonic() - self._start
            self._say(f"[{self._begun}/{self._count}] {check.name} ... ({seconds:.0f} s)", end="")

    def end(self, examination: Examination) -> None:
        """Say what came of the last one."""
        self._done(examination)
        if self._live:
            self._say("", end="")

    def interrupted(self, findings: Iterable[Finding]) -> None:
        """Say what was done so far."""
        done = max(0, self._begun - 1)
        verdicts = [found.verdict for found in findings if not found.thumb]
        found = f": the worst of it is {worst(verdicts)}" if verdicts else ""
        self._say(
            f"interrupted: {done} of {self._count} checks were done{found}; nothing was written"
        )

    def _done(self, examination: Examination) -> None:
        if self._check is None:
            return
        found = [one for one in examination.findings[self._told :] if not one.thumb]
        self._told = len(examination.findings)
        verdict = worst(one.verdict for one in found) if found else "nothing to judge"
        seconds = examination.ran[-1].seconds
        if not self._live:
            name = self._check.name
            self._say(f"[{self._begun}/{self._count}] {name}: {verdict}, {seconds:.1f} s")
        self._check = None

    def _say(self, text: str, end: str = "\n") -> None:
        clear = CLEAR if self._live else ""
        print(f"{clear}{text}", end=end, file=sys.stderr, flush=True)

"""Checks for tests of `gpuwatch verify`: they find what they are told, or end badly.

As a program it is the command with these checks: a list of {"name", "find": [...]} in $CHECKS.
"""

import json
import os
import signal
import subprocess
import sys
import time

from gpuwatch import checks
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.cli import main
from gpuwatch.errors import SourceUnavailable
from gpuwatch.verify import Finding


class Scripted:
    """A check that yields findings, and then does what `then` says."""

    help = "what a test scripted"

    def __init__(
        self, name, find=(), read=(), then="", phase="static", essential=False, deep_only=False,
        bound=20.0,
    ):  # fmt: skip
        self.name, self.phase, self.essential, self.deep_only = name, phase, essential, deep_only
        self._find, self._read, self._then, self._bound = find, read, then, bound

    def bound_seconds(self, gpus, deep):
        return self._bound

    def run(self, node):
        assert node.gpus
        for found in self._find:
            yield Finding(**{"name": self.name, "entity": "host", **found})
        for reading in self._read:
            yield CanaryReading.from_json(reading)
        match self._then:
            case "raise":
                raise ValueError("of all things")
            case "unavailable":
                raise SourceUnavailable("nvml: gone")
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "leave":
                os._exit(0)
            case "print":
                os.write(1, b"noise")
                os.write(2, b"noise")
            case "nonsense":
                point = (1.0, float("nan"))
                yield Finding(name=self.name, entity="\udce9", verdict="PASS", value=float("inf"),
                              curve=(point,))  # fmt: skip
                yield Finding(name=self.name, entity="host", verdict="GOOD")
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(1000)
            case "work":
                with subprocess.Popen(["sleep", "1000"]) as child:
                    try:
                        child.wait()
                    finally:
                        child.kill()


if __name__ == "__main__":
    checks.CHECKS = tuple(Scripted(**one) for one in json.loads(os.environ["CHECKS"]))
    sys.exit(main())

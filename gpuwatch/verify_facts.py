"""What the driver tells of a node, asked for by a child that may hang in our place."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuwatch.capabilities import follow
from gpuwatch.process import cause, started

FIRST_SECONDS = 30.0  # a driver without persistence takes long the first time after boot
GPU_SECONDS = 10.0
SECONDS = 60.0  # for all of it
CLOSE_SECONDS = 0.5
BLOCK_BYTES = 64 * 1024


@dataclass(slots=True, kw_only=True)
class Answers:
    """What `verify_child` has told; `fault` is why there is no driver, or "".

    `here` are the numbers of all GPUs, also of those that nobody asked for.
    """

    driver: dict[str, Any] = field(default_factory=dict)
    here: list[int] = field(default_factory=list)
    gpus: dict[int, dict[str, Any]] = field(default_factory=dict)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    fault: str = ""


def collect(
    sysfs: Path,
    numbers: Mapping[str, int],
    wanted: Sequence[int],
    gpu_seconds: float = GPU_SECONDS,
) -> Answers:
    """Ask for all of it; a GPU that hangs has a fault, and the others are asked anew without it.

    Takes a minute at most. Raises OSError if no child can be started.
    """
    end = time.monotonic() + SECONDS
    hung: dict[int, dict[str, Any]] = {}
    while True:
        settings = {
            "sysfs": str(sysfs),
            "numbers": dict(numbers),
            "gpus": list(wanted),
            "excluded": list(hung),
        }
        answers, opening = _told(settings, end, gpu_seconds)
        if opening is None or time.monotonic() > end:
            answers.gpus |= hung
            answers.gpus = dict(sorted(answers.gpus.items()))
            return answers
        hung[opening["gpu"]] = {
            **opening,
            "fault": f"the driver does not answer within {gpu_seconds:g} s",
        }


def _told(
    settings: Mapping[str, Any], end: float, gpu_seconds: float
) -> tuple[Answers, dict[str, Any] | None]:
    """Return what a child tells, and the GPU that it hangs at, if it does."""
    child = started(
        [sys.executable, "-P", "-m", "gpuwatch.verify_child"],
        settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=follow(signal.SIGKILL),
    )
    assert child.stdout is not None
    answers, opening, buffer = Answers(), None, b""
    limit = time.monotonic() + FIRST_SECONDS
    try:
        while True:
            left = min(limit, end) - time.monotonic()
            if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
                if opening is None:
                    answers.fault = "the driver does not answer: look at the kernel log, or reboot"
                return answers, opening
            block = os.read(child.stdout.fileno(), BLOCK_BYTES)
            if not block:
                status = child.wait(CLOSE_SECONDS)
                answers.fault = (
                    f"the question to the driver ended by {cause(status)}: look at the kernel log"
                )
                return answers, None
            *lines, buffer = (buffer + block).split(b"\n")
            for line in lines:
                limit = time.monotonic() + gpu_seconds
                match json.loads(line):
                    case {"driver": driver}:
                        answers.driver = driver
                        limit = time.monotonic() + FIRST_SECONDS
                    case {"here": here}:
                        answers.here = here
                    case {"opening": number, "pci_bus_id": bus_id}:
                        opening = {"gpu": number, "pci_bus_id": bus_id}
                    case {"gpu": gpu}:
                        answers.gpus[gpu["gpu"]] = gpu
                        opening = None
                    case {"pair": pair}:
                        answers.pairs.append(pair)
                    case {"fault": fault}:
                        answers.fault = fault
                        return answers, None
                    case {"done": _}:
                        return answers, None
    finally:
        child.stdout.close()
        child.kill()  # one that hangs in a call ends when the call does
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(CLOSE_SECONDS)

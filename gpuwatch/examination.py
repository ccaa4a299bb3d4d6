"""An examination of a node: its checks one after the other, each in a process of its own.

A check that fails, crashes, hangs or prints harms nobody: it is UNKNOWN, for a reason, and the next
one runs. None takes longer than it said, and all of them together not longer than the mode allows.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from gpuwatch.canary_reading import CanaryReading
from gpuwatch.capabilities import follow
from gpuwatch.errors import GpuwatchError
from gpuwatch.process import cause
from gpuwatch.verify import Check, Finding, Node

QUICK_SECONDS = 180.0
DEEP_SECONDS = 1200.0
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL: a check puts away what it started
GONE_SECONDS = 2.0
POLL_SECONDS = 0.01
BLOCK_BYTES = 64 * 1024
TEXT = 300  # characters of an error, at most


@dataclass(frozen=True, slots=True)
class Ran:
    """A check that was begun, and how long it took."""

    check: Check
    seconds: float


class Examination:
    """What some checks find of a node. `seconds` are those that are left for all of them.

    `findings`, `readings` and `ran` have what came so far, also when `run` is interrupted.
    """

    def __init__(self, node: Node, checks: Sequence[Check], seconds: float) -> None:
        self._node, self._checks = node, checks
        self._end = time.monotonic() + seconds
        self.findings: list[Finding] = []
        self.readings: list[CanaryReading] = []
        self.ran: list[Ran] = []

    def run(self) -> Iterator[Check]:
        """Run all checks; yield each before it runs."""
        for check in self._checks:
            yield check
            began = time.monotonic()
            bound = check.bound_seconds(len(self._node.gpus), self._node.deep)
            try:
                with closing(_found(check, self._node, min(bound, self._end - began))) as all_found:
                    for found in all_found:
                        if isinstance(found, Finding):
                            self.findings.append(replace(found, forced=self._node.forced))
                        else:
                            self.readings.append(found)
            finally:
                self.ran.append(Ran(check, time.monotonic() - began))


def _found(
    check: Check, node: Node, seconds: float
) -> Generator[Finding | CanaryReading, None, None]:
    """Yield what a check finds, and an UNKNOWN if it does not come to its end."""
    if seconds <= 0:
        yield _unknown(check, "no time was left for it", f"run it alone: --only {check.name}")
        return
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = _forked(check, node, writer)
    os.close(writer)
    status: int | None = None
    try:
        yield from (told := _Told(check)).until_end(reader, time.monotonic() + seconds)
        if told.over:
            return
        status = _wait(pid, GONE_SECONDS if told.closed else 0)
        if status is None:
            reason = f"it did not end within {seconds:g} s"
            step = f"look at the kernel log for what hangs, and run it alone: --only {check.name}"
        else:
            reason, step = f"it ended by {cause(status)}", "look at the kernel log, and report it"
        yield _unknown(check, reason, step)
    finally:
        os.close(reader)
        if status is None:
            _put_away(pid)


class _Told:
    """What the process of a check tells; `over` once it said so, `closed` once it can no more."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self.over = self.closed = False

    def until_end(self, reader: int, end: float) -> Iterator[Finding | CanaryReading]:
        """Yield what comes until then."""
        buffer = b""
        while not self.over and not self.closed:
            left = end - time.monotonic()
            if left <= 0 or not select.select([reader], [], [], left)[0]:
                return
            block = os.read(reader, BLOCK_BYTES)
            self.closed = not block
            *lines, buffer = (buffer + block).split(b"\n")
            for line in lines:
                try:
                    yield from self._message(json.loads(line))
                except (KeyError, TypeError, ValueError) as error:
                    yield _unknown(self._check, f"found what is no finding: {error}", "report it")

    def _message(self, message: Mapping[str, Any]) -> Iterator[Finding | CanaryReading]:
        match message:
            case {"finding": data}:
                yield Finding.from_json(data)
            case {"reading": data}:
                yield CanaryReading.from_json(data)
            case {"fault": fault, "next_step": step}:
                self.over = True
                yield _unknown(self._check, fault, step)
            case {"done": _}:
                self.over = True


def _unknown(check: Check, reason: str, step: str) -> Finding:
    return Finding(name=check.name, entity="host", verdict="UNKNOWN", reason=reason, next_step=step)


def _wait(pid: int, seconds: float) -> int | None:
    """Return the exit status of a child that ends by then, negative of a signal, else None."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(POLL_SECONDS)


def _put_away(pid: int) -> None:
    """End a child with what it started; one that holds a driver call ends when the call does."""
    if _wait(pid, POLL_SECONDS) is not None:
        return
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GONE_SECONDS)):
        os.kill(pid, number)
        if _wait(pid, seconds) is not None:
            return


def _forked(check: Check, node: Node, output: int) -> int:
    """Start the process of a check; return its id."""
    follow_parent = follow(signal.SIGTERM)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the child has it, too
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command, too
            signal.signal(signal.SIGTERM, _leave)
            follow_parent()
            _child(check, node, output)
            code = 0
        finally:
            os._exit(code)
    return pid


def _child(check: Check, node: Node, output: int) -> None:
    """Be the process of a check: tell what it finds, a line each."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)

    def say(**message: Any) -> None:
        line = memoryview(json.dumps(message, default=str).encode() + b"\n")
        while line:
            line = line[os.write(output, line) :]

    try:
        for found in check.run(node):
            if isinstance(found, Finding):
                say(finding=found.to_json())
            else:
                say(reading=found.to_json())
        say(done=True)
    except GpuwatchError as error:
        say(fault=str(error), next_step="mend that, and run it again")
    except Exception as error:  # noqa: BLE001 - the one guard of checks
        told = " ".join(f"{type(error).__name__}: {error}".split())[:TEXT]
        say(fault=f"internal error: {told}", next_step="report it")


def _leave(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what follows puts things away
    raise SystemExit(1)

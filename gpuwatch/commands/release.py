"""`gpuwatch release`: let go of the GPUs for a while, for a driver reload or another tool."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from typing import Any

from gpuwatch import control, duration
from gpuwatch.errors import PASS, WARN
from gpuwatch.lease import LONGEST_SECONDS
from gpuwatch.paths import control_socket

LEASE_SECONDS = 3600.0
TIMEOUT_SECONDS = 30.0  # the daemon answers within 15 s
CANARY = "a canary"  # what the daemon tells as the call of one


class Release:
    """Asks the daemon to close what it holds, and waits until that is done.

    Ends with 0 once nobody holds it any more, 1 if a process still does.
    """

    name = "release"
    help = "leave the GPUs, or their counters, to another tool"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what is released and for how long."""
        parser.add_argument("what", choices=("gpus", "counters"), help="what to let go of")
        add_lease(parser, "when to take it back if nobody does before")

    def run(self, arguments: Namespace) -> int:
        """Print that it is free, or who still holds it."""
        return let_go(arguments, "released")


def add_lease(parser: ArgumentParser, meaning: str) -> None:
    """Declare for how long something is let go of."""
    parser.add_argument(
        "--for",
        dest="lasts",
        type=_lease_seconds,
        default=LEASE_SECONDS,
        metavar="DURATION",
        help=f"{meaning}: 30m, 1h (default), at most 7d",
    )


def _lease_seconds(text: str) -> float:
    lasts = duration.seconds(text)
    if lasts > LONGEST_SECONDS:
        raise ArgumentTypeError(f"{text}: at most 7d")
    return lasts


def let_go(arguments: Namespace, done: str) -> int:
    """Have the daemon let go of something, and say who still holds it, or that it is `done`.

    Says on standard error why that would not outlast a restart. Returns the exit code; raises
    ControlError if no daemon answers.
    """
    answer = control.request(
        control_socket(vars(arguments)["paths.runtime"]),
        {"command": "release", "what": arguments.what, "seconds": arguments.lasts},
        TIMEOUT_SECONDS,
    )
    if answer["fault"]:
        print(f"a restart of gpuwatch would end this: {answer['fault']}", file=sys.stderr)
    for holder in answer["holding"]:
        print(f"{arguments.what}: {_holds(holder)}")
    if answer["holding"]:
        return WARN
    until = f"until `gpuwatch resume {arguments.what}` or for {arguments.lasts:g} s"
    print(f"{arguments.what}: {done} {until}")
    return PASS


def _holds(holder: Mapping[str, Any]) -> str:
    """Return who holds something, and what ends that."""
    pid, call = holder["pid"], holder["call"]
    if call == CANARY:
        who = f"process {pid}" if pid else "a session"
        return f"{who} still runs: end verify or --force, else look for an Xid"
    return f"process {pid} still holds them, in a driver call ({call}): it ends when the call does"

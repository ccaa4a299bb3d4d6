"""`gpuwatch release`: let go of the GPUs for a while, for a driver reload or another tool."""

import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from gpuwatch import control, duration
from gpuwatch.errors import PASS, WARN
from gpuwatch.paths import control_socket

LEASE_SECONDS = 3600.0
TIMEOUT_SECONDS = 30.0  # the daemon answers within 15 s


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
        holding = let_go(arguments)
        for holder in holding:
            print(
                f"{arguments.what}: process {holder['pid']} still holds them, in a driver call"
                f" ({holder['call']}): it ends when the call does",
            )
        if holding:
            return WARN
        print(f"{arguments.what}: released {until(arguments)}")
        return PASS


def add_lease(parser: ArgumentParser, meaning: str) -> None:
    """Declare for how long something is let go of."""
    parser.add_argument(
        "--for",
        dest="lasts",
        type=duration.seconds,
        default=LEASE_SECONDS,
        metavar="DURATION",
        help=f"{meaning}: 30m, 1h (default), 12h",
    )


def let_go(arguments: Namespace) -> list[dict[str, Any]]:
    """Have the daemon let go of something; return the processes that still hold it.

    Says on standard error why it would not outlast a restart. Raises ControlError if no daemon
    answers.
    """
    answer = control.request(
        control_socket(vars(arguments)["paths.runtime"]),
        {"command": "release", "what": arguments.what, "seconds": arguments.lasts},
        TIMEOUT_SECONDS,
    )
    if answer["fault"]:
        print(f"a restart of gpuwatch would end this: {answer['fault']}", file=sys.stderr)
    holding: list[dict[str, Any]] = answer["holding"]
    return holding


def until(arguments: Namespace) -> str:
    """Return when the daemon goes on."""
    return f"until `gpuwatch resume {arguments.what}` or for {arguments.lasts:g} s"

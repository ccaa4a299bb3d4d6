"""`gpuwatch release`: let go of the GPUs for a while, for a driver reload or another tool."""

import sys
from argparse import ArgumentParser, Namespace

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
        parser.add_argument(
            "--for",
            dest="lasts",
            type=duration.seconds,
            default=LEASE_SECONDS,
            metavar="DURATION",
            help="when to take it back if nobody does before: 30m, 1h (default), 12h",
        )

    def run(self, arguments: Namespace) -> int:
        """Print that it is free, or who still holds it."""
        answer = control.request(
            control_socket(vars(arguments)["paths.runtime"]),
            {"command": "release", "what": arguments.what, "seconds": arguments.lasts},
            TIMEOUT_SECONDS,
        )
        if answer["fault"]:
            print(f"a restart of gpuwatch would end this: {answer['fault']}", file=sys.stderr)
        back = f"until `gpuwatch resume {arguments.what}` or for {arguments.lasts:g} s"
        for holder in answer["holding"]:
            print(
                f"{arguments.what}: process {holder['pid']} still holds them, in a driver call"
                f" ({holder['call']}): it ends when the call does",
            )
        if answer["holding"]:
            return WARN
        print(f"{arguments.what}: released {back}")
        return PASS

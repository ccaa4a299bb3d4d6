"""`gpuwatch pause`: have no canary run for a while, as before a job."""

import sys
from argparse import ArgumentParser, Namespace

from gpuwatch import control, duration
from gpuwatch.errors import PASS, WARN
from gpuwatch.paths import control_socket

LEASE_SECONDS = 3600.0
TIMEOUT_SECONDS = 30.0  # the daemon answers within 15 s


class Pause:
    """Asks the daemon to run no canaries, to end the one that runs, and waits until it has ended.

    Ends with 0 once none runs any more, 1 if one does not end.
    """

    name = "pause"
    help = "have no canaries run for a while, and end the one that runs"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what is paused and for how long."""
        parser.add_argument("what", choices=("canaries",), help="what must not run")
        parser.add_argument(
            "--for",
            dest="lasts",
            type=duration.seconds,
            default=LEASE_SECONDS,
            metavar="DURATION",
            help="when to go on if nobody resumes before: 30m, 1h (default), 12h",
        )

    def run(self, arguments: Namespace) -> int:
        """Print that none runs, or which still does."""
        answer = control.request(
            control_socket(vars(arguments)["paths.runtime"]),
            {"command": "release", "what": arguments.what, "seconds": arguments.lasts},
            TIMEOUT_SECONDS,
        )
        if answer["fault"]:
            print(f"a restart of gpuwatch would end this: {answer['fault']}", file=sys.stderr)
        for holder in answer["holding"]:
            who = f"process {holder['pid']}" if holder["pid"] else "a session"
            print(f"canaries: {who} still runs: end verify or --force, else look for an Xid")
        if answer["holding"]:
            return WARN
        back = f"until `gpuwatch resume canaries` or for {arguments.lasts:g} s"
        print(f"canaries: paused {back}")
        return PASS

"""`gpuwatch verdict`: what should become of this node, for a scheduler's health check."""

import json
from argparse import ArgumentParser, Namespace

from gpuwatch.errors import FAIL, PASS, UNKNOWN, WARN

CODES = {"ok": PASS, "watch": WARN, "drain": FAIL, "reset": FAIL, "reboot": FAIL}


class Verdict:
    """Reads what the daemon keeps in a file, so it is quick and asks nobody."""

    name = "verdict"
    help = "say what should become of this node: ok, watch, drain, reset, reboot"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the form of the answer."""
        parser.add_argument("--json", action="store_true", help="the reasons as JSON")

    def run(self, arguments: Namespace) -> int:
        """Print one line; return 0 for ok, 1 for watch, 2 for the rest, 3 if it is not known."""
        from gpuwatch.paths import VERDICT, control_socket
        from gpuwatch.verdict import read

        runtime = control_socket(vars(arguments)["paths.runtime"]).parent
        told = read(runtime / VERDICT)
        word = told["verdict"]
        if arguments.json:
            print(json.dumps(told))
        elif word == "unknown":
            print(f"unknown: {told['reason']}")
        else:
            reasons = [
                f"{reason['alert']} on {reason['entity']}: {reason['next_step']}"
                for reason in told["reasons"]
            ]
            print(f"{word}: {' '.join(reasons)}" if reasons else word)
        return CODES.get(word, UNKNOWN)

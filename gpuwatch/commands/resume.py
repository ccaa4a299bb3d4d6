"""`gpuwatch resume`: take back what was released, go on with what was paused."""

from argparse import ArgumentParser, Namespace

from gpuwatch import control
from gpuwatch.errors import PASS
from gpuwatch.paths import control_socket

TIMEOUT_SECONDS = 10.0
SAID = {"canaries": ("run again", "not paused")}


class Resume:
    """Asks the daemon to watch again what was left to another tool."""

    name = "resume"
    help = "watch again what was released, run again what was paused"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what is taken back."""
        parser.add_argument(
            "what", choices=("gpus", "counters", "canaries"), help="what to take back"
        )

    def run(self, arguments: Namespace) -> int:
        """Say what became of it; to resume what was not released is no fault."""
        answer = control.request(
            control_socket(vars(arguments)["paths.runtime"]),
            {"command": "resume", "what": arguments.what},
            TIMEOUT_SECONDS,
        )
        again, never = SAID.get(arguments.what, ("watched again", "not released"))
        print(f"{arguments.what}: {again if answer['was_released'] else never}")
        return PASS

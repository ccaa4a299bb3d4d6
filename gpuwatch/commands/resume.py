"""`gpuwatch resume`: take back what was released."""

from argparse import ArgumentParser, Namespace

from gpuwatch import control
from gpuwatch.errors import PASS
from gpuwatch.paths import control_socket

TIMEOUT_SECONDS = 10.0


class Resume:
    """Asks the daemon to watch again what was left to another tool."""

    name = "resume"
    help = "watch again what was released"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what is taken back."""
        parser.add_argument("what", choices=("gpus", "counters"), help="what to take back")

    def run(self, arguments: Namespace) -> int:
        """Say what became of it; to resume what was not released is no fault."""
        answer = control.request(
            control_socket(vars(arguments)["paths.runtime"]),
            {"command": "resume", "what": arguments.what},
            TIMEOUT_SECONDS,
        )
        print(f"{arguments.what}: {'watched again' if answer['was_released'] else 'not released'}")
        return PASS

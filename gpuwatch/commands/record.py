"""`gpuwatch record`: keep the last samples of the running daemon at full resolution."""

from argparse import ArgumentParser, Namespace

from gpuwatch import control, duration
from gpuwatch.errors import ConfigError, ControlError
from gpuwatch.paths import control_socket

MAX_SECONDS = 3600.0
TIMEOUT_SECONDS = 130.0  # the daemon gives its recorder 120


class Record:
    """Asks the daemon for a recording and prints its path."""

    name = "record"
    help = "save the last samples to a recording"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare how far back the recording reaches."""
        parser.add_argument(
            "--last",
            type=duration.seconds,
            default=60.0,
            metavar="DURATION",
            help="how far back: 250ms, 60s (default), 5m",
        )

    def run(self, arguments: Namespace) -> int:
        """Print the path of the finished recording."""
        if not 0 < arguments.last <= MAX_SECONDS:
            raise ConfigError(f"--last: {arguments.last:g} s: more than 0 and at most 1h")
        path = control_socket(vars(arguments)["paths.runtime"])
        answer = control.request(
            path, {"command": "record", "last_seconds": arguments.last}, TIMEOUT_SECONDS
        )
        if "path" not in answer:
            raise ControlError(f"{path}: the daemon's answer names no recording: see its log")
        print(answer["path"])
        return 0

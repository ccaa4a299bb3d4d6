"""`gpuwatch pause`: have no canary run for a while, as before a job."""

from argparse import ArgumentParser, Namespace

from gpuwatch.commands.release import add_lease, let_go


class Pause:
    """Asks the daemon to run no canaries, to end the one that runs, and waits until it has ended.

    Ends with 0 once none runs any more, 1 if one does not end.
    """

    name = "pause"
    help = "have no canaries run for a while, and end the one that runs"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what is paused and for how long."""
        parser.add_argument("what", choices=("canaries",), help="what must not run")
        add_lease(parser, "when to go on if nobody resumes before")

    def run(self, arguments: Namespace) -> int:
        """Print that none runs, or which still does."""
        return let_go(arguments, "paused")

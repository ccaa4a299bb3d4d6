"""The commands. To add one: a file in this folder with a class as below, and one line here."""

from argparse import ArgumentParser, Namespace
from typing import Protocol

from gpuwatch.commands.check import Check
from gpuwatch.commands.inventory import Inventory
from gpuwatch.commands.record import Record
from gpuwatch.commands.release import Release
from gpuwatch.commands.replay import Replay
from gpuwatch.commands.resume import Resume
from gpuwatch.commands.run import Run
from gpuwatch.commands.verdict import Verdict


class Command(Protocol):
    """One word after `gpuwatch`, with its own flags.

    A command imports what it needs when it runs: `run` is the supervisor, which is bare Python.
    """

    name: str
    help: str

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the flags; a dest `section.key` is that key of the config."""

    def run(self, arguments: Namespace) -> int:
        """Do it and return the exit code; raises GpuwatchError for what the user can mend."""


COMMANDS: tuple[Command, ...] = (
    Run(),
    Check(),
    Verdict(),
    Record(),
    Replay(),
    Inventory(),
    Release(),
    Resume(),
)

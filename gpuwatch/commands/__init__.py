"""The commands. To add one: a file in this folder with a class as below, and one line here."""

from argparse import ArgumentParser, Namespace
from typing import Protocol

from gpuwatch.commands.check import Check
from gpuwatch.commands.record import Record
from gpuwatch.commands.replay import Replay
from gpuwatch.commands.run import Run


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


COMMANDS: tuple[Command, ...] = (Run(), Check(), Record(), Replay())

"""The commands. To add one: a file in this folder with a class as below, and its name here.

The class of `verdict` is `Verdict`. Only the command that is called is imported: a scheduler waits
for some, and what one needs must not slow another.
"""

import importlib
from argparse import ArgumentParser, Namespace
from typing import Protocol

COMMANDS = (
    "run",
    "check",
    "verify",
    "verdict",
    "top",
    "record",
    "replay",
    "export",
    "canary",
    "baseline",
    "inventory",
    "pause",
    "release",
    "resume",
)


class Command(Protocol):
    """One word after `gpuwatch`, with its own flags."""

    name: str
    help: str

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the flags; a dest `section.key` is that key of the config."""

    def run(self, arguments: Namespace) -> int:
        """Do it and return the exit code; raises GpuwatchError for what the user can mend."""


def load(name: str) -> Command:
    """Return a command of the list."""
    module = importlib.import_module(f"gpuwatch.commands.{name}")
    command: Command = getattr(module, name.capitalize())()
    return command

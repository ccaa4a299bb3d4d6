"""The command line: finds the command, runs it, and is the only printer of user errors."""

import argparse
import errno
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from gpuwatch import __version__
from gpuwatch.commands import COMMANDS, load
from gpuwatch.errors import INTERNAL, PASS, USAGE, GpuwatchError
from gpuwatch.logs import FORMATS, LEVELS

INTERRUPTED = 130  # 128 + SIGINT, as shells say it
BROKEN_PIPE = 141  # 128 + SIGPIPE

PATHS = {
    "runtime": "rings and sockets of the daemon",
    "state": "recordings and history",
    "sysfs": "root of sysfs",
    "procfs": "root of procfs",
    "kmsg": "kernel log device",
}


class _Parser(argparse.ArgumentParser):
    """Says a usage error in one line and ends with 64; exit code 2 is a failed check."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}: see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    words = [re.sub(r"^(--(?:no-)?collector)\.(?=.)", r"\1=", word) for word in words]
    try:
        arguments = _parser(words).parse_args(words)
    except SystemExit as leaving:
        return int(leaving.code or PASS)
    try:
        code: int = arguments.command.run(arguments)
        if sys.stdout is not None:  # started with standard output closed
            sys.stdout.flush()
    except GpuwatchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _print_no_more()
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the one guard: a traceback is no message to users
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            _print_no_more()
            print(f"standard output: {error.strerror}: make room", file=sys.stderr)
            return USAGE
        if vars(arguments)["log.level"] == "debug":
            import traceback

            traceback.print_exc()
        name = type(error).__name__
        told = " ".join(str(error).split())
        print(
            f"gpuwatch {arguments.command.name}: internal error: {name}: {told}: "
            "add --log.level=debug for a traceback, and report it",
            file=sys.stderr,
        )
        return INTERNAL
    return code


def _print_no_more() -> None:
    """Give up on standard output: Python's own flush at exit must not complain about it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of the command that is called, or of all for who calls none."""
    parser = _Parser(
        prog="gpuwatch",
        description="What a GPU node is doing, millisecond by millisecond.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gpuwatch {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        if words and words[0] in COMMANDS and words[0] != name:
            continue
        command = load(name)
        below = commands.add_parser(
            command.name, help=command.help, description=command.help, allow_abbrev=False
        )
        command.add_arguments(below)
        for path, meaning in PATHS.items():
            below.add_argument(f"--path.{path}", dest=f"paths.{path}", metavar="PATH", help=meaning)
        below.add_argument(
            "--log.level", dest="log.level", choices=LEVELS, help="least level that is logged"
        )
        below.add_argument(
            "--log.format", dest="log.format", choices=FORMATS, help="form of a line"
        )
        below.set_defaults(command=command)
    return parser

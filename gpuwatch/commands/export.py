"""`gpuwatch export`: a recording or history in a format that other tools read."""

import json
import os
import re
import shutil
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpuwatch import duration
from gpuwatch.clock import SECOND_NS, wall_text
from gpuwatch.errors import PASS, WARN, ConfigError, RecordingError
from gpuwatch.exports import EXPORTS, load
from gpuwatch.paths import BUNDLED_RECORDING, runtime_directory, state_directory
from gpuwatch.ring import SHAPE_ERRORS

if TYPE_CHECKING:
    from gpuwatch.extract import Choice, Extract

STREAM = "-"
TOLD = 20  # tables that are named one by one
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
RFC_3339 = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)")
UNIX = re.compile(r"\d{1,10}(\.\d{1,9})?")
ABOUT = "about.json"  # is in each export that is a directory


class When(NamedTuple):
    """A wall time in nanoseconds, or that much before the end of what there is."""

    ns: int
    is_before_end: bool = False


def when(text: str) -> When:
    """Return a time; an argparse type, so its fault is shown with the flag."""
    if text.startswith("-"):
        return When(int(duration.seconds(text[1:]) * SECOND_NS), is_before_end=True)
    if UNIX.fullmatch(text):
        return When(int(Decimal(text) * SECOND_NS))
    try:
        day, time, fraction, zone = RFC_3339.fullmatch(text).groups()  # type: ignore[union-attr]
        whole = datetime.fromisoformat(f"{day}T{time}{zone.upper()}")
    except (AttributeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{text!r} is no time: write 2026-11-29T10:15:00Z, 1795947300 or -90s"
        ) from error
    return When((whole - EPOCH) // SECOND * SECOND_NS + int(Decimal(fraction or 0) * SECOND_NS))


class Export:
    """Writes what was chosen of a recording or of history under another name, whole or not."""

    name = "export"
    help = "write a recording or history as Parquet, CSV or a Perfetto trace"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what is read, what of it, and where to it goes."""
        # Else argparse takes the -90s of `--from -90s` for a flag.
        parser._negative_number_matcher = re.compile(r"-\d")
        parser.add_argument(
            "file",
            nargs="?",
            metavar="FILE",
            help="a recording, `bundled`, a file of history or its directory (default: history of"
            " the state directory)",
        )
        parser.add_argument("--to", required=True, choices=EXPORTS, help="the format")
        parser.add_argument(
            "--output",
            required=True,
            metavar="PATH",
            help="directory to make (parquet, csv), file to make (perfetto); `-`: one table of csv"
            " to standard output",
        )
        parser.add_argument("--force", action="store_true", help="replace an earlier export")
        parser.add_argument(
            "--from",
            dest="since",
            type=when,
            metavar="TIME",
            help="first time: 2026-11-29T10:15:00Z, 1795947300, or before the end: -90s",
        )
        parser.add_argument(
            "--until", type=when, metavar="TIME", help="the time at which to stop, as in --from"
        )
        for flag, metavar, text in (
            ("--signal", "NAME", "gpu_power_watts, or one label: 'gpu_clock_hertz{clock=\"sm\"}'"),
            ("--entity", "KIND[/ID]", "gpu/0, rdma_port/mlx5_0:1, gpu"),
            ("--table", "NAME", "a table by its name, such as state.fast or events"),
        ):
            parser.add_argument(
                flag, action="append", default=[], metavar=metavar, help=f"{text}; repeatable"
            )

    def run(self, arguments: Namespace) -> int:
        """Write the export; return 1 if something of what should be there is missing."""
        output = Path(arguments.output).absolute()
        stream = arguments.output == STREAM
        if stream and arguments.to != "csv":
            raise ConfigError(f"--output -: a stream is csv alone, not {arguments.to}: give a path")
        if not stream:
            _check_output(output, _path(arguments), arguments.force)
        extract = _extract(arguments)
        if stream:
            _stream(extract)
        else:
            with _made(output) as temporary:
                load(arguments.to).write(extract, temporary)
                _check_found(extract)
            print(_summary(extract, output))
        for line in extract.missing:
            print(line, file=sys.stderr)
        return WARN if extract.missing else PASS


def _extract(arguments: Namespace) -> "Extract":
    from gpuwatch.extract import Choice, outside

    path = _path(arguments)
    choice = Choice(arguments.signal, arguments.entity, arguments.table)
    extract = opened(path, choice)
    if arguments.since is None and arguments.until is None:
        return extract
    there = extract.there()
    if there is None:
        raise RecordingError(f"{path}: tells no wall time: leave out --from and --until")
    since_ns = _wall_ns(arguments.since, there[1], choice.since_ns)
    until_ns = _wall_ns(arguments.until, there[1], choice.until_ns)
    if since_ns >= until_ns:
        raise ConfigError("--until: not after --from: give a later time")
    if since_ns > there[1] or until_ns <= there[0]:
        raise outside(path, *there)
    return opened(path, replace(choice, since_ns=since_ns, until_ns=until_ns))


def _path(arguments: Namespace) -> Path:
    """Return what is to be read."""
    if arguments.file == "bundled":
        return BUNDLED_RECORDING
    if arguments.file is not None:
        return Path(arguments.file)
    given = vars(arguments)["paths.state"]
    state = Path(given) if given else state_directory(runtime_directory())
    path = state / "history"
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory: give a FILE or --path.state")
    return path


def opened(path: Path, choice: "Choice") -> "Extract":
    """Return what is chosen of a recording, a file of history or its directory."""
    from gpuwatch.codec import first_line
    from gpuwatch.history import SORT
    from gpuwatch.history_extract import HistoryExtract
    from gpuwatch.recording_extract import RecordingExtract

    if path.exists() and not (path.is_dir() or path.is_file()):
        raise ConfigError(f"{path}: not a regular file: give a recording or history")
    kind = b""
    with suppress(OSError), path.open("rb") as file:  # what cannot be read is told below
        kind = file.readline(100)
    if path.is_dir() or kind == first_line(SORT):
        return HistoryExtract(path, choice)
    return RecordingExtract(path, choice)


def _wall_ns(given: When | None, end_ns: int, otherwise: int) -> int:
    if given is None:
        return otherwise
    return end_ns - given.ns if given.is_before_end else given.ns


def _check_output(output: Path, read: Path, force: bool) -> None:
    """Raise ConfigError if the output cannot be made, or would take the place of something else."""
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: no such directory as {output.parent}: make it")
    if not os.path.lexists(output):
        return
    if not force:
        raise ConfigError(f"--output {output}: exists: give another path, or --force")
    if not (output.is_symlink() or output.is_file() or output.is_dir()):  # such as /dev/null
        raise ConfigError(f"--output {output}: not a file nor a directory: give another path")
    if read.exists() and output.exists() and output.samefile(read):
        raise ConfigError(f"--output {output}: is what is exported: give another path")
    others = _others(output) if output.is_dir() else []
    if others:
        raise ConfigError(
            f"--output {output}: has more in it than an export ({others[0]}): give another path"
        )


def _others(directory: Path) -> list[str]:
    """Return what is in a directory beside the tables of an export."""
    try:
        tables = json.loads((directory / ABOUT).read_text())["tables"]
    except (OSError, *SHAPE_ERRORS):
        tables = {}
    made = {f"{table}.{to}" for table in tables for to in EXPORTS} | {ABOUT}
    found = sorted(path.name for path in directory.iterdir())
    return [name for name in found if not tables or name not in made]


@contextmanager
def _made(output: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes the output once it is whole.

    Raises ConfigError, and leaves nothing, if the disk is full.
    """
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    replaced = output.with_name(f".{output.name}.{os.getpid()}.old")
    try:
        yield temporary
        _sync(*(temporary.iterdir() if temporary.is_dir() else ()), temporary)
        if output.exists() and (output.is_dir() or temporary.is_dir()):
            output.rename(replaced)
        temporary.rename(output)
        _sync(output.parent)
    except OSError as error:
        place = error.filename or output
        raise ConfigError(
            f"{place}: {error.strerror or error}: make room, or give another --output"
        ) from error
    finally:
        for left in (temporary, replaced):
            with suppress(OSError):  # nothing can be made on what is read only, nor removed
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink(missing_ok=True)


def _sync(*paths: Path) -> None:
    """Make files and directories durable."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _stream(extract: "Extract") -> None:
    """Write the one table that is chosen to standard output."""
    from gpuwatch.exports.csv import Csv
    from gpuwatch.extract import ALERTS, CANARIES, EVENTS

    names = [table.name for table in extract.tables]
    names += [name for name in (EVENTS, ALERTS, CANARIES) if name in extract.choice.tables]
    if len(names) != 1:
        told = f"--output -: a stream is one table, these are {len(names)}: give --table with"
        if len(names) <= TOLD:
            raise ConfigError(f"{told} one of {', '.join(sorted(names))}")
        alike = sorted({re.sub(r"\d+", "N", name) for name in names})  # of each GPU the same
        raise ConfigError(f"{told} one of these, N a number: {', '.join(alike)}")
    try:
        Csv().stream(extract, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"standard output: {error.strerror}: make room") from error
    _check_found(extract)


def _check_found(extract: "Extract") -> None:
    """Raise RecordingError if nothing was there."""
    if not (extract.counts if extract.tables else extract.moments):
        raise RecordingError(f"{extract.path}: has nothing of that time and choice: ask for more")


def _summary(extract: "Extract", output: Path) -> str:
    files = list(output.iterdir()) if output.is_dir() else [output]
    size = sum(file.stat().st_size for file in files)
    span = f", {' to '.join(wall_text(ns) for ns in extract.span)}" if extract.span else ""
    counts = extract.counts
    return f"{output}: {counts.total()} rows of {len(counts)} tables{span}; {size} bytes"

"""`gpuwatch baseline`: what canaries gave before, to look at, to keep and to take back."""

import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from gpuwatch import baseline, baseline_file, baseline_table, control, database
from gpuwatch.baseline_table import Entry, Kept
from gpuwatch.canary_text import Standing, shape_text, standing_text, written
from gpuwatch.clock import wall_text
from gpuwatch.errors import (
    FAIL,
    PASS,
    UNKNOWN,
    WARN,
    ConfigError,
    ControlError,
    NoAnswer,
    StateError,
)
from gpuwatch.paths import DATABASE, control_socket, runtime_directory, state_directory
from gpuwatch.signals import HOST
from gpuwatch.store import Store

STATUS_SECONDS = 5.0
TIMEOUT_SECONDS = 300.0  # years of readings are judged anew
GONE_SECONDS = 86_400.0  # a card that the inventory lacks is new, or was read last so long ago
SEVERE_LOSS = 0.05  # of the rules canary_regression_…_severe
HEADER = (
    *("GPU", "CANARY", "SHAPE", "BASELINE", "RATIO", "EXPECTED", "SPREAD"),
    *("READINGS", "AGE", "STATE"),
)


class Baseline:
    """Shows, exports or imports baselines.

    `show` ends with 0 if all is well, 1 or 2 as the rules of a confirmed loss are warning or
    critical, 2 for wrong results, 3 without any reading of the last week: that is no pass. A GPU
    that the inventory does not have counts for a day after its last reading.
    """

    name = "baseline"
    help = "show what canaries of each GPU give and gave, export it, or import it"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what to do, and with which file."""
        parser.add_argument("what", choices=("show", "export", "import"), help="what to do")
        parser.add_argument("file", nargs="?", type=Path, help="the file to write or to read")
        parser.add_argument("--json", action="store_true", help="show: all of it, as JSON")
        parser.add_argument("--all", action="store_true", help="show: past environments, too")
        parser.add_argument(
            "--replace", action="store_true", help="import: in place of baselines that are here"
        )

    def run(self, arguments: Namespace) -> int:
        """Do it."""
        if (arguments.what == "show") != (arguments.file is None):
            need = "no FILE" if arguments.what == "show" else "a FILE"
            raise ConfigError(f"gpuwatch baseline {arguments.what}: needs {need}")
        told, runtime = vars(arguments)["paths.state"], vars(arguments)["paths.runtime"]
        socket = control_socket(runtime)
        running = _state_of_daemon(socket, must_answer=arguments.what == "import")
        state = Path(told or running or state_directory(Path(runtime or runtime_directory())))
        if arguments.what == "show":
            return _show(state / DATABASE, arguments)
        if arguments.what == "export":
            return _export(state / DATABASE, arguments.file)
        is_daemons = running is not None and state.absolute() == Path(running).absolute()
        return _import(state / DATABASE, arguments, socket if is_daemons else None)


def _state_of_daemon(socket: Path, must_answer: bool) -> str | None:
    """Return the state directory of the daemon that runs, None if none answers.

    `must_answer` raises NoAnswer for one that is there and does not: its file is its own.
    """
    try:
        return str(control.request(socket, {"command": "status"}, STATUS_SECONDS)["state"]["path"])
    except NoAnswer:
        if must_answer:
            raise
    except (ControlError, KeyError):
        pass
    return None


def _show(path: Path, arguments: Namespace) -> int:
    found, numbers = database.look(path, _load)
    now = time.time()
    standings = found.standings()
    shown = [one for one in standings if one.current or arguments.all]
    if arguments.json:
        print(json.dumps([_json(one, numbers) for one in shown]))
    elif shown:
        _print_table([HEADER, *(_row(one, numbers, now) for one in shown)])
    else:
        print("no readings of canaries yet: `gpuwatch canary run all` makes some")
    codes = [
        _code(one)
        for one in standings
        if one.current and now - one.newest <= baseline.STALE_SECONDS
        if one.entity == HOST
        or one.entity.id in numbers
        or now - one.newest < GONE_SECONDS
        or not numbers
    ]
    return max(codes, default=UNKNOWN)


def _code(one: Standing) -> int:
    if one.state == "wrong":
        return FAIL
    if not one.loss:
        return PASS
    return FAIL if one.loss >= SEVERE_LOSS and one.peers != "whole_node" else WARN


def _load(file: database.Connection) -> tuple[baseline.Baseline, dict[str, int]]:
    """Return the baselines, and the number of each GPU by uuid."""
    results = baseline_table.load_results(file)
    found = baseline.Baseline.of(baseline_table.load(file), results)
    if not found.standings():
        return found, {}
    query = "SELECT uuid, number FROM inventory JOIN gpu_numbers USING (pci_bus_id)"
    return found, dict(file.execute(query))


def _json(one: Standing, numbers: dict[str, int]) -> dict[str, Any]:
    told = asdict(one)
    del told["shape"]
    return {**told, "gpu": numbers.get(one.entity.id), **one.shape._asdict()}


def _row(one: Standing, numbers: dict[str, int], now: float) -> tuple[str, ...]:
    number = numbers.get(one.entity.id)
    name = f"{'-' if number is None else number} {one.entity.id}"
    return (
        "host" if one.entity == HOST else name,
        one.shape.canary,
        shape_text(one.shape),
        "-" if one.baseline is None else written(one.shape.canary, one.baseline),
        _ratio(one.ratio),
        _ratio(one.expected_ratio),
        "-" if one.spread is None else f"{100 * one.spread:.2f} %",
        str(one.readings),
        _age(now - one.newest),
        _said(one),
    )


def _said(one: Standing) -> str:
    state = "wrong results" if one.state == "wrong" else one.state
    return standing_text(one, state if one.current else f"past {state}")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _age(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _export(path: Path, file: Path) -> int:
    courses = database.look(path, _load_all)
    try:
        file.write_text(baseline_file.dump(courses, wall_text(time.time_ns())))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    readings = sum(len(kept.readings) for kept in courses)
    print(f"{file}: {len(courses)} baselines, {readings} readings")
    return PASS


def _load_all(file: database.Connection) -> list[Kept]:
    entries: Iterable[Entry] = baseline_table.load(file)
    return [Kept(entry, baseline_table.load_readings(file, entry)) for entry in entries]


def _import(path: Path, arguments: Namespace, daemon: Path | None) -> int:
    """Have the daemon take the file; where none runs, write to its state directly."""
    courses = baseline_file.load(arguments.file)  # a fault of the file is told before all else
    if daemon is not None:
        taken, left = _hand_over(path.parent, arguments, daemon)
    else:
        store = Store(path)
        taken, left = baseline.Baseline(store).take(courses, replace=arguments.replace)
        fault = store.fault
        store.close()
        if fault:
            raise StateError(fault)
        give_to_owner(path)
    more = f", {left} stay as they are (--replace)" if left else ""
    print(f"{arguments.file}: {taken} baselines imported{more}")
    return PASS


def _hand_over(state: Path, arguments: Namespace, daemon: Path) -> tuple[int, int]:
    """Have the daemon read a copy in its own directory: a service sees no other's files."""
    try:
        with NamedTemporaryFile(dir=state, prefix="import-", suffix=".json") as copy:
            copy.write(arguments.file.read_bytes())
            copy.flush()
            give_to_owner(Path(copy.name))
            message = {
                "command": "import_baselines",
                "path": copy.name,
                "replace": arguments.replace,
            }
            answer = control.request(daemon, message, TIMEOUT_SECONDS)
    except OSError as error:
        raise ConfigError(f"{state}: cannot be written: {error.strerror}: run as root") from error
    if answer["fault"]:
        raise StateError(answer["fault"])
    return answer["taken"], answer["left"]


def give_to_owner(path: Path) -> None:
    """Have a file that root made belong to whom the state directory belongs."""
    owner = path.parent.stat()
    if os.geteuid() == 0:
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)

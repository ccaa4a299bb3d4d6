"""`gpuwatch canary run`: canaries now, in the foreground, on GPUs that nobody uses."""

import json
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

from gpuwatch import control, database
from gpuwatch.busy import Host, host_reason
from gpuwatch.canaries import CANARIES
from gpuwatch.canary_text import shape_text, written
from gpuwatch.clock import read_clocks
from gpuwatch.commands.run import config_request
from gpuwatch.errors import FAIL, PASS, UNKNOWN, ConfigError, ControlError
from gpuwatch.lease import this_boot
from gpuwatch.look import Looks
from gpuwatch.paths import DATABASE, control_socket, state_directory
from gpuwatch.session import Result, Session
from gpuwatch.slurm import jobs
from gpuwatch.startup import validate

TIMEOUT_SECONDS = 5.0
SIZES = ("full", "small", "tiny")
HOST_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h: the host's own process ids
CODES = {"ok": PASS, "wrong": FAIL, "failed": FAIL, "aborted": UNKNOWN, "skipped": UNKNOWN}
COLUMNS = (5, 10, 20, 13, 9, 8, 10)
HEADER = ("GPU", "CANARY", "SHAPE", "VALUE", "EXPECTED", "SPREAD", "SM CLOCK", "RESULT")


class Canary:
    """Runs canaries, each GPU after the other.

    Ends with 0 if all passed, 2 if one was wrong or failed, else 3 if one was skipped or ended.
    """

    name = "canary"
    help = "run canaries now: how fast each idle GPU is, and whether it computes what it should"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare which canaries, where and how."""
        parser.add_argument("what", choices=("run",), help="what to do")
        parser.add_argument(
            "names",
            nargs="+",
            choices=(*CANARIES, "all"),
            metavar="NAME",
            help=f"{', '.join(CANARIES)} or all",
        )
        parser.add_argument(
            "--gpu",
            type=int,
            action="append",
            default=[],
            metavar="N",
            help="a GPU, by its number; may be repeated (default: all)",
        )
        parser.add_argument("--size", choices=SIZES, help="of the work (default: full)")
        parser.add_argument("--force", action="store_true", help="also where a GPU is in use")
        parser.add_argument(
            "--cpu", action="store_true", help="on processors, tiny, to try an interpreter out"
        )
        parser.add_argument("--json", action="store_true", help="print the results as JSON")
        parser.add_argument("--config", metavar="FILE", help="config file (default: none)")
        parser.add_argument(
            "--canary.python",
            dest="canary.python",
            metavar="FILE",
            help="the interpreter that has torch (default: gpuwatch's own)",
        )

    def run(self, arguments: Namespace) -> int:
        """Print a line for each result, or all of them as JSON."""
        if arguments.cpu and (arguments.gpu or arguments.force):
            raise ConfigError("--cpu: takes neither --gpu nor --force")
        config = validate(config_request(Namespace(**vars(arguments), source="nvml")))
        python = config["canary"]["python"] or sys.executable
        if not os.access(python, os.X_OK) or not Path(python).is_file():
            raise ConfigError(f"[canary] python {python}: not an interpreter: name one with torch")
        names = list(CANARIES) if "all" in arguments.names else dict.fromkeys(arguments.names)
        # As an interrupt, so that the run is put away.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            results = list(_shown(_results(arguments, config, python, names), arguments.json))
        finally:
            signal.signal(signal.SIGTERM, before)
        codes = {CODES[one.result] for one in results}
        return next((code for code in (FAIL, UNKNOWN) if code in codes), PASS)


def _results(
    arguments: Namespace, config: dict[str, Any], python: str, names: Iterable[str]
) -> Iterable[Result]:
    size = arguments.size or ("tiny" if arguments.cpu else "full")
    sysfs, procfs = (Path(config["paths"][key]) for key in ("sysfs", "procfs"))
    numbers: dict[str, int] = {}
    released = frozenset[str]()
    if not arguments.cpu:
        numbers, released = kept(state_here(arguments, config))
    host = host_here(procfs, released)
    if not arguments.cpu and not arguments.force and (why := host_reason(host)):
        yield from (Result(canary=name, detail=why) for name in names)
        return
    with nullcontext() if arguments.cpu else closing(Looks(sysfs, numbers, arguments.gpu)) as looks:
        session = Session(python, size, looks, host=host, force=arguments.force, sysfs=sysfs)
        for name in names:
            yield from session.run(name)


def host_here(procfs: Path, released: frozenset[str]) -> Host:
    """Return what is known of this host when canaries are asked for."""
    return Host(
        host_pids=_link(procfs / "self/ns/pid") == HOST_PIDS,
        jobs=jobs(procfs) - {os.environ.get("SLURM_JOB_ID", "")},
        released=released,
    )


def state_here(arguments: Namespace, config: dict[str, Any]) -> Path:
    """Return the state directory of the daemon that runs, else the one that is set."""
    if vars(arguments)["paths.state"] is None:
        with suppress(ControlError, KeyError):
            socket = control_socket(vars(arguments)["paths.runtime"])
            answer = control.request(socket, {"command": "status"}, TIMEOUT_SECONDS)
            if answer["source"]["kind"] == "nvml":
                return Path(answer["state"]["path"])
    return Path(config["paths"]["state"] or state_directory(Path(config["paths"]["runtime"])))


def kept(state: Path) -> tuple[dict[str, int], frozenset[str]]:
    """Return the numbers of the GPUs by PCI address, and what is released now."""
    if not (state / DATABASE).exists():
        return {}, frozenset()

    def load(file: database.Connection) -> tuple[dict[str, int], frozenset[str]]:
        numbers = dict(file.execute("SELECT pci_bus_id, number FROM gpu_numbers"))
        held = file.execute(
            "SELECT what FROM leases WHERE boot_id = ? AND until_boottime_ns > ?",
            (this_boot(), read_clocks().boottime_ns),
        )
        return numbers, frozenset(what for (what,) in held)

    return database.look(state / DATABASE, load)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _shown(results: Iterable[Result], as_json: bool) -> Iterable[Result]:
    """Print results as they come, or all of them at the end."""
    if as_json:
        listed = list(results)
        print(json.dumps([one.to_json() for one in listed]))
        yield from listed
        return
    header: Sequence[str] = HEADER
    for one in results:
        if header:
            _print(header)
            header = ()
        _print(_row(one))
        yield one


def _print(cells: Sequence[str]) -> None:
    columns = (cell.ljust(width) for cell, width in zip(cells, COLUMNS, strict=False))
    print("  ".join((*columns, *cells[len(COLUMNS) :])).rstrip(), flush=True)


def _row(one: Result) -> tuple[str, ...]:
    reading = one.reading
    value = spread = clock = shape = "-"
    if reading is not None and reading.value is not None:
        value = written(one.canary, reading.value)
        spread = "-" if reading.spread is None else f"{reading.spread:.1%}"
        clock = f"{reading.clock_hertz / 1e6:.0f} MHz" if reading.clock_hertz else "-"
    if reading is not None:
        shape = shape_text(reading.shape)
    ratio = "-" if one.expected_ratio is None else f"{one.expected_ratio:.1%}"
    said = f"{one.result}: {one.detail}" if one.detail else one.result
    number = "host" if one.gpu is None else str(one.gpu)
    return (number, one.canary, shape, value, ratio, spread, clock, said)

"""`gpuwatch canary run`: canaries now, in the foreground, on GPUs that nobody uses.

What it finds goes to the daemon that runs, so that baselines see it.
"""

import json
import math
import os
import signal
import sys
import time
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from gpuwatch import canary_host, control, database, duration
from gpuwatch.busy import Host, Obstacle, host_reason
from gpuwatch.canaries import CANARIES, USUAL
from gpuwatch.canary_text import shape_text, written
from gpuwatch.clock import read_clocks
from gpuwatch.commands.run import config_request
from gpuwatch.control import Message
from gpuwatch.errors import (
    FAIL,
    PASS,
    UNKNOWN,
    WARN,
    ConfigError,
    ControlError,
    GpuwatchError,
    NoAnswer,
)
from gpuwatch.handover import hand_over
from gpuwatch.lease import this_boot
from gpuwatch.look import OPEN_SECONDS, Looks
from gpuwatch.paths import DATABASE, control_socket, state_directory
from gpuwatch.session import Result, Session
from gpuwatch.startup import validate

TIMEOUT_SECONDS = 5.0
BUDGET_SECONDS = 15.0
AROUND_SECONDS = 1.0  # of it: for this program to begin, and for the last worker to leave
LEAST_SECONDS = 10.0  # for a driver to answer
USED_UP = "the budget is used up"
SEVERE_LOSS = 0.05  # of the rules canary_regression_..._severe
# What tells most about a node in little time comes first.
BETWEEN_JOBS = ("matmul", "allreduce", "integrity", "memory", "pcie")
SIZES = ("full", "small", "tiny")
CODES = {"ok": PASS, "wrong": FAIL, "failed": FAIL, "aborted": UNKNOWN, "skipped": UNKNOWN}
COLUMNS = (5, 10, 20, 13, 9, 8, 10)
HEADER = ("GPU", "CANARY", "SHAPE", "VALUE", "EXPECTED", "SPREAD", "SM CLOCK", "RESULT")


class _InsteadOfNames(Action):
    """A flag with which no name is needed; `nargs="*"` would take none that comes after a flag."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, *_: Any) -> None:
        setattr(namespace, self.dest, True)
        for action in parser._actions:
            action.required = action.required and action.dest != "names"


class Canary:
    """Runs canaries, each GPU after the other; between jobs all of them side by side.

    Ends with 0 if all passed, 2 if one was wrong or failed, else 3 if one was skipped or ended.
    Between jobs also with 2 if one is 5 % or more below its baseline, with 1 if it is 2 % or more
    or may be, or the whole node is, and what the budget leaves no time for is no fault.
    """

    name = "canary"
    help = "run canaries now: how fast each idle GPU is, and whether it computes what it should"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare which canaries, where and how."""
        parser.add_argument("what", choices=("run",), help="what to do")
        parser.add_argument(
            "names",
            nargs="+",
            default=[],
            choices=(*CANARIES, "all"),
            metavar="NAME",
            help=f"{', '.join(CANARIES)}, or all but what goes by NICs: all",
        )
        parser.add_argument(
            "--between-jobs",
            action=_InsteadOfNames,
            nargs=0,
            default=False,
            help=f"those that fit into the budget, of {', '.join(BETWEEN_JOBS)}; side by side on"
            " the GPUs of the job that ends, if SLURM_JOB_GPUS tells them; the code is a verdict",
        )
        parser.add_argument(
            "--budget",
            type=duration.seconds,
            metavar="DURATION",
            help=f"how long all of it may take (default: {BUDGET_SECONDS:g}s between jobs)",
        )
        parser.add_argument(
            "--gpu",
            type=int,
            action="append",
            default=[],
            metavar="N",
            help="a GPU, by its number; may be repeated (default: all)",
        )
        parser.add_argument(
            "--size",
            dest="canary.size",
            choices=SIZES,
            help="of the work (default: full, or the config's)",
        )
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
        if arguments.cpu and (
            arguments.gpu or arguments.force or arguments.budget or vars(arguments)["canary.size"]
        ):
            raise ConfigError("--cpu: takes no --gpu, --force, --size or --budget")
        names = arguments.names or BETWEEN_JOBS
        config = validate(config_request(Namespace(**vars(arguments), source="nvml")))
        python = canary_host.interpreter(config["canary"]["python"])
        if fault := canary_host.no_interpreter(python):
            raise ConfigError(fault)
        named = [name for one in names for name in (USUAL if one == "all" else (one,))]
        names = list(dict.fromkeys(named))
        # As an interrupt, so that the run is put away.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        results: list[Result] = []
        try:
            _show(_collected(_results(arguments, config, python, names), results), arguments.json)
        finally:
            judged = _hand_over(arguments, config, results)  # interrupted, too
            signal.signal(signal.SIGTERM, before)
        if arguments.between_jobs:
            return verdict(results, judged)
        return _worst([CODES[one.result] for one in results])


def _worst(codes: Iterable[int]) -> int:
    found = set(codes)
    return next((code for code in (FAIL, UNKNOWN, WARN) if code in found), PASS)


def verdict(results: Sequence[Result], judged: Iterable[Message]) -> int:
    """Return the exit code between jobs; something must have run to its end to pass.

    What there was no time for, or too few GPUs, says nothing of the node.
    """
    counted = [one for one in results if one.detail != USED_UP and one.reason != "gpus"]
    codes = [CODES[one.result] for one in counted] or [UNKNOWN]
    for told in judged:
        loss = told.get("loss") or 0.0
        doubt = loss or told.get("node_loss") or told.get("retest")
        codes.append(FAIL if loss >= SEVERE_LOSS else WARN if doubt else PASS)
    return _worst(codes)


def _results(
    arguments: Namespace, config: dict[str, Any], python: str, names: Iterable[str]
) -> Iterable[Result]:
    if arguments.cpu:
        session = Session(python, "tiny")
        for name in names:
            yield from session.run(name)
        return
    budget = arguments.budget or (BUDGET_SECONDS if arguments.between_jobs else math.inf)
    end = time.monotonic() + budget - AROUND_SECONDS
    sysfs, procfs = (Path(config["paths"][key]) for key in ("sysfs", "procfs"))
    state = state_here(arguments, config)
    numbers, released = kept(state)
    own_job = os.environ.get("SLURM_JOB_ID", "")
    new_job = canary_host.NewJob(procfs, own_job)  # before it is seen which are here
    stop = _Stop(state, released, end, (lambda: None) if arguments.force else new_job)
    host = canary_host.present(procfs, released, own_job)
    lock = canary_host.lock_of(config, vars(arguments)["paths.runtime"])
    wait_seconds = budget if arguments.between_jobs else 0.0
    with canary_host.only_session(lock, wait_seconds) as alone:
        why = None if arguments.force else host_reason(host)
        if not alone:
            why = Obstacle("busy", canary_host.RUNS_ALREADY)
        if why:
            yield from (Result(canary=name, detail=why.text, reason=why.kind) for name in names)
            return
        open_seconds = min(OPEN_SECONDS, max(LEAST_SECONDS, end - time.monotonic()))
        with closing(Looks(sysfs, numbers, _gpus(arguments), open_seconds)) as looks:
            session = Session(
                python,
                config["canary"]["size"],
                looks,
                host=host,
                force=arguments.force,
                side_by_side=arguments.between_jobs,
                sysfs=sysfs,
                stop=stop,
            )
            for name in names:
                yield from session.run(name)


class _Stop:
    """Says why canaries must run no more: paused meanwhile, a job, or the budget is used up."""

    def __init__(
        self,
        state: Path,
        released: frozenset[str],
        end: float,
        job: Callable[[], Obstacle | None],
    ) -> None:
        self._state, self._released, self._end, self._job = state, released, end, job
        self._asked = time.monotonic()
        self._why: Obstacle | None = None

    def __call__(self) -> Obstacle | None:
        now = time.monotonic()
        if now > self._end:
            return Obstacle("other", USED_UP)
        if now - self._asked > canary_host.ASK_SECONDS:
            self._asked = now
            with suppress(GpuwatchError):
                _, released = kept(self._state)
                self._why = host_reason(Host(released=released - self._released))
        return self._why or self._job()


def _gpus(arguments: Namespace) -> list[int]:
    """Return the GPUs that are asked for, none for all."""
    if arguments.gpu or not arguments.between_jobs:
        return list(arguments.gpu)
    with suppress(ValueError):
        return [int(one) for one in os.environ.get("SLURM_JOB_GPUS", "").split(",")]
    return []


def _hand_over(
    arguments: Namespace, config: dict[str, Any], results: Iterable[Result]
) -> list[Message]:
    """Give the daemon, if one runs, what was measured as it would; return what it thinks of it.

    Says on standard error why it did not take it.
    """
    given = [one.to_json() for one in results if one.result in ("ok", "wrong", "failed")]
    socket = control_socket(vars(arguments)["paths.runtime"])
    # A directory that is not ours to see has no daemon for us.
    if arguments.cpu or arguments.force or not given or not os.access(socket, os.F_OK):
        return []
    try:
        own = control.request(socket, {"command": "status"}, TIMEOUT_SECONDS)["canary"]
        python = canary_host.interpreter(config["canary"]["python"])
        used = {"python": python, "size": config["canary"]["size"]}
        for key, value in used.items():
            if value != own[key]:
                raise ControlError(
                    f"its canaries run with {key} {own[key]}, these with {value}:"
                    " give its config with --config"
                )
        return hand_over(socket, given)
    except ControlError as fault:
        print(f"not all of it is handed over to the daemon: {fault}", file=sys.stderr)
    except (KeyError, TypeError):
        print(
            "not handed over to the daemon: it is of another version: restart it", file=sys.stderr
        )
    return []


def _collected(results: Iterable[Result], into: list[Result]) -> Iterable[Result]:
    for one in results:
        into.append(one)
        yield one


def state_here(arguments: Namespace, config: dict[str, Any]) -> Path:
    """Return the state directory of the daemon that runs, else the one that is set.

    Raises NoAnswer if one runs and does not say: canaries may be paused there.
    """
    if vars(arguments)["paths.state"] is None:
        socket = control_socket(vars(arguments)["paths.runtime"])
        try:
            answer = control.request(socket, {"command": "status"}, TIMEOUT_SECONDS)
            if answer["source"]["kind"] == "nvml":
                return Path(answer["state"]["path"])
        except NoAnswer:
            raise
        except (ControlError, KeyError):
            pass  # none runs, or one that is not for us
    return Path(config["paths"]["state"] or state_directory(Path(config["paths"]["runtime"])))


def kept(state: Path) -> tuple[dict[str, int], frozenset[str]]:
    """Return the numbers of the GPUs by PCI address, and what is released now."""
    if not database.is_there(state / DATABASE):
        return {}, frozenset()

    def load(file: database.Connection) -> tuple[dict[str, int], frozenset[str]]:
        numbers = dict(file.execute("SELECT pci_bus_id, number FROM gpu_numbers"))
        held = file.execute(
            "SELECT what FROM leases WHERE boot_id = ? AND until_boottime_ns > ?",
            (this_boot(), read_clocks().boottime_ns),
        )
        return numbers, frozenset(what for (what,) in held)

    return database.look(state / DATABASE, load)


def _show(results: Iterable[Result], as_json: bool) -> None:
    """Print results as they come, or all of them at the end."""
    if as_json:
        print(json.dumps([one.to_json() for one in results]))
        return
    for number, one in enumerate(results):
        if not number:
            _print(HEADER)
        _print(_row(one))


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

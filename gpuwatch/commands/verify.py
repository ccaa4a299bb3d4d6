"""`gpuwatch verify`: is this node what was paid for, in minutes."""

import json
import os
import shutil
import signal
import sys
import textwrap
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from gpuwatch import checks
from gpuwatch.canary_host import lock_of, only_session
from gpuwatch.commands.run import config_request
from gpuwatch.commands.verify_node import expectation, gathered, notes, refusals
from gpuwatch.commands.verify_progress import Progress
from gpuwatch.commands.verify_save import save
from gpuwatch.errors import PASS, ConfigError
from gpuwatch.examination import DEEP_SECONDS, QUICK_SECONDS, Examination
from gpuwatch.signals import valid
from gpuwatch.startup import validate
from gpuwatch.verify import Check
from gpuwatch.verify_compare import compare
from gpuwatch.verify_page import page
from gpuwatch.verify_report import Report, host_facts, load, overall
from gpuwatch.verify_text import WIDTH, lines

CANARIES_SECONDS = 60.0  # that those of the daemon are waited for
LISTED_GPUS = 8  # of the bounds that are listed
ENTRY = "  {:<16} {:<7} {:>7} {:>7}  {}"


class Verify:
    """Looks at a node, tries it out, and says whether it is what it should be.

    Ends with 0 for PASS, 1 for WARN, 2 for FAIL, 3 for UNKNOWN or a node that is in use.
    """

    name = "verify"
    help = "accept or reject a node: is each GPU there, sound, and as fast as its model should be"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare how thoroughly, what of it, and where the result goes."""
        names = [check.name for check in checks.CHECKS]
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument("--quick", action="store_true", help="at most 3 minutes (default)")
        mode.add_argument("--deep", action="store_true", help="at most 20 minutes")
        parser.add_argument(
            "--expect",
            type=expectation,
            metavar="GPUS",
            help="what should be here: 8, A100, 8xA100 (default: what the bus shows)",
        )
        parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it")
        parser.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
        parser.add_argument(
            "--save", action="store_true", help="keep the canaries' readings as the baseline"
        )
        parser.add_argument(
            "--compare",
            type=Path,
            metavar="FILE",
            help="compare with an earlier report, made by --json",
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
            "--force", action="store_true", help="also on GPUs in use: no figure is a measure then"
        )
        for flag, what in (("--only", "do no other check"), ("--skip", "leave out a check")):
            parser.add_argument(
                flag,
                action="append",
                default=[],
                choices=names,
                metavar="CHECK",
                help=f"{what}; may be repeated (see --list)",
            )
        parser.add_argument(
            "--list", action="store_true", help="list the checks and how long each may take"
        )
        parser.add_argument(
            "--storage",
            type=Path,
            metavar="PATH",
            help="the directory whose storage is measured (default: the state directory, or this)",
        )
        parser.add_argument("--config", metavar="FILE", help="config file (default: none)")
        parser.add_argument(
            "--canary.python",
            dest="canary.python",
            metavar="FILE",
            help="the interpreter that has torch (default: gpuwatch's own)",
        )

    def run(self, arguments: Namespace) -> int:
        """Examine the node, and tell what was found."""
        if arguments.list:
            return _list(checks.CHECKS)
        if arguments.save and arguments.force:
            raise ConfigError("--save: not with --force: such figures are no baseline")
        config = validate(config_request(Namespace(**vars(arguments), source="nvml")))
        before = load(arguments.compare) if arguments.compare else None
        if before is not None:
            compare(before, before, valid(arguments.compare))  # one that is damaged is said now
        _must_be_writable(arguments)
        # As an interrupt, so that what runs is put away.
        former = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            report = _examined(arguments, config)
        finally:
            signal.signal(signal.SIGTERM, former)
        if before is not None:
            report.compared = compare(report.to_json(), before, valid(arguments.compare))
        _tell(report, arguments)
        if arguments.save:
            save(report, arguments, config)
        return report.code


def _list(listed: Iterable[Check]) -> int:
    print(f"Seconds that each check may take at most, with {LISTED_GPUS} GPUs:\n")
    print(ENTRY.format("CHECK", "PHASE", "QUICK", "DEEP", "WHAT"))
    sums = [0.0, 0.0]
    for check in listed:
        bounds = [check.bound_seconds(LISTED_GPUS, deep) for deep in (False, True)]
        quick = "-" if check.deep_only else f"{bounds[0]:g}"
        first, *more = textwrap.wrap(check.help, WIDTH - len(ENTRY.format(*[""] * 5)))
        print(ENTRY.format(check.name, check.phase, quick, f"{bounds[1]:g}", first))
        for line in more:
            print(ENTRY.format("", "", "", "", line))
        sums = [sums[0] + bounds[0] * (not check.deep_only), sums[1] + bounds[1]]
    print(ENTRY.format("all", "", *(f"{one:g}" for one in sums), "one after the other").rstrip())
    print(
        f"\nTogether never more than {QUICK_SECONDS:g} s, with --deep {DEEP_SECONDS:g} s: what has"
        " no time left is UNKNOWN."
    )
    return PASS


def _must_be_writable(arguments: Namespace) -> None:
    """Raise ConfigError for a file that could not be written once all is done."""
    printed = arguments.json == "-"
    names = (None if printed else arguments.json, arguments.html)
    files = [Path(name) for name in names if name]
    for path in files:
        directory = path.absolute().parent
        if not directory.is_dir() or (path.exists() and not path.is_file()):
            step = "name a file in a directory that is there"
            raise ConfigError(f"{path}: cannot be written: {step}")
        if not os.access(directory, os.W_OK):
            raise ConfigError(f"{path}: cannot be written: no permission in {directory}")
    if len({path.absolute() for path in files}) < len(files):
        raise ConfigError(f"--json, --html: both are {files[0]}: name two files")


def _chosen(arguments: Namespace) -> tuple[list[Check], list[str]]:
    """Return the checks to run, those that only look first, and the names that are left out."""
    chosen, left_out = [], []
    for check in checks.CHECKS:
        if arguments.only:
            wanted = check.name in arguments.only
        else:
            wanted = arguments.deep or not check.deep_only
        if wanted and check.name not in arguments.skip:
            chosen.append(check)
        elif wanted or arguments.only:
            left_out.append(check.name)
    return sorted(chosen, key=lambda check: check.phase == "load"), left_out


def _examined(arguments: Namespace, config: dict[str, Any]) -> Report:
    """Do it; on an interrupt, say what was done by then."""
    began, start = time.time(), time.monotonic()
    chosen, left_out = _chosen(arguments)
    loads = any(check.phase == "load" for check in chosen)
    if loads and (python := config["canary"]["python"]) and shutil.which(python) is None:
        raise ConfigError(f"{python}: cannot be run: --canary.python is an interpreter with torch")
    lock = lock_of(config, vars(arguments)["paths.runtime"])
    progress = Progress(chosen)
    examination = None
    try:
        with only_session(lock, CANARIES_SECONDS) if loads else nullcontext(True) as alone:
            node, findings = gathered(arguments, config)
            if loads and not node.forced:
                findings = findings or refusals(node, alone)
            verdict = findings[0].verdict if findings else "UNKNOWN"
            if not findings:
                seconds = DEEP_SECONDS if arguments.deep else QUICK_SECONDS
                examination = Examination(node, chosen, seconds - (time.monotonic() - start))
                for check in examination.run():
                    progress.begin(check, examination)
                progress.end(examination)
                findings = [*examination.findings, *notes(node)]
                verdict = overall(findings, chosen)
    except KeyboardInterrupt:
        progress.interrupted(examination.findings if examination else ())
        raise
    return Report(
        verdict=verdict,
        findings=findings,
        time=began,
        seconds=time.monotonic() - start,
        node=node,
        ran=examination.ran if examination else (),
        readings=examination.readings if examination else (),
        left_out=left_out,
        host=host_facts(node.procfs),
    )


def _tell(report: Report, arguments: Namespace) -> None:
    """Write the files, and print the table or the JSON: whatever fails, the others are tried."""
    written = json.dumps(report.to_json(), allow_nan=False, indent=1) + "\n"
    faults = [_write(arguments.json, written)] if arguments.json not in (None, "-") else []
    if arguments.html:
        faults.append(_write(arguments.html, page(report)))
    shown = written if arguments.json == "-" else "\n".join(lines(report)) + "\n"
    encoding = sys.stdout.encoding or "utf-8"  # names may have letters that a terminal has not
    print(shown.encode(encoding, "replace").decode(encoding), end="", flush=True)
    if told := "; ".join(filter(None, faults)):
        raise ConfigError(told)


def _write(name: str, text: str) -> str:
    """Write a file as a whole or not at all; return why it could not be, "" if it was."""
    path = Path(name)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError as error:
        return f"{path}: cannot be written: {error.strerror}"
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return ""

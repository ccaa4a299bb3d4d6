"""What `gpuwatch verify` verifies: the node, or why there is nothing to verify or nobody may."""

import os
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuwatch import baseline, baseline_table, busy, canary_host, database
from gpuwatch.canary_text import Standing
from gpuwatch.commands.canary import kept, state_here
from gpuwatch.errors import ConfigError
from gpuwatch.matter import Matter
from gpuwatch.paths import DATABASE
from gpuwatch.topology import pci_gpus
from gpuwatch.verify import Finding, Node, entity
from gpuwatch.verify_facts import Answers, collect

WAIT = "free the GPUs and run it again, or --force for figures that are no measure"
UNSEEN = (
    "a container without the host's process ids: that nobody else is on the GPUs is judged by"
    " memory in use and utilization alone"
)


def gathered(arguments: Namespace, config: Mapping[str, Any]) -> tuple[Node, list[Finding]]:
    """Return the node, and why its GPUs cannot be verified: nothing if they can.

    Raises ConfigError for a GPU that is not here.
    """
    sysfs, procfs = (Path(config["paths"][key]) for key in ("sysfs", "procfs"))
    state = state_here(arguments, dict(config))
    numbers, released = kept(state)
    host = canary_host.present(procfs, released, os.environ.get("SLURM_JOB_ID", ""))
    answers, findings = Answers(), []
    why = str(busy.host_reason(host) or "")
    if why and not arguments.force:
        findings = [_skip("host", why)]
    else:
        answers = collect(sysfs, numbers, arguments.gpu)
        findings = _absent(answers, sysfs)
    for number in arguments.gpu if answers.here else ():
        if number not in answers.here:
            known = ", ".join(map(str, answers.here))
            raise ConfigError(f"--gpu {number}: no such GPU: here are {known}")
    count, model = arguments.expect or (0, "")
    in_use = _busy(answers, host, procfs)
    node = Node(
        sysfs=sysfs,
        procfs=procfs,
        kmsg=Path(config["paths"]["kmsg"]),
        driver={**answers.driver, "fault": answers.fault},
        gpus=list(answers.gpus.values()),
        pairs=answers.pairs,
        numbers={gpu["pci_bus_id"]: number for number, gpu in answers.gpus.items()} | numbers,
        inventory={} if arguments.gpu else _inventory(state),
        busy=in_use,
        standings=_standings(state),
        host=host,
        python=canary_host.interpreter(config["canary"]["python"]),
        scratch=arguments.storage or (state if state.is_dir() else Path.cwd()),
        expected_gpus=count or (0 if arguments.gpu else config["gpus"]["expected"]),
        expected_model=model,
        deep=arguments.deep,
        forced=arguments.force and bool(why or in_use),
    )
    return node, findings


def expectation(text: str) -> tuple[int, str]:
    """Return how many GPUs of which model should be here; an argparse type."""
    written = re.fullmatch(r"(?:([1-9]\d{0,2})(?:x|$))?\s*(\S.*)?", text.strip(), re.IGNORECASE)
    if not written or not text.strip():
        raise ArgumentTypeError(f"{text!r}: write 8, A100 or 8xA100")
    return int(written[1] or 0), written[2] or ""


def refusals(node: Node, alone: bool) -> list[Finding]:
    """Return who uses the GPUs: then nothing may run there. `alone`: no canary runs on the host."""
    if not alone:
        return [_skip("host", canary_host.RUNS_ALREADY)]
    return [_skip(entity(number), why) for number, why in node.busy.items()]


def notes(node: Node) -> list[Finding]:
    """Return what is to be said of how the GPUs are seen to be idle."""
    if node.host.host_pids or node.forced:
        return []
    step = "start it with them if you can (hostPID: true, --pid=host)"
    return [_skip("host", UNSEEN, step)]


def _skip(entity: str, why: str, step: str = WAIT) -> Finding:
    return Matter("idle", entity).skipped(why, step, "busy")


def _absent(answers: Answers, sysfs: Path) -> list[Finding]:
    """Return why there is no GPU, nothing if there is one: FAIL if the bus shows one."""
    if answers.gpus:
        return []
    matter, on_bus = Matter("driver", "host"), pci_gpus(sysfs)
    if on_bus:
        fault = (
            f"the bus has {len(on_bus)} NVIDIA GPUs ({', '.join(on_bus)}), the driver answers of"
            f" none: {answers.fault or 'it finds no device'}"
        )
        step = "install or load the NVIDIA driver, and look at the kernel log"
        return [matter.seen(0, len(on_bus), "the PCI bus").bad(fault, "driver", step)]
    fault = f"no NVIDIA GPU on this host{f': {answers.fault}' if answers.fault else ''}"
    step = "run it on the node that is to be accepted; in a container, give it the GPUs"
    return [matter.unknown(fault, "", step)]


def _busy(answers: Answers, host: busy.Host, procfs: Path) -> dict[int, str]:
    """Return why GPUs are not idle, with the names of the processes."""
    found = {}
    for number, gpu in answers.gpus.items():
        if not gpu.get("fault"):
            seen = busy.Seen.from_json(gpu["seen"])
            names = dict.fromkeys(_name(procfs, pid) for pid in seen.processes or ())
            named = ", ".join(filter(None, names))
            if why := str(busy.reason(replace(host, host_pids=True), seen) or ""):
                found[number] = f"{why} ({named})" if named else why
    return found


def _name(procfs: Path, pid: int) -> str:
    with suppress(OSError):
        return (procfs / str(pid) / "comm").read_text(errors="replace").strip()
    return ""


def _inventory(state: Path) -> dict[str, str]:
    """Return the GPUs that were accepted here, by PCI address, none where nothing is kept."""
    if not database.is_there(state / DATABASE):
        return {}

    def load(file: database.Connection) -> dict[str, str]:
        return dict(file.execute("SELECT pci_bus_id, uuid FROM inventory"))

    return database.look(state / DATABASE, load)


def _standings(state: Path) -> list[Standing]:
    """Return the baselines that are kept here, none where nothing is kept."""
    if not database.is_there(state / DATABASE):
        return []

    def load(file: database.Connection) -> list[Standing]:
        results = baseline_table.load_results(file)
        return baseline.Baseline.of(baseline_table.load(file), results).standings()

    return database.look(state / DATABASE, load)

"""The report of an examination: what was found, of which machine, and the verdict of the whole.

Its JSON is described by `data/verify.schema.json`; it only grows.
"""

import os
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuwatch import __version__, document
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.errors import FAIL, PASS, UNKNOWN, WARN
from gpuwatch.examination import Ran
from gpuwatch.verify import VERDICTS, Check, Finding, Node, Verdict, worst

SCHEMA, VERSION = "gpuwatch-verify", 1
MAX_BYTES = 64 << 20
CODES = {"PASS": PASS, "WARN": WARN, "FAIL": FAIL, "SKIP": UNKNOWN, "UNKNOWN": UNKNOWN}
GPU_FACTS = ("gpu", "pci_bus_id", "uuid", "serial", "name", "vbios", "fault")


@dataclass(slots=True, kw_only=True)
class Report:
    """What `gpuwatch verify` tells. `time` is the unix time at which it began.

    `left_out` are the checks that the user did not want, `compared` is how it compares with an
    earlier one (`verify_compare`), None if that was not asked.
    """

    verdict: Verdict
    findings: Sequence[Finding]
    time: float
    seconds: float
    node: Node
    ran: Sequence[Ran] = ()
    left_out: Sequence[str] = ()
    readings: Sequence[CanaryReading] = ()
    host: Mapping[str, Any] = field(default_factory=dict)
    compared: Mapping[str, Any] | None = None

    @property
    def code(self) -> int:
        """What the command ends with: that of the verdict, or of the comparison if it is worse."""
        verdicts: list[Verdict] = [self.verdict]
        if self.compared:
            verdicts.append(self.compared["verdict"])
        return CODES[worst(verdicts)]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, null where something is not known."""
        node = self.node
        counts = {one: sum(found.verdict == one for found in self.judged) for one in VERDICTS}
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "verdict": self.verdict,
            "mode": "deep" if node.deep else "quick",
            "forced": node.forced,
            "time": self.time,
            "seconds": self.seconds,
            "host": dict(self.host),
            "versions": self.versions,
            "gpus": [{name: gpu.get(name) for name in GPU_FACTS} for gpu in node.gpus],
            "counts": counts,
            "checks": [found.to_json() for found in self.findings],
            "ran": [
                {"name": one.check.name, "phase": one.check.phase, "seconds": one.seconds}
                for one in self.ran
            ],
            "undecided": self.undecided,
            "left_out": list(self.left_out),
            "readings": [reading.to_json() for reading in self.readings],
            "compared": None if self.compared is None else dict(self.compared),
        }

    @property
    def judged(self) -> list[Finding]:
        """What counts: rules of thumb do not."""
        return [found for found in self.findings if not found.thumb]

    @property
    def rules_of_thumb(self) -> list[Finding]:
        """What counts for nothing."""
        return [found for found in self.findings if found.thumb]

    @property
    def static_checks(self) -> set[str]:
        """The names of the checks that only looked."""
        return {one.check.name for one in self.ran if one.check.phase == "static"}

    @property
    def undecided(self) -> list[str]:
        """The essential checks that could not judge: without them the node is not accepted."""
        return undecided(self.findings, [one.check for one in self.ran])

    @property
    def versions(self) -> dict[str, str | None]:
        """Of what the figures depend on; those of torch are there if a canary ran."""
        environment: dict[str, str] = {}
        for reading in self.readings:
            environment |= reading.environment
        driver = self.node.driver
        return {
            "gpuwatch": __version__,
            "driver": driver.get("version"),
            "nvml": driver.get("library"),
            "cuda_driver": driver.get("cuda"),
            **{name: environment.get(name) for name in ("cuda", "torch", "nccl")},
        }


def overall(findings: Iterable[Finding], checks: Iterable[Check]) -> Verdict:
    """Return the verdict of the whole.

    FAIL if anything fails. UNKNOWN if an essential check could not judge something, or nothing
    was judged at all. WARN if anything warns, or a check that is not essential could not judge.
    What is skipped because the node has no such thing counts for nothing.
    """
    judged = [found for found in findings if not found.thumb]
    verdicts = {found.verdict for found in judged}
    if "FAIL" in verdicts:
        return "FAIL"
    if not verdicts & {"PASS", "WARN"} or undecided(judged, checks):
        return "UNKNOWN"
    return "WARN" if verdicts & {"WARN", "UNKNOWN"} else "PASS"


def undecided(findings: Sequence[Finding], checks: Iterable[Check]) -> list[str]:
    """Return the essential checks that could not judge all, or nothing."""
    found = []
    for check in checks:
        own = {one.verdict for one in findings if one.name == check.name and not one.thumb}
        if check.essential and ("UNKNOWN" in own or not own & {"PASS", "WARN", "FAIL"}):
            found.append(check.name)
    return found


def host_facts(procfs: Path) -> dict[str, Any]:
    """Return what the machine is."""
    return {
        "name": socket.gethostname(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "system": _first(Path("/etc/os-release"), "PRETTY_NAME=", '"'),
        "processor": _first(procfs / "cpuinfo", "model name", ": \t"),
        "processors": os.cpu_count(),
        "memory_bytes": _memory(procfs / "meminfo"),
    }


def _first(path: Path, key: str, strip: str) -> str | None:
    """Return what the first line with a key says, None if there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(key)), None)
    return None if found is None else found.removeprefix(key).strip(strip)


def _memory(path: Path) -> int | None:
    words = (_first(path, "MemTotal:", " ") or "").split()
    return int(words[0]) << 10 if words and words[0].isdecimal() else None


def load(path: Path) -> dict[str, Any]:
    """Return an earlier report as plain data. Raises ConfigError if the file is none."""
    return document.load(
        path,
        SCHEMA,
        VERSION,
        max_bytes=MAX_BYTES,
        otherwise="no report: make one with `gpuwatch verify --json FILE`",
    )

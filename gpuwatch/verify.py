"""Verify: what a check of a node is given, and what it finds.

`checks` has the list of checks; `examination` runs them. A check finds; it prints nothing, changes
nothing on the machine, and judges what it does not know as UNKNOWN, never as PASS.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from gpuwatch.busy import Host, reason
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.canary_text import Standing
from gpuwatch.errors import SourceUnavailable
from gpuwatch.look import Looks
from gpuwatch.session import Session
from gpuwatch.signals import valid

Verdict = Literal["PASS", "WARN", "FAIL", "SKIP", "UNKNOWN"]
VERDICTS: tuple[Verdict, ...] = ("FAIL", "UNKNOWN", "WARN", "SKIP", "PASS")  # the worst first
Cause = Literal[
    "", "board", "clock", "heat", "power", "kernel", "memory", "link", "host", "driver", "busy"
]
Facts = Mapping[str, Any]
SETTLE_SECONDS, SETTLE_POLL_SECONDS = 3.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found of one entity.

    `name` is the check's, `measure` what of it, "" where there is but one: "bf16", "to_gpu".
    `entity` is "host", "gpu0", "gpu0-gpu3" of a pair, or the name of a port, disk or other part.
    `value` and `expectation` are in `unit` (a base unit of signals, "" of text and counts), None
    where not known. `source` is where the expectation is from: "data sheet", "siblings", "baseline
    of 2026-11-03", "rule of thumb". `noise` is by which share the value differs from run to run.
    `reason` says in a line what is wrong, or why nothing is known; `cause` what it looks like;
    `next_step` what to do. Both are there whenever the verdict is not PASS.
    `thumb`: a rule of thumb of the trade, shown apart; it counts for nothing in the whole.
    `forced`: somebody else was on the GPUs, so it is no measure of them; the examination sets it.
    `curve` is what is drawn of a sweep: pairs of (bytes, value).
    """

    name: str
    entity: str
    verdict: Verdict
    measure: str = ""
    value: float | str | None = None
    unit: str = ""
    expectation: float | str | None = None
    source: str = ""
    noise: float | None = None
    reason: str = ""
    cause: Cause = ""
    next_step: str = ""
    thumb: bool = False
    forced: bool = False
    curve: tuple[tuple[float, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Finding":
        """Rebuild it; TypeError or ValueError if `data` is not that."""
        if data["verdict"] not in VERDICTS:
            raise ValueError(f"verdict {data['verdict']!r}")
        points = ((float(x), float(y)) for x, y in data.get("curve", ()))
        curve = tuple(point for point in points if all(map(math.isfinite, point)))
        kept = {name: _kept(value) for name, value in data.items()}
        return cls(**{**kept, "curve": curve})


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What checks are given: the machine as plain data, and how it may be tried out.

    `driver` and `gpus` are what `verify_child` tells: of the driver, and of each GPU that is
    verified, in the order of their numbers; a GPU that does not answer has a "fault" and little
    else. `pairs` are what the driver says of two GPUs. `busy` says by number why a GPU is not idle.
    `standings` are the baselines of this host. `numbers` are those of its GPUs by PCI address.

    `inventory` has the uuid that was accepted at each PCI address, nothing where no daemon ran.

    `expected_gpus` (0 is not known) and `expected_model` are what the user says should be here.

    `deep`: there is time. `forced`: somebody else may be on the GPUs, and figures are no measure.
    `scratch` is the directory that storage is measured in.
    """

    sysfs: Path = Path("/sys")
    procfs: Path = Path("/proc")
    devices: Path = Path("/dev")
    kmsg: Path = Path("/dev/kmsg")
    driver: Facts = field(default_factory=dict)
    gpus: Sequence[Facts] = ()
    pairs: Sequence[Facts] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    inventory: Mapping[str, str] = field(default_factory=dict)
    busy: Mapping[int, str] = field(default_factory=dict)
    standings: Sequence[Standing] = ()
    host: Host = field(default_factory=Host)
    python: str = ""
    scratch: Path = Path()
    expected_gpus: int = 0
    expected_model: str = ""
    deep: bool = False
    forced: bool = False

    @property
    def answering(self) -> list[Facts]:
        """Those GPUs that told who they are."""
        return [gpu for gpu in self.gpus if not gpu.get("fault")]

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Give canaries the GPUs that are verified and answer.

        Who rents a container cannot see the processes of its host; there, memory in use and
        utilization have to tell that a GPU is idle. Raises SourceUnavailable, which a check may
        let go: its verdict is UNKNOWN then.
        """
        wanted = [gpu["gpu"] for gpu in self.answering]
        if not wanted:
            raise SourceUnavailable("no GPU answers: look for an Xid in the kernel log")
        with closing(Looks(self.sysfs, self.numbers, wanted)) as looks:
            host = replace(self.host, host_pids=True)
            if not self.forced:
                _settle(looks, host)
            yield Session(
                self.python, "full", looks, host=host, force=self.forced, sysfs=self.sysfs
            )


def entity(gpu: int | None) -> str:
    """Return how findings name a GPU, or the host."""
    return "host" if gpu is None else f"gpu{gpu}"


class Check(Protocol):
    """One thing to look at or to try out.

    It has a process of its own, which is killed with all it started at the end of its time; what it
    found by then counts. Of an error it says nothing itself: it is told as UNKNOWN. A check of
    "load" runs only while GPUs are idle. `essential`: without its PASS or WARN the node has none.
    """

    name: str
    help: str
    phase: Literal["static", "load"]
    deep_only: bool
    essential: bool

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take, with so many GPUs."""

    def run(self, node: Node) -> Iterator[Finding | CanaryReading]:
        """Yield findings as they come, and each reading of a canary that it took."""


def _kept(value: object) -> Any:
    """Return text as valid Unicode, and a number that is none as None."""
    if isinstance(value, str):
        return valid(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _settle(looks: Looks, host: Host) -> None:
    """Wait a little for GPUs to be idle: the driver tells of the load before for a second."""
    answering = [gpu.number for gpu in looks.gpus.values() if not gpu.fault]
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end and any(
        reason(host, looks.newest(number)) for number in answering
    ):
        time.sleep(SETTLE_POLL_SECONDS)
        looks.poll()


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts; UNKNOWN of none."""
    found = set(verdicts)
    return next((one for one in VERDICTS if one in found), "UNKNOWN")

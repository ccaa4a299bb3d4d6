"""Busy: whether somebody uses a GPU, or may want it, so that no canary may run there.

Pure functions over what was read. What is not known speaks against running: a canary on a busy GPU
costs a job its time, and measures nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

USED_RATIO = 0.02  # more utilization than this is work
# A context takes 100 MiB and more; without one the driver counts some MiB as used, its own reserve
# apart.
USED_BYTES = 64 << 20
SHOWN = 3  # processes or jobs that a reason names


class Obstacle(NamedTuple):
    """Why no canary may run: `kind` as skips are counted by, and a line for people."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look at a GPU; None is what the driver did not tell.

    `processes` are those of all lists: compute, graphics and MPS. `compute_mode` is as in
    `gpuwatch_gpu_mode_info`, "" if the GPU has none. The rest goes with a reading: `reasons` are
    the bits that slow its clocks, those after it are read five times a second only.
    """

    processes: frozenset[int] | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: float | None = None
    compute_mode: str = ""
    mig: bool = False
    clock_hertz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    throttled: bool | None = None
    reasons: int | None = None
    margin_celsius: float | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Seen":
        """Rebuild what a child saw; TypeError or ValueError if `data` is not that."""
        processes = data.get("processes")
        pids = None if processes is None else frozenset(map(int, processes))
        return cls(**{**data, "processes": pids})


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What is known of the host when a canary wants to run.

    `host_pids` says whether process ids of the driver are those of our own /proc. `jobs` are the
    scheduler's jobs that run here, our own apart; `released` is what was let go for others.
    """

    host_pids: bool = True
    jobs: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()


def host_reason(host: Host) -> Obstacle | None:
    """Return why GPUs may not even be looked at, None if they may."""
    if "gpus" in host.released:
        return Obstacle("released", "GPUs are released: gpuwatch resume gpus")
    if "canaries" in host.released:
        return Obstacle("paused", "canaries are paused: gpuwatch resume canaries")
    if host.jobs:
        return Obstacle("job", f"a job of Slurm runs here: {_some(sorted(host.jobs))}")
    return None


def reason(host: Host, seen: Seen) -> Obstacle | None:
    """Return why no canary may run on a GPU that was seen like this, None if it may."""
    if why := host_reason(host):
        return why
    if seen.mig:
        return Obstacle("mig", "MIG is on: it measures whole GPUs")
    if seen.compute_mode != "default":
        mode = seen.compute_mode.replace("_", " ") or "not known"
        text = f"compute mode is {mode}: a job that starts meanwhile would fail"
        return Obstacle("compute_mode", text)
    used = _used(seen)
    if seen.processes == frozenset() and not host.host_pids:
        return Obstacle(
            "host_pids",
            "a container without the host's process ids cannot see who else uses it: start it"
            " with them (hostPID: true, --pid=host)",
        )
    return Obstacle("busy", used) if used else None


def _used(seen: Seen) -> str:
    if seen.processes is None:
        return "the driver does not tell its processes"
    if seen.processes:
        return f"in use by process {_some(map(str, sorted(seen.processes)))}"
    if seen.utilization_ratio is None or seen.utilization_ratio > USED_RATIO:
        return f"utilization is {_percent(seen.utilization_ratio)}, with no process to be seen"
    if seen.memory_used_bytes is None or seen.memory_used_bytes > USED_BYTES:
        return f"{_mebibytes(seen.memory_used_bytes)} of its memory are in use"
    return ""


def intruder(seen: Seen, ours: Callable[[int], bool]) -> str:
    """Return who else is on a GPU while a canary runs there, or is to be; "" if nobody is."""
    if seen.compute_mode not in ("default", ""):
        return f"compute mode was set to {seen.compute_mode.replace('_', ' ')}"
    if seen.processes is None:
        return "the driver does not tell its processes any more"
    others = sorted(pid for pid in seen.processes if not ours(pid))
    return f"process {_some(map(str, others))} came" if others else ""


def _some(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


def _percent(ratio: float | None) -> str:
    return "not known" if ratio is None else f"{ratio:.0%}"


def _mebibytes(size: float | None) -> str:
    return "unknown amounts" if size is None else f"{size / (1 << 20):.0f} MiB"

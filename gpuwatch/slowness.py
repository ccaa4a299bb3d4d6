"""Slowness: what made a canary slow, by what was seen of its GPU meanwhile.

A card is slow because its clock is held down (heat, power, a setting), or at the clock that others
have: then something else is wrong with it, or with the code that it runs. A copy is slow because
its link is. The driver's clock is some 50 ms old and its power the mean of up to a second: work per
clock of a burst says nothing, but clocks that differ widely do.
"""

import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from gpuwatch.clock import SECOND_NS
from gpuwatch.lookup import look_up
from gpuwatch.session import Result
from gpuwatch.verify import Cause, Node

HEAT = ("hw_thermal_slowdown", "sw_thermal_slowdown")
BRAKE = ("hw_power_brake", "hw_slowdown")
SETTING = ("applications_clocks", "sync_boost", "display_clocks")
HELD_RATIO = 0.01  # of the time: less is an edge
MOSTLY_RATIO = 0.5  # of the time
LOW_CLOCK_RATIO = 0.97  # of the siblings' clock, or of the highest
SLOW_RATIO = 0.95  # of the siblings' median
FULL_CLOCK_RATIO = 0.9  # of the highest
POWER_SECONDS = 1.0  # less, and the driver's power is still of the time before
NCCL_SWITCHES = (
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
)


class Why(NamedTuple):
    """A cause, what shows it, and what to do."""

    cause: Cause
    text: str
    next_step: str

    def reason(self, loss_ratio: float) -> str:
        """Return how much less than expected there was, and what shows why."""
        fault = f"{100 * loss_ratio:.1f} % less than expected"
        return f"{fault}: {self.text}" if self.text else fault


def why_slow(node: Node, one: Result, others: Sequence[Result]) -> Why:
    """Return what made a result slow; `others` are those of its siblings."""
    if one.canary == "allreduce":
        return _between(node, one)
    number = next(iter(one.seen), None)
    seen = dict(one.seen.get(number, {})) if number is not None else {}
    if one.told and one.told["end_ns"] - one.told["start_ns"] < POWER_SECONDS * SECOND_NS:
        seen.pop("power_watts", None)
    about = next((gpu for gpu in node.gpus if gpu["gpu"] == number), {})
    if one.canary == "pcie":
        return _link(seen, about)
    return throttled(seen, about) or _clock(one, others, seen, about)


def throttled(seen: Mapping[str, Any], about: Mapping[str, Any]) -> Why | None:
    """Return what held the clocks down of heat, power or settings; None if nothing of it did.

    The power limit is none of them: under a full load it holds a healthy card.
    """
    shares = seen.get("reasons") or {}
    shown = _shown(seen, about)
    held: Sequence[tuple[Sequence[str], Cause, str, str]] = (
        (
            HEAT,
            "heat",
            "heat holds its clocks down",
            "look at fans, filters, airflow and heat sink",
        ),
        (
            BRAKE,
            "power",
            "the power brake holds its clocks down",
            "look at power supplies, their cables and the limit of the rack",
        ),
    )
    for names, cause, what, step in held:
        share = max(shares.get(name, 0.0) for name in names)
        if share > HELD_RATIO:
            return Why(cause, f"{what} {100 * share:.0f} % of the time{shown}", step)
    share = max(shares.get(name, 0.0) for name in SETTING)
    clock, limit = seen.get("clock_hertz"), look_up(about, "clocks", "sm", "limit_hertz")
    # One that nobody has set has this reason, too, at its highest clock.
    if share > MOSTLY_RATIO and clock and limit and clock < LOW_CLOCK_RATIO * limit:
        return Why(
            "clock",
            f"its clocks are set lower{shown}",
            "reset them: nvidia-smi -rgc, nvidia-smi -rac",
        )
    return None


def _clock(
    one: Result, others: Sequence[Result], seen: Mapping[str, Any], about: Mapping[str, Any]
) -> Why:
    reading = one.reading
    assert reading is not None
    clock, value = reading.clock_hertz, reading.value
    if clock is None or value is None:
        return Why("", "its clock is not known", "run it again, and look at nvidia-smi -q -d CLOCK")
    slow: Cause = "memory" if one.canary == "memory" else "kernel"
    step = {
        "memory": "look at ECC errors and remapped rows, reset the GPU; if it stays, replace it",
        "kernel": "look who else is on it and at ECC errors, reset the GPU, compare versions of"
        " torch and cuBLAS",
    }[slow]
    shown = _shown(seen, about)
    clocks = [other.reading.clock_hertz for other in others if other.reading]
    values = [other.reading.value for other in others if other.reading]
    usual, usual_value = _median(clocks), _median(values)
    limit = look_up(about, "clocks", "sm", "limit_hertz")
    low = under = limit is not None and clock < FULL_CLOCK_RATIO * limit
    beside = ""
    if usual and usual_value:
        lost = 1 - value / usual_value
        if apart := clock < LOW_CLOCK_RATIO * usual and 1 - clock / usual >= lost / 2:
            beside = f", that of its siblings is {usual / 1e6:.0f} MHz"
        # What is slower than others at their clock is so for another reason.
        low = apart or (under and value > SLOW_RATIO * usual_value)
    if low and (seen.get("reasons") or {}).get("sw_power_cap", 0.0) > MOSTLY_RATIO:
        return Why(
            "clock",
            f"its power limit holds its clock down{beside}{shown}",
            "compare its power limit, draw and temperature with those of other such cards, under"
            " load: nvidia-smi -q -d POWER,TEMPERATURE",
        )
    if low:
        return Why(
            "clock",
            f"its clock is low{beside}{shown}",
            "compare power limit, temperature and clock settings with nvidia-smi -q",
        )
    at = "the clock of its siblings" if under and usual else "its full clock"
    return Why(slow, f"slow at {at}{shown}", step)


def _shown(seen: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Return clock, power and heat as people write them."""
    parts = []
    if clock := seen.get("clock_hertz"):
        limit = look_up(about, "clocks", "sm", "limit_hertz")
        parts.append(f"{clock / 1e6:.0f} MHz" + (f" of {limit / 1e6:.0f}" if limit else ""))
    if watts := seen.get("power_watts"):
        limit = look_up(about, "power", "enforced_watts")
        parts.append(f"{watts:.0f} W" + (f" of {limit:.0f}" if limit else ""))
    if celsius := seen.get("hottest_celsius"):
        parts.append(f"{celsius:.0f} C")
    if share := (seen.get("reasons") or {}).get("sw_power_cap"):
        parts.append(f"power limit {100 * share:.0f} % of the time")
    return f" ({', '.join(parts)})" if parts else ""


def _link(seen: Mapping[str, Any], about: Mapping[str, Any]) -> Why:
    now = seen.get("pcie_generation"), seen.get("pcie_lanes")
    most = look_up(about, "pcie", "generation_limit"), look_up(about, "pcie", "lanes_limit")
    if any(one and best and one < best for one, best in zip(now, most, strict=True)):
        text = f"its link is {_link_text(*now)} under load, and could be {_link_text(*most)}"
        step = "reseat the card and its riser; look for PCIe errors in the kernel log"
        return Why("link", text, step)
    return Why(
        "host",
        f"its link is as it should be, {_link_text(*now)}",
        "look at what else copies, at NUMA settings, IOMMU and ACS, and at the host's memory",
    )


def _link_text(generation: int | None, lanes: int | None) -> str:
    return f"Gen{generation or '?'} x{lanes or '?'}"


def _between(node: Node, one: Result) -> Why:
    """Return what slows a collective."""
    chosen = [f"{name}={os.environ[name]}" for name in NCCL_SWITCHES if os.environ.get(name)]
    told = one.told or {}
    transports = [str(name) for name in told.get("transports") or ()]
    joined = f"NCCL joins the GPUs by {', '.join(transports)}" if transports else ""
    if chosen:
        names = " ".join(f"-u {one.partition('=')[0]}" for one in chosen)
        text = f"{', '.join(chosen)} in the environment" + (f": {joined}" if joined else "")
        return Why("host", text, f"take it out and run it again: env {names} gpuwatch verify")
    for number, seen in one.seen.items():
        about = next((gpu for gpu in node.gpus if gpu["gpu"] == number), {})
        if held := throttled(seen, about):
            return held._replace(text=f"GPU {number}: {held.text}")
    if transports and "P2P" not in transports:
        step = (
            "look at NVLinks and the fabric manager, and at IOMMU and ACS; in a container at"
            " /dev/shm and its devices: nvidia-smi topo -p2p r"
        )
        return Why("link", f"{joined}, not from one to the other", step)
    down = {
        gpu["gpu"]: sum(not link.get("up") for link in gpu.get("nvlinks") or ())
        for gpu in node.gpus
    }
    if any(down.values()):
        which = ", ".join(f"{count} of GPU {number}" for number, count in down.items() if count)
        return Why("link", f"NVLinks are down: {which}", "nvidia-smi nvlink -s; reset the GPUs")
    return Why(
        "link",
        joined,
        "look at NVLink errors, nvidia-smi topo -m and the log of the fabric manager",
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return median(known) if known else None

"""How the GPUs are set: power limit, clocks, ECC, compute mode, persistence.

Settings cost nothing to change, so most are a warning; but a renter may not be able to change them,
and what they take away is missing in every figure.
"""

from collections.abc import Iterator

from gpuwatch.lookup import look_up, number, text
from gpuwatch.matter import Matter
from gpuwatch.static_check import StaticCheck, entity_of, name_of
from gpuwatch.verify import Cause, Facts, Finding, Node

LOWERED, FAR_LOWERED = 0.99, 0.75  # of the board's own limit; DCGM's targeted_power asks for 0.75
SLOWER = 0.99
# Reasons of which none may hold the clocks of a GPU that does nothing.
HELD: dict[str, tuple[Cause, str]] = {
    "hw_power_brake": ("power", "look at the power supplies of the chassis and at power capping"),
    "hw_thermal_slowdown": ("heat", "look at fans, pump and inlet air"),
    "sw_thermal_slowdown": ("heat", "look at fans, pump and inlet air"),
    "hw_slowdown": ("power", "look at power cables, supplies and cooling"),
}


def look(node: Node) -> Iterator[Finding]:
    """Compare how each GPU is set with how it comes."""
    for gpu in node.answering:
        yield _power_limit(gpu)
        yield from _clocks(gpu)
        yield _reasons(gpu)
        yield _ecc(gpu)
        yield _compute_mode(gpu)
        yield _persistence(gpu)


def _power_limit(gpu: Facts) -> Finding:
    matter = Matter("settings", entity_of(gpu), "power limit", "watts")
    default = number(gpu, "power", "default_watts")
    limit = number(gpu, "power", "enforced_watts") or number(gpu, "power", "requested_watts")
    if not limit or not default:
        step = "compare the power under load with the data sheet's"
        return matter.seen(limit).skipped("the driver does not tell limit and default", step)
    fault = f"the power limit is lowered to {100 * limit / default:.0f} % of the board's own"
    return matter.seen(limit, default, "the board's own limit").judged(
        fault if limit < LOWERED * default else "",
        "power",
        f"nvidia-smi -pl {default:g}",
        fatal=limit < FAR_LOWERED * default,
    )


def _clocks(gpu: Facts) -> Iterator[Finding]:
    """Compare application clocks with their defaults, where a GPU has them."""
    for kind in ("sm", "memory"):
        now = number(gpu, "clocks", kind, "application_hertz")
        default = number(gpu, "clocks", kind, "default_hertz")
        if now and default:
            matter = Matter("settings", entity_of(gpu), f"{kind} clock", "hertz")
            fault = (
                f"the application clock is set to {100 * now / default:.0f} % of the board's own"
            )
            yield matter.seen(now, default, "the board's own setting").judged(
                fault if now < SLOWER * default else "", "clock", "nvidia-smi -rac"
            )


def _reasons(gpu: Facts) -> Finding:
    matter = Matter("settings", entity_of(gpu), "held back")
    reasons = look_up(gpu, "reasons")
    if not isinstance(reasons, list) or not all(isinstance(one, str) for one in reasons):
        return matter.unread("what holds its clocks down")
    source = "NVIDIA's documentation of clock event reasons"
    matter = matter.seen(", ".join(reasons), "nothing but idleness and the power limit", source)
    for reason, (cause, step) in HELD.items():
        if reason in reasons:
            return matter.bad(f"its clocks are held down by {reason}", cause, step)
    default = number(gpu, "clocks", "sm", "default_hertz")
    most = number(gpu, "clocks", "sm", "limit_hertz")
    held_by_itself = default and most and default < SLOWER * most  # as V100 and T4 are
    if "applications_clocks" in reasons and not held_by_itself:
        fault = "its clocks are held down by a setting: locked or application clocks"
        return matter.odd(fault, "clock", "nvidia-smi -rgc; nvidia-smi -rac")
    return matter.good()


def _ecc(gpu: Facts) -> Finding:
    matter = Matter("settings", entity_of(gpu), "ecc")
    now, pending = text(gpu, "modes", "ecc"), text(gpu, "modes", "ecc_pending")
    if now is None:
        step = "test its memory with --deep"
        return matter.skipped("it has no ECC, or the driver does not tell", step)
    if now == "off":
        return matter.seen(now, "on", "rule of thumb").odd(
            "ECC is off: wrong bits in memory are neither corrected nor told",
            "memory",
            "nvidia-smi -e 1, then reset the GPU",
        )
    fault = f"ECC will be {pending} after the next reset" if pending not in (None, now) else ""
    step = "reset the GPU, then verify again"
    return matter.seen(now, pending, "pending setting").judged(fault, "memory", step)


def _compute_mode(gpu: Facts) -> Finding:
    matter = Matter("settings", entity_of(gpu), "compute mode")
    mode = text(gpu, "modes", "compute")
    if mode is None:
        return matter.unread("its compute mode")
    fault = "no program may compute on it" if mode == "prohibited" else ""
    step = "nvidia-smi -c 0"
    return matter.seen(mode, "default", "nvidia-smi").judged(fault, "driver", step, fatal=True)


def _persistence(gpu: Facts) -> Finding:
    matter = Matter("settings", entity_of(gpu), "persistence")
    mode = text(gpu, "modes", "persistence")
    if mode is None:
        return matter.unread("whether it stays ready")
    off = mode == "off" and "GeForce" not in name_of(gpu)
    fault = "the driver forgets the GPU when nobody has it open: each start takes seconds"
    return matter.seen(mode, "on", "NVIDIA's driver persistence document").judged(
        fault if off else "", "driver", "nvidia-smi -pm 1, or run nvidia-persistenced"
    )


CHECK = StaticCheck("settings", "whether GPUs are set to less than they can do", look)

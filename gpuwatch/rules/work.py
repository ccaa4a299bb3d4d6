"""Rules about the work a GPU does: slower than its siblings', or only seemingly there."""

from statistics import median
from typing import NamedTuple

from gpuwatch.rule import Rule, View

SM_CLOCK = 'gpu_clock_hertz{clock="sm"}'
MIG = 'gpu_mig_enabled{setting="current"}'
CLOCK_SET = 'gpu_throttle_active{reason="applications_clocks"}'
ACTIVITY = ("gpu_sm_active_ratio", "gpu_utilization_ratio")  # the first that is known counts
BUSY_RATIO = 0.2
ALIKE = 0.2  # activity this far from the siblings' is another load
PEERS = 2  # with fewer there is no telling who is slow
FULL_RATIO = 0.95  # a utilization that looks like a GPU at work


class Pace(NamedTuple):
    """How a busy GPU worked over the window: SM clock, activity, and what it is compared with.

    GPUs of one kind have the same clock limits, and clocks that are set by hand or are not.
    """

    clock: float
    activity: float
    kind: tuple[float | None, ...]


def pace(view: View) -> Pace | None:
    """Return the GPU's pace, None if it is not busy, is split into instances, or is unknown."""
    clock, by_hand = view.mean(SM_CLOCK), view.mean(CLOCK_SET)
    activity = next((mean for name in ACTIVITY if (mean := view.mean(name)) is not None), None)
    if not clock or activity is None or activity <= BUSY_RATIO or view.active(MIG):
        return None
    limits = (
        view.constant(f'gpu_clock_limit_hertz{{clock="{part}"}}') for part in ("sm", "memory")
    )
    return Pace(clock, activity, (*limits, round(by_hand or 0)))


def behind(view: View) -> float | None:
    """Return how far the SM clock is under the median of siblings with the same load.

    None if fewer than two of the same kind are busy, or if the GPU's load is another.
    """
    own: Pace | None = view.measured
    if own is None:
        return None
    peers: list[Pace] = [
        other.measured
        for other in view.siblings
        if other is not view and other.measured and other.measured.kind == own.kind
    ]
    if len(peers) < PEERS:
        return None
    usual = median(peer.activity for peer in peers)
    if abs(own.activity - usual) > ALIKE * usual:
        return None
    return 1 - own.clock / median(peer.clock for peer in peers)


def power_of_full(view: View) -> float | None:
    """Return the share of its power limit that a fully used GPU of a process draws; else 1.

    None if utilization, processes, power or limit are not known.
    """
    used, drawn = view.mean("gpu_utilization_ratio"), view.mean("gpu_power_watts")
    limit = view.constant('gpu_power_limit_watts{limit="enforced"}')
    processes = view.highest("gpu_processes")
    if used is None or drawn is None or not limit or processes is None:
        return None
    return drawn / limit if used >= FULL_RATIO and processes else 1.0


def used_by_nobody(view: View) -> float | None:
    """Return the utilization of a GPU that no process uses, 0 if one does, None if unknown."""
    used, processes = view.mean("gpu_utilization_ratio"), view.highest("gpu_processes")
    return None if used is None or processes is None else used if not processes else 0.0


RULES = (
    Rule(
        name="gpu_straggler",
        severity="warning",
        per="gpu",
        help="For 10 minutes the SM clock was 7 % or more under that of siblings with the same "
        "load.",
        next_step="Compare throttle reasons, temperature and power limit with the siblings'.",
        measure=pace,
        judge=behind,
        limit=0.07,
        window_seconds=300,
        for_seconds=600,
    ),
    Rule(
        name="gpu_straggler_severe",
        severity="critical",
        per="gpu",
        help="For 10 minutes the SM clock was 15 % or more under that of siblings with the same "
        "load.",
        next_step="Take the node out of the pool, look for heat and power brake, then reseat.",
        measure=pace,
        judge=behind,
        limit=0.15,
        window_seconds=300,
        for_seconds=600,
    ),
    Rule(
        name="gpu_busy_without_work",
        severity="info",
        per="gpu",
        help="For 10 minutes a process has kept the GPU fully used at 30 % of its power limit or "
        "less; the value is that share.",
        next_step="Look whether the job makes progress: a collective that waits looks like this.",
        judge=power_of_full,
        limit=0.3,
        at_most=True,
        window_seconds=60,
        for_seconds=600,
    ),
    Rule(
        name="gpu_ghost_load",
        severity="info",
        per="gpu",
        help="For 10 minutes the GPU has been fully used, and by no process.",
        next_step="Reset the GPU when the node is free, for its counter stands still.",
        judge=used_by_nobody,
        limit=FULL_RATIO,
        window_seconds=60,
        for_seconds=600,
    ),
)

"""Rules about a GPU's heat and power.

Idle, application clocks, sync boost and display clocks are reasons a clock is low, not faults: no
rule judges them. A power cap is normal in training, so it never says more than info. Heat is judged
by the distance to the GPU's own limits: no temperature by itself is a fault.
"""

from typing import TYPE_CHECKING

from gpuwatch.rule import Rule, View

if TYPE_CHECKING:
    from gpuwatch.window import Tick

HW_THERMAL = 'gpu_throttle_active{reason="hw_thermal_slowdown"}'
SW_THERMAL = 'gpu_throttle_active{reason="sw_thermal_slowdown"}'
POWER_BRAKE = 'gpu_throttle_active{reason="hw_power_brake"}'
POWER_CAP = 'gpu_throttle_active{reason="sw_power_cap"}'
TOGETHER = 4  # as many GPUs braked at once are a fault of the node's power, not theirs


def lost_clock(view: View) -> float | None:
    """Return the share of the SM clock that was not had over the window, None if unknown."""
    clock = view.mean('gpu_clock_hertz{clock="sm"}')
    limit = view.constant('gpu_clock_limit_hertz{clock="sm"}')
    return None if clock is None or not limit else max(0.0, 1 - clock / limit)


def memory_margin(view: View) -> float | None:
    """Return how far the memory is below its highest operating temperature, None if unknown."""
    window = view.window('gpu_temperature_celsius{sensor="memory"}')
    limit = view.constant('gpu_temperature_threshold_celsius{threshold="memory_max"}')
    return None if window is None or limit is None else limit - window.mean


def braked_together_ns(tick: "Tick") -> int | None:
    """Return for how long of the tick the brake was on for four GPUs, None if none tells."""
    braked = [
        round(windows[POWER_BRAKE].integral)
        for entity, windows in tick.windows.items()
        if entity.kind == "gpu" and POWER_BRAKE in windows
    ]
    if not braked:
        return None
    return sorted(braked)[-TOGETHER] if len(braked) >= TOGETHER else 0


def braked_alone(view: View) -> float | None:
    """Return the share of time in which the brake was on, but not for the whole node."""
    window = view.window(POWER_BRAKE)
    if window is None:
        return view.part(POWER_BRAKE, None)
    active_ns = round(window.integral)
    if active_ns:
        active_ns = max(0, active_ns - (braked_together_ns(view.tick) or 0))
    return view.part(POWER_BRAKE, active_ns)


RULES = (
    Rule(
        name="gpu_hw_thermal_slowdown",
        severity="critical",
        per="gpu",
        help="The hardware held the clocks down for heat in 5 % of the last 5 minutes.",
        next_step="Take the node out of the pool, check fans, airflow and coolant, then reseat.",
        judge=lambda view: view.share(HW_THERMAL),
        limit=0.05,
        window_seconds=300,
        detect=lambda view: view.active(HW_THERMAL),
        record=True,
    ),
    Rule(
        name="gpu_thermal_slowdown",
        severity="warning",
        per="gpu",
        help="The driver held the clocks down for heat in 10 % of the last 10 busy minutes.",
        next_step="Compare inlet and GPU temperatures with the node's neighbours, check airflow.",
        judge=lambda view: view.busy_share(SW_THERMAL),
        limit=0.10,
        window_seconds=600,
        detect=lambda view: view.active(SW_THERMAL) and view.busy,
        record=True,
    ),
    Rule(
        name="gpu_hot",
        severity="warning",
        per="gpu",
        help="For 10 minutes the GPU was within 2 C of the temperature at which it slows down.",
        next_step="Compare inlet and GPU temperatures with the node's neighbours, check airflow.",
        judge=lambda view: view.highest("gpu_temperature_margin_celsius"),
        limit=2.0,
        at_most=True,
        for_seconds=600,
    ),
    Rule(
        name="gpu_memory_hot",
        severity="warning",
        per="gpu",
        help="For 10 minutes the memory was within 3 C of its highest operating temperature.",
        next_step="Compare memory temperatures with the node's other GPUs, check airflow.",
        judge=memory_margin,
        limit=3.0,
        at_most=True,
        for_seconds=600,
    ),
    Rule(
        name="gpu_power_brake",
        severity="warning",
        per="gpu",
        help="The external power brake was on in 1 % of the last 5 minutes.",
        next_step="Check the power supplies and their cables, and the rack's power capping.",
        judge=braked_alone,
        limit=0.01,
        window_seconds=300,
        detect=lambda view: view.active(POWER_BRAKE) and not braked_together_ns(view.tick),
        record=True,
    ),
    Rule(
        name="gpu_power_brake_severe",
        severity="critical",
        per="gpu",
        help="The external power brake was on in 5 % of the last 5 minutes.",
        next_step="Take the node out of the pool, check power supplies, cables and the rack feed.",
        judge=braked_alone,
        limit=0.05,
        window_seconds=300,
        record=True,
    ),
    Rule(
        name="node_power_brake",
        severity="critical",
        per="host",
        help="The external power brake was on for 4 or more GPUs at once in 1 % of the last 5 "
        "minutes.",
        next_step="Take the node out of the pool, check power supplies, cables and the rack feed.",
        judge=lambda view: view.part(POWER_BRAKE, braked_together_ns(view.tick)),
        limit=0.01,
        window_seconds=300,
        detect=lambda view: bool(braked_together_ns(view.tick)),
        record=True,
    ),
    Rule(
        name="gpu_power_capped",
        severity="info",
        per="gpu",
        help="The power limit held the clocks down in half of the last 10 minutes; "
        "the value is the share of the clock that was lost.",
        next_step="Nothing to do if the job draws full power; else compare the power limits.",
        judge=lambda view: view.share(POWER_CAP),
        show=lost_clock,
        limit=0.5,
        window_seconds=600,
    ),
)

"""Rules about one GPU: heat, power, and whether it is still there.

Idle, application clocks, sync boost and display clocks are reasons a clock is low, not faults: no
rule judges them. A power cap is normal in training, so it never says more than info.
"""

from gpuwatch.rule import Rule, View

HW_THERMAL = 'gpu_throttle_active{reason="hw_thermal_slowdown"}'
SW_THERMAL = 'gpu_throttle_active{reason="sw_thermal_slowdown"}'
POWER_BRAKE = 'gpu_throttle_active{reason="hw_power_brake"}'
POWER_CAP = 'gpu_throttle_active{reason="sw_power_cap"}'


def lost_clock(view: View) -> float | None:
    """Return the share of the SM clock that was not had over the window, None if unknown."""
    clock = view.mean('gpu_clock_hertz{clock="sm"}')
    limit = view.constant('gpu_clock_limit_hertz{clock="sm"}')
    return None if clock is None or not limit else max(0.0, 1 - clock / limit)


def seen_down(view: View) -> bool:
    """Say whether the GPU did not answer at any time of the tick."""
    up = view.window("gpu_up")
    return up is not None and up.minimum == 0


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
        name="gpu_power_brake",
        severity="warning",
        per="gpu",
        help="The external power brake was on in 1 % of the last 5 minutes.",
        next_step="Check the power supplies and their cables, and the rack's power capping.",
        judge=lambda view: view.share(POWER_BRAKE),
        limit=0.01,
        window_seconds=300,
        detect=lambda view: view.active(POWER_BRAKE),
        record=True,
    ),
    Rule(
        name="gpu_power_brake_severe",
        severity="critical",
        per="gpu",
        help="The external power brake was on in 5 % of the last 5 minutes.",
        next_step="Take the node out of the pool, check power supplies, cables and the rack feed.",
        judge=lambda view: view.share(POWER_BRAKE),
        limit=0.05,
        window_seconds=300,
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
    Rule(
        name="gpu_lost",
        severity="critical",
        per="gpu",
        help="The GPU has not answered for 30 seconds.",
        next_step="Drain the node, look for an Xid in the kernel log, then reset or reboot.",
        judge=lambda view: view.highest("gpu_up"),
        limit=0.0,
        at_most=True,
        for_seconds=30,
        sticky=True,
        detect=seen_down,
        record=True,
    ),
)

"""Tables of the fleet: what fires, what is missing, the worst nodes and GPUs first."""

from board import Row
from fields import to_board
from palette import ALERTS, FAULT, HOT, LOST, MEMORY_HOT, SEVERITIES, STRAGGLER, VERDICTS
from panels import Column, table
from promql import (
    ENTITY,
    RANGE,
    by_severity,
    known,
    mean_clock,
    metric,
    named,
    node_verdict,
    over,
    rate,
    scope,
    under_siblings,
    worst,
)

from boards import frame

HERE = (frame.JOB, 'instance=~"$instance"')
M = scope(*HERE)
UP = metric("up", *HERE)
GPU = "sum by (instance, gpu)"
NODE_LINK = to_board("gpuwatch-node", "instance")
GPU_LINK = to_board("gpuwatch-gpu", "instance", "gpu")
WORST_GPUS = 30
FAULT_WEIGHT = 10  # a short fault ranks above the clock that a power cap costs all the time
POWER = M("gpu_power_watts_mean")
LOST_CLOCK = M("gpu_lost_clock_seconds_total")
FAULTY = M(
    "gpu_throttle_seconds_total",
    'reason=~"hw_thermal_slowdown|sw_thermal_slowdown|hw_power_brake"',
)
CORE = M("gpu_temperature_celsius_max", 'sensor="core"')
CRITICAL = M("alert_firing", 'severity="critical"')
WARNING = M("alert_firing", 'severity="warning"')
MISSING = ((1, "dark-red"),)


def firing_and_missing() -> Row:
    """Return the row of what fires and what does not answer."""
    silent = f'label_replace({UP} == 0, "what", "node does not answer", "", "")'
    lost = f'label_replace({M("gpu_up")} == 0, "what", "GPU does not answer", "", "")'
    fewer = f"{M('gpus_expected')} > {M('gpus_visible')}"
    fewer = f'label_replace({fewer}, "what", "fewer GPUs than expected", "", "")'
    released = M("released", 'what!="canaries"')
    released = f'label_replace({released} == 1, "what", "left to another tool", "", "")'
    failing = f'label_replace({M("source_up")} == 0, "what", "a source gives no data", "", "")'
    gone = f"max by (instance, gpu, source, what) ({silent} or {lost} or {fewer}"
    gone += f" or {failing} or {released})"
    alerts = metric("ALERTS", 'scope="fleet"', 'alertstate="firing"')
    of_fleet = f"max by (alertname, severity, rack, instance) ({alerts})"
    each = f"max by (instance, {ENTITY}, who, alert)"
    firing = f"{each} ({named(by_severity(M, ' == 1'))})"
    share = f"{each} ({named(over('avg', M('alert_firing'), RANGE))})"
    return Row(
        "Firing and missing",
        [
            table(
                "Firing alerts",
                "Alerts that fire now, critical first. `Of the range`: the share of the time shown "
                f"in which it fired.\n\n{ALERTS}",
                [
                    Column("Severity", expr=firing, texts=SEVERITIES, width=110),
                    Column("Alert", "alert"),
                    Column("Node", "instance", link=NODE_LINK),
                    Column("On", "who"),
                    Column("GPU", "gpu", link=GPU_LINK, width=80),
                    *(Column(label, label, hidden=True) for label in ENTITY.split(", ")[1:]),
                    Column(
                        "Of the range",
                        expr=f"{share} and on (instance, {ENTITY}, alert) ({firing})",
                        unit="percentunit",
                        decimals=0,
                    ),
                ],
                sort=[("Severity", True), ("Of the range", True)],
                width=14,
                no_value="No alert fires",
            ),
            table(
                "Missing",
                "Nodes and GPUs that do not answer, nodes with fewer GPUs than they should have, "
                "sources without data or left to another tool on request. Empty is good.",
                [
                    Column("Node", "instance", link=NODE_LINK),
                    Column("GPU", "gpu", link=GPU_LINK, width=80),
                    Column("Source", "source"),
                    Column("What", "what"),
                    Column("Value", expr=gone, hidden=True),
                ],
                sort=[("What", True), ("Node", False)],
                width=10,
                no_value="Nothing is missing",
            ),
            table(
                "Alerts of the fleet",
                "Firing alerts of Prometheus that take more than one node to judge, or that a "
                "silent node cannot tell. They need the rules of grafana/prometheus.",
                [
                    Column("Alert", "alertname"),
                    Column("Severity", "severity", width=110),
                    Column("Rack", "rack", width=180),
                    Column("Node", "instance", link=NODE_LINK),
                    Column("Value", expr=of_fleet, hidden=True),
                ],
                sort=[("Severity", False), ("Alert", False)],
                height=5,
                no_value="No alert fires",
            ),
        ],
    )


def worst_first() -> Row:
    """Return the row of GPUs and nodes, those with faults first, then those that lost most."""
    lost = f"{GPU} ({rate(LOST_CLOCK, RANGE)})"
    fault = f"max by (instance, gpu) ({rate(FAULTY, RANGE)})"
    rank = f"({FAULT_WEIGHT} * {fault} + {lost})"

    def ranked(expr: str) -> str:
        return worst(WORST_GPUS, expr, rank)

    def reason(name: str) -> str:
        throttled = M("gpu_throttle_seconds_total", f'reason="{name}"')
        return ranked(known(f"{GPU} ({rate(throttled, RANGE)})", M, RANGE))

    clock = f"{GPU} ({mean_clock(M, RANGE)})"
    under = under_siblings(clock)
    memory = M("gpu_temperature_celsius_max", 'sensor="memory"')
    node = "sum by (instance)"
    lost_node = f"avg by (instance) ({known(rate(LOST_CLOCK, RANGE), M, RANGE)})"
    return Row(
        "Worst first",
        [
            table(
                "GPUs",
                f"The {WORST_GPUS} worst GPUs over the time shown: first by the share of time held "
                "down by heat or power brake, which is a fault, then by clock lost while busy. A "
                "power cap alone is normal under full load, and worth a look only on a GPU that "
                "loses more than its neighbours. Under siblings: how far its mean clock is below "
                "the median of its node's GPUs; jobs wait for it.",
                [
                    Column("Node", "instance", link=NODE_LINK, width=180),
                    Column("GPU", "gpu", link=GPU_LINK, width=60),
                    Column("Fault", "", ranked(known(fault, M, RANGE)), "percentunit", 1, FAULT),
                    Column("Lost clock", "", ranked(known(lost, M, RANGE)), "percentunit", 1, LOST),
                    Column(
                        "Heat, hardware",
                        "",
                        reason("hw_thermal_slowdown"),
                        "percentunit",
                        1,
                        FAULT,
                    ),
                    Column(
                        "Heat, driver",
                        "",
                        reason("sw_thermal_slowdown"),
                        "percentunit",
                        1,
                        ((0.1, "dark-orange"),),
                    ),
                    Column("Power brake", "", reason("hw_power_brake"), "percentunit", 1, FAULT),
                    Column("Power cap", "", reason("sw_power_cap"), "percentunit", 1),
                    Column("Mean SM clock", "", ranked(clock), "hertz", 2),
                    Column("Under siblings", "", ranked(under), "percentunit", 1, STRAGGLER),
                    Column(
                        "Core, highest",
                        "",
                        ranked(f"max by (instance, gpu) ({over('max', CORE, RANGE)})"),
                        "celsius",
                        0,
                        HOT,
                    ),
                    Column(
                        "Memory, highest",
                        "",
                        ranked(f"max by (instance, gpu) ({over('max', memory, RANGE)})"),
                        "celsius",
                        0,
                        MEMORY_HOT,
                    ),
                    Column("Power", "", ranked(f"{GPU} ({POWER})"), "watt"),
                ],
                sort=[("Fault", True), ("Lost clock", True)],
                height=10,
            ),
            table(
                "Nodes",
                "All nodes: silent ones first, then by critical alerts and lost clock. A silent "
                "node has no other values: they are unknown, not 0.",
                [
                    Column("Node", "instance", link=NODE_LINK, width=180),
                    Column(
                        "Answers",
                        "",
                        f"max by (instance) ({UP})",
                        texts={1: ("yes", "transparent"), 0: ("NO", "dark-red")},
                    ),
                    Column("Verdict", "", node_verdict(M), texts=VERDICTS),
                    Column(
                        "Critical",
                        "",
                        f"{node} ({CRITICAL})",
                        steps=MISSING,
                    ),
                    Column(
                        "Warnings",
                        "",
                        f"{node} ({WARNING})",
                        steps=((1, "dark-orange"),),
                    ),
                    Column("GPUs up", "", f"{node} ({M('gpu_up')})"),
                    Column("Visible", "", f"{node} ({M('gpus_visible')})"),
                    Column("On the bus", "", f"{node} ({M('gpus_pci')})"),
                    Column("Expected", "", f"{node} ({M('gpus_expected')})"),
                    Column("Lost clock", "", lost_node, "percentunit", 1, LOST),
                    Column(
                        "Core, highest",
                        "",
                        f"max by (instance) ({over('max', CORE, RANGE)})",
                        "celsius",
                        0,
                        HOT,
                    ),
                    Column("Power", "", f"{node} ({POWER})", "watt"),
                ],
                sort=[("Answers", False), ("Critical", True), ("Lost clock", True)],
                height=8,
            ),
        ],
    )

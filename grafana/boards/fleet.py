"""The fleet: what fires, what is missing, and the worst nodes and GPUs first."""

from board import Row, dashboard
from fields import Json, to_board
from palette import ALERTS, COOL, FAULT, HOT, LOST, MEMORY_HOT, SEVERITIES, reason_colors
from panels import Column, Query, heatmap, stat, table, timeseries
from promql import RANGE, by_severity, ever, mean_clock, metric, of_range, over, rate, scope, worst

from boards import frame

HERE = (frame.JOB, 'instance=~"$instance"')
M = scope(*HERE)
UP = metric("up", *HERE)
GPU = "sum by (instance, gpu)"
NODE_LINK = to_board("gpuwatch-node", "instance")
GPU_LINK = to_board("gpuwatch-gpu", "instance", "gpu")
SERIES_NODE = to_board("gpuwatch-node", "instance", source="__field.labels")
SERIES_GPU = to_board("gpuwatch-gpu", "instance", "gpu", source="__field.labels")
LEGEND = "{{instance}} gpu {{gpu}}"
WORST_GPUS = 30
POWER = M("gpu_power_watts_mean")
LOST_CLOCK = M("gpu_lost_clock_seconds_total")
CORE = M("gpu_temperature_celsius_max", 'sensor="core"')
CRITICAL = M("alert_firing", 'severity="critical"')
WARNING = M("alert_firing", 'severity="warning"')
STRAGGLER = ((0.07, "dark-orange"), (0.15, "dark-red"))
MISSING = ((1, "dark-red"),)


def build() -> Json:
    """Return the dashboard."""
    return dashboard(
        "gpuwatch-fleet",
        "gpuwatch / Fleet",
        "All nodes: what fires, what is missing, the worst nodes and GPUs first.",
        [_state(), _alerts(), _worst(), _over_time(), _versions()],
        [frame.job(), frame.instance(many=True)],
        frame.alerts('instance=~"$instance"'),
    )


def _state() -> Row:
    # A source that never saw a GPU has no gpu_up; one that was released has neither.
    listed = f"sum by (instance) ({M('gpus_visible')})"
    expected = f"sum by (instance) ({M('gpus_expected')})"
    present = f"(sum by (instance) ({M('gpu_up')}) or {listed})"
    return Row(
        "State",
        [
            stat(
                "Nodes answering",
                "Nodes whose gpuwatch answered the newest scrape.",
                "none",
                f"count({UP} == 1) or vector(0)",
            ),
            stat(
                "Nodes silent",
                "Nodes whose gpuwatch did not answer: the node is down, or gpuwatch is. "
                "Nothing else here counts their GPUs.",
                "none",
                f"count({UP} == 0) or vector(0)",
                steps=MISSING,
            ),
            stat(
                "GPUs answering",
                "GPUs that answer the driver.",
                "none",
                f"count({M('gpu_up')} == 1) or vector(0)",
            ),
            stat(
                "GPUs missing",
                "GPUs that nodes should have and that do not answer. Any is worth a look.",
                "none",
                f"sum(clamp_min({expected} - {present}, 0)) or vector(0)",
                steps=MISSING,
            ),
            stat(
                "Critical alerts",
                "Alerts for which a node should leave the pool. By gpuwatch's own rules.",
                "none",
                f"sum({CRITICAL}) or vector(0)",
                steps=MISSING,
            ),
            stat(
                "Warnings",
                "Alerts that are worth a ticket.",
                "none",
                f"sum({WARNING}) or vector(0)",
                steps=((1, "dark-orange"),),
            ),
            stat(
                "Clock lost, in GPUs",
                "How many GPUs' worth of clock the fleet loses while busy, now. A fleet that works "
                "at its power limit always loses some; a jump is worth a look.",
                "none",
                f"sum({rate(LOST_CLOCK)})",
                decimals=2,
            ),
            stat(
                "Power",
                "Power of all GPUs' boards, mean of the last minute.",
                "watt",
                f"sum({POWER})",
            ),
        ],
    )


def _alerts() -> Row:
    silent = f'label_replace({UP} == 0, "what", "node does not answer", "", "")'
    lost = f'label_replace({M("gpu_up")} == 0, "what", "GPU does not answer", "", "")'
    fewer = f"{M('gpus_expected')} > {M('gpus_visible')}"
    fewer = f'label_replace({fewer}, "what", "fewer GPUs than expected", "", "")'
    released = f'label_replace({M("released")} == 1, "what", "left to another tool", "", "")'
    failing = f'label_replace({M("source_up")} == 0, "what", "a source gives no data", "", "")'
    gone = f"max by (instance, gpu, source, what) ({silent} or {lost} or {fewer}"
    gone += f" or {failing} or {released})"
    firing = f"max by (instance, gpu, source, alert) ({by_severity(M, ' == 1')})"
    share = f"max by (instance, gpu, source, alert) ({over('avg', M('alert_firing'), RANGE)})"
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
                    Column("GPU", "gpu", link=GPU_LINK, width=80),
                    Column("Source", "source"),
                    Column(
                        "Of the range",
                        expr=f"{share} and on (instance, gpu, source, alert) ({firing})",
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
        ],
    )


def _worst() -> Row:
    lost = f"{GPU} ({rate(LOST_CLOCK, RANGE)})"

    def reason(name: str) -> str:
        throttled = M("gpu_throttle_seconds_total", f'reason="{name}"')
        return worst(WORST_GPUS, f"{GPU} ({rate(throttled, RANGE)})", lost)

    def ranked(expr: str) -> str:
        return worst(WORST_GPUS, expr, lost)

    clock = f"{GPU} ({mean_clock(M, RANGE)})"
    median = f"quantile by (instance) (0.5, {clock})"
    under = f"clamp_min(1 - {clock} / on (instance) group_left () {median}, 0)"
    memory = M("gpu_temperature_celsius_max", 'sensor="memory"')
    node = "sum by (instance)"
    lost_node = f"avg by (instance) ({rate(LOST_CLOCK, RANGE)})"
    return Row(
        "Worst first",
        [
            table(
                "GPUs",
                f"The {WORST_GPUS} GPUs that lost most clock while busy, over the time shown. A "
                "fault is heat or power brake; a power cap alone is normal under full load, and "
                "worth a look only on a GPU that loses more than its neighbours. Under siblings: "
                "how far its mean clock is below the median of its node's GPUs; jobs wait for it.",
                [
                    Column("Node", "instance", link=NODE_LINK, width=180),
                    Column("GPU", "gpu", link=GPU_LINK, width=60),
                    Column("Lost clock", "", f"topk({WORST_GPUS}, {lost})", "percentunit", 1, LOST),
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
                sort=[("Lost clock", True)],
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


def _over_time() -> Row:
    lost = of_range("rate", LOST_CLOCK)
    hottest = of_range("max_over_time", CORE)
    drawn = f"sum by (instance) ({POWER} @ end())"
    throttled = M("gpu_throttle_seconds_total")
    power = f"sum by (instance) ({over('avg', POWER)})"
    buckets = f"sum by (le) ({rate(M('gpu_clock_share_hertz_bucket'))})"
    whole = f"scalar(sum({rate(M('gpu_clock_share_hertz_count'))}))"
    return Row(
        "Over time",
        [
            timeseries(
                "Lost clock: the 10 worst GPUs",
                "Share of time lost to a clock below its limit while busy: 10 % is a job that "
                "runs up to 10 % slower on this GPU, and with it all GPUs that wait for it.",
                "percentunit",
                [Query(worst(10, rate(LOST_CLOCK), lost), LEGEND)],
                link=SERIES_GPU,
            ),
            timeseries(
                "Throttled time by reason, mean of all GPUs",
                "Share of time for each reason. Reasons overlap (hw_slowdown comes with heat or "
                "power brake), so they do not add up. Heat or power brake above 0 is a fault on "
                "some GPU; sw_power_cap is normal under full load.",
                "percentunit",
                [
                    Query(
                        ever(f"avg by (reason) ({rate(throttled)})", throttled, "reason"),
                        "{{reason}}",
                    )
                ],
                overrides=reason_colors(),
                no_value="No reason was on",
            ),
            timeseries(
                "Core temperature: the 10 hottest GPUs",
                "Highest of each step, from every sample. The dashed mark at 80 C is for "
                "comparison: each model has its own slowdown temperature.",
                "celsius",
                [Query(worst(10, over("max", CORE), hottest), LEGEND)],
                soft_low=COOL,
                steps=HOT,
                link=SERIES_GPU,
            ),
            timeseries(
                "Power: the 10 nodes with most",
                "Power of a node's GPU boards. A node far below its neighbours in the same job "
                "does less work; all at once falling is the job, or the power feed.",
                "watt",
                [Query(worst(10, power, drawn, "instance"), "{{instance}}")],
                link=SERIES_NODE,
            ),
            heatmap(
                "SM clock of all GPUs",
                "Share of all GPUs' time at each clock, from every sample. A second band below "
                "the first is a group of slow GPUs.",
                "hertz",
                f"{buckets} / {whole}",
            ),
            timeseries(
                "GPUs",
                "GPUs that answer, that the drivers list, that nodes should have. The first below "
                "the last is a lost GPU; all falling together is a node that went silent.",
                "none",
                [
                    Query(f"sum({M('gpu_up')})", "answering"),
                    Query(f"sum({M('gpus_visible')})", "visible"),
                    Query(f"sum({M('gpus_expected')})", "expected"),
                ],
            ),
        ],
    )


def _versions() -> Row:
    return Row(
        "Versions",
        [
            table(
                "gpuwatch",
                "Versions of gpuwatch. More than one is a rollout, or a node left behind.",
                [
                    Column("Version", "version"),
                    Column("Nodes", expr=f"count by (version) ({M('build_info')})"),
                ],
                sort=[("Nodes", True)],
                width=8,
                height=6,
            ),
            table(
                "GPUs and drivers",
                "Models, drivers and firmware. A group of few is worth a look when its GPUs are "
                "slower than the others.",
                [
                    Column("Model", "name"),
                    Column("Driver", "driver"),
                    Column("VBIOS", "vbios"),
                    Column("GPUs", expr=f"count by (name, driver, vbios) ({M('gpu_info')})"),
                ],
                sort=[("GPUs", True)],
                width=16,
                height=6,
            ),
        ],
    )

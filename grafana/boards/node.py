"""One node: all its GPUs side by side."""

from board import Row, dashboard
from fields import Json, band, dashed, to_board
from palette import (
    ALERTS,
    COOL,
    FIRED,
    HOT,
    MEMORY_HOT,
    SLOW,
    STATES,
    STRAGGLER,
    VERDICTS,
    YES_NO,
    reason_colors,
)
from panels import Column, Query, stat, table, timeline, timeseries
from promql import (
    ENTITY,
    by_severity,
    ever,
    known,
    mean_clock,
    missing_gpus,
    named,
    node_verdict,
    of_range,
    over,
    rate,
    scope,
    under_siblings,
    worst_reason,
)

from boards import canaries, frame, health, host, network, traffic

NODE = 'instance="$instance"'
N = scope(frame.JOB, NODE)
M = scope(frame.JOB, NODE, 'gpu=~"$gpu"')
GPU = "gpu {{gpu}}"
SERIES_GPU = to_board("gpuwatch-gpu", "instance", "gpu", source="__field.labels")
FAULTS = ((1, "dark-red"),)
SM = 'clock="sm"'
SM_LIMIT = M("gpu_clock_limit_hertz", SM)
POWER_LIMIT = M("gpu_power_limit_watts", 'limit="enforced"')
LOST_CLOCK = M("gpu_lost_clock_seconds_total")
THROTTLED = M("gpu_throttle_seconds_total")
CORE = 'sensor="core"'
MEMORY = 'sensor="memory"'


def build() -> Json:
    """Return the dashboard."""
    return dashboard(
        "gpuwatch-node",
        "gpuwatch / Node",
        "One node: all its GPUs side by side.",
        [
            *(_state(), _alerts(), _clocks(), _heat_and_power(), traffic.of_node(M, SERIES_GPU)),
            *(
                health.of_node(M, SERIES_GPU),
                canaries.of_node(N, M, SERIES_GPU),
                _each(),
                network.row(N),
                host.row(N),
                _gpus(),
                _trust(),
            ),
        ],
        [frame.job(), frame.instance(many=False), frame.gpu(many=True)],
        frame.alerts(NODE),
    )


def _state() -> Row:
    firing = N("alert_firing", 'severity=~"critical|warning"')
    return Row(
        "State",
        [
            stat(
                "GPUs answering",
                "GPUs of this node that answer the driver. Fewer than expected: see Alerts, and "
                "look for an Xid in the kernel log.",
                "none",
                f"sum({N('gpu_up')})",
            ),
            stat(
                "GPUs missing",
                "GPUs that this node should have and that do not answer.",
                "none",
                missing_gpus(N),
                steps=FAULTS,
            ),
            stat(
                "Alerts",
                "Alerts of this node that fire now, critical and warning.",
                "none",
                f"sum({firing})",
                steps=FAULTS,
            ),
            stat(
                "Clock lost",
                "How many GPUs' worth of clock the node loses while busy, now.",
                "none",
                f"sum({rate(LOST_CLOCK)})",
                decimals=2,
            ),
            stat(
                "Power",
                "Power of the chosen GPUs, mean of the last minute.",
                "watt",
                f"sum({M('gpu_power_watts_mean')})",
            ),
            stat(
                "Hottest core",
                "Highest core temperature in the last minute. Orange from 80 C, for comparison: "
                "each model has its own slowdown temperature.",
                "celsius",
                f"max({M('gpu_temperature_celsius_max', CORE)})",
                steps=HOT,
            ),
            stat(
                "Hottest memory",
                "Highest memory temperature in the last minute. Orange from 95 C, for comparison.",
                "celsius",
                f"max({M('gpu_temperature_celsius_max', MEMORY)})",
                steps=MEMORY_HOT,
            ),
            stat(
                "Verdict",
                "What should become of the node by its alerts that fire: `gpuwatch verdict` says "
                "it to a scheduler.",
                "none",
                node_verdict(N),
                mappings=VERDICTS,
            ),
        ],
    )


def _alerts() -> Row:
    fired = f"({of_range('max_over_time', N('alert_firing'))} > 0)"
    shown = f"({by_severity(N)}) and on ({ENTITY}, alert) {fired}"
    return Row(
        "Alerts and throttling",
        [
            timeline(
                "Alerts",
                f"Alerts that fired in the time shown, coloured by severity.\n\n{ALERTS}",
                Query(named(shown), "{{who}} {{alert}}"),
                FIRED,
                height=6,
                no_value="No alert has fired",
            ),
            timeline(
                "Worst reason for a low clock",
                "The worst clock event reason of each GPU that was on for at least 1 % of the "
                "step, from every sample. Red, orange and purple are faults of cooling or power; "
                "yellow is the power limit, normal under full load; blue and grey are intended.",
                Query(worst_reason(M), GPU),
                STATES,
                height=8,
            ),
            timeseries(
                "Throttled time by reason, mean of the GPUs",
                "Share of time for each reason. Reasons overlap (hw_slowdown comes with heat or "
                "power brake), so they do not add up.",
                "percentunit",
                [
                    Query(
                        ever(f"avg by (reason) ({known(rate(THROTTLED), M)})", THROTTLED, "reason"),
                        "{{reason}}",
                    )
                ],
                overrides=reason_colors(),
                no_value="No reason was seen",
                fill=10,
            ),
            timeseries(
                "Lost clock",
                "Share of time lost to a clock below its limit while busy. GPUs of one job wait "
                "for the slowest: one line above the others is what the job loses.",
                "percentunit",
                [Query(known(rate(LOST_CLOCK), M), GPU)],
                soft_high=0.1,
                link=SERIES_GPU,
            ),
        ],
    )


def _clocks() -> Row:
    return Row(
        "Clocks and work",
        [
            timeseries(
                "SM clock",
                "Exact mean of each step, from every sample; the band is the lowest and highest "
                "clock of any of these GPUs. A GPU whose mean is below its neighbours' slows the "
                "whole job down.",
                "hertz",
                [
                    Query(mean_clock(M), GPU),
                    Query(f"min({over('min', M('gpu_clock_hertz_min', SM))})", "lowest"),
                    Query(f"max({over('max', M('gpu_clock_hertz_max', SM))})", "highest"),
                    Query(f"max({SM_LIMIT})", "limit"),
                ],
                soft_low=SLOW,
                overrides=[*band("lowest", "highest", "#808080"), dashed("limit")],
                link=SERIES_GPU,
            ),
            timeseries(
                "Under siblings",
                "How far a GPU's mean SM clock is under the median of the node. At the marks, with "
                "the same load, for 10 minutes, it is a straggler: its job waits for it.",
                "percentunit",
                [Query(under_siblings(f"({mean_clock(M)})"), GPU)],
                soft_high=0.2,
                steps=STRAGGLER,
                link=SERIES_GPU,
            ),
            timeseries(
                "Utilization",
                "Share of time in which a kernel ran, mean of the trailing minute. It says that a "
                "GPU is busy, not that it works well: a hung all-reduce shows 100 %.",
                "percentunit",
                [Query(over("avg", M("gpu_utilization_ratio_mean")), GPU)],
                high=1,
                link=SERIES_GPU,
            ),
            timeseries(
                "SMs busy",
                "Share of the SMs that were busy, mean of the trailing minute. Full use with few "
                "SMs busy is waiting, not work.",
                "percentunit",
                [Query(over("avg", M("gpu_sm_active_ratio_mean")), GPU)],
                high=1,
                link=SERIES_GPU,
                no_value="Not told: GPM came with Hopper",
            ),
        ],
    )


def _heat_and_power() -> Row:
    return Row(
        "Heat and power",
        [
            timeseries(
                "Core temperature",
                "Highest of each step, from every sample. One GPU well above its neighbours at "
                "the same power: airflow or paste. The dashed mark is for comparison.",
                "celsius",
                [Query(over("max", M("gpu_temperature_celsius_max", CORE)), GPU)],
                soft_low=COOL,
                steps=HOT,
                link=SERIES_GPU,
            ),
            timeseries(
                "Memory temperature",
                "Highest of each step, from every sample. The dashed mark is for comparison.",
                "celsius",
                [Query(over("max", M("gpu_temperature_celsius_max", MEMORY)), GPU)],
                soft_low=COOL,
                steps=MEMORY_HOT,
                link=SERIES_GPU,
            ),
            timeseries(
                "Power",
                "Mean power of each board and the enforced limit. At the limit the clock falls; "
                "far below the neighbours' at full utilization, the GPU waits for something.",
                "watt",
                [
                    Query(over("avg", M("gpu_power_watts_mean")), GPU),
                    Query(f"max({POWER_LIMIT})", "limit"),
                ],
                overrides=[dashed("limit")],
                link=SERIES_GPU,
            ),
            timeseries(
                "Power peaks",
                "Highest sample of each step. Peaks above the limit for a moment are normal: the "
                "limit holds the mean.",
                "watt",
                [
                    Query(over("max", M("gpu_power_watts_max")), GPU),
                    Query(f"max({POWER_LIMIT})", "limit"),
                ],
                overrides=[dashed("limit")],
                link=SERIES_GPU,
            ),
        ],
    )


def _each() -> Row:
    one = scope(frame.JOB, NODE, 'gpu="$gpu"')
    return Row(
        "Each GPU",
        [
            timeseries(
                "GPU $gpu: SM clock",
                "Mean, lowest and highest clock of each step, and its limit. A wide band is a "
                "clock that jumps: a power cap does that in every step of a training job.",
                "hertz",
                [
                    Query(mean_clock(one), "mean"),
                    Query(over("min", one("gpu_clock_hertz_min", SM)), "lowest"),
                    Query(over("max", one("gpu_clock_hertz_max", SM)), "highest"),
                    Query(one("gpu_clock_limit_hertz", SM), "limit"),
                ],
                width=6,
                height=6,
                soft_low=SLOW,
                overrides=[*band("lowest", "highest", "blue"), dashed("limit")],
                repeat="gpu",
                legend="list",
            ),
        ],
    )


def _gpus() -> Row:
    labels = {
        "Model": "name",
        "PCI address": "pci_bus_id",
        "NUMA node": "numa",
        "Minor": "minor",
        "Serial": "serial",
        "UUID": "uuid",
        "Driver": "driver",
        "VBIOS": "vbios",
    }
    known = ", ".join(["gpu", "instance", *labels.values()])
    return Row(
        "GPUs",
        [
            table(
                "What and where",
                "What each GPU is and where it sits. `gpu` is a number that gpuwatch keeps for "
                "the PCI address; Minor is the number of /dev/nvidia*.",
                [
                    Column(
                        "GPU", "gpu", link=to_board("gpuwatch-gpu", "instance", "gpu"), width=70
                    ),
                    Column("Node", "instance", width=180),
                    *(Column(title, label) for title, label in labels.items()),
                    Column("Known", expr=f"max by ({known}) ({M('gpu_info')})", hidden=True),
                ],
                sort=[("GPU", False)],
            ),
        ],
    )


def _trust() -> Row:
    # The clock's histogram counts covered microseconds.
    covered = rate(M("gpu_clock_share_hertz_count"))
    driver = f'label_replace({N("nvml_up")}, "source", "driver", "", "")'
    return Row(
        "Can these numbers be trusted",
        [
            timeseries(
                "Uncovered time",
                "Share of time without samples of a GPU's clock: it did not answer, or sampling "
                "stood still, or gpuwatch was started. Such time counts for no share above. Above "
                "1 %, see gpuwatch / Self.",
                "percentunit",
                [Query(f"clamp_min(1 - {covered} / 1e6, 0)", GPU)],
                width=8,
                steps=((0.01, "orange"),),
            ),
            timeseries(
                "Missing samples",
                "Planned reads that did not happen, per second, out of a thousand or so. A few are "
                "normal on a busy host; hundreds are sampling slowed down.",
                "cps",
                [Query(rate(N("samples_missing_total")), "{{source}}")],
                width=8,
            ),
            timeline(
                "Sources",
                "Whether each source delivers, and the driver's library answers. NO: its values "
                "are absent, not 0.",
                Query(f"{N('source_up')} or {driver}", "{{source}}"),
                YES_NO,
                width=8,
            ),
        ],
    )

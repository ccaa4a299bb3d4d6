"""The fleet: what fires, what is missing, and the worst nodes and GPUs first."""

from board import Row, dashboard
from fields import Json, to_board
from palette import COOL, HOT, reason_colors
from panels import Column, Query, heatmap, stat, table, timeseries
from promql import (
    clock_shares,
    ever,
    known,
    missing_gpus,
    of_range,
    over,
    rate,
    worst,
)

from boards import frame
from boards.ranking import (
    CORE,
    CRITICAL,
    FAULT_WEIGHT,
    FAULTY,
    GPU,
    LOST_CLOCK,
    MISSING,
    POWER,
    UP,
    WARNING,
    M,
    firing_and_missing,
    worst_first,
)

SERIES_NODE = to_board("gpuwatch-node", "instance", source="__field.labels")
SERIES_GPU = to_board("gpuwatch-gpu", "instance", "gpu", source="__field.labels")
LEGEND = "{{instance}} gpu {{gpu}}"


def build() -> Json:
    """Return the dashboard."""
    return dashboard(
        "gpuwatch-fleet",
        "gpuwatch / Fleet",
        "All nodes: what fires, what is missing, the worst nodes and GPUs first.",
        [_state(), firing_and_missing(), worst_first(), _over_time(), _versions()],
        [frame.job(), frame.instance(many=True)],
        frame.alerts('instance=~"$instance"'),
    )


def _state() -> Row:
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
                f"sum({missing_gpus(M)}) or vector(0)",
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


def _over_time() -> Row:
    fault = f"max by (instance, gpu) ({of_range('rate', FAULTY)})"
    lost = f"{GPU} ({of_range('rate', LOST_CLOCK)})"
    rank = f"({FAULT_WEIGHT} * {fault} + {lost})"
    hottest = of_range("max_over_time", CORE)
    drawn = f"sum by (instance) ({POWER} @ end())"
    throttled = M("gpu_throttle_seconds_total")
    power = f"sum by (instance) ({over('avg', POWER)})"
    return Row(
        "Over time",
        [
            timeseries(
                "Lost clock: the 10 worst GPUs",
                "Share of time lost to a clock below its limit while busy: 10 % is a job that "
                "runs up to 10 % slower on this GPU, and with it all GPUs that wait for it. Chosen "
                "as in the table above.",
                "percentunit",
                [Query(worst(10, known(rate(LOST_CLOCK), M), rank), LEGEND)],
                soft_high=0.1,
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
                        ever(f"avg by (reason) ({known(rate(throttled), M)})", throttled, "reason"),
                        "{{reason}}",
                    )
                ],
                overrides=reason_colors(),
                no_value="No reason was seen",
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
                clock_shares(M),
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

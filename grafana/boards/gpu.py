"""One GPU: where its clock went, and why."""

from itertools import pairwise

from board import Row, dashboard
from fields import Json, band, dashed, fixed, override
from palette import (
    ALERTS,
    COOL,
    FIRED,
    HOT,
    LOST,
    MEMORY_HOT,
    SLOW,
    STATES,
    YES_NO,
    reason_colors,
)
from panels import Column, Query, bars, heatmap, stat, table, timeline, timeseries
from promql import (
    RANGE,
    by_severity,
    clock_shares,
    ever,
    known,
    mean_clock,
    of_range,
    over,
    rate,
    scope,
    worst_reason,
)

from boards import canaries, frame, health, jobs, mig, milliseconds, traffic
from gpuwatch.gpu_signals import CLOCK

NODE = 'instance="$instance"'
M = scope(frame.JOB, NODE, 'gpu="$gpu"')
SM = 'clock="sm"'
CORE = 'sensor="core"'
MEMORY = 'sensor="memory"'
LOST_CLOCK = M("gpu_lost_clock_seconds_total")
POWER_LIMIT = M("gpu_power_limit_watts", 'limit="enforced"')


def build() -> Json:
    """Return the dashboard."""
    return dashboard(
        "gpuwatch-gpu",
        "gpuwatch / GPU",
        "One GPU: where its clock went, and why.",
        [
            *(_state(), _reasons(), _clock(), _work(), milliseconds.of_gpu(M)),
            *(traffic.of_gpu(M), _power_and_heat()),
            *(health.of_gpu(M), canaries.of_gpu(M), mig.row(M), jobs.row(M), _identity()),
        ],
        [frame.job(), frame.instance(many=False), frame.gpu(many=False)],
        frame.alerts(NODE, 'gpu="$gpu"'),
    )


def _state() -> Row:
    firing = M("alert_firing", 'severity=~"critical|warning"')
    return Row(
        "State",
        [
            stat(
                "Answers",
                "Whether the GPU answers the driver. NO: drain the node, look for an Xid in the "
                "kernel log.",
                "none",
                M("gpu_up"),
                mappings=YES_NO,
            ),
            stat("Model", "What the GPU says it is.", "none", Query(M("gpu_info"), "{{name}}")),
            stat(
                "Alerts",
                "Alerts of this GPU that fire now, critical and warning.",
                "none",
                f"sum({firing})",
                steps=((1, "dark-red"),),
            ),
            stat(
                "Lost clock",
                "Share of the time shown that was lost to a clock below its limit while busy.",
                "percentunit",
                known(rate(LOST_CLOCK, RANGE), M, RANGE),
                steps=LOST,
                decimals=1,
            ),
            stat(
                "SM clock",
                "Exact mean of the SM clock over the time shown.",
                "hertz",
                mean_clock(M, RANGE),
                decimals=2,
            ),
            stat("Power", "Power of the board, now.", "watt", M("gpu_power_watts"), decimals=0),
            stat(
                "Core",
                "Core temperature, now. Orange from 80 C, for comparison.",
                "celsius",
                M("gpu_temperature_celsius", CORE),
                steps=HOT,
            ),
            stat(
                "Memory",
                "Memory temperature, now. Orange from 95 C, for comparison.",
                "celsius",
                M("gpu_temperature_celsius", MEMORY),
                steps=MEMORY_HOT,
            ),
        ],
    )


def _reasons() -> Row:
    throttled = M("gpu_throttle_seconds_total")
    events = M("gpu_throttle_events_total")
    fired = f"({of_range('max_over_time', M('alert_firing'))} > 0)"
    total = f"sum by (reason) (increase({throttled}[{RANGE}])) > 0"
    times = f"sum by (reason) (increase({events}[{RANGE}]))"
    return Row(
        "Why the clock was low",
        [
            timeline(
                "Alerts",
                f"Alerts of this GPU that fired in the time shown.\n\n{ALERTS}",
                Query(f"({by_severity(M)}) and on (alert) {fired}", "{{alert}}"),
                FIRED,
                height=5,
                no_value="No alert has fired",
            ),
            timeline(
                "Worst reason for a low clock",
                "The worst clock event reason that was on for at least 1 % of the step, from every "
                "sample. Red, orange and purple are faults of cooling or power; yellow is the "
                "power limit, normal under full load; blue and grey are intended.",
                Query(worst_reason(M), "gpu {{gpu}}"),
                STATES,
                height=4,
            ),
            timeline(
                "Reasons at the scrape",
                "Which reasons were on in the quarter second before each scrape. Between scrapes "
                "see the share of time.",
                Query(ever(M("gpu_throttle_active"), throttled, "reason"), "{{reason}}"),
                {1: ("on", "dark-orange"), 0: ("off", "transparent")},
                height=6,
                no_value="No reason was seen",
            ),
            timeseries(
                "Throttled time by reason",
                "Share of time for each reason. Reasons overlap, so they do not add up.",
                "percentunit",
                [Query(ever(known(rate(throttled), M), throttled, "reason"), "{{reason}}")],
                overrides=reason_colors(),
                no_value="No reason was seen",
                fill=10,
                width=8,
            ),
            timeseries(
                "Throttle events by reason",
                "How often each reason came on, per second. A power cap of many events a second "
                "is a clock that is steered all the time; a single edge means nothing.",
                "cps",
                [Query(ever(known(rate(events), M), events, "reason"), "{{reason}}")],
                overrides=reason_colors(),
                no_value="No reason was seen",
                width=8,
            ),
            table(
                "In the time shown",
                "How long each reason was on and how often it came on.",
                [
                    Column("Reason", "reason"),
                    Column("For", expr=total, unit="s", decimals=1),
                    Column("Times", expr=f"{times} and on (reason) ({total})", decimals=0),
                ],
                sort=[("For", True)],
                width=8,
                no_value="No reason was seen",
            ),
        ],
    )


def _clock() -> Row:
    memory = 'clock="memory"'
    return Row(
        "Clock",
        [
            heatmap(
                "SM clock: share of time",
                "Share of each step's time in each range of the clock, from every sample; the mark "
                "is its upper end. Two bands are a clock that jumps between two values.",
                "hertz",
                clock_shares(M),
                width=16,
            ),
            bars(
                "Time by SM clock",
                "Share of the time shown in each range of the SM clock.",
                "percentunit",
                Query(clock_shares(M, RANGE), "{{le}}"),
                high=1,
                buckets=True,
                overrides=_clock_ranges(),
                width=8,
            ),
            timeseries(
                "SM clock",
                "Exact mean of each step, lowest and highest sample, and the limit.",
                "hertz",
                [
                    Query(mean_clock(M), "mean"),
                    Query(over("min", M("gpu_clock_hertz_min", SM)), "lowest"),
                    Query(over("max", M("gpu_clock_hertz_max", SM)), "highest"),
                    Query(M("gpu_clock_limit_hertz", SM), "limit"),
                ],
                soft_low=SLOW,
                overrides=[*band("lowest", "highest", "blue"), dashed("limit")],
                width=8,
            ),
            timeseries(
                "Memory clock",
                "A memory clock below its limit under load slows everything that waits for "
                "memory; at idle it is normal.",
                "hertz",
                [
                    Query(M("gpu_clock_hertz", memory), "memory"),
                    Query(M("gpu_clock_limit_hertz", memory), "limit"),
                ],
                overrides=[dashed("limit")],
                width=8,
            ),
            timeseries(
                "Lost clock",
                "Share of time lost to a clock below its limit while busy.",
                "percentunit",
                [Query(known(rate(LOST_CLOCK), M), "lost")],
                soft_high=0.1,
                fill=20,
                width=8,
            ),
        ],
    )


def _clock_ranges() -> list[Json]:
    """Return overrides that call buckets by their range instead of their upper end."""
    assert CLOCK.histogram is not None
    bounds = [0.0, *CLOCK.histogram.bounds]
    names = {
        f"{high:g}": f"{low / 1e9:.1f} to {high / 1e9:.1f} GHz" for low, high in pairwise(bounds)
    }
    names["+Inf"] = f"above {bounds[-1] / 1e9:.1f} GHz"
    return [override(bound, displayName=name) for bound, name in names.items()]


def _envelope(name: str, *matchers: str) -> list[Query]:
    """Return queries of mean, lowest and highest sample."""
    return [
        Query(over("avg", M(f"{name}_mean", *matchers)), "mean"),
        Query(over("min", M(f"{name}_min", *matchers)), "lowest"),
        Query(over("max", M(f"{name}_max", *matchers)), "highest"),
    ]


def _work() -> Row:
    def share(title: str, part: str, text: str) -> Json:
        return timeseries(
            title,
            f"{text}: mean, lowest and highest tenth of a second.",
            "percentunit",
            _envelope(f"gpu_{part}_active_ratio"),
            high=1,
            overrides=band("lowest", "highest", "blue"),
            no_value="Not told: GPM came with Hopper",
            width=8,
        )

    return Row(
        "Work",
        [
            share("SMs", "sm", "Share of the SMs that were busy"),
            share("Tensor cores", "tensor", "Share of time in which tensor cores worked"),
            share("Memory bandwidth", "dram", "Share of the memory's bandwidth that was used"),
        ],
    )


def _power_and_heat() -> Row:
    def threshold(name: str) -> str:
        return M("gpu_temperature_threshold_celsius", f'threshold="{name}"')

    energy = known(rate(M("gpu_energy_joules_total")), M)
    margin = M("gpu_temperature_margin_celsius")
    return Row(
        "Power, heat and work",
        [
            timeseries(
                "Power",
                "Mean, lowest and highest sample, and the enforced limit. Peaks above it for a "
                "moment are normal; a mean at the limit is a GPU that is held by it.",
                "watt",
                [*_envelope("gpu_power_watts"), Query(POWER_LIMIT, "limit")],
                overrides=[*band("lowest", "highest", "blue"), dashed("limit")],
                width=8,
            ),
            timeseries(
                "Power, every 20 ms",
                "The driver's own samples, five times as dense, and the exact mean by the board's "
                "count of energy, which no sample misses.",
                "watt",
                [*_envelope("gpu_power_sample_watts"), Query(energy, "by energy")],
                overrides=[*band("lowest", "highest", "blue"), fixed("by energy", "dark-yellow")],
                width=8,
                no_value="Not told",
            ),
            timeseries(
                "Utilization",
                "Share of time in which a kernel ran: mean, lowest and highest sample. It says "
                "that the GPU is busy, not that it works well.",
                "percentunit",
                _envelope("gpu_utilization_ratio"),
                high=1,
                overrides=band("lowest", "highest", "blue"),
                width=8,
            ),
            timeseries(
                "Core temperature",
                "Mean, lowest and highest sample, and where this GPU slows down. The dashed mark "
                "at 80 C is for comparison.",
                "celsius",
                [
                    *_envelope("gpu_temperature_celsius", CORE),
                    Query(threshold("core_max"), "highest in operation"),
                    Query(threshold("slowdown"), "slows down"),
                    Query(threshold("shutdown"), "shuts down"),
                ],
                soft_low=COOL,
                steps=HOT,
                overrides=[
                    *(fixed("mean", "orange"), *band("lowest", "highest", "orange")),
                    *(dashed("highest in operation", "orange"), dashed("slows down", "red")),
                    dashed("shuts down"),
                ],
                width=8,
                legend="list",
            ),
            timeseries(
                "Memory temperature",
                "Mean, lowest and highest sample, and the highest this memory is made for. The "
                "dashed mark at 95 C is for comparison.",
                "celsius",
                [
                    *_envelope("gpu_temperature_celsius", MEMORY),
                    Query(threshold("memory_max"), "highest in operation"),
                ],
                soft_low=COOL,
                steps=MEMORY_HOT,
                overrides=[
                    *(fixed("mean", "purple"), *band("lowest", "highest", "purple")),
                    dashed("highest in operation"),
                ],
                width=8,
            ),
            timeseries(
                "Margin",
                "Degrees left until the GPU slows down for heat, by its own reckoning. At 2 or "
                "less for 10 minutes it is an alert; below 0 it has slowed down.",
                "celsius",
                [Query(over("min", margin), "lowest")],
                soft_low=0,
                overrides=[fixed("lowest", "orange")],
                width=8,
                no_value="Not told",
            ),
        ],
    )


def _identity() -> Row:
    labels = {
        "Model": "name",
        "PCI address": "pci_bus_id",
        "UUID": "uuid",
        "Serial": "serial",
        "Driver": "driver",
        "VBIOS": "vbios",
        "NVML index": "nvml_index",
        "Minor": "minor",
        "Module": "module_id",
        "NUMA node": "numa",
    }
    modes = {
        "Compute": "compute_mode",
        "ECC": "ecc_mode",
        "ECC, pending": "ecc_mode_pending",
        "MIG": "mig_mode",
        "MIG, pending": "mig_mode_pending",
        "Persistence": "persistence_mode",
    }
    set_to = f"max by ({', '.join(modes.values())}) ({M('gpu_mode_info')})"
    known = f"max by ({', '.join(labels.values())}) ({M('gpu_info')})"
    return Row(
        "Identity",
        [
            table(
                "What and where",
                "What the GPU is and where it sits. Two lines in the time shown: it was replaced, "
                "or its driver changed.",
                [
                    *(Column(title, label) for title, label in labels.items()),
                    Column("Known", expr=known, hidden=True),
                ],
                sort=[("PCI address", False)],
                height=4,
            ),
            table(
                "Modes",
                "What an administrator may set; pending is what holds after the next reset.",
                [
                    *(Column(title, label) for title, label in modes.items()),
                    Column("Known", expr=set_to, hidden=True),
                ],
                sort=[("MIG", False)],
                height=4,
                no_value="Not told",
            ),
        ],
    )

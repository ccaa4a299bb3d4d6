"""The cases of `promtool test rules`: for each alert when it fires, and what it must not fire on.

Each case is a short story of series, a value a minute, and what fires at which minute. The texts
of an expected alert are the rule's own; a summary is spelled out, so that templates are tested.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gpuwatch.rules import RULES

FAST, HOT, SLOW = 1980e6, 1800e6, 1600e6  # hertz: a healthy clock; 9 % and 19 % under it
DRAWN = 600  # watts of a GPU under an ordinary load
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"

Series = dict[str, str]
Gpu = tuple[float, float, float, str]  # SM clock, utilization, power, model
Fired = tuple[dict[str, str], str]  # labels beyond the rule's own, summary

# The labels of the entity in a case, by the rule's `per`.
ENTITY = {
    "gpu": {"gpu": "2", "uuid": "GPU-2"},
    "source": {"source": "nvml_state"},
    "pci_device": {"pci_bus_id": "0000:1b:00.0"},
    "rdma_port": {"device": "mlx5_0", "port": "1"},
    "host": {},
}
ENTITY_TEXT = {
    "gpu": "GPU 2 (GPU-2) of node1",
    "source": "source nvml_state of node1",
    "pci_device": "PCI device 0000:1b:00.0 of node1",
    "rdma_port": "RDMA port mlx5_0/1 of node1",
}


def gpu(clock: float = FAST, busy: float = 0.98, power: float = DRAWN, model: str = H200) -> Gpu:
    """Return a GPU of a case; as it comes it is healthy and busy."""
    return clock, busy, power, model


def series(metric: str, values: str, **labels: str) -> Series:
    """Return one series of the job gpuwatch; values in promtool's notation."""
    pairs = {**labels, "job": "gpuwatch"}
    text = ",".join(f'{label}="{value}"' for label, value in pairs.items())
    return {f"{metric}{{{text}}}": values}


def alerts(rule: str, severity: str, values: Mapping[str, str], rack: str = "") -> Series:
    """Return a daemon's alert of one GPU or more: {"node/gpu": values}."""
    found: Series = {}
    for place, story in values.items():
        instance, _, number = place.partition("/")
        labels = {"alert": rule, "severity": severity, "instance": instance, "gpu": number}
        found |= series(
            "gpuwatch_alert_firing", story, **labels, **({"rack": rack} if rack else {})
        )
    return found


def nodes(**gpus: Sequence[Gpu]) -> Series:
    """Return what the straggler's rules read of nodes that do the same for 40 minutes."""
    found: Series = {}
    for instance, members in gpus.items():
        for number, (clock, busy, power, model) in enumerate(members):
            labels = {"instance": instance, "gpu": str(number), "uuid": f"{instance}-{number}"}
            found |= series("gpuwatch_gpu_info", "1x40", **labels, name=model)
            found |= series("gpuwatch_gpu_utilization_ratio_mean", f"{busy}x40", **labels)
            found |= series("gpuwatch_gpu_power_watts_mean", f"{power}x40", **labels)
            found |= series(
                "gpuwatch_gpu_clock_hertz_mean", f"{clock:.0f}x40", **labels, clock="sm"
            )
    return found


def page(
    up: str = "1x30", source: str = "1x30", age: str = "0.1x30", cpu: str = "0+3x30"
) -> Series:
    """Return what one node serves of itself."""
    return {
        **series("up", up, instance="node1"),
        **series("gpuwatch_source_up", source, instance="node1", source="nvml_state"),
        **series("gpuwatch_source_age_seconds", age, instance="node1", source="nvml_state"),
        **series("process_cpu_seconds_total", cpu, instance="node1"),
    }


def without(found: Series, metric: str) -> Series:
    """Return the series but those of one metric."""
    return {name: values for name, values in found.items() if not name.startswith(metric)}


NODE1 = {"instance": "node1", "job": "gpuwatch"}
SILENT = (NODE1, "node1 does not answer.")
SIGHTLESS = (NODE1, "gpuwatch of node1 answers, but sees nothing.")
BRAKES = {"alert": "gpu_power_brake", "rack": "r1"}
BRAKED = (BRAKES, "gpu_power_brake on 3 nodes of rack r1.")
BEGINS = "0x24 1x30"  # fires from minute 25 on
ENDS = "0x24 1x30 0x30"
HEALTHY = [gpu()] * 4

# name, alert, series, what fires at which minute
Story = tuple[str, str, Series, dict[int, list[Fired]]]


def straggler(severity: str, share: str) -> Fired:
    """Return the alert of GPU 0 of node1."""
    labels = {"instance": "node1", "gpu": "0", "uuid": "node1-0", "clock": "sm", "name": H200}
    summary = f"GPU 0 (node1-0) of node1 is {share} slower than its peers."
    return {**labels, "job": "gpuwatch", "severity": severity}, summary


def slow_node(severity: str, share: str) -> Fired:
    """Return the alert of node1."""
    labels = {**NODE1, "clock": "sm", "name": H200, "severity": severity}
    return labels, f"The GPUs of node1 are {share} slower than the fleet's."


DOWN: tuple[Story, ...] = (
    ("a node is down", "GpuwatchDown", page(up="1x4 0x25"), {9: [], 11: [SILENT], 25: [SILENT]}),
    ("a node restarts", "GpuwatchDown", page(up="1x4 0x3 1x20"), {7: [], 9: [], 20: []}),
    (
        "nothing is scraped",
        "GpuwatchDown",
        series("gpuwatch_build_info", "1x30"),
        {4: [], 6: [({"job": "gpuwatch"}, "No node is scraped for gpuwatch.")]},
    ),
)

BLIND: tuple[Story, ...] = (
    ("all is well", "GpuwatchBlind", page(), {10: [], 30: []}),
    ("the driver fails", "GpuwatchBlind", page(source="1x4 0x25"), {9: [], 11: [SIGHTLESS]}),
    ("a sampler restarts", "GpuwatchBlind", page(source="1x4 0x3 1x20"), {7: [], 9: [], 20: []}),
    ("no source", "GpuwatchBlind", without(page(), "gpuwatch_source_up"), {6: [SIGHTLESS]}),
    ("old data", "GpuwatchBlind", page(age="1+60x30"), {4: [], 7: [SIGHTLESS]}),
    ("the page stands still", "GpuwatchBlind", page(cpu="0+3x9 27x20"), {12: [], 25: [SIGHTLESS]}),
    ("the node is down", "GpuwatchBlind", page(up="0x30", source="0x30"), {10: [], 30: []}),
    (
        "released to another tool",
        "GpuwatchBlind",
        {
            **without(page(), "gpuwatch_source"),
            **series("gpuwatch_released", "1x30", instance="node1", what="gpus"),
        },
        {10: [], 30: []},
    ),
)


def brake(values: Mapping[str, str], rack: str = "r1") -> Series:
    """Return alerts of a power brake."""
    return alerts("gpu_power_brake", "warning", values, rack)


SAME_FAULT: tuple[Story, ...] = (
    (
        "three nodes of a rack, and again when it is over",
        "GpuwatchSameFaultOnManyNodes",
        brake({"node1/0": ENDS, "node2/3": ENDS, "node3/1": "0x28 1x26 0x30"}),
        {28: [], 30: [BRAKED], 54: [BRAKED], 75: []},
    ),
    (
        "three nodes without the label rack",
        "GpuwatchSameFaultOnManyNodes",
        brake({"node1/0": BEGINS, "node2/0": BEGINS, "node3/0": BEGINS}, rack=""),
        {26: [({"alert": "gpu_power_brake"}, "gpu_power_brake on 3 nodes.")]},
    ),
    (
        "all GPUs of one node, and one of a second",
        "GpuwatchSameFaultOnManyNodes",
        brake({**{f"node1/{number}": BEGINS for number in range(8)}, "node2/0": BEGINS}),
        {26: [], 40: []},
    ),
    (
        "three nodes within an hour",
        "GpuwatchSameFaultOnManyNodes",
        brake({"node1/0": BEGINS, "node2/0": "0x40 1x40", "node3/0": "0x55 1x25"}),
        {26: [], 42: [], 57: [], 70: []},
    ),
    (
        "three nodes of three racks",
        "GpuwatchSameFaultOnManyNodes",
        brake({"node1/0": BEGINS})
        | brake({"node2/0": BEGINS}, rack="r2")
        | brake({"node3/0": BEGINS}, rack="r3"),
        {26: [], 40: []},
    ),
    (
        "three nodes that have it since before they were scraped",
        "GpuwatchSameFaultOnManyNodes",
        brake({"node1/0": "1x40", "node2/0": "1x40", "node3/0": "1x40"}),
        {5: [], 15: [], 40: []},
    ),
    (
        "three nodes at their power limit",
        "GpuwatchSameFaultOnManyNodes",
        alerts("gpu_power_capped", "info", {f"node{n}/0": BEGINS for n in range(3)}, "r1"),
        {26: [], 40: []},
    ),
)

STRAGGLERS: tuple[Story, ...] = (
    (
        "a GPU is 9 % slower",
        "GpuClockStraggler",
        nodes(node1=[gpu(HOT), *HEALTHY], node2=HEALTHY),
        {9: [], 20: [straggler("warning", "9.091%")]},
    ),
    (
        "a GPU is 19 % slower",
        "GpuClockStraggler",
        nodes(node1=[gpu(SLOW, power=450), *HEALTHY], node2=HEALTHY),
        {20: [straggler("warning", "19.19%"), straggler("critical", "19.19%")]},
    ),
    (
        "a GPU is 4 % slower",
        "GpuClockStraggler",
        nodes(node1=[gpu(1900e6), *HEALTHY], node2=HEALTHY),
        {20: [], 40: []},
    ),
    (
        "a GPU idles",
        "GpuClockStraggler",
        nodes(node1=[gpu(345e6, busy=0.0, power=75), *HEALTHY], node2=HEALTHY),
        {20: [], 40: []},
    ),
    (
        "a GPU works now and then",
        "GpuClockStraggler",
        nodes(node1=[gpu(1100e6, busy=0.4, power=300), *HEALTHY], node2=HEALTHY),
        {20: [], 40: []},
    ),
    (
        "a GPU has the hardest load",
        "GpuClockStraggler",
        nodes(node1=[gpu(SLOW, power=700), *HEALTHY], node2=HEALTHY),
        {20: [], 40: []},
    ),
    (
        "a GPU of another model",
        "GpuClockStraggler",
        nodes(node1=[gpu(SLOW, model=H100), *HEALTHY], node2=HEALTHY),
        {20: [], 40: []},
    ),
    (
        "seven busy GPUs",
        "GpuClockStraggler",
        nodes(node1=[gpu(SLOW), *HEALTHY], node2=[gpu(), gpu(), gpu(345e6, busy=0.0)]),
        {20: [], 40: []},
    ),
    (
        "a whole node is slower",
        "GpuClockStraggler",
        nodes(node1=[gpu(SLOW, power=450)] * 3, node2=HEALTHY, node3=HEALTHY),
        {20: [], 40: []},
    ),
    (
        "a whole node is 9 % slower",
        "NodeClockStraggler",
        nodes(node1=[gpu(HOT, power=500)] * 3, node2=HEALTHY, node3=HEALTHY),
        {9: [], 20: [slow_node("warning", "9.091%")]},
    ),
    (
        "a whole node is 19 % slower",
        "NodeClockStraggler",
        nodes(node1=[gpu(SLOW, power=450)] * 3, node2=HEALTHY, node3=HEALTHY),
        {20: [slow_node("warning", "19.19%"), slow_node("critical", "19.19%")]},
    ),
    (
        "a node at its power limit beside lighter jobs",
        "NodeClockStraggler",
        nodes(node1=[gpu(SLOW, power=700)] * 3, node2=HEALTHY, node3=HEALTHY),
        {20: [], 40: []},
    ),
    (
        "two jobs at the power limit, one with lower clocks",
        "NodeClockStraggler",
        nodes(node1=[gpu(SLOW, power=698)] * 3, node2=[gpu(power=700)] * 6),
        {20: [], 40: []},
    ),
    (
        "an idle node",
        "NodeClockStraggler",
        nodes(node1=[gpu(345e6, busy=0.0, power=75)] * 3, node2=HEALTHY, node3=HEALTHY),
        {20: [], 40: []},
    ),
    (
        "a slow node in a small fleet",
        "NodeClockStraggler",
        nodes(node1=[gpu(SLOW, power=450)] * 3, node2=HEALTHY),
        {20: [], 40: []},
    ),
)


def cases_file(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cases for these rules."""
    daemon, fleet = (group["rules"] for group in rules["groups"])
    stories = [
        (
            rule.name,
            alert["alert"],
            series(
                "gpuwatch_alert_firing",
                "0x4 1x3 0x20",
                **_daemon_labels(rule.name, rule.per),
                severity=rule.severity,
            ),
            _daemon_expected(rule.name, rule.per),
        )
        for rule, alert in zip(RULES, daemon, strict=True)
    ]
    stories += [*DOWN, *BLIND, *SAME_FAULT, *STRAGGLERS]
    own = [rule for rule in (*daemon, *fleet) if "alert" in rule]
    return {
        "rule_files": ["gpuwatch.rules.yml"],
        "evaluation_interval": "1m",
        "tests": [_case(story, own) for story in stories],
    }


def _daemon_labels(rule: str, per: str) -> dict[str, str]:
    return {"alert": rule, **ENTITY[per], "instance": "node1"}


def _daemon_expected(rule: str, per: str) -> dict[int, list[Fired]]:
    """Return when a daemon's alert fires: at once, and for 5 minutes after it ended."""
    labels = {**_daemon_labels(rule, per), "job": "gpuwatch"}
    fired = [(labels, f"{rule}: {ENTITY_TEXT.get(per, 'node1')}")]
    return {4: [], 5: fired, 8: fired, 12: fired, 15: []}


def _case(story: Story, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    name, alert, given, expected = story
    return {
        "name": f"{alert}: {name}",
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in given.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{minute}m",
                "alertname": alert,
                "exp_alerts": [_expected(alert, one, rules) for one in fired],
            }
            for minute, fired in expected.items()
        ],
    }


def _expected(alert: str, fired: Fired, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an alert as promtool wants it: every label and every text."""
    labels, summary = fired
    rule = next(
        rule
        for rule in rules
        if rule["alert"] == alert
        and labels.get("severity", rule["labels"]["severity"]) == rule["labels"]["severity"]
    )
    return {
        "exp_labels": {**labels, **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "summary": summary},
    }

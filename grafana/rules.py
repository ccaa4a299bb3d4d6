"""Builds the Prometheus rules: one alert per rule of the daemon, and the alerts of a fleet.

    python grafana/rules.py [--check] [--runbooks URL] [--output FOLDER]

writes `gpuwatch.rules.yml` and, for `promtool test rules`, `tests.yml` (see rule_cases.py).
The daemon has judged already, so an alert of its rules only passes the verdict on; names,
severities and texts are those of `gpuwatch.rules`. A fleet alert says what no single node can
know. Every alert has the page `docs/runbooks/<name>.md`. What is written follows from these
files and the rules alone, so `--check` can tell whether the committed files are up to date.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rule_cases import cases_file

from gpuwatch.rule import Rule, Severity
from gpuwatch.rules import RULES

FOLDER = Path(__file__).parent / "prometheus"
RUNBOOKS = "https://example.com/gpuwatch/docs/runbooks"  # where docs/runbooks is published
KEEP_FIRING_FOR = "5m"  # longer than a restart of gpuwatch or a few lost scrapes

# The node of a series: every target label that tells nodes apart.
NODE = "job, instance"
GPU = f"{NODE}, gpu"
UP = 'up{job="gpuwatch"}'  # the job's name in prometheus.yml

# A straggler's clock is this share under its peers': the limits of warning and critical.
STRAGGLER = {"warning": 0.07, "critical": 0.15}

WHERE = {
    "gpu": "GPU {{ $labels.gpu }} ({{ $labels.uuid }}) of {{ $labels.instance }}",
    "source": "source {{ $labels.source }} of {{ $labels.instance }}",
    "pci_device": "PCI device {{ $labels.pci_bus_id }} of {{ $labels.instance }}",
    "rdma_port": "RDMA port {{ $labels.device }}/{{ $labels.port }} of {{ $labels.instance }}",
    "host": "{{ $labels.instance }}",
}


@dataclass(frozen=True, kw_only=True)
class FleetAlert:
    """An alert that Prometheus judges itself.

    `scope` "fleet" is for people at once: nothing but them can help. "node" is about one GPU or
    node and goes the way of the daemon's own alerts. `summary` and `description` are templates.
    """

    name: str
    severity: Severity
    scope: str
    expr: str
    summary: str
    description: str
    for_: str = "0m"


# What is recorded, in the order of evaluation: later ones use earlier ones of the same instant.
#
# Busy is a GPU that was in use for 80 % of each of the last five minutes: the clocks of idle gaps
# do not count, and no two judged GPUs differ by more than 20 % in use. Medians of a model exist
# only from 8 busy GPUs on.
BUSY = "min_over_time(gpuwatch_gpu_utilization_ratio_mean[5m]) >= 0.8"
MODEL = f"* on ({GPU}) group_left (name) gpuwatch_gpu_info"
FIRING = 'gpuwatch_alert_firing{severity!="info"}'
RECORDS = {
    "gpuwatch:node_alert:firing": f"{FIRING} == 1",
    "gpuwatch:node_lost_clock:max_rate5m": (
        "max without (gpu, uuid) (rate(gpuwatch_gpu_lost_clock_seconds_total[5m]))"
    ),
    "gpuwatch:node_throttle:max_rate5m": (
        "max without (gpu, uuid) (rate(gpuwatch_gpu_throttle_seconds_total[5m]))"
    ),
    "gpuwatch:gpu_busy_clock_hertz:mean5m": f"""
(
  avg_over_time(gpuwatch_gpu_clock_hertz_mean{{clock="sm"}}[5m])
    and on ({GPU}) {BUSY}
) {MODEL}""",
    "gpuwatch:gpu_busy_power_watts:mean5m": f"""
(
  avg_over_time(gpuwatch_gpu_power_watts_mean[5m])
    and on ({GPU}) {BUSY}
) {MODEL}""",
    "gpuwatch:fleet_busy_gpus:count": "count by (name) (gpuwatch:gpu_busy_clock_hertz:mean5m)",
    "gpuwatch:fleet_busy_clock_hertz:median": """
quantile by (name) (0.5, gpuwatch:gpu_busy_clock_hertz:mean5m)
  and on (name) gpuwatch:fleet_busy_gpus:count >= 8""",
    "gpuwatch:fleet_busy_power_watts:median": """
quantile by (name) (0.5, gpuwatch:gpu_busy_power_watts:mean5m)
  and on (name) gpuwatch:fleet_busy_gpus:count >= 8""",
    "gpuwatch:node_busy_clock_hertz:median": (
        "quantile without (gpu, uuid) (0.5, gpuwatch:gpu_busy_clock_hertz:mean5m)"
    ),
    "gpuwatch:node_busy_power_watts:median": (
        "quantile without (gpu, uuid) (0.5, gpuwatch:gpu_busy_power_watts:mean5m)"
    ),
    "gpuwatch:gpu_clock_deficit:ratio": """
1 - gpuwatch:gpu_busy_clock_hertz:mean5m
  / on (name) group_left () gpuwatch:fleet_busy_clock_hertz:median""",
    "gpuwatch:node_clock_deficit:ratio": """
1 - gpuwatch:node_busy_clock_hertz:median
  / on (name) group_left () gpuwatch:fleet_busy_clock_hertz:median""",
}

DOWN = FleetAlert(
    name="GpuwatchDown",
    severity="critical",
    scope="fleet",
    expr=f"{UP} == 0\n  or absent({UP}) == 1",
    for_="5m",
    summary="{{ with $labels.instance }}{{ . }} does not answer.{{ else }}"
    "No node is scraped for gpuwatch.{{ end }}",
    description="Prometheus has not reached gpuwatch for 5 minutes: the node, its network or the "
    "service is down, and nobody watches its GPUs. Try to reach the node, then look at the "
    "service's log.",
)

# Blind: no source delivers fresh data and none was released, or the page itself stands still.
BLIND = FleetAlert(
    name="GpuwatchBlind",
    severity="critical",
    scope="fleet",
    expr=f"""
(
  {UP} == 1
    unless on ({NODE}) (
      gpuwatch_source_up == 1
        and on ({NODE}, source) gpuwatch_source_age_seconds < 60
    )
    unless on ({NODE}) gpuwatch_released{{what="gpus"}} == 1
)
or
(
  {UP} == 1
    and on ({NODE}) changes(process_cpu_seconds_total[5m]) == 0
)""",
    for_="5m",
    summary="gpuwatch of {{ $labels.instance }} answers, but sees nothing.",
    description="No source of this node has delivered for 5 minutes, so none of its GPUs is "
    "watched and its alerts say nothing. Run `gpuwatch check` on the node, then look at the "
    "service's log.",
)

# Nodes count whose alert began within 10 minutes: it fired in them, and not in the 10 before.
# Once it fires, the alert stays while 3 nodes have the fault, however long ago it began there.
# It looks back on the few alerts that fired: all of them, on every node, would be too many samples.
SAME_FAULT = FleetAlert(
    name="GpuwatchSameFaultOnManyNodes",
    severity="critical",
    scope="fleet",
    expr=f"""
count by (alert, rack) (
  count by (alert, rack, instance) (
    max_over_time(gpuwatch:node_alert:firing[10m])
      and {FIRING} offset 10m == 0
      unless max_over_time(gpuwatch:node_alert:firing[10m] offset 10m)
  )
) >= 3
or
count by (alert, rack) (
  count by (alert, rack, instance) (gpuwatch:node_alert:firing)
) >= 3
  and on (alert, rack)
    ALERTS{{alertname="GpuwatchSameFaultOnManyNodes", alertstate="firing"}}""",
    summary="{{ $labels.alert }} on {{ $value }} nodes"
    "{{ with $labels.rack }} of rack {{ . }}{{ end }}.",
    description="The same alert began on 3 or more nodes within 10 minutes. One cause is likelier "
    "than many broken GPUs: cooling, power, network or a change just rolled out. Look at what "
    "these nodes share before anything is replaced.",
)


def _gpu_straggler(severity: Severity) -> FleetAlert:
    """Return the alert of a GPU whose clock is under its model's in the fleet and on its node.

    Other GPUs of the node mostly run the same job. One that draws more power than its peers has a
    harder load, which explains its clock.
    """
    limit = STRAGGLER[severity]
    return FleetAlert(
        name="GpuClockStraggler",
        severity=severity,
        scope="node",
        expr=f"""
gpuwatch:gpu_clock_deficit:ratio >= {limit}
  and on ({GPU})
    1 - gpuwatch:gpu_busy_clock_hertz:mean5m
      / on ({NODE}, name) group_left () gpuwatch:node_busy_clock_hertz:median >= {limit}
  and on ({GPU})
    gpuwatch:gpu_busy_power_watts:mean5m
      / on (name) group_left () gpuwatch:fleet_busy_power_watts:median <= 1.05""",
        for_="10m",
        summary=f"{WHERE['gpu']} is {{{{ $value | humanizePercentage }}}} slower than its peers.",
        description="The SM clock of this busy GPU is that far under the median of its model in "
        "the fleet, and well under the other GPUs of its node, without drawing more power. A job "
        "is as fast as its slowest GPU. Compare its throttle reasons and power limit with those "
        "of the others.",
    )


def _node_straggler(severity: Severity) -> FleetAlert:
    """Return the alert of a node whose GPUs' clocks are together under the fleet's.

    A node that draws as much power as the others has a harder load, which explains its clocks.
    """
    return FleetAlert(
        name="NodeClockStraggler",
        severity=severity,
        scope="node",
        expr=f"""
gpuwatch:node_clock_deficit:ratio >= {STRAGGLER[severity]}
  and on ({NODE}, name)
    gpuwatch:node_busy_power_watts:median
      / on (name) group_left () gpuwatch:fleet_busy_power_watts:median < 0.95""",
        for_="10m",
        summary="The GPUs of {{ $labels.instance }} are {{ $value | humanizePercentage }} slower "
        "than the fleet's.",
        description="The median SM clock of this node's busy GPUs is that far under the median of "
        "their model in the fleet, and they draw less power. Look for heat, power brake, locked "
        "clocks or a lower power limit on the whole node.",
    )


FLEET: tuple[FleetAlert, ...] = (
    DOWN,
    BLIND,
    SAME_FAULT,
    *(_gpu_straggler(severity) for severity in ("warning", "critical")),
    *(_node_straggler(severity) for severity in ("warning", "critical")),
)


def camel(name: str) -> str:
    """Return a rule's name as the name of its alert: gpu_lost is GpuLost."""
    return "".join(word.capitalize() for word in name.split("_"))


def snake(name: str) -> str:
    """Return an alert's name as that of its page: GpuLost is gpu_lost."""
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")


def rules_file(runbooks: str) -> dict[str, Any]:
    """Return the rules; `runbooks` is the address of the folder of runbooks."""
    return {
        "groups": [
            {
                "name": "gpuwatch",
                "rules": [daemon_alert(rule, runbooks) for rule in RULES],
            },
            {
                "name": "gpuwatch-fleet",
                "rules": [
                    *({"record": name, "expr": expr.strip()} for name, expr in RECORDS.items()),
                    *(fleet_alert(alert, runbooks) for alert in FLEET),
                ],
            },
        ]
    }


def daemon_alert(rule: Rule, runbooks: str) -> dict[str, Any]:
    """Return the alert that passes on the verdict of one of the daemon's rules."""
    return {
        "alert": camel(rule.name),
        "expr": f'gpuwatch_alert_firing{{alert="{rule.name}"}} == 1',
        "keep_firing_for": KEEP_FIRING_FOR,
        "labels": {"severity": rule.severity, "scope": "node"},
        "annotations": {
            "summary": f"{rule.name}: {WHERE[rule.per]}",
            "description": f"{rule.help} {rule.next_step}",
            "runbook_url": f"{runbooks}/{rule.name}.md",
        },
    }


def fleet_alert(alert: FleetAlert, runbooks: str) -> dict[str, Any]:
    """Return an alert that Prometheus judges itself."""
    return {
        "alert": alert.name,
        "expr": alert.expr.strip(),
        **({"for": alert.for_} if alert.for_ != "0m" else {}),
        "keep_firing_for": KEEP_FIRING_FOR,
        "labels": {"severity": alert.severity, "scope": alert.scope},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{runbooks}/{snake(alert.name)}.md",
        },
    }


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and lists indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def written(content: dict[str, Any]) -> str:
    """Return a file's text."""
    body = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=96, allow_unicode=True)
    return f"# Made by `python grafana/rules.py`: change it there.\n{body}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with --check say which of them are not up to date."""
    parser = argparse.ArgumentParser(description="Build the Prometheus rules of gpuwatch.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if files differ")
    parser.add_argument("--runbooks", default=RUNBOOKS, help="address of the folder of runbooks")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to")
    chosen = parser.parse_args(arguments)
    rules = rules_file(chosen.runbooks)
    files = {"gpuwatch.rules.yml": written(rules), "tests.yml": written(cases_file(rules))}
    stale = 0
    for name, text in files.items():
        path = chosen.output / name
        if path.exists() and path.read_text() == text:
            continue
        if chosen.check:
            stale = 1
            sys.stderr.write(f"{path}: not up to date: run python grafana/rules.py\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return stale


if __name__ == "__main__":
    sys.exit(main())

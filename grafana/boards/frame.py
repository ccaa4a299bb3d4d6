"""What all boards have around their panels: variables and annotations."""

from board import annotation, variable
from fields import Json
from promql import named

JOB = 'job=~"$job"'


def job() -> Json:
    """Return the variable of the scrape job."""
    return variable("job", "Job", "gpuwatch_build_info", many=True)


def instance(many: bool) -> Json:
    """Return the variable of the node."""
    return variable("instance", "Node", f"gpuwatch_build_info{{{JOB}}}", many=many)


def gpu(many: bool) -> Json:
    """Return the variable of the GPU of a node."""
    known = f'gpuwatch_gpu_info{{{JOB},instance="$instance"}}'
    return variable("gpu", "GPU", known, many=many, numeric=True)


def alerts(*matchers: str) -> list[Json]:
    """Return marks where alerts fire, by severity, and where they change their state.

    The last two are off until asked for: every change of state, and the alerts of Prometheus.
    """
    labels = ",".join([JOB, *matchers])
    node = ",".join([JOB, *(one for one in matchers if one.startswith("instance"))])
    changes = f"gpuwatch_alert_transitions_total{{{node}}}"
    who = "{{instance}} {{who}}"
    fired = [
        annotation(
            f"{severity.capitalize()} alerts",
            color,
            named(f'gpuwatch_alert_firing{{{labels},severity="{severity}"}} == 1'),
            "{{alert}}",
            who,
            severity != "info",
        )
        for severity, color in (("critical", "red"), ("warning", "orange"), ("info", "blue"))
    ]
    return [
        *fired,
        annotation(
            "Alert transitions",
            "purple",
            f"increase({changes}[1m]) > 0",
            "{{alert}}: {{to}}",
            "{{instance}}",
            False,
        ),
        annotation(
            "Prometheus alerts",
            "yellow",
            named(f'ALERTS{{{node},alertstate="firing"}}'),
            "{{alertname}}",
            who,
            False,
        ),
    ]

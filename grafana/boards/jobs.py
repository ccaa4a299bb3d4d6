"""Who used a GPU: a row of the GPU's dashboard."""

from collections.abc import Callable

from board import Row
from fields import Json
from panels import Query, timeline, timeseries

THERE = {1: ("there", "dark-blue")}


def row(selector: Callable[..., str]) -> Row:
    """Return the row of the GPU that `selector` chooses."""

    def users(title: str, text: str, metric: str, by: str, legend: str, none: str) -> Json:
        there = f"max by ({by}) ({selector(metric)})"
        return timeline(title, text, Query(there, legend), THERE, height=5, no_value=none)

    return Row(
        "Who used it",
        [
            users(
                "Jobs",
                "Jobs of Slurm with a process on the GPU, by id, name and user.",
                "gpu_job_info",
                "job_id, job_name, user, gpu_instance",
                "{{job_id}} {{job_name}} {{user}} {{gpu_instance}}",
                "No job",
            ),
            users(
                "Pods",
                "Pods of Kubernetes with a process on the GPU, by namespace, name and container.",
                "gpu_pod_info",
                "namespace, pod, container, gpu_instance",
                "{{namespace}} {{pod}} {{container}} {{gpu_instance}}",
                "No pod",
            ),
            users(
                "Processes",
                "Users and commands with a process on the GPU; with --collector.processes alone.",
                "gpu_process_info",
                "user, command, gpu_instance",
                "{{user}} {{command}} {{gpu_instance}}",
                "Not told",
            ),
            timeseries(
                "How many",
                "Jobs, pods and commands on the GPU; of more than 16 of a kind only 16 are above.",
                "none",
                [Query(selector("gpu_tenants"), "{{kind}}")],
                no_value="Not told",
                width=24,
            ),
        ],
    )

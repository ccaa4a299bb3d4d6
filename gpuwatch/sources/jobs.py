"""Jobs: the Slurm jobs and Kubernetes pods that have a process on a GPU."""

from pathlib import Path

from gpuwatch.errors import SourceUnsupported
from gpuwatch.holders import schedules
from gpuwatch.source import Context, Opened
from gpuwatch.tenants import Kind, Tenants


class Jobs(Tenants):
    """Source of the duty `counters`, on hosts where Slurm or Kubernetes is."""

    name = "jobs"

    def __init__(self) -> None:
        super().__init__(
            {
                "job": Kind(("job_id",), lambda holder: holder.job),
                "pod": Kind(("pod_uid", "pod", "container"), lambda holder: holder.pod),
            }
        )

    def open(self, context: Context) -> Opened:
        """Find the GPUs.

        Raises SourceUnsupported if neither scheduler is here, SourceUnavailable if there is no
        driver or no GPU.
        """
        logs = Path(context.settings["config"]["counters"]["container_logs"])
        if not schedules(context.sysfs, logs):
            raise SourceUnsupported(
                f"jobs: neither Slurm nor Kubernetes here: no control group of theirs in"
                f" {context.sysfs / 'fs/cgroup'}, no {logs}"
            )
        return super().open(context)

"""Slurm: the jobs that run on this host, told by the processes that belong to them.

By control group, as Slurm's plugins name them (cgroup v1: /slurm/uid_0/job_123/step_0; v2:
/system.slice/slurmstepd.scope/job_123/step_0/...), and by the environment that every step gets,
which root alone can read of others.
"""

import contextlib
import re
from pathlib import Path

IN_GROUP = re.compile(r"slurm.*?/job_(\d+)(?:/|$)", re.MULTILINE)
IN_ENVIRONMENT = re.compile(rb"(?:^|\0)SLURM_JOB_ID=(\d+)(?:\0|$)")
ENVIRONMENT_BYTES = 1 << 20


def jobs(procfs: Path) -> frozenset[str]:
    """Return the ids of all jobs that have a process here."""
    found = set()
    for process in procfs.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.update(IN_GROUP.findall((process / "cgroup").read_text(errors="replace")))
        with contextlib.suppress(OSError), (process / "environ").open("rb") as file:
            told = IN_ENVIRONMENT.findall(file.read(ENVIRONMENT_BYTES))
            found.update(job.decode() for job in told)
    return frozenset(found)

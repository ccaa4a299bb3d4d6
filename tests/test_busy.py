"""Whether somebody uses a GPU: what speaks against a canary, by what was read."""

import dataclasses

import pytest

from gpuwatch.busy import USED_BYTES, Host, Seen, host_reason, intruder, reason
from gpuwatch.canary_ledger import REASONS
from gpuwatch.slurm import jobs
from gpuwatch.topology import node_processors

IDLE = Seen(
    processes=frozenset(), utilization_ratio=0.0, memory_used_bytes=4 << 20, compute_mode="default"
)


def test_an_idle_gpu_is_free():
    """Nobody there, no work, next to no memory: a canary may run."""
    assert reason(Host(), IDLE) is None
    assert reason(Host(), dataclasses.replace(IDLE, utilization_ratio=0.02)) is None


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"processes": frozenset({7})}, "in use by process 7"),
        ({"processes": frozenset(range(1, 6))}, "in use by process 1, 2, 3 and 2 more"),
        ({"processes": None}, "does not tell its processes"),
        ({"utilization_ratio": 0.03}, "utilization is 3%"),
        ({"utilization_ratio": 1.0}, "utilization is 100%, with no process to be seen"),
        ({"utilization_ratio": None}, "utilization is not known"),
        ({"memory_used_bytes": USED_BYTES + 1}, "64 MiB of its memory are in use"),
        ({"memory_used_bytes": None}, "unknown amounts of its memory"),
        ({"compute_mode": "exclusive_process"}, "compute mode is exclusive process"),
        ({"compute_mode": "prohibited"}, "compute mode is prohibited"),
        ({"compute_mode": ""}, "compute mode is not known"),
        ({"mig": True}, "MIG is on"),
    ],
)
def test_a_gpu_that_is_used_is_not(changes, part):
    """Each sign of somebody's work speaks against it, and so does what is not known."""
    why = reason(Host(), dataclasses.replace(IDLE, **changes))
    assert part in why.text
    assert why.kind in REASONS


@pytest.mark.parametrize(
    ("host", "part"),
    [
        (Host(released=frozenset({"gpus"})), "gpuwatch resume gpus"),
        (Host(released=frozenset({"canaries"})), "gpuwatch resume canaries"),
        (Host(jobs=frozenset({"123"})), "a job of Slurm runs here: 123"),
        (Host(host_pids=False), "--pid=host"),
    ],
)
def test_a_host_that_is_used_is_not(host, part):
    """What was let go, a scheduler's job, and a container that sees nobody speak against it."""
    why = reason(host, IDLE)
    assert part in why.text
    assert why.kind in REASONS
    assert (host_reason(host) is None) == (not host.host_pids)  # which GPUs may be looked at


def test_other_leases_do_not_matter():
    """Counters may be released while canaries run."""
    assert reason(Host(released=frozenset({"counters"})), IDLE) is None


def test_who_comes_while_a_canary_runs():
    """Our own processes are nobody; another is, and so is a list that is not told any more."""
    seen = dataclasses.replace(IDLE, processes=frozenset({7, 9}), utilization_ratio=1.0)
    assert intruder(seen, {7, 9}.__contains__) == ""
    assert intruder(seen, {7}.__contains__) == "process 9 came"
    assert "does not tell" in intruder(dataclasses.replace(IDLE, processes=None), bool)
    alone = dataclasses.replace(seen, compute_mode="exclusive_process")
    assert intruder(alone, {7, 9}.__contains__) == "compute mode was set to exclusive process"


def test_jobs_are_found_by_group_and_environment(tmp_path):
    """Slurm's groups of both versions, its steps' environment, and nothing that looks like it."""
    groups = {
        "1": ("0::/init.scope\n", ""),
        "20": ("4:memory:/slurm/uid_1000/job_101/step_0/task_0\n", ""),
        "21": ("0::/system.slice/slurmstepd.scope/job_102/step_batch/user/task_0\n", ""),
        "22": ("0::/user.slice\n", "HOME=/root\0SLURM_JOB_ID=103\0SLURM_JOB_NAME=x\0"),
        "23": ("0::/user.slice\n", "MY_SLURM_JOB_ID=104\0TEXT=SLURM_JOB_ID=105\0"),
        "24": ("0::/system.slice/job_106\n", "SLURM_JOB_ID=\0"),
        "25": ("0::/slurm_node7/uid_1/job_107\n", None),
    }
    for pid, (group, environment) in groups.items():
        process = tmp_path / pid
        process.mkdir()
        (process / "cgroup").write_text(group)
        if environment is not None:
            (process / "environ").write_text(environment)
    (tmp_path / "26").mkdir()  # it ended meanwhile
    assert jobs(tmp_path) == {"101", "102", "103", "107"}


def test_processors_near_a_gpu(tmp_path):
    """Those of its NUMA node; none where that is not known."""
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("2-4,8,10-11\n")
    assert node_processors(tmp_path, "1") == [2, 3, 4, 8, 10, 11]
    assert node_processors(tmp_path, "") == []
    assert node_processors(tmp_path, "0") == []

"""Whose the processes on a GPU are: control groups, environments, logs of containers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proc_tree import CONTAINER, POD_UID, V1, V2, ProcTree
from prometheus_client.parser import text_string_to_metric_families

from gpuwatch import holders
from gpuwatch.capabilities import confine
from gpuwatch.duty import CAPABILITIES
from gpuwatch.exposition import Exposition
from gpuwatch.holders import Holder, Holders, schedules
from gpuwatch.job_signals import TENANTS
from gpuwatch.signals import Entity, column_name
from gpuwatch.snapshot import Snapshot
from gpuwatch.source import Tenant
from gpuwatch.tenants import Kind, tenants_of
from gpuwatch.totals import Totals
from gpuwatch.window import Tick, Window

TOLD = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "llm train",
    "SLURM_JOB_USER": "carla",
    "SLURM_JOB_ACCOUNT": "research",
    "SLURM_JOB_PARTITION": "h200",
    "SLURM_ARRAY_JOB_ID": "5",
    "SLURM_ARRAY_TASK_ID": "2",
    "PATH": "/usr/bin",
}
FLAT = POD_UID.replace("-", "_")
SLICES = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{FLAT}.slice"
NO_POD = "0::/user.slice/user-1000.slice/session-3.scope"


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path)


def found(tree: ProcTree) -> Holders:
    return Holders(tree.proc, tree.sys, tree.logs)


def holder(tree: ProcTree, pid: int = 42) -> Holder:
    (one,) = found(tree).of([pid]) or [None]
    assert one is not None
    return one


@pytest.mark.parametrize(
    "cgroup",
    [
        V2,
        "/system.slice/slurmstepd.scope/job_{job}/step_batch/user/task_0",
        "/system.slice/slurmstepd.scope/job_{job}/step_extern/user/task_special",
        "/system.slice/slurmstepd.scope/job_{job}/step_interactive/slurm",
        "/system.slice/node7_slurmstepd.scope/job_{job}/step_4294967290/user/task_1",
        "/system.slice/slurmstepd.scope/job_{job}",
        "12:devices:" + V1 + "\n4:memory:" + V1 + "\n1:name=systemd:/system.slice/slurmd.service\n",
        "9:freezer:/slurm_node7/uid_1000/job_{job}/step_batch\n3:cpu,cpuacct:/\n0::/\n",
        "5:devices:/slurm/uid_0/job_{job}/step_extern/task_0\n",
        # Slurm within a pod, and a container within a job.
        f"/kubepods.slice/crio-{CONTAINER}.scope/system.slice/slurmstepd.scope/job_{{job}}/x",
        "/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0/libpod-" + CONTAINER,
    ],
)
def test_a_job_is_known_by_its_group(tree: ProcTree, cgroup: str) -> None:
    """Every path that Slurm's plugins make says the job, also where the environment is closed."""
    tree.start(42, cgroup.replace("{job}", "7"))

    assert holder(tree).job == {"job_id": "7", "user": "1234567"}


@pytest.mark.parametrize(
    "cgroup",
    [
        "/user.slice/user-1000.slice/user@1000.service/slurm/job_9/step_0",
        "/system.slice/slurmd.service",
        "/system.slice/ssh.service",
        "/slurm/uid_1000/job_x/step_0",
        "/slurm/uid_1000/job_99999999999999999999",
        "",
    ],
)
def test_other_groups_are_no_job(tree: ProcTree, cgroup: str) -> None:
    """A group that a user can make, or that is none of a job, says nothing."""
    tree.group("system.slice/slurmstepd.scope")
    tree.start(42, cgroup or b"", TOLD)

    assert holder(tree).job == {}


def test_a_job_tells_of_itself(tree: ProcTree) -> None:
    """Name, account, partition and array come from the environment of its processes."""
    tree.start(42, V2.format(job=7), TOLD)

    assert holder(tree).job == {
        "job_id": "7",
        "user": "carla",
        "job_name": "llm train",
        "account": "research",
        "partition": "h200",
        "array_job": "5",
        "array_task": "2",
    }


def test_a_job_cannot_speak_for_another(tree: ProcTree) -> None:
    """What an environment says of a job that is not the group's is not taken."""
    tree.start(42, V2.format(job=8), TOLD)

    assert holder(tree).job == {"job_id": "8", "user": "1234567"}


def test_without_groups_the_environment_names_the_job(tree: ProcTree) -> None:
    """Where Slurm tracks processes without groups; where it has groups, a job left them."""
    tree.group("system.slice/slurmd.service")
    tree.start(42, NO_POD, TOLD)
    assert holder(tree).job["job_id"] == "7"

    known = found(tree)
    tree.group("devices/slurm")
    known.forget(2**60)
    assert [one.job for one in known.of([42]) or ()] == [{}]
    assert holder(tree).job == {}


def test_a_local_name_comes_first(tree: ProcTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user is who the kernel says it is, by the host's own list if it is there."""
    monkeypatch.setattr(holders, "PASSWD", tree.proc / "passwd")
    tree.start(42, V2.format(job=7), TOLD, uid=1000)
    known = found(tree)
    assert [one.user for one in known.of([42]) or ()] == ["carla"]

    (tree.proc / "passwd").write_bytes(b"broken\nda\xffn:x:1000:1000::/:/bin/sh\nx:x:1000:::\n")
    assert [one.user for one in known.of([42]) or ()] == ["da\\xffn"]


@pytest.mark.parametrize(
    "cgroup",
    [
        f"/kubepods/burstable/pod{POD_UID}/{CONTAINER}",
        f"{SLICES}/cri-containerd-{CONTAINER}.scope",
        f"{SLICES}/crio-{CONTAINER}.scope",
        f"{SLICES}/crio-{CONTAINER}.scope/container",
        f"{SLICES}/docker-{CONTAINER}.scope",
        f"/system.slice/containerd.service/kubepods-pod{FLAT}.slice:cri-containerd:{CONTAINER}",
        f"11:devices:/kubepods/besteffort/pod{POD_UID}/{CONTAINER}\n1:name=systemd:/kubepods/x\n",
        f"/kubelet.slice/kubelet-kubepods-pod{FLAT}.slice/cri-containerd-{CONTAINER}.scope",
    ],
)
def test_a_pod_is_known_by_its_group_and_its_logs(tree: ProcTree, cgroup: str) -> None:
    """Each driver of kubelet and each runtime; without logs the pod's uid is left to join with."""
    tree.start(42, cgroup)
    assert holder(tree).pod == {"pod_uid": POD_UID}

    tree.log("train-0", "ml", "my-trainer")
    assert holder(tree).pod == {
        "namespace": "ml",
        "pod": "train-0",
        "container": "my-trainer",
        "pod_uid": POD_UID,
    }
    assert holder(tree).job == {}


def test_a_container_with_a_view_of_its_own(tree: ProcTree) -> None:
    """Seen from within a container a path has lost its head: the container's id is enough."""
    tree.log("train-0", "ml", "trainer")
    tree.start(42, f"0::/../../kubepods-x.slice/cri-containerd-{CONTAINER}.scope")
    tree.start(43, f"0::/../{'f' * 64}")

    first, second = found(tree).of([42, 43]) or ()
    assert first.pod == {"namespace": "ml", "pod": "train-0", "container": "trainer"}
    assert second.pod == {}


def test_a_pod_that_starts_later_is_found(tree: ProcTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are listed again, not at every read."""
    now = [10**12]
    monkeypatch.setattr(holders, "monotonic_ns", lambda: now[0])
    tree.start(42, f"/kubepods/pod{POD_UID}/{CONTAINER}")
    known = found(tree)
    assert [one.pod for one in known.of([42]) or ()] == [{"pod_uid": POD_UID}]

    tree.log("train-0", "ml", "trainer")
    assert [one.pod for one in known.of([42]) or ()] == [{"pod_uid": POD_UID}]
    now[0] += holders.LIST_NS
    assert [one.pod["pod"] for one in known.of([42]) or ()] == ["train-0"]


def test_an_id_that_is_given_again_is_another_process(tree: ProcTree) -> None:
    """A process that ended is no holder, and the next of its id is not taken for it."""
    tree.start(42, V2.format(job=7), TOLD)
    tree.start(43, V2.format(job=7))
    known = found(tree)
    assert [one.job["job_id"] for one in known.of([42, 43]) or ()] == ["7", "7"]

    tree.end(42)
    assert [one.job["job_id"] for one in known.of([42, 43]) or ()] == ["7"]
    tree.start(42, V2.format(job=8), start=200)
    assert [one.job["job_id"] for one in known.of([42, 43]) or ()] == ["8", "7"]


def test_what_nobody_can_know_is_not_nobody(tree: ProcTree) -> None:
    """No process is none; processes that are not in our /proc, or too many, are unknown."""
    known = found(tree)
    assert known.of([]) == []
    assert known.of([42]) is None
    for pid in range(holders.MOST_PROCESSES + 1):
        tree.start(pid + 1)
    assert known.of(range(1, holders.MOST_PROCESSES + 2)) is None
    assert len(known.of(range(1, holders.MOST_PROCESSES + 1)) or ()) == holders.MOST_PROCESSES


def test_an_environment_that_hangs_holds_up_nobody(tree: ProcTree) -> None:
    """The kernel may not answer while a process hangs in the driver; its job is known still."""
    tree.start(42, V2.format(job=7), b"")
    (tree.proc / "42/environ").unlink()
    os.mkfifo(tree.proc / "42/environ")  # its reader waits for a writer that does not come
    tree.start(43, V2.format(job=8), {**TOLD, "SLURM_JOB_ID": "8"})
    known = found(tree)

    for _ in range(3):
        assert [one.job["job_id"] for one in known.of([42, 43]) or ()] == ["7", "8"]
    known.forget(2**60)
    assert [one.job["job_id"] for one in known.of([42, 43]) or ()] == ["7", "8"]
    with (tree.proc / "42/environ").open("wb") as writer:  # the thread goes on
        writer.write(b"SLURM_JOB_ID=7\0SLURM_JOB_NAME=late")
    for _ in range(500):
        names = [one.job.get("job_name") for one in known.of([42, 43]) or ()]
        if names == ["late", "llm train"]:
            break
        known._environments._answered.wait(0.01)
    assert names == ["late", "llm train"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start processes of others")
@pytest.mark.parametrize("kept", [(), CAPABILITIES["counters"]])
def test_what_reads_environments_of_others(kept: tuple[str, ...]) -> None:
    """The capabilities of the duty that tells of jobs are enough to read one, and none is not."""
    code = """if True:
        import sys, time
        from pathlib import Path
        from gpuwatch.environment import Environments
        asked, answer = Environments(Path("/proc")), None
        while answer is None:
            answer = asked.ask((int(sys.argv[1]), b"0"))
            time.sleep(0.01)
        print(answer.get(b"SLURM_JOB_ID", b"").decode())
    """
    with subprocess.Popen(["sleep", "60"], user=65534, env={"SLURM_JOB_ID": "7"}) as other:
        try:
            command = [sys.executable, "-c", code, str(other.pid)]
            child = subprocess.run(
                command, preexec_fn=confine(kept), capture_output=True, text=True, check=True
            )
        finally:
            other.kill()

    assert child.stdout.strip() == ("7" if kept else "")


def test_which_hosts_run_jobs(tree: ProcTree) -> None:
    """Slurm and Kubernetes leave groups or logs; another host has none."""
    assert not schedules(tree.sys, tree.logs)
    for path in (
        *("system.slice/slurmd.service", "devices/slurm", "system.slice/n1_slurmstepd.scope"),
        *("kubepods.slice", "cpu,cpuacct/kubepods"),
    ):
        tree.group(path)
        assert schedules(tree.sys, tree.logs), path
        for part in (tree.sys / "fs/cgroup" / path, *(tree.sys / "fs/cgroup" / path).parents):
            if part.name == "cgroup":
                break
            part.rmdir()
    tree.log("a", "b", "c")
    assert schedules(tree.sys, tree.logs)


def exposed(tenants: list[Tenant]) -> list[dict[str, str]]:
    """Return the labels of tenants of GPU 0 as a Prometheus reads them off the page."""
    gpu = Entity("gpu", "0")
    tick = Tick(0, 250_000_000)
    tick.windows[gpu] = {
        column_name(TENANTS, kind): Window.steady(0, 250_000_000, 1.0)
        for kind in ("job", "pod", "process")
    }
    page = Exposition().render(Snapshot(Totals(), ticks=(tick,), tenants=tenants)).decode()
    return [
        sample.labels
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("gpuwatch_gpu_")
    ]


@settings(max_examples=60, deadline=None)
@given(
    cgroup=st.one_of(
        st.binary(max_size=200),
        st.sampled_from([V1, V2, f"/kubepods/pod{POD_UID}/{CONTAINER}"]).map(str.encode),
    ),
    name=st.binary(max_size=20),
    texts=st.lists(st.binary(max_size=300), min_size=4, max_size=4),
    log=st.binary(min_size=1, max_size=60),
)
def test_whatever_users_write_can_be_scraped(
    tmp_path_factory: pytest.TempPathFactory,
    cgroup: bytes,
    name: bytes,
    texts: list[bytes],
    log: bytes,
) -> None:
    """No bytes of a name, a group or an environment break a line, or reach it unprintable."""
    tree = ProcTree(tmp_path_factory.mktemp("hostile"))
    environ = b"\0".join(
        [
            b"SLURM_JOB_ID=7",
            b"SLURM_JOB_NAME=" + texts[0],
            b"SLURM_JOB_USER=" + texts[1],
            texts[2],
            b"SLURM_JOB_ACCOUNT=" + texts[3],
        ]
    )
    tree.start(42, cgroup.replace(b"{job}", b"7"), environ, name=name)
    tree.logs.mkdir()
    safe = log.replace(b"/", b"").replace(b"\0", b"")
    path = os.fsencode(tree.logs) + b"/" + safe + b"_n_c-" + CONTAINER.encode() + b".log"
    with open(path, "wb"):  # noqa: PTH123 - a name of bytes
        pass
    one = holder(tree)
    kinds = {
        "job": Kind(("job_id",), lambda one: one.job),
        "pod": Kind(("pod_uid",), lambda one: one.pod),
        "process": Kind(("user",), lambda one: {"user": one.user, "command": one.command}),
    }
    tenants = [
        tenant
        for kind, about in kinds.items()
        for tenant in tenants_of(kind, about, {Entity("gpu", "0"): [one]})
    ]

    for tenant in tenants:
        for text in tenant.labels.values():
            assert text.isprintable()
            assert len(text) <= holders.MOST_CHARACTERS
    assert exposed(tenants) == [{"gpu": "0", **tenant.labels} for tenant in tenants]

"""Who uses each GPU, on the page of a real daemon: jobs, pods, processes, and none that is gone."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
from fake_nvml import mig_uuid
from node import Node, quiet
from proc_tree import CONTAINER, POD_UID, V1, V2, ProcTree
from running import Running, wait_for

LISTS = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
)
TWO = [{"gi": 1, "slices": 3, "memory": 40448}, {"gi": 2, "slices": 3, "memory": 40448}]


class Watched:
    """A node of five GPUs, each for a test or two, whose daemon sees a made-up /proc."""

    def __init__(self, directory: Path) -> None:
        self.node = Node(directory, 5)
        self.tree = ProcTree(directory)
        self.tree.group("system.slice/slurmstepd.scope")
        config = quiet("nvml_state", "jobs", "processes")
        logs = f'[counters]\ncontainer_logs = "{self.tree.logs}"'
        self.config = config.replace("[counters]", logs)

    def start(self) -> Running:
        self.running = self.node.running("--path.procfs", str(self.tree.proc), config=self.config)
        return self.running

    def put(self, gpu: int | str, *pids: int, list_: int = 0) -> None:
        """Have the driver list these processes of a GPU from now on."""
        listed = [[pid, 2**30, 2**32 - 1, 2**32 - 1] for pid in pids]
        self.node.now(LISTS[list_], dev=gpu, val=listed)

    def infos(self, kind: str, gpu: int | None = None) -> list[dict[str, str]]:
        """Return the labels of each series of a kind, but for the GPU's own uuid."""
        found = []
        for name in self.running.scrape():
            metric, _, rest = name.partition("{")
            if metric == f"gpuwatch_gpu_{kind}_info":
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', rest))
                if gpu is None or labels["gpu"] == str(gpu):
                    found.append(labels)
        return sorted(found, key=lambda labels: sorted(labels.items()))

    def jobs(self, gpu: int) -> list[tuple[str, str]]:
        return [(labels["job_id"], labels["user"]) for labels in self.infos("job", gpu)]

    def count(self, kind: str, gpu: int = 0) -> float | None:
        labels = (f'gpu="{gpu}"', f'kind="{kind}"')
        return self.running.value("gpuwatch_gpu_tenants", *labels)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    watched = Watched(tmp_path_factory.mktemp("jobs"))
    with watched.start():
        yield watched


def test_jobs_that_share_a_gpu_and_one_that_ends(watched: Watched) -> None:
    """Each has its series, whatever list its processes are on; it goes with its last process."""
    tree = watched.tree
    told = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": 'a "b"\\\nc', "SLURM_JOB_USER": "carla"}
    tree.start(101, V2.format(job=7))
    tree.start(102, V2.format(job=7), told)
    tree.start(103, f"5:devices:{V1.format(job=8)}\n", uid=1_234_568)
    tree.start(104, "/system.slice/ssh.service", uid=1_234_569, name=b"bare")
    watched.put(0, 101, 102, 104)
    watched.put(0, 103, list_=2)
    watched.put(1, 103, list_=1)

    wait_for(lambda: watched.jobs(0) == [("7", "1234567"), ("8", "1234568")])
    wait_for(lambda: watched.jobs(1) == [("8", "1234568")])
    first = watched.infos("job", 0)[0]
    assert first["job_name"] == 'a \\"b\\"\\\\\N{REPLACEMENT CHARACTER}c'
    assert first["uuid"].startswith("GPU-")
    wait_for(lambda: watched.count("process") == 4)
    assert {(one["user"], one["command"]) for one in watched.infos("process", 0)} == {
        ("1234567", "python3"),
        ("carla", "python3"),
        ("1234568", "python3"),
        ("1234569", "bare"),
    }
    assert watched.count("job") == 2
    assert watched.count("job", 2) == 0
    assert watched.infos("pod") == []

    watched.put(0, 101, 102, 104)
    watched.put(0, list_=2)
    wait_for(lambda: watched.jobs(0) == [("7", "1234567")])
    assert watched.jobs(1) == [("8", "1234568")]


def test_instances_have_their_own(watched: Watched) -> None:
    """Who is in an instance of a divided GPU is told of that instance."""
    tree = watched.tree
    tree.log("train-0", "ml", "trainer")
    tree.start(111, V2.format(job=9))
    tree.start(112, f"/kubepods/burstable/pod{POD_UID}/{CONTAINER}", {"SLURM_JOB_ID": "3"})
    watched.node.now("mig", dev=3, val=TWO)
    watched.put(mig_uuid(3, 1), 111)
    watched.put(mig_uuid(3, 2), 112)

    wait_for(lambda: len(watched.infos("job", 3)) == len(watched.infos("pod", 3)) == 1)
    place = {"gpu": "3", "gpu_instance": "1", "uuid": mig_uuid(3, 1)}
    assert watched.infos("job", 3) == [{**place, "job_id": "9", "user": "1234567"}]
    place |= {"gpu_instance": "2", "uuid": mig_uuid(3, 2)}
    names = {"namespace": "ml", "pod": "train-0", "container": "trainer", "pod_uid": POD_UID}
    assert watched.infos("pod", 3) == [{**place, **names}]
    assert (watched.count("job", 3), watched.count("pod", 3)) == (1, 1)
    told = watched.running.status()["gpus"][3]["tenants"]
    assert [one["entity"] for one in told if one["kind"] == "pod"] == [["gpu_instance", "3/2"]]


def test_thousands_do_not_flood_the_page(watched: Watched) -> None:
    """At most 16 of a kind are shown of a GPU, the rest is counted; of too many nothing is said."""
    for number in range(40):
        watched.tree.start(2000 + number, V2.format(job=number))
    watched.put(2, *range(2000, 2040))
    wait_for(lambda: watched.count("job", 2) == 40)
    wait_for(lambda: len(watched.infos("job", 2)) == 16)
    assert len(watched.infos("process", 2)) == 1

    watched.put(2, *range(2000, 3000))
    wait_for(lambda: watched.count("job", 2) is None)
    assert watched.infos("job", 2) == []
    assert watched.running.status()["sources"]["jobs"]["state"] == "on"


def test_processes_of_another_world_are_unknown(watched: Watched) -> None:
    """What the driver lists and our /proc does not have belongs to nobody we know, not to none."""
    assert watched.count("job", 4) == 0
    watched.put(4, 77)
    wait_for(lambda: watched.count("job", 4) is None)
    watched.put(4)
    wait_for(lambda: watched.count("job", 4) == 0)


def test_nothing_is_told_of_a_lost_gpu(watched: Watched) -> None:
    """A GPU that does not answer has no job that anybody knows of."""
    watched.tree.start(121, V2.format(job=12))
    watched.put(2, 121)
    wait_for(lambda: watched.jobs(2))
    watched.node.now("any", "GPU_IS_LOST", dev=2)
    wait_for(lambda: watched.jobs(2) == [] and watched.count("job", 2) is None)
    assert watched.count("job") == 1


def test_a_reader_that_stopped_tells_of_nobody(watched: Watched) -> None:
    """Who was there when the sampler was last heard of is not served as if it still was."""
    watched.tree.start(131, V2.format(job=13))
    watched.put(0, 131)
    wait_for(lambda: watched.jobs(0))
    child = watched.running.child("counters")
    os.kill(child, signal.SIGSTOP)
    try:
        wait_for(lambda: watched.infos("job") == [])
    finally:
        os.kill(child, signal.SIGCONT)


def test_a_host_without_schedulers_is_told_once(tmp_path: Path) -> None:
    """There the source rests, and processes are not told of unless somebody asks."""
    with Node(tmp_path, 1).running(config=quiet("nvml_state", "mig", "jobs")) as running:
        (event,) = wait_for(lambda: running.events("source_unsupported"))
        assert "neither Slurm nor Kubernetes" in event["detail"]
        assert running.status()["sources"]["jobs"]["state"] == "unsupported"
        assert not any("gpu_tenants" in name for name in running.scrape())


def test_the_queries_of_the_document_are_some() -> None:
    """What docs/jobs.md says to ask is PromQL."""
    text = (Path(__file__).parent.parent / "docs/jobs.md").read_text()
    blocks = re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
    queries = [query for block in blocks for query in block.strip().split("\n\n")]
    assert len(queries) >= 5
    for query in queries:
        promql_parser.parse(query)

"""What the daemon starts, skips and asks for again, on a clock that is set by hand."""

import sys
from types import SimpleNamespace

import pytest
from ticks import GPU, SECOND, node, tick

from gpuwatch import canary_host, canary_runner
from gpuwatch.baseline import Baseline
from gpuwatch.canary_ledger import REASONS
from gpuwatch.canary_runner import CanaryRunner
from gpuwatch.signals import HOST, Entity
from gpuwatch.source import EntityInfo
from gpuwatch.store import Store

IDLE = {"gpu_utilization_ratio": 0.0, "gpu_processes": 0.0}
OK = {"canary": "matmul", "gpu": 0, "result": "ok"}


class Daemon:
    """As much of a daemon as the runner asks of one; its GPU is idle."""

    def __init__(self, directory, monkeypatch):
        (directory / "self/ns").mkdir(parents=True)
        (directory / "self/ns/pid").symlink_to(canary_host.HOST_PIDS)
        settings = {"enabled": True, "python": sys.executable, "run": ["matmul", "pcie"]}
        settings |= {"size": "small", "seed_seconds": 20.0}
        settings |= {"interval_seconds": 3600.0, "settle_seconds": 10.0}
        paths = {"procfs": str(directory), "sysfs": "/sys"}
        self.config = {"source": {"kind": "nvml"}, "canary": settings, "paths": paths}
        self.runtime, self.made_up = directory, False
        self.feed = SimpleNamespace(entities=[EntityInfo(GPU, {"uuid": "GPU-0"})])
        self.leases = SimpleNamespace(released={"gpus": False, "canaries": False})
        self.baseline = Baseline(Store(None))
        self.store = SimpleNamespace(numbers={"0000:1b:00.0": 0})
        self.skips, self.taken, self.jobs, self.ended = [], [], [], []
        self.again = False
        self.canary_ledger = SimpleNamespace(
            take=lambda result: self.taken.append(result) or self.again,
            skipped=lambda canary, gpu, reason: self.skips.append((canary, gpu, reason)),
        )
        self.supervisor = SimpleNamespace(spawn=self.spawn, cancel=self.ended.append)
        self.columns = IDLE
        self.now = 1000
        monkeypatch.setattr(canary_runner, "monotonic_ns", lambda: self.now * SECOND)
        monkeypatch.setattr(canary_host, "processes", lambda lock: [])  # nor of tests beside
        self.runner = CanaryRunner(self)

    @property
    def ticks(self):
        return (tick(self.now * SECOND, self.columns),)

    def spawn(self, kind, settings, deadline_seconds, done):
        assert kind == "canaries"
        assert deadline_seconds > 300 * len(settings["canaries"])
        self.jobs.append((settings, done))
        return len(self.jobs)

    def live(self, seconds):
        for _ in range(seconds):
            self.now += 1
            self.runner.look(self.now * SECOND)

    def end(self, status=0):
        """Have the last job end."""
        self.jobs[-1][1]({"status": status, "output": "", "late": False})


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    return Daemon(tmp_path, monkeypatch)


def test_a_job_has_what_it_needs(daemon):
    """One at a time, with the GPU, its canaries and where to hand results over."""
    daemon.live(60)
    ((settings, _),) = daemon.jobs
    assert (settings["canaries"], settings["gpus"]) == (["matmul", "pcie"], [0])
    assert (settings["python"], settings["size"]) == (sys.executable, "small")
    assert settings["numbers"] == {"0000:1b:00.0": 0}
    daemon.runner.take([OK, {**OK, "canary": "pcie"}])
    daemon.end()
    daemon.live(60)
    assert len(daemon.jobs) == 2  # it has no baseline yet
    assert daemon.skips == []


@pytest.mark.parametrize(
    ("hinder", "reason"),
    [
        (lambda daemon: daemon.leases.released.update(gpus=True), "released"),
        (lambda daemon: daemon.leases.released.update(canaries=True), "paused"),
        (lambda daemon: setattr(daemon, "columns", {**IDLE, "gpu_processes": 1.0}), "busy"),
        (lambda daemon: setattr(daemon, "columns", {}), "busy"),
    ],
)
def test_a_turn_that_cannot_be_is_a_skip(daemon, hinder, reason):
    """It is counted once, with its reason, and no job is started."""
    hinder(daemon)
    daemon.live(60)
    assert daemon.jobs == []
    assert daemon.skips == [("matmul", 0, reason), ("pcie", 0, reason)]
    assert reason in REASONS


def test_what_is_not_believed_is_run_again(daemon):
    """That canary alone, within seconds, on that GPU; also if a user's command found it."""
    daemon.live(40)
    daemon.runner.take([OK, {**OK, "canary": "pcie"}])
    daemon.again = True
    judged = daemon.runner.take([OK])
    (found,) = judged
    assert (found["retest"], found["loss"], found["node_loss"]) == (True, None, None)
    daemon.end()
    daemon.live(12)
    assert daemon.jobs[-1][0]["canaries"] == ["matmul"]


def test_copies_to_the_host_are_not_measured_beside_a_job(daemon, monkeypatch):
    """GPUs share bridges: one that is slow beside a neighbour's job is no slow GPU."""
    other = Entity("gpu", "1")
    daemon.feed.entities = [*daemon.feed.entities, EntityInfo(other, {"uuid": "GPU-1"})]
    beside = {"gpu_processes": 1.0, "gpu_utilization_ratio": 0.9}
    ticks = property(lambda self: (node(self.now * SECOND, {GPU: self.columns, other: beside}),))
    monkeypatch.setattr(Daemon, "ticks", ticks)
    daemon.live(60)
    assert [settings["canaries"] for settings, _ in daemon.jobs] == [["matmul"]]
    assert ("pcie", 0, "busy") in daemon.skips
    daemon.runner.take([OK])
    daemon.end()
    beside["gpu_utilization_ratio"] = 0.0  # a process that only is there
    daemon.live(60)
    assert daemon.jobs[1][0]["canaries"] == ["matmul", "pcie"]


def test_a_sum_of_some_gpus_is_taken_again_of_those(daemon, monkeypatch):
    """One of a part of the node says nothing of the whole; one of all is as the turn of all."""
    gpus = [Entity("gpu", str(number)) for number in range(4)]
    daemon.feed.entities = [EntityInfo(gpu, {"uuid": f"GPU-{gpu.id}"}) for gpu in gpus]
    daemon.again, wanted = True, []
    monkeypatch.setattr(
        daemon.runner._schedule, "want", lambda canary, gpus, _: wanted.append((canary, gpus))
    )
    for told in ("2,0", "0,1,2,3", "8,9", "all", None):
        daemon.runner.take(
            [{"canary": "allreduce", "gpu": None, "environment": told and {"gpu_set": told}}]
        )
    assert wanted == [("allreduce", (0, 2)), *[("allreduce", ())] * 4]


def test_a_node_that_is_slower_as_a_whole_is_told_with_each_result(daemon):
    """No GPU of it has a loss of its own then."""
    node = {HOST: {"canary_node_loss_ratio": 0.2}, GPU: {'canary_loss_ratio{canary="matmul"}': 0.0}}
    daemon.baseline.facts = lambda _: node
    (judged,) = daemon.runner.take([OK])
    assert (judged["loss"], judged["node_loss"]) == (0.0, 0.2)


def test_quiet_comes_when_the_job_has_ended(daemon):
    """What it has not come to is skipped for that reason; who waits is told nobody runs."""
    told = []
    daemon.live(40)
    daemon.runner.take([OK])
    daemon.runner.quiet("paused", told.append)
    daemon.leases.released["canaries"] = True
    assert daemon.ended == [1]
    daemon.live(2)
    assert told == []
    daemon.end()
    daemon.live(1)
    assert told == [[]]
    assert daemon.skips == [("pcie", 0, "paused")]
    daemon.runner.quiet("paused", told.append)
    daemon.live(1)
    assert told == [[], []]


def test_quiet_that_does_not_come_is_told(daemon):
    """After some seconds the answer says that a session goes on."""
    told = []
    with canary_host.only_session(daemon.runtime / canary_host.LOCK) as alone:
        assert alone
        daemon.runner.quiet("paused", told.append)
        daemon.live(20)
    assert told == [[{"pid": 0, "call": "a canary"}]]


def test_nothing_starts_beside_another_session(daemon):
    """The daemon waits for it, and counts no skip."""
    with canary_host.only_session(daemon.runtime / canary_host.LOCK):
        daemon.live(60)
        assert (daemon.jobs, daemon.skips) == ([], [])
    daemon.live(12)
    assert len(daemon.jobs) == 1


def test_a_job_that_fails_is_told_once_and_not_tried_at_once(daemon, caplog):
    """Its canaries are skips for another reason, and the next turn is an hour later."""
    daemon.live(40)
    daemon.end(status=1)
    daemon.live(600)
    assert len(daemon.jobs) == 1
    assert {reason for *_, reason in daemon.skips} == {"other"}
    (line,) = [line for line in caplog.messages if "ended early" in line]
    assert "status 1" in line


def test_what_a_session_left_is_killed_and_only_a_survivor_is_told(daemon, monkeypatch, caplog):
    """Nothing runs until it is gone; a skip says why."""
    left, killed = [7], []
    monkeypatch.setattr(canary_host, "processes", lambda _: list(left))
    monkeypatch.setattr(canary_runner.os, "kill", lambda pid, _: killed.append(pid))
    daemon.live(4)
    assert (killed, daemon.runner.stuck) == ([7, 7], 1)
    assert ["outlived" in line for line in caplog.messages] == [True, False]
    daemon.live(60)
    assert daemon.jobs == []
    assert {reason for *_, reason in daemon.skips} == {"stuck"}
    left.clear()
    daemon.live(20)
    assert (daemon.runner.stuck, len(daemon.jobs)) == (0, 1)
    left.append(8)  # one that ends when it is killed is no fault
    daemon.end()
    daemon.live(3)
    left.clear()
    daemon.live(20)
    assert (killed[-1], daemon.runner.stuck) == (8, 0)


def test_no_step_of_the_wall_clock_starts_or_loses_a_run(tmp_path, monkeypatch):
    """Years ahead, back to 1970 or to and fro: turns come as they do on a clock that is right."""
    starts = []
    for number, step in enumerate((0.0, 1e9, -1.9e9, 3600.0)):
        daemon = Daemon(tmp_path / str(number), monkeypatch)
        daemon.runner._schedule._uniform = lambda low, high: (low + high) / 2
        times = iter(range(10**6))
        monkeypatch.setattr("time.time", lambda s=step, t=times: 2e9 + s * (next(t) % 2 or s > 9e8))
        found = []
        for _ in range(400):
            before = len(daemon.jobs)
            daemon.live(10)
            if len(daemon.jobs) > before:
                found.append(daemon.now)
                daemon.runner.take([OK, {**OK, "canary": "pcie"}])
                daemon.end()
        starts.append(found)
    assert len(starts[0]) > 5
    assert all(found == starts[0] for found in starts)


def test_strangers_results_are_no_reason_to_fail(daemon):
    """Results that make no sense are the ledger's to judge."""
    (judged,) = daemon.runner.take([{}])
    assert (judged["canary"], judged["gpu"], judged["retest"]) == ("None", None, False)
    daemon.again = True
    daemon.runner.take([{"canary": "x", "gpu": "y"}])

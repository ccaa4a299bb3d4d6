"""When a canary's worker measures, and what it reads in NCCL's log."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuwatch import canary_worker
from gpuwatch.canary import Task
from gpuwatch.canary_worker import Stopped, Worker

LOG = Path(__file__).with_name("data") / "nccl.log"  # lines of 2.28.9 on two H200, shortened


class Gpu:
    """A GPU with a clock of its own: `course` gives the seconds of a launch after some of load."""

    def __init__(self, monkeypatch, course):
        self.now = self.since = 0.0
        self.course = course
        clock = SimpleNamespace(
            monotonic=lambda: self.now,
            monotonic_ns=lambda: int(self.now * 1e9),
            sleep=self.idle,
        )
        monkeypatch.setattr(canary_worker, "time", clock)
        self.worker = Worker(Task(canary="matmul", size=1, gpus=["GPU-a"]).settings(""), 1)
        monkeypatch.setattr(self.worker, "phase", lambda name: None)
        monkeypatch.setattr(self.worker, "burst", self.burst)

    def burst(self, launch, count):
        """Be at work for so many launches."""
        took = count * self.course(self.now - self.since)
        self.now += took
        return took

    def idle(self, seconds):
        self.now += seconds
        self.since = self.now


def held(seconds):
    """Return how long a launch takes on an H200 that its power limit holds down, after a while."""
    if seconds < 0.1:
        return 1.40e-3
    return 1.61e-3 if seconds < 0.75 else 1.80e-3


def test_what_is_measured_has_settled(monkeypatch):
    """Neither the first tenth of a second, at full clock, nor what comes with a second's mean."""
    gpu = Gpu(monkeypatch, held)
    for _ in range(3):
        measured = gpu.worker.measure(lambda: None)
        assert measured["seconds"] == pytest.approx(1.61e-3)
        assert measured["spread"] == pytest.approx(0, abs=1e-9)
        assert measured["start_ns"] / 1e9 - gpu.since >= 0.2  # what NVML says lags behind
        before = gpu.now
        gpu.worker.rest(before)
        assert 0.3 < gpu.now - before < 0.6


def test_what_never_settles_is_measured_all_the_same(monkeypatch):
    """Its spread tells; it does not have the GPU for longer than others."""
    gpu = Gpu(monkeypatch, lambda seconds: 1e-3 / (1 + seconds))
    assert gpu.worker.measure(lambda: None)["spread"] > 0.03
    assert gpu.now < 0.8


def test_a_rest_ends_when_somebody_comes(monkeypatch):
    """Who is told to stop does not finish its rest."""
    gpu = Gpu(monkeypatch, held)
    gpu.worker.stopping = True
    with pytest.raises(Stopped):
        gpu.worker.rest(gpu.now)
    assert gpu.now == 0


@pytest.fixture
def worker(tmp_path):
    """Return a worker beside whose results NCCL has written its log, of joining by P2P."""
    shutil.copy(LOG, tmp_path / f"nccl.{os.getpid()}")
    made = Worker(Task(canary="allreduce", size=1, gpus=["GPU-a"]).settings(str(tmp_path)), 1)
    version = SimpleNamespace(version=lambda: (2, 28, 9))
    made.torch = SimpleNamespace(cuda=SimpleNamespace(nccl=version))
    return made


def test_the_log_tells_algorithm_and_transport(worker):
    """The algorithm is that of the collective, and not one of the table of all; P2P is seen."""
    assert worker.nccl() == {"nccl": "2.28.9", "algorithm": "ring"}
    assert worker.transports() == ["P2P"]


@pytest.mark.parametrize(
    ("was", "now", "transports", "algorithm"),
    [
        ("via P2P/CUMEM", "via SHM/direct/direct", ["SHM"], "ring"),
        ("1[1] via P2P/CUMEM", "1[1] via NET/Socket/0", ["NET/Socket"], "ring"),
        ("Algo RING proto SIMPLE", "Algo NVLS proto SIMPLE", ["P2P"], "nvls"),
        ("Algo RING proto SIMPLE", "Algo 0 proto 2", ["P2P"], "tree"),
    ],
)
def test_what_else_it_may_tell(worker, tmp_path, was, now, transports, algorithm):
    """The same log of GPUs that reach each other otherwise, or sum up otherwise."""
    (log,) = tmp_path.glob("nccl.*")
    log.write_text(LOG.read_text().replace(was, now))
    assert (worker.transports(), worker.nccl()["algorithm"]) == (transports, algorithm)


def test_a_log_that_tells_nothing(worker, tmp_path):
    """What is not there is not made up."""
    (log,) = tmp_path.glob("nccl.*")
    log.unlink()
    assert (worker.transports(), worker.nccl()) == ([], {"nccl": "2.28.9"})


# As NCCL's transport/net.cc writes it.
BY_NET = "0[0] -> 1[1] [send] via NET/"


def by(logs, *ways):
    """Write NCCL's log anew, of ranks that are joined by these."""
    for number, way in enumerate(ways):
        text = LOG.read_text().replace("0[0] -> 1[1] via P2P/CUMEM", way)
        (logs / f"nccl.{number}").write_text(text)


@pytest.mark.parametrize(
    ("ways", "name", "detail"),
    [
        (["IB/0/GDRDMA", "IB/1/GDRDMA"], "IB", "by IB, 2 NICs, with GPUDirect RDMA"),
        (["IB/0/GDRDMA", "IB/0"], "IB", "by IB, 1 NICs, partly with GPUDirect RDMA"),
        (["IB/3/Shared"], "IB", "by IB, 1 NICs, without GPUDirect RDMA"),
        (
            ["AWS Libfabric/0/GDRDMA(PCI)/Shared"],
            "AWS Libfabric",
            "by AWS Libfabric, 1 NICs, with GPUDirect RDMA",
        ),
    ],
)
def test_a_network_is_named(worker, tmp_path, ways, name, detail):
    """What all ranks say of it; its name is a part of the environment, for baselines."""
    (tmp_path / f"nccl.{os.getpid()}").unlink()
    by(tmp_path, *(BY_NET + way for way in ways))
    told = worker.canary("allreduce_net").network(worker)
    assert (told["environment"]["network"], told["detail"]) == (name, detail)


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        ([f"{BY_NET}IB/0", f"{BY_NET}Socket/0"], "by sockets, not RDMA"),
        ([f"{BY_NET}IB/0", "0[0] -> 1[1] via SHM/direct/direct"], "by NET/IB, SHM, not by one"),
        (["0[0] -> 1[1] via P2P/CUMEM/read"], "by P2P, not by one network alone"),
        (["0[0] -> 1[1]"], "does not tell"),
    ],
)
def test_what_is_no_network_of_rdma_gives_no_reading(worker, tmp_path, monkeypatch, ways, said):
    """Nothing comes out as network that went by a socket, by NVLink or by memory."""
    (tmp_path / f"nccl.{os.getpid()}").unlink()
    by(tmp_path, *ways)
    errors = []
    monkeypatch.setattr(worker, "error", lambda *told: errors.append(told))
    with pytest.raises(ValueError, match=said):
        worker.canary("allreduce_net").network(worker)
    ((text, cause),) = errors
    assert said in text
    assert cause == "environment"  # it is skipped: that says nothing of the GPUs

"""What the worker of a canary reads in NCCL's log: lines of 2.28.9 on two H200, shortened."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuwatch.canary import Task
from gpuwatch.canary_worker import Worker

LOG = Path(__file__).with_name("data") / "nccl.log"


@pytest.fixture
def worker(tmp_path):
    """Return a worker beside whose results NCCL has written its log."""
    shutil.copy(LOG, tmp_path / f"nccl.{os.getpid()}")
    made = Worker(Task(canary="allreduce", size=1, gpus=["GPU-a"]).settings(str(tmp_path)), 1)
    made.torch = SimpleNamespace(
        cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 28, 9)))
    )
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

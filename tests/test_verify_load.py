"""The load checks of `gpuwatch verify`, on scripted GPUs with an interpreter that only pretends."""

import json
import os
import sys
from pathlib import Path

import pytest
from fake_nvml import environment
from node import Node

from gpuwatch.busy import Host
from gpuwatch.checks import CHECKS
from gpuwatch.examination import Examination
from gpuwatch.verify import Node as Machine
from gpuwatch.verify_facts import collect

WORKER = Path(__file__).with_name("load_worker.py")
LOADS = [check for check in CHECKS if check.phase == "load"]
THERMAL, BRAKE, CAP, SET = 0x40, 0x80, 0x4, 0x2


class Tried:
    """A node whose canaries give what is scripted; `found` are the findings of some checks."""

    def __init__(self, directory, monkeypatch, gpus):
        self.node = Node(directory, gpus)
        self.directory = directory
        self.node.now("nvmlDeviceGetMemoryInfo_v2", val=[80 << 30, 1 << 28, 79 << 30, 4 << 20])
        self.node.now("nvmlDeviceGetUtilizationRates", val=[0, 0])
        for name, value in environment(directory / "script", self.node.library).items():
            monkeypatch.setenv(name, value)
        for name in [name for name in os.environ if name.startswith("NCCL_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("CHANGES", str(directory / "changes"))
        self.python = directory / "python"
        self.python.write_text(f"#!/bin/sh\nexec {sys.executable} {WORKER}\n")
        self.python.chmod(0o755)
        self.change()

    def change(self, **canaries):
        """Have canaries tell something else; of one GPU by the name `matmul_1`."""
        told = {name.replace("_", "/"): change for name, change in canaries.items()}
        (self.directory / "changes").write_text(json.dumps(told))

    def reasons(self, bits, **where):
        for when in ("Throttle", "Event"):
            self.node.now(f"nvmlDeviceGetCurrentClocks{when}Reasons", val=bits, **where)

    def machine(self, **more):
        facts = collect(self.node.sysfs, {}, [])
        return Machine(
            sysfs=self.node.sysfs,
            driver=facts.driver,
            gpus=list(facts.gpus.values()),
            pairs=facts.pairs,
            python=str(self.python),
            scratch=self.directory,
            host=Host(),
            **more,
        )

    def found(self, *names, **more):
        checks = [check for check in LOADS if check.name in names]
        examination = Examination(self.machine(**more), checks, 100.0)
        list(examination.run())
        self.readings = examination.readings
        return examination.findings

    def bad(self, *names, **more):
        return [one for one in self.found(*names, **more) if one.verdict != "PASS"]


@pytest.fixture
def tried(tmp_path, monkeypatch, request):
    return Tried(tmp_path, monkeypatch, getattr(request, "param", 2))


def test_a_healthy_node_passes(tried):
    """Each check of it passes, of every GPU, and nothing is left unsaid."""
    names = [check.name for check in LOADS if check.name not in ("storage", "rdma_loopback")]
    found = tried.found(*names)
    assert [one for one in found if one.verdict != "PASS"] == []
    assert {one.name for one in found} == set(names)

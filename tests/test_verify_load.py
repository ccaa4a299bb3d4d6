"""The load checks of `gpuwatch verify`, on scripted GPUs with an interpreter that only pretends."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from fake_nvml import environment
from node import Node
from running import wait_for

from gpuwatch import slowness
from gpuwatch.busy import Host
from gpuwatch.canary_reading import CanaryReading, Shape
from gpuwatch.canary_text import Standing
from gpuwatch.checks import CHECKS, sustained
from gpuwatch.checks.memory import Memory
from gpuwatch.checks.sustained import Course, Sustained, judged
from gpuwatch.examination import DEEP_SECONDS, QUICK_SECONDS, Examination
from gpuwatch.session import Result
from gpuwatch.signals import Entity
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
        self.node.idle()
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


@pytest.mark.parametrize("tried", [8], indirect=True)
def test_a_slow_gpu_is_named_with_its_cause(tried):
    """Heat, the power brake, a low clock, or none of it: by clock, power and reasons meanwhile."""
    slow = {"factor": 0.8, "lasts": 0.6}
    tried.change(**{f"matmul_{gpu}": slow for gpu in (1, 2, 3, 4)})
    tried.node.now("nvmlDeviceGetClockInfo:sm", val=1_500, dev=2)
    tried.reasons(THERMAL, dev=2)
    tried.reasons(BRAKE | CAP, dev=3)
    tried.node.now("nvmlDeviceGetClockInfo:sm", val=1_584, dev=4)
    tried.reasons(CAP, dev=4)
    bad = [one for one in tried.bad("matmul") if one.measure == "bf16"]
    assert [(one.entity, one.verdict, one.cause) for one in bad] == [
        ("gpu1", "FAIL", "kernel"),
        ("gpu2", "FAIL", "heat"),
        ("gpu3", "FAIL", "power"),
        ("gpu4", "FAIL", "clock"),
    ]
    assert "slow at its full clock (1980 MHz" in bad[0].reason
    assert bad[0].reason.endswith(
        "the same when tried again, alone"
    )  # the first of them is tried again, alone
    assert "heat holds its clocks down 100 % of the time (1500 MHz" in bad[1].reason
    assert "its power limit holds its clock down, that of its siblings is 1980" in bad[3].reason
    assert " W of " not in bad[3].reason  # the driver's power is still of the time before
    assert all(one.next_step for one in bad)
    assert len(tried.readings) == 8 * 3


def test_cards_at_their_power_limit(tried):
    """If all are slow for their model it is no kernel's fault; one that others outdo can be."""
    tried.node.now("nvmlDeviceGetClockInfo:sm", val=1_380)
    tried.reasons(CAP)
    tried.change(matmul={"factor": 0.4})
    bad = tried.bad("matmul")
    assert {one.cause for one in bad} == {"clock"}
    assert "its power limit holds its clock down (1380 MHz of 1980, 41 C, power" in bad[0].reason
    tried.change(matmul_1={"factor": 0.8})
    bad = tried.bad("matmul")
    assert {(one.entity, one.cause) for one in bad} == {("gpu1", "kernel")}
    assert "slow at the clock of its siblings (1380 MHz of 1980" in bad[0].reason
    tried.reasons(0)
    tried.node.now("nvmlDeviceGetClockInfo:sm", val=1_100, dev=1)
    assert "its clock is low, that of its siblings is 1380" in tried.bad("matmul")[0].reason


def test_the_load_of_the_check_before_is_waited_for(tried):
    """The driver still tells its utilization for a moment: that is nobody who uses the GPU."""
    tried.node.now("nvmlDeviceGetUtilizationRates", val=[100, 0], dev=0)
    later = tried.node.script.now_ms() + 1200
    machine = tried.machine()
    tried.node.script.step(later, "nvmlDeviceGetUtilizationRates", val=[0, 0], dev=0)
    tried.node.script.write(tried.directory / "script")
    with machine.session() as session:
        assert {one.result for one in session.run("memory")} == {"ok"}


def test_a_gpu_that_is_slow_in_company_alone(tried):
    """It is tried again without the others, and told apart from one that is always slow."""
    text = """
before = Path(os.environ["CHANGES"] + ".tried")
tell(settings, 0, VALUES["memory"][0], {"factor": 1 if before.exists() else 0.8}, 0)
before.touch()
"""
    tried.change(memory_1={"text": text})
    (one,) = tried.bad("memory")
    assert (one.entity, one.verdict) == ("gpu1", "WARN")
    assert one.reason.endswith("tried again, alone, it gives 2970 GB/s")


def test_a_narrow_link_is_told_from_a_slow_host(tried):
    """The link is seen under load: eight lanes of sixteen, or as it should be."""
    tried.change(pcie={"factor": 0.4})
    tried.node.now("nvmlDeviceGetCurrPcieLinkWidth", val=8, dev=1)
    bad = tried.bad("pcie")
    found = {(one.entity, one.measure): one for one in bad}
    assert {where: (one.verdict, one.cause) for where, one in found.items()} == {
        ("gpu0", "to_gpu"): ("FAIL", "host"),
        ("gpu0", "from_gpu"): ("FAIL", "host"),
        ("gpu1", "to_gpu"): ("FAIL", "link"),
        ("gpu1", "from_gpu"): ("FAIL", "link"),
        ("gpu1", "lanes"): ("FAIL", "link"),
    }
    assert "Gen5 x8 under load, and could be Gen5 x16" in found["gpu1", "to_gpu"].reason
    assert (found["gpu1", "lanes"].value, found["gpu1", "lanes"].expectation) == (8, 16)


def test_a_link_of_an_older_generation(tried):
    """It is a finding of its own, for copies may be just fast enough."""
    tried.node.now("nvmlDeviceGetCurrPcieLinkGeneration", val=4, dev=0)
    (one,) = tried.bad("pcie")
    assert (one.entity, one.measure, one.value) == ("gpu0", "generation", 4)


SLOW_SUM = {"transports": ["SHM"], "factor": 0.05}


def test_a_sum_that_does_not_use_nvlink(tried):
    """Whoever reads it knows that NCCL went through the host's memory."""
    tried.change(allreduce=SLOW_SUM)
    value, transport = tried.bad("allreduce")
    assert (value.entity, value.verdict, value.cause) == ("host", "FAIL", "link")
    assert "NCCL joins the GPUs by SHM" in value.reason
    assert (transport.measure, transport.verdict, transport.value) == ("transport", "FAIL", "SHM")


def test_a_switch_of_nccl_is_named(tried, monkeypatch):
    """Who has switched P2P off is told so, and how to go on."""
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    tried.change(allreduce=SLOW_SUM)
    value, _ = tried.bad("allreduce")
    assert (value.verdict, value.cause) == ("FAIL", "host")
    assert "NCCL_P2P_DISABLE=1 in the environment" in value.reason
    assert value.next_step.endswith("env -u NCCL_P2P_DISABLE gpuwatch verify")


@pytest.mark.parametrize("tried", [8], indirect=True)
def test_a_sweep_and_the_rules_of_the_trade(tried):
    """With time, all sizes are drawn; rules of thumb stand apart, and count for nothing."""
    tried.change(allreduce={"factor": 0.1})
    found = tried.found("allreduce", deep=True)
    (value,) = [one for one in found if one.curve]
    assert (value.verdict, value.value) == ("FAIL", 27e9)
    assert [size for size, _ in value.curve][::7] == [1 << 20, 8 << 30]
    assert dict(value.curve)[float(1 << 20)] == 6e9
    thumbs = {one.measure: one.verdict for one in found if one.thumb}
    assert thumbs == {"floor": "FAIL", "large sums": "WARN"}
    assert [one.size for one in tried.readings][::7] == [1 << 20, 8 << 30]


def test_one_gpu_has_nobody_to_sum_up_with(tmp_path, monkeypatch):
    """That is no fault of the node."""
    (one,) = Tried(tmp_path, monkeypatch, 1).found("allreduce")
    assert (one.verdict, one.cause) == ("SKIP", "host")


@pytest.mark.parametrize("tried", [3], indirect=True)
def test_what_gives_no_value(tried):
    """A wrong result and a crash are failures of that GPU; an interpreter without torch is none."""
    tried.change(
        memory_0={"result": "wrong", "detail": "3 bits"},
        memory_1={"text": "say(phase='context', rank=0); os.kill(os.getpid(), 11)"},
        memory_2={"text": "say(error='no torch', cause='environment')"},
    )
    bad = tried.bad("memory")
    assert {(one.entity, one.verdict, one.cause) for one in bad} == {
        ("gpu0", "FAIL", "memory"),
        ("gpu1", "FAIL", "driver"),
        ("gpu2", "SKIP", "host"),
    }
    assert {one.reason for one in bad} >= {"3 bits", "no torch"}


def test_a_gpu_that_is_lost_under_load(tried):
    """What runs then is not known, what comes after has failed."""
    lost = "time.sleep(1); tell(settings, 0, VALUES['memory'][0], {}, 0)"
    tried.change(memory={"text": f"Path(os.environ['CHANGES'] + '.began').touch(); {lost}"})

    def lose():
        wait_for((tried.directory / "changes.began").exists)
        tried.node.now("any", "GPU_IS_LOST", dev=1)

    thread = threading.Thread(target=lose)
    thread.start()
    bad = tried.bad("memory", "integrity")
    thread.join()
    assert [(one.name, one.entity, one.verdict, one.cause) for one in bad] == [
        ("memory", "gpu1", "UNKNOWN", "driver"),
        ("integrity", "host", "FAIL", "driver"),
    ]
    assert bad[1].reason == "GPU 1: does not answer (gpu_is_lost)"


def test_a_gpu_that_hangs_is_named_in_time(tried, monkeypatch):
    """The others are told of before the check's own time is over."""
    monkeypatch.setattr(Memory, "bound_seconds", lambda *_: 7.0)
    tried.change(memory_1={"text": "say(phase='measure', rank=0); time.sleep(100)"})
    found = tried.found("memory")
    assert [(one.entity, one.verdict) for one in found] == [("gpu1", "FAIL"), ("gpu0", "PASS")]
    assert found[0].reason.startswith("hangs: ")
    assert "in phase measure" in found[0].reason


@pytest.mark.parametrize("tried", [3], indirect=True)
def test_a_load_that_is_not_over_in_time(tried, monkeypatch):
    """It began late: what it did by then counts if that is enough, and it never hangs."""
    monkeypatch.setattr(sustained, "QUICK_SECONDS", 0.3)
    monkeypatch.setattr(Sustained, "bound_seconds", lambda *_: 6.0)
    text = """
for _ in range(%d):
    tell(settings, 0, VALUES["sustained"][0], {}, 0)
say(phase="%s", rank=0)
time.sleep(100)
"""
    tried.change(sustained_0={"text": text % (5, "end")}, sustained_1={"text": text % (0, "join")})
    found = tried.found("sustained")
    bad = [one for one in found if one.verdict != "PASS"]
    assert [(one.entity, one.verdict, one.cause) for one in bad] == [("gpu1", "UNKNOWN", "host")]
    assert bad[0].reason.startswith("not done in ")
    assert {one.entity for one in found if one.measure == "steadiness"} == {"gpu0", "gpu2"}


@pytest.mark.parametrize("tried", [4], indirect=True)
def test_gpus_that_do_not_hold_out(tried, monkeypatch):
    """One becomes slow, one is hot, one is held down by heat: each is told, the last is well."""
    monkeypatch.setattr(slowness, "POWER_SECONDS", 0.3)
    tried.change(sustained_0={"factor": [1, 1, 0.98, 0.9, 0.88, 0.85]})
    tried.node.now("nvmlDeviceGetTemperature", val=88, dev=1)
    tried.node.now("nvmlDeviceGetMarginTemperature", val=1, dev=1)
    tried.reasons(THERMAL, dev=2)
    bad = {(one.entity, one.measure): one for one in tried.bad("sustained")}
    assert set(bad) == {
        ("gpu0", "bf16"),
        ("gpu0", "steadiness"),
        ("gpu1", "temperature"),
        ("gpu2", "held back"),
    }
    slow = bad["gpu0", "steadiness"]
    assert " W of " in bad["gpu0", "bf16"].reason  # it went on for long enough
    assert (slow.verdict, slow.value) == ("FAIL", pytest.approx(0.865))
    assert bad["gpu1", "temperature"].reason == "1 C from where it slows down"
    held = bad["gpu2", "held back"]
    assert (held.verdict, held.cause, held.value) == ("FAIL", "heat", 1.0)


def test_wrong_bits_in_memory(tried):
    """A pattern that was not kept fails its GPU."""
    tried.change(patterns_1={"result": "wrong", "detail": "ones: 1 words are not"})
    (one,) = tried.bad("memory_patterns")
    assert (one.name, one.entity, one.verdict) == ("memory_patterns", "gpu1", "FAIL")


def test_all_bounds_fit_into_the_time():
    """With eight GPUs no check is without time, even if each takes what it may."""
    for deep, most in ((False, QUICK_SECONDS), (True, DEEP_SECONDS)):
        taken = [one.bound_seconds(8, deep) for one in CHECKS if deep or not one.deep_only]
        assert sum(taken) <= most


@pytest.mark.parametrize("tried", [3], indirect=True)
def test_a_number_of_gpus_that_no_table_has(tried):
    """Then the links say what a sum must give at least: half of NVLink, or a fifth of PCIe."""
    value, _ = tried.found("allreduce")
    assert (value.verdict, value.source) == ("PASS", "half of what NVLink carries")
    tried.change(allreduce={"factor": 0.5})
    (value,) = tried.bad("allreduce")
    assert (value.verdict, value.cause) == ("FAIL", "link")
    tried.node.now("nvmlDeviceGetP2PStatus", val=5)
    tried.change(allreduce={"factor": 0.01, "transports": ["SHM"]})
    (value,) = tried.bad("allreduce")
    assert (value.verdict, value.source) == ("WARN", "a fifth of what PCIe carries")


def test_a_context_that_takes_longer_than_it_did(tried):
    """By the trade's rule, beside what the check itself goes by."""
    standing = Standing(
        entity=Entity("gpu", "GPU-00000000-0000-4000-8000-000000000001"),
        shape=Shape("startup"), environment={}, model="", state="normal", current=True,
        newest=1.79e9, readings=50, baseline=0.3, last=0.3, ratio=1.0, expected_ratio=None,
        spread=0.01, loss=0.0, cause="", peers="",
    )  # fmt: skip
    (one,) = tried.bad("startup", standings=[standing])
    assert (one.entity, one.verdict, one.thumb, one.value) == ("gpu1", "WARN", True, 0.6)
    assert one.expectation == pytest.approx(0.5)


def test_five_minutes_above_80_degrees():
    """They are a warning by rule of thumb, and five minutes at 79 are none."""
    for celsius, verdict in ((81.0, "WARN"), (79.0, "PASS")):
        slices = [
            Result(
                canary="sustained",
                gpu=0,
                reading=CanaryReading(
                    canary="sustained", entity=Entity("gpu", "GPU-0"), time=1.8e9, value=7e14
                ),
                told={"start_ns": minute * 60 * 10**9, "end_ns": (minute + 1) * 60 * 10**9},
                seen={0: {"temperature_celsius": celsius, "reasons": {}}},
            )
            for minute in range(5)
        ]
        found = judged(Machine(deep=True), [Course(0, slices)])
        (one,) = [one for one in found if one.thumb]
        assert (one.measure, one.verdict) == ("above 80 C", verdict)

"""The ledger: what becomes of each result of a canary, in events, counts and baselines."""

import time
import tomllib
from pathlib import Path

import pytest
from running import Running, wait_for

from gpuwatch.baseline import Baseline
from gpuwatch.canaries import CANARIES
from gpuwatch.canary_ledger import REASONS, CanaryLedger
from gpuwatch.canary_reading import RESULTS, CanaryReading
from gpuwatch.recorded import Recorded
from gpuwatch.session import Result
from gpuwatch.signals import HOST, Entity
from gpuwatch.store import Store

CONTRACT = tomllib.loads((Path(__file__).parent / "data/metrics.toml").read_text())
PERIOD = 1800.0
USUAL = {
    "matmul": {"size": 8192, "dtype": "bf16", "value": 784e12},
    "integrity": {"size": 4096, "dtype": "int", "value": 0.4},
    "allreduce": {"size": 1 << 28, "gpus": 2, "value": 330e9},
}


def result(canary="matmul", gpu=0, share=1.0, **changes):
    """Return what a session says of a run."""
    entity = ("gpu", f"GPU-{gpu}") if gpu is not None else HOST
    usual = {"time": 0.0, "model": "NVIDIA H200", "environment": {"driver": "1"}, **USUAL[canary]}
    usual["value"] *= share
    forced = changes.pop("forced", False)
    told = {"canary": canary, "entity": entity, **usual, **changes}
    reading = CanaryReading.from_json(told)
    return Result(
        canary=canary, gpu=gpu, reading=reading, detail=reading.detail, forced=forced
    ).to_json()


class Node:
    """A ledger that is fed run after run, with what it tells."""

    def __init__(self, store=None, now=None):
        self.events = []
        self.baseline = Baseline(store or Store(None))
        self.ledger = CanaryLedger(self.baseline, self.events.append)
        self.now = now or time.time() - 100 * PERIOD

    def run(self, count=1, canary="matmul", gpu=0, share=1.0, **changes):
        """Run it so many times, with the retests asked for; return how often the last was taken."""
        for _ in range(count):
            self.now += PERIOD
            taken = 1
            again = self.now
            while self.ledger.take(result(canary, gpu, share, time=again, **changes)):
                taken += 1
                again += 7
        return taken

    def told(self, name):
        return [(event.entity, event.detail) for event in self.events if event.name == name]


def test_sound_readings_move_the_baseline_and_slow_ones_are_taken_again():
    """A slow reading is asked for twice more; the confirmed loss is told once, until it is over."""
    node = Node()
    assert node.run(30) == 1
    assert [node.run(share=0.9) for _ in range(5)] == [3, 3, 3, 1, 1]
    ((about, text),) = node.told("canary_regression")
    assert about == Entity("gpu", "0")
    assert text.startswith("matmul 8192 bf16: 10.0 % under its baseline, 784 TFLOPS")
    node.run(5)
    node.run(4, share=0.9)
    assert len(node.told("canary_regression")) == 2
    assert node.ledger.runs[Entity("gpu", "GPU-0"), "matmul", "ok"] == 30 + 11 + 5 + 10


@pytest.mark.parametrize(
    "changes",
    [
        {"result": "failed", "value": None, "detail": "out of memory"},
        {"result": "aborted", "value": None, "detail": "GPU 0: process 7 came"},
        {"share": 0.5, "forced": True},
        {"share": 0.5, "spread": 0.2},
    ],
)
def test_what_says_nothing_of_the_gpu_moves_nothing(changes):
    """Failed, aborted, forced and noisy runs are counted."""
    node = Node()
    node.run(30)
    before = node.baseline.standings()[0]
    assert node.run(5, **changes) == 1
    after = node.baseline.standings()[0]
    assert (after.baseline, after.state, after.loss) == (before.baseline, "normal", 0.0)
    kind = changes.get("result", "ok")
    assert node.ledger.runs[Entity("gpu", "GPU-0"), "matmul", kind] == 5 + 30 * (kind == "ok")
    failures = [(Entity("gpu", "0"), "matmul: out of memory")] * 5 * (kind == "failed")
    assert node.told("canary_failed") == failures


def test_wrong_bits_name_the_gpu_and_its_witnesses():
    """It is asked for again, and the rule's fact follows the second one."""
    node = Node()
    gpus = {f"GPU-{number}": Entity("gpu", str(number)) for number in range(4)}
    for gpu in range(4):
        node.run(1, "integrity", gpu)
    wrong = {"result": "wrong", "detail": "product 3: rows 17, columns 4 are wrong"}
    first = result("integrity", 2, time=node.now + 60, **wrong)
    assert node.ledger.take(first)
    ((about, text),) = node.told("canary_wrong_result")
    assert about == Entity("gpu", "2")
    assert text == (
        "integrity: product 3: rows 17, columns 4 are wrong; 3 of 3 other GPUs were right when they"
        " last ran"
    )
    assert node.baseline.facts(gpus)[gpus["GPU-2"]]["canary_wrong_results"] == 0
    node.ledger.take(first | {"time": node.now + 67})
    assert node.baseline.facts(gpus)[gpus["GPU-2"]]["canary_wrong_results"] == 1
    assert node.told("canary_regression") == []


def test_a_run_of_several_readings_counts_once_for_each_result():
    """Four dtypes are one run; a fifth that failed makes it a failed one too."""
    node = Node()
    for dtype in ("fp8", "bf16", "fp16", "tf32"):
        node.ledger.take(result(dtype=dtype, time=node.now))
    node.ledger.take(result(result="failed", value=None, time=node.now))
    assert dict(node.ledger.runs) == {
        (Entity("gpu", "GPU-0"), "matmul", "ok"): 1,
        (Entity("gpu", "GPU-0"), "matmul", "failed"): 1,
    }


def test_skips_count_by_reason_and_all_reasons_are_there():
    """A reason that nobody declared is "other"; a canary that nobody knows is none."""
    node = Node()
    assert set(node.ledger.skips.values()) == {0}
    assert len(node.ledger.skips) == len(CANARIES) * len(REASONS)
    node.ledger.skipped("matmul", 0, "busy")
    node.ledger.skipped("matmul", None, "full moon")
    node.ledger.skipped("juggling", 0, "busy")
    node.ledger.take(Result(canary="pcie", gpu=1, detail="no torch").to_json())
    counted = {key: count for key, count in node.ledger.skips.items() if count}
    assert counted == {("matmul", "busy"): 1, ("matmul", "other"): 1, ("pcie", "not_ready"): 1}


@pytest.mark.parametrize("told", [{}, {"canary": "x"}, {"canary": "matmul", "time": "never"},
                                  {"canary": "matmul", "entity": 5, "time": 1e400, "size": 1e400},
                                  {"canary": None, "result": "skipped"}])  # fmt: skip
def test_a_result_that_makes_no_sense_is_told(told):
    """And nothing else comes of it."""
    node = Node()
    assert node.ledger.take(told) is False
    assert len(node.told("canary_failed")) == (told.get("result") != "skipped")
    assert not node.ledger.runs
    assert set(RESULTS) == {"ok", "wrong", "failed", "aborted"}


SLOW = """
[simulated]
gpus = 4
fault_after_seconds = 6.0
[recorder]
free_ratio = 0
after_seconds = 1.0
[rules.canary_regression_matmul_severe]
hold_seconds = 1.0
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Run a node of which a GPU becomes slower."""
    directory = tmp_path_factory.mktemp("slow")
    with Running(directory, "--source", "simulated:slow-gpu", config=SLOW) as running:
        yield running


def test_a_simulated_node_serves_all_metrics_of_canaries(slow):
    """GPU by GPU, then what all do together: each family of the contract has a value."""
    together = 'gpuwatch_canary_baseline_ratio{canary="allreduce"}'
    page = wait_for(lambda: (page := slow.scrape()) and together in page and page, 60)
    families = {name for name in CONTRACT if name.startswith("gpuwatch_canary_")}
    assert families <= {series.partition("{")[0] for series in page}
    assert len(families) == 8
    ratio = slow.value("gpuwatch_canary_baseline_ratio", 'canary="memory"', 'gpu="0"')
    assert ratio == pytest.approx(1, abs=0.02)
    skipped = slow.value("gpuwatch_canary_skipped_total", 'canary="allreduce"', 'reason="mig"')
    assert skipped == 0


def test_a_gpu_that_became_slower_is_found(slow):
    """The regression fires for it alone, is told, and its recording has the readings."""
    rule = "canary_regression_matmul_severe"

    def alert():
        found = slow.alert(rule)
        return found and found["state"] == "firing" and found["recording"] and found

    found = wait_for(alert, 120)
    assert found["entity"] == ["gpu", "2"]
    assert found["value"] == pytest.approx(0.08, abs=0.01)
    firing = {one["entity"][1] for one in slow.status()["alerts"] if "canary" in one["rule"]}
    assert firing == {"2"}
    (event,) = slow.events("canary_regression")
    assert event["entity"] == ["gpu", "2"]
    assert event["detail"].endswith("the clock was low, this GPU alone")
    recorded = Recorded(slow.directory / "state/recordings" / found["recording"])
    (course,) = (
        one
        for one in recorded.canaries
        if (one["canary"], one["dtype"], one["entity"]) == ("matmul", "bf16", ["gpu", "2"])
    )
    recorded.close()
    assert course["state"] == "regression"
    assert [one["judged"] for one in course["readings"]].count("regression") >= 1
    assert {one["seconds"] for one in course["readings"]} == {1.1}

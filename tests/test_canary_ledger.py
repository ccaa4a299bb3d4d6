"""The ledger: what becomes of each result of a canary, in events, counts and baselines."""

import random
import sqlite3
import time
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
from running import Running, wait_for

from gpuwatch.baseline import Baseline
from gpuwatch.baseline_table import FAILED_KEPT
from gpuwatch.canaries import CANARIES
from gpuwatch.canaries import USUAL as UNASKED
from gpuwatch.canary_ledger import REASONS, CanaryLedger
from gpuwatch.canary_reading import RESULTS, CanaryReading
from gpuwatch.recorded import Recorded
from gpuwatch.session import Result
from gpuwatch.signals import HOST, Entity
from gpuwatch.standings import Standings
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
    told = []
    again = CanaryLedger(node.baseline, told.append)  # after a restart it is no news
    again.take(result(share=0.9, time=node.now + PERIOD))
    assert told == []
    assert node.ledger.runs["matmul", "ok"] == 30 + 11 + 5 + 10


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
    assert node.ledger.runs["matmul", kind] == 5 + 30 * (kind == "ok")
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
    counted = {key: count for key, count in node.ledger.runs.items() if count}
    assert counted == {("matmul", "ok"): 1, ("matmul", "failed"): 1}


def test_skips_count_by_reason_and_all_reasons_are_there():
    """A reason that nobody declared is "other"; a canary that nobody knows is none."""
    node = Node()
    assert set(node.ledger.skips.values()) == {0}
    assert len(node.ledger.skips) == len(UNASKED) * len(REASONS)
    chosen = CanaryLedger(node.baseline, node.events.append, CANARIES)
    assert len(chosen.skips) == len(CANARIES) * len(REASONS)
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
    assert set(node.ledger.runs.values()) == {0}
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


def test_a_replay_shows_what_its_recording_holds(slow, tmp_path):
    """Courses and metrics of the recorded node, as if they were of now."""
    recording = wait_for(
        lambda: (slow.alert("canary_regression_matmul_severe") or {}).get("recording"), 120
    )
    file = slow.directory / "state/recordings" / recording
    wait_for(file.exists, 60)
    with Running(tmp_path, "--source", f"replay:{file}") as replay:
        wanted = ("gpuwatch_canary_baseline_ratio", 'dtype="bf16"', 'gpu="2"')
        ratio = wait_for(lambda: replay.value(*wanted), 60)
        assert ratio == pytest.approx(0.92, abs=0.01)
        last = replay.value("gpuwatch_canary_last_success_timestamp_seconds", "matmul", 'gpu="2"')
        assert 0 < time.time() - last < 600
        worst = replay.status()["canaries"]["worst"]
        assert next(one for one in worst if one["canary"] == "matmul")["entity"] == ["gpu", "2"]
        runs = ("gpuwatch_canary_runs_total", '"matmul"', '"ok"')
        assert wait_for(lambda: replay.value(*runs) is not None)
        assert replay.value(*runs) == 0  # none ran here


# What nobody hopes for.


def test_results_in_any_order_add_up():
    """Whatever comes, of whom and when: nothing is raised, and each run is counted once."""
    rng = random.Random(5)
    now = time.time()
    for _ in range(5):
        node = Node()
        told = []
        for number in range(120):
            kind = rng.choice(RESULTS)
            canary, gpu = rng.choice([*((name, gpu) for name in ("matmul", "integrity")
                                        for gpu in range(3)), ("allreduce", None)])  # fmt: skip
            changes = {
                "time": now - rng.choice([0, 10, 60, 1e4, 1e6, -1e5, -1e9]) - number / 1e3,
                "result": kind,
                "share": rng.choice([1, 1, 1, 0.9, 0.5, 1e-300]),
                "spread": rng.choice([None, 0.001, 0.5]),
                "environment": {"driver": rng.choice("12")},
            }
            if rng.random() < 0.2 or kind in ("failed", "aborted"):
                changes["value"] = None
            told.append(result(canary, gpu, forced=rng.random() < 0.1, **changes))
        told += [{}, {"result": "skipped"}, {"canary": "matmul", "result": "skipped", "gpu": 1}]
        rng.shuffle(told)
        for one in told:
            assert node.ledger.take(one) in (True, False)
            standings = Standings()
            standings.look(node.baseline, {"GPU-0": Entity("gpu", "0")}, node.ledger.runs)
        assert sum(node.ledger.runs.values()) == len(told) - 3
        assert sum(node.ledger.skips.values()) == 1
        assert node.baseline.facts({"GPU-0": Entity("gpu", "0")}) is not None
        assert len(node.told("canary_failed")) == 1 + sum(
            one.get("result") == "failed" for one in told
        )


def test_failed_runs_outlive_a_restart_within_a_bound(tmp_path):
    """The last ones of each canary on each GPU."""
    path = tmp_path / "state/gpuwatch.sqlite"
    store = Store(path)
    node = Node(store)
    node.run(2 * FAILED_KEPT, result="failed", value=None, detail="out of memory")
    node.run(1, gpu=1, result="aborted", value=None, detail="process 7 came")
    store.close()
    store = Store(path)
    again = Node(store)
    assert {key: len(runs) for key, runs in again.baseline.log.failed.items()} == {
        (Entity("gpu", "GPU-0"), "matmul"): FAILED_KEPT,
        (Entity("gpu", "GPU-1"), "matmul"): 1,
    }
    standings = Standings()
    standings.look(again.baseline, {"GPU-1": Entity("gpu", "1")}, now=node.now)
    shown = {one["uuid"]: one["text"] for one in standings.courses}
    assert shown == {"GPU-0": "failed: out of memory", "GPU-1": "aborted: process 7 came"}
    store.close()


def test_what_is_a_week_old_is_shown_no_more():
    """Also if nothing else comes: canaries may have been paused since."""
    node = Node()
    node.run(3)
    standings = Standings()
    gpus = {"GPU-0": Entity("gpu", "0")}
    standings.look(node.baseline, gpus, node.ledger.runs, now=node.now)
    counts = {"canary_runs_total", "canary_skipped_total"}
    assert not {one.name for one in standings.samples} <= counts
    standings.look(node.baseline, gpus, node.ledger.runs, now=node.now + 8 * 86_400)
    assert (list(standings.courses), standings.brief) == ([], {})
    assert {one.name for one in standings.samples} <= counts


def test_failed_runs_wait_for_a_disk_that_is_full(tmp_path):
    """They are shown meanwhile, and written when there is room."""
    blocked = tmp_path / "state"
    blocked.write_text("no directory")
    store = Store(blocked / "gpuwatch.sqlite")
    node = Node(store)
    node.run(3, result="failed", value=None)
    assert "kept in memory only" in store.fault
    assert len(node.baseline.log.failed[Entity("gpu", "GPU-0"), "matmul"]) == 3
    blocked.unlink()
    node.run(1)
    store.close()
    again = Node(Store(blocked / "gpuwatch.sqlite"))
    assert len(again.baseline.log.failed[Entity("gpu", "GPU-0"), "matmul"]) == 3


def test_a_damaged_table_of_failures_costs_only_what_is_damaged(tmp_path):
    """What cannot be read is left out; a file without the table is from before."""
    path = tmp_path / "state/gpuwatch.sqlite"
    store = Store(path)
    Node(store).run(2, result="failed", value=None)
    store.close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE canary_failures SET reading = '{\"canary\": 5' WHERE rowid = 1")
    store = Store(path)
    assert len(Node(store).baseline.log.failed[Entity("gpu", "GPU-0"), "matmul"]) == 1
    store.close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("DROP TABLE canary_failures")
    store = Store(path)
    node = Node(store)
    assert not node.baseline.log.failed
    node.run(1, result="failed", value=None)
    assert store.fault == ""
    store.close()


def test_readings_of_the_future_neither_stay_the_newest_nor_hide_the_present():
    """The clock was years ahead for a while: those of today are shown, judged and due again."""
    node = Node()
    now = time.time()
    for number in range(10):  # written under the wrong clock
        ahead = result(time=now + 1e8 + number * PERIOD)
        node.baseline.add(CanaryReading.from_json(ahead))
    assert node.baseline.newest("GPU-0") is None
    node.ledger.take(result(time=now + 1e8))  # begun before the clock was set right
    newest = node.baseline.newest("GPU-0")
    assert newest == pytest.approx(time.time(), abs=60)
    standings = Standings()
    standings.look(node.baseline, {"GPU-0": Entity("gpu", "0")})
    (course,) = standings.courses
    assert [one["time"] for one in course["readings"]] == [newest]

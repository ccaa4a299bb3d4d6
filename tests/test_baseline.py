"""Baselines: what belongs together, what a reading says, what survives, and who is told."""

import json
import re
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import canary_file
import numpy as np
import pytest
from running import Running, wait_for
from ticks import SECOND, firing, node

from gpuwatch import baseline_file, cli, control
from gpuwatch.alerts import AlertEngine
from gpuwatch.baseline import Baseline
from gpuwatch.baseline_table import EPOCHS_KEPT, READINGS_KEPT
from gpuwatch.canary_reading import UNITS, CanaryReading
from gpuwatch.clock import monotonic_ns
from gpuwatch.facts import canaries, in_trouble
from gpuwatch.idle import IdleTime
from gpuwatch.paths import CONTROL
from gpuwatch.rules import RULES
from gpuwatch.rules import canary as canary_rules
from gpuwatch.signals import HOST, Entity
from gpuwatch.source import EntityInfo
from gpuwatch.store import SlotRow, Store

CN_07 = Path(__file__).parent / "data/cases/CN-07/runs.json"
PERIOD = 1800.0
NOW = 1.8e9
GPUS = {f"GPU-{number}": Entity("gpu", str(number)) for number in range(8)}
ENVIRONMENT = {"driver": "580.1", "torch": "2.11", "power_limit_watts": "700.0"}
USUAL = {
    "matmul": {"size": 8192, "dtype": "bf16", "value": 784e12, "clock_hertz": 1.98e9},
    "memory": {"size": 1 << 29, "value": 4.17e12},
    "pcie": {"size": 1 << 28, "direction": "h2d", "value": 55.2e9},
    "allreduce": {"size": 1 << 28, "dtype": "bf16", "gpus": 8, "value": 330e9},
    "startup": {"value": 3.3},
    "integrity": {"value": 0.4},
}
LOSS = 'canary_loss_ratio{{canary="{}"}}'


def reading(canary="matmul", gpu="GPU-0", share=1.0, **changes):
    """Return a reading of an H200 at this share of its usual speed."""
    told = {
        "canary": canary,
        "entity": ("host", "") if canary == "allreduce" else ("gpu", gpu),
        "time": NOW,
        "model": "NVIDIA H200",
        "environment": ENVIRONMENT,
        **USUAL[canary],
    } | changes
    if told.get("value"):
        told["value"] *= 1 / share if UNITS[canary] == "seconds" else share
    if told.get("clock_hertz") and told["value"] and "value_per_hertz" not in told:
        told["value_per_hertz"] = told["value"] / told["clock_hertz"]
    return CanaryReading.from_json(told)


class Canaries:
    """A node whose canaries run every half hour, with the retests that are asked for."""

    def __init__(self, store=None, fires=lambda _: False, seed=1):
        self.baseline = Baseline(store or Store(None), fires)
        self.now = NOW
        self._generator = np.random.default_rng(seed)

    def run(self, count=1, canary="matmul", gpus=("GPU-0",), share=1.0, **changes):
        """Run a canary so many times on these GPUs, at this share or at each GPU's own."""
        for _ in range(count):
            self.now += PERIOD
            for gpu in gpus:
                own = share.get(gpu, 1.0) if isinstance(share, dict) else share
                judged = self._add(canary, gpu, own, self.now, changes)
                for again in range(1, 4):
                    if judged.retest:
                        judged = self._add(canary, gpu, own, self.now + 10 * again, changes)
        return judged

    def _add(self, canary, gpu, share, when, changes):
        noise = 1 + 0.003 * self._generator.standard_normal()
        return self.baseline.add(reading(canary, gpu, share * noise, time=when, **changes))

    def facts(self):
        return self.baseline.facts(GPUS, self.now)

    def loss(self, canary="matmul", entity=GPUS["GPU-0"]):
        return self.facts().get(entity, {}).get(LOSS.format(canary))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "gpuwatch.sqlite"


def other(**changes):
    return ENVIRONMENT | changes


def test_a_changed_environment_is_never_a_regression():
    """A new driver that costs a tenth begins a baseline of its own, and says what was before."""
    node = Canaries()
    assert node.run(30).kind == "normal"
    judged = node.run(1, share=0.9, environment=other(driver="590.2"))
    assert judged.kind == "no_baseline"
    assert judged.text.startswith("learning: 1 of 6 readings; before driver 580.1 -> 590.2")
    assert "784" in judged.text
    assert node.loss() is None
    assert node.run(30, share=0.9, environment=other(driver="590.2")).kind == "normal"
    assert node.loss() == 0.0
    back = node.run(6)  # the old driver again: its baseline is there still
    assert (back.kind, back.ratio) == ("normal", pytest.approx(1, abs=0.01))
    assert node.run(6, share=0.9).kind == "regression"


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": "GPU-1"},
        {"size": 4096},
        {"dtype": "fp16"},
        {"direction": "d2h"},
        {"gpus": 4},
        {"environment": other(power_limit_watts="600.0")},
        {"environment": other(ecc="off")},
        {"environment": other(locked_clocks="1500")},
    ],
)
def test_what_is_not_alike_is_not_compared(changes):
    """GPU, shape and environment tell baselines apart."""
    node = Canaries()
    node.run(30)
    assert node.baseline.add(reading(share=0.7, time=node.now + 1, **changes)).kind == "no_baseline"
    assert node.baseline.add(reading(share=0.7, time=node.now + 1)).kind == "suspect"


def test_an_all_reduce_between_other_gpus_is_compared_with_its_own(path):
    """Each set keeps its baseline and its regression, however many others run meanwhile."""
    store = Store(path)
    node = Canaries(store)
    sets = [f"{number},{number + 1}" for number in range(7)]
    for _ in range(30):
        for gpus in sets:
            node.run(1, "allreduce", gpus=("",), environment=other(gpu_set=gpus))
            node.now -= PERIOD - 60
    for _ in range(4):
        node.run(1, "allreduce", share=0.8, environment=other(gpu_set="0,1"))
        assert node.run(1, "allreduce", environment=other(gpu_set="3,4")).kind == "normal"
    assert node.loss("allreduce", HOST) == pytest.approx(0.2, abs=0.01)
    store.close()
    again = Baseline(Store(path))
    assert again.facts(GPUS, node.now) == node.facts()
    assert sum(one.current for one in again.standings()) == len(sets) > EPOCHS_KEPT


def test_a_part_of_the_environment_that_is_not_known_is_left_out():
    """An empty value and none are the same epoch."""
    node = Canaries()
    node.run(10, environment=other(vbios=""))
    assert node.run(1, environment=other(vbios=None)).kind == "normal"
    assert node.run(1).kind == "normal"


@pytest.mark.parametrize("canary", [name for name in USUAL if name != "integrity"])
def test_every_canary_that_measures_has_a_baseline(canary):
    """Speeds that fall and times that grow are losses alike."""
    node = Canaries()
    assert node.run(40, canary).kind == "normal"
    judged = node.run(4, canary, share=0.93)
    assert (judged.kind, judged.ratio) == ("regression", pytest.approx(0.93, abs=0.01))
    (standing,) = node.baseline.standings()
    assert standing.baseline == pytest.approx(USUAL[canary]["value"], rel=0.005)
    assert standing.loss == pytest.approx(0.07, abs=0.01)


def test_the_clock_explains_what_follows_it():
    """A copy over PCIe at a lower SM clock is slow for another reason."""
    for canary, cause in (("matmul", "low_clock"), ("pcie", "")):
        node = Canaries()
        node.run(30, canary, clock_hertz=1.98e9)
        judged = node.run(4, canary, share=0.93, clock_hertz=1.98e9 * 0.93)
        assert (judged.kind, judged.cause) == ("regression", cause)


def test_one_gpu_or_the_whole_node():
    """Seven siblings at their own usual speeds name the culprit; eight slow ones their room."""
    speeds = {gpu: 1 - 0.01 * number for number, gpu in enumerate(GPUS)}  # sound GPUs differ
    node = Canaries()
    node.run(30, gpus=GPUS, share=speeds)
    judged = node.run(4, gpus=GPUS, share=speeds | {"GPU-7": 0.93 * 0.95})
    assert (judged.kind, judged.peers) == ("regression", "one_gpu")
    assert judged.text.endswith("slow at its full clock, this GPU alone")
    assert node.loss(entity=GPUS["GPU-7"]) == pytest.approx(0.05, abs=0.006)
    assert node.loss() == 0.0
    assert node.facts()[HOST]["canary_node_loss_ratio"] == 0.0

    slow = {gpu: share * 0.96 for gpu, share in speeds.items()}
    node = Canaries()
    node.run(30, gpus=GPUS, share=speeds)
    judged = node.run(4, gpus=GPUS, share=slow, clock_hertz=1.9e9)
    assert (judged.kind, judged.peers, judged.cause) == ("regression", "whole_node", "low_clock")
    assert {node.loss(entity=gpu) for gpu in GPUS.values()} == {0.0}
    assert node.facts()[HOST]["canary_node_loss_ratio"] == pytest.approx(0.04, abs=0.01)
    for number in range(6):  # they get well one after the other, and none is told alone meanwhile
        for gpu in GPUS:
            node.run(1, gpus=(gpu,), share=speeds)
            node.now -= PERIOD - 60
            assert {node.loss(entity=one) for one in GPUS.values()} == {0.0}
        node.now += PERIOD
        assert (node.facts()[HOST]["canary_node_loss_ratio"] > 0) == (number < 3)


def test_a_gpu_much_slower_than_a_slow_node_is_told_alone():
    """A warm day does not hide a broken fan."""
    node = Canaries()
    node.run(30, gpus=GPUS)
    node.run(4, gpus=GPUS, share=dict.fromkeys(GPUS, 0.97) | {"GPU-3": 0.88})
    assert node.loss(entity=GPUS["GPU-3"]) == pytest.approx(0.12, abs=0.01)
    assert node.loss() == 0.0


def test_a_sibling_of_another_model_or_of_yesterday_is_no_peer():
    """Who did not run lately, or is another card, explains nothing."""
    for changes in ({"model": "NVIDIA H100 80GB HBM3"}, {}):
        node = Canaries()
        node.run(30, gpus=("GPU-1",), **changes)
        if not changes:
            node.now += 86_400
        node.run(30)
        assert node.run(4, share=0.9).peers == ""


def test_readings_during_an_alert_move_no_baseline(path):
    """They are kept and judged; the alert of another GPU does not matter."""
    troubled = set()
    store = Store(path)
    node = Canaries(store, lambda about: about.id in troubled)
    node.run(30, gpus=("GPU-0", "GPU-1"))
    before = node.baseline.standings()[0].baseline
    troubled.add("GPU-0")
    node.run(60, gpus=("GPU-0", "GPU-1"), share=1.015)
    mine, others = node.baseline.standings()
    assert mine.baseline == before
    assert others.baseline > before * 1.01
    assert mine.readings == others.readings == 90
    store.close()
    kept = sqlite3.connect(path).execute("SELECT sum(frozen), count(*) FROM canary_readings")
    assert kept.fetchone() == (60, 180)


def test_what_is_no_result_is_no_reading():
    """A run that failed or made room for a job is not kept, and noise is no evidence."""
    node = Canaries()
    node.run(30)
    before = node.baseline.standings()
    for result in ("failed", "aborted"):
        judged = node.baseline.add(reading(share=0.5, result=result, detail="no memory"))
        assert (judged.kind, judged.ratio, judged.retest) == ("unknown", None, False)
        assert judged.text == f"{result}: no memory"
    assert node.baseline.standings() == before
    values = (None, 0.0, float("nan"), 1.7e308, 5e-324)  # with the last two sums are no numbers
    for changes in (*({"value": value} for value in values), {"spread": 0.2}):
        for _ in range(10):
            assert node.baseline.add(reading(share=0.5, **changes)).kind == "unknown"
    assert node.loss() == 0.0


def test_a_week_without_a_reading_is_unknown():
    """Nobody knows whether it is still slow, nor whether it is well."""
    node = Canaries()
    node.run(30)
    assert node.loss() == 0.0
    node.now += 8 * 86_400
    assert node.loss() is None


def test_a_size_that_is_no_longer_run_has_no_say():
    """The setting was changed while the GPU was slow: the new size is judged alone."""
    node = Canaries()
    node.run(30)
    node.run(4, share=0.9)
    assert node.loss() > 0
    node.run(7, size=4096)
    assert node.loss() == 0.0


def test_a_baseline_is_seeded_by_what_counts():
    """Noise makes none; all kinds of a canary must have one, and older sizes have no say."""
    node = Canaries()
    gpu = Entity("gpu", "GPU-0")
    assert not node.baseline.is_seeded(gpu, "matmul")
    node.run(6, spread=0.05)
    assert not node.baseline.is_seeded(gpu, "matmul")
    node.run(6)
    assert node.baseline.is_seeded(gpu, "matmul")
    node.run(1, dtype="fp16")
    assert not node.baseline.is_seeded(gpu, "matmul")
    node.run(5, dtype="fp16")
    node.baseline.add(reading(gpus=8, time=node.now))
    assert node.baseline.is_seeded(gpu, "matmul")
    node.run(6, "allreduce", environment=other(gpu_set="0,1"))
    assert node.baseline.is_seeded(HOST, "allreduce")
    node.run(1, "allreduce", environment=other(gpu_set="0,1,2"))
    assert not node.baseline.is_seeded(HOST, "allreduce")


def test_gpus_that_are_gone_are_not_spoken_of():
    """Facts are about those that are here."""
    node = Canaries()
    node.run(30)
    assert node.baseline.facts({"GPU-9": Entity("gpu", "0")}, node.now).get(GPUS["GPU-0"]) is None


def test_baselines_survive_a_restart(path):
    """The daemon that comes next judges as the one before would have, within a look too."""
    store = Store(path)
    node = Canaries(store)
    node.run(30, gpus=GPUS)
    node.run(6, share=0.9)
    suspect = reading(gpu="GPU-1", share=0.9, time=node.now + 1)
    assert node.baseline.add(suspect).retest
    standings, facts = node.baseline.standings(), node.facts()
    store.close()
    store = Store(path)
    again = Baseline(store)
    assert again.standings() == standings
    assert again.facts(GPUS, node.now) == facts
    for seconds, retest in ((2, True), (3, False)):
        found = again.add(replace(suspect, time=suspect.time + seconds))
        assert (found.kind, found.retest) == ("suspect", retest)
    store.close()


def test_old_readings_go_and_the_baseline_stays(path):
    """A regression that lasts for weeks is still compared with what was before it."""
    store = Store(path)
    node = Canaries(store)
    node.run(60)
    node.run(READINGS_KEPT + 100, share=0.9)
    store.close()
    file = sqlite3.connect(path)
    (count,) = file.execute("SELECT count(*) FROM canary_readings").fetchone()
    assert READINGS_KEPT <= count <= READINGS_KEPT + 48
    file.close()
    store = Store(path)
    (standing,) = Baseline(store).standings()
    assert (standing.state, standing.baseline) == ("regression", pytest.approx(784e12, rel=0.01))
    assert standing.readings == count
    store.close()


def test_long_past_epochs_go(path):
    """Drivers come and go; a few are kept for comparison."""
    store = Store(path)
    node = Canaries(store)
    for version in range(9):
        node.run(7, environment=other(driver=str(version)))
    store.close()
    store = Store(path)
    kept = [one.environment["driver"] for one in Baseline(store).standings()]
    assert kept == [str(version) for version in range(8, 8 - EPOCHS_KEPT, -1)]
    store.close()


def test_a_damaged_file_is_put_aside_and_canaries_go_on(path):
    """The daemon says so, judges on by what it has, and the new file is good."""
    store = Store(path)
    node = Canaries(store)
    node.run(30)
    store.close()
    path.write_bytes(b"SQLite format 3\0" + bytes(4000))
    store = Store(path)
    assert "put aside as gpuwatch.sqlite.broken-1, its state is lost" in store.fault
    fresh = Canaries(store)
    assert fresh.run(1).kind == "no_baseline"
    fresh.run(10)
    store.close()
    store = Store(path)
    assert [one.readings for one in Baseline(store).standings()] == [11]
    store.close()


def test_a_course_that_is_damaged_begins_anew(path):
    """One that cannot be read takes none of the others with it."""
    store = Store(path)
    Canaries(store).run(10, gpus=list(GPUS)[:4])
    store.close()
    with sqlite3.connect(path) as file:
        file.execute("UPDATE canary_courses SET state = '{}' WHERE entity_id = 'GPU-0'")
        file.execute("UPDATE canary_courses SET canary = 'burn' WHERE entity_id = 'GPU-2'")
        file.execute("UPDATE canary_courses SET environment = '[]' WHERE entity_id = 'GPU-3'")
    file.close()
    store = Store(path)
    node = Canaries(store)
    assert [one.entity.id for one in node.baseline.standings()] == ["GPU-1"]
    assert node.run().kind == "no_baseline"
    assert store.fault == ""
    store.close()


def test_readings_wait_for_a_disk_that_cannot_be_written(tmp_path):
    """No fault is raised, and what was read meanwhile is written later."""
    blocked = tmp_path / "state"
    blocked.write_text("not a directory")
    store = Store(blocked / "gpuwatch.sqlite")
    node = Canaries(store)
    assert node.run(30).kind == "normal"
    assert "state is kept in memory only" in store.fault
    blocked.unlink()
    node.run(1)
    assert store.fault == ""
    store.close()
    store = Store(blocked / "gpuwatch.sqlite")
    assert [one.readings for one in Baseline(store).standings()] == [31]
    store.close()


def test_an_import_waits_for_a_locked_file(path, tmp_path):
    """What cannot be written at once is written with what comes next, and no course is lost."""
    courses = baseline_file.load(canary_file.write(tmp_path / "kept.json", ["GPU-0", "GPU-1"]))
    store = Store(path)
    baseline = Baseline(store)
    baseline.add(reading("pcie"))
    with closing(sqlite3.connect(path, isolation_level=None)) as other_one:
        other_one.execute("BEGIN IMMEDIATE")
        after_one = iter([lambda: other_one.execute("ROLLBACK")])
        taken = baseline.take(courses, advance=lambda: next(after_one, int)())
    assert (taken, store.fault) == ((len(courses), 0), "")
    store.close()
    store = Store(path)
    assert len(Baseline(store).standings()) == len(courses) + 1
    store.close()


def test_a_clock_that_was_ahead_revives_no_past_environment(path):
    """After a restart, too, the environment that counts is that of today's readings."""
    store = Store(path)
    node = Canaries(store)
    node.now = time.time() + 300 * 86400
    node.run(30)
    node.run(10, share=0.8)
    node.now = time.time() - 40 * PERIOD
    node.run(30, environment=other(driver="590.2"))
    store.close()
    store = Store(path)
    (current,) = [one for one in Baseline(store).standings() if one.current]
    store.close()
    assert (current.environment["driver"], current.state) == ("590.2", "normal")


def test_wrong_results_are_confirmed_and_survive(path):
    """One is taken again three times; the second is corruption, until four are right."""
    store = Store(path)
    node = Canaries(store)
    known = lambda: node.facts().get(GPUS["GPU-0"], {}).get("canary_wrong_results")  # noqa: E731

    def add(result, seconds=10, canary="integrity"):
        node.now += seconds
        return node.baseline.add(reading(canary, time=node.now, result=result, detail="tile 7"))

    assert known() is None
    assert node.facts() == {}
    node.run(2, "integrity", entity=HOST, result="wrong")  # the sum of all of them
    assert node.facts() == {HOST: {"canary_wrong_results": 1.0}}
    assert add("ok").kind == "normal"
    assert known() == 0.0
    judged = add("wrong")
    assert (judged.kind, judged.cause, judged.retest) == ("suspect", "wrong_result", True)
    assert [add("ok").retest for _ in range(3)] == [True, True, False]
    assert known() == 0.0
    add("wrong", 8 * 86_400)  # a week later it does not count
    assert known() == 0.0
    judged = add("wrong", canary="matmul")
    assert (judged.kind, judged.retest) == ("regression", False)
    assert judged.text == "wrong results, 2 within a week: tile 7"
    assert known() == 1.0
    store.close()
    store = Store(path)
    node.baseline = Baseline(store)
    assert known() == 1.0
    add("ok", canary="matmul")  # it was right, but nobody checked
    for left in (1.0, 1.0, 1.0, 0.0):
        add("ok")
        assert known() == left
    store.close()


def test_sums_between_other_gpus_clear_nobody(path):
    """Right sums of one half of the node say nothing of the other's wrong ones, those of all do."""
    store = Store(path)
    node = Canaries(store)

    def sums(gpus, result, count):
        for _ in range(count):
            node.now += 10
            told = reading("integrity", entity=HOST, environment={"gpu_set": gpus}, time=node.now)
            node.baseline.add(replace(told, result=result))
        return node.facts()[HOST]["canary_wrong_results"]

    assert sums("0,1,2,3", "wrong", 2) == 1
    assert sums("4,5,6,7", "ok", 4) == 1
    assert sums("0,1,2,3", "ok", 4) == 0
    assert sums("6,7", "wrong", 2) == 1
    assert sums("0,1,2,3,4,5,6,7", "ok", 4) == 0
    assert sums("5,6,7", "wrong", 2) == 1
    fewer = {uuid: gpu for uuid, gpu in GPUS.items() if gpu.id != "7"}
    assert node.baseline.facts(fewer, node.now)[HOST]["canary_wrong_results"] == 0
    store.close()
    store = Store(path)
    again = Baseline(store)
    store.close()
    assert again.facts(GPUS, node.now)[HOST]["canary_wrong_results"] == 1
    assert again.facts(fewer, node.now)[HOST]["canary_wrong_results"] == 0


def test_the_reports_of_the_field():
    """CN-07: runs beside another process are none; 12 % at a lower clock is found, and why."""
    told = json.loads(CN_07.read_text())
    node = Canaries()
    edge, kinds = told["shape"][0], []
    for run in told["runs"]:
        node.now += PERIOD
        value = 2 * edge**3 / (run["ms"] / 1e3)
        hertz = run["clock_mhz"] * 1e6
        found = reading(
            time=node.now,
            value=value,
            clock_hertz=hertz,
            value_per_hertz=value / hertz,
            result="aborted" if run["others"] else "ok",
        )
        judged = node.baseline.add(found)
        while judged.retest:
            judged = node.baseline.add(replace(found, time=found.time + 10))
        kinds.append((run["others"], run["clock_mhz"] > 1900, judged.kind))
    assert {kind for others, _, kind in kinds if others} == {"unknown"}
    alone = [(full, kind) for others, full, kind in kinds if not others]
    assert "regression" not in [kind for full, kind in alone if full]
    slow = [kind for full, kind in alone if not full]
    assert 2 <= slow.index("regression") <= 6
    assert (judged.cause, judged.peers) == ("low_clock", "")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ({"canary": "burn"}, "canary 'burn'"),
        ({"canary": 'x"}'}, "name"),
        ({"result": "fine"}, "result 'fine'"),
        ({"time": "noon"}, "noon"),
        ({"time": float("nan")}, "time"),
        ({"size": -1}, "size"),
        ({"gpus": 10**9}, "gpus"),
        ({"entity": ["gpu"]}, "values to unpack"),
        ({"environment": [1]}, "sequence"),
    ],
)
def test_what_is_no_reading_is_refused(damage, fault):
    """A child may say anything; what is no reading is a plain error."""
    with pytest.raises((TypeError, KeyError, ValueError), match=fault):
        CanaryReading.from_json(reading().to_json() | damage)


def test_a_reading_can_be_written_and_read():
    """JSON and back, null where something is not known."""
    for canary in USUAL:
        found = reading(canary)
        assert CanaryReading.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_what_a_child_says_does_not_steer_a_terminal():
    """Names and details are one line without control characters."""
    said = {"model": "\x1b[2JH200", "detail": "a\nb\x07", "environment": {"nccl": "2\u202e"}}
    found = CanaryReading.from_json(reading().to_json() | said)
    assert (found.model, found.detail, found.environment) == ("?[2JH200", "a b?", {"nccl": "2?"})


def judged(values, seconds=1, engine=None, start=0):
    """Judge the canaries' rules on ticks with these facts."""
    engine = engine or AlertEngine(canary_rules.RULES, {}, None, "")
    for second in range(start, start + seconds):
        engine.judge(node(second * SECOND, values, length_ns=SECOND))
    return engine


@pytest.mark.parametrize(
    ("entity", "facts", "expected"),
    [
        ("gpu", {LOSS.format("matmul"): 0.0}, set()),
        ("gpu", {LOSS.format("matmul"): 0.019}, set()),
        ("gpu", {LOSS.format("matmul"): 0.02}, {"canary_regression_matmul"}),
        (
            "gpu",
            {LOSS.format("memory"): 0.05},
            {"canary_regression_memory", "canary_regression_memory_severe"},
        ),
        ("gpu", {LOSS.format("pcie"): 0.03}, {"canary_regression_pcie"}),
        (
            "host",
            {LOSS.format("allreduce"): 0.4},
            {"canary_regression_allreduce", "canary_regression_allreduce_severe"},
        ),
        ("host", {"canary_node_loss_ratio": 0.03}, {"node_slow"}),
        ("host", {"canary_node_loss_ratio": 0.0}, set()),
        ("gpu", {"canary_wrong_results": 1.0}, {"silent_data_corruption"}),
        ("gpu", {"canary_wrong_results": 0.0}, set()),
        ("host", {"canary_wrong_results": 1.0}, {"silent_data_corruption_allreduce"}),
        ("host", {"canary_wrong_results": 0.0}, set()),
        ("host", {"canary_stuck": 1.0}, {"canary_stuck"}),
        ("host", {"canary_stuck": 0.0}, set()),
        ("gpu", {"canary_overdue_seconds": 86_401.0}, {"canary_stale"}),
        ("gpu", {"canary_overdue_seconds": 80_000.0}, set()),
        ("gpu", {}, set()),
        ("host", {}, set()),
    ],
)
def test_rules_fire_on_what_was_confirmed(entity, facts, expected):
    """At once, for the canary has its own statistics; nothing fires on what is not known."""
    about = HOST if entity == "host" else GPUS["GPU-0"]
    assert firing(judged({about: facts})) == expected


def test_an_alert_ends_when_the_gpu_is_well_and_not_when_nothing_is_known():
    """Facts that are gone change nothing; corruption stays until it is acknowledged."""
    gpu = GPUS["GPU-0"]
    slow = {LOSS.format("matmul"): 0.03, "canary_wrong_results": 1.0}
    engine = judged({gpu: slow})
    judged({gpu: {}}, 600, engine, 1)
    assert firing(engine) == {"canary_regression_matmul", "silent_data_corruption"}
    judged({gpu: dict.fromkeys(slow, 0.0)}, 200, engine, 601)
    assert firing(engine) == {"silent_data_corruption"}
    engine.acknowledge(gpu)
    judged({gpu: dict.fromkeys(slow, 0.0)}, 2, engine, 801)
    assert firing(engine) == set()


def command(capsys, *words):
    """Run a command in this process; return exit code, output and error."""
    code = cli.main(["baseline", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def kept(path):
    """Return the state directory of a node with some history."""
    store = Store(path)
    canaries = Canaries(store)
    canaries.now = time.time() - 40 * PERIOD
    canaries.run(6, environment=other(driver="570.1"))
    canaries.run(30, gpus=("GPU-0", "GPU-1"))
    canaries.run(4, share=0.93)
    canaries.run(1, "allreduce")
    store.close()
    return path.parent


def test_show_is_a_table_that_people_read(kept, capsys):
    """A line for each canary that runs now, with what is wrong; 2 for a loss that is critical."""
    code, out, _ = command(capsys, "show", "--path.state", kept)
    lines = out.splitlines()
    assert code == 2
    assert lines[0].split()[3:7] == ["BASELINE", "RATIO", "EXPECTED", "SPREAD"]
    assert len(lines) == 4
    assert "GPU-0" in lines[1]
    assert "8192 bf16" in lines[1]
    assert re.search(r"regression: (6\.[89]|7\.[0-2]) % slower, slow at its full clock", lines[1])
    assert lines[1].endswith("this GPU alone")
    assert lines[2].split()[:5] == ["-", "GPU-1", "matmul", "8192", "bf16"]
    assert lines[2].endswith("normal")
    assert lines[3].split()[:5] == ["host", "allreduce", "256MiB", "bf16", "8GPUs"]
    assert lines[3].endswith("learning")
    _, out, _ = command(capsys, "show", "--all", "--path.state", kept)
    assert "past normal" in out
    code, out, _ = command(capsys, "show", "--json", "--path.state", kept)
    told = json.loads(out)
    assert told[0]["state"] == "regression"
    assert 0.9 < told[0]["expected_ratio"] < 1.2
    assert told[0]["environment"] == ENVIRONMENT


@pytest.mark.parametrize(
    ("canary", "gpus", "share", "code"),
    [
        ("matmul", ("GPU-0",), 1.0, 0),
        ("matmul", ("GPU-0",), 0.97, 1),
        ("matmul", ("GPU-0",), 0.94, 2),
        ("matmul", tuple(GPUS), 0.94, 1),  # the whole node's is no GPU's fault
        ("allreduce", ("",), 0.94, 2),
    ],
)
def test_show_ends_as_bad_as_it_is(canary, gpus, share, code, path, capsys):
    """For scripts: 0 well, 1 warning, 2 critical."""
    store = Store(path)
    canaries = Canaries(store)
    canaries.now = time.time() - 40 * PERIOD
    canaries.run(30, canary, gpus=gpus)
    canaries.run(5, canary, gpus=gpus, share=share)
    store.close()
    assert command(capsys, "show", "--path.state", path.parent)[0] == code


def test_show_tells_wrong_results(path, capsys):
    """They are the worst of all."""
    store = Store(path)
    canaries = Canaries(store)
    canaries.now = time.time() - 2 * PERIOD
    canaries.run(2, "integrity", result="wrong")
    store.close()
    code, out, _ = command(capsys, "show", "--path.state", path.parent)
    assert code == 2
    assert out.splitlines()[1].endswith("wrong results")


def test_show_forgives_what_is_gone(path, capsys):
    """A card that was replaced, and what nobody has measured for a week, are shown and no fault."""
    store = Store(path)
    canaries = Canaries(store)
    canaries.now = time.time() - 50 * PERIOD
    canaries.run(30, gpus=("GPU-0", "GPU-1"))
    canaries.run(4, share={"GPU-0": 0.9}, gpus=("GPU-0", "GPU-1"))
    store.gpu_numbers(["0000:1b:00.0", "0000:43:00.0"])
    slot = SlotRow("0000:1b:00.0", "GPU-0", "1", "NVIDIA H200")
    sibling = slot._replace(pci_bus_id="0000:43:00.0", uuid="GPU-1")
    store.save_inventory([slot, sibling])
    where = ("show", "--path.state", path.parent)
    assert command(capsys, *where)[0] == 2
    store.save_inventory([slot._replace(uuid="GPU-9"), sibling])
    assert command(capsys, *where)[0] == 2  # it may be a new one that nobody has accepted yet
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE canary_courses SET newest = newest - ?", (90_000,))
    code, out, _ = command(capsys, *where)
    assert (code, "regression" in out) == (0, True)
    store.close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE canary_courses SET newest = newest - ?", (8 * 86_400,))
    assert command(capsys, *where)[0] == 3


def test_an_import_waits_for_a_daemon_that_is_busy(kept, tmp_path, capsys, monkeypatch):
    """One that is there and does not answer has the file; two that write would lose readings."""
    file = tmp_path / "kept.json"
    command(capsys, "export", file, "--path.state", kept)
    monkeypatch.setattr("gpuwatch.commands.baseline.STATUS_SECONDS", 0.2)
    server = control.Server(tmp_path / CONTROL, 0o600)  # nobody polls it
    try:
        where = ("--path.state", kept, "--path.runtime", tmp_path)
        code, _, err = command(capsys, "import", file, *where)
        assert (code, err.count("\n")) == (3, 1)
        assert "no answer within" in err
        assert command(capsys, "show", *where)[0] == 2
    finally:
        server.close()


def test_an_export_is_imported_elsewhere(kept, tmp_path, capsys):
    """All of it, and judged alike; what is there already stays unless it is to be replaced."""
    file, elsewhere = tmp_path / "kept.json", tmp_path / "elsewhere"
    code, out, _ = command(capsys, "export", file, "--path.state", kept)
    assert (code, out) == (0, f"{file}: 4 baselines, 77 readings\n")
    content = json.loads(file.read_text())
    assert (content["schema"], content["version"]) == ("gpuwatch-baseline", 1)
    code, out, _ = command(capsys, "import", file, "--path.state", elsewhere)
    assert (code, out) == (0, f"{file}: 4 baselines imported\n")
    here, there = (
        command(capsys, "show", "--all", "--json", "--path.state", state)[1]
        for state in (kept, elsewhere)
    )
    assert json.loads(there) == json.loads(here)
    code, out, _ = command(capsys, "import", file, "--path.state", elsewhere)
    assert out == f"{file}: 0 baselines imported, 4 stay as they are (--replace)\n"
    code, out, _ = command(capsys, "import", file, "--replace", "--path.state", elsewhere)
    assert out == f"{file}: 4 baselines imported\n"
    again = command(capsys, "show", "--all", "--json", "--path.state", elsewhere)[1]
    assert json.loads(again) == json.loads(here)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no baselines: make one with `gpuwatch baseline export`"),
        ('{"schema": "prometheus"}', "no baselines: make one with `gpuwatch baseline export`"),
        (
            '{"schema": "gpuwatch-baseline", "version": 2, "courses": []}',
            "version 2: this gpuwatch reads 1: make it anew",
        ),
        ('{"schema": "gpuwatch-baseline", "version": 1}', "courses: must be a list"),
    ],
)
def test_a_file_that_is_no_export_is_refused_in_one_line(text, fault, tmp_path, capsys):
    """Whoever gave it learns which file it is and what to do."""
    file = tmp_path / "given.json"
    if text is not None:
        file.write_text(text)
    code, out, err = command(capsys, "import", file, "--path.state", tmp_path / "state")
    assert (code, out) == (64, "")
    assert err.startswith(f"{file}: {fault}")
    assert err.count("\n") == 1
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("course", "one", "fault"),
    [
        ({"canary": "burn"}, {}, "courses[0].readings[0]: canary 'burn': known"),
        ({}, {"time": "noon"}, "courses[0].readings[0]: could not convert"),
        ({}, {"value": 10**400}, "courses[0].readings[0]: int too large"),
        ({"readings": []}, {}, "courses[0]: no readings"),
        ({"reference": -1}, {}, "courses[0]: reference -1.0"),
        ({"model": ...}, {}, "courses[0]: 'model' is missing"),
    ],
)
def test_a_file_that_was_edited_names_the_place(course, one, fault, kept, tmp_path, capsys):
    """Nothing of it is taken in."""
    file = tmp_path / "kept.json"
    command(capsys, "export", file, "--path.state", kept)
    content = json.loads(file.read_text())
    first = content["courses"][0]
    first["readings"][0].update(one)
    first.update(course)
    content["courses"][0] = {name: value for name, value in first.items() if value is not ...}
    file.write_text(json.dumps(content))
    code, _, err = command(capsys, "import", file, "--path.state", tmp_path / "elsewhere")
    assert code == 64
    assert err.startswith(f"{file}: {fault}")
    assert err.count("\n") == 1
    assert not (tmp_path / "elsewhere").exists()


def test_there_may_be_nothing_to_show(tmp_path, capsys):
    """No state, an empty one and a broken one are told in a line."""
    code, _, err = command(capsys, "show", "--path.state", tmp_path)
    assert (code, err.count("\n")) == (64, 1)
    assert "gpuwatch.sqlite: no such file" in err
    Store(tmp_path / "gpuwatch.sqlite").close()
    code, out, _ = command(capsys, "show", "--path.state", tmp_path)
    assert (code, out) == (
        3,
        "no readings of canaries yet: `gpuwatch canary run all` makes some\n",
    )
    (tmp_path / "gpuwatch.sqlite").write_text(
        "no database at all, but long enough for a header" * 9
    )
    code, _, err = command(capsys, "show", "--path.state", tmp_path)
    assert (code, err.count("\n")) == (64, 1)
    assert "the daemon sets it aside when it starts" in err
    code, _, err = command(capsys, "export", "--path.state", tmp_path)
    assert (code, err) == (64, "gpuwatch baseline export: needs a FILE\n")


def test_a_running_daemon_takes_an_import_and_alerts(tmp_path, capsys):
    """What was confirmed fires with the GPU's number; the file is safe from two writers."""
    directory = tmp_path / "node"
    directory.mkdir()
    config = "[simulated]\ngpus = 2\ncanaries = false\n[recorder]\nfree_ratio = 0\n"
    with Running(directory, "--source", "simulated", config=config) as running:
        gpus = wait_for(lambda: running.status()["gpus"], what="GPUs are known")
        uuid = gpus[1]["uuid"]
        store = Store(tmp_path / "made" / "gpuwatch.sqlite")
        canaries = Canaries(store)
        canaries.now = time.time() - 40 * PERIOD
        canaries.run(30, gpus=(uuid,))
        canaries.run(4, gpus=(uuid,), share=0.9)
        for _ in range(2):
            canaries.run(1, "integrity", gpus=(uuid,), result="wrong")
            canaries.run(
                1, "integrity", entity=HOST, result="wrong", environment={"gpu_set": "0,1"}
            )
        store.close()
        file = tmp_path / "kept.json"
        command(capsys, "export", file, "--path.state", tmp_path / "made")
        where = ("--path.runtime", running.runtime)
        assert command(capsys, "show", *where)[1].startswith("no readings")
        code, out, _ = command(capsys, "import", file, *where)
        assert (code, out) == (0, f"{file}: 3 baselines imported\n")
        for rule in (
            "canary_regression_matmul",
            "canary_regression_matmul_severe",
            "silent_data_corruption",
        ):
            alert = wait_for(lambda rule=rule: running.alert(rule, "1"), 60, rule)
            assert alert["state"] == "firing"
        assert running.alert("canary_regression_matmul", "0") is None
        together = "silent_data_corruption_allreduce"
        assert wait_for(lambda: running.alert(together), 60, together)["entity"] == ["host", ""]
        severe = running.alert("canary_regression_matmul_severe", "1")
        assert severe["value"] == pytest.approx(0.1, abs=0.01)
        code, out, _ = command(capsys, "show", *where)
        assert code == 2
        row = next(line for line in out.splitlines() if "matmul" in line)
        assert row.split()[:2] == ["1", uuid]
        socket = running.runtime / CONTROL
        told = control.request(socket, {"command": "accept"}, 10)
        assert told["acknowledged"] == 2  # the GPU's, and that of both together
        file.write_text("{}")
        code, _, err = command(capsys, "import", file, *where)
        assert (code, err.count("\n")) == (64, 1)


class Stub:
    """What facts ask of a daemon: two GPUs, idle for a quarter of an hour."""

    def __init__(self):
        self.feed = SimpleNamespace(
            entities=[
                EntityInfo(Entity("gpu", "0"), {"uuid": "GPU-0"}),
                EntityInfo(Entity("gpu", "1"), {"uuid": "GPU-1"}),
                EntityInfo(Entity("gpu", "2"), {}),  # it does not say who it is
                EntityInfo(HOST, {}),
            ]
        )
        self.engine = AlertEngine(RULES, {}, None, "")
        self.baseline = Baseline(Store(None), lambda about: in_trouble(self, about))
        self.idle = IdleTime()
        self.simulated_canaries = SimpleNamespace(look=lambda *_: None)
        self.canary_runner = SimpleNamespace(stuck=None)
        self.started_ns = monotonic_ns() - 2 * 86_400 * SECOND
        self.ticks = ()
        for second in range(900):
            columns = {"gpu_utilization_ratio": 0.0, "gpu_processes": 0.0}
            made = node(second * SECOND, {GPUS["GPU-0"]: columns}, length_ns=SECOND)
            self.idle.look(made, GPUS.values())


def test_a_canary_is_overdue_on_a_gpu_that_had_time_for_one():
    """A day after the last reading, or after the start; nothing while canaries may not run."""
    stub = Stub()
    assert canaries(stub) == {}
    stub.canary_runner.stuck = 0
    facts = canaries(stub)
    assert facts[HOST] == {"canary_stuck": 0.0}
    assert facts[GPUS["GPU-0"]]["canary_overdue_seconds"] == pytest.approx(2 * 86_400, abs=60)
    assert facts[GPUS["GPU-1"]]["canary_overdue_seconds"] == 0.0
    assert Entity("gpu", "2") not in facts
    assert firing(judged(facts)) == {"canary_stale"}
    stub.baseline.add(reading(time=time.time() - 3600))
    stub.canary_runner.stuck = 2
    facts = canaries(stub)
    assert facts[GPUS["GPU-0"]]["canary_overdue_seconds"] == pytest.approx(3600, abs=60)
    assert firing(judged(facts)) == {"canary_stuck"}


def test_trouble_is_an_alert_of_warning_or_worse_about_the_gpu():
    """A power cap is none, and the neighbour's is not ours; the host has all of it."""
    cases = [
        ({LOSS.format("pcie"): 0.03}, "GPU-0", True),
        ({LOSS.format("pcie"): 0.03}, "GPU-1", False),
        ({LOSS.format("pcie"): 0.03}, "GPU-9", False),
        ({LOSS.format("pcie"): 0.01}, "GPU-0", False),
        ({"canary_overdue_seconds": 1e6}, "GPU-0", False),
    ]
    for facts, uuid, expected in cases:
        stub = Stub()
        judged({GPUS["GPU-0"]: facts}, engine=stub.engine)
        assert in_trouble(stub, Entity("gpu", uuid)) == expected
        assert in_trouble(stub, HOST) == (facts == {LOSS.format("pcie"): 0.03})

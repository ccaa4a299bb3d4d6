"""Readings of canaries as evidence: in the API, on the page, in recordings, exports and `top`."""

import csv
import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import canary_file
import pytest
import traces
from browser import CHROMIUM, Browser
from pyarrow import parquet
from running import Running, wait_for
from test_live_page import CONTRAST

from gpuwatch import cli
from gpuwatch.baseline import Baseline
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.courses import READINGS, course_from_json, courses_from_json, within, worst
from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.recorded import Recorded
from gpuwatch.signals import HOST, Entity
from gpuwatch.standings import Standings
from gpuwatch.store import Store

GPUS = 4
CONFIG = f"[simulated]\ngpus = {GPUS}\ncanaries = false\n[recorder]\nfree_ratio = 0\n"
SECTION = "document.querySelector('#canaries')"
CHARTS = "document.querySelectorAll('#canary-charts .chart')"

# How many pixels of a chart have a colour of the style sheet, and how high its band is, three
# quarters to the right.
DRAWN = """
((shape, name) => {
  const canvas = document.querySelector(`[data-shape^="${shape}"] canvas`);
  const {width, height} = canvas;
  const copy = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
  copy.drawImage(canvas, 0, 0);
  const data = copy.getImageData(0, 0, width, height).data;
  const style = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const wanted = [1, 3, 5].map((at) => parseInt(style.slice(at, at + 2), 16));
  let count = 0;
  for (let at = 0; at < data.length; at += 4) {
    if (wanted.every((one, part) => Math.abs(one - data[at + part]) < 3) && data[at + 3] > 200) {
      count += 1;
    }
  }
  const bands = [0.7, 0.75, 0.8].map((place) => { // one of them may meet the mark of a reading
    let [run, band] = [0, 0];
    for (let y = 0; y < height; y += 1) {
      run = data[4 * (y * width + Math.round(width * place)) + 3] ? run + 1 : 0;
      band = Math.max(band, run);
    }
    return band;
  });
  return [count, Math.min(...bands)];
})
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Run a node; `before` is what it said of canaries before there was a reading."""
    directory = tmp_path_factory.mktemp("canaries")
    with Running(directory, "--source", "simulated", config=CONFIG) as running:
        gpus = wait_for(lambda: len(running.status()["gpus"]) == GPUS and running.status()["gpus"])
        file = canary_file.write(directory / "kept.json", [gpu["uuid"] for gpu in gpus])
        before = SimpleNamespace(
            status=running.status(),
            courses=canaries(running),
            top=gpuwatch(running, "top", "--once"),
        )
        yield SimpleNamespace(running=running, file=file, before=before, recording="")


@pytest.fixture(scope="module")
def imported(node):
    """Have the node take the readings in, and make a recording of it."""
    running = node.running
    if CHROMIUM is not None:  # a page that is open already
        node.browser = Browser()
        node.browser.open(f"http://127.0.0.1:{running.port}/")
        node.browser.wait("document.querySelector('#gpu-rows tr')")
        node.hidden = node.browser.run(f"{SECTION}.hidden")
    gpuwatch(running, "baseline", "import", str(node.file))
    wait_for(lambda: "canaries" in running.status())
    node.recording = gpuwatch(running, "record", "--last", "5s").split()[0]
    yield node
    if CHROMIUM is not None:
        node.browser.__exit__(None, None, None)


@pytest.fixture
def page(imported):
    """Return the page of now, which was open before there were readings."""
    if CHROMIUM is None:
        assert "CI" not in os.environ, "CI has to install chromium"
        pytest.skip("needs chromium: apt-get install chromium")
    return imported.browser


def gpuwatch(running, *words):
    """Return what a command about the node prints, whatever it thinks of it."""
    where = ("--path.runtime", str(running.runtime))
    command = [sys.executable, "-m", "gpuwatch", *words, *where]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert done.returncode < 64, done.stderr
    return done.stdout


def canaries(running, query=""):
    status, body = running.get(f"/api/v1/canaries{query}")
    assert status == 200, body
    return json.loads(body)["canaries"]


def course(found, canary, number=0):
    entity = ["host", ""] if canary == "allreduce" else ["gpu", str(number)]
    return next(one for one in found if (one["canary"], one["entity"]) == (canary, entity))


def test_without_readings_nothing_is_shown(node):
    """No key, no line, no stub."""
    assert node.before.courses == []
    assert "canaries" not in node.before.status
    assert "CANARIES" not in node.before.top


def test_readings_are_told_with_what_is_normal_and_expected(imported):
    """Each course has its readings, the limits of each environment and what the model gives."""
    found = canaries(imported.running)
    assert len(found) == GPUS * (len(canary_file.USUAL) - 1) + 1
    slow = course(found, "matmul", 1)
    assert slow["state"] == "regression"
    assert slow["text"].endswith("% slower, slow at its full clock, this GPU alone")
    assert slow["loss"] == pytest.approx(canary_file.LOSS, abs=0.01)
    assert (slow["unit"], slow["model"]) == ("flops_per_second", "NVIDIA H200")
    assert len(slow["readings"]) == canary_file.READINGS
    old, new = slow["environments"]
    assert (old["settings"]["driver"], new["settings"]["driver"]) == ("570.86", "580.95")
    assert old["limit"] == pytest.approx(0.95 * old["baseline"])  # it is still learned
    assert new["limit"] == pytest.approx(0.98 * new["baseline"])
    assert new["expected"]["value"] < new["expected"]["peak"]
    assert new["expected"]["source"]
    last = slow["readings"][-1]
    assert last["ratio"] == pytest.approx(last["value"] / new["baseline"])
    assert last["value"] < new["limit"]
    assert (last["environment"], last["clock_hertz"]) == (1, 1.98e9)
    kinds = [one["judged"] for one in slow["readings"][-canary_file.SLOW :]]
    assert kinds == ["suspect"] * 3 + ["regression"] * (canary_file.SLOW - 3)
    assert course(found, "matmul", 0)["state"] == "normal"
    startup = course(found, "startup")["environments"][1]
    assert startup["limit"] == pytest.approx(startup["baseline"] / 0.98)
    assert startup["expected"] is None
    wrong = [one for one in course(found, "integrity", 2)["readings"] if one["result"] == "wrong"]
    assert [one["detail"] for one in wrong] == ["1 of 16777216 sums is wrong"]
    assert course(found, "integrity", 2)["environments"][0]["baseline"] is None
    status, body = imported.running.get("/api/v1/canaries?gpu=0")
    assert status == 400, body


def test_the_page_draws_them_as_soon_as_there_are_some(page, imported):
    """A page that is open shows a chart of each thing that is measured, and the worst row first."""
    assert imported.hidden
    page.wait(f"!{SECTION}.hidden")
    page.wait(f"{CHARTS}.length === {len(canary_file.USUAL)}")
    page.wait("document.querySelectorAll('#canary-charts canvas').length === "
              f"{len(canary_file.USUAL)}")  # fmt: skip
    rows = page.run("[...document.querySelectorAll('#canary-rows tr')].map((one) => one.innerText)")
    assert len(rows) == GPUS * (len(canary_file.USUAL) - 1) + 1
    assert rows[0].split("\t")[:5] == [
        *("GPU 1", "matmul bf16 8192", "712.4\u00a0TFLOP/s", "91.8\u00a0%", "104.3\u00a0%")
    ]
    assert "regression 8.1 % slower, slow at its full clock, this GPU alone" in rows[0]
    assert any("297.4\u00a0GB/s" in row for row in rows)
    colours = page.run(
        "Object.fromEntries([...document.querySelectorAll('#canary-rows .state')]"
        ".map((one) => [one.textContent, one.className]))"
    )
    assert colours["regression"] == "state critical"  # more than 5 %
    assert colours["normal"] == "state ok"
    shift = "driver 570.86 → 580.95"
    assert shift in page.text('[data-shape^="matmul"] .notes')
    assert "✕ wrong result, GPU 2" in page.text('[data-shape^="integrity"] .notes')
    assert "□ failed, GPU 3" in page.text('[data-shape^="memory"] .notes')
    for shape, colour in (
        ("matmul", "--limit"),
        ("memory", "--failed"),
        ("integrity", "--critical"),
    ):
        assert page.run(f"{DRAWN}('{shape}', '{colour}')")[0] > 10, shape
    assert page.run(f"{DRAWN}('integrity', '--limit')") == [0, pytest.approx(3, abs=3)]
    assert page.run(f"{DRAWN}('allreduce', '--line-0')")[1] > 8
    page.hover('[data-shape^="matmul"] .u-over')
    page.wait("document.querySelector('[data-shape^=\"matmul\"] .readout .dim')")
    page.press("1")
    page.wait("document.querySelectorAll('[data-shape^=\"matmul\"] .key').length === 1")
    page.press("1")
    page.wait("document.querySelectorAll('[data-shape^=\"matmul\"] .key').length === 4")
    assert page.problems == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_a_telephone_and_can_be_read(page, theme):
    """Nothing is wider than the screen, and all words stand out from what is behind them."""
    page.theme(theme)
    page.size(390, 844)
    page.wait("document.querySelector('#canary-charts .u-wrap').clientWidth < 390")
    assert page.run("document.documentElement.scrollWidth") == 390
    found = page.run(CONTRAST)
    assert found["count"] > 100
    assert found["poor"] == []
    page.size(1440, 900)
    page.theme("light")


def test_a_recording_has_the_readings_of_the_day_before(imported):
    """They are in the file, and asked for in the same words."""
    live = canaries(imported.running)
    name = Path(imported.recording).name
    told = canaries(imported.running, f"?recording={name}")
    assert told == live  # those of less than a day
    answer = imported.running.get(f"/api/v1/status?recording={name}", 60)
    worst_then = json.loads(answer[1])["canaries"]["worst"]
    assert worst_then == imported.running.status()["canaries"]["worst"]
    old = Recorded(BUNDLED_RECORDING)
    assert old.canaries == []
    old.close()


def test_the_page_of_a_recording_shows_them(page, imported):
    """With the moment that is looked at."""
    name = Path(imported.recording).name
    page.open(f"http://127.0.0.1:{imported.running.port}/?recording={name}")
    page.wait(f"{CHARTS}.length === {len(canary_file.USUAL)}")
    page.wait("document.querySelector('#canary-rows tr').innerText.includes('regression')")
    page.open(f"http://127.0.0.1:{imported.running.port}/")
    assert page.problems == []


def test_exports_have_them(imported, tmp_path):
    """A table of its own, and instants with their details in a trace."""

    def export(to, *more):
        words = ("export", imported.recording, "--to", to, "--output", str(tmp_path / to), *more)
        assert cli.main(list(words)) == 0

    export("csv", "--table", "canaries")
    with (tmp_path / "csv/canaries.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == (GPUS * (len(canary_file.USUAL) - 1) + 1) * canary_file.READINGS
    slow = [row for row in rows if (row["canary"], row["entity_id"]) == ("matmul", "1")][-1]
    assert float(slow["value"]) < float(slow["limit"]) < float(slow["baseline"])
    assert float(slow["value"]) / float(slow["expected"]) == pytest.approx(1.043, abs=0.001)
    assert (slow["unit"], slow["size"], slow["result"]) == ("flops_per_second", "8192", "ok")
    assert json.loads(slow["settings"])["driver"] == "580.95"
    failed = [row for row in rows if row["result"] == "failed"]
    assert [(row["value"], row["detail"]) for row in failed] == [("", "CUDA out of memory")]
    export("parquet", "--table", "canaries")
    table = parquet.read_table(tmp_path / "parquet/canaries.parquet")
    assert table.num_rows == len(rows)
    assert table["size"].null_count == 0
    export("perfetto", "--entity", "gpu/1")
    _, _, tracks = traces.read_trace(tmp_path / "perfetto")
    (track,) = (one for names, one in tracks.items() if names[-1] == "canaries")
    (instant,) = (one for one in track.instants if one.name == "matmul")  # the newest, at the start
    assert float(instant.detail["ratio"]) == pytest.approx(0.918, abs=0.001)


def test_top_has_a_line(imported):
    """Where each canary went worst, and when."""
    text = gpuwatch(imported.running, "top", "--once")
    (line,) = (line for line in text.splitlines() if line.startswith("CANARIES"))
    assert "matmul bf16 0.918 GPU 1 " in line
    assert "allreduce bf16 1.001 host " in line
    assert "integrity right GPU 0 " in line


# Without a node.


def reading(share=1.0, **changes):
    told = {"canary": "matmul", "entity": ("gpu", "GPU-a"), "dtype": "bf16", "size": 8192}
    told |= {"environment": {"driver": "1"}, "value": 784e12 * share, "time": time.time()}
    return CanaryReading.from_json({**told, **changes})


def shown(baseline):
    standings = Standings()
    standings.look(baseline, {"GPU-a": Entity("gpu", "0")})
    return standings.courses


def test_what_is_shown_is_made_anew_only_for_another_reading(tmp_path):
    """What another thread reads is never changed; each reading has what was judged of it."""
    store = Store(tmp_path / "state/gpuwatch.sqlite")
    baseline, standings = Baseline(store), Standings()
    gpus = {"GPU-a": Entity("gpu", "0")}
    standings.look(baseline, gpus)
    assert (standings.courses, standings.brief) == ((), {})
    now = time.time()
    for number in range(30):
        baseline.add(reading(time=now - 1800 * (31 - number)))
    standings.look(baseline, gpus)
    first = standings.courses
    standings.look(baseline, gpus)
    assert standings.courses is first
    baseline.add(reading(0.9, time=now))
    baseline.add(reading(result="failed", value=None, dtype="", detail="no memory", time=now + 1))
    standings.look(baseline, gpus)
    (one,) = standings.courses
    assert (len(first[0]["readings"]), len(one["readings"])) == (30, 32)
    assert (first[0]["state"], one["state"]) == ("normal", "suspect")
    kinds = [told["judged"] for told in one["readings"]]
    assert kinds == ["no_baseline"] * 6 + ["normal"] * 24 + ["suspect", None]
    assert [told["result"] for told in one["readings"][-2:]] == ["ok", "failed"]
    assert standings.brief["worst"][0]["ratio"] == pytest.approx(0.9)
    store.close()
    store = Store(tmp_path / "state/gpuwatch.sqlite")  # of the next daemon
    (again,) = shown(Baseline(store))
    assert again["readings"] == one["readings"]
    assert again["environments"] == one["environments"]
    store.close()


def test_a_file_from_before_judgements_were_kept_is_read_and_goes_on(tmp_path):
    """Its readings are there, and the next ones have what was judged of them."""
    path = tmp_path / "state/gpuwatch.sqlite"
    store = Store(path)
    now = time.time()
    Baseline(store).add(reading(time=now - 60))
    store.close()
    with closing(sqlite3.connect(path)) as file:
        file.execute("ALTER TABLE canary_readings DROP COLUMN judged")
    for kinds in ([None, "no_baseline"], [None, "no_baseline", "no_baseline"]):
        store = Store(path)
        baseline = Baseline(store)
        now += 1
        baseline.add(reading(time=now))
        assert [told["judged"] for told in shown(baseline)[0]["readings"]] == kinds
        assert store.fault == ""
        store.close()


def test_a_canary_that_never_came_to_its_end_is_shown():
    """Else nobody would see that it fails each time."""
    baseline = Baseline(Store(None))
    baseline.add(reading(result="failed", value=None, detail="no torch"))
    (one,) = shown(baseline)
    assert (one["state"], one["text"], one["entity"]) == (
        "failed",
        "failed: no torch",
        ["gpu", "0"],
    )
    assert worst([one], time.time()) == []


def test_what_is_shown_is_bounded():
    """However often canaries run, and however old what they found is."""
    baseline = Baseline(Store(None))
    now = time.time()
    for number in range(2 * READINGS):
        baseline.add(reading(time=now - 2 * READINGS + number))
    baseline.add(reading(dtype="fp16", time=now - 8 * 86_400))
    (one,) = shown(baseline)
    assert len(one["readings"]) == READINGS
    assert within([one], now - 10, now) != []
    assert within([one], now + 10, now + 20) == []


def test_what_is_no_course_is_left_out():
    """A recording of a newer gpuwatch, or of a stranger."""
    baseline = Baseline(Store(None))
    for entity in (("gpu", "GPU-a"), HOST):
        baseline.add(reading(entity=entity))
    good, other = json.loads(json.dumps(shown(baseline)))
    assert course_from_json(good) == good
    nested = [{**other, "canary": "future"}, {**other, "readings": []}, {}]
    nested += [{**other, name: value} for name in other for value in ([[]], {"x": 1}, 5)
               if name in ("entity", "readings", "environments", "state")]  # fmt: skip
    late = [{**one, "time": 1e300} for one in other["readings"]]
    assert courses_from_json([*nested, {**other, "readings": late}, good]) == [good]
    (known,) = courses_from_json([{**good, "loss": float("inf")}])
    assert known["loss"] is None

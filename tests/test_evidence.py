"""Evidence: what a rule sees is saved, whatever is killed or full meanwhile, but not too often."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from node import QUIET
from running import Running, descendants, wait_for

from gpuwatch.alerts import AlertEngine
from gpuwatch.clock import SECOND_NS, ClockTriple
from gpuwatch.codec import Head, RowsBlock
from gpuwatch.gpu_signals import THROTTLE
from gpuwatch.history import History
from gpuwatch.quota import stamp
from gpuwatch.recorded import Recorded
from gpuwatch.recording import AlertsBlock, EventsBlock, RecordingReader, RecordingWriter
from gpuwatch.replay import ticks
from gpuwatch.ring import RingSchema, RingWriter
from gpuwatch.rules import RULES
from gpuwatch.signals import Column, Entity, Kind, Signal
from gpuwatch.source import EntityInfo
from gpuwatch.summation import row_dtype
from gpuwatch.tmpfs import ring_directory

RULE = "gpu_hw_thermal_slowdown"
SICK = "2"
POWER = Signal("power_watts", "Power.", Kind.GAUGE, "watts", label="rail")


def settings(gpus=4, after=1, recorder="free_ratio = 0", more=""):
    """Return a config of a node whose GPU grows hot two seconds after ready."""
    return f"""{QUIET.replace("[recorder]", "").replace("free_ratio = 0", "")}
[rules.{RULE}]
window_seconds = 2.0
{more}
[simulated]
gpus = {gpus}
fault_after_seconds = 2.0
[recorder]
before_seconds = 5.0
after_seconds = {after}
{recorder}
"""


def hot(directory, **changes):
    return Running(directory, "--source", "simulated:thermal", config=settings(**changes))


def recordings(running):
    return sorted((running.state / "recordings").glob("*"))


def saved(running, number=1):
    """Wait until so many recordings were saved; return the events that say so."""
    return wait_for(
        lambda: (found := running.events("recording_saved"))[number - 1 :] and found,
        what=f"{number} recordings",
    )


def contents(path):
    """Return a recording's head, rows blocks, events and alerts, and whether it is complete."""
    with contextlib.closing(RecordingReader(path)) as reader:
        blocks = list(reader)
        rows = [block for block in blocks if isinstance(block, RowsBlock)]
        events = [e for block in blocks if isinstance(block, EventsBlock) for e in block.events]
        alerts = [a for block in blocks if isinstance(block, AlertsBlock) for a in block.alerts]
        return reader.head, rows, events, alerts, reader.complete


def recorders(running):
    """Return the processes that write recordings now."""
    return [p for p, command in descendants(running.process.pid) if "gpuwatch.recording" in command]


def request(running, last="5s"):
    """Ask for a recording as a user does."""
    command = [*(sys.executable, "-m", "gpuwatch", "record", "--last", last)]
    command += ["--path.runtime", str(running.runtime)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_a_rule_detects_is_recorded(tmp_path):
    """The seconds before and after are in one file, which the alert names and which shows it."""
    with hot(tmp_path) as running:
        (event,) = saved(running)
        (path,) = recordings(running)
        fault = running.events("scenario_fault")[0]["time_ns"]
        wait_for(lambda: (running.alert(RULE) or {}).get("state") == "firing")
        assert running.alert(RULE)["recording"] == path.name
        assert running.value("gpuwatch_recordings_total") == 1
        log = running.log()
    assert path.name.endswith(f"Z-{RULE}-gpu-{SICK}.gwr")
    assert event["detail"].startswith(f"{path.name}: {RULE} on gpu {SICK}; ")
    assert event["detail"] in log
    head, rows, events, alerts, complete = contents(path)
    assert complete
    assert head.start_ns < fault < head.end_ns - 1 * SECOND_NS
    assert {ring.duty for ring in head.rings} == {"state"}
    assert sum(len(block.rows) for block in rows) > 100
    assert [found.name for found in events] == ["scenario_fault"]
    shown = [a for a in alerts if a["recording"] == path.name]
    assert [(a["rule"], a["entity"]) for a in shown] == [(RULE, ["gpu", SICK])]
    with contextlib.closing(RecordingReader(path)) as reader:
        engine = AlertEngine(RULES, {}, None, "")
        told = [(e.name, e.entity.id) for tick in ticks(reader) for e in engine.judge(tick)]
    assert (f"{RULE}_detected", SICK) in told


def heated(path, gpus):
    """Make a recording of 12 s in which all GPUs grow hot at once after 6."""
    start, period = 10**12, 10_000_000
    entities = [Entity("gpu", str(number)) for number in range(gpus)]
    schema = RingSchema(
        "state.fast", "state", "nvml_state", tuple(Column(e, THROTTLE) for e in entities), period
    )
    count = 12 * SECOND_NS // period
    infos = tuple(EntityInfo(e, {"gpu": e.id, "uuid": f"GPU-{e.id}"}) for e in entities)
    head = Head(
        start,
        start + 12 * SECOND_NS,
        (schema,),
        infos,
        clocks=(ClockTriple(start, start, start),),
    )
    with RecordingWriter(path, head) as writer:
        rows = np.zeros(count, row_dtype(schema))
        rows["time_ns"] = start + np.arange(count) * period
        rows["sequence"] = np.arange(count) + 1
        rows["integers"][count // 2 :] = 0x40  # hw_thermal_slowdown
        writer.rows(RowsBlock(0, period, start, rows))


def test_alerts_at_once_are_one_recording(tmp_path):
    """Twenty-four GPUs that grow hot together make one file, by one child; all alerts name it."""
    heated(tmp_path / "hot.gwr", 24)
    with Running(
        tmp_path, "--source", f"replay:{tmp_path / 'hot.gwr'}", config=settings()
    ) as running:
        most = 0
        while not running.events("recording_saved"):
            most = max(most, len(recorders(running)))
            assert running.is_ready()
        (path,) = recordings(running)
        wait_for(
            lambda: len([a for a in running.status()["alerts"] if a["state"] == "firing"]) == 24
        )
        alerts = [alert for alert in running.status()["alerts"] if alert["rule"] == RULE]
        assert {alert["recording"] for alert in alerts} == {path.name}
        assert running.value("gpuwatch_recordings_total") == 1
    assert most <= 1
    assert len([a for a in contents(path)[3] if a["recording"] == path.name]) == 24


def stopped_recorder(running):
    """Stop a recorder within its work; return its process and the file it writes."""
    (recorder,) = wait_for(lambda: recorders(running))
    os.kill(recorder, signal.SIGSTOP)
    when = running.events(f"{RULE}_detected")[0]["time"].partition(".")[0]
    stamp = when.replace("-", "").replace(":", "")
    return recorder, running.state / f"recordings/{stamp}Z-{RULE}-gpu-{SICK}.gwr.tmp"


def go_on(running):
    """Wait until the endpoint has shown two more seconds."""
    count = running.status()["ticks_closed"]
    wait_for(lambda: running.status()["ticks_closed"] > count + 8, what="ticks go on")


def test_a_recorder_is_killed(tmp_path):
    """On a node of 16 GPUs a recorder hangs and is killed: the part that is whole is evidence.

    The endpoint goes on, the file gets its final name, which the alert tells, and says what is
    missing.
    """
    heated(tmp_path / "whole.gwr", 1)
    with hot(tmp_path, gpus=16) as running:
        recorder, unfinished = stopped_recorder(running)
        # Wherever it was stopped: let it have written nearly all of a recording.
        unfinished.write_bytes((tmp_path / "whole.gwr").read_bytes()[:-40])
        go_on(running)
        os.kill(recorder, signal.SIGKILL)
        wait_for(lambda: (running.alert(RULE) or {}).get("recording") == unfinished.stem)
        (event,) = saved(running)
        assert event["detail"] == f"{unfinished.stem}: cut short, its recorder was killed"
        (failed,) = running.events("recording_failed")
        assert "the recorder ended without a word" in failed["detail"]
        assert running.value("gpuwatch_recordings_skipped_total", "failed") == 1
        assert recordings(running) == [unfinished.with_suffix("")]
    assert not contents(unfinished.with_suffix(""))[-1]


def test_the_daemon_is_killed_while_a_recorder_works(tmp_path):
    """The next daemon sees again what the rings hold, and makes the whole recording of it."""
    with hot(tmp_path, gpus=16) as running:
        _, unfinished = stopped_recorder(running)
        go_on(running)
        os.kill(running.child("daemon"), signal.SIGKILL)
        wait_for(lambda: any(RULE in event["detail"] for event in saved(running)))
        wait_for(lambda: running.value("gpuwatch_child_restarts_total", "daemon") == 1)
        name = wait_for(lambda: (running.alert(RULE) or {}).get("recording"))
        assert name.startswith(unfinished.name.removesuffix(".gwr.tmp"))
        assert contents(running.state / "recordings" / name)[-1]
        wait_for(lambda: not list(unfinished.parent.glob("*.tmp")))


def test_a_killed_recorder_leaves_what_is_whole(tmp_path):
    """A recorder that is killed in the midst leaves all rows up to the time that the file says."""
    noise, schemas = np.random.default_rng(1), []
    for number in range(8):
        entity = Entity("gpu", str(number))
        columns = tuple(Column(entity, POWER, str(label)) for label in range(16))
        schemas.append(RingSchema(f"state.gpu{number}", "state", "s", columns, 1_000_000))
        ring = RingWriter(tmp_path / f"state.1.gpu{number}.ring", schemas[-1], 20.0)
        values = noise.random((20_000, 16)).tolist()
        for index, cells in enumerate(values):
            ring.append(10**12 + index * 1_000_000, 0.0, 0.0, cells)
        ring.close()
    output = tmp_path / "cut.gwr"
    asked = {
        "output": str(output),
        "rings": [str(path) for path in sorted(tmp_path.glob("*.ring"))],
        "since_ns": 0,
        "until_ns": 2 * 10**12,
    }
    child = [sys.executable, "-m", "gpuwatch.recording"]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as recorder:
        recorder.stdin.write(json.dumps(asked).encode())
        recorder.stdin.close()
        unfinished = output.with_suffix(".gwr.tmp")
        wait_for(lambda: unfinished.exists() and unfinished.stat().st_size > 2_000_000)
        recorder.kill()
    said = subprocess.run(
        [sys.executable, "-m", "gpuwatch.salvage"],
        input=json.dumps({"unfinished": [str(unfinished)]}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(said.stdout) == {"adopted": ["cut.gwr"]}
    reader = RecordingReader(output)
    rows = [[] for _ in schemas]
    for block in reader:
        if isinstance(block, RowsBlock):
            rows[block.ring].append(block.rows["time_ns"])
    reader.close()
    assert not reader.complete
    assert reader.head.end_ns - reader.end_ns > 1 * SECOND_NS
    whole = (reader.end_ns - 10**12) // 1_000_000
    assert whole > 0
    for times in map(np.concatenate, rows):
        assert times[:whole].tolist() == [10**12 + index * 1_000_000 for index in range(whole)]


def test_a_file_without_rows_is_no_evidence(tmp_path):
    """Of what a killed recorder left, the parts without rows are removed at the next start."""
    directory = tmp_path / "state/recordings"
    directory.mkdir(parents=True)
    now = stamp(time.time_ns())  # what is made up is not kept for long
    heated(directory / f"{now}-a.gwr", 1)
    whole = (directory / f"{now}-a.gwr").read_bytes()
    for name, size in (("b", 0), ("c", 300), ("d", len(whole) - 40)):
        (directory / f"{now}-{name}.gwr.tmp").write_bytes(whole[:size])
    with hot(tmp_path, after=60) as running:
        wait_for(lambda: not list(directory.glob("*.tmp")))
        assert {path.name[17:] for path in recordings(running)} == {"a.gwr", "d.gwr"}


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of four megabytes where the state goes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=755", "none", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    (tmp_path / "state").symlink_to(path)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_without_room(tmp_path, disk):
    """Under the free-space floor nothing is written, and that is an alert; with room it goes on."""
    (disk / "filler").write_bytes(b"x" * 3_700_000)
    more = "[rules.recorder_disk_full]\nfor_seconds = 1.0\nhold_seconds = 1.0\n"
    with hot(tmp_path, recorder="free_ratio = 0.15", more=more) as running:
        wait_for(lambda: (running.alert("recorder_disk_full") or {}).get("state") == "firing")
        wait_for(lambda: running.value("gpuwatch_recordings_skipped_total", "disk_full"))
        answer = request(running)
        assert answer.returncode != 0
        (line,) = answer.stderr.splitlines()
        assert "less than 15% of the disk is free: make room there" in line
        assert str(tmp_path / "state/recordings") in line
        assert list((disk / "recordings").iterdir()) == []
        assert "15% is free" in running.status()["state"]["history_fault"]
        assert running.is_ready()
        (disk / "filler").unlink()
        wait_for(lambda: request(running).returncode == 0)
        wait_for(lambda: running.alert("recorder_disk_full") is None, 60, "the alert ends")
        wait_for(lambda: running.value("gpuwatch_history_rows_total"), what="history goes on")


def test_a_disk_that_fills_while_a_recorder_writes(tmp_path, disk):
    """There is room for the head alone: said in a line, nothing is left half, scrapes go on."""
    filler = disk / "filler"

    def refused():
        """Leave 12 kB, which the database may give or take, and ask for a recording."""
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        os.truncate(filler, max(0, filler.stat().st_size - 12_288))
        answer = request(running)
        return answer if answer.returncode else None

    with hot(tmp_path, after=60) as running:
        wait_for(lambda: running.status()["ticks_closed"] > 8)
        (line,) = wait_for(refused).stderr.splitlines()
        assert "No space left on device: make room there" in line
        assert not list((disk / "recordings").glob("*.tmp"))
        go_on(running)
        filler.unlink()
        assert contents(Path(request(running).stdout.strip()))[-1]


def test_no_limit_removes_the_recording_of_an_open_alert(tmp_path):
    """By number, bytes and age all others go; files of others stay."""
    directory = tmp_path / "state/recordings"
    directory.mkdir(parents=True)
    names = [f"2026010{day}T000000Z-request.gwr" for day in range(1, 6)]
    for name in [*names, "mine.gwr"]:
        (directory / name).write_text("old")
    recorder = "free_ratio = 0\nkeep_count = 1\nkeep_bytes = 0\nkeep_days = 0.0"
    with hot(tmp_path, recorder=recorder) as running:
        (event,) = saved(running)
        wait_for(lambda: (running.alert(RULE) or {}).get("state") == "firing")
        assert request(running).returncode == 0
        running.stop()
        mine = event["detail"].partition(":")[0]
        left = {path.name for path in recordings(running)}
    assert {"mine.gwr", mine} <= left
    assert not left & set(names)


def test_asked_for_recordings_say_so_in_their_name(tmp_path):
    """`gpuwatch record` gives a file named by its time, with the last seconds."""
    with hot(tmp_path, after=60) as running:
        wait_for(lambda: running.status()["ticks_closed"] > 8)
        path = Path(request(running, "1s").stdout.strip())
    assert path.name[16:] == "-request.gwr"
    head, *_, complete = contents(path)
    assert complete
    assert head.end_ns - head.start_ns <= 1 * SECOND_NS


def test_a_restarted_daemon_does_not_record_again(tmp_path):
    """What the rings still hold is judged again, but was saved before; the alert still names it."""
    with hot(tmp_path) as running:
        saved(running)
        (path,) = recordings(running)
        os.kill(running.child("daemon"), signal.SIGKILL)
        wait_for(lambda: running.value("gpuwatch_child_restarts_total", "daemon") == 1)
        wait_for(lambda: running.value("gpuwatch_recordings_skipped_total", "quiet"))
        wait_for(lambda: (running.alert(RULE) or {}).get("recording") == path.name)
        assert recordings(running) == [path]


def test_rings_of_a_killed_gpuwatch_are_saved(tmp_path):
    """All is killed at once while a recorder writes: the next start saves what there is of both.

    The rings of the last minute become a recording, but not each time; what the recorder had
    written whole gets its name, and says that it was cut short.
    """
    heated(tmp_path / "whole.gwr", 1)
    with hot(tmp_path) as running:
        fault = wait_for(lambda: running.events("scenario_fault"))[0]["time_ns"]
        _, unfinished = stopped_recorder(running)
        unfinished.write_bytes((tmp_path / "whole.gwr").read_bytes()[:-40])
        children = [pid for pid, _ in descendants(running.process.pid)]
        for pid in (running.process.pid, *children):
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
        wait_for(lambda: not any(Path(f"/proc/{pid}/cwd").exists() for pid in children))
        rings = ring_directory(running.runtime)
        assert list(rings.glob("*.ring"))
    with Running(tmp_path, "--source", "simulated", config=settings()) as running:
        (event,) = wait_for(lambda: running.events("rings_saved"))
        cut = unfinished.with_suffix("")
        (path,) = set(recordings(running)) - {cut}
        assert not contents(cut)[-1]
        assert path.name.endswith("Z-crash.gwr")
        assert event["detail"].startswith(f"{path.name}: ")
        assert not (rings / "crashed").exists()
        head, rows, _, _, complete = contents(path)
        assert complete
        assert head.start_ns < fault < head.end_ns
        assert {column.entity.id for ring in head.rings for column in ring.columns} == set("0123")
        assert {info.labels["gpu"] for info in head.entities} == set("0123")
        recorded = Recorded(path)
        ran = {course["entity"][1] for course in recorded.canaries}
        recorded.close()
        assert ran <= set("0123")
        assert "0" in ran
        assert sum(len(block.rows) for block in rows) > 100
        running.process.kill()
        running.process.wait()
    with Running(tmp_path, "--source", "simulated", config=settings()) as running:
        wait_for(lambda: not (rings / "crashed").exists())
        wait_for(lambda: running.value("gpuwatch_recordings_skipped_total", "quiet") == 1)
        assert set(recordings(running)) == {path, cut}
        assert running.stop() == 0
    assert not list(ring_directory(running.runtime).glob("*"))


def test_history_outlives_a_killed_daemon(tmp_path):
    """A daemon that is killed before it wrote leaves no gap: the next one reads the rings again."""
    with hot(tmp_path, gpus=2) as running:
        wait_for(lambda: running.events(f"{RULE}_detected"))
        os.kill(running.child("daemon"), signal.SIGKILL)
        wait_for(lambda: running.value("gpuwatch_child_restarts_total", "daemon") == 1)
        count = running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] > count + 4)
        assert running.stop() == 0
    history = History(running.state / "history")
    start, end = history.span()
    assert end - start > 2 * SECOND_NS
    assert history.gaps(start, end) == []
    hottest = max(
        np.nanmax(piece.values)
        for piece in history.read(
            start,
            end,
            entities=[Entity("gpu", "1")],
            signals=['gpu_throttle_active{reason="hw_thermal_slowdown"}'],
        )
    )
    assert hottest == 1.0
    assert {event.name for event in history.events(start, end)} >= {
        "scenario_fault",
        f"{RULE}_detected",
    }

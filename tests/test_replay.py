"""Replay: at full speed and in real time the same windows, round and round."""

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import wait_for

from gpuwatch import pulse as page
from gpuwatch.codec import Head, RowsBlock
from gpuwatch.control import connect
from gpuwatch.errors import RecordingError
from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.playback import Playback
from gpuwatch.recording import RecordingReader, RecordingWriter
from gpuwatch.replay import ticks
from gpuwatch.ring import RingReader, RingSchema
from gpuwatch.signals import UNKNOWN_INTEGER, Column, Entity, Event, Kind, Signal
from gpuwatch.source import EntityInfo, constant_from_json
from gpuwatch.summation import RingWindows, row_dtype
from gpuwatch.window import TICK_NS, Tick

MILLISECOND = 1_000_000
SECOND = 1_000_000_000
START = 5_000 * SECOND + 70 * MILLISECOND  # not on a tick
FIRST_TICK = 5_000 * SECOND + TICK_NS
GPUS = (Entity("gpu", "0"), Entity("gpu", "3"))
REASONS = ((0, "idle"), (2, "cap"))
THROTTLE = Signal("throttle_active", "Reasons.", Kind.BITS, "", label="reason", bits=REASONS)
ENERGY = Signal("energy_joules_total", "Energy.", Kind.COUNTER, "joules")
CLOCK = Signal("clock_hertz", "Clock.", Kind.GAUGE, "hertz", label="clock", bounds=(0.0, 1e10))
POWER = Signal("power_watts", "Power.", Kind.GAUGE, "watts", refresh_seconds=0.1)
ENERGY_NAME = "energy_joules_total"
CLOCK_NAME = 'clock_hertz{clock="sm"}'

FAST = RingSchema(
    "state.fast",
    "state",
    "nvml_state",
    (*(Column(gpu, THROTTLE) for gpu in GPUS), *(Column(gpu, CLOCK, "sm") for gpu in GPUS)),
    MILLISECOND,
)
SLOW = RingSchema("state.gpu0", "state", "nvml_state", (Column(GPUS[0], POWER),), 8 * MILLISECOND)
COUNTERS = RingSchema(
    "counters.rpc", "counters", "nvml_counters", (Column(GPUS[0], ENERGY),), 50 * MILLISECOND
)


def made_rows(schema: RingSchema, seconds: float) -> np.ndarray:
    """Return rows that look sampled: late, noisy, some cells unknown, two reads skipped."""
    noise = np.random.default_rng(7)
    count = int(seconds * SECOND / schema.period_ns)
    rows = np.zeros(count, row_dtype(schema))
    late = noise.gamma(2.0, 3e-5, count)
    rows["late"] = late
    rows["time_ns"] = START + np.arange(count) * schema.period_ns + (late * 1e9).astype(np.int64)
    rows["read"] = 2e-6
    rows["integers"] = np.cumsum(noise.integers(0, 5, (count, schema.integers)), axis=0) + 1000
    rows["gauges"] = noise.integers(1, 9, (count, schema.gauges)) * 100.5
    rows["gauges"][noise.random(rows["gauges"].shape) < 0.05] = math.nan
    rows["integers"][noise.random(rows["integers"].shape) < 0.05] = UNKNOWN_INTEGER
    rows = np.delete(rows, [count // 3, count // 3 + 1])
    rows["sequence"] = np.arange(len(rows)) + 1
    return rows


def write_recording(path: Path, rings: dict[RingSchema, np.ndarray], **head: Any) -> None:
    """Write rows as the recorder does: in slices of a second over all rings."""
    schemas = tuple(rings)
    end = max(int(rows["time_ns"][-1]) + 1 for rows in rings.values())
    fields: dict[str, Any] = {"start_ns": START, "end_ns": end, **head}
    with RecordingWriter(path, Head(rings=schemas, **fields)) as writer:
        writer.events([Event(FIRST_TICK + SECOND, GPUS[0], "xid", "79")])
        for floor in range(START, end, SECOND):
            for index, (schema, rows) in enumerate(rings.items()):
                cut = slice(*np.searchsorted(rows["time_ns"], [floor, floor + SECOND]))
                writer.rows(RowsBlock(index, schema.period_ns, floor, rows[cut]))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[RecordingReader]:
    reader = RecordingReader(path)
    try:
        yield reader
    finally:
        reader.close()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a recording of three seconds: two rings of one duty, one of another."""
    path = tmp_path_factory.mktemp("recording") / "three.gwr"
    rings = {schema: made_rows(schema, 3.0) for schema in (FAST, SLOW, COUNTERS)}
    write_recording(
        path,
        rings,
        entities=(
            EntityInfo(GPUS[0], {"gpu": "0", "uuid": "GPU-0"}),
            EntityInfo(GPUS[1], {"gpu": "3", "uuid": "GPU-3"}),
        ),
        constants={"state": [(Column(GPUS[0], CLOCK, "sm"), 1.98e9)]},
    )
    return path


def plain(tick: Tick, shift_ns: int = 0) -> dict[str, tuple[object, ...]]:
    """Return a tick's windows of gpus in comparable form, moved back by `shift_ns`."""
    flat = {}
    for entity, windows in tick.windows.items():
        for name, window in windows.items():
            start, end, *rest = astuple(window)
            flat[f"{entity} {name}"] = (
                start - shift_ns,
                end - shift_ns,
                *("nan" if value != value else value for value in rest),
            )
    return flat


def test_ticks_are_the_windows_of_the_rows(recording: Path) -> None:
    """A pass gives every whole tick, as RingWindows sums up the recorded rows themselves."""
    with opened(recording) as reader:
        replayed = list(ticks(reader))
    assert [tick.start_ns for tick in replayed] == [FIRST_TICK + n * TICK_NS for n in range(11)]
    for schema in (FAST, SLOW, COUNTERS):
        rows = made_rows(schema, 3.0)
        windows = RingWindows(schema)
        windows.add(rows[rows["time_ns"] >= FIRST_TICK].tobytes())
        for tick in replayed:
            expected = Tick(tick.start_ns, tick.end_ns)
            windows.close(expected)
            got = plain(tick)
            assert plain(expected).items() <= got.items()


def test_ticks_carry_constants_events_and_sources(recording: Path) -> None:
    """Constants, events at their time, and source_up 1 are in the ticks."""
    with opened(recording) as reader:
        replayed = list(ticks(reader))
    assert all(tick.constant(GPUS[0], CLOCK_NAME) == 1.98e9 for tick in replayed)
    assert [len(tick.events) for tick in replayed] == [0] * 4 + [1] + [0] * 6
    for tick, source in itertools.product(replayed, ("nvml_state", "nvml_counters")):
        window = tick.window(Entity("source", source), "source_up")
        assert window is not None
        assert (window.mean, window.covered_ns) == (1.0, TICK_NS)


def test_ticks_know_the_interfaces_of_a_port(tmp_path: Path) -> None:
    """What an interface counts is its port's, at full speed as in a daemon."""
    path = tmp_path / "linked.gwr"
    nic = Entity("interface", "rail0")
    labels = {"interface": "rail0", "device": "mlx5_0", "port": "1"}
    rings = {SLOW: made_rows(SLOW, 1.0)}
    write_recording(path, rings, entities=(EntityInfo(nic, labels),))
    with opened(path) as reader:
        assert next(ticks(reader)).links == {Entity("rdma_port", "mlx5_0/1"): (nic,)}


def test_source_is_down_where_its_rings_have_a_gap(tmp_path: Path) -> None:
    """A second without rows from a source gives source_up 0 in the ticks that had none."""
    rows = made_rows(FAST, 3.0)
    gap = FIRST_TICK + 4 * TICK_NS
    rows = rows[(rows["time_ns"] < gap) | (rows["time_ns"] >= gap + SECOND)]
    write_recording(tmp_path / "r.gwr", {FAST: rows})
    with opened(tmp_path / "r.gwr") as reader:
        up = [tick.window(Entity("source", "nvml_state"), "source_up") for tick in ticks(reader)]
    assert [window.mean for window in up if window] == [1.0] * 4 + [0.0] * 4 + [1.0] * 3


def test_seam_is_one_uncovered_tick(recording: Path) -> None:
    """Between two rounds lies exactly one tick in which no signal is covered; all others are."""
    with opened(recording) as reader:
        replayed = list(ticks(reader, loop_for_seconds=9.0))
    assert [tick.start_ns for tick in replayed] == [FIRST_TICK + n * TICK_NS for n in range(36)]
    covered = [
        {
            window.covered_ns > 0
            for entity, windows in tick.windows.items()
            for window in windows.values()
            if entity.kind == "gpu"
        }
        for tick in replayed
    ]
    seams = [11, 23, 35]
    assert [index for index, kinds in enumerate(covered) if kinds == {False}] == seams
    assert all(covered[index] == {True} for index in range(36) if index not in seams)


def test_what_ended_is_over_and_misses_nothing(tmp_path: Path) -> None:
    """A ring that says in its last row that it has ended is as it was in the live node: no more.

    Its values do not hold for two periods more, no later tick has windows of it, and nothing counts
    as missing; in the next round it is there again.
    """
    rows = made_rows(SLOW, 1.1)
    end = np.zeros(1, rows.dtype)
    end["time_ns"], end["late"] = rows["time_ns"][-1] + 2 * MILLISECOND, math.nan
    end["integers"], end["gauges"] = UNKNOWN_INTEGER, math.nan
    end["sequence"] = len(rows) + 1
    write_recording(
        tmp_path / "r.gwr", {SLOW: np.append(rows, end), COUNTERS: made_rows(COUNTERS, 3.0)}
    )
    with opened(tmp_path / "r.gwr") as reader:
        replayed = list(ticks(reader, loop_for_seconds=5.0))
    windows = [tick.window(GPUS[0], "power_watts") for tick in replayed]
    ended_ns, seam = int(end["time_ns"][0]), 11
    there = [tick.start_ns < ended_ns for tick in replayed[:seam]] + [True]
    assert [window is not None for window in windows] == (2 * there)[: len(windows)]
    last = windows[there.index(False) - 1]
    assert last is not None
    assert 0 < last.covered_ns <= ended_ns - last.start_ns
    missing = [sum(part.missing for part in tick.rows if part.period_ns == SLOW.period_ns)
               for tick in replayed]  # fmt: skip
    assert sum(missing[:seam]) <= 2  # those that were skipped on purpose


def test_counters_go_on_over_the_seam(recording: Path) -> None:
    """A counter's last value never falls from round to round, and rounds rise alike."""
    with opened(recording) as reader:
        replayed = list(ticks(reader, loop_for_seconds=9.0))
    windows = [tick.window(GPUS[0], ENERGY_NAME) for tick in replayed]
    values = [window.last for window in windows if window]
    assert len(values) == 36
    assert values == sorted(values)
    rises = [window.increase for window in windows if window]
    assert rises[1:11] == rises[13:23] == rises[25:35]
    assert sum(rises) == values[-1] - (windows[0].minimum if windows[0] else 0)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 1000) | st.just(UNKNOWN_INTEGER), min_size=20, max_size=20),
    st.integers(2, 4),
)
def test_counters_of_any_shape_rise_alike_in_each_round(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], rounds: int
) -> None:
    """Also with resets by the hardware in it, a counter rises by the same amount in each round."""
    rows = np.zeros(20, row_dtype(COUNTERS))
    rows["time_ns"] = FIRST_TICK + np.arange(20) * COUNTERS.period_ns
    rows["integers"][:, 0] = values
    rows["sequence"] = np.arange(20) + 1
    path = tmp_path_factory.mktemp("any") / "r.gwr"
    write_recording(path, {COUNTERS: rows}, end_ns=FIRST_TICK + 4 * TICK_NS)
    with opened(path) as reader:
        replayed = list(ticks(reader, loop_for_seconds=rounds * 5 / 4))
    rises = [tick.windows[GPUS[0]][ENERGY_NAME].increase for tick in replayed]
    sums = [sum(rises[start : start + 5]) for start in range(0, 5 * rounds, 5)]
    assert sums == [sums[0]] * rounds
    assert min(sums) >= 0


def test_rings_of_one_schema_are_one_track(tmp_path: Path) -> None:
    """Two generations of a sampler give one row of windows, the gap between them uncovered."""
    rows = made_rows(FAST, 3.0)
    cut = int(np.searchsorted(rows["time_ns"], FIRST_TICK + SECOND))
    path = tmp_path / "r.gwr"
    head = Head(start_ns=START, end_ns=int(rows["time_ns"][-1]), rings=(FAST, FAST))
    with RecordingWriter(path, head) as writer:
        writer.rows(RowsBlock(1, MILLISECOND, START, rows[cut + 500 :]))
        writer.rows(RowsBlock(0, MILLISECOND, START, rows[:cut]))
    with opened(path) as reader:
        replayed = list(ticks(reader))
    shares = [tick.windows[GPUS[0]][CLOCK_NAME].covered_ns > 0.9 * TICK_NS for tick in replayed]
    assert shares == [True] * 4 + [False] * 2 + [True] * 5
    assert {len(tick.rows) for tick in replayed} == {1}


def test_a_recording_cut_short_plays_its_whole_slices(tmp_path: Path, recording: Path) -> None:
    """Without its end, a recording plays up to where all rings have rows, with the same windows."""
    data = recording.read_bytes()
    cut = tmp_path / "cut.gwr"
    cut.write_bytes(data[:-100])
    with opened(recording) as whole, opened(cut) as part:
        expected, got = list(ticks(whole)), list(ticks(part))
    assert len(got) == (START + 2 * SECOND - FIRST_TICK) // TICK_NS
    assert list(map(plain, got)) == list(map(plain, expected[: len(got)]))


def test_too_short_a_recording_is_refused(tmp_path: Path) -> None:
    """A recording without one whole tick is refused in one line that names it."""
    path = tmp_path / "short.gwr"
    write_recording(path, {FAST: made_rows(FAST, 0.2)})
    with opened(path) as reader, pytest.raises(RecordingError, match="shorter than a tick"):
        list(ticks(reader))


@settings(max_examples=10, deadline=None)
@given(st.integers(-4_000_000_000_000, 4_000_000_000_000))
def test_moving_changes_no_window(recording: Path, shift: int) -> None:
    """Moved in time by anything, a recording gives windows that are the same but for the time."""
    with opened(recording) as reader:
        playback = Playback(reader)
        windows = [RingWindows(schema) for schema in playback.tracks]
        moved = []
        for step in playback.steps(shift, loop=False):
            tick = Tick(step.start_ns, step.end_ns)
            for piece in step.pieces:
                windows[piece.track].add(piece.rows.tobytes())
            for ring in windows:
                ring.close(tick)
            moved.append(plain(tick, shift))
        for tick, expected in zip(moved, ticks(reader), strict=True):
            assert tick.items() <= plain(expected).items()


def test_bundled_recording_lies_in_the_package() -> None:
    """`replay:bundled` is a file of the package."""
    assert BUNDLED_RECORDING.name == "h200.gwr"
    assert BUNDLED_RECORDING.parent.name == "data"


class LiveReplay:
    """A replay child with its pulse, as the supervisor starts it."""

    def __init__(self, runtime: Path, file: Path) -> None:
        self.runtime = runtime
        self.pulse = page.Pulse.create(generation=4)
        config = {
            "paths": {"runtime": str(runtime)},
            "ring": {"seconds": 60},
            "source": {"kind": "replay", "scenario": "", "file": str(file)},
        }
        child_settings = {
            "config": config,
            "generation": 4,
            "pulse": self.pulse.descriptor,
            "ring_directory": str(runtime),
            "attempt": 0,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpuwatch.replay"],
            stdin=subprocess.PIPE,
            pass_fds=(self.pulse.descriptor,),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(child_settings).encode())
        self.process.stdin.close()

    def wait_until(self, condition: Any, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, "the replay child ended"
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def manifests(self) -> dict[str, Any]:
        self.wait_until(lambda: len(list(self.runtime.glob("*.json"))) == 2)
        return {path.stem: json.loads(path.read_text()) for path in self.runtime.glob("*.json")}

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.pulse.close()


@contextlib.contextmanager
def live_replay(runtime: Path, file: Path) -> Iterator[LiveReplay]:
    child = LiveReplay(runtime, file)
    try:
        yield child
    finally:
        child.close()


def test_live_replay_gives_the_same_windows(tmp_path: Path, recording: Path) -> None:
    """Real time into rings, read back, gives the windows of full speed, also over the seam."""
    with opened(recording) as reader:
        offline = list(ticks(reader, loop_for_seconds=4.0))
        step = next(Playback(reader).steps(0, loop=False))
        first = next(piece for piece in step.pieces if piece.track == 0).rows["time_ns"][0]
    with live_replay(tmp_path, recording) as child:
        paths = [Path(path) for name in child.manifests().values() for path in name["rings"]]
        rings = [RingReader(path) for path in sorted(paths, reverse=True)]
        assert {ring.schema for ring in rings} == {FAST, SLOW, COUNTERS}
        fast = next(ring for ring in rings if ring.schema == FAST)
        child.wait_until(lambda: fast.head)
        began = np.frombuffer(fast.read(0)[1], row_dtype(FAST))["time_ns"][0]
        shift = int(began - first)
        assert shift % TICK_NS == 0
        end = offline[-1].end_ns + shift
        child.wait_until(lambda: all(ring.watermark_ns >= end for ring in rings))
        windows = []
        for ring in rings:
            windows.append(RingWindows(ring.schema))
            windows[-1].period_ns = ring.period_ns
            windows[-1].add(ring.read(0)[1])
            ring.close()
    assert len(offline) == 16
    for expected in offline:
        tick = Tick(expected.start_ns + shift, expected.end_ns + shift)
        for ring_windows in windows:
            ring_windows.close(tick)
        wanted = {k: v for k, v in plain(expected).items() if not k.startswith("source")}
        assert plain(tick, shift) == wanted


def test_live_replay_announces_each_recorded_duty(tmp_path: Path, recording: Path) -> None:
    """Manifests name the recorded duties, rings, entities by number, constants and sources."""
    with live_replay(tmp_path, recording) as child:
        manifests = child.manifests()
        pid = child.process.pid
    assert sorted(manifests) == ["counters", "state"]
    state = manifests["state"]
    assert (state["duty"], state["generation"], state["pid"]) == ("state", 4, pid)
    assert [Path(path).name for path in state["rings"]] == [
        "state.4.fast.ring",
        "state.4.gpu0.ring",
    ]
    assert state["sources"] == {"nvml_state": {"state": "on", "reason": ""}}
    assert [info["labels"]["gpu"] for info in state["entities"]] == ["0", "3"]
    constants = [constant_from_json(constant) for constant in state["constants"]]
    assert constants == [(Column(GPUS[0], CLOCK, "sm"), 1.98e9)]
    assert [info["labels"]["gpu"] for info in manifests["counters"]["entities"]] == ["0"]
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o640


def test_live_replay_sends_recorded_events(tmp_path: Path, recording: Path) -> None:
    """Who asks for events gets the sources' state and each recorded event when it is due."""
    with live_replay(tmp_path, recording) as child:
        child.manifests()
        connection = connect(tmp_path / "state.4.sock")
        assert connection is not None
        assert connection.send({"command": "events", "after": -1})
        assert connection.send({"command": "interval", "source": "nvml_state", "scale": 2})
        messages: list[dict[str, Any]] = []

        def heard() -> bool:
            while (message := connection.receive()) is not None:
                messages.append(message)
            return len(messages) >= 3

        child.wait_until(heard)
        connection.close()
        other = connect(tmp_path / "counters.4.sock")
        assert other is not None
        assert other.send({"command": "events", "after": -1})
        assert other.send({"command": "none"})
        answers: list[dict[str, Any]] = []

        def answered() -> bool:
            while (message := other.receive()) is not None:
                answers.append(message)
            return any("error" in message for message in answers)

        child.wait_until(answered)
        other.close()
    assert not any("event" in message for message in answers), "each event is told once"
    state = next(message["state"] for message in messages if "state" in message)
    assert set(state["sources"]) == {"nvml_state", "nvml_counters"}
    event = next(message for message in messages if "event" in message)
    assert event["sequence"] == 1
    assert event["event"]["name"] == "xid"
    assert (event["event"]["time_ns"] - FIRST_TICK) % TICK_NS == 0
    assert any("error" in message for message in messages)


def test_live_replay_ends_when_told(tmp_path: Path, recording: Path) -> None:
    """SIGTERM ends it with status 0, and its sockets are gone."""
    with live_replay(tmp_path, recording) as child:
        child.manifests()
        assert child.pulse.phase == "running"
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(timeout=60) == 0
    assert list(tmp_path.glob("*.sock")) == []


def test_live_replay_ends_when_abandoned(tmp_path: Path, recording: Path) -> None:
    """Once another generation is current it writes no more rows and ends."""
    with live_replay(tmp_path, recording) as child:
        ring = RingReader(Path(child.manifests()["state"]["rings"][0]))
        child.pulse.words[page.GENERATION] = 5
        assert child.process.wait(timeout=60) == 0
        ring.close()


def test_live_replay_starts_anew_when_a_ring_was_removed(tmp_path: Path, recording: Path) -> None:
    """It says so and ends, for its supervisor to start another: else nothing could be recorded."""
    with live_replay(tmp_path, recording) as child:
        ring = Path(child.manifests()["state"]["rings"][0])
        ring.unlink()
        wait_for(lambda: child.pulse.phase == "unavailable")
        assert child.pulse.names() == [f"{ring}: removed or overwritten: starting anew"]


def test_live_replay_says_why_it_cannot(tmp_path: Path) -> None:
    """A file that is no recording is reported through the pulse, in one line that names it."""
    file = tmp_path / "foreign.gwr"
    file.write_bytes(os.urandom(100))
    with live_replay(tmp_path, file) as child:
        child.wait_until(lambda: child.pulse.phase == "unavailable")
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(timeout=60) == 75
        (reason,) = child.pulse.names()
    assert reason.startswith(f"{file}: not a gpuwatch recording")

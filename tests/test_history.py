"""History: what was watched comes back as it was, and whatever happens to a file, what is whole."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import wait_for
from ticks import Rise, node, window

from gpuwatch import archive, config
from gpuwatch.archive import Archive
from gpuwatch.clock import SECOND_NS, ClockTriple, read_clocks
from gpuwatch.codec import Head
from gpuwatch.history import FILE_NS, History
from gpuwatch.history_writer import Batch, HistoryWriter
from gpuwatch.lookback import Lookback
from gpuwatch.pm_signals import DRAM_READ
from gpuwatch.quota import Limits, stamp, sweep
from gpuwatch.ring import RingSchema
from gpuwatch.signals import Column, Entity, Event, Kind, Signal
from gpuwatch.source import EntityInfo
from gpuwatch.timeline import Grid, Timeline
from gpuwatch.window import TICK_NS, Tick

GPU, OTHER = Entity("gpu", "0"), Entity("gpu", "1")
POWER = Signal("gpu_power_watts", "Power.", Kind.GAUGE, "watts")
CLOCK = Signal("gpu_clock_hertz", "Clock.", Kind.GAUGE, "hertz", label="clock")
ENERGY = Signal("gpu_energy_joules_total", "Energy.", Kind.COUNTER, "joules", scale=0.001)
THROTTLE = Signal(
    "gpu_throttle_active", "Reasons.", Kind.BITS, "", label="reason", bits=((0, "idle"), (2, "cap"))
)
CAP = 'gpu_throttle_active{reason="cap"}'
COLUMNS = [Column(GPU, THROTTLE), Column(GPU, ENERGY), Column(GPU, POWER), Column(GPU, CLOCK, "sm")]
INFOS = [EntityInfo(GPU, {"gpu": "0", "uuid": "GPU-0"})]
CONSTANTS = {"state": [(Column(GPU, POWER), 700.0)]}
SETTINGS = config.load(None, {})
NOON = ClockTriple(10**12, 1_795_953_600 * SECOND_NS, 10**12)  # 2026-11-29T12:00:00Z
ALWAYS = (0, 2**62)


@pytest.fixture
def fast(monkeypatch):
    """Let nothing be due by itself: tests hand over when they want to."""
    monkeypatch.setattr(archive, "BATCH_NS", 10**18)


@contextlib.contextmanager
def archived(state, boot_id="boot", columns=COLUMNS, **changes):
    """Yield an archive that follows `columns`; what it was given is written in the end."""
    made = Archive(state, {**SETTINGS, **changes}, boot_id, made_up=False)
    made.attach(columns)
    try:
        yield made
    finally:
        made.hand_over(INFOS, CONSTANTS, ())
        made.close()


def feed(made, numbers, value=float, entity=GPU):
    """Add ticks of these numbers, in which every column holds `value(number)`."""
    for number in numbers:
        columns = {
            "gpu_power_watts": value(number),
            'gpu_clock_hertz{clock="sm"}': value(number) * 1e6,
            "gpu_energy_joules_total": value(number) * 1000,
            CAP: 0.25,
        }
        made.add(node(START + number * TICK_NS, {entity: columns}))


START = 4000 * TICK_NS


def hand_over(made, infos=INFOS, **more):
    """Have everything written, and wait until it is, or lost."""
    before = made.rows + made.rows_lost + len(made._times)
    made.hand_over(infos, CONSTANTS, (), **more)
    wait_for(lambda: made.rows + made.rows_lost == before)


def read(directory, **chosen):
    """Return all rows of these columns as one array, and their times."""
    pieces = list(History(directory / "history").read(*ALWAYS, **chosen))
    return np.concatenate([p.values for p in pieces]), np.concatenate([p.time_ns for p in pieces])


def files(directory):
    return sorted((directory / "history").glob("*"))


def test_what_was_watched_comes_back(tmp_path, fast):
    """Gauges by their mean, counters by their count, bits by their share; labels and constants."""
    with archived(tmp_path) as made:
        feed(made, range(100))
        made.note(Event(START + 50 * TICK_NS, GPU, "xid", "79"))
        hand_over(made)
    history = History(tmp_path / "history")
    (piece,) = history.read(*ALWAYS)
    names = [column.name for column in piece.columns]
    assert names == [
        "gpu_energy_joules_total",
        'gpu_throttle_active{reason="idle"}',
        CAP,
        "gpu_power_watts",
        'gpu_clock_hertz{clock="sm"}',
    ]
    numbers = np.arange(100.0)
    found = dict(zip(names, piece.values.T, strict=True))
    assert (found["gpu_energy_joules_total"] == numbers * 1000).all()
    assert (found["gpu_power_watts"] == numbers).all()
    assert (found['gpu_clock_hertz{clock="sm"}'] == numbers * 1e6).all()
    assert (found[CAP] == 0.25).all()
    assert np.isnan(found['gpu_throttle_active{reason="idle"}']).all()
    ends = START + np.arange(1, 101) * TICK_NS
    offset = read_clocks().realtime_ns - read_clocks().monotonic_ns
    assert np.abs(piece.time_ns - ends - offset).max() < 0.1 * SECOND_NS
    assert piece.head.entities == tuple(INFOS)
    assert piece.head.constants == CONSTANTS
    assert piece.head.boot_id == "boot"
    (event,) = history.events(*ALWAYS)
    assert (event.name, event.entity, event.time_ns) == ("xid", GPU, piece.time_ns[49])
    assert history.columns(*ALWAYS) == list(piece.columns)
    assert history.span() == (piece.time_ns[0], piece.time_ns[-1])
    assert history.faults == []


def test_the_mean_is_over_the_time_that_is_known(tmp_path, fast):
    """A tick that is half covered has the mean of that half; one that is not covered has none."""
    half = window(START, START + TICK_NS, 300.0, TICK_NS // 2)
    none = window(START, START + TICK_NS, None)
    with archived(tmp_path) as made:
        for number, found in enumerate((half, none)):
            tick = Tick(START + number * TICK_NS, START + (number + 1) * TICK_NS)
            tick.windows[GPU] = {"gpu_power_watts": found, "gpu_energy_joules_total": found}
            made.add(tick)
        hand_over(made)
    values, _ = read(tmp_path, signals=["gpu_power_watts", "gpu_energy_joules_total"])
    assert values[0].tolist() == [300.0, 300.0]
    assert np.isnan(values[1]).all()


cells = st.one_of(
    st.floats(-(2.0**99), 2.0**99, width=32), st.just(math.nan), st.sampled_from([0.0, -0.0, 1e-40])
)
counts = st.one_of(st.integers(0, 2**51), st.none())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(counts, cells), max_size=20), min_size=1, max_size=4))
def test_cells_come_back_as_they_were(tmp_path_factory, batches):
    """Counts are exact, gauges are the float32 they were, unknown is NaN, over any batches."""
    directory = tmp_path_factory.mktemp("history")
    schema = RingSchema("h", "h", "h", (COLUMNS[1], COLUMNS[2]), TICK_NS)
    head = Head(10**12, 10**12, (schema,), clocks=(NOON,), boot_id="b")
    writer = HistoryWriter(directory, "b")
    now, rows = 10**12, []
    for batch in batches:
        times = [now + index * TICK_NS for index in range(len(batch))]
        now += len(batch) * TICK_NS
        rows += batch
        counters = [np.array([math.nan if n is None else n * 0.001]) for n, _ in batch]
        writer.write(Batch(head, times, counters, [np.array([cell]) for _, cell in batch], []))
    writer.close()
    found = [piece.values for piece in History(directory).read(*ALWAYS)]
    given_ = np.array(
        [[math.nan if n is None else n * 0.001, np.float32(cell)] for n, cell in rows]
    ).reshape(-1, 2)
    np.testing.assert_array_equal(np.concatenate([np.empty((0, 2)), *found]), given_)


def test_columns_are_chosen_by_entity_and_name(tmp_path, fast):
    """Only what is asked for is given: by entity, by signal, by column; times also of nothing."""
    columns = [column._replace(entity=gpu) for gpu in (GPU, OTHER) for column in COLUMNS]
    with archived(tmp_path, columns=columns) as made:
        feed(made, range(10))
        hand_over(made)
    chosen = History(tmp_path / "history").read
    (piece,) = chosen(*ALWAYS, entities=[OTHER])
    assert {column.entity for column in piece.columns} == {OTHER}
    (piece,) = chosen(*ALWAYS, signals=["gpu_throttle_active"], entities=[GPU])
    assert [column.label for column in piece.columns] == ["idle", "cap"]
    (piece,) = chosen(*ALWAYS, signals=[CAP])
    assert [column.entity for column in piece.columns] == [GPU, OTHER]
    assert piece.values[:, 0].tolist() == [0.25] * 10
    (piece,) = chosen(*ALWAYS, signals=())
    assert piece.values.shape == (10, 0)


def test_time_is_chosen_by_wall_clock(tmp_path, fast):
    """The first row asked for is given and the last is not; other files are not even opened."""
    with archived(tmp_path) as made:
        feed(made, range(100))
        hand_over(made)
    (tmp_path / "history" / "20200101T000000Z.gwh").write_text("never opened")
    _, times = read(tmp_path)
    history = History(tmp_path / "history")
    (piece,) = history.read(int(times[20]), int(times[30]))
    assert piece.time_ns.tolist() == times[20:30].tolist()
    assert history.faults == []
    assert list(history.read(0, int(times[0]))) == []
    assert "not a gpuwatch history" in history.faults[0]


def test_any_stretch_of_time_has_all_its_rows(tmp_path, fast):
    """Blocks that are passed over for their time had nothing of it, in any file."""
    with archived(tmp_path) as made:
        for first in range(0, 240, 7):
            feed(made, range(first, first + 7))
            hand_over(made, [EntityInfo(GPU, {"gpu": "0", "half": str(first // 126)})])
    assert len(files(tmp_path)) >= 2
    _, times = read(tmp_path)
    history = History(tmp_path / "history")
    rng = np.random.default_rng(5)
    for low, high in np.sort(rng.integers(times[0] - TICK_NS, times[-1] + TICK_NS, (60, 2))):
        found = [piece.time_ns for piece in history.read(int(low), int(high), signals=())]
        expected = times[(times >= low) & (times < high)]
        assert np.concatenate([times[:0], *found]).tolist() == expected.tolist()


def test_a_restart_goes_on_where_rows_end(tmp_path, fast):
    """A new daemon reads again what the rings hold: each row is there once, in two files."""
    with archived(tmp_path) as made:
        feed(made, range(100))
    with archived(tmp_path) as made:
        feed(made, range(60, 150))
    values, times = read(tmp_path, signals=["gpu_power_watts"])
    assert values[:, 0].tolist() == list(range(150))
    assert np.unique(times).size == 150
    assert len(files(tmp_path)) == 2
    with archived(tmp_path, boot_id="another") as made:  # the clock began anew
        feed(made, range(20))
    assert len(read(tmp_path)[1]) == 170


def test_no_rate_is_made_of_what_a_daemon_counted_before_a_crash(tmp_path, fast, monkeypatch):
    """The next one counts from 0, and from the rows on that the rings still have."""
    monkeypatch.setattr(archive, "read_clocks", lambda: NOON)
    rate, name = 1e12, DRAM_READ.name
    risen = {GPU: {name: Rise(rate * TICK_NS / SECOND_NS)}}
    for numbers in (range(400), range(240, 480)):
        with archived(tmp_path, columns=[Column(GPU, DRAM_READ)]) as made:
            for number in numbers:
                made.add(node(START + number * TICK_NS, risen))
    _, times = read(tmp_path)
    assert len(times) == 480
    timeline = Timeline(Grid(int(times[0]), TICK_NS, 479))
    chosen = {"entities": None, "signals": [name]}
    Lookback().put(timeline, lambda line: True, [], str(tmp_path / "history"), **chosen)
    (line,) = timeline.series()
    assert line["mean"] == [*[rate] * 399, None, *[rate] * 79]


def test_new_columns_begin_a_new_file(tmp_path, fast):
    """Hotplug: rows before and after have the columns of their time; a GPU that is gone is NaN."""
    more = [*COLUMNS, Column(OTHER, POWER)]
    with archived(tmp_path) as made:
        feed(made, range(10))
        hand_over(made)
        made.attach(more)
        feed(made, range(10, 20), entity=OTHER)
        made.attach(COLUMNS)
        feed(made, range(20, 30))
        hand_over(made)
        feed(made, range(30, 40))
        hand_over(made)
    pieces = list(History(tmp_path / "history").read(*ALWAYS, signals=["gpu_power_watts"]))
    assert [[column.entity for column in piece.columns] for piece in pieces] == [
        [GPU],
        [GPU, OTHER],
        [GPU],
    ]
    assert [len(piece.time_ns) for piece in pieces] == [10, 20, 10]
    middle = pieces[1].values
    assert middle[:10, 1].tolist() == list(range(10, 20))
    assert np.isnan(middle[:10, 0]).all()
    assert middle[10:, 0].tolist() == list(range(20, 30))
    assert np.isnan(middle[10:, 1]).all()


def test_columns_that_come_while_the_first_rows_wait_share_their_file(tmp_path, fast):
    """Samplers announce themselves one after the other at the start: that is one file."""
    with archived(tmp_path, columns=COLUMNS[:1]) as made:
        feed(made, range(4))
        made.attach(COLUMNS)
        feed(made, range(4, 8))
        hand_over(made)
    values, _ = read(tmp_path, signals=["gpu_power_watts"])
    assert np.isnan(values[:4]).all()
    assert values[4:, 0].tolist() == [4, 5, 6, 7]
    assert len(files(tmp_path)) == 1


def test_another_gpu_in_the_slot_begins_a_new_file(tmp_path, fast):
    """What a file says of its entities holds for all of its rows."""
    with archived(tmp_path) as made:
        for number, uuid in enumerate(("GPU-0", "GPU-0", "GPU-9")):
            feed(made, [number])
            hand_over(made, [EntityInfo(GPU, {"uuid": uuid})])
    pieces = list(History(tmp_path / "history").read(*ALWAYS))
    assert [piece.head.entities[0].labels["uuid"] for piece in pieces] == ["GPU-0"] * 2 + ["GPU-9"]
    assert len(files(tmp_path)) == 2


def test_a_file_holds_an_hour(tmp_path, fast):
    """Files are found by the time in their name, so none reaches further than an hour."""
    ticks_an_hour = FILE_NS // TICK_NS
    with archived(tmp_path) as made:
        for start in range(0, 3 * ticks_an_hour, ticks_an_hour // 4):
            feed(made, range(start, start + 4))
            hand_over(made)
    assert len(files(tmp_path)) == 3
    assert len(read(tmp_path)[1]) == 48
    history = History(tmp_path / "history")
    for piece in history.read(*ALWAYS):
        found = history.read(int(piece.time_ns[0]), int(piece.time_ns[-1]) + 1)
        assert [one.time_ns.tolist() for one in found] == [piece.time_ns.tolist()]


def test_a_step_of_the_wall_clock_moves_only_what_comes_after(tmp_path, fast, monkeypatch):
    """Rows from before a step keep their time; the next ones have the new time, in a new file."""
    shift = 0

    def shifted():
        now = read_clocks()
        return now._replace(realtime_ns=now.realtime_ns + shift)

    monkeypatch.setattr(archive, "read_clocks", shifted)
    with archived(tmp_path) as made:
        feed(made, range(10))
        hand_over(made)
        feed(made, range(10, 20))
        shift = 3600 * SECOND_NS
        hand_over(made, stepped=True)
        feed(made, range(20, 30))
        hand_over(made)
    _, times = read(tmp_path)
    steps = np.diff(times)
    assert (np.delete(steps, 19) == TICK_NS).all()
    assert abs(steps[19] - shift) < SECOND_NS
    assert len(files(tmp_path)) == 2


def test_gaps_are_what_has_no_rows(tmp_path, fast):
    """Time in which nobody watched is told to the tick; so is what comes before and after."""
    with archived(tmp_path) as made:
        feed(made, [*range(10), *range(14, 20)])
    history = History(tmp_path / "history")
    start, end = history.span()
    gaps = history.gaps(start - SECOND_NS, end + SECOND_NS)
    assert gaps == [
        (start - SECOND_NS, start - TICK_NS),
        (start + 9 * TICK_NS, start + 13 * TICK_NS),
        (end, end + SECOND_NS),
    ]
    assert history.gaps(start - TICK_NS, start + 9 * TICK_NS) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_file_cut_or_damaged_anywhere_gives_what_is_whole(tmp_path, fast, seed):
    """Whatever bytes are lost or changed, the rows before are there, and no others."""
    with archived(tmp_path) as made:
        for start in range(0, 50, 10):
            feed(made, range(start, start + 10))
            hand_over(made)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    noise = np.random.default_rng(seed)
    for offset in noise.integers(0, len(whole), 40).tolist():
        damaged = bytearray(whole[:offset])
        if noise.random() < 0.5:
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << int(noise.integers(8))
        path.write_bytes(damaged)
        history = History(tmp_path / "history")
        found = [p.values[:, 0] for p in history.read(*ALWAYS, signals=["gpu_power_watts"])]
        numbers = np.concatenate([*found, np.empty(0)]).tolist()
        assert numbers == list(range(len(numbers)))
        assert len(numbers) % 10 == 0


def test_a_new_daemon_beside_a_damaged_file(tmp_path, fast):
    """Who was killed while writing leaves a file with a torn end; the next one goes on behind."""
    with archived(tmp_path) as made:
        for start in range(0, 30, 10):
            feed(made, range(start, start + 10))
            hand_over(made)
    (path,) = files(tmp_path)
    os.truncate(path, path.stat().st_size - 5)
    with archived(tmp_path) as made:
        feed(made, range(30))
    values, _ = read(tmp_path, signals=["gpu_power_watts"])
    assert values[:, 0].tolist() == list(range(30))


WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, "tests")
import test_history as given
from gpuwatch import archive
from gpuwatch.clock import monotonic_ns
made = archive.Archive(Path(sys.argv[1]), given.SETTINGS, "boot", made_up=False)
made.attach(given.COLUMNS)
for number in range(int(sys.argv[2]), 10**6):
    given.feed(made, [number])
    if number % 5 == 0:
        made.hand_over(given.INFOS, given.CONSTANTS, ())
    time.sleep(0.0005)
    print(number, flush=True)
"""


def test_killed_while_writing(tmp_path):
    """Killed at any instant again and again: all is readable, and each loses its last batches."""
    start = 0
    for seed in range(4):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(start)]
        with subprocess.Popen(
            command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True
        ) as process:
            last = 0
            for line in process.stdout:
                last = int(line)
                if last - start > 150 + 37 * seed:
                    process.send_signal(signal.SIGKILL)
                    break
        history = History(tmp_path / "history")
        pieces = list(history.read(*ALWAYS, signals=["gpu_power_watts"]))
        numbers = np.concatenate([piece.values[:, 0] for piece in pieces])
        assert history.faults == []
        assert (np.diff(numbers) >= 1).all()
        assert start < numbers[-1]
        assert last - numbers[-1] <= 60  # batches of five: what waited, and what was being written
        start = last + 1


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("free_ratio", [0.0, 0.5])
def test_a_full_disk_costs_rows_and_says_so(disk, fast, free_ratio, caplog):
    """At the floor, or at the last byte, writing stops, told once and counted; then it goes on."""
    columns = [Column(Entity("gpu", str(n)), POWER) for n in range(1000)]
    recorder = {**SETTINGS["recorder"], "free_ratio": free_ratio}
    with archived(disk, columns=columns, recorder=recorder) as made:
        number = 0

        def write():
            nonlocal number
            for index in range(number, number + 20):
                noise = np.random.default_rng(index).random(len(columns)).tolist()
                watts = {
                    column.entity: {"gpu_power_watts": value}
                    for column, value in zip(columns, noise, strict=True)
                }
                made.add(node(START + index * TICK_NS, watts))
            number += 20
            hand_over(made)

        while not made.rows_lost:
            write()
        assert made.full
        assert ("No space left" in made.fault) if not free_ratio else ("50% is free" in made.fault)
        lost_at = made.rows
        write()
        assert made.rows == lost_at
        assert made.rows_lost == 40
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        write()
        assert not made.full
        assert made.fault == ""
        assert made.rows == lost_at + 20
    history = History(disk / "history")
    start, end = history.span()
    assert history.gaps(start, end) == [
        (start + (lost_at - 1) * TICK_NS, start + (lost_at + 39) * TICK_NS)
    ]
    assert history.faults == []
    told = [record.getMessage() for record in caplog.records if "history" in record.getMessage()]
    assert len(told) == 2
    if free_ratio:
        assert os.statvfs(disk).f_bavail > 0


def test_a_directory_that_is_removed_is_made_again(tmp_path, fast):
    """Who removes the files loses what is in them, and nothing that comes after."""
    with archived(tmp_path) as made:
        feed(made, range(10))
        hand_over(made)
        (path,) = files(tmp_path)
        path.unlink()
        path.parent.rmdir()
        feed(made, range(10, 20))
        hand_over(made)
    values, _ = read(tmp_path, signals=["gpu_power_watts"])
    assert values[:, 0].tolist() == list(range(10, 20))


def test_a_state_that_cannot_be_written(tmp_path, fast, caplog):
    """Where the state may not be written rows are lost, which is told once and counted."""
    (tmp_path / "history").write_text("in the way")
    with archived(tmp_path) as made:
        for number in range(3):
            feed(made, [number])
            hand_over(made)
        assert made.rows_lost == 3
        assert made.fault == f"{tmp_path / 'history'}: File exists"
        assert not made.full
    assert len([record for record in caplog.records if "history" in record.getMessage()]) == 1


def test_a_disk_that_hangs_holds_up_nobody(tmp_path, fast, monkeypatch):
    """Batches wait for a slow disk, a few of them; the rest is lost, and closing goes on."""
    monkeypatch.setattr(archive, "CLOSE_SECONDS", 0.1)
    hung = []
    monkeypatch.setattr(archive, "sweep", lambda *_: hung.append(time.sleep(3600)))
    with archived(tmp_path) as made:
        for number in range(20):
            feed(made, [number])
            made.hand_over(INFOS, CONSTANTS, ())
        assert made.rows_lost >= 20 - archive.WAITING - 1
        assert "does not keep up" in made.fault
    assert hung == []


def test_off_keeps_nothing(tmp_path, fast):
    """`keep = "off"` writes no history and removes what there is, but looks after recordings."""
    with archived(tmp_path) as made:
        feed(made, range(10))
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    (recordings / "20200101T000000Z-old.gwr").write_text("old")
    with archived(tmp_path, history={"keep": "off"}) as made:
        feed(made, range(10, 20))
        made.hand_over(INFOS, CONSTANTS, ())
        wait_for(lambda: not files(tmp_path) and not list(recordings.iterdir()))
    assert files(tmp_path) == []


DAY = 86400
NOW = NOON.realtime_ns


def old(directory, suffix, *ages_days, size=100):
    """Make files of these ages and return their names."""
    names = [f"{stamp(NOW - int(age * DAY * SECOND_NS))}{suffix}" for age in ages_days]
    for name in names:
        (directory / name).write_bytes(b"x" * size)
    return names


def left(directory):
    return {path.name for path in directory.iterdir()}


def test_limits_take_the_oldest_first(tmp_path):
    """By age, by number, by bytes; what must stay stays, and counts."""
    names = old(tmp_path, ".gwr", 8, 6, 4, 2)
    assert sweep(tmp_path, ".gwr", Limits(9, 400), NOW) == []
    assert [path.name for path in sweep(tmp_path, ".gwr", Limits(7, 400), NOW)] == names[:1]
    assert [path.name for path in sweep(tmp_path, ".gwr", Limits(7, 400, 2), NOW)] == names[1:2]
    assert sweep(tmp_path, ".gwr", Limits(7, 100), NOW, kept=names[2:3]) == [tmp_path / names[3]]
    assert left(tmp_path) == {names[2]}
    assert sweep(tmp_path, ".gwr", Limits(0, 0, 0), NOW, kept=names) == []
    (least,) = old(tmp_path, "-xid-gpu-0.gwr", 1)
    (gone,) = sweep(tmp_path, ".gwr", Limits(7, 10**9, 1), NOW, first="-xid-")
    assert gone.name == least


def test_limits_are_for_files_of_ours(tmp_path):
    """What somebody named himself, unfinished files and other sorts are left alone."""
    others = {"incident.gwr", "20200101T000000Z-x.gwr.tmp", "20200101T000000Z.gwh", "20201399T.gwr"}
    for name in others:
        (tmp_path / name).write_text("mine")
    old(tmp_path, "-mine.gwr", 400)
    sweep(tmp_path, ".gwr", Limits(7, 10**9), NOW)
    assert left(tmp_path) == others


def test_history_is_kept_for_its_time(tmp_path, fast):
    """A week of files stays, older ones go, also while the newest is being written."""
    (tmp_path / "history").mkdir()
    hours = read_clocks().realtime_ns // SECOND_NS // 3600
    names = [f"{stamp((hours - age) * 3600 * SECOND_NS)}.gwh" for age in range(24, 240, 24)]
    for name in names:
        (tmp_path / "history" / name).write_text("old")
    with archived(tmp_path) as made:
        feed(made, range(10))
        hand_over(made)
    assert left(tmp_path / "history") >= set(names[:6])
    assert len(left(tmp_path / "history")) == 6 + 1

"""The reader: rings, history and recordings tell the same, and nonsense is an answer."""

import functools
import math
import time

import numpy as np
import pytest

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, read_clocks
from gpuwatch.codec import Head, RowsBlock
from gpuwatch.history_writer import Batch, HistoryWriter, columns_of
from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.place import Place
from gpuwatch.reader import Reader
from gpuwatch.recording import RecordingWriter
from gpuwatch.ring import RingReader, RingSchema, RingWriter
from gpuwatch.signals import UNKNOWN_INTEGER, Column, Entity, Event, Kind, Signal
from gpuwatch.source import EntityInfo
from gpuwatch.summation import RingWindows, row_dtype
from gpuwatch.window import TICK_NS, Tick

BUS, GPU = Entity("gpu", "0000:1b:00.0"), Entity("gpu", "3")
CAPS = Signal("cap_active", "C.", Kind.BITS, "", label="reason", bits=((0, "idle"), (2, "cap")))
BYTES = Signal("some_bytes_total", "B.", Kind.COUNTER, "bytes", scale=4.0)
CLOCK = Signal("some_clock_hertz", "C.", Kind.GAUGE, "hertz", label="clock", bounds=(0.0, 1e10))
COLUMNS = tuple(Column(BUS, *rest) for rest in ((CAPS,), (BYTES,), (CLOCK, "sm")))
NAMES = ["cap_active", "some_bytes_total", 'some_clock_hertz{clock="sm"}']
PERIOD = 5 * MILLISECOND_NS
SECONDS = 20
END = read_clocks().monotonic_ns // SECOND_NS * SECOND_NS
START = END - SECONDS * SECOND_NS


def cells_at(index):
    """Return the cells of row `index`: a clock that falls now and then, under a cap."""
    held = index // 70 % 3 == 1
    clock = math.nan if index % 401 == 17 else 1.98e9 - held * 6e8 - index % 7 * 1e6
    count = UNKNOWN_INTEGER if index % 503 == 11 else index * index // 3
    return [4 if held else 1, count, clock]


class Written:
    """A node's ring, history and recording, of the same rows."""

    def __init__(self, directory):
        self.ring = directory / "state.ring"
        self.schema = RingSchema("state.fast", "state", "nvml_state", COLUMNS, PERIOD)
        self.writer = RingWriter(self.ring, self.schema, SECONDS + 1)
        for index in range(SECONDS * SECOND_NS // PERIOD):
            self.writer.append(START + index * PERIOD, 0.0, 0.0, cells_at(index))
        self.writer.advance(END)
        self.history = directory / "history"
        self.history.mkdir()
        self.recordings = directory / "recordings"
        self.recordings.mkdir()
        _, packed = RingReader(self.ring).read(0)
        self.rows = np.frombuffer(packed, row_dtype(self.schema))
        self._write_history()
        self._write_recording()
        self.place = Place(
            rings=[str(self.ring)], names={BUS: GPU}, recordings=str(self.recordings)
        )
        self.past = self.place._replace(rings=(), history=str(self.history))

    def _write_history(self):
        named = self.schema.with_entities({BUS: GPU})
        windows = RingWindows(named)
        windows.add(self.rows.tobytes())
        parts = [part for column in named.columns for part in columns_of(column)]
        parts.sort(key=lambda part: part.signal.kind is Kind.GAUGE)
        times, counters, gauges = [], [], []
        for end_ns in range(START + TICK_NS, END + 1, TICK_NS):
            tick = Tick(end_ns - TICK_NS, end_ns)
            windows.close(tick)
            found = [(part, tick.windows[GPU][part.name]) for part in parts]
            times.append(end_ns)
            counters.append([w.last for part, w in found if part.signal.kind is Kind.COUNTER])
            gauges.append([w.mean for part, w in found if part.signal.kind is Kind.GAUGE])
        schema = RingSchema("history", "history", "history", tuple(parts), TICK_NS)
        head = Head(times[0], times[-1], (schema,), clocks=(read_clocks(),))
        writer = HistoryWriter(self.history, "boot")
        for first in range(0, len(times), 30):
            some = slice(first, first + 30)
            writer.write(
                Batch(
                    head,
                    times[some],
                    [*map(np.array, counters[some])],
                    [*map(np.array, gauges[some])],
                    [],
                )
            )
        writer.close()

    def _write_recording(self):
        schema = self.schema.with_entities({BUS: GPU})
        info = EntityInfo(GPU, {"gpu": "3", "uuid": "GPU-3"})
        head = Head(START, END, (schema,), (info,), clocks=(read_clocks(),))
        name = "20261130T120000Z-gpu_power_brake-gpu-3.gwr"
        with RecordingWriter(self.recordings / name, head) as writer:
            writer.events([Event(START + 9 * SECOND_NS, GPU, "something", "x")])
            alert = {"recording": name, "rule": "gpu_power_brake", "entity": list(GPU)}
            writer.alerts([alert])
            for floor in range(START, END, SECOND_NS):
                low, high = self.rows["time_ns"].searchsorted([floor, floor + SECOND_NS])
                writer.rows(RowsBlock(0, PERIOD, floor, self.rows[low:high]))


@pytest.fixture(scope="module", autouse=True)
def clock():
    """Have the wall clock go on with the monotonic one: a host may be set in the middle of all."""
    real, offset = time.clock_gettime_ns, time.time_ns() - time.monotonic_ns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            time,
            "clock_gettime_ns",
            lambda which: (
                time.monotonic_ns() + offset if which == time.CLOCK_REALTIME else real(which)
            ),
        )
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return Written(tmp_path_factory.mktemp("written"))


@functools.cache
def first_row():
    """Return the wall time of the first row, by the clocks of when it is first asked for."""
    return read_clocks().wall_ns(START) / SECOND_NS


def unix(seconds):
    """Return the wall time so many seconds after the first row."""
    return first_row() + seconds


def ask(place, start, end, points, recording=None, **more):
    """Return the answer and its lines by name."""
    reader = Reader(place)
    request = {"what": "series", "signals": NAMES, "start": start, "end": end, "points": points}
    answer = reader.answer({**request, "recording": recording, **more})
    reader.close()
    assert "error" not in answer
    return answer, {line["name"]: line for line in answer["series"]}


def test_a_millisecond_shows_each_sample_as_it_was_read(written):
    """Steps shorter than the sampling period have the samples themselves, and nothing else."""
    answer, lines = ask(written.place, unix(4.0005), unix(4.5005), 500)
    assert (answer["source"], answer["step"]) == ("ring", 0.001)
    clock = lines['some_clock_hertz{clock="sm"}']
    alone = 0
    for step, shown in enumerate(zip(clock["min"], clock["mean"], clock["max"], strict=True)):
        begin = 4000 + step  # half a millisecond later, so that clocks read anew make no difference
        samples = {cells_at(index)[2] for index in {begin // 5, (begin + 1) // 5}}
        known = [sample for sample in samples if not math.isnan(sample)]
        assert [shown[0], shown[2]] == ([min(known), max(known)] if known else [None, None])
        if len(known) == 1:
            alone += 1
            assert shown == (known[0],) * 3
    assert 350 < alone < 500


def test_history_and_rings_agree(written):
    """What both have is the same: means, shares of time, and rates over a second and more."""
    step = 1.0
    ring, one = ask(written.place, unix(2), unix(18), 16)
    past, other = ask(written.past, unix(2), unix(18), 16)
    assert (ring["source"], past["source"], ring["step"]) == ("ring", "history", step)
    assert one.keys() == other.keys()
    for name in one:
        known = list(zip(one[name]["mean"], other[name]["mean"], strict=True))
        assert all(None not in pair for pair in known)
        for here, there in known:
            assert here == pytest.approx(there, rel=5e-3, abs=1e-3), name


def test_history_fills_in_where_rings_do_not_reach_back(written, tmp_path):
    """One answer, from both; at the seam at most a quarter second is not known."""
    short = RingWriter(tmp_path / "short.ring", written.schema, 5.0)
    for row in written.rows:
        short.append(int(row["time_ns"]), 0.0, 0.0, [*row["integers"].tolist(), *row["gauges"]])
    short.advance(END)
    both = written.past._replace(rings=[str(tmp_path / "short.ring")])
    answer, lines = ask(both, unix(1), unix(19), 72)
    _, whole = ask(written.place, unix(1), unix(19), 72)
    assert answer["source"] == "history+ring"
    name = 'some_clock_hertz{clock="sm"}'
    missing = 0
    for mean, there in zip(lines[name]["mean"], whole[name]["mean"], strict=True):
        missing += mean is None
        assert mean is None or mean == pytest.approx(there, rel=2e-3)
    assert missing <= 2


def test_a_ring_counts_while_its_oldest_rows_are_overwritten(tmp_path, monkeypatch):
    """A writer that catches up takes many of the oldest rows while they are copied."""
    path = tmp_path / "fast.ring"
    schema = RingSchema("state.fast", "state", "nvml_state", COLUMNS, MILLISECOND_NS)
    writer = RingWriter(path, schema, 1.0)

    def write(rows):
        for _ in range(rows):
            at = START + RingReader(path).head * MILLISECOND_NS
            writer.append(at, 0.0, 0.0, [1, 1, 1.98e9])
            writer.advance(at)

    def copied(self, first, head, copy=RingReader._copy):
        rows = copy(self, first, head)
        write(100)
        return rows

    write(1500)
    monkeypatch.setattr(RingReader, "_copy", copied)
    place = Place(rings=[str(path)], names={BUS: GPU})
    _, lines = ask(place, unix(0.5), unix(1.5), 10)
    assert None not in lines['some_clock_hertz{clock="sm"}']["mean"][5:]


def test_a_recording_tells_what_the_ring_told(written):
    """The same rows, the same answer, in any range."""
    (listed,) = Reader(written.place).answer({"what": "recordings"})["recordings"]
    assert (listed["rule"], listed["entity"]) == ("gpu_power_brake", ["gpu", "3"])
    assert listed["complete"]
    assert listed["end"] - listed["start"] == pytest.approx(SECONDS)
    for start, end, points in ((0.5, 19.5, 38), (7.0, 9.0, 200), (11.25, 11.3, 10)):
        _, ring = ask(written.place, unix(start), unix(end), points)
        answer, kept = ask(written.place, unix(start), unix(end), points, listed["name"])
        assert answer["source"] == "recording"
        assert ring.keys() == kept.keys()
        for name in ring:
            for one, other in zip(ring[name]["mean"], kept[name]["mean"], strict=True):
                assert one == pytest.approx(other, rel=0.4 if points == 10 else 5e-3, abs=0.11)


def test_bits_are_one_line_for_each_reason(written):
    """The mean is the share of time; one reason can be asked for alone."""
    _, lines = ask(written.place, unix(0), unix(20), 1)
    cap, idle = lines['cap_active{reason="cap"}'], lines['cap_active{reason="idle"}']
    assert cap["mean"][0] + idle["mean"][0] == pytest.approx(1)
    held = sum(cells_at(index)[0] == 4 for index in range(SECONDS * SECOND_NS // PERIOD))
    assert cap["mean"][0] == pytest.approx(held * PERIOD / SECOND_NS / SECONDS, abs=1e-3)
    _, lines = ask(written.place, unix(0), unix(20), 1, signals=['cap_active{reason="idle"}'])
    assert [*lines] == ['cap_active{reason="idle"}']


def test_columns_and_entities_are_chosen(written):
    """By entity, by name with or without label; what is not there is not in the answer."""
    assert ask(written.place, unix(0), unix(1), 1, entities=[["gpu", "0"]])[1] == {}
    _, lines = ask(
        written.place, unix(0), unix(1), 1, signals=["some_clock_hertz"], entities=[[*GPU]]
    )
    assert [*lines] == ['some_clock_hertz{clock="sm"}']
    told = Reader(written.place).answer({"what": "columns"})
    assert [column["name"] for column in told["columns"]] == [
        "cap_active",
        "some_bytes_total",
        'some_clock_hertz{clock="sm"}',
    ]
    assert told["columns"][0]["bits"] == ["idle", "cap"]
    assert told["columns"][1]["entity"] == [*GPU]
    assert told["columns"][2]["period_seconds"] == 0.005
    assert told["end"] - told["start"] == pytest.approx(SECONDS, abs=0.01)


def test_a_recording_is_judged_at_any_time():
    """The status of a moment: what fired then, the values then, the events so far."""
    reader = Reader(Place(recordings=str(BUNDLED_RECORDING.parent)))
    (listed,) = reader.answer({"what": "recordings"})["recordings"]
    request = {"what": "status", "recording": listed["name"]}
    late = reader.answer({**request, "time": listed["start"] + 40})
    early = reader.answer({**request, "time": listed["start"] + 5})
    assert early["time_ns"] < late["time_ns"]
    assert late["realtime_ns"] / SECOND_NS == pytest.approx(listed["start"] + 40, abs=1)
    assert [gpu["gpu"] for gpu in late["gpus"]] == ["0", "1"]
    assert late["gpus"][0]["values"]["gpu_power_watts"] > 100
    assert late["recording"]["name"] == listed["name"]
    assert early["verdict"] == late["verdict"] == "ok"
    end = reader.answer(request)
    assert end["realtime_ns"] / SECOND_NS == pytest.approx(listed["end"], abs=1.5)
    assert reader.answer({**request, "time": 1.0})["ticks_closed"] == 1
    reader.close()


@pytest.mark.parametrize("name", ["", "../x.gwr", "a/b.gwr", ".gwr", "x\n.gwr", "/etc/passwd"])
def test_no_name_leads_out_of_the_directory(written, name):
    """A recording's name is a name."""
    answer = Reader(written.place).answer({"what": "columns", "recording": name})
    assert (answer["status"], answer["error"].count("\n")) == (400, 0)


def test_what_is_no_recording_is_an_answer(written, tmp_path):
    """Foreign, empty and missing files are told in one line; so is a link to elsewhere."""
    (tmp_path / "foreign.gwr").write_text("hello")
    (tmp_path / "empty.gwr").write_bytes(b"")
    (tmp_path / "link.gwr").symlink_to(next(written.recordings.iterdir()))
    (tmp_path / "cut.gwr").write_bytes(next(written.recordings.iterdir()).read_bytes()[:-300])
    reader = Reader(Place(recordings=str(tmp_path)))
    status = {"foreign.gwr": 422, "empty.gwr": 422, "link.gwr": 404, "none.gwr": 404}
    for name, expected in status.items():
        answer = reader.answer({"what": "columns", "recording": name})
        assert (answer["status"], answer["error"].count("\n")) == (expected, 0)
    (listed,) = reader.answer({"what": "recordings"})["recordings"]
    assert (listed["name"], listed["complete"]) == ("cut.gwr", False)
    assert "error" not in reader.answer({"what": "columns", "recording": "cut.gwr"})
    reader.close()

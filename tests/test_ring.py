"""Rings: one writer, many readers, no locks; every row that is read is whole and in order."""

import itertools
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import wait_for

from gpuwatch import ring as ring_module
from gpuwatch import tmpfs
from gpuwatch.clock import ClockTriple
from gpuwatch.errors import ConfigError
from gpuwatch.ring import (
    HEADER_BYTES,
    MAX_BYTES,
    TRIPLES,
    W_HEAD,
    RingReader,
    RingSchema,
    RingWriter,
)
from gpuwatch.signals import UNKNOWN_INTEGER, Column, Entity, Histogram, Kind, Signal
from gpuwatch.summation import row_dtype

MILLISECOND = 1_000_000
GPUS = (Entity("gpu", "0000:1b:00.0"), Entity("gpu", "0000:43:00.0"))
BITS = Signal("throttle_active", "Bits.", Kind.BITS, "", label="reason", bits=((0, "a"), (5, "b")))
COUNT = Signal("things_total", "Count.", Kind.COUNTER, "", scale=0.5)
GAUGE = Signal(
    "clock_hertz",
    "Gauge.",
    Kind.GAUGE,
    "hertz",
    label="clock",
    bounds=(0.0, 1e10),
    statistics=("sm",),
    histogram=Histogram("clock_share_hertz", "Share.", (1e9, 2e9), label="sm"),
)
POWER = Signal("power_watts", "Gauge.", Kind.GAUGE, "watts", refresh_seconds=0.1)


def schema(integers=1, gauges=2, period_ns=MILLISECOND):
    columns = [Column(GPUS[i % 2], (BITS, COUNT)[i % 2]) for i in range(integers)]
    columns += [Column(GPUS[i % 2], (GAUGE, POWER)[i % 2], "sm") for i in range(gauges)]
    return RingSchema("state.fast", "state", "nvml_state", tuple(columns), period_ns)


def rows_of(reader, after=0):
    """Return (first, rows) with the rows as a structured array."""
    first, data = reader.read(after)
    return first, np.frombuffer(data, row_dtype(reader.schema))


def fill(writer, numbers):
    """Write rows all of whose cells say their own number."""
    for number in numbers:
        cells = [number] * writer.schema.integers + [float(number)] * writer.schema.gauges
        writer.append(number * MILLISECOND, 0.0, 0.0, cells)


@pytest.mark.parametrize("rows", [0, 1, 60, 61, 150])
def test_the_rows_of_a_time_are_found(tmp_path, rows):
    """Also in a ring that was written round and round; what is gone counts as before."""
    writer = RingWriter(tmp_path / "r", schema(), 0.06)
    fill(writer, range(1, rows + 1))
    reader = RingReader(tmp_path / "r")
    left = [int(time_ns) for time_ns in rows_of(reader)[1]["time_ns"]]
    for time_ns in [*left, *(time_ns + 1 for time_ns in left), 10**12]:
        before = reader.before(time_ns)
        assert before == rows - sum(one >= time_ns for one in left)
        first, data = reader.read(before - 3, before)
        read = np.frombuffer(data, row_dtype(reader.schema))["time_ns"].tolist()
        assert read == [one for one in left if one < time_ns][-3:]
        assert first + len(read) == max(before, 0) or not read
    reader.close()


@pytest.mark.parametrize("integers", [0, 1, 3])
@pytest.mark.parametrize("gauges", [0, 1, 2, 5])
def test_rows_come_back_as_written(tmp_path, integers, gauges):
    """Any number of cells, unknown ones too, comes back; the schema describes itself."""
    made = schema(integers, gauges)
    writer = RingWriter(tmp_path / "r", made, 1.0)
    cells = [UNKNOWN_INTEGER, 2**62, 0][:integers] + [math.nan, 1.5, 0.0, -2.0, 1e9][:gauges]
    writer.append(5, 0.25, 0.5, cells)
    reader = RingReader(tmp_path / "r")
    first, rows = rows_of(reader)

    assert reader.schema == made
    assert reader.schema.columns == made.columns
    assert (first, len(rows)) == (0, 1)
    row = rows[0]
    assert (row["time_ns"], row["late"], row["read"], row["sequence"]) == (5, 0.25, 0.5, 1)
    assert row["integers"].tolist() == cells[:integers]
    np.testing.assert_array_equal(row["gauges"], np.array(cells[integers:], np.float32))
    assert len(rows.tobytes()) == struct.calcsize(made.row_format)
    reader.close()
    writer.close()


def test_a_reader_gets_each_row_once_and_knows_what_it_lost(tmp_path):
    """Reads go on where the last one ended; a lapped reader is told the first row it gets."""
    writer = RingWriter(tmp_path / "r", schema(), 0.02)
    reader = RingReader(tmp_path / "r")
    capacity = reader.capacity
    assert rows_of(reader)[0] == 0

    fill(writer, range(1, 6))
    first, rows = rows_of(reader)
    assert (first, rows["sequence"].tolist()) == (0, [1, 2, 3, 4, 5])
    assert len(rows_of(reader, 5)[1]) == 0

    fill(writer, range(6, 1001))
    first, rows = rows_of(reader, 5)
    # The row after the head may be half written at any time, so its place is not read.
    assert first == 1000 - (capacity - 1)
    assert rows["sequence"].tolist() == list(range(first + 1, 1001))
    assert rows["integers"][:, 0].tolist() == rows["sequence"].tolist()
    assert rows_of(reader, 998)[1]["sequence"].tolist() == [999, 1000]
    reader.close()
    writer.close()


def test_a_torn_row_ends_the_read(tmp_path):
    """A row whose number does not fit is not returned, nor any after it, until it is whole."""
    writer = RingWriter(tmp_path / "r", schema(), 1.0)
    fill(writer, range(1, 11))
    reader = RingReader(tmp_path / "r")
    size = reader.row_bytes
    data = (tmp_path / "r").read_bytes()
    place = len(data) - reader.capacity * size + 7 * size - 8  # the seventh row's number
    with (tmp_path / "r").open("r+b") as file:
        file.seek(place)
        whole = file.read(8)
        file.seek(place)
        file.write(struct.pack("<q", 0))
        file.flush()
        assert rows_of(reader)[1]["sequence"].tolist() == [1, 2, 3, 4, 5, 6]
        assert rows_of(reader, 6)[0] == 6
        file.seek(place)
        file.write(whole)
    assert rows_of(reader, 6)[1]["sequence"].tolist() == [7, 8, 9, 10]
    reader.close()
    writer.close()


def test_a_head_before_its_row_is_not_believed(tmp_path):
    """On processors that reorder stores the head may be seen first: the row is left for later."""
    writer = RingWriter(tmp_path / "r", schema(), 0.02)
    fill(writer, range(1, 101))
    writer.words[W_HEAD] = 103
    reader = RingReader(tmp_path / "r")

    assert rows_of(reader, 95)[1]["sequence"].tolist() == [96, 97, 98, 99, 100]
    reader.close()
    writer.close()


WRITER = """
import sys
from pathlib import Path
from test_ring import schema
from gpuwatch.ring import RingWriter
writer = RingWriter(Path(sys.argv[1]), schema(3, 5), 0.05)
writer.advance(0)
print("made", flush=True)
number = 0
while True:
    number += 1
    writer.append(number, number % 7, 0.0, [number] * 3 + [float(number % 4096)] * 5)
    writer.advance(number)
"""


def start_writer(path):
    """Start a process that writes as fast as it can."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    process.stdout.readline()
    return process


def assert_whole(rows):
    """Check that every row's cells all say its own number."""
    number = rows["sequence"]
    assert (rows["time_ns"] == number).all()
    assert (rows["late"] == number % 7).all()
    assert (rows["integers"] == number[:, None]).all()
    assert (rows["gauges"] == (number % 4096)[:, None]).all()


def test_readers_beside_a_writer_flat_out_see_whole_rows_in_order(tmp_path):
    """Two processes: rows are whole, numbers follow each other, nothing old comes after new."""
    writer = start_writer(tmp_path / "r")
    try:
        fast, slow = RingReader(tmp_path / "r"), RingReader(tmp_path / "r")
        seen = {fast: 0, slow: 0}
        lapped = total = 0
        deadline = time.monotonic() + 30
        for look in itertools.count():
            reader = slow if look % 200 == 0 else fast
            watermark = reader.watermark_ns
            first, rows = rows_of(reader, seen[reader])
            assert first >= seen[reader]
            lapped += first > seen[reader]
            if len(rows):
                assert rows["sequence"].tolist() == list(range(first + 1, first + 1 + len(rows)))
                assert_whole(rows)
                seen[reader] = first + len(rows)
                total += len(rows)
            # What the watermark promised before the read is there, or was overwritten.
            assert seen[reader] >= watermark or first >= watermark
            if total > 100_000 and lapped > 5:
                break
            assert time.monotonic() < deadline, (total, lapped)
        fast.close()
        slow.close()
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


def test_the_newest_row_beside_a_writer_flat_out_is_one(tmp_path):
    """However many come meanwhile; none is older than one before."""
    writer = start_writer(tmp_path / "r")
    try:
        reader, last, seen = RingReader(tmp_path / "r"), 0, 0
        dtype = row_dtype(reader.schema)
        wait_for(reader.newest)
        while last < 50_000:
            packed = reader.newest()
            assert len(packed) in (0, dtype.itemsize)
            for row in np.frombuffer(packed, dtype):
                assert row["sequence"] >= last
                last, seen = int(row["sequence"]), seen + 1
        assert seen > 100
        reader.close()
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


@pytest.mark.parametrize("after_ms", [1, 7, 23])
def test_a_writer_killed_at_any_moment_leaves_a_readable_ring(tmp_path, after_ms):
    """Nothing is needed of the dead: the newest whole rows can be read."""
    writer = start_writer(tmp_path / "r")
    reader = RingReader(tmp_path / "r")
    wait_for(lambda: reader.head > 200)
    time.sleep(after_ms / 1000)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    reader.close()

    late = RingReader(tmp_path / "r")
    first, rows = rows_of(late)
    assert len(rows) >= late.capacity - 2
    assert rows["sequence"].tolist() == list(range(first + 1, first + 1 + len(rows)))
    assert_whole(rows)
    assert first + len(rows) >= late.watermark_ns
    late.close()


def test_no_space_is_an_error_and_leaves_no_file(tmp_path):
    """The space is taken up front, so a full file system shows at once."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        with pytest.raises(OSError, match="No space left"):
            RingWriter(place / "r", schema(), 60.0)
        assert list(place.iterdir()) == []
        RingWriter(place / "r", schema(), 0.1).close()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_ring_keeps_the_time_asked_for_up_to_a_limit(tmp_path):
    """Capacity follows from period and time; no ring is above 64 MB."""
    writer = RingWriter(tmp_path / "r", schema(), 60.0)
    reader = RingReader(tmp_path / "r")
    assert reader.capacity >= 60_000
    reader.close()
    writer.close()

    writer = RingWriter(tmp_path / "big", schema(60, 60, period_ns=10_000), 60.0)
    assert (tmp_path / "big").stat().st_size <= MAX_BYTES
    fill(writer, [1])
    writer.close()


def test_finer_rows_than_a_millisecond_take_no_more_space(tmp_path):
    """They reach back less far, so that the hardware counters of eight GPUs fit into memory."""
    sizes = [
        RingWriter(tmp_path / f"{period_ns}", schema(period_ns=period_ns), 60.0).path.stat().st_size
        for period_ns in (MILLISECOND, MILLISECOND // 10)
    ]
    assert sizes[0] == sizes[1]
    assert schema(period_ns=MILLISECOND // 10).rows(60.0) == schema().rows(60.0)  # what check says


def test_period_watermark_and_heartbeat_are_seen_by_readers(tmp_path):
    """What the writer says of itself is read from the header."""
    writer = RingWriter(tmp_path / "r", schema(), 1.0)
    reader = RingReader(tmp_path / "r")
    assert reader.period_ns == MILLISECOND
    writer.set_period(4 * MILLISECOND)
    writer.advance(77)

    assert (reader.period_ns, reader.watermark_ns, reader.heartbeat_ns) == (4 * MILLISECOND, 77, 77)
    reader.close()
    writer.close()


def test_clock_triples_are_kept_by_time_and_at_steps(tmp_path, monkeypatch):
    """One in ten seconds, one at once when the wall clock moved, the newest sixteen."""
    now = [ClockTriple(0, 10**18, 0)]
    monkeypatch.setattr(ring_module, "read_clocks", lambda: now[0])
    writer = RingWriter(tmp_path / "r", schema(), 1.0)
    reader = RingReader(tmp_path / "r")
    second = 10**9

    def at(seconds, step_ns=0):
        now[0] = ClockTriple(seconds * second, 10**18 + seconds * second + step_ns, 0)
        writer.note_clocks()
        return reader.clock_triples()

    assert len(at(9)) == 1
    assert len(at(10)) == 2
    assert len(at(11)) == 2
    stepped = at(12, step_ns=second)
    assert len(stepped) == 3
    assert stepped[-1] == now[0]
    for seconds in range(30, 500, 10):
        kept = at(seconds, step_ns=second)
    assert len(kept) == TRIPLES
    assert kept == sorted(kept)
    assert kept[-1].monotonic_ns == 490 * second
    reader.close()
    writer.close()


def test_entities_are_renamed_and_the_rest_stays():
    """Readers may call an entity by another name; those not named keep theirs."""
    renamed = schema(2, 2).with_entities({GPUS[0]: Entity("gpu", "0")})

    assert [column.entity for column in renamed.columns] == [Entity("gpu", "0"), GPUS[1]] * 2
    assert [column.name for column in renamed.columns] == [
        column.name for column in schema(2, 2).columns
    ]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Return the bytes of a good ring with a few rows."""
    path = tmp_path_factory.mktemp("ring") / "r"
    writer = RingWriter(path, schema(), 0.02)
    fill(writer, range(1, 31))
    writer.close()
    return path.read_bytes()


def read_all(path):
    """Open a ring and read everything; only ConfigError may come of what is no ring."""
    try:
        reader = RingReader(path)
    except ConfigError as error:
        told = str(error)
        if str(path) not in told or "\n" in told:
            raise
        return None
    reader.clock_triples()
    _, rows = reader.read(0)
    _ = (reader.head, reader.period_ns, reader.watermark_ns)
    reader.close()
    return rows


WILD = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
WORD = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-5, 5),
    st.integers(0, 20).map(lambda shift: 4096 << shift),
)


@WILD
@given(st.dictionaries(st.integers(0, 15), WORD, min_size=1, max_size=4))
def test_any_header_is_read_or_refused_in_one_line(tmp_path, good, words):
    """Whatever the first words say, a reader neither crashes nor reads outside the file."""
    data = bytearray(good)
    for word, value in words.items():
        data[8 * word : 8 * word + 8] = struct.pack("<q", value)
    (tmp_path / "r").write_bytes(data)
    read_all(tmp_path / "r")


@WILD
@given(st.data())
def test_any_schema_is_read_or_refused_in_one_line(tmp_path, good, data):
    """JSON of any shape in place of the schema ends in a ring or in a ConfigError."""
    length = struct.unpack_from("<q", good, 8)[0]
    text = json.loads(good[HEADER_BYTES : HEADER_BYTES + length])
    leaf = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([])
    )
    where = text
    while isinstance(where, (dict, list)) and where:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        key = data.draw(st.sampled_from(keys))
        below = where[key]
        if not isinstance(below, (dict, list)) or not below or data.draw(st.booleans()):
            where[key] = data.draw(leaf)
            break
        where = below
    raw = json.dumps(text).encode()
    changed = bytearray(good)
    changed[8:16] = struct.pack("<q", len(raw))
    changed[HEADER_BYTES : HEADER_BYTES + len(raw)] = raw
    (tmp_path / "r").write_bytes(changed)
    read_all(tmp_path / "r")


@WILD
@given(st.integers(0, 20_000))
def test_a_short_file_is_refused_or_holds_its_rows(tmp_path, good, size):
    """A file cut anywhere is no ring: its rows would lie outside."""
    (tmp_path / "r").write_bytes(good[:size])
    rows = read_all(tmp_path / "r")
    assert (rows is None) == (size < len(good))


@WILD
@given(st.binary(max_size=9000))
def test_foreign_bytes_are_refused(tmp_path, content):
    """What was not written as a ring is told to be none."""
    (tmp_path / "r").write_bytes(content)
    assert read_all(tmp_path / "r") is None


def test_a_schema_nested_too_deep_is_refused(tmp_path, good):
    """Not even a recursion bomb gets through."""
    raw = b"[" * 200_000
    data = bytearray(good[:HEADER_BYTES] + raw)
    data[8:16] = struct.pack("<q", len(raw))
    (tmp_path / "r").write_bytes(data)
    assert read_all(tmp_path / "r") is None


def test_rings_on_a_disk_go_to_shared_memory(tmp_path, monkeypatch):
    """A runtime directory in memory holds its rings; else they have a directory of their own."""
    monkeypatch.setattr(tmpfs, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(tmpfs, "filesystem", lambda _path: "tmpfs")
    assert tmpfs.ring_directory(tmp_path) == tmp_path

    monkeypatch.setattr(tmpfs, "filesystem", lambda _path: "ext4")
    directory = tmpfs.ring_directory(tmp_path)
    assert directory.parent == tmp_path / "shm"
    assert directory.stat().st_mode & 0o777 == 0o750
    assert tmpfs.ring_directory(tmp_path) == directory

    monkeypatch.setattr(tmpfs, "SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"paths\.runtime on a tmpfs"):
        tmpfs.ring_directory(tmp_path)


CUT = """
import os, sys
from pathlib import Path
from gpuwatch.ring import RingReader
reader = RingReader(Path(sys.argv[1]))
assert reader.intact
os.truncate(reader.path, int(sys.argv[2]))
assert not reader.intact
assert reader.read(0) == (0, b"")
"""


@pytest.mark.parametrize("size", [0, HEADER_BYTES, 2 * HEADER_BYTES])
def test_a_file_that_was_cut_off_is_not_touched(tmp_path, size):
    """To read what is mapped and not there would end the process, by SIGBUS."""
    writer = RingWriter(tmp_path / "r", schema(), 10.0)
    fill(writer, range(1, 1000))
    writer.close()
    subprocess.run([sys.executable, "-c", CUT, tmp_path / "r", str(size)], check=True)

"""Recordings: nothing is lost or invented, whatever happens to the file, and the recorder child."""

import contextlib
import itertools
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.clock import ClockTriple, monotonic_ns
from gpuwatch.codec import Head, RowsBlock, decode_rows, encode_block, encode_rows, first_line
from gpuwatch.errors import RecordingError
from gpuwatch.recording import AlertsBlock, EventsBlock, RecordingReader, RecordingWriter
from gpuwatch.ring import PERIODS_NS, RingReader, RingSchema, RingWriter
from gpuwatch.signals import UNKNOWN_INTEGER, Column, Entity, Event, Kind, Signal
from gpuwatch.source import EntityInfo
from gpuwatch.summation import RingWindows, row_dtype

GPU = Entity("gpu", "0")
BUS = Entity("gpu", "0000:1b:00.0")
ENERGY = Signal("energy_joules_total", "Energy.", Kind.COUNTER, "joules", scale=0.001)
THROTTLE = Signal(
    "throttle_active", "Reasons.", Kind.BITS, "", label="reason", bits=((0, "idle"), (2, "cap"))
)
POWER = Signal("power_watts", "Power.", Kind.GAUGE, "watts", bounds=(0.0, 2000.0))
CLOCK = Signal("clock_hertz", "Clock.", Kind.GAUGE, "hertz", label="clock")
MILLISECOND = 1_000_000


def make_schema(integers: int = 2, gauges: int = 1, entity: Entity = GPU) -> RingSchema:
    whole = [Column(entity, (ENERGY, THROTTLE)[index % 2]) for index in range(integers)]
    small = [Column(entity, CLOCK, str(index)) for index in range(gauges)]
    return RingSchema("state.fast", "state", "nvml_state", (*whole, *small), MILLISECOND)


def make_rows(schema: RingSchema, count: int, start_ns: int = 10**12, first: int = 1) -> np.ndarray:
    rows = np.zeros(count, row_dtype(schema))
    steps = np.arange(count)
    rows["late"] = (steps % 7) * 1e-5
    rows["time_ns"] = start_ns + steps * MILLISECOND + (steps % 7) * 10_000
    rows["read"] = 2e-6
    rows["integers"] = (steps * 3)[:, None]
    rows["gauges"] = (steps // 10 % 5)[:, None] * 1e8
    rows["gauges"][1::11] = math.nan
    rows["integers"][2::13] = UNKNOWN_INTEGER
    rows["sequence"] = first + steps
    return rows


def make_head(*schemas: RingSchema) -> Head:
    return Head(
        start_ns=10**12,
        end_ns=10**12 + 10**9,
        rings=schemas,
        entities=(EntityInfo(GPU, {"gpu": "0", "uuid": "GPU-1"}),),
        constants={"state": [(Column(GPU, CLOCK, "sm"), 1.98e9)]},
        clocks=(ClockTriple(1, 2, 3),),
        config={"ring": {"seconds": 60}},
        host={"hostname": "node"},
        boot_id="b",
        created_realtime_ns=5,
    )


def write_small(path: Path) -> list[RowsBlock]:
    """Write a recording of a few blocks and return its rows blocks."""
    schemas = (make_schema(), make_schema(0, 3))
    blocks = [
        RowsBlock(ring, MILLISECOND, floor, make_rows(schemas[ring], 8, floor, first))
        for floor, first in ((10**12, 1), (10**12 + 10**9, 9))
        for ring in (0, 1)
    ]
    with RecordingWriter(path, make_head(*schemas)) as writer:
        writer.events([Event(10**12 + 5, GPU, "xid", "79")])
        writer.alerts([{"rule": "gpu_xid"}])
        for block in blocks:
            writer.rows(block)
    return blocks


def same(one: RowsBlock, other: RowsBlock) -> bool:
    return one[:3] == other[:3] and one.rows_bytes == other.rows_bytes


def block_ends(path: Path) -> list[int]:
    """Return the offsets after each block, by the format's own words."""
    data = path.read_bytes()
    offset, ends = data.index(b"\n") + 1, []
    while offset < len(data):
        offset += 16 + struct.unpack_from("<I", data, offset + 4)[0]
        ends.append(offset)
    return ends


def test_reader_gives_back_what_was_written(tmp_path: Path) -> None:
    """Head, rows, events and alerts come back as they were, and the file says it is complete."""
    path = tmp_path / "one.gwr"
    blocks = write_small(path)
    reader = RecordingReader(path)
    read = list(reader)
    assert reader.complete
    assert reader.head == make_head(make_schema(), make_schema(0, 3))
    assert read[0] == EventsBlock([Event(10**12 + 5, GPU, "xid", "79")])
    assert read[1] == AlertsBlock([{"rule": "gpu_xid"}])
    assert all(map(same, read[2:], blocks))
    assert len(read) == 2 + len(blocks)
    assert path.stat().st_mode & 0o777 == 0o640
    assert not path.with_suffix(".gwr.tmp").exists()
    reader.close()


def test_file_has_its_final_name_only_when_complete(tmp_path: Path) -> None:
    """Until it is closed, and for ever if its writer fails, a recording is called .gwr.tmp."""
    path = tmp_path / "one.gwr"
    schema = make_schema()
    with contextlib.suppress(KeyError), RecordingWriter(path, make_head(schema)) as writer:
        writer.rows(RowsBlock(0, MILLISECOND, 0, make_rows(schema, 5)))
        raise KeyError
    assert not path.exists()
    reader = RecordingReader(tmp_path / "one.gwr.tmp")
    assert [len(block.rows) for block in reader if isinstance(block, RowsBlock)] == [5]
    assert not reader.complete
    reader.close()


@st.composite
def wild_rows(draw: st.DrawFn) -> tuple[RingSchema, np.ndarray]:
    schema = make_schema(draw(st.integers(0, 3)), draw(st.integers(0, 3)))
    count = draw(st.integers(0, 12))
    dtype = row_dtype(schema)
    noise = np.frombuffer(
        draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)), dtype
    )
    rows = np.zeros(count, dtype)
    for name in ("time_ns", "late", "read", "integers", "gauges"):
        rows[name] = noise[name]
    extremes = st.sampled_from([UNKNOWN_INTEGER, 2**63 - 1, -1, 0])
    for row in range(count):
        if schema.integers and draw(st.booleans()):
            rows["integers"][row, 0] = draw(extremes)
        if schema.gauges and draw(st.booleans()):
            rows["gauges"][row, 0] = math.nan
    rows["sequence"] = np.arange(count) + draw(st.integers(1, 2**62))
    return schema, rows


@settings(max_examples=200, deadline=None)
@given(
    wild_rows(), st.integers(PERIODS_NS.start, PERIODS_NS.stop - 1), st.integers(-(2**62), 2**62)
)
def test_rows_come_back_bit_by_bit(
    wild: tuple[RingSchema, np.ndarray], period_ns: int, floor_ns: int
) -> None:
    """Packing loses nothing: unknown and extreme integers, NaN of any payload, any times."""
    schema, rows = wild
    block = RowsBlock(0, period_ns, floor_ns, rows)
    raw = encode_rows(block)
    assert same(decode_rows(raw, (schema,), Path("x.gwr")), block)


def test_decoded_rows_are_ring_rows(tmp_path: Path) -> None:
    """Rows from a real ring keep their bytes through a recording, and windows take them."""
    schema = make_schema()
    ring = RingWriter(tmp_path / "r.ring", schema, 1.0)
    for index in range(50):
        ring.append(10**12 + index * MILLISECOND, 1e-5, 2e-6, [index, 5, index * 1.5])
    reader = RingReader(tmp_path / "r.ring")
    _, packed = reader.read(0)
    rows = np.frombuffer(packed, row_dtype(schema))
    block = decode_rows(encode_rows(RowsBlock(0, MILLISECOND, 0, rows)), (schema,), tmp_path)
    assert block.rows_bytes == packed
    windows = RingWindows(schema)
    windows.add(block.rows_bytes)
    assert (windows.oldest_ns, windows.newest_ns) == (10**12, 10**12 + 49 * MILLISECOND)
    reader.close()
    ring.close()


def test_many_rows_become_blocks_of_bounded_size(tmp_path: Path) -> None:
    """However many rows are written at once, no block holds more than 8192 of them."""
    path = tmp_path / "one.gwr"
    schema = make_schema()
    with RecordingWriter(path, make_head(schema)) as writer:
        writer.rows(RowsBlock(0, MILLISECOND, 0, make_rows(schema, 20_000)))
    reader = RecordingReader(path)
    sizes = [len(block.rows) for block in reader if isinstance(block, RowsBlock)]
    assert sum(sizes) == 20_000
    assert max(sizes) <= 8192
    reader.close()


def test_a_minute_of_slow_signals_is_small(tmp_path: Path) -> None:
    """A minute of 8 columns at 1 kHz, its times jittering, takes under half a megabyte."""
    path = tmp_path / "one.gwr"
    schema = make_schema(4, 4)
    rows = make_rows(schema, 60_000)
    noise = np.random.default_rng(1)
    late = noise.gamma(2.0, 3e-5, len(rows))
    rows["late"] = late
    rows["time_ns"] = 10**12 + np.arange(len(rows)) * MILLISECOND + (late * 1e9).astype(np.int64)
    rows["read"] = np.round(noise.gamma(2.0, 1e-6, len(rows)), 7)
    with RecordingWriter(path, make_head(schema)) as writer:
        for start in range(0, len(rows), 1000):
            writer.rows(RowsBlock(0, MILLISECOND, 0, rows[start : start + 1000]))
    assert path.stat().st_size < 500_000


def test_a_file_cut_anywhere_yields_its_whole_blocks(tmp_path: Path) -> None:
    """Cut at any byte, a recording yields exactly the blocks before the cut and is not complete."""
    whole, cut = tmp_path / "whole.gwr", tmp_path / "cut.gwr"
    write_small(whole)
    ends, data = block_ends(whole), whole.read_bytes()
    reader = RecordingReader(whole)
    blocks = [repr(block) for block in reader]
    reader.close()
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        before = sum(end <= size for end in ends)
        if before == 0:
            with pytest.raises(RecordingError):
                RecordingReader(cut)
            continue
        reader = RecordingReader(cut)
        assert [repr(block) for block in reader] == blocks[: before - 1]
        assert not reader.complete
        reader.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, list[RowsBlock]]:
    """Make a small recording: a path to write over, its bytes and its rows."""
    path = tmp_path_factory.mktemp("small") / "one.gwr"
    blocks = write_small(path)
    return path, path.read_bytes(), blocks


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_never_yield_a_wrong_row(
    small: tuple[Path, bytes, list[RowsBlock]], flips: list[tuple[int, int]]
) -> None:
    """A damaged file yields its blocks before the damage or one clear error, never other rows."""
    path, data, blocks = small
    damaged = bytearray(data)
    for position, mask in flips:
        damaged[position % len(data)] ^= mask
    path.write_bytes(damaged)
    try:
        reader = RecordingReader(path)
    except RecordingError:
        return
    rows = [block for block in reader if isinstance(block, RowsBlock)]
    reader.close()
    assert all(map(same, rows, blocks))
    assert reader.complete == (bytes(damaged) == data)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from([b"HEAD", b"ROWS", b"EVNT", b"ALRT", b"END\0", b"????"]),
    raw=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.floats() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
            max_leaves=10,
        ).map(lambda value: json.dumps(value).encode()),
    ),
    with_head=st.booleans(),
)
def test_whole_blocks_of_nonsense_are_one_clear_error(
    small: tuple[Path, bytes, list[RowsBlock]], kind: bytes, raw: bytes, with_head: bool
) -> None:
    """What passes the CRC but makes no sense raises RecordingError and nothing else."""
    path, data, _ = small
    head = data[: data.index(b"\n") + 1 + 16 + struct.unpack_from("<I", data, 25)[0]]
    assert head.startswith(first_line("recording") + b"HEAD")
    path.write_bytes((head if with_head else first_line("recording")) + encode_block(kind, raw))
    with contextlib.suppress(RecordingError), contextlib.closing(RecordingReader(path)) as reader:
        for _ in reader:
            pass


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a gpuwatch recording"),
        (b"PK\3\4 a zip file\n", "not a gpuwatch recording"),
        (b"gpuwatch history 1\n", "not a gpuwatch recording"),
        (b"gpuwatch recording 2\n", "upgrade gpuwatch"),
        (b"gpuwatch recording 1\n", "no whole block"),
        (first_line("recording") + encode_block(b"END\0", b"{}"), "does not begin with its head"),
        (first_line("recording") + encode_block(b"HEAD", b"[" * 100_000), "not JSON"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    """A file that is no recording of this format is refused in one line that names it."""
    path = tmp_path / "foreign.gwr"
    path.write_bytes(content)
    with pytest.raises(RecordingError) as caught:
        RecordingReader(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    """A path that does not exist is refused by name."""
    with pytest.raises(RecordingError) as caught:
        RecordingReader(tmp_path / "none.gwr")
    assert str(caught.value).startswith(f"{tmp_path / 'none.gwr'}: No such file")


def test_absurd_lengths_ask_for_no_memory(tmp_path: Path) -> None:
    """Lengths of gigabytes in a damaged header end the reading; nothing is allocated for them."""
    path = tmp_path / "one.gwr"
    write_small(path)
    data = bytearray(path.read_bytes())
    offset = block_ends(path)[0]
    struct.pack_into("<II", data, offset + 4, 2**32 - 1, 2**32 - 1)
    path.write_bytes(data)
    os.truncate(path, 2**33)
    reader = RecordingReader(path)
    assert list(reader) == []
    assert not reader.complete
    reader.close()


def test_a_full_disk_leaves_a_readable_file(tmp_path: Path) -> None:
    """When the disk is full the writer raises, and what was written before can be read."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        schema = make_schema(2, 4)
        rows = make_rows(schema, 1000)
        noise = np.random.default_rng(1)
        written = []

        def fill(writer: RecordingWriter) -> None:
            while len(written) < 10_000:
                rows["gauges"] = noise.random((1000, 4))
                rows["integers"] = noise.integers(0, 2**62, (1000, 2))
                block = RowsBlock(0, MILLISECOND, 0, rows.copy())
                writer.rows(block)
                written.append(block)

        writer = RecordingWriter(place / "one.gwr", make_head(schema))
        with pytest.raises(OSError, match="No space left") as caught:
            fill(writer)
        writer.abandon()
        assert caught.value.filename == str(place / "one.gwr.tmp")
        reader = RecordingReader(place / "one.gwr.tmp")
        read = [block for block in reader if isinstance(block, RowsBlock)]
        assert len(read) == len(written) > 5
        assert all(map(same, read, written))
        assert not reader.complete
        reader.close()
    finally:
        subprocess.run(["umount", str(place)], check=True)


WRITER = """
import sys, time
from pathlib import Path
from tests.test_recording import BUS, make_schema
from gpuwatch.clock import monotonic_ns
from gpuwatch.ring import RingWriter
ring = RingWriter(Path(sys.argv[1]), make_schema(entity=BUS), 60.0)
count = 0
while True:
    count += 1
    ring.append(monotonic_ns(), 1e-5, 1e-6, [count, 1, count / 2])
    ring.advance(monotonic_ns())
    if count == 400:
        print("400 rows", flush=True)
    time.sleep(0.0005)
"""


def run_recorder(request: dict[str, object]) -> tuple[int, dict[str, object]]:
    """Run the recorder child and return its exit status and its answer."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuwatch.recording"],
        input=json.dumps(request).encode(),
        capture_output=True,
        check=False,
    )
    assert done.stderr == b""
    assert done.stdout.count(b"\n") == 1
    return done.returncode, json.loads(done.stdout)


def test_recorder_saves_a_ring_that_is_being_written(tmp_path: Path) -> None:
    """The recorder child takes the rows of the asked time from a live ring, entities renamed."""
    path, output = tmp_path / "state.1.fast.ring", tmp_path / "saved.gwr"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"400 rows\n"
        ring = RingReader(path)
        now = monotonic_ns()
        times = np.frombuffer(ring.read(0)[1], row_dtype(ring.schema))["time_ns"]
        since = int(times[100])
        status, answer = run_recorder(
            {
                "output": str(output),
                "rings": [str(path), str(tmp_path / "gone.ring")],
                "since_ns": since,
                "until_ns": now,
                "names": [[list(BUS), list(GPU)]],
                "entities": [EntityInfo(BUS, {"gpu": "0"}).to_json()],
                "constants": {"state": [[list(BUS), CLOCK.to_json(), "sm", 1.98e9]]},
                "events": [Event(now, GPU, "xid", "79").to_json()],
                "alerts": [{"rule": "gpu_xid"}],
                "config": {"ring": {"seconds": 60}},
            }
        )
        kept = np.frombuffer(ring.read(0)[1], row_dtype(ring.schema))
        ring.close()
    finally:
        writer.terminate()
        writer.communicate()
    assert status == 0
    reader = RecordingReader(output)
    blocks = list(reader)
    reader.close()
    assert reader.complete
    rows = b"".join(block.rows_bytes for block in blocks if isinstance(block, RowsBlock))
    wanted = kept[slice(*np.searchsorted(kept["time_ns"], [since, now]))]
    assert rows == wanted.tobytes()
    assert answer == {"path": str(output), "rows": len(wanted), "bytes": output.stat().st_size}
    assert reader.head.rings == (make_schema(),)
    assert reader.head.entities == (EntityInfo(GPU, {"gpu": "0"}),)
    assert reader.head.constants == {"state": [(Column(GPU, CLOCK, "sm"), 1.98e9)]}
    assert (reader.head.start_ns, reader.head.end_ns) == (since, now)
    assert reader.head.clocks


def test_recorder_cuts_all_rings_by_time(tmp_path: Path) -> None:
    """Slices of all rings follow each other, so no ring runs ahead of a cut by over a second."""
    schema = make_schema()
    paths = []
    for number in range(3):
        path = tmp_path / f"state.{number}.fast.ring"
        ring = RingWriter(path, schema, 10.0)
        for index in range(5000):
            ring.append(10**12 + index * MILLISECOND, 0, 0, [index, 0, 1.0])
        ring.close()
        paths.append(str(path))
    status, answer = run_recorder(
        {"output": str(tmp_path / "o.gwr"), "rings": paths, "since_ns": 0, "until_ns": 2 * 10**12}
    )
    assert (status, answer["rows"]) == (0, 15_000)
    reader = RecordingReader(tmp_path / "o.gwr")
    blocks = [block for block in reader if isinstance(block, RowsBlock)]
    reader.close()
    assert [block.ring for block in blocks] == [0, 1, 2] * 5
    for block, later in itertools.pairwise(blocks):
        assert block.floor_ns <= block.rows["time_ns"][0]
        assert block.rows["time_ns"][-1] < block.floor_ns + 10**9
        assert block.floor_ns <= later.floor_ns


@pytest.mark.parametrize(
    ("request_changes", "says"),
    [
        ({"rings": []}, "no ring has rows of that time"),
        ({"output": "/nonexistent/o.gwr"}, "/nonexistent: No such file or directory"),
        ({"since_ns": "soon"}, "recorder settings"),
    ],
)
def test_recorder_fails_in_one_line(
    tmp_path: Path, request_changes: dict[str, object], says: str
) -> None:
    """A recorder that cannot save answers with one error and a nonzero status."""
    path = tmp_path / "state.1.fast.ring"
    ring = RingWriter(path, make_schema(), 1.0)
    ring.append(10**12, 0, 0, [1, 1, 1.0])
    ring.close()
    request = {
        "output": str(tmp_path / "o.gwr"),
        "rings": [str(path)],
        "since_ns": 0,
        "until_ns": 2 * 10**12,
        **request_changes,
    }
    status, answer = run_recorder(request)
    assert status != 0
    assert says in str(answer["error"])
    assert "\n" not in str(answer["error"])
    assert list(tmp_path.glob("*.gwr")) == []

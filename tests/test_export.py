"""Exports: what is written for other tools is what was read, to the last bit, or nothing at all."""

import csv
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import Running, wait_for
from traces import read_trace

from gpuwatch import cli, exports
from gpuwatch.clock import SECOND_NS, ClockTriple, wall_ns
from gpuwatch.codec import Head, RowsBlock
from gpuwatch.extract import Choice, full_names
from gpuwatch.gpu_signals import NVLINK_RECEIVED
from gpuwatch.history import History
from gpuwatch.history_writer import Batch, HistoryWriter
from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.pm_signals import NVLINK_DATA
from gpuwatch.recording import RecordingReader, RecordingWriter
from gpuwatch.recording_extract import RecordingExtract
from gpuwatch.ring import RingSchema
from gpuwatch.signals import UNKNOWN_INTEGER, Column, Entity, Event, Kind, Signal
from gpuwatch.source import EntityInfo
from gpuwatch.summation import row_dtype
from gpuwatch.window import TICK_NS

MILLISECOND = 1_000_000
NOON = 1_795_953_600 * SECOND_NS  # 2026-11-29T12:00:00Z
START = 10**12
GPU = Entity("gpu", "0")
POWER = Signal("gpu_power_watts", "Power.", Kind.GAUGE, "watts", bounds=(0.0, 2000.0))
CLOCK = Signal("gpu_clock_hertz", "Clock.", Kind.GAUGE, "hertz", label="clock")
ENERGY = Signal("gpu_energy_joules_total", "Energy.", Kind.COUNTER, "joules", scale=0.001)
REPLAYS = Signal("gpu_pcie_replays_total", "Replays.", Kind.COUNTER, "")
THROTTLE = Signal(
    "gpu_throttle_active", "Reasons.", Kind.BITS, "", label="reason", bits=((0, "idle"), (2, "cap"))
)
CONFIG = """
[simulated]
gpus = 2
fault_after_seconds = 4.0
[state]
period_ms = 5
realtime = false
[recorder]
free_ratio = 0
"""


def head_of(*schemas, seconds=1.0, **changes):
    given = {
        "start_ns": START,
        "end_ns": START + int(seconds * SECOND_NS),
        "rings": schemas,
        "entities": (EntityInfo(GPU, {"gpu": "0", "uuid": "GPU-1"}),),
        "clocks": (ClockTriple(START, NOON, START + 7),),
        "host": {"hostname": "node"},
        "boot_id": "b",
    }
    return Head(**given | changes)


def ring(*columns, name="state.fast", period_ns=MILLISECOND):
    return RingSchema(name, "state", "nvml_state", columns, period_ns)


def rows_of(schema, times, integers=(), gauges=()):
    """Return rows; the cells are a list for each column."""
    rows = np.zeros(len(times), row_dtype(schema))
    rows["time_ns"] = times
    rows["integers"] = np.array(integers, np.int64).reshape(schema.integers, len(times)).T
    rows["gauges"] = np.array(gauges, np.float32).reshape(schema.gauges, len(times)).T
    rows["sequence"] = 1 + np.arange(len(times))
    return rows


def write(path, head, *blocks, events=(), alerts=()):
    with RecordingWriter(path, head) as writer:
        writer.events(list(events))
        writer.alerts(list(alerts))
        for number, rows in blocks:
            writer.rows(RowsBlock(number, head.rings[number].period_ns, head.start_ns, rows))
    return path


def write_history(directory, *heads, rows, events=()):
    """Write rows (energy, cap's share, watts) into a file for each head; rows go by seconds."""
    for head in heads:
        directory.mkdir(exist_ok=True)
        writer = HistoryWriter(directory, head.boot_id)
        times = [head.start_ns + int(second * SECOND_NS) for second in rows]
        counts = [np.array([energy]) for energy, *_ in rows.values()]
        means = [np.array(cells) for _, *cells in rows.values()]
        assert writer.write(Batch(head, times, counts, means, list(events))) == len(rows)
        writer.close()


def export(path, to, output, choice=None):
    """Export a recording without the command line, and return the output."""
    exports.load(to).write(RecordingExtract(path, choice or Choice()), output)
    return output


def gpuwatch(*arguments):
    """Run `gpuwatch export` and return exit code, standard output and error."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuwatch", "export", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def samples(path):
    """Return by (ring, column) the times and cells that a recording has, None for unknown."""
    reader = RecordingReader(path)
    found = {}
    for block in reader:
        if not isinstance(block, RowsBlock):
            continue
        schema = reader.head.rings[block.ring]
        times = block.rows["time_ns"].tolist()
        cells = [*block.rows["integers"].T, *block.rows["gauges"].T]
        for column, values in zip(schema.columns, cells, strict=True):
            all_times, all_cells = found.setdefault((schema.name, column), ([], []))
            all_times += times
            all_cells += [honest(column.signal, value) for value in values.tolist()]
    reader.close()
    return reader.head, found


def honest(signal, value):
    """Return a cell, None if gpuwatch takes it for unknown."""
    if signal.kind is Kind.GAUGE:
        low, high = signal.bounds or (-3.4028234663852886e38, 3.4028234663852886e38)
        return value if low <= value <= high else None
    if signal.kind is Kind.BITS:
        return value if value >= 0 and value != 0xFFFFFFFF else None
    return None if value == UNKNOWN_INTEGER else value


def in_unit(signal, value):
    return None if value is None else value * signal.scale if signal.scale != 1.0 else value


def names_of(head, found):
    """Return the full name of each (ring, column)."""
    labels = {info.entity: info.labels for info in head.entities}
    names = {}
    for table in dict.fromkeys(name for name, _ in found):
        columns = [column for name, column in found if name == table]
        for column, name in zip(columns, full_names(columns, labels), strict=True):
            names[table, column] = name
    return names


def same(one, other):
    """Say whether cells are the same; no tolerance."""
    return one == other and all(type(a) is type(b) for a, b in zip(one, other, strict=True))


def check_parquet(path, output):
    """Compare all cells of an export with those of the recording."""
    head, found = samples(path)
    for (table, column), name in names_of(head, found).items():
        times, cells = found[table, column]
        read = pq.read_table(output / f"{table}.parquet")
        assert read["monotonic_ns"].to_pylist() == times
        walls = [wall_ns(head.clocks, time_ns) for time_ns in times]
        assert read["time"].cast("int64").to_pylist() == walls
        wanted = [in_unit(column.signal, cell) for cell in cells]
        assert same(read[name].to_pylist(), wanted), name
        about = read.schema.field(name).metadata
        assert about[b"unit"].decode() == column.signal.unit
        assert about[b"entity"].decode() == f"{column.entity.kind}/{column.entity.id}"
        for bit, label in column.signal.bits:
            pair = f'reason="{label}"'
            one = name[:-1] + f",{pair}}}" if name.endswith("}") else f"{name}{{{pair}}}"
            bits = [None if cell is None else bool(cell >> bit & 1) for cell in cells]
            assert read[one].to_pylist() == bits


def check_csv(path, output):
    head, found = samples(path)
    names = names_of(head, found)
    for table in dict.fromkeys(name for name, _ in found):
        with (output / f"{table}.csv").open(newline="") as file:
            header, *lines = csv.reader(file)
        columns = dict(zip(header, zip(*lines, strict=True), strict=True))
        for (ring_name, column), (times, cells) in found.items():
            if ring_name != table:
                continue
            assert [int(text) for text in columns["monotonic_ns"]] == times
            texts = columns[names[table, column]]
            kind = np.float32 if column.signal.kind is Kind.GAUGE else None
            for text, cell in zip(texts, cells, strict=True):
                wanted = in_unit(column.signal, cell)
                if kind is not None and text:
                    assert float(np.float32(text)) == wanted
                elif text:
                    assert type(wanted)(text) == wanted
                else:
                    assert wanted is None


def check_perfetto(path, output):
    """Compare the trace at each row's time with the row."""
    head, found = samples(path)
    clock, snapshots, tracks = read_trace(output)
    assert clock == 3  # monotonic
    assert {1: head.clocks[-1].realtime_ns, 3: head.clocks[-1].monotonic_ns}.items() <= (
        snapshots[-1].items()
    )
    by_name = {names[1:]: track for names, track in tracks.items()}  # without the node
    finest = {}
    for (_, column), (times, _) in found.items():
        key = column.entity, column.name
        finest[key] = max(len(times), finest.get(key, 0))
    for (table, column), (times, cells) in found.items():
        coarser = len(times) < finest[column.entity, column.name]
        name = f"{column.name} of {table}" if coarser else column.name
        signal, known = column.signal, [cell is not None for cell in cells]
        entity = track_of(head, column.entity)
        if not any(known) and signal.kind is not Kind.BITS:
            assert (entity, name) not in by_name
            continue
        short = signal.name if signal.kind is Kind.BITS else name
        unknown = by_name.get((entity, f"{short} not known"))
        for time_ns, is_known in zip(times, known, strict=True):
            assert is_known == (unknown is None or not unknown.covers(time_ns))
        if signal.kind is not Kind.BITS:
            track = by_name[entity, name]
            assert track.declared.counter.unit_name == signal.unit
            for time_ns, cell in zip(times, cells, strict=True):
                value = track.value(time_ns)
                assert math.isnan(value) if cell is None else value == in_unit(signal, cell)
            continue
        for bit in {*range(8), 62, *dict(signal.bits)}:
            label = dict(signal.bits).get(bit, f"unknown_0x{1 << bit:x}")
            track = by_name.get((entity, signal.name, label))
            for time_ns, cell in zip(times, cells, strict=True):
                active = cell is not None and bool(cell >> bit & 1)
                assert active == (track is not None and track.covers(time_ns)), (label, time_ns)


def track_of(head, entity):
    """Return the name of an entity's track."""
    labels = {info.entity: info.labels for info in head.entities}.get(entity, {})
    if entity.kind == "gpu":
        return f"GPU {entity.id} ({labels['uuid']})" if "uuid" in labels else f"GPU {entity.id}"
    return str(entity)


CHECKS = {"parquet": check_parquet, "csv": check_csv, "perfetto": check_perfetto}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Return a recording and the history of a simulated node that has a fault, and has stopped."""
    directory = tmp_path_factory.mktemp("node")
    with Running(directory, "--source", "simulated:xid-79", config=CONFIG) as running:
        wait_for(lambda: running.events("scenario_fault"))
        wait_for(lambda: running.status()["ticks_closed"] > 10)
        command = [sys.executable, "-m", "gpuwatch", "record", "--last", "60s"]
        where = ["--path.runtime", str(running.runtime)]
        done = subprocess.run([*command, *where], capture_output=True, text=True, check=True)
        assert running.stop() == 0
    return Path(done.stdout.strip()), running.state / "history"


@pytest.mark.parametrize("to", exports.EXPORTS)
def test_a_recording_of_a_node_comes_back_sample_by_sample(node, tmp_path, to):
    """Every cell of every ring of a real daemon is in the export, exactly, with its time."""
    path, _ = node
    code, told, error = gpuwatch(path, "--to", to, "--output", tmp_path / "out")
    assert (code, error) == (0, "")
    _, found = samples(path)
    assert len({column.entity.kind for _, column in found}) >= 4
    rows = sum(
        len(found[one][0]) for one in {table: one for one in found for table in [one[0]]}.values()
    )
    assert f": {rows} rows of {len({table for table, _ in found})} tables, " in told
    CHECKS[to](path, tmp_path / "out")


ODD = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
CELLS = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, 1.5, 2000.0, 2000.5, math.nan, math.inf])
)
COUNTS = st.one_of(st.integers(-(2**52), 2**52), st.just(UNKNOWN_INTEGER))
BIT_SETS = st.one_of(
    st.integers(0, 255), st.sampled_from([UNKNOWN_INTEGER, -1, 0xFFFFFFFF, 2**62, 0])
)


@st.composite
def recordings(draw):
    """Return a head and the rows of each ring, with names that other formats trip over."""
    entities = [GPU, *(Entity("port", text) for text in draw(st.sets(ODD, max_size=2)))]
    labels = draw(st.sets(ODD, min_size=1, max_size=2))
    rings, blocks = [], []
    for number, entity in enumerate(entities):
        whole = [Column(entity, signal) for signal in (THROTTLE, ENERGY, REPLAYS)]
        small = [Column(entity, POWER), *(Column(entity, CLOCK, label) for label in labels)]
        schema = ring(*whole, *small, name=f"state.{number}")
        steps = draw(st.lists(st.integers(1, 10**9), max_size=12))
        times = START + np.cumsum(np.array(steps, np.int64))
        cells = [
            draw(st.lists(some, min_size=len(steps), max_size=len(steps)))
            for some in (BIT_SETS, COUNTS, st.one_of(COUNTS, st.integers(-(2**63), 2**63 - 1)))
        ]
        floats = [draw(st.lists(CELLS, min_size=len(steps), max_size=len(steps))) for _ in small]
        rows, cut = rows_of(schema, times, cells, floats), draw(st.integers(0, len(steps)))
        rings.append(schema)
        blocks += [(number, rows[:cut]), (number, rows[cut:])]
    return head_of(*rings, seconds=13.0), blocks


@settings(max_examples=40, deadline=None)
@given(made=recordings())
def test_any_recording_comes_back_sample_by_sample(tmp_path_factory, made):
    """Extreme cells, gaps, marks for unknown and names with any characters: nothing is changed."""
    head, blocks = made
    place = tmp_path_factory.mktemp("any")
    path = write(place / "x.gwr", head, *blocks)
    for to, check in CHECKS.items():
        check(path, export(path, to, place / to))


@pytest.fixture
def small(tmp_path):
    """Return a recording of a second: a reason that comes and goes, and a fault of the sensor."""
    schema = ring(Column(GPU, THROTTLE), Column(GPU, POWER))
    times = START + 100 * MILLISECOND * np.arange(10)
    rows = rows_of(schema, times, [[0, 4, 4, 0, 0, 4, 0, 0, 0, 4]], [[300.0] * 5 + [5000.0] * 5])
    event = Event(START + 450 * MILLISECOND, GPU, "gpu_xid", '79: "fallen", off the bus\n')
    alert = {"rule": "gpu_lost", "entity": ["gpu", "0"], "severity": "critical", "limit": 1.0}
    alert |= {"state": "firing", "value": None, "since_ns": START - SECOND_NS, "sticky": False}
    head = head_of(schema, config={"ring": {"seconds": 60}})
    return write(tmp_path / "small.gwr", head, (0, rows), events=[event], alerts=[alert])


def test_parquet_has_events_alerts_and_what_is_known_beside(small, tmp_path):
    """What happened is a table of its own; host, config and each column's meaning are there."""
    output = export(small, "parquet", tmp_path / "out")
    (event,) = pq.read_table(output / "events.parquet").to_pylist()
    assert (event["monotonic_ns"], event["entity_kind"], event["entity_id"], event["event"]) == (
        *(START + 450 * MILLISECOND, "gpu", "0", "gpu_xid"),
    )
    assert event["detail"] == '79: "fallen", off the bus\n'
    (alert,) = pq.read_table(output / "alerts.parquet").to_pylist()
    assert (alert["alert"], alert["severity"], alert["limit"], alert["value"]) == (
        *("gpu_lost", "critical", 1.0, None),
    )
    table = pq.read_table(output / "state.fast.parquet")
    assert str(table.schema.field("time").type) == "timestamp[ns, tz=UTC]"
    assert json.loads(table.schema.metadata[b"host"]) == {"hostname": "node"}
    assert table['gpu_power_watts{gpu="0"}'].null_count == 5  # 5000 W is a fault of the sensor
    about = json.loads((output / "about.json").read_text())
    assert about["config"] == {"ring": {"seconds": 60}}
    assert about["entities"] == [
        {"kind": "gpu", "id": "0", "labels": {"gpu": "0", "uuid": "GPU-1"}}
    ]
    assert {field["name"]: field.get("unit") for field in about["tables"]["state.fast"]} == {
        "time": None,
        "monotonic_ns": None,
        "late_seconds": "seconds",
        "read_seconds": "seconds",
        'gpu_throttle_active{gpu="0"}': "",
        'gpu_throttle_active{gpu="0",reason="idle"}': "",
        'gpu_throttle_active{gpu="0",reason="cap"}': "",
        'gpu_power_watts{gpu="0"}': "watts",
    }


def test_a_trace_has_events_and_alerts_where_they_happened(small, tmp_path):
    """Both are instants of their GPU with their details; what began before is at the start."""
    _, (clocks,), tracks = read_trace(export(small, "perfetto", tmp_path / "out"))
    gpu = ("gpuwatch node", "GPU 0 (GPU-1)")
    (event,) = tracks[*gpu, "events"].instants
    assert event == (
        *(START + 450 * MILLISECOND, "gpu_xid", {"detail": '79: "fallen", off the bus\n'}),
    )
    (alert,) = tracks[*gpu, "alerts"].instants
    assert (alert.time_ns, alert.name, alert.detail["severity"]) == (START, "gpu_lost", "critical")
    assert alert.detail["since_ns"] == str(START - SECOND_NS)
    assert clocks == {3: START, 1: NOON, 6: START + 7}
    caps = tracks[*gpu, "gpu_throttle_active", "cap"].slices
    after = [(one.start_ns - START) // MILLISECOND for one in caps]
    assert after == [100, 500, 900]
    assert all(one.name == "cap" for one in caps)
    assert "uuid=GPU-1" in tracks[gpu].declared.description
    assert json.loads(tracks[gpu[:1]].declared.description)["host"] == {"hostname": "node"}


def test_a_trace_says_when_nothing_was_read(tmp_path):
    """Over a gap, and after the end of a ring that others outlive, a value is not held for ever."""
    one, other = ring(Column(GPU, POWER)), ring(Column(GPU, REPLAYS), name="counters.slow")
    times = START + MILLISECOND * np.array([0, 100, 2000, 2100])
    rows = rows_of(one, times, gauges=[[100.0, 200.0, 300.0, 300.0]])
    long = rows_of(other, START + 240 * MILLISECOND * np.arange(21), integers=[[7] * 21])
    path = write(tmp_path / "x.gwr", head_of(one, other, seconds=5), (0, rows), (1, long))
    *_, tracks = read_trace(export(path, "perfetto", tmp_path / "out"))
    gpu = ("gpuwatch node", "GPU 0 (GPU-1)")
    power = tracks[*gpu, "gpu_power_watts"]
    milliseconds = {ms: power.value(START + ms * MILLISECOND) for ms in (0, 340, 2000, 2340)}
    assert milliseconds == {0: 100.0, 340: 200.0, 2000: 300.0, 2340: 300.0}
    assert math.isnan(power.value(START + 360 * MILLISECOND))
    assert math.isnan(power.value(START + 2360 * MILLISECOND))
    count = tracks[*gpu, "gpu_pcie_replays_total"]  # of the same value all the time
    assert [(point.time_ns - START) // MILLISECOND for point in count.points] == [0, 4800]
    gaps = tracks[*gpu, "gpu_power_watts not known"].slices
    assert [(gap.start_ns - START, gap.end_ns - START) for gap in gaps] == [
        (350 * MILLISECOND, 2000 * MILLISECOND),
        (2350 * MILLISECOND, 4800 * MILLISECOND + 1),
    ]
    assert (*gpu, "gpu_pcie_replays_total not known") not in tracks


def test_a_counter_in_a_trace_has_the_point_before_a_change(tmp_path):
    """Else a rise after a time of rest would look as if it had taken all of that time."""
    schema = ring(Column(GPU, REPLAYS))
    rows = rows_of(schema, START + np.arange(6), integers=[[5, 5, 5, 9, 9, 9]])
    path = write(tmp_path / "x.gwr", head_of(schema), (0, rows))
    *_, tracks = read_trace(export(path, "perfetto", tmp_path / "out"))
    points = tracks["gpuwatch node", "GPU 0 (GPU-1)", "gpu_pcie_replays_total"].points
    assert [(point.time_ns - START, point.value) for point in points] == [
        *((0, 5), (2, 5), (3, 9), (5, 9)),
    ]


def test_a_restarted_sampler_goes_on_in_the_same_table(tmp_path):
    """Rings of the same columns are one table; the same ring with other columns is another."""
    old, new = ring(Column(GPU, POWER)), ring(Column(GPU, POWER), Column(GPU, CLOCK, "sm"))
    head = head_of(old, old, new, seconds=4)
    blocks = [
        (number, rows_of(schema, START + number * SECOND_NS + np.arange(2), gauges=cells))
        for number, schema, cells in (
            *((0, old, [[1.0, 2.0]]), (1, old, [[3.0, 4.0]]), (2, new, [[5.0, 6.0], [7.0, 8.0]])),
        )
    ]
    output = export(write(tmp_path / "x.gwr", head, *blocks), "parquet", tmp_path / "out")
    first = pq.read_table(output / "state.fast.parquet")
    second = pq.read_table(output / "state.fast-2.parquet")
    name = 'gpu_power_watts{gpu="0"}'
    assert (first[name].to_pylist(), second[name].to_pylist()) == ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0])


def test_a_recording_that_tells_no_wall_time(tmp_path, capsys):
    """Its rows are exported by the monotonic clock; a stretch of wall time cannot be asked for."""
    schema = ring(Column(GPU, POWER), name="events")  # as a table is called already
    rows = rows_of(schema, START + np.arange(3), gauges=[[1.0, 2.0, 3.0]])
    path = write(tmp_path / "x.gwr", head_of(schema, clocks=()), (0, rows))
    words = ["export", str(path), "--to", "csv", "--output", "-", "--table", "events-2"]
    assert cli.main(words) == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(line["time"], line["monotonic_ns"]) for line in lines] == [
        ("", str(START + number)) for number in range(3)
    ]
    assert cli.main([*words, "--from", "-1s"]) == 64
    assert "tells no wall time: leave out --from" in capsys.readouterr().err
    table = pq.read_table(export(path, "parquet", tmp_path / "out") / "events-2.parquet")
    assert table["time"].to_pylist() == [None] * 3
    clock, snapshots, tracks = read_trace(export(path, "perfetto", tmp_path / "trace"))
    assert (clock, snapshots) == (6, [])
    points = tracks["gpuwatch node", "GPU 0 (GPU-1)", "gpu_power_watts"].points
    assert [point.value for point in points] == [1.0, 2.0, 3.0]


def test_a_recording_cut_short_says_what_is_missing(node, tmp_path):
    """What is whole of it is exported, exactly, and the rest is told to the second; exit code 1."""
    path, cut = node[0], tmp_path / "cut.gwr.tmp"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size * 9 // 10])
    reader = RecordingReader(cut)
    assert sum(isinstance(block, RowsBlock) for block in reader) > 3
    reader.close()
    lost, whole = reader.head.end_ns - reader.end_ns, reader.head.end_ns - reader.head.start_ns
    code, _, error = gpuwatch(cut, "--to", "parquet", "--output", tmp_path / "out")
    assert code == 1
    assert error.startswith(f"{cut}: cut short: the last {lost / 1e9:.1f} of {whole / 1e9:.1f} s ")
    assert error.count("\n") == 1
    check_parquet(cut, tmp_path / "out")
    assert json.loads((tmp_path / "out/about.json").read_text())["missing"] == [error.strip()]


HISTORY_COLUMNS = (
    Column(GPU, ENERGY),
    Column(GPU, Signal("gpu_throttle_active", "Reasons.", Kind.GAUGE, "", label="reason"), "cap"),
    Column(GPU, POWER),
)


def history_head(boot="b", start_ns=START, wall_ns=NOON):
    schema = RingSchema("history", "history", "history", HISTORY_COLUMNS, TICK_NS)
    clocks = (ClockTriple(start_ns, wall_ns, start_ns),)
    return head_of(schema, start_ns=start_ns, clocks=clocks, boot_id=boot)


def test_history_of_a_node_is_exported_without_being_named(node, tmp_path):
    """`--path.state` is enough; every quarter second of every signal is there as history has it."""
    directory = node[1]
    where = ("--path.state", directory.parent)
    code, _, error = gpuwatch("--to", "parquet", "--output", tmp_path / "out", *where)
    assert (code, error) == (0, "")
    table = pq.read_table(tmp_path / "out/history.parquet")
    pieces = list(History(directory).read(0, 2**62))
    columns = dict.fromkeys(column for piece in pieces for column in piece.columns)
    labels = {info.entity: info.labels for piece in pieces for info in piece.head.entities}
    times = np.concatenate([piece.time_ns for piece in pieces])
    assert table["time"].cast("int64").to_pylist() == times.tolist()
    for column, name in zip(columns, full_names(columns, labels), strict=True):
        cells = []
        for piece in pieces:
            here = column in piece.columns
            place = piece.columns.index(column) if here else 0
            cells += piece.values[:, place].tolist() if here else [math.nan] * len(piece.time_ns)
        read = [math.nan if cell is None else float(cell) for cell in table[name].to_pylist()]
        assert np.array_equal(read, cells, equal_nan=True), name
    events = pq.read_table(tmp_path / "out/events.parquet")["event"].to_pylist()
    assert "scenario_fault" in events


def test_history_over_a_reboot_is_in_wall_time(tmp_path):
    """The monotonic clock begins anew with each boot; a mean is drawn over its own quarter."""
    directory = tmp_path / "history"
    rows = {0.25: (1.0, 0.0, 100.0), 0.5: (2.0, 0.5, 200.0), 2.0: (3.0, 0.0, math.nan)}
    later = history_head("c", 5 * SECOND_NS, NOON + 60 * SECOND_NS)
    write_history(directory, history_head(), later, rows=rows)
    code, told, error = gpuwatch(directory, "--to", "perfetto", "--output", tmp_path / "out")
    assert (code, error) == (0, "")
    assert "6 rows of 1 tables, 2026-11-29T12:00:00.250Z to 2026-11-29T12:01:02.000Z" in told
    clock, snapshots, tracks = read_trace(tmp_path / "out")
    assert (clock, snapshots) == (1, [{1: 1}])  # wall time, and nothing else
    gpu = ("gpuwatch node", "GPU 0 (GPU-1)")
    power, energy = (tracks[*gpu, s.name] for s in (POWER, ENERGY))
    share = tracks[*gpu, 'gpu_throttle_active{reason="cap"}']
    for boot_ns in (NOON, NOON + 60 * SECOND_NS):
        at = [boot_ns + int(second * SECOND_NS) for second in (0, 0.24, 0.25, 0.5, 1.0)]
        watts = [power.value(time_ns) for time_ns in at]
        assert watts[:3] == [100.0, 100.0, 200.0]
        assert all(map(math.isnan, watts[3:]))
        assert [share.value(time_ns) for time_ns in at[:3]] == [0.0, 0.0, 0.5]
        assert energy.value(at[2]) == 1.0
        assert energy.value(at[3]) == 2.0
        assert math.isnan(energy.value(at[4]))


def test_a_counter_of_two_sources_is_one_column(tmp_path):
    """NVML counts NVLink's bytes by the KiB, hardware counters one by one."""
    directory = tmp_path / "history"
    directory.mkdir()
    heads = []
    for number, signal in enumerate((NVLINK_RECEIVED, NVLINK_DATA[0], NVLINK_RECEIVED)):
        schema = RingSchema("history", "history", "history", (Column(GPU, signal),), TICK_NS)
        heads.append(head_of(schema, start_ns=START + number * SECOND_NS))
        cells = [np.array([number * 102400.0]), np.array([math.nan])]
        times = [heads[-1].start_ns + TICK_NS, heads[-1].start_ns + 2 * TICK_NS]
        writer = HistoryWriter(directory, "b")
        assert writer.write(Batch(heads[-1], times, cells, [np.array([])] * 2, [])) == 2
        writer.close()
    code, told, _ = gpuwatch(directory, "--to", "csv", "--output", "-")
    header, *lines = csv.reader(told.splitlines())
    assert code == 0
    assert header[2:] == ['gpu_nvlink_received_bytes_total{gpu="0"}']
    assert [line[2] for line in lines] == ["0", "", "102400", "", "204800", ""]


def test_one_file_of_history_alone(tmp_path):
    """A file of history can be exported wherever it lies and whatever it is called."""
    write_history(tmp_path / "history", history_head(), rows={0.25: (1.0, 0.0, 100.0)})
    (file,) = (tmp_path / "history").iterdir()
    file = file.rename(tmp_path / "kept")
    code, told, _ = gpuwatch(file, "--to", "csv", "--output", "-")
    assert code == 0
    header, line = csv.reader(told.splitlines())
    assert header == [
        *("time", "monotonic_ns", 'gpu_energy_joules_total{gpu="0"}'),
        *('gpu_throttle_active{gpu="0",reason="cap"}', 'gpu_power_watts{gpu="0"}'),
    ]
    assert line == ["2026-11-29T12:00:00.250000000Z", "1000250000000", "1.0", "0.0", "100.0"]


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        (("--from", "2026-11-29T12:00:00.300Z"), range(3, 10)),
        (("--from", "2026-11-29T13:00:00.3+01:00", "--until", "1795953600.5"), (3, 4)),
        (("--from", "-400ms"), (6, 7, 8, 9)),
        (("--from", "-1h", "--until=-700ms"), (0, 1, 2)),
        (("--until", "1795953600.1"), (0,)),
    ],
)
def test_a_stretch_of_time(small, arguments, seconds, capsys):
    """From a time up to another, absolute or before the end of what there is."""
    words = ["--to", "csv", "--output", "-", "--table", "state.fast", *arguments]
    assert cli.main(["export", str(small), *words]) == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    times = [START + tenth * 100 * MILLISECOND for tenth in seconds]
    assert [int(line["monotonic_ns"]) for line in lines] == times


def test_a_choice_of_signals_and_entities(node, tmp_path):
    """Only what is named is in the export, in every table."""
    chosen = ("--signal", "gpu_power_watts", "--signal", 'gpu_clock_hertz{clock="sm"}')
    entity = ("--entity", "gpu/0", "--entity", "host")
    code, *_ = gpuwatch(node[0], "--to", "parquet", "--output", tmp_path / "out", *chosen, *entity)
    assert code == 0
    schemas = [pq.read_schema(path) for path in (tmp_path / "out").glob("state.*.parquet")]
    names = {name for schema in schemas for name in schema.names if name.startswith("gpu")}
    assert names == {'gpu_power_watts{gpu="0"}', 'gpu_clock_hertz{gpu="0",clock="sm"}'}


MISUSES = {
    "outside": (
        ("--from", "2026-11-29T12:00:05Z"),
        "2026-11-29T12:00:00.000Z to 2026-11-29T12:00:01",
    ),
    "backwards": (("--from", "-1s", "--until", "-2s"), "--until: not after --from"),
    "empty": (("--from", "-850ms", "--until", "-849ms"), "has nothing of that time"),
    "no time": (("--from", "yesterday"), "'yesterday' is no time: write 2026-11-29T10:15:00Z"),
    "month 13": (("--from", "2026-13-01T00:00:00Z"), "is no time"),
    "no zone": (("--from", "2026-11-29T12:00:00"), "is no time"),
    "no such signal": (
        ("--signal", "gpu_power_wats"),
        "has no signal 'gpu_power_wats': try gpu_power",
    ),
    "no such entity": (("--entity", "gpu/9"), "has no entity 'gpu/9': try gpu/0"),
    "no such table": (
        ("--table", "x"),
        "has no table 'x': try alerts, canaries, events, state.fast",
    ),
    "nothing left": (
        ("--table", "state.fast", "--entity", "gpu", "--signal", "x"),
        "has no signal",
    ),
    "no directory": (("--output", "/nowhere/x"), "--output /nowhere/x: no such directory"),
    "a trace streamed": (("--to", "perfetto", "--output", "-"), "a stream is csv alone"),
    "no format": (("--to", "xlsx"), "invalid choice: 'xlsx'"),
}


@pytest.mark.parametrize(("arguments", "says"), MISUSES.values(), ids=MISUSES.keys())
def test_what_cannot_be_is_said_in_one_line(small, tmp_path, arguments, says, capsys):
    """One line says what is there or what to write instead, and nothing is made."""
    words = ["--to", "csv", "--output", str(tmp_path / "out"), *arguments]
    assert cli.main(["export", str(small), *words]) == 64
    told = capsys.readouterr()
    assert says in told.err
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == [small]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.write_text("PK"), "not a gpuwatch recording"),
        (lambda path: path.mkdir(), "holds no history"),
        (os.mkfifo, "not a regular file"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path, make, says, capsys):
    """A missing, foreign, empty or endless input is one line that names it."""
    make(tmp_path / "x")
    words = ["--to", "csv", "--output", str(tmp_path / "out")]
    assert cli.main(["export", str(tmp_path / "x"), *words]) == 64
    told = capsys.readouterr().err
    assert told.startswith(f"{tmp_path / 'x'}: ")
    assert says in told
    assert told.count("\n") == 1


def test_a_stream_is_one_table(node, small, capsys):
    """Several tables have several headers: which there are is told, and one is to be chosen."""
    assert cli.main(["export", str(node[0]), "--to", "csv", "--output", "-"]) == 64
    told = capsys.readouterr()
    assert told.out == ""
    assert "give --table with one of these, N a number: counters." in told.err
    assert ", state.fast, state.gpuN\n" in told.err
    assert cli.main(["export", "bundled", "--to", "csv", "--output", "-"]) == 64
    assert "these are 32: give --table with one of these, N a number: " in capsys.readouterr().err
    words = ["--to", "csv", "--output", "-", "--table", "events"]
    assert cli.main(["export", str(small), *words]) == 0
    (event,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert event["detail"] == '79: "fallen", off the bus\n'


@pytest.mark.parametrize("to", exports.EXPORTS)
def test_nothing_is_overwritten_unless_told(small, tmp_path, to, capsys):
    """What is there stays; with --force an earlier export goes, and nothing but an export."""
    output = tmp_path / "out"
    words = ["export", str(small), "--to", to, "--output", str(output)]
    assert cli.main(words) == 0
    again = [*words, "--from", "-500ms"]
    assert cli.main(again) == 64
    assert "exists: give another path, or --force" in capsys.readouterr().err
    before = _contents(output)
    assert cli.main([*again, "--force"]) == 0
    assert _contents(output) != before
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.csv").write_text("all of it")
    assert cli.main([*words[:-1], str(other), "--force"]) == 64
    assert "has more in it than an export (thesis.csv)" in capsys.readouterr().err
    assert (other / "thesis.csv").read_text() == "all of it"
    assert {path.name for path in tmp_path.iterdir()} == {"small.gwr", "out", "precious"}


def _contents(path):
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(file.name, file.read_bytes()) for file in files]


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of 16 kilobytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("to", exports.EXPORTS)
def test_a_full_disk_leaves_nothing_and_takes_nothing(small, disk, to, capsys):
    """One line, nothing half written under any name, and an earlier export is still there."""
    output = str(disk / "out")
    assert cli.main(["export", str(small), "--to", "csv", "--output", output]) == 0
    before = _contents(disk / "out")
    capsys.readouterr()
    words = ["export", "bundled", "--to", to, "--output", output, "--force"]
    if to == "perfetto":  # a file, which does not take a directory's place
        words[-2] = str(disk / "trace")
    assert cli.main(words) == 64
    told = capsys.readouterr().err
    assert "No space left on device: make room, or give another --output" in told
    assert told.count("\n") == 1
    assert [path.name for path in disk.iterdir()] == ["out"]
    assert _contents(disk / "out") == before


@pytest.mark.parametrize(("to", "library"), [("parquet", "pyarrow"), ("perfetto", "perfetto")])
def test_a_missing_library_is_named(small, tmp_path, to, library, monkeypatch, capsys):
    """Who has not installed the extra is told its name, and csv does without."""
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    words = ["export", str(small), "--to", to, "--output", str(tmp_path / "out")]
    assert cli.main(words) == 64
    assert "pip install 'gpuwatch[export]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [small]
    words[3] = "csv"
    assert cli.main(words) == 0


PEAK = """
import resource, sys
from gpuwatch import cli
from gpuwatch.exports import parquet
parquet.CELLS_KEPT = 400_000
assert cli.main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.mark.parametrize("to", exports.EXPORTS)
def test_a_million_rows_take_no_more_memory(long_recordings, tmp_path, to):
    """Memory is that of some blocks, however long the recording is: within a fifth."""
    peaks = []
    for path in long_recordings:
        words = ["export", path, "--to", to, "--output", tmp_path / path.stem]
        command = [sys.executable, "-c", PEAK, *map(str, words), "--signal", "gpu_power_watts"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stderr))
    assert peaks[1] < 1.2 * peaks[0]


@pytest.fixture(scope="module")
def long_recordings(tmp_path_factory):
    """Return recordings of a tenth of a million rows, and of a million."""
    directory = tmp_path_factory.mktemp("long")
    schema, paths = ring(Column(GPU, POWER)), []
    for count in (100_000, 1_000_000):
        path = directory / f"{count}.gwr"
        with RecordingWriter(path, head_of(schema, seconds=count / 1000)) as writer:
            for first in range(0, count, 5000):
                steps = np.arange(first, first + 5000)
                times = START + steps * MILLISECOND
                rows = rows_of(schema, times, gauges=[steps // 5 % 1000])
                writer.rows(RowsBlock(0, MILLISECOND, int(times[0]), rows))
        paths.append(path)
    return paths


def test_every_export_is_in_the_list():
    """An export that is not in EXPORTS could not be asked for, and is asked for by its file."""
    folder = Path(exports.__file__).parent
    assert sorted(exports.EXPORTS) == sorted(path.stem for path in folder.glob("[!_]*.py"))
    assert [exports.load(name).name for name in exports.EXPORTS] == list(exports.EXPORTS)


def test_force_is_no_reason_to_take_what_no_export_made(tmp_path, capsys):
    """A device, a pipe or the recording itself stays as it is; of a link the link is replaced."""
    recording, pipe, link = tmp_path / "r.gwr", tmp_path / "pipe", tmp_path / "link"
    shutil.copy(BUNDLED_RECORDING, recording)
    os.mkfifo(pipe)
    for output, told in ((pipe, "not a file"), (recording, "is what is exported")):
        words = ["export", str(recording), "--to", "perfetto", "--output", str(output), "--force"]
        assert cli.main(words) == 64
        assert told in capsys.readouterr().err
    assert pipe.is_fifo()
    assert recording.read_bytes() == BUNDLED_RECORDING.read_bytes()
    made = tmp_path / "made"
    words = ["export", str(recording), "--to", "csv", "--output"]
    assert cli.main([*words, str(made)]) == 0
    link.symlink_to(made)
    assert cli.main([*words, str(link), "--force"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "made", "pipe", "r.gwr"]


def test_a_disk_that_is_read_only_is_told(small, disk, capsys):
    """In one line, also where nothing was made that could be removed."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert cli.main(["export", str(small), "--to", "csv", "--output", str(disk / "x")]) == 64
    told = capsys.readouterr().err
    assert "Read-only file system" in told
    assert told.count("\n") == 1

"""Byte history: a burst is found long after, at the pace at which the port was read."""

from pathlib import Path

import numpy as np
from test_history import CONSTANTS, INFOS, START, archived, fast, feed  # noqa: F401 - a fixture

from gpuwatch.byte_history import kept_of
from gpuwatch.clock import SECOND_NS, read_clocks
from gpuwatch.history import History
from gpuwatch.network_signals import BURST, PORT_COUNTERS
from gpuwatch.place import Place
from gpuwatch.quota import stamp
from gpuwatch.reader import Reader
from gpuwatch.ring import RingSchema, RingWriter
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Entity

PERIOD_NS = 10_000_000
PORTS = [Entity("rdma_port", f"mlx5_{number}/1") for number in range(2)]
BYTES = [one.signal for one in PORT_COUNTERS if one.tells == "bytes"]
SENT = "rdma_port_data_transmitted_bytes_total"
COLUMNS = (
    *(Column(port, signal) for port in PORTS for signal in BYTES),
    *(Column(port, BURST, "transmitted") for port in PORTS),
)
LINE_RATE = 50_000_000_000  # bytes per second


def ring_of(directory, period_ns=PERIOD_NS, columns=COLUMNS):
    """Return an empty ring, as the network sampler makes it."""
    name = f"network.bytes.{period_ns // 1_000_000}ms"
    schema = RingSchema(name, "network", "rdma", columns, period_ns)
    return RingWriter(directory / f"network.1.bytes.{period_ns}.ring", schema, 60.0)


def write(ring, numbers, rate=0):
    """Write rows of these numbers; all ports have sent at `rate` since START."""
    for number in numbers:
        time_ns = START + number * ring.schema.period_ns
        count = (time_ns - START) * rate // SECOND_NS
        ring.append(time_ns, 1e-5, 0.0, (count,) * 4 + (0.0,) * 2)


def hand_over(made, *rings):
    made.hand_over(INFOS, CONSTANTS, (), rings=[ring.path for ring in rings])


def kept(state, **chosen):
    """Return the times of all rows, on the clock of the rings, and their cells."""
    history = History(state / "history/bytes")
    pieces = list(history.read(0, 2**62, **chosen))
    assert history.faults == []
    if not pieces:
        return [], np.empty((0, 0))
    offset_ns = pieces[0].head.clocks[0].wall_ns(0)
    times = np.concatenate([piece.time_ns for piece in pieces]) - offset_ns
    return times.tolist(), np.concatenate([piece.values for piece in pieces])


def test_a_burst_is_read_finer_than_a_quarter_second(tmp_path, fast):  # noqa: F811
    """20 ms at the rate of the link are these 20 ms in it, where a tick shows a twelfth of it."""
    ring = ring_of(tmp_path)
    sent = 0
    for number in range(200):
        sent += LINE_RATE // 100 if number in (120, 121) else 0
        ring.append(START + number * PERIOD_NS, 0.0, 0.0, (7, sent, 7, 0, 1.0, 1.0))
    with archived(tmp_path) as made:
        feed(made, range(8))
        hand_over(made, ring)
    times, cells = kept(tmp_path, entities=PORTS[:1], signals=[SENT])
    assert times == [START + number * PERIOD_NS for number in range(200)]
    rates = np.diff(cells[:, 0]) / (np.diff(times) / SECOND_NS)
    assert np.flatnonzero(rates).tolist() == [119, 120]
    assert rates.max() == LINE_RATE


def test_the_page_shows_a_burst_of_an_hour_ago(tmp_path, fast):  # noqa: F811
    """Asked in steps finer than history's, the API answers with the reads, joined to the ring."""
    ring, entity = ring_of(tmp_path), ["rdma_port", "mlx5_0/1"]
    with archived(tmp_path, columns=COLUMNS) as made:
        feed(made, range(8))
        write(ring, range(200), 1000)
        hand_over(made, ring)
    offset_ns = next(History(tmp_path / "history").read(0, 2**62)).head.clocks[0].wall_ns(0)
    start = (START + offset_ns) / SECOND_NS
    place = Place(history=str(tmp_path / "history"))
    asked = {"what": "series", "signals": [SENT], "entities": [entity]}
    asked |= {"start": start, "end": start + 1.0, "points": 100}
    answer = Reader(place).answer(asked)
    (series,) = answer["series"]
    assert (answer["source"], answer["step"]) == ("history", 0.01)
    assert [round(rate) for rate in series["mean"]] == [1000] * 100


def test_each_row_is_kept_once(tmp_path, fast):  # noqa: F811
    """Over batches, another pace and another daemon, which all read the same rings again."""
    slow, quick = ring_of(tmp_path, 10 * PERIOD_NS), ring_of(tmp_path)
    with archived(tmp_path) as made:
        feed(made, range(4))
        write(slow, range(10), 1000)
        hand_over(made, slow)
        slow.append(START + SECOND_NS, 0.0, 0.0, (UNKNOWN_INTEGER,) * 4 + (UNKNOWN_GAUGE,) * 2)
        write(quick, range(101, 150), 1000)
        feed(made, range(4, 6))
        hand_over(made, slow, quick)
        feed(made, range(6, 8))
        write(quick, range(150, 200), 1000)
        hand_over(made, slow, quick)
    with archived(tmp_path) as made:
        feed(made, range(8, 9))
        write(quick, range(200, 205), 1000)
        hand_over(made, quick)
    times, cells = kept(tmp_path, signals=[SENT])
    hundredths = [(time_ns - START) // PERIOD_NS for time_ns in times]
    assert hundredths == [*range(0, 101, 10), *range(101, 205)]
    known = np.array(hundredths) != 100
    assert np.isnan(cells[~known]).all()
    assert cells[known, 0].tolist() == [10 * n for n in hundredths if n != 100]


def test_only_bytes_of_ports_that_are_read_often_are_kept():
    """Errors, bursts and what history has as finely anyway stay out."""
    name, period_ns = "network.bytes", PERIOD_NS
    schema = RingSchema(name, "network", "rdma", COLUMNS, period_ns)
    assert kept_of(schema) == [0, 1, 2, 3]
    assert kept_of(RingSchema(name, "network", "rdma", COLUMNS, SECOND_NS)) == []
    others = tuple(Column(PORTS[0], one.signal) for one in PORT_COUNTERS if one.tells != "bytes")
    assert kept_of(RingSchema(name, "network", "rdma", others, period_ns)) == []


def test_a_ring_that_is_gone_holds_up_nobody(tmp_path, fast):  # noqa: F811
    """A sampler ended and took its ring along: history and the other rings are written."""
    ring = ring_of(tmp_path)
    write(ring, range(50))
    with archived(tmp_path) as made:
        feed(made, range(8))
        made.hand_over(INFOS, CONSTANTS, (), rings=[Path("/nowhere.ring"), ring.path])
    assert len(kept(tmp_path)[0]) == 50
    assert made.fault == ""


def test_bytes_that_cannot_be_written_are_told_and_come_later(tmp_path, fast, caplog):  # noqa: F811
    """History's own rows are there, and are not counted as lost."""
    ring = ring_of(tmp_path)
    write(ring, range(50))
    obstacle = tmp_path / "history/bytes"
    obstacle.parent.mkdir()
    obstacle.touch()
    with archived(tmp_path) as made:
        feed(made, range(4))
        hand_over(made, ring)
        feed(made, range(4, 8))
        made.close()
        assert (made.rows, made.rows_lost) == (4, 0)
        assert str(obstacle) in made.fault
    obstacle.unlink()
    with archived(tmp_path) as made:
        feed(made, range(8, 12))
        hand_over(made, ring)
    assert len(kept(tmp_path)[0]) == 50


def test_bytes_are_kept_for_a_day(tmp_path, fast):  # noqa: F811
    """Older files go, whatever history keeps beside them; "off" keeps none."""
    folder = tmp_path / "history/bytes"
    folder.mkdir(parents=True)
    now_ns = read_clocks().realtime_ns
    names = [f"{stamp(now_ns - hours * 3600 * SECOND_NS)}.gwh" for hours in (1, 23, 25, 50)]
    for name in names:
        (folder / name).write_text("old")
        (folder.parent / name).write_text("old")
    with archived(tmp_path, history={"keep": "month"}) as made:
        feed(made, range(4))
        hand_over(made)
    assert {path.name for path in folder.iterdir()} == set(names[:2])
    assert {path.name for path in folder.parent.glob("*.gwh")} >= set(names)
    with archived(tmp_path, history={"keep": "off"}) as made:
        hand_over(made)
    assert list(folder.iterdir()) == []

"""PM sampling above its budget: the hardware keeps the latest seconds, and they are evidence."""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cupti import UNKNOWN, Fake
from running import wait_for
from test_pm import GPU, MS, Sampled

from gpuwatch import sampler
from gpuwatch.budget import PATIENCE
from gpuwatch.control import request
from gpuwatch.pm_signals import columns_of
from gpuwatch.pulse import Pulse
from gpuwatch.recording import RecordingReader, RowsBlock
from gpuwatch.ring import RingSchema
from gpuwatch.sampler import BUDGET_PERIOD_NS, Sampler, Task
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Entity
from gpuwatch.source import Context
from gpuwatch.sources.pm import Pm
from gpuwatch.summation import RingWindows, row_dtype
from gpuwatch.totals import Totals
from gpuwatch.window import TICK_NS, Tick

READ = "gpuwatch_gpu_dram_read_bytes_total"
UNCOVERED = "gpuwatch_gpu_counters_uncovered_seconds_total"
REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
HW_THERMAL = 0x40
RECORD = {"command": "record", "last_seconds": 5}
SECOND = 10**9


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampled]:
    """Watch two GPUs with one daemon for all tests of this file."""
    sampled = Sampled(tmp_path_factory.mktemp("standby"))
    with sampled.running:
        yield sampled


@pytest.fixture
def standby(host: Sampled) -> Iterator[Sampled]:
    """Have the hardware of both GPUs keep the latest, as above the budget."""
    wait_for(lambda: continuous(host), what="both live")
    scale(host, 11)
    wait_for(lambda: host.state()[0] == "standby")
    yield host
    scale(host, 1)
    wait_for(lambda: continuous(host), what="both live again")


def continuous(host: Sampled) -> bool:
    return host.live(0) and host.live(1) and host.state() == ("on", "")


def scale(host: Sampled, number: float) -> None:
    control = host.running.runtime / "control.sock"
    request(control, {"command": "interval", "source": "pm", "scale": number}, 10)


def total(host: Sampled) -> float:
    value = host.running.value(READ, 'gpu="0"')
    assert value is not None
    return value


def kept(rows: Any) -> Any:
    """Return rows that hardware had kept, without those that say nothing is read."""
    known = (rows["integers"] != UNKNOWN_INTEGER).any(axis=1)
    return rows[np.isnan(rows["late"]) & known]


def of_recording(path: Path, gpu: int) -> Any:
    """Return a recording's rows of one GPU's counters."""
    with contextlib.closing(RecordingReader(path)) as reader:
        names = [ring.name for ring in reader.head.rings]
        blocks = [one for one in reader if isinstance(one, RowsBlock)]
        return np.concatenate([one.rows for one in blocks if names[one.ring] == f"pm.pm{gpu}"])


def test_the_choice_is_published(standby: Sampled) -> None:
    """State, reason and event say so; what is not read as planned has no period and is not up."""
    assert "the hardware keeps the latest" in standby.state()[1]
    events = [event["detail"] for event in standby.running.events("pm_mode")]
    assert [one for one in events if "every 1 ms, the latest kept for who asks, with" in one]
    assert standby.running.value("gpuwatch_source_up", 'source="pm"') is None
    assert standby.running.value("gpuwatch_source_period_seconds", 'source="pm"') is None
    assert standby.fake.held(0)


def test_who_records_gets_the_latest_seconds(standby: Sampled) -> None:
    """Each millisecond up to then, of both GPUs, and no total and no share tells of it."""
    wait_for(lambda: standby.running.value("gpuwatch_gpu_graphics_busy_ratio", 'gpu="0"') is None)
    before, uncovered = total(standby), standby.running.value(UNCOVERED, 'gpu="0"')
    time.sleep(1.5)  # what is to be kept
    asked = time.monotonic_ns()
    control = standby.running.runtime / "control.sock"
    path = request(control, {"command": "record", "last_seconds": 30}, 60)["path"]
    for gpu in (0, 1):
        rows = kept(of_recording(Path(path), gpu))
        assert len(rows) > 1000
        assert set(np.diff(rows["time_ns"])) <= {MS - 1, MS, MS + 1}
        assert rows["time_ns"][-1] > asked - 5 * MS
        assert np.diff(rows["integers"][:, 0]) == pytest.approx(1e9)
    ticks = standby.running.status()["ticks_closed"]
    wait_for(lambda: standby.running.status()["ticks_closed"] > ticks + 4)
    assert total(standby) == before
    missed = standby.running.value(UNCOVERED, 'gpu="0"')
    assert missed is not None
    assert uncovered is not None
    assert missed > uncovered + 1.5
    assert standby.running.value("gpuwatch_gpu_graphics_busy_ratio", 'gpu="0"') is None


def test_a_rule_that_sees_something_gets_them_too(standby: Sampled) -> None:
    """The seconds before it are in the ring at once, and so in the recording to come."""
    before = standby.rows(0)["time_ns"][-1]
    time.sleep(1.0)  # what is to be kept
    standby.node.now(REASONS, val=HW_THERMAL)

    def newer() -> Any:
        rows = kept(standby.rows(0))
        return rows[rows["time_ns"] > before]

    rows = wait_for(lambda: (len(found := newer()) > 900 and [found]) or None)[0]
    standby.node.heal()
    assert set(np.diff(rows["time_ns"])) <= {MS - 1, MS, MS + 1}


def test_counters_that_another_one_took_are_kept_for_nobody(standby: Sampled) -> None:
    """A GPU whose counters are gone is not in standby."""
    decode = "cuptiPmSamplingDecodeData"
    with contextlib.ExitStack() as rivals:
        for gpu in (0, 1):
            standby.fake.say(f"result {decode} {UNKNOWN} {gpu}")
        request(standby.running.runtime / "control.sock", RECORD, 60)
        for gpu in (0, 1):
            rivals.enter_context(standby.fake.rival(gpu))
        standby.fake.heal()
        wait_for(lambda: standby.state()[0] == "on" and "another profiler" in standby.state()[1])
        wait_for(lambda: standby.running.value("gpuwatch_source_up", 'source="pm"') == 0)


def test_totals_go_on_where_they_stood(host: Sampled) -> None:
    """Back at the planned interval they rise by what is sampled from then on."""
    wait_for(lambda: continuous(host))
    scale(host, 11)
    wait_for(lambda: host.state()[0] == "standby")
    wait_for(lambda: host.running.value("gpuwatch_gpu_graphics_busy_ratio", 'gpu="0"') is None)
    before = total(host)
    time.sleep(3.0)  # bytes that are in no total
    request(host.running.runtime / "control.sock", {"command": "record", "last_seconds": 5}, 60)
    back = time.monotonic()
    scale(host, 1)
    wait_for(lambda: total(host) > before)
    assert total(host) - before < 1e12 * (time.monotonic() - back)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """Return the fake of one GPU."""
    return Fake(tmp_path_factory.mktemp("single"), [GPU])


Open = Callable[..., Pm]


@pytest.fixture
def opened(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Return a function that opens the source in this process."""
    fake.heal()
    monkeypatch.setenv("FAKE_CUPTI_SCRIPT", str(fake.script))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ctypes.CDLL(str(fake.directory / "libcuda.so.1"))  # found by its name from now on
    sources: list[Pm] = []

    def opened(**keys: str) -> Pm:
        settings = {"set": "default", "interval": "1ms", "library": str(fake.library), **keys}
        context = Context({"config": {"pm": settings}}, Pulse.create(1), tmp_path, known=(GPU,))
        sources.append(Pm())
        sources[-1].open(context)
        return sources[-1]

    yield opened
    for source in sources:
        source.close()


def test_what_is_exceeded_leads_to_10_ms_and_then_to_the_latest(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And back, half an hour later at the earliest; each change is an event."""
    source = opened()
    duty, look, periods = paced(source, monkeypatch)
    assert look(0.2) == (MS, False)
    assert look(0.5) == (10 * MS, False)
    assert look(0.5) == (MS, True)
    assert look(0.5) == (MS, True)  # nothing is slower
    assert quiet_seconds(look) > 1800
    assert (periods[-1], look(0.01)[1]) == (10 * MS, False)
    for _ in range(4 * 9 * PATIENCE + 1):
        look(0.01)
    assert (periods[-1], look(0.01)[1]) == (MS, False)
    told = [message["event"]["detail"] for message in duty.events.after(0)]
    assert "periods x10 from now" in told[0]
    assert "periods x20 from now" in told[1]
    assert len([one for one in told if "50.0%" in one]) == 2


@pytest.mark.parametrize("interval", ["10ms", "100ms"])
def test_a_planned_longer_interval_leads_to_the_latest(
    opened: Open, monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    """At once, for half an hour at least: it does not come and go within minutes."""
    source = opened(interval=interval)
    _, look, _ = paced(source, monkeypatch)
    assert not look(0.2)[1]
    assert look(0.5)[1]
    assert quiet_seconds(look) > 1800
    assert not look(0.01)[1]


def test_what_a_user_sets_does_not_hide_that_the_latest_are_kept(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is what is done, whatever was asked; off is off."""
    source = opened()
    duty, look, _ = paced(source, monkeypatch)
    duty.opened["pm"] = source._opened()

    def state(scale: float) -> str:
        duty._set_scale("pm", scale)
        found = source.housekeep(time.monotonic_ns())
        if found is not None:
            duty.opened["pm"] = found
            if scale:
                duty.states["pm"] = sampler._state_of(found)
        return duty.states["pm"]["state"]

    assert state(1) == "on"
    look(0.5)
    look(0.5)
    assert [state(scale) for scale in (1, 2, 0, 1, 11, 12)] == [
        *("standby", "standby", "off", "standby", "standby", "standby")
    ]


Look = Callable[[float], tuple[int, bool]]


def quiet_seconds(look: Look) -> float:
    """Return for how long the latest are kept once there is room."""
    looks = 0
    while look(0.01)[1]:
        looks += 1
    return looks * BUDGET_PERIOD_NS / SECOND


def paced(source: Pm, monkeypatch: pytest.MonkeyPatch) -> tuple[Sampler, Look, list[int]]:
    """Return a sampler with that source, how it goes on after it took a share, and its periods."""
    config = {"paths": {"runtime": ""}, "ring": {"seconds": 60}, "pm": {"budget_ratio": 0.3}}
    child = SimpleNamespace(config=config, settings={"ring_directory": ""}, generation=1)
    duty = Sampler(child, "pm", [source])  # type: ignore[arg-type,list-item]
    (group,) = source._opened().groups
    periods: list[int] = []
    writer = SimpleNamespace(
        set_period=periods.append,
        append=lambda *row: None,
        schema=SimpleNamespace(integers=0, gauges=0),
    )
    task = Task("pm", group, writer, group.delivery_ns)  # type: ignore[arg-type]
    duty.tasks.append(task)
    duty.scales["pm"] = 1.0
    now, cpu = 1, 0.0
    monkeypatch.setattr(sampler.time, "process_time", lambda: cpu)
    duty._keep_budget(now)

    def look(share: float) -> tuple[int, bool]:
        nonlocal now, cpu
        now += BUDGET_PERIOD_NS
        cpu += share * BUDGET_PERIOD_NS / SECOND
        duty._keep_budget(now)
        return (periods or [MS])[-1], task.standby

    return duty, look, periods


@pytest.mark.parametrize("lines", [("driver 12060", "api 24"), ("chip TU102",)])
def test_where_the_latest_cannot_be_kept_10_ms_is_the_end(
    opened: Open, fake: Fake, lines: tuple[str, ...]
) -> None:
    """A library before 12.8, and Turing, keep the oldest alone."""
    fake.say(*lines)
    (group,) = opened()._opened().groups
    assert group.pace is not None
    assert group.pace(100) == (10, 10 * MS, False)


def test_only_the_newest_are_kept_and_read_once(opened: Open, fake: Fake) -> None:
    """What did not fit any more is gone, and nobody gets a row who has not asked."""
    fake.say(f"record {2**24 // 500}")  # half a second
    source = opened()
    (group,) = source._opened().groups
    assert group.pace is not None
    assert group.ask is not None
    group.pace(100)
    start = time.monotonic_ns()
    time.sleep(1.0)
    assert group.rows(0) == ()
    asked = time.monotonic_ns()
    group.ask()
    rows = group.rows(0)
    times = [time_ns for time_ns, _ in rows]
    assert 450 <= len(rows) <= 550
    assert start + 300 * MS < times[0] < asked - 300 * MS
    assert times[-1] > asked - 5 * MS
    assert group.rows(0) == ()
    assert source.findings.errors == {}
    group.ask()
    assert min(time_ns for time_ns, _ in group.rows(0)) > times[-1]


SCHEMA = RingSchema(
    "pm.pm0", "pm", "pm", columns_of(Entity("gpu", "0"), "default"), MS, delivery_ns=SECOND // 2
)


def pack(rows: list[tuple[int, float, int]]) -> bytes:
    """Return rows of a time, a lateness and a count that all counters have, 0 for unknown."""
    packed = np.zeros(len(rows), row_dtype(SCHEMA))
    for row, (time_ns, late, count) in zip(packed, rows, strict=True):
        row["time_ns"], row["late"] = time_ns, late
        row["integers"] = count or UNKNOWN_INTEGER
        row["gauges"] = 0.5 if count else UNKNOWN_GAUGE
    return packed.tobytes()


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_evidence_is_in_no_window(batch: int) -> None:
    """However it comes to be read: rows as planned, none, evidence twice, and rows again."""
    planned = [(n * MS, 0.0, 1000 + 10 * n) for n in range(1, 201)]
    evidence = [(n * MS, np.nan, 3000 + 10 * n) for n in (*range(600, 700), *range(800, 900))]
    again = [(n * MS, 0.0, 12_000 + 10 * (n - 1000)) for n in range(1000, 1250)]
    delivered = [(*planned, (201 * MS, np.nan, 0)), (), (), evidence, again]
    windows, totals, covered = RingWindows(SCHEMA), Totals(), []
    totals.attach(SCHEMA.columns)
    gpu, name = SCHEMA.columns[0].entity, SCHEMA.columns[0].name
    start = 1000 * TICK_NS
    for number, rows in enumerate(delivered):
        tick = Tick(start + number * TICK_NS, start + (number + 1) * TICK_NS)
        moved = [(start + time_ns, late, count) for time_ns, late, count in rows]
        for place in range(0, len(moved), batch):
            windows.add(pack(moved[place : place + batch]))
        if not windows.ended:
            windows.close(tick)
        totals.add(tick)
        window = tick.window(gpu, name)
        covered.append(window.covered_ns if window else 0)
    assert totals.counters[gpu, name] == 10 * 199 + 10 * 250
    assert covered == [200 * MS, 0, 0, 0, TICK_NS]
    assert totals.uncovered_ns[gpu, name] == 50 * MS + 3 * TICK_NS

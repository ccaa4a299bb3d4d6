"""The feed: rings and manifests become ticks, each closed once, in order, on data time."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from gpuwatch.feed import CATCH_UP_TICKS, GRACE_NS, Feed
from gpuwatch.ring import RingReader, RingSchema, RingWriter
from gpuwatch.signals import (
    HOST,
    UNKNOWN_GAUGE,
    UNKNOWN_INTEGER,
    Column,
    Entity,
    Event,
    Kind,
    Signal,
)
from gpuwatch.source import EntityInfo
from gpuwatch.window import STARTING_NS, TICK_NS

MS = 1_000_000
SECOND = 1000 * MS
BASE = 10**15  # a tick begins here
PERIOD = 10 * MS
CLOCK = Signal("hertz", "G.", Kind.GAUGE, "hertz")
COUNT = Signal("things_total", "C.", Kind.COUNTER, "")
LIMIT = Signal("limit_hertz", "L.", Kind.GAUGE, "hertz")
FIRST, SECOND_GPU = "0000:1b:00.0", "0000:43:00.0"

NO_SOURCES = '{"duty": "x", "generation": 1, "sources": [], "entities": [], "constants": []}'


class Numbers:
    """Numbers as the store gives them: the second address was known before the first."""

    def gpu_numbers(self, pci_bus_ids):
        return {bus: {SECOND_GPU: 0, FIRST: 1}[bus] for bus in pci_bus_ids}


class Duty:
    """A sampler as far as the feed sees it: a manifest and rings, written by hand."""

    def __init__(self, runtime, name="state", generation=1, source="nvml_state", **options):
        self.runtime, self.name, self.generation, self.source = runtime, name, generation, source
        self.addresses = options.get("gpus", (FIRST,))
        self.labels = options.get("labels", {})
        self.writers = {}
        for bus in self.addresses:
            schema = RingSchema(
                f"{name}.{bus}",
                name,
                source,
                (Column(Entity("gpu", bus), COUNT), Column(Entity("gpu", bus), CLOCK)),
                PERIOD,
                options.get("delivery_ns", 0),
            )
            path = runtime / f"{name}.{generation}.{bus}.ring"
            self.writers[bus] = RingWriter(path, schema, 60.0)
        self.sampled_ns = dict.fromkeys(self.addresses, BASE)
        self.announce()

    def announce(self, state="on"):
        entities = [
            EntityInfo(Entity("gpu", bus), {"uuid": f"GPU-{bus}", **self.labels}).to_json()
            for bus in self.addresses
        ]
        manifest = {
            "duty": self.name,
            "generation": self.generation,
            "pid": 1,
            "rings": [str(writer.path) for writer in self.writers.values()],
            "sources": {self.source: {"state": state, "reason": ""}},
            "entities": entities,
            "constants": [[["gpu", bus], LIMIT.to_json(), "", 2e9] for bus in self.addresses],
        }
        temporary = self.runtime / f"{self.name}.tmp"
        temporary.write_text(json.dumps(manifest))
        temporary.replace(self.runtime / f"{self.name}.json")

    def sample(self, until_ns, *addresses, start_ns=None):
        """Write rows up to a time, and say so; the value is the milliseconds since BASE."""
        for bus in addresses or self.addresses:
            writer = self.writers[bus]
            time_ns = self.sampled_ns[bus] if start_ns is None else start_ns
            while time_ns < until_ns:
                passed = (time_ns - BASE) // MS
                writer.append(time_ns, 0.0, 0.0, (passed, float(passed)))
                time_ns += PERIOD
            self.sampled_ns[bus] = time_ns
            writer.advance(until_ns)


def feed_of(runtime, keep_seconds=60.0, sources=None):
    return Feed(runtime, Numbers(), sources or {"nvml_state": "state"}, keep_seconds)


def spans(ticks):
    return [(tick.start_ns - BASE) // TICK_NS for tick in ticks]


def clock(tick, number="1"):
    return tick.windows[Entity("gpu", number)]["hertz"]


def up(tick, source="nvml_state"):
    window = tick.windows.get(Entity("source", source), {}).get("source_up")
    return window and window.last


def test_a_tick_closes_when_all_watermarks_passed_its_end(tmp_path):
    """The slowest ring decides; nothing waits for wall time."""
    duty = Duty(tmp_path, gpus=(FIRST, SECOND_GPU))
    feed = feed_of(tmp_path)
    duty.sample(BASE + 2 * TICK_NS, FIRST)
    duty.sample(BASE + TICK_NS - 1, SECOND_GPU)
    assert feed.poll(BASE + TICK_NS) == []
    duty.sample(BASE + TICK_NS, SECOND_GPU)
    ticks = feed.poll(BASE + TICK_NS)

    assert spans(ticks) == [0]
    assert clock(ticks[0], "0").covered_ns == clock(ticks[0], "1").covered_ns == TICK_NS
    assert up(ticks[0]) == 1
    assert feed.poll(BASE + TICK_NS) == []


def test_a_stalled_ring_holds_a_tick_up_for_the_grace_alone(tmp_path):
    """After 300 ms a tick closes without what is missing, which stays missing when it comes."""
    duty = Duty(tmp_path, gpus=(FIRST, SECOND_GPU))
    feed = feed_of(tmp_path)
    duty.sample(BASE + 100 * MS, SECOND_GPU)
    duty.sample(BASE + 4 * TICK_NS, FIRST)
    end = BASE + TICK_NS
    assert feed.poll(end + GRACE_NS - 1) == []
    (tick,) = feed.poll(end + GRACE_NS)
    late = clock(tick, "0")
    assert (late.covered_ns, late.samples, late.missing) == (110 * MS, 10, 15)
    assert clock(tick, "1").covered_ns == TICK_NS

    duty.sample(BASE + 2 * TICK_NS, SECOND_GPU)
    (tick,) = feed.poll(end + GRACE_NS + 1)
    following = clock(tick, "0")
    assert (following.covered_ns, following.samples, following.missing) == (TICK_NS, 25, 0)
    # No tick covers the late rows, but what was counted meanwhile is not lost.
    assert tick.windows[Entity("gpu", "0")]["things_total"].increase == 490 - 90


def test_a_late_delivery_is_waited_for(tmp_path):
    """A source that hands its rows over every half second makes all ticks wait that long."""
    Duty(tmp_path)
    slow = Duty(tmp_path, "pm", source="pm", gpus=(SECOND_GPU,), delivery_ns=500 * MS)
    feed = feed_of(tmp_path)
    slow.sample(BASE + 10 * MS)
    end = BASE + TICK_NS
    assert feed.poll(end + GRACE_NS + 500 * MS - 1) == []
    assert spans(feed.poll(end + GRACE_NS + 500 * MS)) == [0]


def test_a_sampler_that_is_down_delays_nobody(tmp_path):
    """Its rows are waited for as long as they may be late, and after two seconds not at all."""
    state = Duty(tmp_path)
    slow = Duty(tmp_path, "pm", source="pm", gpus=(SECOND_GPU,), delivery_ns=500 * MS)
    feed = feed_of(tmp_path)
    slow.sample(BASE + 4 * TICK_NS)
    for tick in range(1, 13):
        state.sample(BASE + tick * TICK_NS)
        seen = spans(feed.poll(BASE + tick * TICK_NS))
        waited = 4 < tick < 12  # 12 ticks are two seconds later
        assert seen == ([] if waited and tick < 8 else seen)
    assert seen[-1] == 11


def test_rows_written_during_a_look_wait_for_the_next(tmp_path, monkeypatch):
    """A watermark that moved after the rows were read does not close their tick without them."""
    duty = Duty(tmp_path)
    feed = feed_of(tmp_path)
    duty.sample(BASE + 100 * MS)
    read = RingReader.read

    def read_and_sample(self, after):
        result = read(self, after)
        duty.sample(BASE + 2 * TICK_NS)
        return result

    monkeypatch.setattr(RingReader, "read", read_and_sample)
    assert feed.poll(BASE + TICK_NS) == []
    (first, second) = feed.poll(BASE + 2 * TICK_NS)
    assert (clock(first).covered_ns, clock(second).covered_ns) == (TICK_NS, TICK_NS)
    assert (clock(first).samples, clock(first).missing) == (25, 0)


def test_a_restarted_daemon_misses_nothing(tmp_path):
    """A new feed starts where the rings reach back to, and catches up in short looks."""
    duty = Duty(tmp_path)
    duty.sample(BASE + 30 * SECOND)
    feed = feed_of(tmp_path)
    looks = []
    while ticks := feed.poll(BASE + 30 * SECOND):
        looks.append(ticks)
    ticks = [tick for look in looks for tick in look]

    assert max(map(len, looks)) == CATCH_UP_TICKS
    assert spans(ticks) == list(range(120))
    assert all(clock(tick).covered_ns == TICK_NS for tick in ticks)
    rises = [tick.windows[Entity("gpu", "1")]["things_total"].increase for tick in ticks]
    assert sum(rises) == 29_990


def test_a_look_ends_in_time_where_each_tick_takes_long(tmp_path, monkeypatch):
    """A node of thousands of columns is caught up with in steps: who waits does not wait long."""
    monkeypatch.setattr("gpuwatch.feed.CATCH_UP_NS", -1)  # every tick takes longer than that
    Duty(tmp_path).sample(BASE + SECOND)
    feed = feed_of(tmp_path)
    looks = [feed.poll(BASE + SECOND) for _ in range(5)]
    assert [len(look) for look in looks] == [1, 1, 1, 1, 0]
    assert spans([tick for look in looks for tick in look]) == [0, 1, 2, 3]


def test_a_starved_daemon_leaves_in_the_rings_what_it_cannot_close(tmp_path, monkeypatch):
    """However far it is behind it holds no more than a ring does, and then it is there again."""
    monkeypatch.setattr("gpuwatch.feed.CATCH_UP_NS", -1)  # one tick a look
    duty, feed = Duty(tmp_path), feed_of(tmp_path)
    ticks = []
    for second in range(1, 201):
        duty.sample(BASE + second * SECOND)
        ticks += feed.poll(BASE + second * SECOND)
        (ring,) = feed.rings.values()
        assert len(ring.windows._rows) < 75 * SECOND // PERIOD
    monkeypatch.undo()
    while look := feed.poll(BASE + 200 * SECOND):
        ticks += look
    assert spans(ticks) == list(range(800))
    assert all(clock(tick).covered_ns == TICK_NS for tick in (*ticks[:40], *ticks[-40:]))


def test_a_feed_goes_no_further_back_than_rings_are_kept(tmp_path):
    """Rows older than that may be half overwritten."""
    duty = Duty(tmp_path)
    duty.sample(BASE + 30 * SECOND)
    ticks = feed_of(tmp_path, keep_seconds=5.0).poll(BASE + 30 * SECOND)

    assert spans(ticks) == list(range(100, 120))


def test_without_rings_ticks_close_all_the_same(tmp_path):
    """A source that never came up is down, but not before its sampler had time to open it."""
    feed = feed_of(tmp_path)
    assert feed.poll(BASE + 10) == []
    ticks = feed.poll(BASE + STARTING_NS + TICK_NS + GRACE_NS)
    ticks += feed.poll(BASE + STARTING_NS + TICK_NS + GRACE_NS)

    assert spans(ticks) == list(range(41))
    assert up(ticks[0]) is None
    assert up(ticks[-1]) == 0
    assert list(ticks[-1].windows) == [Entity("source", "nvml_state")]


def test_two_generations_in_one_tick_add_up(tmp_path):
    """The gap between a child and its successor is uncovered; the rest of the tick is known."""
    old = Duty(tmp_path)
    feed = feed_of(tmp_path)
    old.sample(BASE + 100 * MS)
    assert feed.poll(BASE + 100 * MS) == []
    new = Duty(tmp_path, generation=2)
    new.sample(BASE + 3 * TICK_NS, start_ns=BASE + 150 * MS)
    ticks = feed.poll(BASE + 3 * TICK_NS)

    assert spans(ticks) == [0, 1, 2]
    window = clock(ticks[0])
    assert window.covered_ns == 110 * MS + 100 * MS
    assert window.samples == 20
    assert (window.minimum, window.maximum, window.last) == (0.0, 240.0, 240.0)
    assert [(clock(tick).samples, clock(tick).missing) for tick in ticks[1:]] == [(25, 0), (25, 0)]
    assert all(up(tick) == 1 for tick in ticks)


def test_a_ring_that_ended_misses_nothing(tmp_path):
    """Of columns that go on in another ring no read is missing: nobody planned one in the old."""
    old = Duty(tmp_path)
    feed = feed_of(tmp_path)
    old.sample(BASE + 100 * MS)
    feed.poll(BASE + 100 * MS)
    old.writers[FIRST].append(BASE + 105 * MS, math.nan, 0.0, (UNKNOWN_INTEGER, UNKNOWN_GAUGE))
    new = Duty(tmp_path, generation=2)
    new.sample(BASE + 2 * TICK_NS, start_ns=BASE + 110 * MS)
    ticks = feed.poll(BASE + 2 * TICK_NS)

    window = clock(ticks[0])
    assert (window.samples, window.missing) == (10 + 14, 0)
    assert window.covered_ns == 105 * MS + 140 * MS
    assert [sum(rows.missing for rows in tick.rows) for tick in ticks] == [0, 0]
    assert [sum(len(rows.late_seconds) for rows in tick.rows) for tick in ticks] == [24, 25]


def test_a_ring_that_was_replaced_is_kept_as_long_as_it_holds_samples(tmp_path):
    """Recordings can still have it; columns are those of the present child alone."""
    old = Duty(tmp_path, gpus=(FIRST, SECOND_GPU))
    feed = feed_of(tmp_path, keep_seconds=5.0)
    old.sample(BASE + TICK_NS)
    feed.poll(BASE + TICK_NS)
    new = Duty(tmp_path, generation=2, gpus=(FIRST,))
    new.sample(BASE + SECOND, start_ns=BASE + TICK_NS)
    feed.poll(BASE + SECOND)

    assert len(feed.ring_paths()) == 3
    assert [column.entity.id for column in feed.columns] == ["1", "1"]
    assert [info.entity.id for info in feed.entities] == ["1"]

    new.sample(BASE + 6 * SECOND)
    feed.poll(BASE + 6 * SECOND)
    assert feed.ring_paths() == [str(new.writers[FIRST].path)]


def test_a_ring_whose_file_has_gone_is_let_go(tmp_path):
    """A sampler removes rings that ended if they are too many: nothing holds their memory then."""
    old = Duty(tmp_path)
    feed = feed_of(tmp_path)
    old.sample(BASE + TICK_NS)
    feed.poll(BASE + TICK_NS)
    old.writers[FIRST].path.unlink()
    old.writers[FIRST].close()
    new = Duty(tmp_path, generation=2)
    feed.poll(BASE + TICK_NS)

    assert feed.ring_paths() == [str(new.writers[FIRST].path)]
    assert str(old.writers[FIRST].path) not in Path("/proc/self/maps").read_text()


def test_gpus_are_named_by_the_stores_numbers(tmp_path):
    """In windows, constants, entities and events a GPU is a number, whatever the address."""
    duty = Duty(tmp_path, gpus=(FIRST, SECOND_GPU))
    feed = feed_of(tmp_path)
    duty.sample(BASE + TICK_NS, FIRST, SECOND_GPU)
    (tick,) = feed.poll(BASE + TICK_NS)
    gpus = [entity for entity in tick.windows if entity.kind == "gpu"]

    assert gpus == [Entity("gpu", "1"), Entity("gpu", "0")]
    assert tick.constant(Entity("gpu", "0"), "limit_hertz") == 2e9
    assert [(info.entity.id, info.labels["gpu"]) for info in feed.entities] == [
        ("1", "1"),
        ("0", "0"),
    ]
    event = feed.add_event("state", Event(BASE, Entity("gpu", FIRST), "xid"))
    assert event.entity == Entity("gpu", "1")


def test_recorded_numbers_are_kept(tmp_path):
    """What a recording calls GPU 7 stays GPU 7, and asks no store."""
    duty = Duty(tmp_path, labels={"gpu": "7"})
    feed = feed_of(tmp_path)
    duty.sample(BASE + TICK_NS)
    (tick,) = feed.poll(BASE + TICK_NS)

    assert Entity("gpu", "7") in tick.windows


def test_events_come_with_the_tick_of_their_time(tmp_path):
    """An event waits for its tick; one whose tick has gone comes with the next."""
    duty = Duty(tmp_path)
    feed = feed_of(tmp_path)
    duty.sample(BASE + TICK_NS)
    feed.poll(BASE + TICK_NS)
    feed.add_event("state", Event(BASE + 5, HOST, "late"))
    feed.add_event("state", Event(BASE + 2 * TICK_NS + 5, HOST, "early"))
    duty.sample(BASE + 3 * TICK_NS)
    ticks = feed.poll(BASE + 3 * TICK_NS)

    assert [[event.name for event in tick.events] for tick in ticks] == [["late"], ["early"]]


def test_a_source_that_is_off_is_neither_up_nor_down(tmp_path):
    """Nobody reads it, so nothing is missing, and no rule can blame it."""
    duty = Duty(tmp_path)
    feed = feed_of(tmp_path)
    duty.sample(BASE + TICK_NS)
    feed.poll(BASE + TICK_NS)
    duty.announce(state="off")
    duty.writers[FIRST].advance(BASE + 2 * TICK_NS)
    (tick,) = feed.poll(BASE + 2 * TICK_NS)

    assert up(tick) is None
    assert tick.windows == {}
    assert tick.rows == []


def test_a_source_whose_child_died_is_down(tmp_path):
    """Its rings stand still: ticks close by the grace, with nothing known."""
    duty = Duty(tmp_path)
    feed = feed_of(tmp_path)
    duty.sample(BASE + TICK_NS)
    feed.poll(BASE + TICK_NS)
    ticks = feed.poll(BASE + 3 * TICK_NS + GRACE_NS)

    assert [up(tick) for tick in ticks] == [0, 0]
    assert [clock(tick).covered_ns for tick in ticks] == [10 * MS, 0]
    assert np.isnan(clock(ticks[1]).last)


@pytest.mark.parametrize("known_before", [True, False])
def test_what_was_sampled_before_a_standby_is_in_no_tick_after_it(tmp_path, known_before):
    """Nor is it where the daemon was started meanwhile, and has seen the rows in standby alone."""
    duty = Duty(tmp_path, "pm", source="pm", delivery_ns=500 * MS)
    writer, feed = duty.writers[FIRST], feed_of(tmp_path, sources={"pm": "pm"})
    duty.sample(BASE + 4 * SECOND)
    if known_before:
        feed.poll(BASE + 4 * SECOND)
    duty.sample(BASE + 5 * SECOND)
    writer.append(BASE + 5 * SECOND, math.nan, 0.0, (UNKNOWN_INTEGER, UNKNOWN_GAUGE))
    duty.announce("standby")
    writer.advance(BASE + 10 * SECOND)
    feed.poll(BASE + 10 * SECOND)
    duty.announce()
    duty.sample(BASE + 20 * SECOND, start_ns=BASE + 15 * SECOND)
    ticks = [tick for _ in range(3) for tick in feed.poll(BASE + 20 * SECOND)]
    ticks = [tick for tick in ticks if tick.end_ns > BASE + 10 * SECOND]

    counts = [tick.windows[Entity("gpu", "1")]["things_total"] for tick in ticks]
    covered = [count.covered_ns for count in counts]
    assert covered == [0] * 20 + [TICK_NS] * 20
    assert [count.increase for count in counts[:20]] == [0.0] * 20
    # What these counts rise by in the standby itself is no matter here: those of hardware do not.
    assert [count.increase for count in counts[21:]] == [250.0] * 19
    assert counts[20].increase == 250.0 + 10_000


def test_who_feeds_a_signal_is_who_has_rows_of_it(tmp_path):
    """Hardware whose counters were taken is on, and yet others tell of the same meanwhile."""
    fine = Duty(tmp_path, "pm", source="pm", delivery_ns=500 * MS)
    slow = Duty(tmp_path, "counters", source="nvml_counters")
    feed = feed_of(tmp_path, sources={"pm": "pm", "nvml_counters": "counters"})
    seen = []
    for second in range(1, 13):
        now = BASE + second * SECOND
        slow.sample(now)
        if second <= 2 or second > 9:
            fine.sample(now, start_ns=now - SECOND)
        fine.writers[FIRST].advance(now)
        feed.poll(now)
        seen.append(feed.feeders["things_total"])

    assert seen == ["pm"] * 4 + ["nvml_counters"] * 5 + ["pm"] * 3


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"duty": "x"}', '{"entities": [[]]}', NO_SOURCES]
)
def test_what_is_no_manifest_is_told_once(tmp_path, text, caplog):
    """A broken manifest is logged once and stops nothing else."""
    (tmp_path / "broken.json").write_text(text)
    duty = Duty(tmp_path)
    feed = feed_of(tmp_path)
    duty.sample(BASE + 2 * TICK_NS)
    with caplog.at_level(logging.ERROR):
        assert spans(feed.poll(BASE + TICK_NS)) == [0, 1]
        feed.poll(BASE + 2 * TICK_NS)

    assert len([record for record in caplog.records if "broken.json" in record.message]) == 1


def test_a_manifest_whose_ring_is_gone_is_told_and_the_next_one_works(tmp_path, caplog):
    """A child may have been replaced between its manifest and our look."""
    duty = Duty(tmp_path)
    duty.writers[FIRST].path.unlink()
    feed = feed_of(tmp_path)
    feed.poll(BASE)
    assert "No such file" in caplog.text
    new = Duty(tmp_path, generation=2)
    new.sample(BASE + 4 * TICK_NS)
    ticks = feed.poll(BASE + 4 * TICK_NS)

    assert clock(ticks[-1]).covered_ns == TICK_NS


def test_values_are_held_by_the_period_in_force(tmp_path):
    """A sampler that was slowed down covers the time with half as many rows."""
    duty = Duty(tmp_path)
    feed = feed_of(tmp_path)
    writer = duty.writers[FIRST]
    writer.set_period(100 * MS)
    for passed in range(0, 500, 100):
        writer.append(BASE + passed * MS, 0.0, 0.0, (0, 1.0))
    writer.advance(BASE + 2 * TICK_NS)
    ticks = feed.poll(BASE + 2 * TICK_NS)

    assert [clock(tick).covered_ns for tick in ticks] == [TICK_NS, TICK_NS]

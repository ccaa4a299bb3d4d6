"""Rings of one sampler: made and ended, and never so many that they fill memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpuwatch import task
from gpuwatch.clock import SECOND_NS
from gpuwatch.ring import RingReader
from gpuwatch.signals import Column, Entity, Kind, Signal
from gpuwatch.source import Group, Pace
from gpuwatch.task import Rings

BASE = 10**15
CLOCK = Signal("hertz", "G.", Kind.GAUGE, "hertz")
GROUP = Group("gpu0", (Column(Entity("gpu", "0"), CLOCK),), SECOND_NS, lambda: (1.0,))


@pytest.fixture
def rings(tmp_path):
    settings = {"ring_directory": str(tmp_path)}
    config = {"ring": {"seconds": 60.0}}
    return Rings(SimpleNamespace(config=config, settings=settings, generation=1), "counters")


def flap(rings, times, now_ns=BASE):
    """Have a group's columns change so many times at once."""
    for _ in range(times):
        rings.end(rings.task("gpm", GROUP), now_ns)


def test_hardware_samples_in_its_own_steps(rings):
    """It is told how much more rarely to sample; what it makes of that is the ring's period."""
    told = []

    def pace(scale):
        told.append(scale)
        return Pace(10, 10 * SECOND_NS) if scale > 1 else Pace(1, SECOND_NS)

    group = replace(GROUP, read=None, drain=list, delivery_ns=SECOND_NS // 2, pace=pace)
    sampled = rings.task("pm", group)
    assert [sampled.scale(scale) for scale in (1.5, 1, 0)] == [10, 1, 1]
    assert told == [1.5, 1, 0]
    assert sampled.period_ns == SECOND_NS // 2
    sampled.scale(2)
    reader = RingReader(sampled.writer.path)
    assert reader.period_ns == 10 * SECOND_NS
    reader.close()
    assert rings.task("gpm", GROUP).scale(3) == 3


def test_rings_that_ended_are_kept_for_their_time(rings, tmp_path):
    """Their rows may still be recorded; after a minute nobody needs them."""
    flap(rings, 3)
    assert len(list(tmp_path.iterdir())) == 3
    rings.sweep(BASE + 60 * SECOND_NS - 1)
    assert len(list(tmp_path.iterdir())) == 3
    rings.sweep(BASE + 60 * SECOND_NS)
    assert list(tmp_path.iterdir()) == []


def test_a_layout_that_flaps_fills_no_memory(rings, tmp_path, monkeypatch):
    """However often columns change within a minute, ended rings are bounded by number and bytes."""
    monkeypatch.setattr(task, "ENDED_AT_MOST", 20)
    flap(rings, 200)
    left = list(tmp_path.iterdir())
    assert len(left) == 20
    assert max(int(path.stem.rpartition("~")[2]) for path in left) == 199
    size = left[0].stat().st_size
    monkeypatch.setattr(task, "ENDED_BYTES", 5 * size)
    flap(rings, 200)
    assert len(list(tmp_path.iterdir())) == 5

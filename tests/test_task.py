"""Rings of one sampler: made and ended, and never so many that they fill memory."""

from types import SimpleNamespace

import pytest

from gpuwatch import task
from gpuwatch.clock import SECOND_NS
from gpuwatch.signals import Column, Entity, Kind, Signal
from gpuwatch.source import Group
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

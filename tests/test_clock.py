"""Time: wall time by triples, steps of the wall clock, suspends."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch import clock
from gpuwatch.clock import SECOND_NS, ClockTriple, ClockWatch, read_clocks, wall_ns

times = st.integers(-(2**62), 2**62)
triples = st.lists(st.builds(ClockTriple, times, times, times), min_size=1, max_size=8).map(sorted)


def test_the_three_clocks_are_read_together():
    """A triple lies between two looks at the monotonic clock, and agrees with the others."""
    before = time.monotonic_ns()
    triple = read_clocks()
    after = time.monotonic_ns()

    assert before <= triple.monotonic_ns <= after
    assert abs(triple.realtime_ns - time.time_ns()) < 60 * SECOND_NS
    assert triple.boottime_ns >= triple.monotonic_ns - (after - before)


@given(triples, times)
def test_wall_time_is_by_the_newest_triple_not_after(kept, instant):
    """A later triple never changes the wall time of what was before it."""
    before = [triple for triple in kept if triple.monotonic_ns <= instant]
    chosen = before[-1] if before else kept[0]

    assert wall_ns(kept, instant) == chosen.realtime_ns + instant - chosen.monotonic_ns


def test_a_step_changes_only_the_times_after_it():
    """When the wall clock was set back an hour, older samples keep their old wall time."""
    kept = [ClockTriple(100, 5000 * SECOND_NS, 100), ClockTriple(200, 1400 * SECOND_NS, 200)]

    assert wall_ns(kept, 199) == 5000 * SECOND_NS + 99
    assert wall_ns(kept, 200) == 1400 * SECOND_NS


@pytest.fixture
def clocks(monkeypatch):
    """Return a list whose first triple is what the clocks show."""
    shown = [ClockTriple(0, 10**18, 0)]
    monkeypatch.setattr(clock, "read_clocks", lambda: shown[0])
    return shown


@pytest.mark.parametrize(
    ("monotonic", "realtime", "boottime", "step", "suspend"),
    [
        (60, 60, 60, 0, 0),
        (60, 60.9, 60, 0, 0),  # slewed, not stepped
        (60, 3660, 60, 3600, 0),
        (60, -3540, 60, -3600, 0),
        (60, 660, 660, 0, 600),
        (60, 4260, 660, 3600, 600),
        (60, 60, 60.9, 0, 0),
    ],
)
def test_steps_and_suspends_are_told_apart(clocks, monotonic, realtime, boottime, step, suspend):
    """A suspend moves boottime and wall clock alike; a step moves the wall clock alone."""
    watch = ClockWatch()
    start = clocks[0]
    moved = [int(seconds * SECOND_NS) for seconds in (monotonic, realtime, boottime)]
    clocks[0] = ClockTriple(*(a + b for a, b in zip(start, moved, strict=True)))

    assert watch.look() == (step * SECOND_NS, suspend * SECOND_NS)
    assert watch.look() == (0, 0)

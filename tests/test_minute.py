"""The minute: what a view draws of the last 60 seconds."""

import pytest
from populated import window

from gpuwatch.gpu_signals import CLOCK, NVLINK_RECEIVED, POWER, THROTTLE
from gpuwatch.minute import PROCESSOR_TIME, SECONDS, Minute
from gpuwatch.signals import Column, Entity
from gpuwatch.window import TICK_NS, Tick

GPU = Entity("gpu", "0")
COLUMNS = (
    Column(GPU, CLOCK, "sm"),
    Column(GPU, CLOCK, "memory"),
    Column(GPU, POWER),
    Column(GPU, THROTTLE),
    Column(GPU, NVLINK_RECEIVED),
)
CAP = 'gpu_throttle_active{reason="sw_power_cap"}'


def fed(values, start=4001, **rises):
    """Return a minute of the columns after a tick for each value of the power, None unknown."""
    minute = Minute()
    minute.attach(COLUMNS)
    for number, value in enumerate(values, start):
        add(minute, number, value, **rises)
    return minute


def add(minute, number, watts, every=1, rise=0.0):
    tick = Tick((number - 1) * TICK_NS, number * TICK_NS)
    if watts is not None:
        rose = rise if number % every == 0 else 0.0
        tick.windows[GPU] = {
            "gpu_power_watts": window(number, watts),
            CAP: window(number, float(number % 4 == 0)),
            NVLINK_RECEIVED.name: window(number, 1e9, increase=rose),
        }
    minute.add(tick)


def means(minute, name, entity=GPU):
    """Return a column's means, oldest first."""
    (found,) = [
        one["mean"]
        for one in minute.series()["series"]
        if one["name"] == name and one["entity"] == list(entity)
    ]
    return found


def test_seconds_are_means_and_shares_and_what_was_not_known_is_none():
    """A second is the mean of its ticks; one without any is None, never 0."""
    minute = fed([100, 200, 300, 400, None, None, None, None, 500, 500, None, None])
    power = means(minute, "gpu_power_watts")
    assert power[-4:] == [None, 250, None, 500]
    assert len(power) == SECONDS
    assert means(minute, CAP)[-4:] == [None, 0.25, None, 0.0]
    answer = minute.series()
    assert answer["end"] - answer["start"] == SECONDS
    shown = {one["name"] for one in answer["series"]}
    assert 'gpu_clock_hertz{clock="sm"}' in shown
    assert 'gpu_clock_hertz{clock="memory"}' not in shown
    assert 'gpu_throttle_active{reason="gpu_idle"}' not in shown


@pytest.mark.parametrize("every", [1, 3, 4])
def test_a_rate_is_steady_however_seldom_the_counter_is_read(every):
    """A counter that is read once a second does not look as if it stood still between reads."""
    rates = means(fed([1.0] * 80, every=every, rise=5e9 * every * 0.25), NVLINK_RECEIVED.name)
    known = [rate for rate in rates if rate is not None]
    assert len(known) >= 18
    assert known[1:-1] == pytest.approx([5e9] * len(known[1:-1]))


def test_a_counter_that_stands_still_has_rate_0_and_one_that_is_gone_none():
    """Nothing over a link is 0; a GPU that does not answer is not known."""
    still = means(fed([1.0] * 40), NVLINK_RECEIVED.name)
    assert still[-4] == 0
    gone = means(fed([1.0] * 20 + [None] * 20, rise=1e9), NVLINK_RECEIVED.name)
    assert gone[-4:] == [None] * 4
    assert gone[-7] == pytest.approx(4e9)


def test_after_a_pause_the_past_is_not_known():
    """What is older than a minute is forgotten, also when no tick came meanwhile."""
    minute = fed([700.0] * 8)
    add(minute, 4008 + 4 * 90, 100.0)
    assert means(minute, "gpu_power_watts") == [None] * 59 + [100]


def test_processor_time():
    """The cost of a process is its CPU seconds per second."""
    minute = fed([1.0] * 4)
    for second in range(1, 6):
        for tick in range(4):
            add(minute, 4000 + 4 * second + tick + 1, 1.0)
        minute.add_processor_time("state", 10 + 0.25 * second)
    duty = Entity("duty", "state")
    assert means(minute, PROCESSOR_TIME, duty)[-4:] == pytest.approx([0.25] * 4)

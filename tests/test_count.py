"""Counts of hardware that wraps, sticks or is reset; the pace of reads; bursts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.burst import Burst
from gpuwatch.count import Count
from gpuwatch.pace import Pace
from gpuwatch.rises import Rises
from gpuwatch.signals import UNKNOWN_INTEGER

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


@given(
    st.integers(4, 64),
    st.data(),
    st.lists(st.integers(0, 15), max_size=50),
)
def test_a_counter_that_wraps_is_followed_exactly(bits, data, shares):
    """However often it comes round, the count has risen by what really happened."""
    full = 2**bits
    start = data.draw(st.integers(0, full - 1))
    count, truth = Count(bits), start
    count.take(start)
    for share in shares:
        truth += full // 16 * share // 16
        assert count.take(truth % full) == truth % 2**63
    assert count.resets == 0


@given(st.lists(st.tuples(st.integers(0, 2**31), st.booleans()), min_size=1, max_size=50))
def test_a_counter_that_is_reset_is_followed_exactly(steps):
    """What it has counted since the reset is added to what it had counted before."""
    count, raw, truth, resets = Count(), 2**40, 2**40, 0
    count.take(raw)
    for rise, reset in steps:
        fell = reset and rise < raw
        raw = rise if fell else raw + rise
        truth += rise
        resets += fell
        assert count.take(raw) == truth
    assert count.resets == resets


def test_a_counter_that_sticks_is_told_from_one_that_wraps():
    """At all ones a saturating counter stands still; a fall of it is a reset, however small."""
    count = Count(8, saturates=True)
    assert [count.take(raw) for raw in (250, 255, 255)] == [250, 255, 255]
    assert count.saturated
    assert count.take(2) == 257
    assert not count.saturated
    assert count.resets == 1
    wraps = Count(8)
    assert [wraps.take(raw) for raw in (250, 255, 2)] == [250, 255, 258]
    assert not wraps.saturated


def test_a_great_fall_of_a_narrow_counter_is_a_reset():
    """A driver that starts anew does not add the rest of the range."""
    count = Count(32)
    assert [count.take(raw) for raw in (3_000_000_000, 7)] == [3_000_000_000, 3_000_000_007]
    assert count.resets == 1


def test_a_device_made_anew_counts_on_without_a_jump():
    """What a new device shows first is no rise, and the count does not fall."""
    count = Count(factor=4)
    assert count.total == UNKNOWN_INTEGER
    assert [count.take(raw) for raw in (10, 12)] == [40, 48]
    count.renew()
    assert [count.take(raw) for raw in (2, 3)] == [48, 52]


def fed(pace, cost_ns, now_ns):
    for _ in range(100):
        pace.add(cost_ns)
    return bool(pace.look(now_ns)), pace.period_ns // MILLISECOND


def test_a_cheap_read_is_done_often_and_a_dear_one_seldom():
    """A hundredth of the time may be spent; ten seconds decide, and the reason is told."""
    periods = [ms * MILLISECOND for ms in (10, 20, 50, 100)]
    pace = Pace(periods, 100 * MILLISECOND, 200_000)
    assert fed(pace, 30_000, SECOND) == (False, 100)
    assert fed(pace, 30_000, 11 * SECOND) == (True, 10)
    assert fed(pace, 99_000, 22 * SECOND) == (False, 10)
    assert fed(pace, 101_000, 33 * SECOND) == (True, 20)
    assert fed(pace, 99_000, 44 * SECOND) == (False, 20)  # faster only with some room
    assert fed(pace, 190_000, 55 * SECOND) == (False, 20)
    assert fed(pace, 201_000, 66 * SECOND) == (True, 100)  # slow reads are done seldom


def test_a_few_slow_reads_are_no_reason_but_one_in_fifty_is():
    """The 99th percentile decides whether a read is slow."""
    for slow, expected in ((1, 10), (2, 100)):
        pace = Pace([10 * MILLISECOND, 100 * MILLISECOND], 100 * MILLISECOND, 200_000)
        for index in range(100):
            pace.add(900_000 if index < slow else 10_000)
        pace.look(11 * SECOND)
        assert pace.period_ns == expected * MILLISECOND


def burst_of(points, limit=math.inf):
    """Return the peaks after reads of (milliseconds, count)."""
    burst, peaks = Burst(), []
    for at_ms, count in points:
        burst.add(int(at_ms * MILLISECOND), int(at_ms * MILLISECOND), count, limit)
        peaks.append(burst.peak)
    return peaks


def test_a_burst_of_one_interval_is_seen():
    """Ten milliseconds at full rate are full rate, whatever the second's mean."""
    peaks = burst_of([(0, 0), (10, 0), (20, 1000), (30, 501_000), (40, 501_000), (50, 501_000)])
    assert math.isnan(peaks[0])
    assert peaks[-1] == pytest.approx(50e6)


def test_a_burst_is_forgotten_after_a_minute():
    """The peak is of the trailing 60 s."""
    points = [(0, 0), (10, 1), (20, 1_000_001)]
    later = [(1000 * second, 1_000_001) for second in range(1, 70)]
    peaks = burst_of(points + later)
    assert peaks[2] == pytest.approx(1e8)
    assert peaks[2 + 59] == pytest.approx(1e8)
    assert peaks[2 + 60] == 0.0


def test_a_device_that_renews_its_counter_once_a_second_shows_no_false_burst():
    """A second's bytes that come at once are a second's rate, not that of ten milliseconds."""
    points = [(10 * step, 5_000_000 * (step // 100)) for step in range(1000)]
    assert burst_of(points)[-1] == pytest.approx(5e6, rel=0.02)


def test_a_rate_beyond_the_link_is_none():
    """What cannot be is not published."""
    assert burst_of([(0, 0), (10, 1000), (20, 900_000)], limit=1e7)[-1] == pytest.approx(1e5)


def test_a_read_that_took_long_says_no_rate():
    """When the process was held up within a read, its bytes belong to an unknown time."""
    burst = Burst()
    burst.add(0, 0, 0, math.inf)
    burst.add(10 * MILLISECOND, 10 * MILLISECOND, 10_000, math.inf)
    burst.add(12 * MILLISECOND, 20 * MILLISECOND, 20_000, math.inf)
    burst.add(30 * MILLISECOND, 30 * MILLISECOND, 30_000, math.inf)
    assert burst.peak == pytest.approx(1e6)


@given(
    st.lists(st.tuples(st.sampled_from([1, 1, 1, 5, 40, -3]), st.integers(0, 3)), max_size=60),
    st.integers(0, 8),
)
def test_rises_agree_with_a_recount(steps, delay):
    """Over any span, over gaps and going back; what is held back counts later."""
    rises, kept, now = Rises(20 + delay, delay), [], 100
    for jump, increase in steps:
        now += jump
        rises.push(now, float(increase))
        kept = [row for row in kept if now - 20 - delay < row[0] < now] + [(now, increase)]
        for span in (1, 7, 20):
            newest = now - delay
            expected = sum(rise for at, rise in kept if newest - span < at <= newest)
            assert rises.over(span) == expected


def test_rises_that_are_held_back_can_be_dropped():
    """Dropped is what is younger than the delay, and nothing else."""
    rises = Rises(100, 10)
    for now in (10, 15, 20):
        rises.push(now, 1.0)
    rises.drop_open()
    rises.push(40, 0.0)
    assert rises.over(100) == 1.0

"""Calibration: the refresh of a value from the value's own changes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.calibration import ENOUGH, MILLISECOND_NS, RefreshEstimator

PERIOD = MILLISECOND_NS


def reads(refresh_ms, seconds, repeat, seed, period_ns=PERIOD):
    """Return times and values of a gauge that is renewed, `repeat` of the time with no change."""
    noise = np.random.default_rng(seed)
    times = np.arange(0, int(seconds * 1e9), period_ns, dtype=np.int64) + 10**12
    times += noise.integers(0, period_ns // 4, len(times))
    count = int(seconds * 1000 / refresh_ms) + 2
    changed = noise.random(count) >= repeat
    values = np.cumsum(changed).astype(np.float32)
    phase = noise.integers(0, refresh_ms * MILLISECOND_NS)
    return times, values[(times - 10**12 + phase) // (refresh_ms * MILLISECOND_NS)]


@pytest.mark.parametrize("refresh_ms", [10, 20, 50, 100, 200])
@pytest.mark.parametrize("repeat", [0.0, 0.4])
@pytest.mark.parametrize("period_ms", [1, 2])
def test_the_refresh_is_found(refresh_ms, repeat, period_ms):
    """Whatever share of the renewals changed nothing, single spacings give the refresh."""
    period_ns = period_ms * MILLISECOND_NS
    times, values = reads(refresh_ms, 12.0, repeat, seed=refresh_ms, period_ns=period_ns)
    estimator = RefreshEstimator(1)
    for start in range(0, len(times), 250):
        part = slice(start, start + 250)
        estimator.add(times[part], values[part, None], period_ns)

    assert estimator.refresh_ns(0) == pytest.approx(refresh_ms * MILLISECOND_NS, rel=0.05)


def test_a_value_that_never_changes_tells_nothing():
    """A constant, an unknown value, and too few changes leave the refresh unknown."""
    times = np.arange(4000, dtype=np.int64) * PERIOD + 10**12
    few = np.searchsorted(times, 10**12 + np.arange(1, ENOUGH + 1) * 100 * PERIOD)
    values = np.zeros((4000, 3), np.float32)
    values[:, 1] = math.nan
    for change in few[:ENOUGH]:
        values[change:, 2] += 1
    estimator = RefreshEstimator(3)
    estimator.add(times, values, PERIOD)

    assert [estimator.refresh_ns(gauge) for gauge in range(3)] == [None, None, None]


def test_time_without_a_value_is_no_spacing():
    """After a gap of unknown values the change back is not taken for a renewal."""
    times, values = reads(100, 6.0, 0.0, seed=1)
    values = values.copy()
    values[2000:2060] = math.nan
    estimator = RefreshEstimator(1)
    estimator.add(times, values[:, None], PERIOD)

    assert estimator.refresh_ns(0) == 100 * MILLISECOND_NS


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * 10**9), st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf])
        ),
        max_size=80,
    ),
    st.integers(1, 9),
)
def test_any_rows_in_any_pieces_give_the_same(rows, pieces):
    """The answer does not hang on how the rows were cut, and is at least a millisecond."""
    times = np.cumsum(np.array([step for step, _ in rows], np.int64)) + 1
    values = np.array([value for _, value in rows], np.float32).reshape(-1, 1)
    whole, cut = RefreshEstimator(1), RefreshEstimator(1)
    whole.add(times, values, PERIOD)
    for part in np.array_split(np.arange(len(rows)), pieces):
        cut.add(times[part], values[part], PERIOD)

    assert whole.refresh_ns(0) == cut.refresh_ns(0)
    assert whole.refresh_ns(0) is None or whole.refresh_ns(0) >= MILLISECOND_NS

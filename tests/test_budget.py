"""The sampler's budget."""

from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.budget import PATIENCE, ROOM, STEP, Budget


@given(st.floats(0.001, 1.0), st.floats(0.0001, 0.9))
def test_use_settles_under_the_budget(share, cost):
    """A sampler whose use falls with its rate is under the budget after one step, and stays."""
    budget, scale = Budget(share), 1.0
    scale = budget.scale(scale, cost)
    for _ in range(100):
        assert cost / scale <= share * (1 + 1e-9)
        scale = budget.scale(scale, cost / scale)
    assert scale == 1.0 or cost / (scale - STEP) > ROOM * share * (1 - 1e-9)


def test_planned_rate_returns_when_there_is_room():
    """After the load has gone the planned periods come back, a step a minute."""
    budget = Budget(0.05)
    scale = budget.scale(1.0, 0.1)

    assert scale == 2.0
    for _ in range(4 * PATIENCE):
        scale = budget.scale(scale, 0.01 / scale)
    assert scale == 1.0


def test_one_quiet_look_changes_nothing():
    """A short pause of the job does not make the sampler go faster."""
    budget = Budget(0.05)

    assert budget.scale(2.0, 0.001) == 2.0
    assert budget.scale(2.0, 0.045) == 2.0

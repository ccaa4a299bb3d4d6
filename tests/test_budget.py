"""The sampler's budget."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from gpuwatch import sampler
from gpuwatch.budget import PATIENCE, ROOM, STEP, Budget
from gpuwatch.clock import MILLISECOND_NS
from gpuwatch.sampler import BUDGET_PERIOD_NS, Sampler, Task
from gpuwatch.source import Opened


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


def test_what_was_asked_for_stays_beside_the_budget(monkeypatch):
    """A source made slower on request stays so however little it uses; the budget multiplies."""
    config = {
        "paths": {"runtime": ""},
        "ring": {"seconds": 60},
        "state": {"budget_ratio": 0.05},
    }
    child = SimpleNamespace(config=config, settings={"ring_directory": ""}, generation=1)
    duty = Sampler(child, "state", [SimpleNamespace(name="nvml_state")])
    group = SimpleNamespace(period_ns=MILLISECOND_NS, drain=None, pace=None)
    writer = SimpleNamespace(set_period=lambda period_ns: None)
    task = Task("nvml_state", group, writer, MILLISECOND_NS)
    duty.tasks.append(task)
    duty.opened["nvml_state"] = Opened(())
    now, cpu = 1, 0.0
    monkeypatch.setattr(sampler.time, "process_time", lambda: cpu)
    duty._keep_budget(now)

    def look(share):
        nonlocal now, cpu
        now += BUDGET_PERIOD_NS
        cpu += share * BUDGET_PERIOD_NS / 1e9
        duty._keep_budget(now)

    duty._answer(None, {"command": "interval", "source": "nvml_state", "scale": 4})
    for _ in range(3 * PATIENCE):
        look(0.001)
    assert task.period_ns == 4 * MILLISECOND_NS
    assert duty.events.sequence == 0
    look(0.1)
    assert task.period_ns == 8 * MILLISECOND_NS
    assert [message["event"]["name"] for message in duty.events.after(0)] == ["sampling_budget"]
    for _ in range(4 * PATIENCE):
        look(0.001)
    assert task.period_ns == 4 * MILLISECOND_NS

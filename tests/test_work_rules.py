"""Rules about work: a GPU that is slower than its siblings, and the loads that only look so."""

from dataclasses import replace

import pytest
import ticks
from hypothesis import given, settings
from hypothesis import strategies as st
from ticks import SECOND, firing, judged

from gpuwatch.alerts import AlertEngine
from gpuwatch.gpu_signals import REASONS, THROTTLE
from gpuwatch.rules import work
from gpuwatch.signals import Entity, column_name

CLOCK = 'gpu_clock_hertz{clock="sm"}'
LIMITS = {
    'gpu_clock_limit_hertz{clock="sm"}': 1.98e9,
    'gpu_clock_limit_hertz{clock="memory"}': 3.2e9,
}
SET = column_name(THROTTLE, "applications_clocks")
BOTH = {"gpu_straggler", "gpu_straggler_severe"}
WARNING = {"gpu_straggler"}


def gpu(clock=1.98e9, busy=0.9, **others):
    """Return a GPU in SM activity `busy`; as it comes it is healthy."""
    return {CLOCK: clock, "gpu_sm_active_ratio": busy, "gpu_utilization_ratio": 1.0} | others


def node(*gpus):
    """Return the columns of GPUs 0, 1, 2, ... of a node."""
    return {Entity("gpu", str(number)): columns for number, columns in enumerate(gpus)}


def with_seven(first, others=None):
    """Return a node whose GPU 0 is this one, beside seven alike."""
    return node(first, *[others or gpu()] * 7)


def fires(*script):
    """Return the rules that fire after runs of (seconds, GPUs)."""
    engine, _ = judged(list(script), LIMITS, work.RULES)
    return firing(engine)


TEN, LONG = 601, 1300  # seconds: just enough for 10 minutes, and more than enough

TABLE = [
    # 7 % is a warning, 15 % critical, after 10 minutes and not before.
    ([(LONG, with_seven(gpu()))], set()),
    ([(LONG, with_seven(gpu(1.98e9 * 0.931)))], set()),
    ([(TEN - 1, with_seven(gpu(1.98e9 * 0.93)))], set()),
    ([(TEN, with_seven(gpu(1.98e9 * 0.92999)))], WARNING),
    ([(TEN, with_seven(gpu(1.98e9 * 0.84)))], BOTH),
    # Faster is not slower.
    ([(LONG, with_seven(gpu(1.98e9), gpu(1.5e9)))], set()),
    # A dip is not a straggler: the mean is over 5 minutes.
    ([(300, with_seven(gpu())), (60, with_seven(gpu(1e9))), (900, with_seven(gpu()))], set()),
    # Recovered: over with the window.
    ([(TEN, with_seven(gpu(1.6e9))), (600, with_seven(gpu()))], set()),
    # Another load: the GPU or all of them idle, or it has less or more to do than the others.
    ([(LONG, with_seven(gpu(3.45e8, 0.0)))], set()),
    ([(LONG, with_seven(gpu(3.45e8, 0.2)))], set()),
    ([(LONG, with_seven(gpu(1.2e9, 0.15), gpu(1.98e9, 0.15)))], set()),
    ([(LONG, with_seven(gpu(1.2e9, 0.71)))], set()),  # a stage of a pipeline
    ([(LONG, with_seven(gpu(1.2e9, 0.9), gpu(1.98e9, 0.7)))], set()),
    ([(TEN, with_seven(gpu(1.2e9, 0.73)))], BOTH),  # still within a fifth
    # What is not known.
    ([(LONG, with_seven(gpu(None)))], set()),
    ([(LONG, with_seven({CLOCK: 1e9}, {CLOCK: 1.98e9}))], set()),
    ([(LONG, with_seven({}))], set()),
    # Split into instances: each may run another job.
    ([(LONG, with_seven(gpu(1.2e9, **{work.MIG: 1.0})))], set()),
    ([(LONG, with_seven(gpu(1.2e9), gpu(**{work.MIG: 1.0})))], set()),
    # Clocks that were set by hand, on this GPU or on all others, are compared with their like.
    ([(LONG, with_seven(gpu(1.2e9, **{SET: 1.0}), gpu(**{SET: 0.0})))], set()),
    ([(LONG, with_seven(gpu(1.2e9, **{SET: 0.0}), gpu(**{SET: 1.0})))], set()),
    ([(TEN, with_seven(gpu(1.2e9, **{SET: 1.0}), gpu(**{SET: 1.0})))], BOTH),
    # With one sibling there is no telling who is slow.
    ([(LONG, node(gpu(1.2e9), gpu()))], set()),
    ([(LONG, node(gpu(1.2e9), gpu(), gpu(3.45e8, 0.0)))], set()),
    ([(TEN, node(gpu(1.2e9), gpu(), gpu()))], BOTH),
]


@pytest.mark.parametrize(("script", "expected"), TABLE)
def test_states_after_a_script(script, expected):
    """After these runs of ticks exactly these rules are firing."""
    assert fires(*script) == expected


def test_the_slow_one_is_told_and_by_how_much():
    """Two slow GPUs of eight are both told, with their shares, and none of the others."""
    engine, _ = judged([(TEN, node(gpu(1.584e9), gpu(1.782e9), *[gpu()] * 6))], LIMITS, work.RULES)
    found = {
        (one.rule, one.entity.id): round(one.value, 3)
        for one in engine.alerts()
        if one.state == "firing"
    }
    assert found == {
        ("gpu_straggler", "0"): 0.2,
        ("gpu_straggler_severe", "0"): 0.2,
        ("gpu_straggler", "1"): 0.1,
    }


def test_utilization_stands_in_where_sm_activity_is_not_known():
    """Without hardware counters the driver's utilization says who is busy."""
    slow, fast = ({CLOCK: clock, "gpu_utilization_ratio": 0.95} for clock in (1.2e9, 1.98e9))
    assert fires((TEN, with_seven(slow, fast))) == BOTH
    idle = slow | {"gpu_utilization_ratio": 0.5}
    assert fires((LONG, with_seven(idle, fast))) == set()


def test_other_models_are_not_compared():
    """A GPU with other clock limits is no sibling: neither judged nor a measure."""

    def beside(limits):
        engine = AlertEngine(work.RULES, {}, None, "")
        for second in range(TEN):
            made = ticks.node(second * SECOND, with_seven(gpu(1.2e9)), LIMITS, SECOND)
            made.constants[Entity("gpu", "0")] = LIMITS | limits
            engine.judge(made)
        return firing(engine)

    assert beside({}) == BOTH
    assert beside({'gpu_clock_limit_hertz{clock="sm"}': 1.755e9}) == set()
    assert beside({'gpu_clock_limit_hertz{clock="memory"}': 2.6e9}) == set()


def test_what_cannot_be_compared_now_changes_nothing():
    """The job ends: the slow GPU has not become fast by that, nor one slow that was not yet."""
    idle = with_seven(gpu(3.45e8, 0.0), gpu(3.45e8, 0.0))
    slow = with_seven(gpu(1.2e9))
    assert fires((TEN, slow), (LONG, idle)) == BOTH
    assert fires((300, slow), (LONG, idle)) == set()
    assert fires((TEN, slow), (LONG, idle), (600, with_seven(gpu()))) == set()


POWER_LIMIT = {'gpu_power_limit_watts{limit="enforced"}': 700.0}


def load(utilization, watts, processes):
    """Return a GPU as the driver shows it."""
    return {
        "gpu_utilization_ratio": utilization,
        "gpu_power_watts": watts,
        "gpu_processes": processes,
    }


STUCK = load(1.0, 196.0, 1.0)  # 28 % of the limit: a collective whose other side never came
GHOST = load(1.0, 98.0, 0.0)  # a counter that stood still when its process ended
LOADS = [
    ([(600, STUCK)], set()),
    ([(601, STUCK)], {"gpu_busy_without_work"}),
    ([(601, GHOST)], {"gpu_ghost_load"}),
    ([(600, GHOST)], set()),
    ([(LONG, load(1.0, 655.0, 1.0))], set()),  # a healthy training
    ([(LONG, load(1.0, 211.0, 1.0))], set()),
    ([(LONG, load(0.9, 150.0, 4.0))], set()),
    ([(LONG, load(0.0, 75.0, 0.0))], set()),
    ([(LONG, load(0.9, 98.0, 0.0))], set()),
    ([(300, STUCK), (60, load(1.0, 655.0, 1.0))] * 4, set()),
    ([(LONG, load(1.0, 196.0, None))], set()),
    ([(LONG, load(1.0, None, 1.0))], set()),
    ([(601, STUCK), (180, load(1.0, 655.0, 1.0))], set()),
]


@pytest.mark.parametrize(("script", "expected"), LOADS)
def test_a_load_that_only_looks_like_work(script, expected):
    """Full use at little power and use by nobody are told apart, and a healthy load is neither."""
    found = [(seconds, node(columns)) for seconds, columns in script]
    assert firing(judged(found, POWER_LIMIT, work.RULES)[0]) == expected


def test_without_a_power_limit_nothing_is_said_of_power():
    """A limit that is not known is not 0."""
    engine, _ = judged([(LONG, node(STUCK))], {}, work.RULES)
    assert firing(engine) == set()


shares = st.sampled_from([0.0, 0.1, 0.3, 0.72, 0.9, 1.0, None])
clocks = st.sampled_from([0.0, 3.45e8, 1.2e9, 1.8e9, 1.98e9, None])
masks = st.integers(0, 2 ** len(REASONS) - 1)


@given(st.lists(st.tuples(clocks, shares, masks), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_only_a_gpu_below_others_of_its_kind_can_be_told(cells):
    """Whatever clocks, loads and reasons: who is told is busy and under a busy sibling's clock."""
    gpus = [
        gpu(clock, busy, gpu_utilization_ratio=busy)
        | {column_name(THROTTLE, label): float(mask >> bit & 1) for bit, label in REASONS}
        for clock, busy, mask in cells
    ]
    rules = [replace(rule, for_seconds=0.0) for rule in work.RULES if rule.measure]
    engine, _ = judged([(3, node(*gpus))], LIMITS, rules)
    for alert in engine.alerts():
        if alert.state == "firing":
            clock, busy, _ = cells[int(alert.entity.id)]
            assert busy > 0.2
            faster = [c for c, b, _ in cells if c and b and b > 0.2 and c * 0.93 >= clock]
            assert len(faster) >= 1

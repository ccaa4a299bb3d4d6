"""Idle time: what counts as idle, and for how long it is remembered."""

import pytest
from ticks import GPU, SECOND, tick

from gpuwatch.idle import IdleTime

IDLE = {"gpu_utilization_ratio": 0.0, "gpu_processes": 0.0}
HOUR = 3600


def looked(script):
    """Return the idle seconds after runs of (seconds, columns), looked at each second."""
    idle, now = IdleTime(), 0
    for seconds, columns in script:
        for _ in range(seconds):
            now += SECOND
            idle.look(tick(now - SECOND, columns, length_ns=SECOND), [GPU])
    return idle.seconds(GPU)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([(600, IDLE)], 600),
        ([(600, IDLE | {"gpu_utilization_ratio": 0.5})], 0),
        ([(600, IDLE | {"gpu_processes": 1.0})], 0),  # a process may begin at any time
        ([(600, IDLE | {"gpu_processes": None})], 0),
        ([(600, {"gpu_processes": 0.0})], 0),
        ([(600, None)], 0),
        ([(300, IDLE), (900, None), (300, IDLE)], 600),
        ([(HOUR, IDLE), (22 * HOUR, None), (1, IDLE)], HOUR + 1),
        ([(HOUR, IDLE), (25 * HOUR, None), (1, IDLE)], 1),
    ],
)
def test_idle_is_what_a_canary_could_use(script, expected):
    """No process and no work, both known; of the last day."""
    assert looked(script) == pytest.approx(expected, abs=2)


def test_time_that_was_not_looked_at_is_not_idle():
    """After a pause only seconds count, and a tick counts once."""
    idle = IdleTime()
    one = tick(10 * SECOND, IDLE, length_ns=SECOND)
    for made in (one, one, tick(HOUR * SECOND, IDLE, length_ns=SECOND), None, one):
        idle.look(made, [GPU])
    assert 0 < idle.seconds(GPU) <= 10

"""When canaries run: after jobs, every so often, more often at first, and again if in doubt."""

import pytest

from gpuwatch.canary_schedule import LATE_NS, SEED_TURNS, Schedule, Turn
from gpuwatch.clock import SECOND_NS

HOUR = 3600
SETTINGS = {
    "run": ["matmul", "allreduce", "integrity"],
    "interval_seconds": float(HOUR),
    "settle_seconds": 60.0,
    "seed_seconds": 120.0,
}
ALONE = ("matmul", "integrity")


class Node:
    """A schedule, a clock that is set by hand, and GPUs that are idle (or not) until told."""

    def __init__(self, gpus=1, seeded=True, middle=0.5, **settings):
        self.now = 0
        self.idle = dict.fromkeys(range(gpus), True)
        self.seeded = seeded
        self.schedule = Schedule(
            SETTINGS | settings,
            lambda _gpu, _canaries: self.seeded,
            lambda low, high: low + middle * (high - low),
        )
        self.turns = []

    def live(self, seconds, *, ran=True):
        """Let time pass; each turn is over at once."""
        for _ in range(seconds):
            self.now += 1
            now_ns = self.now * SECOND_NS
            self.schedule.see(now_ns, self.idle)
            if turn := self.schedule.due(now_ns):
                self.turns.append((self.now, turn))
                self.schedule.ended(turn, now_ns, started=turn.idle, ran=ran and turn.idle)
        return self.turns

    def times(self):
        return [when for when, _ in self.turns]


def test_an_idle_gpu_has_its_turn_every_hour():
    """At first anywhere within the hour, then after an hour, all canaries that take one GPU."""
    node = Node()
    node.live(4 * HOUR)
    assert node.times() == [1 + HOUR // 2 + n * HOUR for n in range(4)]
    assert {turn for _, turn in node.turns} == {Turn(ALONE, (0,), idle=True)}


@pytest.mark.parametrize(("middle", "gap"), [(0.0, HOUR // 2), (1.0, HOUR * 3 // 2)])
def test_no_two_nodes_agree(middle, gap):
    """Each wait is between half and one and a half of the interval."""
    node = Node(middle=middle)
    node.live(5 * HOUR)
    first, second = node.times()[:2]
    assert second - first == gap


def test_what_takes_several_waits_for_all():
    """An all-reduce is due when nobody is on any GPU; one that is busy is a skip, of it as well."""
    node = Node(gpus=2)
    node.idle[1] = False
    node.live(HOUR)
    assert {(turn.gpu, turn.idle) for _, turn in node.turns} == {
        (0, True),
        (1, False),
        (None, False),
    }
    node.turns.clear()
    node.idle[1] = True
    node.live(HOUR)
    # Of integrity it is the sums over all of them.
    assert Turn(("allreduce", "integrity"), (), idle=True) in [turn for _, turn in node.turns]


def test_a_gpu_has_its_turn_soon_after_a_job():
    """Once it was idle for a minute, unless its last turn is less than half an hour ago."""
    node = Node()
    node.live(HOUR // 2 + 10)
    assert len(node.turns) == 1
    node.idle[0] = False
    node.live(600)
    node.idle[0] = True
    node.live(HOUR // 2 - 700)
    assert len(node.turns) == 1
    node.live(200)
    assert len(node.turns) == 2
    node.idle[0] = False
    node.live(3 * HOUR)
    skipped = [turn.idle for _, turn in node.turns[2:]]
    assert skipped
    assert not any(skipped)
    node.idle[0] = True
    before = node.now
    node.live(120)
    assert node.turns[-1] == (before + 61, Turn(ALONE, (0,), idle=True))


def test_gpus_of_one_job_are_tried_side_by_side():
    """Those that it has left at once; what is not believed is run again in the same way."""
    node = Node(gpus=4, run=["matmul"])
    node.live(HOUR)
    assert {len(turn.gpus) for _, turn in node.turns} == {1}  # by the hour each has its own
    node.idle.update({0: False, 1: False, 3: False})
    node.live(HOUR)
    node.turns.clear()
    node.idle[1] = True
    node.live(5)
    node.idle[0] = True
    node.live(70)
    assert [turn for _, turn in node.turns] == [Turn(("matmul",), (0, 1), idle=True)]
    node.schedule.want("matmul", (0, 1), node.now * SECOND_NS)
    node.turns.clear()
    node.live(20)
    assert [turn for _, turn in node.turns] == [Turn(("matmul",), (0, 1), idle=True)]
    node.schedule.want("matmul", (0, 1), node.now * SECOND_NS)
    node.idle[1] = False
    node.turns.clear()
    node.live(20)
    assert node.turns == []


def test_a_turn_that_made_room_comes_again():
    """Who came may have left before they were seen: that was a job all the same."""
    node = Node(seeded=False)
    node.live(70)
    (turn,) = [turn for _, turn in node.turns]
    node.turns.clear()
    node.schedule.ended(turn, node.now * SECOND_NS, started=True, ran=False, made_room=True)
    node.live(120 + 2)
    assert [turn for _, turn in node.turns] == [turn]
    node.turns.clear()
    for _ in range(HOUR // 10):
        turns = len(node.turns)
        node.live(10, ran=False)
        if len(node.turns) > turns:
            now_ns = node.now * SECOND_NS
            node.schedule.ended(turn, now_ns, started=True, ran=False, made_room=True)
    assert 2 < len(node.turns) <= SEED_TURNS + 1


def test_what_a_user_has_tried_is_not_tried_again_after_the_job():
    """An epilog has run canaries: the daemon waits as after a turn of its own."""
    node = Node(run=["matmul"])
    node.live(HOUR)
    node.idle[0] = False
    node.live(HOUR)
    node.schedule.ran(0, node.now * SECOND_NS)
    node.idle[0] = True
    node.turns.clear()
    node.live(HOUR // 2 - 120)
    assert node.turns == []


def test_a_gpu_without_a_baseline_has_several_turns_at_first():
    """Minutes apart, until there is one; not for ever, and not if they give nothing."""
    node = Node(seeded=False)
    node.live(10 * 120)
    assert [b - a for a, b in zip(node.times(), node.times()[1:], strict=False)] == [120] * 8
    node.live(2 * HOUR)
    assert len(node.turns) == SEED_TURNS + 3
    node = Node(seeded=False)
    node.live(2 * HOUR, ran=False)
    assert len(node.turns) == 2


def test_what_is_not_believed_is_run_again():
    """A retest comes within seconds, alone, once; of a GPU that somebody took it does not."""
    node = Node()
    node.live(100)
    for _ in range(2):
        node.schedule.want("matmul", (0,), node.now * SECOND_NS)
    node.live(60)
    assert node.turns == [(108, Turn(("matmul",), (0,), idle=True))]
    node.idle[0] = False
    node.schedule.want("matmul", (0,), node.now * SECOND_NS)
    node.live(LATE_NS // SECOND_NS + 20)
    node.idle[0] = True
    node.live(600)
    assert [turn.canaries for _, turn in node.turns] == [("matmul",), ALONE]


def test_a_retest_that_meets_another_session_stays_one():
    """It comes when that is over, alone; the GPU's own turn is where it was."""
    node = Node(gpus=2)
    node.live(100)
    node.schedule.want("matmul", (0, 1), node.now * SECOND_NS)
    for _ in range(3):
        node.now += 10
        now_ns = node.now * SECOND_NS
        node.schedule.see(now_ns, node.idle)
        turn = node.schedule.due(now_ns)
        assert turn == Turn(("matmul",), (0, 1), idle=True)
        node.schedule.postpone(turn, now_ns)
    node.live(60)
    assert [turn for _, turn in node.turns] == [Turn(("matmul",), (0, 1), idle=True)]


def test_a_moment_without_a_look_costs_no_turn():
    """A GPU that is not seen for some seconds is as it was, also if it is due just then."""
    node = Node(seeded=False, settle_seconds=0.0)
    node.idle[0] = None
    node.live(5)
    node.idle[0] = True
    node.live(53)
    node.idle[0] = None
    node.live(8)
    assert node.turns == [(61, Turn(ALONE, (0,), idle=True))]


def test_nothing_is_due_where_nobody_can_be_seen():
    """A GPU of which it is not known who is there is skipped as a busy one."""
    node = Node()
    node.idle[0] = None
    node.live(2 * HOUR)
    assert [turn.idle for _, turn in node.turns] == [False, False]


def test_after_a_pause_all_that_waited_has_its_turn():
    """A turn that was skipped meanwhile comes as after a job."""
    node = Node()
    node.live(2)
    node.schedule.see(node.now * SECOND_NS, {0: True})
    turn = Turn(ALONE, (0,), idle=True)
    node.schedule.ended(turn, node.now * SECOND_NS, started=False, ran=False)
    node.live(100)
    assert not node.turns
    node.schedule.wake()
    node.live(2)
    assert [turn for _, turn in node.turns] == [turn]


def test_a_gpu_that_is_gone_has_no_turn():
    """What is not there any more is forgotten; nothing at all says nothing."""
    node = Node(gpus=2)
    node.live(10)
    del node.idle[1]
    node.live(HOUR)
    assert {turn.gpu for _, turn in node.turns} == {0}
    node.idle = {}
    node.live(2 * HOUR)
    assert {turn.gpu for _, turn in node.turns} == {0}

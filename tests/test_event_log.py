"""Events are kept within a number, and a storm of one kind pushes out no other."""

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.event_log import EVENTS_A_TURN, EventLog
from gpuwatch.signals import HOST, Event


def event(time_ns, name):
    return Event(time_ns, HOST, name)


def test_a_storm_of_one_kind_pushes_out_no_other():
    """A hundred thousand records of a flapping link leave the one Xid before them where it was."""
    log = EventLog(200)
    log.add(event(0, "xid"))
    for number in range(1, 100_000):
        log.add(event(number, "link_down"))
    kept = list(log)
    assert kept[0] == event(0, "xid")
    assert [one.time_ns for one in kept[1:]] == list(range(99_801, 100_000))
    assert list(reversed(log)) == kept[::-1]


@given(st.lists(st.integers(0, 5).map("kind{}".format), max_size=60), st.integers(1, 20))
def test_each_kind_keeps_its_newest(names, most):
    """Never more than allowed, in order; of each kind the newest, as many as the others leave."""
    log = EventLog(most)
    for number, name in enumerate(names):
        log.add(event(number, name))
    kept = list(log)
    assert len(kept) == min(most, len(names))
    assert [one.time_ns for one in kept] == sorted(one.time_ns for one in kept)
    told = Counter(one.name for one in kept)
    for name in set(names):
        newest = [number for number, other in enumerate(names) if other == name]
        assert [one.time_ns for one in kept if one.name == name] == (
            newest[-told[name] :] if told[name] else []
        )
        if told[name] < len(newest):  # it lost some: no other kind has many more
            assert max(told.values()) <= told[name] + 1


def test_a_listener_hears_each_event_once():
    """Whoever asks for what came after a number gets it in turns, and nothing twice."""
    log = EventLog(100)
    for number in range(80):
        log.add(event(number, f"kind{number % 3}"))
    heard, sequence = [], 0
    while messages := log.after(sequence):
        assert len(messages) <= EVENTS_A_TURN
        heard += messages
        sequence = messages[-1]["sequence"]
    assert [message["event"]["time_ns"] for message in heard] == list(range(80))
    assert all(a["sequence"] < b["sequence"] for a, b in itertools.pairwise(heard))
    assert log.after(log.sequence) == []

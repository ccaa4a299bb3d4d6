"""Takes: many alerts make few recordings, each with the time before and after."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.clock import SECOND_NS
from gpuwatch.quota import stamped_ns
from gpuwatch.signals import HOST, Entity
from gpuwatch.takes import MARGIN_NS, SETTLE_NS, Takes

NOON_NS = 1_795_953_600 * SECOND_NS  # 2026-11-29T12:00:00Z
START_NS = 1000 * SECOND_NS
CONFIG = {"before_seconds": 30.0, "after_seconds": 10.0, "quiet_seconds": 600.0}
GPUS = [Entity("gpu", str(number)) for number in range(24)]


def takes(newest=None, **changes):
    return Takes({**CONFIG, **changes}, 60.0, newest or {}, ["20261129T120000Z-there.gwr"])


def plan(made, seconds, entity=GPUS[0], rule="gpu_hot"):
    """Have something seen so many seconds after the start; return whether it is planned."""
    since_ns = int(seconds * SECOND_NS)
    return made.plan((rule, entity), START_NS + since_ns, NOON_NS + since_ns)


def begin(made, seconds):
    return made.begin(START_NS + int(seconds * SECOND_NS))


def test_a_take_has_the_time_before_and_after():
    """It reaches from 30 s before to 10 s after, and begins when all of that is in the rings."""
    made = takes()
    assert plan(made, 0)
    assert begin(made, 10.9) is None
    take = begin(made, 10 + SETTLE_NS / SECOND_NS)
    assert (take.since_ns, take.until_ns) == (START_NS - 30 * SECOND_NS, START_NS + 10 * SECOND_NS)
    assert take.name == "20261129T120000Z-gpu_hot-gpu-0.gwr"
    assert take.cause == "gpu_hot on gpu 0"


def test_alerts_at_once_share_one_take():
    """Twenty-four GPUs that grow hot together are one recording, which names them all."""
    made = takes()
    assert all(plan(made, 0.25, gpu) for gpu in GPUS)
    take = begin(made, 30)
    assert [entity for _, entity in take.keys] == GPUS
    made.running = None
    assert begin(made, 1000) is None


def test_what_is_seen_meanwhile_prolongs_the_take_as_far_as_rings_reach():
    """Each gets its time after; what a ring no longer holds is not waited for."""
    made = takes()
    plan(made, 0)
    plan(made, 9, GPUS[1])
    plan(made, 18, GPUS[2])
    plan(made, 24, GPUS[3])
    take = begin(made, 60)
    assert len(take.keys) == 4
    assert take.until_ns == take.since_ns + 60 * SECOND_NS - MARGIN_NS


def test_one_is_made_after_the_other():
    """What is seen after the end of a take is the next one, which waits for the one that runs."""
    made = takes()
    plan(made, 0)
    plan(made, 10.5, GPUS[1])
    first = begin(made, 60)
    assert begin(made, 60) is None
    made.running = None
    second = begin(made, 60)
    assert [first.keys, second.keys] == [[("gpu_hot", GPUS[0])], [("gpu_hot", GPUS[1])]]


def test_detected_and_firing_are_one():
    """A rule that is seen again while its take waits or runs plans no second one."""
    made = takes()
    assert plan(made, 0)
    assert plan(made, 5)
    take = begin(made, 60)
    assert plan(made, 61)
    assert take.keys == [("gpu_hot", GPUS[0])]
    made.running = None
    assert begin(made, 1000) is None


def test_quiet_for_a_while_for_each_rule_and_entity():
    """After a recording the same rule is quiet for the same entity, for ten minutes."""
    made = takes({("gpu_hot", GPUS[0]): "20261129T120000Z-gpu_hot-gpu-0.gwr"})
    assert not plan(made, 0)
    assert not plan(made, 599)
    assert plan(made, 599, GPUS[1])
    assert plan(made, 599, rule="gpu_lost")
    assert plan(made, 600)


def test_a_clock_that_was_set_back_does_not_silence():
    """A recording from the future stands for nothing."""
    assert plan(takes({("gpu_hot", GPUS[0]): "20270101T000000Z-gpu_hot-gpu-0.gwr"}), 0)


def test_more_before_than_the_rings_hold():
    """The time after is saved in any case; the time before takes what is left of the rings."""
    made = takes(before_seconds=600.0)
    plan(made, 0)
    take = begin(made, 60)
    assert take.until_ns == START_NS + 10 * SECOND_NS
    assert take.since_ns == take.until_ns - 60 * SECOND_NS + MARGIN_NS


def test_names_are_of_files_and_unique():
    """Time, rule and entity make the name; what a file name may not have is left out."""
    made = takes()
    names = [made.name(NOON_NS, "request") for _ in range(3)]
    assert names == [f"20261129T120000Z-request{end}.gwr" for end in ("", "-2", "-3")]
    assert made.name(NOON_NS, "there") == "20261129T120000Z-there-2.gwr"
    plan(made, 0, Entity("rdma_port", "mlx5_0/1"), "rdma_port_down")
    assert begin(made, 60).name == "20261129T120000Z-rdma_port_down-rdma_port-mlx5_0-1.gwr"
    made.running = None
    plan(made, 0, HOST, "node_power_brake")
    assert begin(made, 60).name == "20261129T120000Z-node_power_brake-host.gwr"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 300), st.integers(0, 5)), min_size=1, max_size=40))
def test_whatever_is_seen_is_in_a_recording(seen):
    """Every first sight lies inside a take that the rings can hold, and no two takes show it."""
    made = takes(quiet_seconds=1e9)
    done = []
    for seconds, gpu in sorted(seen):
        while take := begin(made, seconds):
            for key in take.keys:
                made.newest[key] = take.name
            done.append(take)
            made.running = None
        plan(made, seconds, GPUS[gpu])
    while take := begin(made, 10_000):
        done.append(take)
        made.running = None
    shown = [key for take in done for key in take.keys]
    assert len(shown) == len(set(shown)) == len({gpu for _, gpu in seen})
    first = {}
    for seconds, gpu in sorted(seen):
        first.setdefault(GPUS[gpu], START_NS + int(seconds * SECOND_NS))
    for take in done:
        assert take.until_ns - take.since_ns <= 60 * SECOND_NS - MARGIN_NS
        assert stamped_ns(take.name) is not None
        for _, entity in take.keys:
            assert take.since_ns <= first[entity] <= take.until_ns

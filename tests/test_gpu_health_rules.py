"""Rules about GPUs that are gone, hang, ask for recovery, or have bad memory or links."""

import math
import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ticks import GPU, SECOND, Rise, firing, judged, tick

from gpuwatch.alerts import AlertEngine
from gpuwatch.ring import RingSchema
from gpuwatch.rules import RULES
from gpuwatch.signals import HOST, UNKNOWN_INTEGER, Column, Entity, Event, Kind, Signal
from gpuwatch.summation import RingWindows
from gpuwatch.window import Tick

LINK = {"gpu_pcie_link_width_limit_lanes": 16.0, "gpu_pcie_link_generation_limit": 5.0}
UNCORRECTED = 'gpu_ecc_errors_total{type="uncorrected"}'
CORRECTED = 'gpu_ecc_errors_total{type="corrected"}'
SOURCE = Entity("source", "nvml_counters")


def after(*script, entity=GPU, constants=LINK):
    """Return what fires after runs of (seconds, columns) of one entity."""
    found = [(seconds, {entity: columns}) for seconds, columns in script]
    return firing(judged(found, constants)[0])


def node(**facts):
    """Return what the daemon knows of the node."""
    return facts


def hung(state=0.0, counters=0.0):
    return {'gpu_hung{duty="state"}': state, 'gpu_hung{duty="counters"}': counters}


def link(lanes=16.0, generation=5.0, gigabytes=0.0):
    """Return a PCIe link that moved so many gigabytes in the second, half each way."""
    moved = Rise(gigabytes * 0.5e9)
    return {
        "gpu_pcie_link_width_lanes": lanes,
        "gpu_pcie_link_generation": generation,
        "gpu_pcie_received_bytes_total": moved,
        "gpu_pcie_transmitted_bytes_total": moved,
    }


def nvlinks(up, expected=18.0):
    return {"gpu_nvlink_links_up": up, "gpu_nvlink_links_expected": expected}


def errors(**types):
    return {f'gpu_nvlink_errors_total{{type="{name}"}}': Rise(rise) for name, rise in types.items()}


def every(seconds, count, columns, quiet):
    """Return so many runs of one second with `columns` each followed by quiet ones."""
    return [(1, columns), (seconds - 1, quiet)] * count


ALL_HERE, ONE_GONE = (node(gpus_visible=seen, gpus_expected=8.0) for seen in (8.0, 7.0))
HOST_TABLE = [
    # Fewer GPUs than there should be, for a minute.
    ([(600, ALL_HERE)], set()),
    ([(60, ONE_GONE)], set()),
    ([(61, ONE_GONE)], {"gpu_missing"}),
    ([(61, node(gpus_visible=0.0, gpus_expected=8.0))], {"gpu_missing"}),
    ([(40, ONE_GONE), (1, ALL_HERE)] * 9, set()),
    ([(61, ONE_GONE), (120, ALL_HERE)], set()),  # also after the inventory was accepted
    ([(600, node(gpus_visible=9.0, gpus_expected=8.0))], set()),
    ([(600, node(gpus_visible=7.0))], set()),
    ([(600, node(gpus_expected=8.0))], set()),
    # No room for recordings and history, for a minute.
    ([(60, node(recorder_disk_full=1.0))], set()),
    ([(61, node(recorder_disk_full=1.0))], {"recorder_disk_full"}),
    ([(900, node(recorder_disk_full=0.0))], set()),
    ([(61, node(recorder_disk_full=1.0)), (120, node(recorder_disk_full=0.0))], set()),
    # Nothing of the driver's can be said while its library does not fit; that is a warning.
    ([(60, node(driver_mismatch=1.0))], set()),
    ([(61, node(driver_mismatch=1.0))], {"driver_mismatch"}),
    (
        [(900, node(driver_mismatch=1.0, gpus_visible=0.0, gpus_expected=8.0))],
        {"driver_mismatch"},
    ),
    ([(50, node(driver_mismatch=1.0)), (9, node(driver_mismatch=0.0))] * 5, set()),
    ([(61, node(driver_mismatch=1.0)), (120, node(driver_mismatch=0.0))], set()),
]


@pytest.mark.parametrize(("script", "expected"), HOST_TABLE)
def test_states_of_the_node_after_a_script(script, expected):
    """After these runs of ticks exactly these rules of the node are firing."""
    assert after(*script, entity=HOST) == expected


FULL = link(gigabytes=5.0)
TABLE = [
    # A call that does not return, in any sampler, for a minute.
    ([(600, hung())], set()),
    ([(60, hung(state=1.0))], set()),
    ([(61, hung(state=1.0))], {"gpu_hung"}),
    ([(61, hung(counters=1.0))], {"gpu_hung"}),
    ([(61, hung(state=None, counters=1.0))], {"gpu_hung"}),
    ([(30, hung(state=1.0)), (31, hung(counters=1.0))], {"gpu_hung"}),
    ([(40, hung(state=1.0)), (1, hung())] * 9, set()),
    ([(40, hung(state=1.0)), (3, {}), (21, hung(state=1.0))], {"gpu_hung"}),  # a new sampler
    ([(900, {"gpu_up": None})], set()),  # the first start of the driver takes its time
    # The driver asks for a reset, a reboot, a drain.
    ([(600, {"gpu_recovery_action": 0.0})], set()),
    *(([(1, {"gpu_recovery_action": action})], {"gpu_recovery_required"}) for action in (1.0, 2.0)),
    *(([(1, {"gpu_recovery_action": action})], {"gpu_recovery_required"}) for action in (3.0, 4.0)),
    ([(1, {"gpu_recovery_action": 1.0}), (120, {"gpu_recovery_action": 0.0})], set()),
    ([(600, {"gpu_recovery_action": None})], set()),
    # One uncorrected error is one too many, for an hour; corrected ones never are.
    ([(600, {UNCORRECTED: Rise(0.0)})], set()),
    ([(60, {UNCORRECTED: Rise(0.0)}), (1, {UNCORRECTED: Rise(1.0)})], {"gpu_ecc_uncorrected"}),
    (
        [(1, {UNCORRECTED: Rise(1.0)}), (3599, {UNCORRECTED: Rise(0.0)})],
        {"gpu_ecc_uncorrected"},
    ),
    ([(1, {UNCORRECTED: Rise(1.0)}), (3600, {UNCORRECTED: Rise(0.0)})], set()),
    ([(600, {CORRECTED: Rise(1000.0)})], set()),
    # Rows to be replaced, and such as could not be.
    ([(1, {"gpu_row_remap_pending": 1.0})], {"gpu_row_remap_pending"}),
    ([(1, {"gpu_row_remap_failed": 1.0})], {"gpu_row_remap_failed"}),
    ([(600, {'gpu_remapped_rows_total{type="uncorrected"}': Rise(3.0)})], set()),
    ([(600, {"gpu_row_remap_pending": 0.0, "gpu_row_remap_failed": 0.0})], set()),
    ([(1, {"gpu_row_remap_pending": 1.0}), (120, {"gpu_row_remap_pending": 0.0})], set()),
    # Too few lanes at any time, too low a generation only under load; for 5 minutes.
    ([(900, FULL)], set()),
    ([(300, link(lanes=8.0))], set()),
    ([(301, link(lanes=8.0))], {"gpu_pcie_degraded"}),
    ([(301, link(lanes=12.0))], {"gpu_pcie_degraded"}),
    ([(301, {"gpu_pcie_link_width_lanes": 8.0})], {"gpu_pcie_degraded"}),
    ([(250, link(lanes=8.0)), (1, FULL)] * 3, set()),
    ([(3600, link(generation=1.0))], set()),  # idle
    ([(3600, link(generation=1.0, gigabytes=1.0))], set()),  # exactly the limit
    ([(301, link(generation=4.0, gigabytes=5.0))], set()),  # under load for less than that
    ([(320, link(generation=4.0, gigabytes=5.0))], {"gpu_pcie_degraded"}),
    ([(50, FULL), (250, link(generation=1.0))] * 9, set()),  # idle between two loads
    ([(900, {"gpu_pcie_link_width_lanes": 8.0, "gpu_pcie_link_generation": 1.0})], "no limits"),
    ([(900, link(lanes=None, generation=None, gigabytes=5.0))], set()),
    # Links that were there are not, for half a minute.
    ([(900, nvlinks(18.0))], set()),
    ([(30, nvlinks(17.0))], set()),
    ([(31, nvlinks(17.0))], {"gpu_nvlink_down"}),
    ([(31, nvlinks(0.0))], {"gpu_nvlink_down"}),
    ([(20, nvlinks(17.0)), (1, nvlinks(18.0))] * 9, set()),
    ([(900, nvlinks(0.0, 0.0))], set()),  # a bridge that never was
    ([(900, nvlinks(4.0, 4.0))], set()),  # or fewer than the model can have
    ([(900, nvlinks(0.0, None))], set()),
    ([(900, nvlinks(None))], set()),
    # Errors of links: 10 in each minute for 10 minutes, whatever their types.
    (every(60, 30, errors(replay=9.0, crc=0.0), errors(replay=0.0, crc=0.0)), set()),
    (every(60, 11, errors(replay=9.0, crc=1.0), errors(replay=0.0)), {"gpu_nvlink_errors"}),
    (every(6, 101, errors(recovery=1.0), errors(recovery=0.0)), set()),
    (every(6, 130, errors(recovery=1.0), errors(recovery=0.0)), {"gpu_nvlink_errors"}),
    ([(1, errors(replay=1e6)), (900, errors(replay=0.0))], set()),
]


@pytest.mark.parametrize(("script", "expected"), TABLE)
def test_states_of_a_gpu_after_a_script(script, expected):
    """After these runs of ticks exactly these rules of the GPU are firing."""
    if expected == "no limits":
        assert after(*script, constants={}) == set()
    else:
        assert after(*script) == expected


@pytest.mark.parametrize(
    ("columns", "entity", "rule", "value"),
    [
        (ONE_GONE, HOST, "gpu_missing", 1.0),
        ({"gpu_recovery_action": 2.0}, GPU, "gpu_recovery_required", 2.0),
        (link(lanes=8.0), GPU, "gpu_pcie_degraded", 0.5),
        (link(lanes=8.0, generation=4.0, gigabytes=99.0), GPU, "gpu_pcie_degraded", 0.25),
        (nvlinks(15.0), GPU, "gpu_nvlink_down", 3.0),
        (errors(replay=3.0, crc=4.0), GPU, "gpu_nvlink_errors", 14.0),
    ],
)
def test_the_value_says_how_bad_it_is(columns, entity, rule, value):
    """The alert's value is what an operator asks next: how many, which action, how much is left."""
    engine, _ = judged([(2, {entity: columns})], LINK)
    (alert,) = [one for one in engine.alerts() if one.rule == rule]
    assert alert.value == value


@pytest.mark.parametrize(
    ("columns", "detail", "lost"),
    [
        (None, "79: critical: GPU has fallen off the bus", True),
        ({"gpu_up": None}, "79: critical x3: GPU has fallen off the bus", True),
        ({"gpu_up": 1.0}, "79: critical: GPU has fallen off the bus", False),  # it is back
        (None, "48: critical: double bit error", False),
        (None, "off the bus", False),
    ],
)
def test_xid_79_is_a_lost_gpu_where_nvml_says_nothing(columns, detail, lost):
    """The kernel's word that the GPU left the bus counts while no sampler can ask the GPU."""
    engine = AlertEngine(RULES, {}, None, "")
    for second in range(40):
        made = tick(second * SECOND, columns, GPU, length_ns=SECOND)
        if second == 5:
            made.events.append(Event(made.start_ns, GPU, "xid", detail))
        engine.judge(made)
    assert ("gpu_lost" in firing(engine)) is lost


def test_faults_are_detected_at_once_and_once():
    """An uncorrected error and a link that went down are told in the tick they are seen."""
    script = [(5, nvlinks(18.0) | {UNCORRECTED: Rise(0.0)}), (1, {UNCORRECTED: Rise(1.0)})]
    _, names = judged([(seconds, {GPU: columns}) for seconds, columns in script])
    assert names == ["gpu_ecc_uncorrected_detected", "gpu_ecc_uncorrected_firing"]
    _, names = judged([(5, {GPU: nvlinks(18.0)}), (9, {GPU: nvlinks(17.0)})])
    assert names == ["gpu_nvlink_down_detected", "gpu_nvlink_down_pending"]


def test_a_lost_gpu_beside_others_is_told_alone():
    """The GPU that is missing is not seven others' fault."""
    up = {Entity("gpu", str(number)): {"gpu_up": 1.0} for number in range(8)}
    lost = up | {Entity("gpu", "3"): {"gpu_up": 0.0}, HOST: ONE_GONE}
    engine, _ = judged([(5, up | {HOST: ALL_HERE}), (61, lost)])
    found = [(one.rule, one.entity.id) for one in engine.alerts() if one.state == "firing"]
    assert sorted(found) == [("gpu_lost", "3"), ("gpu_missing", "")]


def counted(counts):
    """Return whether uncorrected errors fire, a read of the counter every 5 s; None is failed."""
    period = 5 * SECOND
    total = Signal("gpu_ecc_errors_total", "Errors.", Kind.COUNTER, "", label="type")
    schema = RingSchema(
        "slow", "counters", "nvml_counters", (Column(GPU, total, "uncorrected"),), period
    )
    windows = RingWindows(schema)
    engine = AlertEngine(RULES, {}, None, "")
    for index, count in enumerate(counts):
        made = Tick(index * period, (index + 1) * period)
        cell = UNKNOWN_INTEGER if count is None else count
        windows.add(struct.pack(schema.row_format, made.start_ns, 0.0, 0.0, cell, index))
        windows.close(made)
        engine.judge(made)
    return "gpu_ecc_uncorrected" in firing(engine)


def test_errors_from_before_the_start_are_no_news():
    """A total that stood there when gpuwatch came fires nothing; one more does."""
    assert not counted([7] * 50)
    assert not counted([None, None, 7, 7, None, 7])
    assert counted([7] * 5 + [8] * 5)
    assert counted([7, None, None, 8])
    assert not counted([7, 7, 0, 0, 0])  # a reset of the GPU
    assert counted([7, 7, 0, 1])


counts = st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=12)


@given(counts)
@settings(deadline=None, max_examples=60)
def test_an_uncorrected_error_fires_exactly_when_the_counter_rose(found):
    """A rise between two known reads, or above 0 after a reset, is an error; nothing else is."""
    known = [count for count in found if count is not None]
    steps = [later - now if later >= now else later for now, later in pairwise(known)]
    assert counted(found) == any(steps)


wild = st.one_of(st.none(), st.floats(width=32), st.just(math.inf))


@given(st.dictionaries(st.sampled_from(sorted(link() | nvlinks(1.0) | hung())), wild))
@settings(deadline=None)
def test_no_value_of_a_driver_stops_the_judging(columns):
    """Whatever a driver answers, each rule says something or that it does not know."""
    judged([(3, {GPU: columns})], dict.fromkeys(LINK, 0.0))


def test_a_sampler_that_is_late_for_ten_minutes():
    """One read of a hundred late over ten minutes is told, the unrest of a start is not."""
    late, busy, good = ({"source_late_ratio": share} for share in (0.01, 0.5, 0.0))
    assert after((600, late), entity=SOURCE) == set()
    assert after((601, late), entity=SOURCE) == {"sampler_late"}
    assert after((2, busy), (1200, good), entity=SOURCE) == set()
    assert after((3600, {"source_late_ratio": 0.009}), entity=SOURCE) == set()
    assert after((601, late), (700, good), entity=SOURCE) == set()
    assert after((1200, {"source_late_ratio": None}), entity=SOURCE) == set()

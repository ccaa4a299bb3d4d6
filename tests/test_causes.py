"""Causes: what a slowed GPU lost time to, how much of it, and what cannot be told."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import Running, wait_for
from simulated_node import SimulatedNode
from ticks import SECOND, Rise, node

from gpuwatch.causes import LEAST_SHARE, ranked
from gpuwatch.gpu_signals import REASONS, THROTTLE
from gpuwatch.lost_time import LostTime
from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.recording import RecordingReader
from gpuwatch.replay import ticks as recorded_ticks
from gpuwatch.signals import HOST, Entity, column_name
from gpuwatch.source import EntityInfo
from gpuwatch.sources.simulated import SimulatedState
from gpuwatch.sources.simulated_counters import SimulatedCounters
from gpuwatch.sources.simulated_gpm import SimulatedGpm
from gpuwatch.sources.simulated_host import SimulatedHost
from gpuwatch.sources.simulated_network import SimulatedRdma
from gpuwatch.totals import Totals
from gpuwatch.window import TICK_NS

GPU, PORT = Entity("gpu", "0"), Entity("rdma_port", "mlx5_0/1")
NEAR = [EntityInfo(PORT, {"device": "mlx5_0", "gpu": "0"})]
TICK = TICK_NS / SECOND
MINUTE = 240  # ticks
FULL = 1.98e9
CLOCK = 'gpu_clock_hertz{clock="sm"}'
MEMORY = 'gpu_temperature_celsius{sensor="memory"}'
SOME = 'host_pressure_seconds_total{kind="some"}'
CONSTANTS = {
    'gpu_clock_limit_hertz{clock="sm"}': FULL,
    'gpu_power_limit_watts{limit="enforced"}': 700.0,
    'gpu_temperature_threshold_celsius{threshold="memory_max"}': 95.0,
    "gpu_pcie_link_generation_limit": 5.0,
    "gpu_pcie_link_width_limit_lanes": 16.0,
}


def moves(gigabytes_per_second, seconds=TICK):
    """Return what a counter rises by in a tick, or once for several seconds."""
    return Rise(gigabytes_per_second * 1e9 * seconds)


def gpu(clock=FULL, busy=0.9, on=(), **others):
    """Return a GPU at work, or with little `busy` one that waits; `on` are reasons, or shares."""
    shares = dict.fromkeys(on, 1.0) | (on if isinstance(on, dict) else {})
    return {
        CLOCK: clock,
        "gpu_sm_active_ratio": busy,
        "gpu_utilization_ratio": 1.0 if busy and busy > 0.04 else 0.0,
        "gpu_processes": 1.0,
        "gpu_up": 1.0,
        "gpu_power_watts": 699.0,
        "gpu_pcie_link_generation": 5.0,
        "gpu_pcie_link_width_lanes": 16.0,
        "gpu_pcie_received_bytes_total": moves(1.0),
        "gpu_nvlink_received_bytes_total": Rise(0.0),
        "gpu_nvlink_links_up": 18.0,
        **{column_name(THROTTLE, label): shares.get(label, 0.0) for _, label in REASONS},
        **others,
    }


def host(**pressures):
    """Return the resources of a host; each says for which share of time work waited for it."""
    shares = {"io": 0.02, "cpu": 0.01, "memory": 0.0} | pressures
    return {
        Entity("resource", name): {SOME: share if share is None else Rise(share * TICK)}
        for name, share in shares.items()
    }


def port(**columns):
    """Return the port near the GPU, healthy as it comes."""
    return {PORT: {"rdma_port_up": 1.0, "rdma_queue_pairs": 64.0} | columns}


def at_once(columns, *others):
    """Return the entities of a tick: the GPU, a calm host and a healthy port, or others."""
    entities = {GPU: columns} | host() | port()
    for more in others:
        entities |= more
    return entities


def played(*runs, constants=CONSTANTS, near=NEAR):
    """Feed runs of (ticks, entities): none for ticks that are missing, or a function of which."""
    causes, now = LostTime(near), 0
    for count, entities in runs:
        for number in range(count):
            made = entities(number) if callable(entities) else entities
            if made is not None:
                causes.add(node(now, made, constants))
            now += TICK_NS
    return causes


def told(*runs, **options):
    """Return (cause, share) of the GPU after these runs, shares to a thousandth."""
    return [
        (one.cause, one.share if one.share is None else round(one.share, 3))
        for one in ranked(played(*runs, **options).of(GPU))
    ]


WORKS = at_once(gpu())
WAITS = gpu(busy=0.01)
LOSES = port(
    rdma_packet_sequence_errors_total=Rise(100.0),
    rdma_port_packets_received_total=Rise(1e6),
)


def nvlink(number):
    """Return a GPU that waits in a collective; its NVLink bytes are read at every fourth tick."""
    moved = moves(300, 1.0) if number % 4 == 3 else Rise(0.0)
    return at_once(gpu(busy=0.12, gpu_nvlink_received_bytes_total=moved))


RECEIVES = {"gpu_pcie_received_bytes_total": moves(2)}
SINGLE = [
    # Clocks: a fifth of the clock for all of the minute, or for a part of it.
    ([(240, at_once(gpu(0.8 * FULL, on=["sw_power_cap"])))], [("power_cap", 0.2)]),
    ([(120, WORKS), (120, at_once(gpu(0.8 * FULL, on=["sw_power_cap"])))], [("power_cap", 0.1)]),
    (
        [(240, at_once(gpu(0.6 * FULL, on=["hw_slowdown", "hw_thermal_slowdown"])))],
        [("heat", 0.4)],
    ),
    ([(240, at_once(gpu(0.9 * FULL, on=["sw_thermal_slowdown"])))], [("heat", 0.1)]),
    ([(240, at_once(gpu(0.9 * FULL, **{MEMORY: 95.0})))], [("heat", 0.1)]),
    (
        [(240, at_once(gpu(0.5 * FULL, on=["hw_slowdown", "hw_power_brake"])))],
        [("power_brake", 0.5)],
    ),
    ([(240, at_once(gpu(0.5 * FULL, on=["hw_slowdown"])))], [("hw_slowdown", 0.5)]),
    ([(240, at_once(gpu(0.7 * FULL, on=["applications_clocks"])))], [("clock_setting", 0.3)]),
    ([(240, at_once(gpu(0.7 * FULL, on=["sync_boost"])))], [("sync_boost", 0.3)]),
    ([(240, at_once(gpu(0.7 * FULL, **{MEMORY: 80.0})))], [("low_clock", 0.3)]),
    # Half a minute of waits in which the SMs were idle but for a hundredth.
    (
        [(120, WORKS), (120, at_once(WAITS, host(io=0.9)))],
        [("io_pressure", 0.446), ("unexplained", 0.05)],
    ),
    ([(120, WORKS), (120, at_once(WAITS, host(cpu=1.0)))], [("cpu_pressure", 0.495)]),
    ([(120, WORKS), (120, at_once(WAITS, host(memory=1.0)))], [("memory_pressure", 0.495)]),
    ([(120, WORKS), (120, at_once(WAITS))], [("no_work", 0.495)]),
    ([(120, WORKS), (120, at_once(WAITS, LOSES))], [("rdma", 0.495)]),
    ([(120, WORKS), (120, at_once(WAITS, port(rdma_port_up=0.0)))], [("rdma", 0.495)]),
    (
        [(120, WORKS), (120, at_once(WAITS | {"gpu_pcie_received_bytes_total": moves(64)}))],
        [("pcie", 0.495)],
    ),
    # The first second of a gap cannot be told from the work before it.
    ([(120, WORKS), (120, nvlink)], [("nvlink", 0.88 * 113 / 240)]),
    ([(120, WORKS), (120, at_once(gpu(gpu_up=0.0)))], [("not_answering", 0.5)]),
    ([(120, WORKS), (120, at_once({'gpu_hung{duty="state"}': 1.0}))], [("not_answering", 0.5)]),
    # What is wrong with a link has no share of its own, but comes only if it matters.
    ([(240, at_once(gpu(gpu_pcie_link_width_lanes=4.0)))], [("pcie", None)]),
    ([(140, WORKS), (20, at_once(gpu(gpu_pcie_link_width_lanes=4.0)))], [("pcie", None)]),
    ([(240, at_once(gpu(gpu_pcie_link_generation=3.0, **RECEIVES)))], [("pcie", None)]),
    (
        [
            (60, WORKS),
            (
                180,
                at_once(gpu(gpu_nvlink_links_up=17.0, gpu_nvlink_received_bytes_total=moves(50))),
            ),
        ],
        [("nvlink", None)],
    ),
    (
        [(240, at_once(gpu(**{'gpu_nvlink_errors_total{type="crc"}': Rise(1.0)})))],
        [("nvlink", None)],
    ),
    ([(240, at_once(gpu(), LOSES))], [("rdma", None)]),
    ([(100, WORKS), (140, at_once(gpu(gpu_processes=2.0)))], [("shared", None)]),
]


@pytest.mark.parametrize(("runs", "expected"), SINGLE)
def test_each_cause_is_named_with_what_it_took(runs, expected):
    """One thing happens, and exactly it is named, with the share that was scripted."""
    found = told(*runs)
    assert [cause for cause, _ in found] == [cause for cause, _ in expected]
    for (_, share), (_, wanted) in zip(found, expected, strict=True):
        assert share is wanted or share == pytest.approx(wanted, abs=0.0011)


def text(*runs, **options):
    """Return the text of the first cause."""
    return ranked(played(*runs, **options).of(GPU))[0].text


def test_the_evidence_has_numbers_units_and_names():
    """Who reads it need not look anything up."""
    capped = at_once(gpu(1.53e9, on={"sw_power_cap": 0.42}))
    assert text((240, capped)) == (
        "power limit: sw_power_cap held 42 % of the last 60 s, SM clock 1530 of 1980 MHz,"
        " power 699 of 700 W"
    )
    assert text((120, WORKS), (120, at_once(WAITS, host(io=0.9)))) == (
        "storage of the host: coincides with 30 s of waits of the job in the last 60 s; some work"
        " waited for it in 90 % of them, in 2 % while the GPU worked"
        ' (host_pressure_seconds_total{kind="some"} of io)'
    )
    assert "mlx5_0/1 in the last 60 s: rdma_packet_sequence_errors_total 12000" in text(
        (120, WORKS), (120, at_once(WAITS, LOSES))
    )
    assert "4 of 16 lanes at generation 5 of 5" in text(
        (240, at_once(gpu(gpu_pcie_link_width_lanes=4.0)))
    )
    assert "17 of 18 links up (gpu_nvlink_links_up), 6 % of the bandwidth is missing" in text(
        (60, WORKS),
        (60, at_once(gpu(gpu_nvlink_links_up=17.0, gpu_nvlink_received_bytes_total=moves(50)))),
    )
    unread = {"gpu_nvlink_received_bytes_total": None}
    assert "6 % of the bandwidth is missing; what moved is not read" in text(
        (60, at_once(gpu(**unread))), (60, at_once(gpu(gpu_nvlink_links_up=17.0, **unread)))
    )


def test_heat_without_a_reason_only_coincides():
    """A clock that is low while the memory is at its limit: what the driver says comes first."""
    hot = at_once(gpu(0.9 * FULL, **{MEMORY: 95.0}))
    found = text((120, at_once(gpu(0.9 * FULL, on=["sw_thermal_slowdown"]))), (120, hot))
    assert found == (
        "heat: sw_thermal_slowdown held 50 % of the last 60 s, low clock with no reason set in 50 %"
        " of the last 60 s coincides with the highest temperature, SM clock 1782 of 1980 MHz,"
        " memory 95 of 95 C"
    )


HELD = {"hw_thermal_slowdown": 1.0, "sw_power_cap": 0.5}
MIXED = [
    # One after the other.
    (
        [
            (60, at_once(gpu(0.5 * FULL, on=["hw_thermal_slowdown"]))),
            (60, at_once(gpu(0.8 * FULL, on=["sw_power_cap"]))),
            (60, at_once(WAITS, host(io=1.0))),
            (60, at_once(gpu(0.9 * FULL))),
        ],
        [("io_pressure", 0.248), ("heat", 0.125), ("power_cap", 0.05), ("low_clock", 0.025)],
    ),
    # At the same time: shared out by the time that each was on or seen.
    ([(240, at_once(gpu(0.7 * FULL, on=HELD)))], [("heat", 0.2), ("power_cap", 0.1)]),
    (
        [(120, WORKS), (120, at_once(WAITS, LOSES, host(cpu=0.5, io=0.5)))],
        [("rdma", 0.248), ("io_pressure", 0.124), ("cpu_pressure", 0.124)],
    ),
    # A reason explains no more than the time it was on, and pressure no more than it was there.
    (
        [(240, at_once(gpu(0.5 * FULL, on={"sw_power_cap": 0.1})))],
        [("low_clock", 0.4), ("power_cap", 0.1)],
    ),
    (
        [(120, WORKS), (120, at_once(WAITS, host(io=0.3)))],
        [("unexplained", 0.346), ("io_pressure", 0.149)],
    ),
    # With what has no share after what has one.
    (
        [(240, at_once(gpu(0.9 * FULL, on=["sw_power_cap"], gpu_pcie_link_width_lanes=4.0)))],
        [("power_cap", 0.1), ("pcie", None)],
    ),
]


@pytest.mark.parametrize(("runs", "expected"), MIXED)
def test_causes_together_are_ranked_by_what_each_took(runs, expected):
    """Several at once: the largest share first, and each its own."""
    assert told(*runs) == [
        (cause, share and pytest.approx(share, abs=0.0011)) for cause, share in expected
    ]


NONE = [
    [(240, WORKS)],
    # Less than a hundredth, and what is no fault of anybody.
    [(240, at_once(gpu(0.992 * FULL)))],
    [(240, at_once(gpu(3.45e8, busy=0.0, gpu_processes=0.0, on=["gpu_idle"])))],
    [(240, at_once(gpu(1.0e9, busy=0.15)))],  # a light load
    [(2, WORKS), (1, at_once(WAITS))] * 80,  # a step's own waits
    # Waits of a job that has not begun, and of one that is long over.
    [(240, at_once(WAITS, host(io=0.9)))],
    [(4, WORKS), (2640, at_once(WAITS, host(io=0.9)))],
    # Pressure, a full link and little loss while the GPU works hinder nobody.
    [(240, at_once(gpu(gpu_pcie_received_bytes_total=moves(62)), host(io=0.9, cpu=0.9)))],
    [
        (
            240,
            at_once(
                gpu(),
                port(
                    rdma_packet_sequence_errors_total=Rise(1.0),
                    rdma_port_packets_received_total=Rise(1e6),
                ),
            ),
        )
    ],
    # A job's end: peers that are gone time out.
    [
        (100, WORKS),
        (20, at_once(gpu(), LOSES)),
        (4, at_once(gpu(gpu_processes=0.0, busy=0.0), port(rdma_queue_pairs=0.0))),
    ],
    # A port that never was up, or was switched off; links that an idle GPU does not use.
    [(240, at_once(gpu(), port(rdma_port_up=0.0)))],
    [(60, WORKS), (180, at_once(gpu(), port(rdma_port_up=0.0, rdma_port_enabled=0.0)))],
    [(60, WORKS), (180, at_once(gpu(gpu_nvlink_links_up=17.0)))],
    [(240, at_once(gpu(gpu_pcie_link_generation=1.0, gpu_pcie_received_bytes_total=moves(0.5))))],
    [(240, at_once(gpu(busy=0.0, gpu_processes=0.0, gpu_pcie_link_width_lanes=4.0)))],
    # Of few packets a share is chance.
    [
        (
            240,
            at_once(
                gpu(),
                port(
                    rdma_packet_sequence_errors_total=Rise(1.0),
                    rdma_port_packets_received_total=Rise(100.0),
                ),
            ),
        )
    ],
    # Waits between which a tick is missing may be two short ones.
    [(4, WORKS), (1, at_once(WAITS)), (1, None), (1, at_once(WAITS))] * 20,
    # A job that comes with many processes, one after the other.
    [(4, WORKS), (4, at_once(gpu(gpu_processes=2.0))), (240, at_once(gpu(gpu_processes=8.0)))],
    # It is over: a minute later nothing is left of it.
    [(240, at_once(gpu(0.5 * FULL, on=["sw_power_cap"]))), (240, WORKS)],
    [(240, at_once(WAITS, LOSES, host(io=0.5))), (240, WORKS)],
]


@pytest.mark.parametrize("runs", NONE)
def test_nothing_is_listed_when_nothing_is_lost(runs):
    """A healthy GPU has no causes, nor has one that nobody works with."""
    assert told(*runs) == []


def test_what_is_not_known_is_said_not_guessed():
    """Without a limit, an activity or a source there is no share, or no name."""
    slow = gpu(0.8 * FULL, on=["sw_power_cap"])
    assert told((240, at_once(slow)), constants={}) == [("power_cap", None)]
    assert "not known without gpu_clock_limit_hertz" in text((240, at_once(slow)), constants={})
    blind = slow | {"gpu_sm_active_ratio": None, "gpu_utilization_ratio": None}
    assert told((240, at_once(blind))) == [("power_cap", None)]
    assert "gpu_sm_active_ratio or gpu_utilization_ratio" in text((240, at_once(blind)))

    unread = gpu(0.8 * FULL) | {column_name(THROTTLE, label): None for _, label in REASONS}
    assert told((240, at_once(unread))) == [("unexplained", 0.2)]
    assert "12 s of lost clock with gpu_throttle_active not read" in text((240, at_once(unread)))
    newer = (
        gpu(0.8 * FULL, on=["sw_power_cap"]),
        gpu(0.8 * FULL) | {column_name(THROTTLE, "unknown_0x200"): 1.0},
    )
    runs = [(120, at_once(columns)) for columns in newer]
    assert told(*runs) == [("power_cap", 0.1), ("unexplained", 0.1)]
    unexplained = ranked(played(*runs).of(GPU))[1].text
    assert "6 s of lost clock while unknown_0x200 was on, a new reason" in unexplained

    dark = [(120, WORKS), (120, at_once(WAITS, host(io=None)))]
    assert told(*dark) == [("unexplained", 0.495)]
    assert text(*dark).endswith("not read: io pressure")
    # A job may be waiting, or there may be none.
    assert told((120, WORKS), (120, at_once(WAITS | {"gpu_processes": None}))) == []

    little = {
        GPU: {"gpu_utilization_ratio": 0.0, "gpu_processes": 1.0},
        **host(),
    }
    assert told((120, WORKS), (120, little), near=()) == [("no_work", 0.5)]
    assert text((120, WORKS), (120, little), near=()).endswith(
        "not read: GPM, PCIe bytes, NVLink bytes, RDMA ports near it"
    )


def test_reasons_at_the_same_time_are_said_to_be_told_apart_by_nobody():
    """Two reasons that were on together share what was lost, and both say so."""
    found = ranked(played((240, at_once(gpu(0.7 * FULL, on=HELD)))).of(GPU))
    assert all("which one counted is not known" in one.text for one in found)
    assert "not known" not in text((240, at_once(gpu(0.7 * FULL, on=["sw_power_cap"]))))


def test_without_gpm_waits_inside_kernels_are_said_to_be_unseen():
    """Utilization counts a collective that waits as work."""
    older = gpu() | {"gpu_sm_active_ratio": None}
    found = text((240, at_once(older, LOSES)))
    assert found.endswith("cannot be seen; GPM not read: kernels that wait count as work")


def test_only_gpus_have_causes():
    """Of anything else nothing is said, nor of a GPU that was never seen."""
    causes = played((4, WORKS))
    assert [ranked(causes.of(one)) for one in (PORT, HOST, Entity("gpu", "7"))] == [[], [], []]


def test_the_nearest_port_counts_and_no_other():
    """Loss elsewhere is no cause of this GPU's."""
    runs = [(120, WORKS), (120, at_once(WAITS, LOSES))]
    far = [EntityInfo(PORT, {"device": "mlx5_0", "gpu": "1,2"})]
    assert told(*runs, near=far) == [("no_work", 0.495)]
    shared = [EntityInfo(PORT, {"device": "mlx5_0", "gpu": "1,0"})]
    assert told(*runs, near=shared) == [("rdma", 0.495)]


shares = st.sampled_from([0.0, 0.3, 1.0])
cells = st.fixed_dictionaries(
    {
        "clock": st.sampled_from([None, 0.0, 0.5 * FULL, FULL, 1.1 * FULL]),
        "busy": st.sampled_from([None, 0.0, 0.04, 0.15, 0.21, 1.0]),
        "processes": st.sampled_from([None, 0.0, 1.0, 3.0]),
        "up": st.sampled_from([1.0, 1.0, 1.0, 0.0, None]),
        "on": st.dictionaries(st.sampled_from([label for _, label in REASONS]), shares, max_size=4),
        "pressures": st.fixed_dictionaries(
            {name: st.sampled_from([None, 0.0, 0.3, 1.0]) for name in ("io", "cpu", "memory")}
        ),
        "moved": st.sampled_from([0.0, 1.0, 60.0, 300.0]),
        "lanes": st.sampled_from([16.0, 4.0]),
        "links": st.sampled_from([18.0, 17.0, None]),
        "lost": st.sampled_from([0.0, 5.0]),
        "port": st.sampled_from([1.0, 0.0]),
        "ticks": st.integers(1, 60),
    }
)


def entities_of(cell):
    """Return a tick's entities as hypothesis wants them."""
    columns = gpu(
        cell["clock"],
        cell["busy"],
        cell["on"],
        gpu_processes=cell["processes"],
        gpu_up=cell["up"],
        gpu_pcie_received_bytes_total=moves(cell["moved"]),
        gpu_nvlink_received_bytes_total=moves(cell["moved"], 1.0),
        gpu_nvlink_links_up=cell["links"],
        gpu_pcie_link_width_lanes=cell["lanes"],
    )
    columns["gpu_utilization_ratio"] = cell["busy"]
    wire = port(rdma_port_up=cell["port"], rdma_local_ack_timeout_errors_total=Rise(cell["lost"]))
    return {GPU: columns} | host(**cell["pressures"]) | wire


@given(st.lists(cells, min_size=1, max_size=8))
@settings(deadline=None, max_examples=40)
def test_shares_are_never_more_than_was_lost(script):
    """Whatever happened: no share is below 0, and all of them are no more than was lost.

    What was lost: the clock as gpu_lost_clock_seconds_total counts it, and time without work of a
    GPU that is not busy or does not answer. A minute after it nothing is left of it.
    """
    causes, now, lost = LostTime(NEAR), 0, []
    for cell in script:
        for _ in range(cell["ticks"]):
            made = node(now, entities_of(cell), CONSTANTS)
            causes.add(made)
            totals = Totals()
            totals.add(made)
            idle = 1 - (cell["busy"] or 0.0) if (cell["busy"] or 0.0) <= 0.2 else 0.0
            silent = 1.0 if cell["up"] == 0 else 0.0
            clock = totals.lost_clock_ns.get(GPU, 0) / TICK_NS
            lost.append(max(silent, idle, clock))
            now += TICK_NS
    lost = lost[-MINUTE:]
    found = [one.share for one in ranked(causes.of(GPU)) if one.share is not None]
    assert all(share >= LEAST_SHARE for share in found)
    assert sum(found) <= sum(lost) / len(lost) + 1e-9
    assert all(one >= other for one, other in pairwise(found))

    alone = LostTime(NEAR)
    for _ in range(MINUTE):
        made = node(now, WORKS, CONSTANTS)
        causes.add(made)
        alone.add(made)
        now += TICK_NS
    drifted = causes.of(GPU).sums
    expected = alone.of(GPU).sums
    kinds = ("time", "lost", "on", "sum", "over", "in_waits", "at_work", "seen", "extra", "blind")
    for key in {*drifted, *expected}:
        if key[0] in kinds and key[1] not in ("shared", "nvlink_degraded"):
            assert drifted.get(key, 0) == expected.get(key, 0), key


def test_time_that_was_not_seen_is_not_counted():
    """Shares are of what was seen: before a sampler begins there is no GPU that works well."""
    capped = at_once(gpu(0.8 * FULL, on=["sw_power_cap"]))
    dark = at_once(dict.fromkeys(gpu()))
    assert told((40, dark), (40, capped)) == told((40, capped)) == [("power_cap", 0.2)]


def test_a_light_load_is_no_part_of_waits():
    """Nor of the time that the evidence speaks of."""
    light = at_once(gpu(busy=0.15))
    found = text((40, WORKS), (40, light), (40, at_once(WAITS, host(io=0.9))))
    assert "coincides with 10 s of waits of the job in the last 30 s" in found


def test_pressure_is_whole_wherever_its_reads_fall():
    """Reads every tenth of a second: in one quarter second there are two of them, in the next 3."""

    def full(number):
        return at_once(WAITS, {Entity("resource", "io"): {SOME: Rise(0.3 if number % 2 else 0.2)}})

    # Of the first quarter second a fifth is not known yet.
    assert told((120, WORKS), (120, full)) == [("io_pressure", 0.494)]


def test_a_link_that_was_looked_at_while_idle_is_not_full():
    """A link's generation is read every ten seconds: more bytes than it could carry say so."""
    stale = WAITS | {
        "gpu_pcie_link_generation": 1.0,
        "gpu_pcie_received_bytes_total": moves(60),
    }
    assert told((120, WORKS), (120, at_once(stale))) == [("no_work", 0.495)]


def test_nvlink_of_one_wait_says_nothing_of_the_next():
    """What moved before the GPU worked again was another collective."""
    found = told((120, WORKS), (12, nvlink), (1, WORKS), (107, at_once(WAITS)))
    assert found == [("no_work", round(107 * 0.99 / 240, 3)), ("nvlink", round(5 * 0.88 / 240, 3))]


def test_hardware_counters_tell_of_nvlink_tick_by_tick():
    """Each tick of a wait is judged by what moved in it, not by the second before."""
    name = "gpu_nvlink_raw_received_bytes_total"
    halves = [at_once(gpu(busy=0.12, **{name: moves(rate)})) for rate in (300, 20)]
    found = told((120, WORKS), (120, lambda number: halves[number % 2]))
    assert dict(found)["nvlink"] == pytest.approx(60 * 0.88 / 240, abs=0.01)


def test_nvml_tells_of_nvlink_while_another_has_the_hardware_counters():
    """Their columns are still there then, and nothing is known of them."""
    raw = ("gpu_nvlink_raw_received_bytes_total", "gpu_nvlink_raw_transmitted_bytes_total")

    def taken(number):
        tick = nvlink(number)
        return tick | {GPU: tick[GPU] | dict.fromkeys(raw)}

    assert told((120, WORKS), (120, taken)) == told((120, WORKS), (120, nvlink)) != []


def test_who_waits_after_a_job_s_end_does_not_wait_for_the_network():
    """Packets to peers that have ended are lost, and nobody needs them."""
    ends = port(rdma_queue_pairs=0.0, rdma_packet_sequence_errors_total=Rise(100.0))
    assert told((120, WORKS), (60, at_once(WAITS, ends))) == [("no_work", 0.33)]


def test_a_recording_that_begins_again_counts_once():
    """Data time that goes back takes with it what came after."""
    causes = LostTime(NEAR)
    for _ in range(3):
        for number in range(80):
            columns = gpu(0.8 * FULL, on=["sw_power_cap"])
            causes.add(node(number * TICK_NS, at_once(columns), CONSTANTS))
    loss = causes.of(GPU)
    assert loss.sums["time", ""] == 80 * TICK_NS
    assert loss.sums["lost", "power_cap"] == pytest.approx(16 * TICK_NS)


def bundled():
    """Return what is said of the bundled recording at each of its ticks, and its last ticks."""
    reader = RecordingReader(BUNDLED_RECORDING)
    causes, found, kept = LostTime(reader.head.entities), [], []
    for made in recorded_ticks(reader):
        causes.add(made)
        kept.append(made)
        found.append({e.id: ranked(causes.of(e)) for e in made.windows if e.kind == "gpu"})
    reader.close()
    return found, kept[-MINUTE:]


def test_two_power_capped_h200_say_so():
    """A recording of real GPUs that compute, talk and rest: the power limit is one cause of all.

    What it took is what gpu_lost_clock_seconds_total counts by the same clock, the driver's, and it
    held for as long as gpu_throttle_seconds_total says.
    """
    found, kept = bundled()
    totals = Totals()
    reader = RecordingReader(BUNDLED_RECORDING)
    totals.attach(column for ring in reader.head.rings for column in ring.columns)
    reader.close()
    for made in kept:
        for windows in made.windows.values():
            windows.pop('gpu_clock_hertz{clock="gpc"}', None)
        totals.add(made)
    seconds = len(kept) * TICK
    for number in ("0", "1"):
        entity = Entity("gpu", number)
        capped = next(one for one in found[-1][number] if one.cause == "power_cap")
        lost = totals.lost_clock_ns[entity] / SECOND / seconds
        assert capped.share == pytest.approx(lost, abs=0.005)
        held = totals.bits[entity, column_name(THROTTLE, "sw_power_cap")].active_ns / SECOND
        assert f"sw_power_cap held {100 * held / seconds:.0f} % of the last" in capped.text


SIMULATED = (SimulatedState, SimulatedCounters, SimulatedGpm, SimulatedHost, SimulatedRdma)


def simulated(monkeypatch, scenario, seconds=40):
    """Return what is said of each GPU of a simulated node, by number; the fault is on for 35 s."""
    nodes = [SimulatedNode(monkeypatch, scenario, source, gpus=3) for source in SIMULATED]
    infos = [info for one in nodes for info in one.opened.entities]
    near = [EntityInfo(i.entity, {"gpu": i.labels["near"]}) for i in infos if "near" in i.labels]
    causes = LostTime(near)
    for first, *others in zip(*(one.ticks(seconds) for one in nodes), strict=True):
        constants = dict(first.constants)
        for other in others:
            for entity, windows in other.windows.items():
                first.windows.setdefault(entity, {}).update(windows)
            for entity, values in other.constants.items():
                constants[entity] = constants.get(entity, {}) | values
        first.constants = constants
        causes.add(first)
    return [ranked(causes.of(entity)) for entity in nodes[0].gpus]


@pytest.mark.parametrize(
    ("scenario", "cause"),
    [
        ("thermal", "heat"),
        ("power-brake", "power_brake"),
        ("pcie-degraded", "pcie"),
        ("nvlink-down", "nvlink"),
        ("rdma-loss", "rdma"),
        ("gpu-lost", "not_answering"),
    ],
)
def test_a_simulated_fault_of_one_gpu_is_named_first(monkeypatch, scenario, cause):
    """By the sources' own columns; the GPUs beside it have no causes."""
    *healthy, sick = simulated(monkeypatch, scenario)
    assert [one.cause for one in sick][:1] == [cause]
    assert healthy == [[], []]


@pytest.mark.parametrize(
    ("scenario", "cause"), [("power-capped", "power_cap"), ("starved", "io_pressure")]
)
def test_a_simulated_fault_of_all_is_named_first(monkeypatch, scenario, cause):
    """What all GPUs suffer from is said of each."""
    for found in simulated(monkeypatch, scenario):
        assert found[0].cause == cause
        assert found[0].share > 0.1


def test_a_healthy_simulated_node_has_no_causes(monkeypatch):
    """Steps that compute and communicate lose nothing."""
    assert simulated(monkeypatch, "healthy") == [[], [], []]


def test_live_is_what_the_recording_says(tmp_path):
    """A daemon that replays shows what full speed gives at the same tick, with its alert."""
    wanted = [
        {number: [one.to_json() for one in found] for number, found in at.items()}
        for at in bundled()[0]
    ]
    config = "[rules.gpu_power_capped]\nlimit = 0.1\nwindow_seconds = 2.0\n"
    with Running(tmp_path, "--source", "replay:bundled", config=config) as running:

        def shown():
            status = running.status()
            alerts = [one for one in status["alerts"] if one["rule"] == "gpu_power_capped"]
            firing = [one for one in alerts if one["state"] == "firing"]
            return (status["gpus"], firing) if firing and status["gpus"][0]["causes"] else None

        gpus, firing = wait_for(shown, what="an alert with causes")
    found = {one["gpu"]: one["causes"] for one in gpus}
    assert found["0"][0]["cause"] == "power_cap"
    assert found in wanted
    for alert in firing:
        assert alert["causes"] == found[alert["entity"][1]]

"""The rules: what they fire on, and the noise they must not make."""

import re
import struct
from pathlib import Path

import pytest
import ticks
from ticks import GPU, SECOND, firing, tick

from gpuwatch import gpu_health_signals, gpu_signals, mig_signals
from gpuwatch.alerts import AlertEngine
from gpuwatch.gpu_signals import REASONS, THROTTLE, UTILIZATION
from gpuwatch.ring import RingSchema
from gpuwatch.rules import RULES
from gpuwatch.rules import gpu as gpu_rules
from gpuwatch.signals import Column, Entity, Signal, column_name
from gpuwatch.summation import RingWindows
from gpuwatch.window import Tick

CLOCK_NAME = 'gpu_clock_hertz{clock="sm"}'
LIMIT = {
    'gpu_clock_limit_hertz{clock="sm"}': 2e9,
    'gpu_temperature_threshold_celsius{threshold="memory_max"}': 95.0,
}
SOURCE = Entity("source", "nvml_state")

BUSY = {"gpu_utilization_ratio": 1.0}
IDLE = {"gpu_utilization_ratio": 0.0}


def active(*reasons):
    """Return every declared reason's column, 1 for those named."""
    return {column_name(THROTTLE, label): float(label in reasons) for _, label in REASONS}


def healthy(*reasons, **others):
    return active(*reasons) | {CLOCK_NAME: 2e9, "gpu_up": 1.0} | others


def judged(script, entity=GPU):
    """Judge (seconds, columns) runs of one entity; return the engine and the names of events."""
    return ticks.judged([(seconds, {entity: columns}) for seconds, columns in script], LIMIT)


HOT, COOL = "hw_thermal_slowdown", "sw_thermal_slowdown"
BRAKE, CAP = "hw_power_brake", "sw_power_cap"
COUPLE = {"gpu_power_brake", "gpu_power_brake_severe"}
CORE, MEMORY = (f'gpu_temperature_celsius{{sensor="{sensor}"}}' for sensor in ("core", "memory"))
MARGIN = "gpu_temperature_margin_celsius"
BRAKE_NAME = column_name(THROTTLE, BRAKE)


def margin(celsius, seconds):
    return seconds, healthy(**BUSY, **{MARGIN: celsius})


def memory(celsius, seconds):
    return seconds, healthy(**BUSY, **{MEMORY: celsius})


TABLE = [
    # Hardware heat: 5 % of 5 minutes is 15 s, wherever they lie.
    ([(14, healthy(HOT))], set()),
    ([(15, healthy(HOT))], {"gpu_hw_thermal_slowdown"}),
    ([(1, healthy(HOT)), (19, healthy())] * 15, {"gpu_hw_thermal_slowdown"}),
    ([(1, healthy(HOT)), (21, healthy())] * 30, set()),
    ([(15, healthy(HOT)), (285, healthy())], {"gpu_hw_thermal_slowdown"}),
    ([(15, healthy(HOT)), (286, healthy())], set()),
    # Time without data is not active and does not keep a share up.
    ([(14, healthy(HOT)), (10, {column_name(THROTTLE, HOT): None})], set()),
    # Software heat: 60 s of the last 10 busy minutes, idle time left out.
    ([(59, healthy(COOL, **BUSY))], set()),
    ([(60, healthy(COOL, **BUSY))], {"gpu_thermal_slowdown"}),
    ([(600, healthy(COOL, **IDLE))], set()),
    ([(600, healthy(COOL))], set()),  # whether it is busy is not known
    (
        [(30, healthy(COOL, **BUSY)), (900, healthy(**IDLE)), (30, healthy(COOL, **BUSY))],
        {"gpu_thermal_slowdown"},
    ),
    ([(30, healthy(COOL, **BUSY)), (3600, healthy(**IDLE)), (30, healthy(COOL, **BUSY))], set()),
    ([(60, healthy(COOL, **BUSY)), (900, healthy(**IDLE))], {"gpu_thermal_slowdown"}),
    ([(60, healthy(COOL, **BUSY)), (601, healthy(**BUSY))], set()),
    # Power brake: 3 s of 5 minutes a warning, 15 s critical.
    ([(1, healthy(BRAKE)), (600, healthy())], set()),
    ([(2, healthy(BRAKE))], set()),
    ([(3, healthy(BRAKE))], {"gpu_power_brake"}),
    ([(15, healthy(BRAKE))], COUPLE),
    ([(2400, healthy(BRAKE))], COUPLE),
    ([(2400, healthy(BRAKE)), (301, healthy())], set()),
    # Close to the GPU's own limit for 10 minutes. No temperature alone is too high.
    ([margin(2.0, 600)], set()),
    ([margin(2.0, 601)], {"gpu_hot"}),
    ([margin(-3.0, 601)], {"gpu_hot"}),
    ([margin(3.0, 2000)], set()),
    ([margin(2.0, 500), margin(3.0, 1), margin(2.0, 500)], set()),
    ([margin(2.0, 500), margin(None, 900), margin(2.0, 101)], {"gpu_hot"}),
    ([margin(2.0, 601), margin(3.0, 120)], set()),
    ([(1200, healthy(**BUSY, **{CORE: 80.0}))], set()),
    ([(1200, healthy(**BUSY, **{CORE: 93.0, MEMORY: 91.0, MARGIN: None}))], set()),
    ([memory(92.0, 600)], set()),
    ([memory(92.0, 601)], {"gpu_memory_hot"}),
    ([memory(91.9, 1200)], set()),
    ([memory(None, 1200)], set()),
    # Power cap: half of 10 minutes, for information.
    ([(299, healthy(CAP, **BUSY))], set()),
    ([(300, healthy(CAP, **BUSY))], {"gpu_power_capped"}),
    # A lost GPU: 30 s without one answer, kept until acknowledged.
    ([(5, healthy()), (30, {"gpu_up": 0.0})], set()),
    ([(5, healthy()), (31, {"gpu_up": 0.0})], {"gpu_lost"}),
    ([(5, healthy()), (31, {"gpu_up": 0.0}), (900, healthy())], {"gpu_lost"}),
    ([(20, {"gpu_up": 0.0}), (1, healthy())] * 5, set()),
    # Released or switched off: the GPU's columns are not there.
    ([(5, healthy()), (1200, None)], set()),
    ([(5, healthy()), (1200, {"gpu_up": None})], set()),
    # Training at the power limit, and idle with application clocks set.
    ([(1200, healthy(CAP, "applications_clocks", **BUSY))], {"gpu_power_capped"}),
    ([(1200, healthy("gpu_idle", "applications_clocks", "display_clocks", **IDLE))], set()),
]


@pytest.mark.parametrize(("script", "expected"), TABLE)
def test_states_after_a_script(script, expected):
    """After these runs of ticks exactly these rules are firing."""
    engine, _ = judged(script)
    assert firing(engine) == expected


def masks():
    """Return each bit alone, and what the masks of the field's reports may raise."""
    serious = {
        "sw_power_cap": {"gpu_power_capped"},
        "sw_thermal_slowdown": {"gpu_thermal_slowdown"},
        "hw_thermal_slowdown": {"gpu_hw_thermal_slowdown"},
        "hw_power_brake": COUPLE,
    }
    for bit, label in REASONS:
        yield 1 << bit, serious.get(label, set())
    yield 0x0, set()
    yield 0x48, {"gpu_hw_thermal_slowdown"}
    yield 0x88, COUPLE
    yield 0x103, set()
    yield 0x200, set()
    yield 1 << 62, set()
    yield 0x201, set()
    yield 0x5, {"gpu_power_capped"}


@pytest.mark.parametrize(("mask", "expected"), [pytest.param(*m, id=hex(m[0])) for m in masks()])
def test_every_bit_of_the_reasons_for_forty_minutes(mask, expected):
    """A mask read from the driver, as ring rows, raises the rules of its bits and no others."""
    period = 5 * SECOND
    columns = (Column(GPU, THROTTLE), Column(GPU, UTILIZATION))
    schema = RingSchema("fast", "state", "nvml_state", columns, period)
    windows = RingWindows(schema)
    engine = AlertEngine(RULES, {}, None, "")
    for index in range(480):
        made = Tick(index * period, (index + 1) * period)
        windows.add(packed(schema, made.start_ns, mask, index))
        windows.close(made)
        engine.judge(made)
    assert firing(engine) == expected


def packed(schema, time_ns, mask, sequence):
    return struct.pack(schema.row_format, time_ns, 0.0, 0.0, mask, 1.0, sequence)


def test_heat_and_brake_are_detected_in_the_tick_they_are_seen():
    """Detected comes at once and once; a power cap or an idle GPU's heat is no detection."""
    for reason, name in [
        (HOT, "gpu_hw_thermal_slowdown_detected"),
        (COOL, "gpu_thermal_slowdown_detected"),
        (BRAKE, "gpu_power_brake_detected"),
    ]:
        _, names = judged([(1, healthy(**BUSY)), (1, healthy(reason, **BUSY))])
        assert names[:1] == [name]
        _, names = judged([(1, healthy(**BUSY)), (9, healthy(reason, **BUSY))])
        assert [one for one in names if one.endswith("_detected")] == [name]
    quiet = ("sw_power_cap", "gpu_idle", "applications_clocks", "display_clocks", "sync_boost")
    assert judged([(5, healthy(*quiet, **BUSY)), (5, healthy(COOL, **IDLE))])[1] == []


def test_a_gpu_that_does_not_answer_is_detected_before_it_is_lost():
    """One read without answer is a detection; the alert takes its 30 s."""
    engine, names = judged([(2, healthy()), (1, {"gpu_up": 0.0})])
    assert names == ["gpu_lost_detected", "gpu_lost_pending"]
    assert firing(engine) == set()


def test_lost_clears_with_recovery_and_acknowledgement():
    """After `acknowledge` a GPU that is back is lost no longer."""
    engine, _ = judged([(31, {"gpu_up": 0.0}), (300, healthy())])
    assert firing(engine) == {"gpu_lost"}
    assert engine.acknowledge() == 1
    engine.judge(tick(400 * SECOND, healthy(), length_ns=SECOND))
    assert firing(engine) == set()


def capped(clock, constants=LIMIT):
    engine = AlertEngine(RULES, {}, None, "")
    columns = healthy(CAP, **BUSY) | {CLOCK_NAME: clock}
    for second in range(300):
        engine.judge(tick(second * SECOND, columns, GPU, constants, SECOND))
    (alert,) = [one for one in engine.alerts() if one.rule == "gpu_power_capped"]
    assert alert.state == "firing"
    return alert


def braked(*numbers, of=8, share=1.0):
    """Return a node's GPUs, those named with the power brake on for this share of the second."""
    return {
        Entity("gpu", str(number)): healthy() | {BRAKE_NAME: share if number in numbers else 0.0}
        for number in range(of)
    }


NODE = {"node_power_brake"}
BRAKE_TABLE = [
    # Four GPUs at once, 1 % of 5 minutes: the node's power, told once and nothing of its GPUs.
    ([(3, braked(*range(8)))], NODE),
    ([(3, braked(0, 2, 4, 6))], NODE),
    ([(2400, braked(*range(8)))], NODE),
    ([(3, braked(*range(4), of=4))], NODE),
    ([(2, braked(*range(8)))], set()),
    ([(30, braked(*range(8), share=0.05))], set()),
    ([(60, braked(*range(8), share=0.05))], NODE),
    ([(1, braked(*range(8))), (120, braked())] * 5, set()),
    # Three at once are three GPUs.
    ([(3, braked(0, 1, 2))], {"gpu_power_brake"}),
    ([(15, braked(0, 1, 2))], COUPLE),
    ([(15, braked(0, 1, 2, of=3))], COUPLE),
    # So are eight one after the other.
    ([(3, braked(number)) for number in range(8)], {"gpu_power_brake"}),
    # A GPU of its own beside a fault of the node.
    ([(3, braked(*range(8))), (15, braked(5))], NODE | COUPLE),
    ([(3, braked(*range(8))), (420, braked())], set()),
    ([(60, {Entity("gpu", "0"): {}})], set()),
]


@pytest.mark.parametrize(("script", "expected"), BRAKE_TABLE)
def test_a_brake_on_four_gpus_is_the_nodes(script, expected):
    """The brake of the whole node is one alert instead of one for each GPU."""
    assert firing(ticks.judged(script, LIMIT)[0]) == expected


def test_a_brake_of_the_whole_node_is_detected_once():
    """One event for the node instead of eight for its GPUs, in the tick it is seen."""
    _, names = ticks.judged([(1, braked()), (2, braked(*range(8)))], LIMIT)
    assert names == ["node_power_brake_detected"]
    _, names = ticks.judged([(1, braked()), (2, braked(6))], LIMIT)
    assert names == ["gpu_power_brake_detected"]


def test_power_capped_publishes_the_share_of_clock_lost():
    """1.5 of 2 GHz is a quarter lost; without clock or limit the loss is unknown, not 0."""
    alert = capped(1.5e9)
    assert alert.value == pytest.approx(0.25)
    assert alert.severity == "info"
    assert capped(2.1e9).value == 0.0
    assert capped(None).value is None
    assert capped(1.5e9, {}).value is None


def test_source_failing_needs_a_quarter_of_an_hour():
    """A source without data for 15 minutes fires, and resolves with its first data."""
    down, up = {"source_up": 0.0}, {"source_up": 1.0}
    assert firing(judged([(900, down)], SOURCE)[0]) == set()
    _, names = judged([(901, down)], SOURCE)
    assert names == ["source_failing_pending", "source_failing_firing"]
    assert firing(judged([(901, down), (119, up)], SOURCE)[0]) == {"source_failing"}
    assert firing(judged([(901, down), (120, up)], SOURCE)[0]) == set()
    assert firing(judged([(500, down), (1, up), (500, down)], SOURCE)[0]) == set()
    assert firing(judged([(500, down), (5000, None)], SOURCE)[0]) == set()


def test_columns_the_rules_read_are_declared():
    """Every GPU's column that is written in a rule is one a source serves."""
    signals = {
        signal.name: signal
        for module in (gpu_signals, gpu_health_signals, mig_signals)
        for signal in vars(module).values()
        if isinstance(signal, Signal)
    }
    written = set()
    for path in Path(gpu_rules.__file__).parent.glob("*.py"):
        text = re.sub('name="[a-z_]+"', "", path.read_text())
        written |= set(re.findall(r"""['"](gpu_\w+)(?:\{(\w+)=.*?\})?['"]""", text))
    assert len(written) > 20
    for name, label in written:
        assert name in signals, name
        assert (signals[name].label or "") == label or not label


def test_rules_are_complete_and_their_names_unique():
    """Names are the API; each rule says what it means and what to do, a sentence each."""
    assert {rule.name: rule.severity for rule in RULES} == {
        "canary_regression_matmul": "warning",
        "canary_regression_matmul_severe": "critical",
        "canary_regression_memory": "warning",
        "canary_regression_memory_severe": "critical",
        "canary_regression_pcie": "warning",
        "canary_regression_pcie_severe": "critical",
        "canary_regression_allreduce": "warning",
        "canary_regression_allreduce_severe": "critical",
        "node_slow": "info",
        "silent_data_corruption": "critical",
        "silent_data_corruption_allreduce": "critical",
        "canary_stuck": "warning",
        "canary_stale": "info",
        "gpu_hw_thermal_slowdown": "critical",
        "gpu_thermal_slowdown": "warning",
        "gpu_hot": "warning",
        "gpu_memory_hot": "warning",
        "gpu_power_brake": "warning",
        "gpu_power_brake_severe": "critical",
        "node_power_brake": "critical",
        "gpu_power_capped": "info",
        "gpu_lost": "critical",
        "gpu_missing": "critical",
        "gpu_hung": "critical",
        "gpu_recovery_required": "critical",
        "gpu_ecc_uncorrected": "critical",
        "gpu_row_remap_pending": "warning",
        "gpu_row_remap_failed": "critical",
        "gpu_pcie_degraded": "warning",
        "gpu_nvlink_down": "critical",
        "gpu_nvlink_errors": "warning",
        "driver_mismatch": "warning",
        "source_failing": "warning",
        "sampler_late": "info",
        "recorder_disk_full": "warning",
        "input_starved": "info",
        "gpu_xid": "critical",
        "gpu_xid_warning": "warning",
        "pcie_errors": "warning",
        "rdma_port_down": "critical",
        "rdma_port_flapping": "warning",
        "rdma_port_flapping_severe": "critical",
        "rdma_degraded": "warning",
        "rdma_loss": "warning",
        "rdma_retries_exceeded": "critical",
        "rdma_congested": "warning",
        "rdma_pause_storm": "critical",
        "rdma_pause_storm_warning": "warning",
        "rdma_asymmetry": "warning",
        "gpu_straggler": "warning",
        "gpu_straggler_severe": "critical",
        "gpu_busy_without_work": "info",
        "gpu_ghost_load": "info",
    }
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        for sentence in (rule.help, rule.next_step):
            assert re.fullmatch(r"[A-Z][^.]+\.", sentence), sentence
        assert rule.hold_seconds >= 120

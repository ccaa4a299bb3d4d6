"""The rules: what they fire on, and the noise they must not make."""

import re
import struct
from pathlib import Path

import pytest
from ticks import GPU, tick

from gpuwatch.alerts import AlertEngine
from gpuwatch.gpu_signals import CLOCK, CLOCK_LIMIT, REASONS, SLOW_SIGNALS, THROTTLE, UTILIZATION
from gpuwatch.ring import RingSchema
from gpuwatch.rules import RULES
from gpuwatch.rules import gpu as gpu_rules
from gpuwatch.signals import Column, Entity, column_name
from gpuwatch.summation import RingWindows
from gpuwatch.window import Tick

SECOND = 1_000_000_000
CLOCK_NAME = 'gpu_clock_hertz{clock="sm"}'
LIMIT = {'gpu_clock_limit_hertz{clock="sm"}': 2e9}
SOURCE = Entity("source", "nvml_state")

BUSY = {"gpu_utilization_ratio": 1.0}
IDLE = {"gpu_utilization_ratio": 0.0}


def active(*reasons):
    """Return every declared reason's column, 1 for those named."""
    return {column_name(THROTTLE, label): float(label in reasons) for _, label in REASONS}


def healthy(*reasons, **others):
    return active(*reasons) | {CLOCK_NAME: 2e9, "gpu_up": 1.0} | others


def judged(script, entity=GPU):
    """Judge (seconds, columns) runs in ticks of a second; return the engine and event names."""
    engine = AlertEngine(RULES, {}, None, "")
    now, names = 0, []
    for seconds, columns in script:
        for _ in range(seconds):
            made = tick(now, columns, entity, LIMIT, SECOND)
            names += [event.name for event in engine.judge(made)]
            now += SECOND
    return engine, names


def firing(engine):
    return {alert.rule for alert in engine.alerts() if alert.state == "firing"}


HOT, COOL = "hw_thermal_slowdown", "sw_thermal_slowdown"
BRAKE, CAP = "hw_power_brake", "sw_power_cap"
COUPLE = {"gpu_power_brake", "gpu_power_brake_severe"}

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
    """Every column name written in a rule is one a source serves."""
    declared = {column_name(signal, label) for signal, label in SLOW_SIGNALS}
    declared |= {column_name(THROTTLE, label) for _, label in REASONS}
    declared |= {column_name(CLOCK, "sm"), column_name(CLOCK_LIMIT, "sm")}
    text = Path(gpu_rules.__file__).read_text()
    written = set(re.findall(r"""['"](gpu_\w+\{.*?\}|gpu_up)['"]""", text))
    assert len(written) == 7
    assert written <= declared


def test_rules_are_complete_and_their_names_unique():
    """Names are the API; each rule says what it means and what to do, a sentence each."""
    assert {rule.name: rule.severity for rule in RULES} == {
        "gpu_hw_thermal_slowdown": "critical",
        "gpu_thermal_slowdown": "warning",
        "gpu_power_brake": "warning",
        "gpu_power_brake_severe": "critical",
        "gpu_power_capped": "info",
        "gpu_lost": "critical",
        "source_failing": "warning",
    }
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        for sentence in (rule.help, rule.next_step):
            assert re.fullmatch(r"[A-Z][^.]+\.", sentence), sentence
        assert rule.hold_seconds >= 120

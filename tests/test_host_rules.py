"""Rules about the host and its kernel log: what they fire on, and the noise they must not make."""

from dataclasses import replace

import pytest
from ticks import GPU, SECOND, Rise, firing, node

from gpuwatch.alerts import AlertEngine
from gpuwatch.kernel_log import Found
from gpuwatch.rules import host as host_rules
from gpuwatch.rules import kernel_log as kernel_log_rules
from gpuwatch.signals import HOST, Entity, Event
from gpuwatch.window import TICK_NS

KMSG = Entity("source", "kmsg")
NIC = Entity("pci_device", "0000:c1:00.0")
IO, CPU = Entity("resource", "io"), Entity("resource", "cpu")
SOME = 'host_pressure_seconds_total{kind="some"}'
TICK = TICK_NS / SECOND
OURS = [*host_rules.RULES, *kernel_log_rules.RULES]


def host(activity, io=0.0, cpu=0.0, processes=1.0):
    """Return a tick's columns: what the GPU did, and shares of time in which work waited."""
    return {
        GPU: {"gpu_sm_active_ratio": activity, "gpu_processes": processes},
        IO: {SOME: io if io is None else Rise(io * TICK)},
        CPU: {SOME: cpu if cpu is None else Rise(cpu * TICK)},
    }


def judged(script):
    """Judge runs of (seconds, columns) in ticks of a quarter second; return the engine."""
    engine = AlertEngine(OURS, {}, None, "")
    now = 0
    for seconds, entities in script:
        for _ in range(round(seconds / TICK)):
            engine.judge(node(now, entities))
            now += TICK_NS
    return engine


BUSY = host(0.9, 0.1, 0.1)
WAITS = host(0.01, io=0.6)

STARVED = [
    # 45 s of 5 minutes, however they are cut, if each gap lasts for half a second.
    ([(44, WAITS)], False),
    ([(45, WAITS)], True),
    ([(1, WAITS), (4, BUSY)] * 60, True),
    ([(0.5, WAITS), (2, BUSY)] * 120, True),
    ([(0.25, WAITS), (0.5, BUSY)] * 400, False),
    ([(1, WAITS), (7, BUSY)] * 60, False),
    ([(45, WAITS), (400, BUSY)], False),
    # Processors that are waited for count as well; a quiet host is not what the job waits for.
    ([(60, host(0.01, cpu=0.6))], True),
    ([(600, host(0.01, io=0.15, cpu=0.15))], False),
    ([(600, host(0.01))], False),
    # Pressure counts in the gaps alone: evaluation on the host while the GPU works is none.
    ([(10, host(0.01)), (10, host(0.9, io=0.9))] * 20, False),
    # A checkpoint of 40 s that writes with all it has, and one without a job.
    ([(40, host(0.0, io=0.95)), (560, BUSY)], False),
    ([(600, host(0.0, io=0.9, processes=0.0))], False),
    # What is not known is not held against the host.
    ([(600, host(None, io=0.9))], False),
    ([(600, host(0.0, io=0.9, processes=None))], False),
    ([(600, host(0.0, io=None))], False),
]


@pytest.mark.parametrize(("script", "expected"), STARVED)
def test_a_job_starves_if_it_waits_for_the_host(script, expected):
    """Gaps of the GPU's work, their share of five minutes, and what the host did in them."""
    assert ("input_starved" in firing(judged(script))) == expected


def test_without_sm_activity_the_driver_s_utilization_counts():
    """Older GPUs have no better measure."""
    columns = host(None, io=0.6)
    columns[GPU] = {"gpu_utilization_ratio": 0.0, "gpu_processes": 2.0}
    assert "input_starved" in firing(judged([(60, columns)]))


def told(text, entity=GPU, event="xid", times=1, age=0.0):
    """Return a function of a tick's end that makes an event of this head."""
    found = Found(entity, event, text, "text")
    return lambda end_ns: Event(end_ns - int(age * SECOND), entity, event, found.detail(times))


def logged(script, up=1.0):
    """Judge runs of (seconds, what is told in the first tick); return engine and event names."""
    engine = AlertEngine(OURS, {}, None, "")
    now, names = 0, []
    for seconds, events in script:
        for index in range(seconds):
            tick = node(now, {GPU: {"gpu_up": 1.0}, KMSG: {"source_up": up}}, length_ns=SECOND)
            tick.events += [make(tick.end_ns) for make in events] if index == 0 else []
            names += [event.name for event in engine.judge(tick)]
            now += SECOND
    return engine, names


XIDS = [
    ([told("79: critical")], {"gpu_xid"}),
    ([told("63: warning")], {"gpu_xid_warning"}),
    ([told("63: warning"), told("48: critical")], {"gpu_xid", "gpu_xid_warning"}),
    ([told("13: info", times=500), told("43: info"), told("109: info")], set()),
    ([told("45: info", times=160)], set()),
    ([told("4321: info")], set()),
    ([told("79: critical", age=3700)], set()),
    ([told("20034: critical", NIC, "sxid")], set()),
    ([told("79: critical", HOST)], set()),
    ([told("79: critical", event="gpu_recovery_action")], set()),
]


@pytest.mark.parametrize(("events", "expected"), XIDS)
def test_xids_fire_by_how_bad_they_are(events, expected):
    """At once; errors of programs, collateral, the unknown and the long past fire nothing."""
    engine, _ = logged([(200, ()), (1, events)])
    assert firing(engine) == expected


def test_an_xid_is_detected_at_once_and_over_in_an_hour():
    """The alert's value is how many there were; the last one counts for an hour."""
    engine, names = logged([(1, ()), (10, [told("48: critical", times=3)])])
    assert names[:1] == ["gpu_xid_detected"]
    (alert,) = [one for one in engine.alerts() if one.rule == "gpu_xid" and one.entity == GPU]
    assert (alert.state, alert.value, alert.severity) == ("firing", 3.0, "critical")
    engine, _ = logged([(3599, [told("48: critical")])])
    assert firing(engine) == {"gpu_xid"}
    engine, _ = logged([(3601, [told("48: critical")])])
    assert firing(engine) == set()


def test_an_old_xid_that_is_told_again_is_no_detection():
    """A daemon that was started anew judges what was, and records nothing for it."""
    _, names = logged([(1, [told("48: critical", age=60)])])
    assert "gpu_xid_detected" not in names
    assert "gpu_xid_firing" in names


def test_while_nobody_reads_the_log_nothing_is_said_of_xids():
    """An alert from before stays; there is no all-clear without a reader."""
    engine, _ = logged([(10, ())], up=0.0)
    values = {one.rule: one.value for one in engine.alerts() if one.entity == GPU}
    assert values["gpu_xid"] is None
    assert values["gpu_xid_warning"] is None


def pcie(severity, times=1):
    return told(severity, NIC, "pcie_error", times)


PCIE = [
    ([(200, ()), (1, [pcie("nonfatal")])], True),
    ([(200, ()), (1, [pcie("fatal")])], True),
    ([(200, ()), *[(60, [pcie("corrected", 100)])] * 10], True),
    ([(200, ()), *[(60, [pcie("corrected", 99)])] * 20], False),
    ([(200, ()), *[(60, [pcie("corrected", 500)])] * 9], False),
    ([(200, ()), (30, [pcie("corrected", 5000)]), (600, ())], False),
    ([(1, [pcie("fatal")]), (600, ())], False),  # while the machine starts
]


@pytest.mark.parametrize(("script", "expected"), PCIE)
def test_pcie_errors_fire_if_they_were_not_corrected_or_go_on(script, expected):
    """One that was not is enough; corrected ones in each of ten minutes; none of the start."""
    engine, _ = logged(script)
    assert ("pcie_errors" in firing(engine)) == expected


def test_a_device_is_known_once_it_erred():
    """No alerts are listed of devices that never did."""
    engine, _ = logged([(1, ())])
    assert not [one for one in engine.alerts() if one.rule == "pcie_errors"]
    engine, _ = logged([(200, ()), (1, [pcie("corrected")])])
    (alert,) = [one for one in engine.alerts() if one.rule == "pcie_errors"]
    assert (alert.entity, alert.state) == (NIC, "inactive")


def test_numbers_can_be_set():
    """The window of the rules is the config's."""
    rules = [rule for rule in OURS if rule.name == "gpu_xid"]
    engine = AlertEngine([replace(rules[0], window_seconds=10.0, hold_seconds=0.0)], {}, None, "")
    states = []
    for second in range(20):
        tick = node(second * SECOND, {KMSG: {"source_up": 1.0}, GPU: {}}, length_ns=SECOND)
        tick.events += [told("48: critical")(tick.end_ns)] if second == 2 else []
        engine.judge(tick)
        states.append(firing(engine))
    assert sum(bool(state) for state in states) == 10

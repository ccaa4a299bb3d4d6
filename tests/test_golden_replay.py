"""The golden replay: a fault recorded once gives the same windows and alerts at any speed."""

import math
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path

import pytest
from running import Running, wait_for

from gpuwatch.alerts import AlertEngine
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.feed import Feed
from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.recording import RecordingReader
from gpuwatch.replay import ticks
from gpuwatch.rules import RULES
from gpuwatch.sources import SOURCES
from gpuwatch.window import TICK_NS

SICK = "2"
RULE = "gpu_hw_thermal_slowdown"
RULES_CONFIG = f"[rules.{RULE}]\nwindow_seconds = 2.0\nhold_seconds = 0.5\n"
OVERRIDES = {RULE: {"window_seconds": 2.0, "hold_seconds": 0.5}}
SAMPLING = "[state]\nperiod_ms = 2.0\nbudget_ratio = 1.0\n"
FAULT = "[simulated]\ngpus = 4\nfault_after_seconds = 4.0\nfault_seconds = 1.0\n"
RECORDED = {f"{rule.name}_{what}" for rule in RULES for what in ("pending", "firing", "resolved")}
RECORDED |= {f"{rule.name}_detected" for rule in RULES}


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Let a GPU grow hot for a second in a real daemon and record it."""
    directory = tmp_path_factory.mktemp("golden")
    config = FAULT + SAMPLING
    with Running(directory, "--source", "simulated:thermal", config=config) as running:
        fault = wait_for(lambda: running.events("scenario_fault"), what="the fault")[0]
        wait_for(lambda: monotonic_ns() > fault["time_ns"] + 3.3 * SECOND_NS)
        command = [*(sys.executable, "-m", "gpuwatch", "record", "--last", "8s")]
        command += ["--path.runtime", str(running.runtime)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Path(printed.strip())


def plain(tick, shift_ns):
    """Return all that a tick's windows say, moved back in time, comparable where unknown."""
    flat = {}
    for entity, windows in tick.windows.items():
        for name, window in windows.items():
            start, end, *rest = astuple(window)
            values = ("unknown" if math.isnan(value) else value for value in rest)
            flat[str(entity), name] = (start - shift_ns, end - shift_ns, *values)
    for entity, histograms in tick.histograms.items():
        for name, histogram in histograms.items():
            flat[str(entity), name] = tuple(histogram)
    return flat


def judged(found, shift_ns):
    """Return what the rules say of ticks: (name, entity, time moved back)."""
    engine = AlertEngine(RULES, OVERRIDES, None, "")
    return [
        (event.name, event.entity, event.time_ns - shift_ns)
        for tick in found
        for event in engine.judge(tick)
    ]


def offline(path, seconds=None):
    reader = RecordingReader(path)
    try:
        return list(ticks(reader, seconds))
    finally:
        reader.close()


def test_twice_at_full_speed_is_the_same(recording):
    """Nothing of a replay hangs on when it runs, and the fault is in it."""
    one, two = offline(recording), offline(recording)

    assert [plain(tick, 0) for tick in one] == [plain(tick, 0) for tick in two]
    assert judged(one, 0) == judged(two, 0)
    told = [(name, entity.id) for name, entity, _ in judged(one, 0) if entity.kind == "gpu"]
    assert (f"{RULE}_detected", SICK) in told
    assert (f"{RULE}_firing", SICK) in told
    assert (f"{RULE}_resolved", SICK) in told
    assert {entity for _, entity in told} == {SICK}
    assert [event.name for tick in one for event in tick.events] == ["scenario_fault"]


class NoNumbers:
    """A replay has the recorded numbers: no store is asked."""

    def gpu_numbers(self, _pci_bus_ids):
        raise AssertionError("asked for a number")


def test_real_time_gives_the_windows_and_alerts_of_full_speed(recording, tmp_path):
    """A daemon that replays, and a second reader of its rings, see what full speed gives.

    All windows, histograms and alerts are the same but for the time, over the seam and into the
    second round.
    """
    length = len(offline(recording)) * TICK_NS / SECOND_NS
    wanted = offline(recording, length + 1.5)
    with Running(
        tmp_path, "--source", f"replay:{recording}", config=RULES_CONFIG, ready=False
    ) as running:
        manifests = [running.runtime / f"{duty}.json" for duty in SOURCES]
        wait_for(lambda: all(path.exists() for path in manifests), what="the manifests")
        feed = Feed(running.runtime, NoNumbers(), {"nvml_state": "state"}, 60.0)
        found = []
        while len(found) < len(wanted):
            found += feed.poll(monotonic_ns())
            time.sleep(0.05)
        found = found[: len(wanted)]
        shift = found[0].start_ns - wanted[0].start_ns
        last = found[-1].end_ns
        wait_for(lambda: monotonic_ns() > last + SECOND_NS)  # the daemon's grace is shorter
        told = [
            (event["name"], tuple(event["entity"]), event["time_ns"] - shift)
            for event in running.status()["events"]
            if event["name"] in RECORDED and event["time_ns"] <= last
        ]

    assert shift % TICK_NS == 0
    for one, other in zip(wanted, found, strict=True):
        assert plain(other, shift) == plain(one, 0)
    expected = judged(wanted, 0)
    # Of one tick in no order: rings come in that of the directory.
    assert sorted(judged(found, shift)) == sorted(expected)
    assert sorted(told) == sorted((name, tuple(entity), at) for name, entity, at in expected)


def test_half_an_hour_of_the_bundled_recording_is_quiet():
    """A healthy training load at its power limit yields nothing above info."""
    reader = RecordingReader(BUNDLED_RECORDING)
    engine = AlertEngine(RULES, {}, None, "")
    severity = {rule.name: rule.severity for rule in RULES}
    fired = []
    judged_ns = 0
    for tick in ticks(reader, 1800):
        judged_ns = judged_ns + tick.end_ns - tick.start_ns
        fired += [event for event in engine.judge(tick) if event.name.endswith("_firing")]
    reader.close()

    assert judged_ns == 1800 * SECOND_NS
    assert {severity[event.name.removesuffix("_firing")] for event in fired} <= {"info"}

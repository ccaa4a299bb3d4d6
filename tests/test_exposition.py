"""The metrics page: what is put in comes out of a parser, and nothing that is not known."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from populated import FIRST_TICK, SOURCE, columns, infos, later, snapshot
from prometheus_client.parser import text_string_to_metric_families

from gpuwatch import gpu_signals as signals
from gpuwatch.exposition import Exposition
from gpuwatch.families import MODES
from gpuwatch.page import Line, Page, header
from gpuwatch.presence import Presence
from gpuwatch.signals import Column, Entity, Kind, Signal, column_name, quote
from gpuwatch.snapshot import ChildState, Snapshot, SourceState
from gpuwatch.source import EntityInfo
from gpuwatch.totals import Totals
from gpuwatch.window import TICK_NS, Tick

GPU = Entity("gpu", "0")
POWER = "gpuwatch_gpu_power_watts"
IDENTITY = {"gpu": "0", "uuid": "GPU-0000-0"}


@dataclass(frozen=True)
class FakeAlert:
    rule: str
    entity: Entity
    severity: str
    state: str


class Pages:
    """An exposition that sees all snapshots, as the daemon lets it."""

    def __init__(self, **options):
        self._presence, self._exposition = Presence(), Exposition(**options)

    def render(self, snapshot_):
        return self._exposition.render(self._presence.complete(snapshot_))


def samples(text):
    """Return {(name, labels): value} as the parser reads the page; no series may come twice."""
    found = [
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def rendered(snapshot_, exposition=None):
    """Return the samples of a snapshot's page."""
    return samples((exposition or Pages()).render(snapshot_).decode())


def value(found, name, /, **labels):
    """Return a sample's value, None if it is not there."""
    return found.get((name, frozenset(labels.items())))


def names(found):
    """Return the names of all samples."""
    return {name for name, _ in found}


hostile = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["\\", '"', "\n", '\\"', "\\n", '{a="b"} 1', "# HELP x", " ", "\r\n", "é\u2028\x85", '",x="']
)


@given(hostile, hostile, hostile, hostile, hostile)
@settings(deadline=None)
def test_hostile_label_values_come_back_unchanged(uuid, name, error, rule, severity):
    """Whatever is in a name or an id, the parser reads the same labels and values."""
    found = rendered(
        Snapshot(
            totals=Totals(),
            entities=[EntityInfo(GPU, {"uuid": uuid, "name": name})],
            alerts=[FakeAlert(rule, GPU, severity, "firing")],
            transitions={(rule, "firing"): 3},
            sources={"s" + error: SourceState(errors={error: 7})},
            children={"d" + error: ChildState(restarts=2)},
        )
    )
    identity = {"gpu": "0"} | ({"uuid": uuid} if uuid else {})
    assert value(found, "gpuwatch_gpu_info", **identity, name=name) == 1
    assert value(found, "gpuwatch_alert_firing", **identity, alert=rule, severity=severity) == 1
    assert value(found, "gpuwatch_alert_transitions_total", alert=rule, to="firing") == 3
    assert value(found, "gpuwatch_source_errors_total", source="s" + error, error=error) == 7
    assert value(found, "gpuwatch_child_restarts_total", duty="d" + error) == 2


numeric = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)


@given(st.dictionaries(hostile, numeric, min_size=1), hostile.filter(bool))
def test_values_come_back_exactly(values, text):
    """Every finite number is read back as the same number, by its own label."""
    page = Page(limit=1000)
    for label, number in values.items():
        page.put(Line("gpuwatch_x", f"gpuwatch_x{{a={quote(label)}}} "), number)
    found = samples(page.text({"gpuwatch_x": header("gpuwatch_x", "gauge", text)}))
    assert found == {
        ("gpuwatch_x", frozenset({("a", label)})): number for label, number in values.items()
    }


@pytest.mark.parametrize(
    ("given_value", "text"),
    [(True, "1"), (np.float64(0.5), "0.5"), (np.int64(3), "3.0"), (2**62, str(2**62))],
)
def test_a_number_of_any_type_is_written_as_a_number(given_value, text):
    """Truth values and numpy's numbers look like plain ones."""
    page = Page(limit=1)
    page.put(Line("x", "x "), given_value)
    assert page.families["x"] == {"x ": text}


def test_a_lone_surrogate_does_not_break_the_page():
    """A name that is no valid text costs its odd characters, not the page."""
    entities = [EntityInfo(GPU, {"name": "H200\udc80"})]
    found = rendered(Snapshot(totals=Totals(), entities=entities))
    assert value(found, "gpuwatch_gpu_info", gpu="0", name="H200?") == 1


def test_each_family_has_one_help_and_type_right_before_its_samples():
    """HELP, TYPE, samples; never again the same family; help is never empty."""
    seen = Counter()
    family = kind = None
    for line in Pages().render(snapshot(2)).decode().splitlines():
        if line.startswith("# HELP "):
            family, text = line.removeprefix("# HELP ").split(" ", 1)
            seen[family] += 1
            kind = None
            assert text.strip()
        elif line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            assert name == family
        else:
            name = re.match(r"[a-z0-9_]+", line)[0]
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            assert name in {family + suffix for suffix in suffixes}
    assert set(seen.values()) == {1}


def test_counters_and_only_they_end_in_total():
    """What Prometheus expects of names."""
    for family in re.findall(r"# TYPE (\S+ \S+)", Pages().render(snapshot(1)).decode()):
        name, kind = family.split(" ")
        assert name.endswith("_total") == (kind == "counter"), family


def test_what_is_not_known_is_absent():
    """No NaN, no infinity and no 0 stands for an unknown value."""
    unknown = SourceState(None, math.nan, math.inf)
    before = replace(
        snapshot(1),
        ticks=(),
        nvml_up=None,
        gpus_pci=None,
        sources={"nvml_state": unknown},
        constants=[(Column(GPU, signals.POWER_LIMIT, "enforced"), math.nan)],
    )
    text = Pages().render(before).decode()
    assert not re.search(r" (nan|[+-]?inf)$", text, re.IGNORECASE | re.MULTILINE)
    found = samples(text)
    assert not names(found) & {
        POWER,
        f"{POWER}_mean",
        "gpuwatch_gpu_up",
        "gpuwatch_nvml_up",
        "gpuwatch_gpus_pci",
        "gpuwatch_source_age_seconds",
        "gpuwatch_source_period_seconds",
        "gpuwatch_source_period_achieved_seconds",
        "gpuwatch_gpu_power_limit_watts",
    }


def test_an_empty_snapshot_has_a_page():
    """Before anything is known the page says who serves it."""
    found = rendered(Snapshot(totals=Totals()))
    assert "gpuwatch_build_info" in names(found)
    assert "process_resident_memory_bytes" in names(found)


def test_values_and_statistics_are_those_of_the_windows():
    """A gauge shows the newest window's last value, statistics the trailing minute."""
    shot = snapshot(1)
    found = rendered(shot)
    assert value(found, POWER, **IDENTITY) == 512.25
    assert value(found, f"{POWER}_max", **IDENTITY) == 512.25
    assert value(found, "gpuwatch_gpu_clock_hertz_mean", **IDENTITY, clock="sm") == 1.5e9
    assert value(found, "gpuwatch_gpu_clock_hertz_mean", **IDENTITY, clock="memory") is None
    cap = {**IDENTITY, "reason": "sw_power_cap"}
    assert value(found, "gpuwatch_gpu_throttle_seconds_total", **cap) == 0.5
    assert value(found, "gpuwatch_gpu_throttle_events_total", **cap) == 2
    assert value(found, "gpuwatch_gpu_lost_clock_seconds_total", **IDENTITY) == 0.125
    assert value(found, "gpuwatch_source_up", source="nvml_state") == 1


def test_a_time_histogram_is_a_share_of_time():
    """Bucket by count is the share of time at or below the bound."""
    found = rendered(snapshot(1))
    name = "gpuwatch_gpu_clock_share_hertz"
    assert value(found, f"{name}_count", **IDENTITY) == 500_000
    assert value(found, f"{name}_bucket", **IDENTITY, le="1.4e+09") == 0
    assert value(found, f"{name}_bucket", **IDENTITY, le="1.6e+09") == 500_000
    assert value(found, f"{name}_bucket", **IDENTITY, le="+Inf") == 500_000
    assert value(found, f"{name}_sum", **IDENTITY) == 1.5e9 * 500_000


def test_a_reason_is_active_if_it_was_at_any_time_in_the_newest_tick():
    """A reason that came and went within the tick shows as 1."""
    shot = snapshot(1)
    name = column_name(signals.THROTTLE, "hw_slowdown")
    windows = shot.ticks[0].windows[GPU]
    windows[name] = replace(windows[name], maximum=1.0, last=0.0)
    found = rendered(shot)
    active = "gpuwatch_gpu_throttle_active"
    assert value(found, active, **IDENTITY, reason="hw_slowdown") == 1
    assert value(found, active, **IDENTITY, reason="gpu_idle") == 0


def test_declared_values_are_zero_from_the_first_page():
    """Reasons and alerts are there before they ever happened."""
    totals = Totals()
    totals.attach(columns(1))
    shot = replace(snapshot(1), totals=totals, ticks=())
    found = rendered(shot)
    for _, reason in signals.REASONS:
        labels = {**IDENTITY, "reason": reason}
        assert value(found, "gpuwatch_gpu_throttle_seconds_total", **labels) == 0
        assert value(found, "gpuwatch_gpu_throttle_events_total", **labels) == 0
    lost = {**IDENTITY, "alert": "gpu_lost", "severity": "critical"}
    assert value(found, "gpuwatch_alert_firing", **lost) == 0
    assert value(found, "gpuwatch_alert_transitions_total", alert="gpu_lost", to="firing") == 0


def test_a_gpu_that_falls_silent_loses_its_gauges_but_not_its_totals():
    """One tick without data is bridged, the second is not; totals and gpu_up stay."""
    exposition, shot = Pages(), snapshot(1)
    shot = later(shot, FIRST_TICK + 2, covered_ns=0)
    assert value(rendered(shot, exposition), POWER, **IDENTITY) == 512.25
    shot = later(shot, FIRST_TICK + 3, covered_ns=0)
    found = rendered(shot, exposition)
    assert value(found, POWER, **IDENTITY) is None
    assert value(found, f"{POWER}_max", **IDENTITY) is None
    assert value(found, "gpuwatch_gpu_clock_share_hertz_count", **IDENTITY) == 500_000
    cap = {**IDENTITY, "reason": "sw_power_cap"}
    assert value(found, "gpuwatch_gpu_throttle_seconds_total", **cap) == 0.5
    assert value(found, "gpuwatch_gpu_throttle_active", **cap) is None


def test_gpus_visible_counts_what_gpu_up_says():
    """While the sampler is silent the last word counts; a GPU never heard of makes it unknown."""
    exposition, shot = Pages(), snapshot(2)
    seen = []
    for step in range(1, 25):
        shot = later(shot, FIRST_TICK + 1 + step, covered_ns=0)
        found = rendered(shot, exposition)
        ups = [amount for (name, _), amount in found.items() if name == "gpuwatch_gpu_up"]
        seen.append(value(found, "gpuwatch_gpus_visible"))
        assert seen[-1] == sum(ups)
    assert (seen[0], seen[-1]) == (2, 0)

    silent = replace(snapshot(2), ticks=(Tick(0, TICK_NS),))
    assert value(rendered(silent), "gpuwatch_gpus_visible") is None


def test_gpu_up_outlasts_a_restart_of_the_sampler_and_no_more():
    """The last word counts for five seconds of silence, then the GPU is down."""
    exposition, shot = Pages(), snapshot(1)
    ups = []
    for step in range(1, 25):
        ups.append(value(rendered(shot, exposition), "gpuwatch_gpu_up", **IDENTITY))
        shot = later(shot, FIRST_TICK + 1 + step, covered_ns=0)
    assert ups == [1] * 21 + [0] * 3
    limits = {name for name in names(rendered(shot, exposition)) if "limit" in name}
    assert not limits, "what a GPU that is down could do is not known"


def test_a_gpu_never_heard_of_is_not_called_down_at_once():
    """Its first sample may still be on the way."""
    totals, entities = Totals(), infos(1)
    exposition, ups = Pages(), []
    for number in range(FIRST_TICK, FIRST_TICK + 23):
        tick = Tick((number - 1) * TICK_NS, number * TICK_NS)
        shot = Snapshot(totals=totals, ticks=(tick,), entities=entities)
        ups.append(value(rendered(shot, exposition), "gpuwatch_gpu_up", **IDENTITY))
    assert ups == [None] * 21 + [0] * 2


def test_released_gpus_are_neither_up_nor_down():
    """A GPU left to another tool is not judged."""
    found = rendered(replace(snapshot(1), released={"gpus": True}))
    assert value(found, "gpuwatch_released", what="gpus") == 1
    assert "gpuwatch_gpu_up" not in names(found)


def test_only_a_firing_alert_is_1():
    """Pending is 0; labels that do not apply are left out."""
    found = rendered(
        Snapshot(
            totals=Totals(),
            alerts=[
                FakeAlert("source_failing", SOURCE, "warning", "firing"),
                FakeAlert("clock_step", Entity("host", ""), "info", "pending"),
            ],
        )
    )
    firing = "gpuwatch_alert_firing"
    failing = {"alert": "source_failing", "severity": "warning", "source": "nvml_state"}
    assert value(found, firing, **failing) == 1
    assert value(found, firing, alert="clock_step", severity="info") == 0


def test_hardware_counters_are_served_as_counters():
    """A counter column passes through with its own type."""
    energy = Signal("gpu_energy_joules_total", "Energy.", Kind.COUNTER, "joules")
    totals = Totals()
    totals.attach([Column(GPU, energy)])
    totals.counters[GPU, energy.name] = 2.0**53
    shot = Snapshot(totals=totals, columns=[Column(GPU, energy)], entities=infos(1))
    text = Pages().render(shot).decode()
    assert "# TYPE gpuwatch_gpu_energy_joules_total counter\n" in text
    assert value(samples(text), "gpuwatch_gpu_energy_joules_total", **IDENTITY) == 2**53


def test_a_series_given_twice_is_served_once_counted_and_logged_once(caplog):
    """The first one is kept, and the log shows both values."""
    limit = Column(GPU, signals.POWER_LIMIT, "enforced")
    shot = replace(snapshot(1), constants=[(limit, 700.0), (limit, 500.0)])
    exposition = Pages()
    found = rendered(shot, exposition)
    assert value(found, "gpuwatch_gpu_power_limit_watts", **IDENTITY, limit="enforced") == 700.0
    assert value(found, "gpuwatch_duplicate_series_total") == 1
    assert value(rendered(shot, exposition), "gpuwatch_duplicate_series_total") == 2
    [record] = caplog.records
    assert "kept 700.0, left out 500.0" in record.getMessage()


def test_a_page_is_cut_at_the_limit_and_says_so(caplog):
    """Self metrics come first, histograms stay whole, what is left out is counted."""
    whole = rendered(snapshot(8))
    exposition = Pages(series_limit=300)
    found = rendered(snapshot(8), exposition)
    dropped = value(found, "gpuwatch_series_dropped_total")
    assert 250 < len(found) <= 302
    assert len(found) + dropped == len(whole)
    assert "gpuwatch_build_info" in names(found)
    for name, labels in found:
        if name.endswith("_bucket"):
            others = dict(labels)
            del others["le"]
            assert value(found, name.replace("_bucket", "_count"), **others) is not None
    exposition.render(snapshot(8))
    assert len(caplog.records) == 1


def test_a_new_uuid_takes_the_place_of_the_old():
    """Lines kept from before do not outlive what is known of the entity."""
    exposition, shot = Pages(), snapshot(1)
    rendered(shot, exposition)
    changed = replace(shot, entities=[EntityInfo(GPU, {"uuid": "GPU-new"})])
    found = rendered(changed, exposition)
    assert value(found, POWER, gpu="0", uuid="GPU-new") == 512.25
    assert value(found, POWER, **IDENTITY) is None


def test_a_gpu_that_cannot_tell_its_uuid_keeps_its_series():
    """A new sampler without the sick GPU knows only its address; labels stay as they were."""
    exposition, shot = Pages(), snapshot(1)
    rendered(shot, exposition)
    address = {"pci_bus_id": "0000:10:00.0"}
    found = rendered(replace(shot, entities=[EntityInfo(GPU, address)]), exposition)
    assert value(found, "gpuwatch_gpu_up", **IDENTITY) == 1
    labels = infos(1)[0].labels
    fixed = {label: text for label, text in labels.items() if label not in MODES}
    assert value(found, "gpuwatch_gpu_info", **fixed) == 1
    modes = {label: text for label, text in labels.items() if label in MODES}
    assert value(found, "gpuwatch_gpu_mode_info", **IDENTITY, **modes) == 1


def test_a_column_of_two_rings_is_one_series():
    """Old and new ring of a restarted sampler feed the same windows."""
    shot = snapshot(1)
    twice = replace(shot, columns=[*shot.columns, *shot.columns])
    found = rendered(twice)
    assert value(found, "gpuwatch_duplicate_series_total") == 0
    assert found.keys() == rendered(shot).keys()

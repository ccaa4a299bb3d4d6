"""Totals only grow, lose no time, and the trailing minute is what a recount gives."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from populated import FIRST_TICK, window

from gpuwatch import gpu_signals as signals
from gpuwatch.clock import SECOND_NS
from gpuwatch.signals import HOST, Column, Entity, Event, Kind, Signal, Total, column_name
from gpuwatch.totals import (
    DURATION_BOUNDS,
    SM_CLOCK,
    SM_CLOCK_LIMIT,
    Durations,
    TimeShares,
    Totals,
)
from gpuwatch.window import TICK_NS, Rows, Tick, TimeHistogram, Window

GPU = Entity("gpu", "0")
POWER_CAP = column_name(signals.THROTTLE, "sw_power_cap")
ENERGY = Signal("gpu_energy_joules_total", "Energy.", Kind.COUNTER, "joules", scale=1e-3)
COLUMNS = (
    Column(GPU, signals.THROTTLE),
    Column(GPU, ENERGY),
    Column(GPU, signals.CLOCK, "sm"),
    Column(GPU, signals.POWER),
    Column(GPU, signals.UTILIZATION),
)
HISTOGRAM = signals.CLOCK.histogram.name

covered = st.one_of(st.just(0), st.just(TICK_NS), st.integers(1, TICK_NS))
moments = st.lists(
    st.fixed_dictionaries(
        {
            "skipped": st.one_of(st.just(0), st.integers(0, 500)),
            "covered_ns": covered,
            "clock": st.floats(1e6, 3e9),
            "power": st.floats(1.0, 1000.0),
            "busy": st.floats(0.0, 1.0),
            "active_ns": st.integers(0, TICK_NS),
            "raised": st.integers(0, 9),
            "late": st.lists(st.floats(-1e-3, 2.0) | st.just(math.nan), max_size=4),
        }
    ),
    min_size=1,
    max_size=40,
)


def attached():
    """Return totals that follow the columns above."""
    totals = Totals()
    totals.attach(COLUMNS)
    return totals


def one_tick(number, windows, limit=2e9):
    """Return a tick of one GPU."""
    tick = Tick((number - 1) * TICK_NS, number * TICK_NS, windows={GPU: windows})
    if limit is not None:
        tick.constants[GPU] = {SM_CLOCK_LIMIT: limit}
    return tick


def ticks_of(moments):
    """Return the ticks of a drawn history."""
    number, energy, ticks = FIRST_TICK, 0.0, []
    for moment in moments:
        number += 1 + moment["skipped"]
        energy += moment["power"]
        known_ns = moment["covered_ns"]
        active_ns = min(moment["active_ns"], known_ns)
        bits = window(number, 0.0, known_ns, increase=float(moment["raised"]))
        tick = one_tick(
            number,
            {
                POWER_CAP: Window(**{**fields(bits), "integral": float(active_ns)}),
                ENERGY.name: window(number, energy, known_ns),
                SM_CLOCK: window(number, moment["clock"], known_ns),
                signals.POWER.name: window(number, moment["power"], known_ns),
                signals.UTILIZATION.name: window(number, moment["busy"], known_ns),
            },
        )
        buckets = [0] * 12
        buckets[int(np.searchsorted(signals.CLOCK.histogram.bounds, moment["clock"]))] = known_ns
        tick.histograms[GPU] = {
            HISTOGRAM: TimeHistogram(tuple(buckets), moment["clock"] * known_ns)
        }
        late = np.array(moment["late"], np.float64)
        tick.rows = [Rows("state", "nvml_state", 1_000_000, late, late, len(late))]
        tick.events = [Event(tick.end_ns, HOST, "clock_step")]
        ticks.append(tick)
    return ticks


def fields(one):
    """Return a window's fields."""
    return {name: getattr(one, name) for name in Window.__slots__}


def numbers(totals):
    """Return everything in `totals` that must not fall, by a name."""
    found = {("missing", key): value for key, value in totals.missing.items()}
    found |= {("event", key): value for key, value in totals.events.items()}
    found |= {("lost", key): value for key, value in totals.lost_clock_ns.items()}
    found |= {("counter", k): v for k, v in totals.counters.items() if not math.isnan(v)}
    for key, bit in totals.bits.items():
        found |= {("active", key): bit.active_ns, ("raised", key): bit.events}
    for kind in ("shares", "late", "read"):
        for key, histogram in getattr(totals, kind).items():
            found[kind, key, "sum"] = histogram.sum
            found |= {(kind, key, i): count for i, count in enumerate(histogram.cumulative)}
    return found


@given(moments)
@settings(deadline=None)
def test_no_total_ever_falls(moments):
    """Whatever is covered, skipped or unknown, every number is at least what it was."""
    totals = attached()
    before = numbers(totals)
    for tick in ticks_of(moments):
        totals.add(tick)
        after = numbers(totals)
        assert all(after[name] >= value for name, value in before.items())
        before = after


@given(moments)
@settings(deadline=None)
def test_totals_are_the_sums_of_what_the_ticks_say(moments):
    """Active time, raises, missing reads and events are exact sums over the ticks."""
    totals = attached()
    ticks = ticks_of(moments)
    for tick in ticks:
        totals.add(tick)
    windows = [tick.windows[GPU][POWER_CAP] for tick in ticks]
    assert totals.bits[GPU, POWER_CAP].active_ns == sum(int(one.integral) for one in windows)
    assert totals.bits[GPU, POWER_CAP].events == sum(one.increase for one in windows)
    assert totals.missing["nvml_state"] == sum(tick.rows[0].missing for tick in ticks)
    assert totals.events["clock_step"] == len(ticks)


@given(moments)
@settings(deadline=None)
def test_a_time_histogram_counts_every_covered_microsecond_once(moments):
    """Buckets and count are whole microseconds; what is left over is under one of them."""
    totals = attached()
    ticks = ticks_of(moments)
    for tick in ticks:
        totals.add(tick)
    shares = totals.shares[GPU, HISTOGRAM]
    covered_ns = sum(tick.windows[GPU][SM_CLOCK].covered_ns for tick in ticks)
    counts = shares.cumulative
    steps = np.diff([0, *counts])
    assert (steps >= 0).all()
    assert steps.sum() == counts[-1] == covered_ns // 1000
    for index, bound in enumerate(signals.CLOCK.histogram.bounds):
        below_ns = sum(
            tick.windows[GPU][SM_CLOCK].covered_ns
            for tick, moment in zip(ticks, moments, strict=True)
            if moment["clock"] <= bound
        )
        assert counts[index] == below_ns // 1000
    integral = sum(tick.histograms[GPU][HISTOGRAM].integral for tick in ticks)
    assert shares.sum == pytest.approx(integral / 1000)


def test_remainders_of_a_microsecond_are_carried():
    """A thousand slices of 999 ns are 999 microseconds, not none."""
    shares = TimeShares((1.0,))
    for _ in range(1000):
        shares.add(TimeHistogram((999, 0), 999.0))
    assert shares.cumulative == [999, 999]
    assert shares.sum == pytest.approx(999.0)


@given(moments)
@settings(deadline=None)
def test_the_trailing_minute_equals_a_recount(moments):
    """Minimum, maximum and mean are those of the windows that ended within the last 60 s."""
    totals = attached()
    seen = []
    for tick in ticks_of(moments):
        totals.add(tick)
        seen.append(tick)
        recent = [
            one.windows[GPU][signals.POWER.name]
            for one in seen
            if one.end_ns > tick.end_ns - 60 * SECOND_NS
        ]
        known = [one for one in recent if one.covered_ns]
        statistics = totals.trailing.get(GPU, signals.POWER.name)
        if not known:
            assert statistics is None
            continue
        assert statistics.minimum == min(one.minimum for one in known)
        assert statistics.maximum == max(one.maximum for one in known)
        mean = sum(one.integral for one in known) / sum(one.covered_ns for one in known)
        assert statistics.mean == pytest.approx(mean, rel=1e-12)


def test_the_trailing_minute_begins_anew_when_time_goes_back():
    """A feeder whose clock starts again does not mix two times."""
    totals = attached()
    totals.add(one_tick(FIRST_TICK, {signals.POWER.name: window(FIRST_TICK, 900.0)}))
    totals.add(one_tick(FIRST_TICK - 50, {signals.POWER.name: window(FIRST_TICK - 50, 100.0)}))
    assert totals.trailing.get(GPU, signals.POWER.name) == (100.0, 100.0, 100.0)


@given(st.lists(st.floats(0.0, 5.0) | st.sampled_from(DURATION_BOUNDS), max_size=50))
def test_durations_count_by_inclusive_bounds(seconds):
    """A bucket holds what is at or below its bound; the last one holds all."""
    durations = Durations()
    durations.add(np.array(seconds, np.float64))
    bounds = (*DURATION_BOUNDS, math.inf)
    assert durations.cumulative == [sum(one <= bound for one in seconds) for bound in bounds]
    assert durations.sum == pytest.approx(sum(seconds), abs=1e-7)


def test_declared_reasons_count_from_zero_before_the_first_tick():
    """Every reason is there at 0 as soon as the column is, others when they are seen."""
    totals = attached()
    assert {name for _, name in totals.bits} == {
        column_name(signals.THROTTLE, reason) for _, reason in signals.REASONS
    }
    other = column_name(signals.THROTTLE, "unknown_0x200")
    totals.add(one_tick(FIRST_TICK, {other: window(FIRST_TICK, 1.0, increase=1.0)}))
    assert totals.bits[GPU, other].active_ns == TICK_NS


def test_attaching_again_forgets_nothing():
    """A ring of a restarted sampler has the same columns: totals go on."""
    totals = attached()
    totals.add(one_tick(FIRST_TICK, {POWER_CAP: window(FIRST_TICK, 1.0)}))
    totals.attach(COLUMNS)
    assert totals.bits[GPU, POWER_CAP].active_ns == TICK_NS


@pytest.mark.parametrize(
    ("activity", "clock", "limit", "lost_ns"),
    [
        ({"gpu_utilization_ratio": 0.9}, 1.5e9, 2e9, TICK_NS // 4),
        ({"gpu_utilization_ratio": 0.2}, 1.5e9, 2e9, 0),
        ({}, 1.5e9, 2e9, 0),
        ({"gpu_utilization_ratio": 0.9, "gpu_sm_active_ratio": 0.1}, 1.5e9, 2e9, 0),
        ({"gpu_utilization_ratio": 0.0, "gpu_sm_active_ratio": 0.9}, 1.5e9, 2e9, TICK_NS // 4),
        ({"gpu_utilization_ratio": 0.9}, 2.1e9, 2e9, 0),
        ({"gpu_utilization_ratio": 0.9}, 1.5e9, None, None),
    ],
    ids=["busy", "idle", "unknown work", "idle SMs", "busy SMs", "above limit", "no limit"],
)
def test_lost_clock_counts_only_while_busy(activity, clock, limit, lost_ns):
    """It needs known work above a fifth and a known limit, and never turns negative."""
    totals = attached()
    windows = {name: window(FIRST_TICK, value) for name, value in activity.items()}
    windows[SM_CLOCK] = window(FIRST_TICK, clock)
    totals.add(one_tick(FIRST_TICK, windows, limit))
    assert totals.lost_clock_ns.get(GPU) == lost_ns


def test_unknown_clock_is_not_lost_clock():
    """Time without a known clock counts neither way."""
    totals = attached()
    windows = {
        "gpu_utilization_ratio": window(FIRST_TICK, 0.9),
        SM_CLOCK: window(FIRST_TICK, 1e9, covered_ns=TICK_NS // 2),
    }
    totals.add(one_tick(FIRST_TICK, windows))
    assert totals.lost_clock_ns[GPU] == TICK_NS // 4


def test_a_hardware_counter_passes_through_and_stays_while_unknown():
    """The newest reading counts; a tick without one leaves it."""
    totals = attached()
    assert math.isnan(totals.counters[GPU, ENERGY.name])
    totals.add(one_tick(FIRST_TICK, {ENERGY.name: window(FIRST_TICK, 12.5)}))
    totals.add(one_tick(FIRST_TICK + 1, {ENERGY.name: window(FIRST_TICK + 1, 0.0, 0)}))
    assert totals.counters[GPU, ENERGY.name] == 12.5


def test_a_reset_of_the_hardware_is_told():
    """The one way for a total to fall is an event, which names the counters."""
    totals = attached()
    told = []
    for number, joules in enumerate((12.5, 13.5, 0.5, 0.75)):
        tick = one_tick(FIRST_TICK + number, {ENERGY.name: window(FIRST_TICK + number, joules)})
        told += totals.add(tick)
    assert told == [Event((FIRST_TICK + 2) * TICK_NS, GPU, "counters_reset", ENERGY.name)]
    assert totals.counters[GPU, ENERGY.name] == 0.75


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30
    )
)
def test_what_a_sampler_counts_is_carried_over_to_the_next(steps):
    """However often a sampler begins anew, and however low: no total falls, no rise is invented."""
    sent = Signal("sent_total", "Sent.", Kind.COUNTER, "", total=Total.CARRIED)
    totals = Totals()
    totals.attach([Column(GPU, sent)])
    count, shown, rises = 1000, 0.0, 0
    for number, (anew, at, rise) in enumerate(steps, FIRST_TICK):
        count = at if anew else count + rise
        rises += rise
        one = window(number, float(count))
        one.increase = 0.0 if anew else float(rise)
        assert totals.add(one_tick(number, {sent.name: one})) == []
        before, shown = shown, totals.counters[GPU, sent.name]
        assert shown >= before
        if not anew and before:
            assert shown == before + rise
    assert shown <= 1000 + rises + 50


@given(moments)
@settings(deadline=None)
def test_frozen_totals_stay_as_they_were(moments):
    """Another thread may read them while the next ticks are taken in."""
    totals = attached()
    kept = []
    for tick in ticks_of(moments):
        totals.add(tick)
        frozen = totals.frozen()
        kept.append((frozen, numbers(frozen), frozen.trailing.get(GPU, signals.POWER.name)))
        assert kept[-1][1] == numbers(totals)
    for frozen, counted, trailing in kept:
        assert numbers(frozen) == counted
        assert frozen.trailing.get(GPU, signals.POWER.name) == trailing


def test_what_a_ring_has_no_more_is_not_missed():
    """A counter that is left out, or turned off, counts no time; one whose ring is gone does."""
    read, written, pcie = (
        Signal(f"gpu_{name}_bytes_total", "B.", Kind.COUNTER, "bytes", total=Total.COVERED)
        for name in ("read", "written", "pcie")
    )
    totals = Totals()
    totals.attach([Column(GPU, pcie)], "nvml")
    totals.attach([Column(GPU, read), Column(GPU, written), Column(GPU, pcie)], "pm0")

    def tick(number, *names):
        totals.add(one_tick(number, {name: window(number, 1.0, increase=1.0) for name in names}))

    every = [one.name for one in (read, written, pcie)]
    tick(1, *every)
    tick(2)
    assert {totals.uncovered_ns[GPU, name] for name in every} == {TICK_NS}
    totals.attach([Column(GPU, read)], "pm0")
    for number in range(3, 6):
        tick(number, read.name)
    assert totals.uncovered_ns[GPU, read.name] == TICK_NS
    assert totals.uncovered_ns[GPU, written.name] == TICK_NS
    assert totals.uncovered_ns[GPU, pcie.name] == 4 * TICK_NS  # NVML's ring still has it
    assert totals.counters[GPU, written.name] == 1.0

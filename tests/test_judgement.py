"""Judgement: what courses of readings say, against scipy and against what they must bear."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gpuwatch.judgement import (
    CLEAR_LOSS,
    CREEP_CLEAR_LOSS,
    CREEP_LOSS,
    LEARNED,
    LEARNING_LOSS,
    LOOK_READINGS,
    LOSS,
    RETEST_SECONDS,
    SEED,
    SIGMA_FLOOR,
    SIGMAS,
    SLACK,
    SLACK_SIGMAS,
    STEP_SIGMAS,
    SUM_SIGMAS,
    WINDOW,
    Course,
    Point,
    merged,
    scatter,
)

PERIOD = 1800.0
SPEED = 784e12
CLOCK = 1.98e9

speeds = st.floats(1e9, 1e16)


class Runs:
    """A course that is fed a reading each half hour, and the retests that it asks for."""

    def __init__(self, seed=1, cv=0.003):
        self.course = Course()
        self.number = 0
        self.opinion = None
        self._generator = np.random.default_rng(seed)
        self._cv = cv

    def run(self, count=1, share=1.0, clock=1.0, frozen=False, again=None):
        """Take looks at this share of the usual speed; `again` is the share in the retests."""
        for _ in range(count):
            now = self.number * PERIOD
            self.number += 1
            self._read(now, share, clock, frozen)
            while self.opinion.retest:
                now += 10
                self._read(now, share if again is None else again, clock, frozen)
        return self.opinion

    def _read(self, now, share, clock, frozen):
        speed = SPEED * share * (1 + self._cv * self._generator.standard_normal())
        hertz = CLOCK * clock
        self.opinion = self.course.push(Point(now, speed, speed / hertz, hertz), frozen=frozen)


@given(st.lists(speeds, min_size=1, max_size=60))
@settings(deadline=None)
def test_the_scatter_is_scipys(values):
    """Median and median absolute deviation, scaled to a normal distribution."""
    level, sigma = scatter(values)
    assert level == pytest.approx(np.median(values))
    # scipy divides by the normal quantile, of which 1.4826 has five digits.
    wanted = stats.median_abs_deviation(values, scale="normal")
    assert sigma == pytest.approx(wanted, rel=1e-4, abs=1e-9 * level)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.006, 0.01, 0.03]))
@settings(deadline=None, max_examples=25)
def test_the_baseline_is_the_median_of_the_last_looks(seed, cv):
    """Of normal readings, and its sigma is scipy's, never less than the floor."""
    runs = Runs(seed, cv)
    runs.run(WINDOW + 10)
    accepted = [look.speed for look in runs.course.accepted]
    baseline = runs.course.baseline()
    assert SEED <= len(accepted) <= WINDOW
    assert baseline.level == pytest.approx(np.median(accepted))
    sigma = float(stats.median_abs_deviation(accepted, scale="normal"))
    assert baseline.sigma == pytest.approx(max(sigma, SIGMA_FLOOR * baseline.level), rel=1e-4)


@given(
    st.lists(st.tuples(speeds, st.floats(0, 400), st.booleans()), max_size=80),
)
@settings(deadline=None, max_examples=60)
def test_no_course_of_readings_breaks_it(readings):
    """Whatever comes, in whatever time: opinions stay in bounds and the state can be kept."""
    course, now = Course(), 0.0
    for speed, passed, frozen in readings:
        now += passed
        opinion = course.push(Point(now, speed), frozen=frozen)
        assert (opinion.kind == "no_baseline") == (opinion.ratio is None)
        assert opinion.ratio is None or opinion.ratio > 0
        assert opinion.loss is None or 0 <= opinion.loss < 1
        assert (opinion.kind == "regression") == bool(opinion.loss)
        assert len(course.pending) < LOOK_READINGS
        assert len(course.accepted) <= WINDOW
        assert len(course.held) <= WINDOW
    kept = Course.from_json(json.loads(json.dumps(course.to_json())))
    assert kept == course
    again = Point(now + PERIOD, 1e12)
    assert kept.push(again) == course.push(again)


@given(st.floats(0.5, 2.0), st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_the_unit_does_not_matter(factor, seed):
    """A canary in other units, or of a faster card, is judged alike."""
    one, other = Runs(seed), Runs(seed)
    for share, count in ((1.0, 30), (0.97, 6), (1.0, 6)):
        for _ in range(count):
            first = one.run(1, share)
            second = other.run(1, share * factor)
            assert first.kind == second.kind
            assert first.ratio is None or math.isclose(first.ratio, second.ratio, rel_tol=1e-9)


def test_six_readings_make_the_seed():
    """Before them nothing is judged, however slow; after them a large loss is."""
    runs = Runs()
    for number in range(SEED):
        assert runs.run(share=0.5 if number == 2 else 1.0).kind == "no_baseline"
    assert runs.run().kind == "normal"
    assert runs.run(1, 0.97).kind == "normal"  # not sure yet of so little
    assert [runs.run(1, 0.88).kind for _ in range(3)] == ["suspect", "suspect", "regression"]


def test_one_slow_reading_is_read_again():
    """A neighbour of a moment is no loss, though it took a half; it does not move the baseline."""
    runs = Runs()
    runs.run(30)
    before = runs.course.baseline()
    opinion = runs.run(1, 0.5, again=1.0)
    assert (opinion.kind, opinion.retest) == ("normal", False)
    assert runs.run(200, 0.9, again=1.0).kind == "normal"
    assert runs.course.baseline().level == pytest.approx(before.level, rel=0.005)


def test_a_retest_comes_in_time_or_counts_for_itself():
    """A reading that was to be read again, and was not, is a look of its own half an hour later."""
    course = Course()
    for number in range(30):
        course.push(Point(number * PERIOD, 1.0 + number % 3 * 1e-3))
    assert course.push(Point(31 * PERIOD, 0.9)).retest
    assert course.push(Point(32 * PERIOD, 0.9)).retest
    assert len(course.pending) == 1
    assert course.push(Point(32 * PERIOD + RETEST_SECONDS, 0.9)).retest
    assert not course.push(Point(32 * PERIOD + 2 * RETEST_SECONDS, 0.9)).retest
    assert course.pending == []
    assert course.push(Point(33 * PERIOD, 0.9)).kind == "suspect"
    assert course.push(Point(34 * PERIOD, 0.9)).kind == "regression"


@pytest.mark.parametrize(
    ("share", "most", "severe"), [(0.975, 8, False), (0.96, 4, False), (0.93, 4, True)]
)
def test_a_step_is_found_and_measured(share, most, severe):
    """Within a few runs, with its size and with what it looks like; over when it is over."""
    runs = Runs()
    runs.run(60)
    found = next(number for number in range(20) if runs.run(1, share).kind == "regression") + 1
    assert 3 <= found <= most
    runs.run(4, share)
    assert runs.opinion.loss == pytest.approx(1 - share, abs=0.004)
    assert (runs.opinion.loss >= 0.05) == severe
    assert runs.opinion.cause == "slow_at_full_clock"
    assert runs.run(300, share).kind == "regression"  # it does not become the new normal
    assert [runs.run().kind for _ in range(4)] == ["regression"] * 3 + ["normal"]
    assert runs.opinion.loss == 0.0


def test_a_low_clock_is_told_from_a_slow_gpu():
    """By value per hertz: what a lower clock explains is no fault of the kernel."""
    for clock, cause in ((0.94, "low_clock"), (1.0, "slow_at_full_clock"), (0.99, None)):
        runs = Runs()
        runs.run(60)
        runs.run(6, 0.94, clock=clock)
        assert runs.opinion.kind == "regression"
        assert runs.opinion.cause == (cause or "slow_at_full_clock")


def test_a_clock_that_is_not_known_explains_nothing():
    """Without value per hertz the cause stays open."""
    course = Course()
    for number in range(40):
        opinion = course.push(Point(number * PERIOD, 1.0 if number < 30 else 0.9))
    assert (opinion.kind, opinion.cause) == ("regression", "")


def test_what_creeps_is_caught_by_the_reference():
    """Two thousandths a day never look slow beside the days before; 3 % from the best do."""
    runs = Runs(cv=0.002)
    runs.run(48 * 10)
    reference = runs.course.reference
    for day in range(40):
        if runs.run(48, 1 - 0.002 * (day + 1)).kind == "regression":
            break
    assert runs.opinion.cause == "creeping"
    assert runs.course.reference == pytest.approx(reference, rel=0.005)
    assert 0.028 <= runs.opinion.loss <= 0.04
    assert 14 <= day <= 18
    assert [runs.run().kind for _ in range(4)] == ["regression"] * 3 + ["normal"]
    assert {runs.run().kind for _ in range(100)} == {"normal"}


def test_two_months_of_a_sound_gpu_are_quiet():
    """Neither steps nor creeping are found where nothing happens, at the scatter of bf16."""
    runs = Runs(3, cv=0.01)
    kinds = {runs.run().kind for _ in range(48 * 60)}
    assert "regression" not in kinds


@pytest.mark.parametrize("seed", range(12))
def test_neighbours_that_nobody_saw_are_no_regression(seed):
    """3 % of the runs are 3 to 15 % slow, half of their retests as well: 5 days are quiet."""
    runs, random = Runs(seed), np.random.default_rng(seed)
    for _ in range(48 + 240):
        slow = 1 - random.uniform(0.03, 0.15) if random.random() < 0.03 else 1.0
        again = slow if random.random() < 0.5 else 1.0
        assert runs.run(1, slow, again=again).kind != "regression"


def test_a_frozen_baseline_is_judged_and_not_moved():
    """While an alert fires, readings are compared but teach nothing, good ones neither."""
    runs = Runs()
    runs.run(30)
    before = list(runs.course.accepted)
    assert runs.run(60, 1.015, frozen=True).kind == "normal"
    assert runs.course.accepted == before
    assert runs.run(4, 0.9, frozen=True).kind == "regression"
    seedless = Runs()
    assert seedless.run(20, frozen=True).kind == "no_baseline"


def test_a_faster_gpu_is_no_loss_and_becomes_the_baseline():
    """Better cooling raises the level within a day; the old level is then slow."""
    runs = Runs()
    runs.run(60)
    assert {runs.run(1, 1.05).kind for _ in range(48)} == {"normal"}
    assert runs.course.baseline().level == pytest.approx(SPEED * 1.05, rel=0.005)
    assert runs.run(4).kind == "regression"


def test_the_median_of_readings_is_fieldwise():
    """A look has the median of each field that is known."""
    points = [Point(1, 3.0, 0.3, None), Point(2, 1.0, None, None), Point(3, 2.0, 0.1, None)]
    assert merged(points) == Point(3, 2.0, 0.2, None)


@pytest.mark.parametrize(
    "damage",
    [
        {"accepted": None},
        {"recent": [[1, "fast"]]},
        {"pending": [[]]},
        {"today": [[1, 2, 3, 4, 5]]},
        {"alarm": "loud"},
        {"learned": "many"},
        {"days": [None]},
        {"slack_sum": []},
    ],
)
def test_what_is_no_course_is_refused(damage):
    """Damage in the file is a plain error, for the caller to leave the course out."""
    with pytest.raises((TypeError, KeyError, ValueError)):
        Course.from_json({**Course().to_json(), **damage})
    with pytest.raises(KeyError):
        Course.from_json({})


@pytest.mark.parametrize("seed", range(6))
def test_many_small_losses_add_up(seed):
    """At a scatter of 1 % hardly a look is low by itself when 3 % are lost; their sum is."""
    runs = Runs(seed, cv=0.01)
    runs.run(60)
    found = [runs.run(1, 0.97).kind for _ in range(14)]
    assert found.count("suspect") < 10
    assert found[-1] == "regression"


def test_a_wide_scatter_does_not_add_up():
    """A canary that scatters by 6 % finds less, and is a nuisance in 2 windows of 12 at most."""

    def is_noisy(seed):
        runs = Runs(seed, cv=0.06)
        return any(runs.run().kind == "regression" for _ in range(240))

    assert sum(map(is_noisy, range(12))) <= 2


def test_a_few_values_show_less_scatter_than_there_is():
    """Six that happen to be alike do not make the seventh an outlier; later the scatter counts."""
    runs = Runs(cv=0.02)
    for count, factor in ((SEED, 1 + 4 / SEED), (LEARNED + 20, 1.0)):
        while runs.course.learned < count:
            runs.run()
        _, sigma = scatter([look.speed for look in runs.course.accepted])
        assert runs.course.baseline().sigma == pytest.approx(factor * sigma)


def test_the_documents_limits():
    """The numbers that docs/baselines.md tells."""
    assert (SEED, LEARNED, WINDOW, LOOK_READINGS) == (6, 20, 48, 3)
    assert (LOSS, LEARNING_LOSS, SIGMAS, SIGMA_FLOOR) == (0.02, 0.05, 3.5, 0.005)
    assert (CLEAR_LOSS, CREEP_LOSS, CREEP_CLEAR_LOSS) == (0.01, 0.03, 0.02)
    assert (SLACK, SLACK_SIGMAS, STEP_SIGMAS, SUM_SIGMAS) == (0.015, 1.25, 2.0, 8.0)

"""Judgement: whether a GPU has become slower than it was, from the readings of one course.

A course are the readings of one canary, in one shape, on one GPU or host, in one environment. Most
ways to judge them fail by contamination: now and then a neighbour that nobody saw makes a run 3 to
15 % slow. So a slow reading is taken again at once, a look is the median of up to three, and one
look proves nothing. benchmarks/canary_judgement.py says how often that errs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

Kind = Literal["no_baseline", "normal", "suspect", "regression", "unknown"]

SEED = 6  # looks before anything is judged
LEARNED = 20  # looks before small losses are
WINDOW = 48  # looks that the baseline is made of: a day of every half hour
LOOK_READINGS = 3
RETEST_SECONDS = 120.0  # a reading taken later is a look of its own

LOSS = 0.02  # what is called slow
LEARNING_LOSS = 0.05  # and as long as the baseline is not sure
SIGMAS = 3.5
SIGMA_FLOOR = 0.005  # of the baseline: no canary repeats better than this for weeks
MAD_TO_SIGMA = 1.4826  # of a normal distribution
LAST, OF_LAST = 4, 3  # so many of the last looks slow

# The sum of what looks are slower than half of a loss of 3 %, in sigmas.
SLACK = 0.015
SLACK_SIGMAS = 1.25  # at least, where a course scatters widely
STEP_SIGMAS = 2.0  # one look adds no more
SUM_SIGMAS = 8.0

CLEAR_LOSS = 0.01
CREEP_LOSS = 0.03  # against the best level that the course ever held for days
CREEP_CLEAR_LOSS = 0.02
DAY_SECONDS = 86_400.0
REFERENCE_DAYS, FIRST_DAYS = 7, 3

POINTS = ("accepted", "recent", "pending", "held", "today")  # fields of a course that have some


class Point(NamedTuple):
    """A reading, or a look made of some: `speed` is a value of which more is better.

    `per_hertz` and `clock` are None where the clock is not known.
    """

    time: float
    speed: float
    per_hertz: float | None = None
    clock: float | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """Where a course lies, and how widely it scatters, in its unit."""

    level: float
    sigma: float
    per_hertz: float | None
    clock: float | None


@dataclass(frozen=True, slots=True)
class Opinion:
    """What a course says after a reading.

    `ratio` is the look's speed by the baseline's. `loss` is what a confirmed regression takes,
    a share, 0.0 while there is none and None without a baseline. `cause` says of a regression
    "low_clock", "slow_at_full_clock", "creeping", or "" where the clock is not known. `retest`
    asks for another reading within the next seconds.
    """

    kind: Kind
    ratio: float | None = None
    loss: float | None = None
    cause: str = ""
    retest: bool = False


@dataclass(slots=True)
class Course:
    """The looks of one course so far; nothing of it changes but by `push`."""

    accepted: list[Point] = field(default_factory=list)  # the baseline is made of them
    learned: int = 0  # looks accepted since the beginning
    recent: list[Point] = field(default_factory=list)  # the last looks, accepted or not
    pending: list[Point] = field(default_factory=list)  # readings of the look that is not over
    held: list[Point] = field(default_factory=list)  # sound looks, while the sum is in doubt
    slack_sum: float = 0.0
    alarm: str = ""  # "", "step", "creep"
    today: list[Point] = field(default_factory=list)
    days: list[float] = field(default_factory=list)  # median speed of the last days
    reference: float | None = None  # the best median of a week
    frozen: bool = False  # whether the look that is not over may not move the baseline

    def baseline(self) -> Baseline | None:
        """Return the median of what was accepted and its scatter, None before the seed is whole."""
        if len(self.accepted) < SEED:
            return None
        level, sigma = scatter([look.speed for look in self.accepted])
        if self.learned < LEARNED:  # few values show less scatter than there is
            sigma *= 1 + 4 / len(self.accepted)
        return Baseline(
            level,
            max(sigma, SIGMA_FLOOR * level),
            _median_known([look.per_hertz for look in self.accepted]),
            _median_known([look.clock for look in self.accepted]),
        )

    def push(self, reading: Point, *, frozen: bool = False) -> Opinion:
        """Take in the next reading; `frozen`: it is judged, but moves no baseline."""
        if self.pending and reading.time - self.pending[-1].time > RETEST_SECONDS:
            self._close()
        self.pending.append(reading)
        self.frozen |= frozen
        look = merged(self.pending)
        baseline = self.baseline()
        if baseline is None:
            self._close()
            return Opinion("no_baseline")
        low = self._is_low(look, baseline)
        retest = low and not self.alarm and len(self.pending) < LOOK_READINGS
        if not retest:
            self._close()
        kind: Kind = "regression" if self.alarm else "suspect" if low else "normal"
        return Opinion(kind, look.speed / baseline.level, self.loss, self.cause, retest)

    @property
    def limit(self) -> float | None:
        """The speed from which on a look is low, None before the seed is whole."""
        baseline = self.baseline()
        return None if baseline is None else baseline.level - self._least_loss(baseline)

    @property
    def loss(self) -> float | None:
        """How much a confirmed regression takes: of the baseline, or of the reference."""
        baseline = self.baseline()
        if baseline is None:
            return None
        if not self.alarm:
            return 0.0
        level = self._creeps_from if self.alarm == "creep" else baseline.level
        least = CREEP_CLEAR_LOSS if self.alarm == "creep" else LOSS
        # Beyond the limit of alarm and measured a little under it, it is one still.
        return max(1 - merged(self.recent).speed / level, least)

    @property
    def cause(self) -> str:
        """What a confirmed regression looks like: most of it a low clock, or not."""
        baseline = self.baseline()
        if baseline is None or not self.alarm:
            return ""
        if self.alarm == "creep":
            return "creeping"
        per_hertz = merged(self.recent).per_hertz
        if per_hertz is None or baseline.per_hertz is None:
            return ""
        at_full_clock = 1 - per_hertz / baseline.per_hertz
        return "slow_at_full_clock" if at_full_clock > (self.loss or 0.0) / 2 else "low_clock"

    @property
    def spread(self) -> float | None:
        """The scatter of the baseline by its level, None before the seed is whole."""
        if len(self.accepted) < SEED:
            return None
        level, sigma = scatter([look.speed for look in self.accepted])
        return sigma / level

    def to_json(self) -> dict[str, Any]:
        """Return the course as plain data; points as lists of their fields."""
        return {**asdict(self), **{name: getattr(self, name) for name in POINTS}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Course":
        """Rebuild a course; TypeError, KeyError or ValueError if `data` is none."""
        points = {name: [Point(*map(_known, point)) for point in data[name]] for name in POINTS}
        if data["alarm"] not in ("", "step", "creep"):
            raise ValueError(f"alarm {data['alarm']!r}")
        return cls(
            **points,
            learned=int(data["learned"]),
            slack_sum=float(data["slack_sum"]),
            alarm=data["alarm"],
            days=[float(day) for day in data["days"]],
            reference=_known(data["reference"]),
            frozen=bool(data["frozen"]),
        )

    @property
    def _creeps_from(self) -> float:
        assert self.reference is not None
        return self.reference

    def _is_low(self, look: Point, baseline: Baseline) -> bool:
        return baseline.level - look.speed >= self._least_loss(baseline)

    def _least_loss(self, baseline: Baseline) -> float:
        least = LOSS if self.learned >= LEARNED else LEARNING_LOSS
        return max(least * baseline.level, SIGMAS * baseline.sigma)

    def _close(self) -> None:
        """Take the look for over: judge it, and make it a part of the baseline if it is sound."""
        look, frozen = merged(self.pending), self.frozen
        self.pending, self.frozen = [], False
        baseline = self.baseline()
        if baseline is None:
            if not frozen:
                self._accept(look)
            return
        self.recent = [*self.recent, look][-LAST:]
        if self.learned >= LEARNED:
            slack = max(SLACK * baseline.level / baseline.sigma, SLACK_SIGMAS)
            slower = (baseline.level - look.speed) / baseline.sigma - slack
            self.slack_sum = max(0.0, self.slack_sum + min(slower, STEP_SIGMAS))
        if self.alarm:
            self._try_to_clear(baseline)
        elif self._has_stepped(baseline):
            self.alarm = "step"
        if self.alarm:
            self.held = []
            return
        if not (frozen or self._is_low(look, baseline)):
            self.held = [*self.held, look][-WINDOW:]
        if not self.slack_sum:  # else they might be the beginning of a loss
            held, self.held = self.held, []
            for one in held:
                self._accept(one)

    def _has_stepped(self, baseline: Baseline) -> bool:
        lows = [self._is_low(look, baseline) for look in self.recent]
        if sum(lows) >= OF_LAST:
            return True
        lost = 1 - merged(self.recent).speed / baseline.level
        return self.slack_sum > SUM_SIGMAS and lost >= SLACK

    def _try_to_clear(self, baseline: Baseline) -> None:
        level, bound = baseline.level, max(CLEAR_LOSS, baseline.sigma / baseline.level)
        if self.alarm == "creep":
            level, bound = self._creeps_from, CREEP_CLEAR_LOSS
        if len(self.recent) == LAST and all(1 - look.speed / level < bound for look in self.recent):
            self.alarm, self.slack_sum = "", 0.0

    def _accept(self, look: Point) -> None:
        self.accepted = [*self.accepted, look][-WINDOW:]
        self.learned += 1
        if self.today and look.time // DAY_SECONDS != self.today[0].time // DAY_SECONDS:
            self.days = [*self.days, merged(self.today).speed][-REFERENCE_DAYS:]
            self.today = []
            if len(self.days) >= FIRST_DAYS:
                self.reference = max(self.reference or 0.0, median(self.days))
        self.today.append(look)
        if self._has_crept():
            self.alarm = "creep"

    def _has_crept(self) -> bool:
        if self.reference is None or self.learned < LEARNED or len(self.recent) < LAST:
            return False
        level = median(look.speed for look in self.accepted)
        # The last looks, too: the baseline follows slowly when the loss is over.
        now = merged(self.recent).speed
        lost, lost_now = 1 - level / self.reference, 1 - now / self.reference
        return lost >= CREEP_LOSS and lost_now >= CREEP_CLEAR_LOSS


def scatter(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation as the median absolute deviation tells it."""
    middle = median(values)
    return middle, MAD_TO_SIGMA * median(abs(value - middle) for value in values)


def merged(points: Sequence[Point]) -> Point:
    """Return the median of readings or looks, at the time of the last one."""
    return Point(
        points[-1].time,
        median(point.speed for point in points),
        _median_known([point.per_hertz for point in points]),
        _median_known([point.clock for point in points]),
    )


def _median_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _known(told: Any) -> Any:
    return None if told is None else float(told)

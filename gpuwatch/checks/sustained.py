"""Whether the GPUs hold out under load: all of them multiply matrices at once, without a pause.

A card that is badly cooled or fed is fast for some seconds. So what it does at last counts, and
what its temperature, power and clocks were on the way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

from gpuwatch.appraisal import appraised, without_value
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.clock import SECOND_NS
from gpuwatch.load_check import TimeLeft
from gpuwatch.lookup import look_up
from gpuwatch.matter import Matter
from gpuwatch.session import Result
from gpuwatch.slowness import BRAKE, HEAT, HELD_RATIO, throttled
from gpuwatch.verify import Facts, Finding, Node, entity

QUICK_SECONDS, DEEP_SECONDS = 12.0, 330.0
END_SECONDS = 60.0  # the first and the last of a long run are compared, thirds of a short one
ENOUGH = 0.6  # of the time: one that began late, and was ended before it was done, is judged
USUAL_RATIO = 0.96  # of what a burst gives: 662 of 683 TFLOPS on two H200 in 20 s
DROP_WARN, DROP_FAIL = 0.05, 0.10
HEAT_FAIL, BRAKE_FAIL = 0.10, 0.05  # of the time
MARGIN_CELSIUS = 2.0  # to where the GPU slows down
APART_CELSIUS = 15.0  # above the median of the siblings
THUMB_CELSIUS, THUMB_SECONDS = 80.0, 300.0
WELL = "a card that is well cooled and fed"
AIR = "look at fans, filters, airflow and heat sink, and at what stands beside it"


@dataclass(frozen=True, slots=True)
class Course:
    """What came of one GPU, slice after slice."""

    gpu: int
    results: Sequence[Result]

    @property
    def seconds(self) -> float:
        """How long it went on."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[float]:
        """How long each slice was."""
        told = [one.told or {} for one in self.results]
        return [(one["end_ns"] - one["start_ns"]) / SECOND_NS for one in told]

    def ends(self) -> tuple[float, float]:
        """Return the mean value of the beginning, and of the end."""
        values = [one.reading.value for one in self.results if one.reading and one.reading.value]
        part = min(END_SECONDS, self.seconds / 3) / self.seconds
        count = max(1, round(part * len(values)))
        return fmean(values[:count]), fmean(values[-count:])

    def values(self, name: str) -> list[Any]:
        """Return what was seen in the slices, where it is known."""
        found = (one.seen.get(self.gpu, {}).get(name) for one in self.results)
        return [value for value in found if value is not None]

    def shares(self) -> Mapping[str, float]:
        """Return for which share of the time each reason held the clocks down."""
        names = {name for shares in self.values("reasons") for name in shares}
        return {
            name: sum(
                one.seen[self.gpu]["reasons"].get(name, 0.0) * length
                for one, length in zip(self.results, self.lengths, strict=True)
                if self.gpu in one.seen
            )
            / self.seconds
            for name in names
        }

    def as_one(self) -> Result:
        """Return the end of it as if it were a run of the canary `matmul`."""
        last = self.results[-1]
        reading = last.reading
        assert reading is not None
        value = self.ends()[1]
        clock = reading.clock_hertz
        return replace(
            last,
            canary="matmul",
            told={**(last.told or {}), "start_ns": (self.results[0].told or {})["start_ns"]},
            reading=replace(
                reading,
                canary="matmul",
                value=value,
                value_per_hertz=value / clock if clock else None,
            ),
            seen={self.gpu: {**last.seen.get(self.gpu, {}), "reasons": self.shares()}},
        )


class Sustained:
    """Matrix multiplication on all GPUs at once, for 12 seconds or for minutes."""

    name = "sustained"
    help = "speed, heat, power and clocks with all GPUs under load, for minutes if there is time"
    phase: Literal["static", "load"] = "load"
    deep_only = False
    essential = False

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take, with so many GPUs."""
        return DEEP_SECONDS + 40.0 if deep else QUICK_SECONDS + 10.0 + gpus / 4

    def run(self, node: Node) -> Iterator[Finding | CanaryReading]:
        """Load all of them, and judge speed, steadiness, heat and what held the clocks down."""
        seconds = DEEP_SECONDS if node.deep else QUICK_SECONDS
        gpus = len(node.gpus)
        left = TimeLeft(self.bound_seconds(gpus, node.deep))
        with node.session() as session:
            results = list(
                session.run(
                    self.name,
                    at_once=gpus,
                    seconds=seconds,
                    longest_seconds=left.of_a_run,
                )
            )
        slices: dict[int, list[Result]] = {}
        for one in results:
            if one.gpu is not None and not without_value(one):
                slices.setdefault(one.gpu, []).append(one)
        courses = {gpu: Course(gpu, of_it) for gpu, of_it in slices.items()}
        for one in results:
            if (finding := without_value(one)) and not (
                finding.verdict == "UNKNOWN"
                and one.gpu in courses
                and courses[one.gpu].seconds >= ENOUGH * seconds
            ):
                yield finding
        yield from judged(node, list(courses.values()))


def judged(node: Node, courses: Sequence[Course]) -> Iterator[Finding]:
    """Yield what is to be said of GPUs that were loaded at once."""
    alone = replace(node, standings=())  # a baseline is of bursts
    for finding in appraised(alone, [course.as_one() for course in courses], USUAL_RATIO):
        yield replace(finding, name="sustained")
    facts = {gpu["gpu"]: gpu for gpu in node.gpus}
    hottest = {
        course.gpu: max(heat) for course in courses if (heat := course.values("hottest_celsius"))
    }
    for course in courses:
        about = facts.get(course.gpu, {})
        yield _steadiness(course, about)
        yield from _heat(course, about, hottest)
        yield _throttling(course, about)
        if node.deep:
            yield from _by_thumb(course)


def _steadiness(course: Course, about: Facts) -> Finding:
    first, last = course.ends()
    drop = 1 - last / first
    matter = Matter("sustained", entity(course.gpu), "steadiness", "ratio")
    matter = matter.seen(last / first, 1 - DROP_WARN, WELL)
    if drop <= DROP_WARN:
        return matter.good()
    why = throttled({"reasons": course.shares()}, about)
    fault = f"{100 * drop:.1f} % slower after {course.seconds:.0f} s of load"
    return matter.judged(
        f"{fault}: {why.text}" if why else fault,
        why.cause if why else "clock",
        why.next_step if why else f"{AIR}; look at its power limit",
        fatal=drop > DROP_FAIL,
    )


def _heat(course: Course, about: Facts, hottest: Mapping[int, float]) -> Iterator[Finding]:
    if course.gpu not in hottest:
        return
    celsius = hottest[course.gpu]
    others = [value for gpu, value in hottest.items() if gpu != course.gpu]
    margins: list[float] = course.values("margin_celsius")
    slowdown = look_up(about, "temperature", "slowdown_celsius")
    margin = min(margins) if margins else slowdown - celsius if slowdown else None
    apart = celsius - median(others) if others else 0.0
    fault = ""
    if margin is not None and margin <= MARGIN_CELSIUS:
        fault = f"{margin:.0f} C from where it slows down"
    elif apart > APART_CELSIUS:
        fault = f"{apart:.0f} C hotter than its siblings"
    matter = Matter("sustained", entity(course.gpu), "temperature", "celsius").seen(celsius)
    if margin is not None:
        most = celsius + margin - MARGIN_CELSIUS
        matter = matter.seen(celsius, most, "where it slows down")
    yield matter.judged(fault, "heat", AIR)


def _throttling(course: Course, about: Facts) -> Finding:
    matter = Matter("sustained", entity(course.gpu), "held back", "ratio")
    if not course.values("reasons"):
        return matter.unread("what holds the clocks down")
    shares = course.shares()
    heat = max((shares.get(name, 0.0) for name in HEAT), default=0.0)
    brake = max((shares.get(name, 0.0) for name in BRAKE), default=0.0)
    matter = matter.seen(max(heat, brake), f"at most {100 * HELD_RATIO:.0f} %", WELL)
    why = throttled({"reasons": shares}, about)
    if why is None or max(heat, brake) <= HELD_RATIO:
        return matter.good()
    fatal = heat > HEAT_FAIL or brake > BRAKE_FAIL
    return matter.judged(why.text, why.cause, why.next_step, fatal=fatal)


def _by_thumb(course: Course) -> Iterator[Finding]:
    """Yield for how long it was hotter than the trade likes."""
    heat = course.values("temperature_celsius")
    if len(heat) != len(course.results):
        return
    hot = sum(
        length
        for length, celsius in zip(course.lengths, heat, strict=True)
        if celsius > THUMB_CELSIUS
    )
    fault = f"above {THUMB_CELSIUS:.0f} C for {hot:.0f} s" if hot >= THUMB_SECONDS else ""
    matter = Matter("sustained", entity(course.gpu), "above 80 C", "seconds").by_thumb()
    matter = matter.seen(hot, THUMB_SECONDS, "rule of thumb: not for five minutes")
    yield matter.judged(fault, "heat", AIR)

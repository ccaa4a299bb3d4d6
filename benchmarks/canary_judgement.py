"""How often a judged canary errs, and how soon it finds a loss: courses made up by a seed.

    python benchmarks/canary_judgement.py [--windows 300] [--seed 1]

A window is 240 runs, 5 days of every half hour, after a baseline of 48. Runs scatter by CV with a
memory of one run (autocorrelation 0.3); 3 % of them are 3 to 15 % slow by a neighbour that nobody
saw, who is still there for the retest in half of the cases. False alarms are counted in windows
without a loss. A loss is a step at a random run of the window; it is found if an alarm comes within
60 runs. "seeded" begins with 6 readings instead of 48 and counts false alarms alone. The last line
is what a reading costs the daemon, judged and written to a file beside those of eight GPUs.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from gpuwatch.baseline import Baseline
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.judgement import RETEST_SECONDS, SEED, Course, Point
from gpuwatch.signals import Entity
from gpuwatch.store import Store

PERIOD_SECONDS = 1800.0
WINDOW, BASELINE, FOLLOWED = 240, 48, 60
CONTAMINATED, STAYS = 0.03, 0.5
MEMORY = 0.3
CASES = ((0.003, "0.3 %"), (0.01, "1 %"), (0.02, "2 %"))
STEPS = (0.02, 0.03, 0.05)


class Gpu:
    """Gives readings with this coefficient of variation, around 1.0."""

    def __init__(self, generator: np.random.Generator, cv: float) -> None:
        self._generator, self._cv, self._state = generator, cv, 0.0

    def run(self, course: Course, number: int, lost: float = 0.0) -> bool:
        """Run once, with retests if they are asked for; return whether there is an alarm."""
        now = number * PERIOD_SECONDS
        fresh = np.sqrt(1 - MEMORY**2) * self._generator.standard_normal()
        self._state = MEMORY * self._state + fresh
        neighbour = self._generator.random() < CONTAMINATED
        opinion = course.push(Point(now, self._reading(neighbour, lost)))
        while opinion.retest:
            now += RETEST_SECONDS / 10
            neighbour = neighbour and self._generator.random() < STAYS
            self._state = MEMORY * self._state + fresh
            fresh = np.sqrt(1 - MEMORY**2) * self._generator.standard_normal()
            opinion = course.push(Point(now, self._reading(neighbour, lost)))
        return bool(course.alarm)

    def _reading(self, neighbour: bool, lost: float) -> float:
        taken = self._generator.uniform(0.03, 0.15) if neighbour else 0.0
        return (1 + self._cv * self._state) * (1 - lost) * (1 - taken)


def false_alarm(generator: np.random.Generator, cv: float, learned: int) -> bool:
    """Say whether a sound GPU gets an alarm within a window."""
    course, gpu = Course(), Gpu(generator, cv)
    for number in range(learned):
        gpu.run(course, number)
    return any(gpu.run(course, learned + number) for number in range(WINDOW))


def delay(generator: np.random.Generator, cv: float, lost: float) -> int | None:
    """Return after how many runs a loss is found; None if it is not."""
    course, gpu = Course(), Gpu(generator, cv)
    for number in range(BASELINE + generator.integers(WINDOW - FOLLOWED)):
        gpu.run(course, number)
    course.alarm = ""  # a false one is counted elsewhere
    for run in range(1, FOLLOWED + 1):
        if gpu.run(course, number + run, lost):
            return run
    return None


def cost_seconds(rounds: int = 60) -> tuple[float, float]:
    """Return what `Baseline.add` and the facts for the rules take, medians."""
    adds, facts = [], []
    gpus = {f"GPU-{number}": Entity("gpu", str(number)) for number in range(8)}
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "gpuwatch.sqlite")
        baseline = Baseline(store)
        for number in range(rounds):
            for uuid in gpus:
                now = number * PERIOD_SECONDS
                entity, value = Entity("gpu", uuid), 784e12 + number % 7 * 1e12
                reading = CanaryReading(canary="matmul", entity=entity, time=now, value=value)
                begin = time.perf_counter()
                baseline.add(reading)
                adds.append(time.perf_counter() - begin)
            baseline.facts(gpus, now)
            begin = time.perf_counter()
            baseline.facts(gpus, now)
            facts.append(time.perf_counter() - begin)
        store.close()
    return median(adds), median(facts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    generator = np.random.default_rng(chosen.seed)
    print(
        f"| CV | false alarms | seeded with {SEED} | "
        + " | ".join(f"step {lost:.0%}: found, median runs" for lost in STEPS)
        + " |"
    )
    print("|---" * (3 + len(STEPS)) + "|")
    for cv, name in CASES:
        cells = [name]
        for learned in (BASELINE, SEED):
            alarms = sum(false_alarm(generator, cv, learned) for _ in range(chosen.windows))
            cells.append(f"{alarms} of {chosen.windows}")
        for lost in STEPS:
            found = [delay(generator, cv, lost) for _ in range(chosen.windows)]
            known = [runs for runs in found if runs is not None]
            cells.append(f"{len(known) / len(found):.0%}, {median(known) if known else '-'}")
        print("| " + " | ".join(cells) + " |", flush=True)
    add, facts = cost_seconds()
    print(f"\na reading: {add * 1e3:.2f} ms; facts, once a second: {facts * 1e3:.3f} ms")


if __name__ == "__main__":
    main()

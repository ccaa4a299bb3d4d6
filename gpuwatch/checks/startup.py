"""Whether a context on each GPU is there as soon as it should be."""

from collections.abc import Iterator
from typing import Literal

from gpuwatch.appraisal import without_value
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.load_check import TimeLeft, usable
from gpuwatch.matter import Matter
from gpuwatch.session import Result
from gpuwatch.verify import Finding, Node, entity

QUICK_SECONDS, DEEP_SECONDS = 12.0, 40.0  # of one run, at most, torch and all
LONG_SECONDS = 5.0  # an H200 takes 0.6 s; a driver that must be loaded first some seconds
THUMB_SECONDS = 0.2  # off the baseline


class Startup:
    """The time from no context until a first kernel has run."""

    name = "startup"
    help = "seconds until a first kernel has run"
    phase: Literal["static", "load"] = "load"
    deep_only = False
    essential = False

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take, with so many GPUs; torch is read from disk for once."""
        return 20.0 + 5 * gpus if deep else 12.0 + gpus / 2

    def run(self, node: Node) -> Iterator[Finding | CanaryReading]:
        """Try one GPU after the other, or four at once if there is no time."""
        left = TimeLeft(self.bound_seconds(len(node.gpus), node.deep))
        with node.session() as session:
            longest = min(DEEP_SECONDS if node.deep else QUICK_SECONDS, left.of_a_run)
            at_once = 1 if node.deep else 4
            results = list(session.run(self.name, at_once=at_once, longest_seconds=longest))
        yield from usable(results)
        for one in results:
            if finding := without_value(one):
                yield finding
            elif one.reading is not None and one.reading.value is not None:
                yield _long(one, one.reading.value)
                yield from _by_thumb(node, one, one.reading.value)


def _long(one: Result, seconds: float) -> Finding:
    fault = "a context takes long: the driver is loaded anew each time, or busy"
    matter = Matter("startup", entity(one.gpu), unit="seconds")
    return matter.seen(seconds, LONG_SECONDS, "ten times what is usual").judged(
        fault if seconds > LONG_SECONDS else "",
        "driver",
        "switch persistence on: nvidia-smi -pm 1, or nvidia-persistenced",
    )


def _by_thumb(node: Node, one: Result, seconds: float) -> Iterator[Finding]:
    for standing in node.standings:
        reading = one.reading
        same = reading and standing.entity == reading.entity and standing.shape == reading.shape
        if not same or not standing.current or not standing.baseline:
            continue
        most = standing.baseline + THUMB_SECONDS
        matter = Matter("startup", entity(one.gpu), "context", "seconds").by_thumb()
        yield matter.seen(seconds, most, "rule of thumb: within 0.2 s of its baseline").judged(
            "a context takes longer than it did" if seconds > most else "",
            "driver",
            "compare driver versions and the load of the processors",
        )

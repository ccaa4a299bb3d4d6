"""A load check: what it has in common with the others that try canaries on the GPUs of a node.

It may take so much time and no more, so a run ends before the check has to.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from gpuwatch.appraisal import appraised
from gpuwatch.canaries import CANARIES
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.canary_text import written
from gpuwatch.session import Result
from gpuwatch.verify import Finding, Node, entity

AGAIN = 1.5  # times what a run took: the one that is tried again may take that
TOLD_SECONDS = 2.5  # of a check's time are left: what hangs must be put away, and told of, by then


class TimeLeft:
    """What is left of the time of a check, which may take so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def of_a_run(self) -> float:
        """How many seconds a run that begins now may take."""
        return max(0.0, self._end - time.monotonic() - TOLD_SECONDS)


def measured(
    node: Node,
    name: str,
    at_once: int,
    seconds: float,
    longest_seconds: float = math.inf,
    more: Callable[[Node, Sequence[Result]], Iterable[Finding]] | None = None,
) -> Iterator[Finding | CanaryReading]:
    """Run a canary on all GPUs, so many at once; yield its readings, and findings about them.

    Of those that are slow the first, in a deep examination each, is tried again, alone, if that
    fits into the `seconds` that there are. A run that takes `longest_seconds` has failed, so that
    the others are told of in time. `more` are findings about the same results.
    """
    left = TimeLeft(seconds)
    with node.session() as session:
        start = time.monotonic()
        longest = min(longest_seconds, left.of_a_run)
        results = list(session.run(name, at_once=at_once, longest_seconds=longest))
        yield from usable(results)
        of_a_run = (time.monotonic() - start) / math.ceil(max(1, len(node.gpus)) / at_once)
        findings = list(appraised(node, results))
        slow = {one.entity for one in findings if one.verdict in ("WARN", "FAIL") and one.value}
        numbers = [one.gpu for one in results if one.gpu is not None and entity(one.gpu) in slow]
        for number in sorted(set(numbers))[: None if node.deep else 1]:
            if AGAIN * of_a_run > (longest := min(longest_seconds, left.of_a_run)):
                break
            others = [one for one in results if one.gpu != number]
            again = list(session.run(name, only=[number], longest_seconds=longest))
            second = {
                one.measure: one
                for one in appraised(node, [*others, *again])
                if one.entity == entity(number)
            }
            findings = [
                _both(one, second[one.measure])
                if one.entity == entity(number) and one.measure in second
                else one
                for one in findings
            ]
    yield from findings
    yield from more(node, results) if more else ()


def _both(first: Finding, second: Finding) -> Finding:
    """Return what two runs of a canary say of a GPU, the second of them alone."""
    if first.verdict == "PASS" or second.verdict not in ("PASS", "WARN", "FAIL"):
        return first
    if second.verdict == "PASS":
        value = written(first.name, second.value) if isinstance(second.value, float) else "enough"
        return replace(
            first, verdict="WARN", reason=f"{first.reason}; tried again, alone, it gives {value}"
        )
    return replace(second, reason=f"{second.reason}; the same when tried again, alone")


def usable(results: Iterable[Result]) -> Iterator[CanaryReading]:
    """Yield the readings that may become a baseline."""
    for one in results:
        if one.reading is not None and one.result == "ok" and one.canary in CANARIES:
            yield one.reading

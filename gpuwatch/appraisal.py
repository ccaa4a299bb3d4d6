"""Appraisal: what the figures of a canary say of GPUs, by model, siblings and their own baseline.

No history is needed. Floors are those at which a card is accepted: 0.92 and 0.85 of what such cards
were measured to give, else 0.60 and 0.45 of the data sheet. Siblings find what no table knows: a
card that is far from the median of the others on its node, by a robust z.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from gpuwatch.canaries import CANARIES
from gpuwatch.canary_reading import UNITS, CanaryReading
from gpuwatch.canary_text import written
from gpuwatch.expected import Figure, figure
from gpuwatch.session import Result
from gpuwatch.slowness import Why, why_slow
from gpuwatch.verify import Finding, Node, Verdict, entity

WARN_RATIO, FAIL_RATIO = 0.92, 0.85  # of what was measured on such cards
WARN_PEAK, FAIL_PEAK = 0.60, 0.45  # of the data sheet, where nothing was measured
SIBLINGS = 4  # cards that a robust z needs
SIGMAS = 3.5
SIBLING_LOSS, SIBLING_FAIL = 0.03, 0.10  # below the others' median
FEW_LOSS = 0.05  # of two or three cards
SPREAD_RATIO = 0.06  # (max - min) / median of a healthy node's cards
MAD_TO_SIGMA = 1.4826
SIGMA_FLOOR = 0.003  # of the median: what a card repeats to
BASELINE_WARN, BASELINE_FAIL = 0.97, 0.92
NOISY = 0.03
AGAIN = 1.5  # times what a run took: the one that is tried again may take that
TOLD_SECONDS = 2.5  # of a check's time are left: what hangs must be put away, and told of, by then


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one thing to compare with says: the value it expects, and from where."""

    verdict: Verdict
    expectation: float
    source: str


class TimeLeft:
    """What is left of the time of a check, which may take so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def of_a_run(self) -> float:
        """How many seconds a run that begins now may take."""
        return max(0.0, self._end - time.monotonic() - TOLD_SECONDS)


def shape_name(reading: CanaryReading) -> str:
    """Return what of a canary a reading measures."""
    return reading.dtype or reading.direction


def without_value(one: Result, name: str = "") -> Finding | None:
    """Return what is to be said of a result that is no measure; None of one that is.

    `name` is that of the check, if it is not that of the canary.
    """
    where, name = entity(one.gpu), name or one.canary
    what: dict[str, Any] = {"name": name, "entity": where, "reason": one.detail}
    log = "look at the kernel log for Xid errors, reset the GPU, run it again"
    match one.result:
        case "skipped" if one.reason == "no_answer":  # it did when the examination began
            return Finding(**what, verdict="FAIL", cause="driver", next_step=log)
        case "skipped":
            busy = "in use" in one.detail or "job" in one.detail
            step = "run it again when the GPUs are idle" if busy else "mend that, and run it again"
            return Finding(**what, verdict="SKIP", cause="busy" if busy else "host", next_step=step)
        case "aborted" if "the driver" in one.detail:
            return Finding(**what, verdict="UNKNOWN", cause="driver", next_step=log)
        case "aborted":
            step = "run it again when the GPUs are idle"
            return Finding(**what, verdict="UNKNOWN", cause="busy", next_step=step)
        case "failed" if re.search("^not done|^hangs: .* phase (start|import)$", one.detail):
            step = f"run it again, now that torch is in memory: --only {name}, with --deep"
            return Finding(**what, verdict="UNKNOWN", cause="host", next_step=step)
        case "failed":
            return Finding(**what, verdict="FAIL", cause="driver", next_step=log)
        case "wrong":
            step = "do not compute on it: have the GPU replaced"
            return Finding(**what, verdict="FAIL", cause="memory", next_step=step)
    return None


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


def appraised(node: Node, results: Iterable[Result], usual: float = 1.0) -> Iterator[Finding]:
    """Yield a finding for each GPU and shape, and one of the host where cards differ widely.

    `usual` is which part of what is expected of the canary a healthy card gives here.
    """
    groups: dict[tuple[str, int], list[Result]] = {}
    for one in results:
        if finding := without_value(one):
            yield finding
        elif one.reading is not None and one.reading.value:
            key = (shape_name(one.reading), one.reading.size)
            groups.setdefault(key, []).append(one)
    for group in groups.values():
        found = [_finding(node, one, group, usual) for one in group]
        yield from found
        if all(finding.verdict == "PASS" for finding in found):
            yield from _spread(group)


def _finding(node: Node, one: Result, group: Sequence[Result], usual: float) -> Finding:
    reading = one.reading
    assert reading is not None
    assert reading.value is not None
    others = [
        other
        for other in group
        if other is not one and other.reading and other.reading.model == reading.model
    ]
    what: dict[str, Any] = {
        "name": one.canary,
        "entity": entity(one.gpu),
        "measure": shape_name(reading),
        "value": reading.value,
        "unit": UNITS[one.canary],
        "noise": reading.spread,
    }
    found = opinions(node, reading, [other.reading for other in others if other.reading], usual)
    if not found:
        model = reading.model or "this model"
        return Finding(
            **what,
            verdict="UNKNOWN",
            reason=f"nothing to compare with: no figure of {model}, no baseline, fewer than"
            f" {SIBLINGS} cards",
            cause="",
            next_step="judge the value by the data sheet, or keep it: gpuwatch verify --save",
        )
    order: Sequence[Verdict] = ("FAIL", "WARN", "PASS")
    worst = min(found, key=lambda opinion: order.index(opinion.verdict))
    what |= {"expectation": worst.expectation, "source": worst.source}
    if worst.verdict == "PASS":
        return Finding(**what, verdict="PASS")
    verdict = worst.verdict
    why = why_slow(node, one, others)
    loss = 1 - reading.value / worst.expectation
    reason = f"{loss:.1%} less than expected"
    if (reading.spread or 0.0) > NOISY and loss < (reading.spread or 0.0):
        verdict = "WARN"
        why = Why("host", f"it varies by {reading.spread:.1%} within a second", why.next_step)
    reason = f"{reason}: {why.text}" if why.text else reason
    return Finding(**what, verdict=verdict, reason=reason, cause=why.cause, next_step=why.next_step)


def opinions(
    node: Node, reading: CanaryReading, others: Sequence[CanaryReading], usual: float = 1.0
) -> list[Opinion]:
    """Return what model, siblings and baseline say of a reading, those that say something.

    `others` are the readings of other cards of the model.
    """
    assert reading.value is not None
    said = []
    if model := figure(reading):
        said.append(by_model(reading.value, model, usual))
    alike = [other.value for other in others if other.value]
    if sibling := by_siblings(reading.value, alike):
        said.append(sibling)
    for standing in node.standings:
        same = standing.entity == reading.entity and standing.shape == reading.shape
        if same and standing.current and standing.baseline:
            ratio = reading.value / standing.baseline
            day = time.strftime("%Y-%m-%d", time.localtime(standing.newest))
            verdict = _by_floor(ratio, BASELINE_WARN, BASELINE_FAIL)
            said.append(Opinion(verdict, standing.baseline, f"baseline of {day}"))
    return said


def by_model(value: float, model: Figure, usual: float = 1.0) -> Opinion:
    """Say what the table of models does; `usual` as for `appraised`."""
    wanted = model.value * usual
    warn, fail = WARN_RATIO * wanted, FAIL_RATIO * wanted
    if model.confidence != "measured":
        warn = min(warn, WARN_PEAK * model.peak * usual)
        fail = min(fail, FAIL_PEAK * model.peak * usual)
    verdict: Verdict = "FAIL" if value < fail else "WARN" if value < warn else "PASS"
    kind = "measured on such cards" if model.confidence == "measured" else "data sheet"
    return Opinion(verdict, wanted, kind)


def by_siblings(value: float, others: Sequence[float]) -> Opinion | None:
    """Say what the other cards of the model on this node do; None where they say nothing.

    With few of them a card that is far below is told, but agreeing proves nothing.
    """
    if not others:
        return None
    middle = median(others)
    loss = 1 - value / middle
    source = f"median of {len(others)} siblings" if len(others) > 1 else "the other GPU"
    if len(others) + 1 < SIBLINGS:
        return Opinion("WARN", middle, source) if loss >= FEW_LOSS else None
    sigma = MAD_TO_SIGMA * median([abs(other - middle) for other in others])
    z = (middle - value) / max(sigma, SIGMA_FLOOR * middle)
    flagged = z > SIGMAS and loss >= SIBLING_LOSS
    verdict: Verdict = "PASS" if not flagged else "FAIL" if loss >= SIBLING_FAIL else "WARN"
    return Opinion(verdict, middle, source)


def _by_floor(ratio: float, warn: float, fail: float) -> Verdict:
    return "FAIL" if ratio < fail else "WARN" if ratio < warn else "PASS"


def _spread(group: Sequence[Result]) -> Iterator[Finding]:
    """Yield that the cards differ widely, where none of them stands out."""
    known = {one.gpu: one.reading.value for one in group if one.reading and one.reading.value}
    if len(known) < SIBLINGS:
        return
    low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    spread = (known[high] - known[low]) / median(known.values())
    if spread > SPREAD_RATIO:
        reading = group[0].reading
        assert reading is not None
        yield Finding(
            name=group[0].canary,
            entity="host",
            verdict="WARN",
            measure=f"{shape_name(reading)} spread".strip(),
            value=spread,
            unit="ratio",
            expectation=SPREAD_RATIO,
            source="spread of a healthy node",
            reason=f"the GPUs differ by {spread:.1%}: {entity(low)} gives"
            f" {written(group[0].canary, known[low])}, {entity(high)}"
            f" {written(group[0].canary, known[high])}",
            next_step="compare temperatures and clocks of the two under load: gpuwatch top",
        )

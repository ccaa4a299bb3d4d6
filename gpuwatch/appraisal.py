"""Appraisal: what the figures of a canary say of GPUs, by model, siblings and their own baseline.

No history is needed. Floors are those at which a card is accepted: 0.92 and 0.85 of what such cards
were measured to give, else 0.60 and 0.45 of the data sheet. Siblings find what no table knows: a
card that is far from the median of the others on its node, by a robust z.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from gpuwatch.canary_reading import UNITS, CanaryReading
from gpuwatch.canary_text import written
from gpuwatch.expected import Figure, figure
from gpuwatch.matter import Matter
from gpuwatch.session import Result
from gpuwatch.slowness import Why, why_slow
from gpuwatch.verify import VERDICTS, Finding, Node, Verdict, entity

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


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one thing to compare with says: the value it expects, and from where."""

    verdict: Verdict
    expectation: float
    source: str


def shape_name(reading: CanaryReading) -> str:
    """Return what of a canary a reading measures."""
    return reading.dtype or reading.direction


def without_value(one: Result, name: str = "") -> Finding | None:
    """Return what is to be said of a result that is no measure; None of one that is.

    `name` is that of the check, if it is not that of the canary.
    """
    matter = Matter(name or one.canary, entity(one.gpu))
    log = "look at the kernel log for Xid errors, reset the GPU, run it again"
    idle = "run it again when the GPUs are idle"
    match one.result:
        case "skipped" if one.reason == "no_answer":  # it did when the examination began
            return matter.bad(one.detail, "driver", log)
        case "skipped" if "in use" in one.detail or "job" in one.detail:
            return matter.skipped(one.detail, idle, "busy")
        case "skipped":
            return matter.skipped(one.detail, "mend that, and run it again", "host")
        case "aborted" if "the driver" in one.detail:
            return matter.unknown(one.detail, "driver", log)
        case "aborted":
            return matter.unknown(one.detail, "busy", idle)
        case "failed" if re.search("^not done|^hangs: .* phase (start|import)$", one.detail):
            step = f"run it again, now that torch is in memory: --only {matter.name}, with --deep"
            return matter.unknown(one.detail, "host", step)
        case "failed":
            return matter.bad(one.detail, "driver", log)
        case "wrong":
            step = "do not compute on it: have the GPU replaced"
            return matter.bad(one.detail, "memory", step)
    return None


def appraised(node: Node, results: Iterable[Result], usual_ratio: float = 1.0) -> Iterator[Finding]:
    """Yield a finding for each GPU and shape, and one of the host where cards differ widely.

    `usual_ratio` is the part of what is expected of the canary that a healthy card gives here.
    """
    groups: dict[tuple[str, int], list[Result]] = {}
    for one in results:
        if finding := without_value(one):
            yield finding
        elif one.reading is not None and one.reading.value:
            key = (shape_name(one.reading), one.reading.size)
            groups.setdefault(key, []).append(one)
    for group in groups.values():
        found = [_finding(node, one, group, usual_ratio) for one in group]
        yield from found
        if all(finding.verdict == "PASS" for finding in found):
            yield from _spread(group)


def _finding(node: Node, one: Result, group: Sequence[Result], usual_ratio: float) -> Finding:
    reading = one.reading
    assert reading is not None
    assert reading.value is not None
    others = [
        other
        for other in group
        if other is not one and other.reading and other.reading.model == reading.model
    ]
    matter = Matter(
        name=one.canary,
        entity=entity(one.gpu),
        measure=shape_name(reading),
        unit=UNITS[one.canary],
        noise=reading.spread,
    ).seen(reading.value)
    found = opinions(
        node, reading, [other.reading for other in others if other.reading], usual_ratio
    )
    if not found:
        return matter.unknown(
            f"nothing to compare with: no figure of {reading.model or 'this model'}, no baseline,"
            f" fewer than {SIBLINGS} cards",
            "",
            "judge the value by the data sheet, or keep it: gpuwatch verify --save",
        )
    worst = min(found, key=lambda opinion: VERDICTS.index(opinion.verdict))
    matter = matter.seen(reading.value, worst.expectation, worst.source)
    if worst.verdict == "PASS":
        return matter.good()
    why = why_slow(node, one, others)
    fatal = worst.verdict == "FAIL"
    loss, noise = 1 - reading.value / worst.expectation, reading.spread or 0.0
    if noise > NOISY and loss < noise:
        fatal = False
        why = Why("host", f"it varies by {100 * noise:.1f} % within a second", why.next_step)
    return matter.judged(why.reason(loss), why.cause, why.next_step, fatal=fatal)


def opinions(
    node: Node, reading: CanaryReading, others: Sequence[CanaryReading], usual_ratio: float = 1.0
) -> list[Opinion]:
    """Return what model, siblings and baseline say of a reading, those that say something.

    `others` are the readings of other cards of the model.
    """
    assert reading.value is not None
    said = []
    if model := figure(reading):
        said.append(by_model(reading.value, model, usual_ratio))
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


def by_model(value: float, model: Figure, usual_ratio: float = 1.0) -> Opinion:
    """Say what the table of models does; `usual_ratio` as for `appraised`."""
    wanted = model.value * usual_ratio
    warn, fail = WARN_RATIO * wanted, FAIL_RATIO * wanted
    if model.confidence != "measured":
        warn = min(warn, WARN_PEAK * model.peak * usual_ratio)
        fail = min(fail, FAIL_PEAK * model.peak * usual_ratio)
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
        canary = group[0].canary
        measure = f"{shape_name(reading)} spread".strip()
        matter = Matter(canary, "host", measure, "ratio")
        yield matter.seen(spread, SPREAD_RATIO, "spread of a healthy node").odd(
            f"the GPUs differ by {100 * spread:.1f} %: {entity(low)} gives"
            f" {written(canary, known[low])}, {entity(high)} {written(canary, known[high])}",
            "",
            "compare temperatures and clocks of the two under load: gpuwatch top",
        )

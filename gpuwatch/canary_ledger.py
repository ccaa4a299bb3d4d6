"""The ledger of canaries: what becomes of the result of each run.

A sound run's reading goes into the baselines; every run is counted, and what an operator should
know becomes an event. Counts are those since the daemon's start. All calls come from one thread.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from gpuwatch.baseline import Baseline, Judgement
from gpuwatch.canaries import CANARIES, USUAL
from gpuwatch.canary_reading import RESULTS, CanaryReading
from gpuwatch.canary_text import shape_text
from gpuwatch.clock import monotonic_ns
from gpuwatch.signals import HOST, Entity, Event

WRONG, FAILED, REGRESSION = "canary_wrong_result", "canary_failed", "canary_regression"
TOLD = frozenset((WRONG, FAILED, REGRESSION))
# Why a canary did not run when it was due.
REASONS = (
    "busy",  # somebody uses the GPU, or it is not known that nobody does
    "job",  # of a scheduler, on this host
    "released",  # GPUs are left to another tool
    "paused",
    "compute_mode",
    "mig",
    "no_answer",  # from the driver
    "host_pids",  # a container that cannot see who uses the GPU
    "gpus",  # too few for it
    "shared_memory",
    "not_ready",  # the machine or the interpreter: no torch, NVLink not ready
    "stuck",  # an earlier one has not ended
    "other",
)


class CanaryLedger:
    """Takes results in, and has what became of them.

    `note` gets events, and `run` are the canaries of the config. Of the whole node `runs` counts by
    canary and result, for each GPU one that ran on it, and one that gave several results once for
    each; `skips` by canary and reason.
    """

    def __init__(
        self, baseline: Baseline, note: Callable[[Event], None], run: Iterable[str] = ()
    ) -> None:
        self._baseline = baseline
        self._note = note
        counted = dict.fromkeys((*USUAL, *run))
        self.runs: Counter[tuple[str, str]] = Counter(
            {(canary, result): 0 for canary in counted for result in RESULTS}
        )
        self.skips: Counter[tuple[str, str]] = Counter(
            {(canary, reason): 0 for canary in counted for reason in REASONS}
        )
        self._last_run: dict[tuple[Entity, str], tuple[float, set[str]]] = {}
        # Courses whose regression was told, some of them before this start.
        slow = (one for one in baseline.standings() if one.current and one.state == "regression")
        self._slow: set[tuple[Any, ...]] = {(one.entity, one.shape) for one in slow}
        self._integrity: dict[Entity, bool] = {}  # whether the last result of each GPU was right

    def take(self, result: Mapping[str, Any]) -> bool:
        """Take in a `session.Result` as plain data; return whether to run it again in 5 to 10 s.

        One that makes no sense is told as a failure.
        """
        if result.get("result") == "skipped":
            gpu = result.get("gpu")
            self.skipped(str(result.get("canary")), gpu, str(result.get("reason") or "not_ready"))
            return False
        try:
            reading = CanaryReading.from_json(result)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as fault:
            self._tell(FAILED, HOST, f"a result that is none: {fault!r}"[:200])
            return False
        about = HOST if reading.entity == HOST else Entity("gpu", str(result.get("gpu")))
        now = time.time()
        if reading.time > now:  # the clock was set back meanwhile
            reading = replace(reading, time=now)
        self._count(reading)
        if reading.result == "failed":
            self._tell(FAILED, about, _about(reading))
        if result.get("forced") and reading.result == "ok":
            return False  # somebody was beside it: it says nothing of the GPU
        judgement = self._baseline.add(reading)
        if reading.result == "wrong":
            self._tell(WRONG, about, self._witnessed(reading))
        if reading.canary == "integrity" and reading.result in ("ok", "wrong"):
            self._integrity[reading.entity] = reading.result == "ok"
        self._tell_regression(reading, about, judgement)
        return judgement.retest

    def skipped(self, canary: str, gpu: int | None, reason: str) -> None:
        """Count a canary that did not run on a GPU, or (None) at all; `reason` of `REASONS`."""
        if canary in CANARIES:
            self.skips[canary, reason if reason in REASONS else "other"] += 1

    def _count(self, reading: CanaryReading) -> None:
        """Count the reading's run: all readings of one have its time."""
        key = (reading.entity, reading.canary)
        began, results = self._last_run.get(key, (0.0, set()))
        if began != reading.time:
            results = set()
        self._last_run[key] = (reading.time, results | {reading.result})
        if reading.result not in results:
            self.runs[reading.canary, reading.result] += 1

    def _witnessed(self, reading: CanaryReading) -> str:
        """Say what was wrong, and how many siblings were right when they last ran."""
        others = [
            right
            for entity, right in self._integrity.items()
            if entity not in (reading.entity, HOST)
        ]
        text = _about(reading)
        if reading.entity == HOST or not others:
            return text
        return f"{text}; {sum(others)} of {len(others)} other GPUs were right when they last ran"

    def _tell_regression(self, reading: CanaryReading, about: Entity, judgement: Judgement) -> None:
        """Tell of a regression once it is confirmed; a wrong result has been told."""
        key = (reading.entity, reading.shape)
        if judgement.kind != "regression":
            if judgement.kind == "normal":
                self._slow.discard(key)
        elif judgement.cause != "wrong_result" and key not in self._slow:
            self._slow.add(key)
            what = f"{reading.canary} {shape_text(reading.shape)}"
            self._tell(REGRESSION, about, f"{what}: {judgement.text}")

    def _tell(self, event: str, entity: Entity, detail: str) -> None:
        self._note(Event(monotonic_ns(), entity, event, detail))


def _about(reading: CanaryReading) -> str:
    return f"{reading.canary}: {reading.detail or reading.result}"

"""A session: canaries one after the other on GPUs that nobody uses, and the readings they give."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpuwatch import busy
from gpuwatch.busy import Obstacle
from gpuwatch.canaries import CANARIES, LOADS, Canary
from gpuwatch.canary import LONGEST_SECONDS, Outcome, Run, Task
from gpuwatch.canary_reading import UNITS, CanaryReading
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.expected import expected
from gpuwatch.look import Gpu, Looks
from gpuwatch.rdma_ports import linked
from gpuwatch.signals import HOST, Entity
from gpuwatch.topology import node_processors

POLL_SECONDS = 0.01
CPU_PROCESSES = 2  # without a GPU, of what is done together
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
SHARED_BYTES = 16 << 20  # a GPU, of NCCL's segments
NONE = "says a result that is none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a canary on a GPU, by number, or on the host (None).

    `reading` is there unless it was skipped, for a `reason` as skips are counted by. `detail` is
    why there is no value, or what was wrong.
    `forced`: it ran beside somebody, so it says nothing of the GPU.
    `seen` is what was seen meanwhile of each GPU that took part, by number, as `Looks.between` has
    it. `at_once` are the numbers of those that were tried side by side, if there were several.
    """

    canary: str
    gpu: int | None = None
    at_once: Sequence[int] = ()
    reading: CanaryReading | None = None
    told: Mapping[str, Any] | None = None
    seen: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    detail: str = ""
    reason: str = ""
    forced: bool = False

    @property
    def result(self) -> str:
        """One of a reading's, or "skipped"."""
        return self.reading.result if self.reading else "skipped"

    @property
    def expected(self) -> float | None:
        """What a healthy card of the model gives, None if that is not known."""
        return expected(self.reading) if self.reading and self.reading.result == "ok" else None

    @property
    def expected_ratio(self) -> float | None:
        """The value by what is expected: under 1 is slower."""
        wanted = self.expected
        return (
            self.reading.value / wanted if wanted and self.reading and self.reading.value else None
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; null where something is not known."""
        reading = self.reading.to_json() if self.reading else {"canary": self.canary}
        more = {"algorithm_bytes_per_second": (self.told or {}).get("algorithm_bytes_per_second")}
        return {
            **reading,
            **(more if self.canary.startswith("allreduce") else {}),
            "gpu": self.gpu,
            "at_once": list(self.at_once),
            "result": self.result,
            "detail": self.detail,
            **({} if self.reading else {"reason": self.reason}),
            "forced": self.forced,
            "expected": self.expected,
            "expected_ratio": self.expected_ratio,
        }


class Session:
    """Runs canaries; with `looks` on their GPUs, else on processors.

    `host` is what is known of it; `force` runs also where somebody is, and says so in the reading.
    `side_by_side` tries all GPUs at once: then a reading's `gpus` is how many these were, for they
    share air, power and the way to the host, and it is not compared with that of one alone.
    `stop` is asked before each run and during it, and says why it must end. `stuck` are processes
    that did not end when they were killed: after that nothing runs any more.
    """

    def __init__(
        self,
        python: str,
        size: str,
        looks: Looks | None = None,
        *,
        host: busy.Host | None = None,
        force: bool = False,
        side_by_side: bool = False,
        sysfs: Path = Path("/sys"),
        stop: Callable[[], Obstacle | None] = lambda: None,
    ) -> None:
        self._python, self._size, self._looks = python, size, looks
        self._force, self._sysfs, self._stop = force, sysfs, stop
        self._side_by_side = side_by_side
        self.stuck: list[int] = []
        self._busy: dict[int, Obstacle | None] = {}
        for gpu in looks.gpus.values() if looks else ():
            assert looks is not None
            self._busy[gpu.number] = (
                Obstacle("no_answer", f"does not answer ({gpu.fault})")
                if gpu.fault
                else busy.reason(host or busy.Host(), looks.newest(gpu.number))
            )

    def run(
        self,
        name: str,
        *,
        at_once: int = 1,
        only: Sequence[int] = (),
        seconds: float = 0.0,
        sizes: Sequence[int] = (),
        longest_seconds: float = LONGEST_SECONDS,
    ) -> Iterator[Result]:
        """Run a canary or load and yield what came of it, for each GPU.

        So many GPUs that have a run of their own are tried `at_once`, far ones of the bus together.
        `only` are the numbers of those to try, none for all. `seconds` is for how long a load goes
        on, `sizes` are those of a sweep. A run that takes `longest_seconds` has failed.
        """
        canary = CANARIES.get(name) or LOADS[name]
        more: dict[str, Any] = {
            "seconds": seconds,
            "sizes": sizes,
            "longest_seconds": longest_seconds,
        }
        if self._looks is None:
            processes = CPU_PROCESSES if canary.together else 1
            size = canary.sizes[self._size]
            task = Task(canary=name, size=size, processes=processes, warm_seconds=0.02, **more)
            yield from self._results(canary, [((), task)])
            return
        gpus = [gpu for gpu in self._looks.gpus.values() if not only or gpu.number in only]
        units = [gpus] if canary.together else [[gpu] for gpu in gpus]
        work: list[tuple[Sequence[Gpu], Task]] = []
        for unit in units:
            if fault := self._fault(canary, unit):
                yield self._skip(canary, unit, fault)
                continue
            cpus = node_processors(self._sysfs, unit[0].numa) if len(unit) == 1 else ()
            task = Task(
                canary=name,
                size=canary.sizes[self._size],
                gpus=[gpu.uuid for gpu in unit],
                cpus=cpus,
                **more,
            )
            work.append((unit, task))
        if self._side_by_side:
            at_once = max(1, len(work))
        rounds = -(-len(work) // at_once)
        for first in range(rounds):
            yield from self._results(canary, work[first::rounds])

    def _halt(self) -> Obstacle | None:
        """Return why nothing may run any more, None if it may."""
        if self.stuck:
            return Obstacle("stuck", f"process {self.stuck[0]} of an earlier one does not end")
        return self._stop()

    def _skip(self, canary: Canary, unit: Sequence[Gpu], why: Obstacle) -> Result:
        alone = unit[0].number if len(unit) == 1 else None
        return Result(canary=canary.name, gpu=alone, detail=why.text, reason=why.kind)

    def _fault(self, canary: Canary, unit: Sequence[Gpu]) -> Obstacle | None:
        """Return why a canary cannot run on some GPUs, None if it can."""
        if len(unit) < canary.least_gpus:
            text = f"takes {canary.least_gpus} GPUs or more: {len(unit)} given"
            return Obstacle("gpus", text)
        if canary.by_nics and not linked(self._sysfs):
            return Obstacle("not_ready", "no RDMA port of a NIC is up: see gpuwatch_rdma_port_up")
        for gpu in unit:
            told = self._busy[gpu.number]
            if told and (gpu.fault or not self._force):
                return Obstacle(told.kind, f"GPU {gpu.number}: {told}")
        if len(unit) > 1:
            place = os.statvfs(SHARED_MEMORY)
            if place.f_bavail * place.f_frsize < SHARED_BYTES * len(unit):
                need = f"{SHARED_BYTES * len(unit) >> 20} MiB"
                text = f"{SHARED_MEMORY}: less than {need} free: enlarge it (--shm-size 1g)"
                return Obstacle("shared_memory", text)
        return None

    def _results(
        self, canary: Canary, work: Sequence[tuple[Sequence[Gpu], Task]]
    ) -> Iterator[Result]:
        """Run some at once, and yield what came of each once all have ended."""
        now = time.time()
        if halt := self._halt():
            for unit, _ in work:
                yield self._skip(canary, unit, halt)
            return
        several = self._side_by_side and len(work) > 1
        beside = [unit[0].number for unit, _ in work] if several else []
        for (unit, task), outcome in zip(work, self._await(work), strict=True):
            self.stuck += outcome.stuck
            for result in self._told(canary, unit, task, outcome, now, len(beside)):
                yield replace(result, at_once=beside)

    def _told(
        self,
        canary: Canary,
        unit: Sequence[Gpu],
        task: Task,
        outcome: Outcome,
        now: float,
        beside: int,
    ) -> Iterator[Result]:
        alone = unit[0].number if len(unit) == 1 else None
        if outcome.context_ns:
            now = time.time() - (monotonic_ns() - outcome.context_ns) / SECOND_NS
        when = {"time": now, "seconds": outcome.seconds, **({"gpus": beside} if beside else {})}
        for told in outcome.readings:
            try:
                seen = self._seen(unit, told)
                reading = self._reading(canary, unit, {**told, **when}, seen)
                if reading.result == "ok" and reading.value is None:
                    raise ValueError
            except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError):
                outcome = Outcome(ended="failed", fault=NONE)
                break
            yield Result(
                canary=canary.name,
                gpu=self._number(reading, unit),
                reading=reading,
                told=told,
                seen=seen,
                detail=reading.detail,
                forced=any(self._busy[gpu.number] for gpu in unit),
            )
        if outcome.ended == "skipped":
            yield Result(canary=canary.name, gpu=alone, detail=outcome.fault, reason="not_ready")
        elif outcome.ended != "ok":
            entity = Entity("gpu", unit[0].uuid) if alone is not None else HOST
            reading = CanaryReading(
                canary=canary.name,
                entity=entity,
                time=now,
                result=outcome.ended,
                size=task.size,
                gpus=max(1, len(unit), beside),
                seconds=outcome.seconds,
                detail=outcome.fault,
            )
            yield Result(canary=canary.name, gpu=alone, reading=reading, detail=outcome.fault)

    def _await(self, work: Sequence[tuple[Sequence[Gpu], Task]]) -> list[Outcome]:
        looks = self._looks
        if looks is not None:
            looks.forget()
        outcomes: dict[int, Outcome] = {}
        with ExitStack() as stack:
            runs = [stack.enter_context(Run(task, self._python)) for _, task in work]
            while len(outcomes) < len(runs):
                if looks is not None:
                    looks.poll()
                for place, run in enumerate(runs):
                    if place in outcomes:
                        continue
                    if outcome := run.poll():
                        outcomes[place] = outcome
                    elif why := self._disturbed(work[place][0], run):
                        run.stop(why)
                time.sleep(POLL_SECONDS)
        if looks is not None:
            looks.poll()
        return [outcomes[place] for place in range(len(runs))]

    def _disturbed(self, unit: Sequence[Gpu], run: Run) -> str:
        """Return why a run must end now, "" if it may go on."""
        if halt := self._stop():
            return str(halt)
        looks = self._looks
        if looks is None or self._force:
            return ""
        if looks.fault:
            return looks.fault
        for gpu in unit:
            if who := busy.intruder(looks.newest(gpu.number), run.owns):
                return f"GPU {gpu.number}: {who}"
        return ""

    def _seen(self, unit: Sequence[Gpu], told: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return what was seen of each GPU while a result was made."""
        if self._looks is None:
            return {}
        place = int(told["gpu"])
        chosen = unit if place < 0 else [unit[place]]
        start, end = int(told["start_ns"]), int(told["end_ns"])
        return {gpu.number: self._looks.between(gpu.number, start, end) for gpu in chosen}

    def _reading(
        self,
        canary: Canary,
        unit: Sequence[Gpu],
        told: Mapping[str, Any],
        seen: Mapping[int, Mapping[str, Any]],
    ) -> CanaryReading:
        """Complete what a child told, and of which time, by what was seen meanwhile."""
        place = int(told["gpu"])
        if place < -1:
            raise ValueError(place)
        environment = dict(told["environment"])
        fields: dict[str, Any] = {**told, "canary": canary.name, "entity": HOST}
        if unit:
            gpu = unit[max(0, place)]
            environment = {**gpu.environment, **environment}
            fields["model"] = gpu.name
            if place >= 0:
                fields["entity"] = Entity("gpu", gpu.uuid)
                fields |= seen[gpu.number]
                assert self._looks is not None
                if locked := self._looks.locked_clock(
                    gpu.number, int(told["start_ns"]), int(told["end_ns"])
                ):
                    environment.setdefault("locked_clocks", locked)
            elif len(unit) > 1:  # what lies between these GPUs is not what lies between others
                environment["gpu_set"] = ",".join(str(one.number) for one in unit)
            clock, value = fields.get("clock_hertz"), told.get("value")
            if clock and value and UNITS[canary.name] != "seconds":
                fields["value_per_hertz"] = value / clock
        disturbed = {gpu.number: self._busy[gpu.number] for gpu in unit if self._busy[gpu.number]}
        if disturbed:  # it was forced
            forced = "; ".join(f"GPU {number}: {why}" for number, why in disturbed.items())
            fields["detail"] = f"forced, {forced}{': ' if told.get('detail') else ''}" + str(
                told.get("detail") or ""
            )
        return CanaryReading.from_json({**fields, "environment": environment})

    def _number(self, reading: CanaryReading, unit: Sequence[Gpu]) -> int | None:
        return next((gpu.number for gpu in unit if gpu.uuid == reading.entity.id), None)

"""Canaries of a simulated node: a stand-in that makes the results of a healthy one, GPU by GPU.

What it gives is a function of the seed and the number of the run. Under the scenario `slow-gpu` a
GPU's clock is low from the fault on, and its matmul runs every second for a while: so it is found.
"""

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuwatch.baseline import add_reading
from gpuwatch.baseline_table import Entry, Kept, Taken, epoch
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.clock import SECOND_NS
from gpuwatch.expected import expected
from gpuwatch.scenario import SICK
from gpuwatch.signals import HOST, Entity

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon

SCENARIO = "slow-gpu"
CLOCK_HERTZ = 1.98e9
SEEDS = 24  # looks that are there from the start: baselines are learned
SEED_SECONDS = 1800.0  # from one to the next
PERIOD_NS = 300 * SECOND_NS  # between runs on a GPU
LOSS = 0.08
SOON_NS = 30 * SECOND_NS  # after the fault's beginning, and after its end
NOISE = 0.002
# What runs on a GPU, and how long a run has it; where a healthy card's value is known, it is that.
ON_GPU: Sequence[dict[str, Any]] = (
    *(
        {"canary": "matmul", "size": 8192, "dtype": dtype, "seconds": 1.1}
        for dtype in ("bf16", "fp8", "fp16", "tf32")
    ),
    {"canary": "memory", "size": 512 << 20, "seconds": 0.9},
    *(
        {"canary": "pcie", "size": 256 << 20, "direction": direction, "seconds": 1.2}
        for direction in ("to_gpu", "from_gpu")
    ),
    {"canary": "startup", "value": 0.31, "seconds": 0.4},
    {"canary": "integrity", "size": 4096, "dtype": "int", "value": 0.004, "seconds": 1.6},
)
MATMUL = ON_GPU[:1]
ON_HOST: Sequence[dict[str, Any]] = (
    {"canary": "allreduce", "size": 256 << 20, "value": 4.2e11, "seconds": 2.4},
    {"canary": "integrity", "size": 4 << 20, "dtype": "int32", "value": 0.001, "seconds": 1.6},
)
ENVIRONMENT = {"driver": "simulated", "power_limit_watts": "700"}


class SimulatedCanaries:
    """Gives a daemon's ledger results on each `look`, once a second, if its node is made up."""

    def __init__(self, daemon: "Daemon") -> None:
        config = daemon.config
        self._seed, self._lasts = config["simulated"]["seed"], config["simulated"]["fault_seconds"]
        self._sick = Entity("gpu", str(min(SICK, config["simulated"]["gpus"] - 1)))
        self._slow = config["source"]["scenario"] == SCENARIO
        self._on = config["source"]["kind"] == "simulated" and config["simulated"]["canaries"]
        self._daemon = daemon
        self._due_ns: dict[Entity, int] = {}
        self._runs = 0

    def look(self, gpus: Mapping[str, Entity], now_ns: int) -> None:
        """Run what is due on one GPU, or what runs on all together; `gpus` are here, by uuid."""
        places = {gpu: Entity("gpu", uuid) for uuid, gpu in gpus.items()} if self._on else {}
        if len(places) > 1:
            places[HOST] = HOST
        slow, soon = self._fault(now_ns)
        if soon and self._sick in self._due_ns and self._sick in places:
            self._run(self._sick, places, MATMUL, slow=slow)
        for place in places:
            if now_ns >= self._due_ns.get(place, 0):
                shapes = ON_HOST if place == HOST else ON_GPU
                if place not in self._due_ns:
                    self._seed_baselines(place, places, shapes)
                self._due_ns[place] = now_ns + PERIOD_NS
                self._run(place, places, shapes, slow=slow and place == self._sick)
                return

    def _fault(self, now_ns: int) -> tuple[bool, bool]:
        """Return whether the fault is on, and whether that began or ended a moment ago."""
        told = (one for one in self._daemon.events if one.name == "scenario_fault")
        event = next(told, None) if self._slow else None
        if event is None or now_ns < event.time_ns:
            return False, False
        since = now_ns - event.time_ns
        lasts = int(self._lasts * SECOND_NS) or 2**63
        return since < lasts, since < SOON_NS or 0 <= since - lasts < SOON_NS

    def _run(
        self,
        place: Entity,
        places: Mapping[Entity, Entity],
        shapes: Iterable[Mapping[str, Any]],
        *,
        slow: bool,
    ) -> None:
        """Give the ledger the results of one run of each canary."""
        now = time.time()
        for shape in shapes:
            reading = self._reading(place, places, shape, now, slow=slow)
            number = None if place == HOST else int(place.id)
            self._daemon.canary_ledger.take({**reading.to_json(), "gpu": number})

    def _seed_baselines(
        self,
        place: Entity,
        places: Mapping[Entity, Entity],
        shapes: Iterable[Mapping[str, Any]],
    ) -> None:
        """Have it as if canaries had run for half a day; what is there already stays."""
        first = time.time() - SEED_SECONDS * SEEDS
        courses = []
        for shape in shapes:
            readings = [
                self._reading(place, places, shape, first + number * SEED_SECONDS)
                for number in range(SEEDS)
            ]
            one = readings[0]
            entry = Entry(one.entity, one.shape, epoch(one.environment), one.model)
            kinds = [add_reading(entry, reading, frozen=False).kind for reading in readings]
            taken = [Taken(*pair) for pair in zip(readings, [False] * SEEDS, kinds, strict=True)]
            courses.append(Kept(entry, taken))
        self._daemon.baseline.take(courses)

    def _reading(
        self,
        place: Entity,
        places: Mapping[Entity, Entity],
        shape: Mapping[str, Any],
        when: float,
        *,
        slow: bool = False,
    ) -> CanaryReading:
        self._runs += 1
        noise = random.Random(f"{self._seed} {place} {self._runs}").gauss(0, NOISE)  # noqa: S311
        clock = CLOCK_HERTZ * (1 - LOSS if slow else 1)
        environment = dict(ENVIRONMENT)
        told = {"entity": places[place], "model": "NVIDIA H200", "time": when, **shape}
        if place == HOST:
            told["gpus"] = len(places) - 1
            environment["gpu_set"] = ",".join(one.id for one in places if one != HOST)
            environment["algorithm"] = "nvls"
        else:
            told |= {"clock_hertz": clock, "temperature_celsius": 52.0, "power_watts": 640.0}
        told["environment"] = environment
        value = expected(CanaryReading.from_json(told)) or shape["value"]
        lost = LOSS if slow and shape["canary"] == "matmul" else 0.0
        told["value"] = value * (1 + noise) * (1 - lost)
        if place != HOST and shape["canary"] in ("matmul", "memory"):
            told["value_per_hertz"] = told["value"] / clock
        return CanaryReading.from_json({**told, "spread": 0.004, "throttle_seconds": 0.0})

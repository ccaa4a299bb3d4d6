"""The scenario: what a simulated node is and what happens to it, for all that stand in there.

GPUs train in steps of 1.3 s: they compute, then they communicate. The scenario's fault starts some
seconds after the daemon is ready. Everything is a function of time and seed, so that stand-ins of
different sources, in different processes, tell one story.
"""

import math
import os
import random
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from gpuwatch import pulse as page
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.signals import Entity
from gpuwatch.source import Context, EntityInfo, Findings, Opened

SCENARIOS = (
    *("healthy", "power-capped", "thermal", "power-brake"),
    *("gpu-lost", "gpu-hang", "xid-79", "starved", "mig", "rdma-loss", "rdma-flap"),
    *("nvlink-down", "pcie-degraded", "slow-gpu"),
)
FAULTLESS = ("healthy", "power-capped")

SICK = 2  # the GPU that a scenario's fault strikes; the last of a smaller node
STEP_NS = 1300 * MILLISECOND_NS
COMPUTE_NS = STEP_NS * 4 // 5  # the rest of a step is communication
COMPUTE_SHARE = COMPUTE_NS / STEP_NS
CLOCK_MAX = 1.98e9
SLOWED = {"thermal": 1.2e9, "power-brake": 0.99e9}  # the SM clock of the GPU with this fault
APART_NS = 4 * MILLISECOND_NS  # from one GPU to the next
STARVED_NS, WAIT_NS = 3 * SECOND_NS, SECOND_NS  # starved: so long of each such time without work
REFRESH_NS = 100 * MILLISECOND_NS  # of what the driver keeps ready
# How the GPU of `mig` is divided, and how the fault divides it anew: number, slices, profile.
DIVIDED = ((1, 3, "3g.71gb"), (2, 3, "3g.71gb"))
DIVIDED_ANEW = ((7, 1, "1g.18gb"), (8, 1, "1g.18gb"), (9, 2, "2g.35gb"))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A made-up GPU: its number in the node, and its place among those of this process."""

    number: int
    place: int
    entity: Entity
    excluded: bool

    @property
    def info(self) -> EntityInfo:
        """What is known of it."""
        return EntityInfo(
            self.entity,
            {
                "uuid": f"GPU-51300000-0000-4000-8000-{self.number:012x}",
                "name": "Simulated H200",
                "pci_bus_id": self.entity.id,
                "nvml_index": str(self.number),
                "minor": str(self.number),
                "serial": f"51300{self.number}",
                "driver": "simulated",
                "numa": str(self.number // 4),
            },
        )


class Scenario:
    """One scenario with its GPUs, as the settings of a child say."""

    def __init__(self, context: Context) -> None:
        config = context.settings["config"]
        simulated = config["simulated"]
        self.name = str(config["source"]["scenario"])
        self.start_ns: int = context.settings["ready_ns"] + int(
            simulated["fault_after_seconds"] * SECOND_NS
        )
        lasts = int(simulated["fault_seconds"] * SECOND_NS)
        self.end_ns = self.start_ns + lasts if lasts else 2**63
        self._sick = min(SICK, simulated["gpus"] - 1)
        self._seed = simulated["seed"]
        self._words = context.pulse.words
        self._supervisor = os.getppid()
        addresses = [
            f"{number // 16:04x}:{0x1B + 8 * (number % 16):02x}:00.0"
            for number in range(simulated["gpus"])
        ]
        self.sick = Entity("gpu", addresses[self._sick])
        chosen = [
            number for number, address in enumerate(addresses) if context.only in (None, address)
        ]
        self.gpus = tuple(
            Gpu(
                number,
                place,
                Entity("gpu", addresses[number]),
                addresses[number] in context.excluded,
            )
            for place, number in enumerate(chosen)
        )

    def fault(self, now_ns: int) -> str:
        """Return the scenario's name while its fault is on, else "" (of a faultless one too)."""
        on = self.name not in FAULTLESS and self.start_ns <= now_ns < self.end_ns
        return self.name if on else ""

    def fault_of(self, gpu: Gpu, now_ns: int) -> str:
        """Return what a read of this GPU meets; one that hangs does not return before its end.

        A GPU that is left alone, or has fallen off the bus, is as good as lost.
        """
        if gpu.excluded:
            return "gpu-lost"
        fault = self.fault(now_ns) if gpu.number == self._sick else ""
        if fault == "xid-79":
            return "gpu-lost"
        if fault == "gpu-hang":
            self._hang(gpu)
        return fault

    def silent(self, gpu: Gpu, now_ns: int) -> bool:
        """Say whether a GPU has stopped to count, without asking it, which may hang."""
        fault = self.fault(now_ns) if gpu.number == self._sick else ""
        return gpu.excluded or fault in ("gpu-lost", "gpu-hang", "xid-79")

    def clock(self, gpu: Gpu, now_ns: int) -> float:
        """Return the SM clock of a GPU that works."""
        fault = self.fault(now_ns) if gpu.number == self._sick else ""
        if self.name == "power-capped" and self.busy(gpu, now_ns):
            # It moves in steps of 15 MHz about every 50 ms, as the driver's does.
            return 1.68e9 + 15e6 * int(6 * math.sin(now_ns // (50 * MILLISECOND_NS) + gpu.number))
        return SLOWED.get(fault, CLOCK_MAX)

    def instances(self, gpu: Gpu, now_ns: int) -> tuple[EntityInfo, ...]:
        """Return the MIG instances of a GPU, () of one that is not divided."""
        if self.name != "mig" or gpu.number != self._sick or gpu.excluded:
            return ()
        return tuple(
            EntityInfo(
                Entity("gpu_instance", f"{gpu.entity.id}/{number}"),
                {
                    "uuid": f"MIG-51300000-0000-4000-8000-{gpu.number:06x}{number:06x}",
                    "profile": profile,
                    "slices": str(slices),
                },
            )
            for number, slices, profile in (DIVIDED_ANEW if self.fault(now_ns) else DIVIDED)
        )

    def phase(self, gpu: Gpu, now_ns: int) -> float:
        """Return where in its step a GPU is, 0 to 1."""
        return self.worked_ns(gpu, now_ns) % STEP_NS / STEP_NS

    def busy(self, gpu: Gpu, now_ns: int) -> bool:
        """Say whether a GPU computes."""
        return self.phase(gpu, now_ns) <= COMPUTE_SHARE and not self.waits(now_ns)

    def waits(self, now_ns: int) -> bool:
        """Say whether all GPUs wait for their input."""
        starved = self.fault(now_ns) == "starved"
        return starved and (now_ns - self.start_ns) % STARVED_NS < WAIT_NS

    def waited_ns(self, now_ns: int) -> int:
        """Return for how long the GPUs have waited until now."""
        if self.name != "starved" or now_ns < self.start_ns:
            return 0
        times, rest = divmod(min(now_ns, self.end_ns) - self.start_ns, STARVED_NS)
        return times * WAIT_NS + min(rest, WAIT_NS)

    def worked(self, gpu: Gpu, now_ns: int) -> tuple[float, float]:
        """Return seconds of computing and of communication until now: what counters grow by.

        In whole nanoseconds, so that neither ever falls, which a counter would take for a reset.
        """
        whole, part = divmod(self.worked_ns(gpu, now_ns), STEP_NS)
        computed = whole * COMPUTE_NS + min(part, COMPUTE_NS)
        communicated = whole * (STEP_NS - COMPUTE_NS) + max(part - COMPUTE_NS, 0)
        return computed / SECOND_NS, communicated / SECOND_NS

    def noise(self, gpu: Gpu, slot: int) -> float:
        """Return the noise of one refresh, -1 to 1."""
        return random.Random(f"{self._seed} {gpu.number} {slot}").uniform(-1.0, 1.0)  # noqa: S311 - no secret

    def worked_ns(self, gpu: Gpu, now_ns: int) -> int:
        """Return for how long a GPU has been in its steps; a job's GPUs run nearly together."""
        return now_ns - self.waited_ns(now_ns) + gpu.number * APART_NS

    def _hang(self, gpu: Gpu) -> None:
        """Do not return while the fault lasts, as a call to a sick GPU does not.

        A real one could be ended by nobody; this one ends with the supervisor.
        """
        self._words[page.READING] = gpu.place
        while monotonic_ns() < self.end_ns and os.getppid() == self._supervisor:
            time.sleep(0.05)
        self._words[page.READING] = page.NOT_READING
        if os.getppid() != self._supervisor:
            os._exit(0)


class ScenarioSource(ABC):
    """A source that stands in on the GPUs of a scenario, and follows one that is divided anew.

    Who inherits from it says in `look` what there is at a time.
    """

    def __init__(self) -> None:
        self.findings = Findings()

    @abstractmethod
    def look(self, now_ns: int) -> Opened:
        """Return the groups and entities there are."""

    def open(self, context: Context) -> Opened:
        """Make up the GPUs of the scenario."""
        self.scenario = Scenario(context)
        context.pulse.set_names([gpu.entity.id for gpu in self.scenario.gpus])
        self._found = self.look(monotonic_ns())
        return self._found

    def housekeep(self, now_ns: int) -> Opened | None:
        """Look whether a GPU was divided anew."""
        before, self._found = self._found, self.look(now_ns)
        same = (before.entities, before.tenants) == (self._found.entities, self._found.tenants)
        return None if same else self._found

    def close(self) -> None:  # noqa: B027 - as any of them has it
        """Nothing is held."""

"""Stands in for `jobs` and `processes`: a training job on even GPUs, a pod on odd ones."""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.job_signals import TENANTS
from gpuwatch.scenario import Gpu, Scenario
from gpuwatch.signals import Column
from gpuwatch.source import Context, Findings, Group, Opened, Tenant

JOB = {
    "job_id": "4217",
    "user": "simulated",
    "job_name": "train",
    "account": "research",
    "partition": "gpu",
}
POD = {
    "namespace": "research",
    "pod": "train-0",
    "container": "trainer",
    "pod_uid": "51300000-0000-4000-8000-000000000000",
}
PROCESS = {"user": "simulated", "command": "python3"}


class SimulatedJobs:
    """Source of the duty `counters` on a simulated node."""

    name = "jobs"
    kinds: ClassVar[Sequence[str]] = ("job", "pod")

    def __init__(self) -> None:
        self.findings = Findings()

    def open(self, context: Context) -> Opened:
        """Make up the GPUs of the scenario."""
        self._scenario = Scenario(context)
        context.pulse.set_names([gpu.entity.id for gpu in self._scenario.gpus])
        return self._look(monotonic_ns())

    def housekeep(self, now_ns: int) -> Opened | None:
        """Look whether a GPU was divided anew."""
        before, found = self._found, self._look(now_ns)
        return found if found.tenants != before.tenants else None

    def close(self) -> None:
        """Nothing is held."""

    def _tenants(self, gpu: Gpu, now_ns: int) -> list[Tenant]:
        """Return who uses a GPU, of a divided one its first instance."""
        entities = [info.entity for info in self._scenario.instances(gpu, now_ns)]
        entity = entities[0] if entities else gpu.entity
        return [Tenant("pod", entity, POD) if gpu.number % 2 else Tenant("job", entity, JOB)]

    def _look(self, now_ns: int) -> Opened:
        groups, infos, tenants = [], [], []
        for gpu in self._scenario.gpus:
            columns = tuple(Column(gpu.entity, TENANTS, kind) for kind in self.kinds)
            reader = self._reader(gpu)
            groups.append(Group(f"{self.name}{gpu.place}", columns, SECOND_NS, reader))
            infos += [gpu.info, *self._scenario.instances(gpu, now_ns)]
            tenants += self._tenants(gpu, now_ns)
        self._found = Opened(tuple(groups), tuple(infos), tenants=tuple(tenants))
        return self._found

    def _reader(self, gpu: Gpu) -> Callable[[], Sequence[float]]:
        def read() -> Sequence[float]:
            now_ns = monotonic_ns()
            if self._scenario.fault_of(gpu, now_ns) == "gpu-lost":
                return [math.nan for _ in self.kinds]
            kinds = [tenant.kind for tenant in self._tenants(gpu, now_ns)]
            return [float(kinds.count(kind)) for kind in self.kinds]

        return read


class SimulatedProcesses(SimulatedJobs):
    """Source of the duty `counters` on a simulated node."""

    name = "processes"
    kinds = ("process",)

    def _tenants(self, gpu: Gpu, now_ns: int) -> list[Tenant]:
        found = super()._tenants(gpu, now_ns)
        return [Tenant("process", tenant.entity, PROCESS) for tenant in found]

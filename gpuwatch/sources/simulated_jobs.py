"""Stands in for `jobs` and `processes`: a training job on even GPUs, a pod on odd ones."""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.job_signals import TENANTS
from gpuwatch.scenario import Gpu, ScenarioSource
from gpuwatch.signals import Column
from gpuwatch.source import Group, Opened, Tenant

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


class SimulatedJobs(ScenarioSource):
    """Source of the duty `counters` on a simulated node."""

    name = "jobs"
    kinds: ClassVar[Sequence[str]] = ("job", "pod")

    def _tenants(self, gpu: Gpu, now_ns: int) -> list[Tenant]:
        """Return who uses a GPU, of a divided one its first instance."""
        entities = [info.entity for info in self.scenario.instances(gpu, now_ns)]
        entity = entities[0] if entities else gpu.entity
        return [Tenant("pod", entity, POD) if gpu.number % 2 else Tenant("job", entity, JOB)]

    def look(self, now_ns: int) -> Opened:
        """Return what there is of each GPU and MIG instance."""
        groups, infos, tenants = [], [], []
        for gpu in self.scenario.gpus:
            columns = tuple(Column(gpu.entity, TENANTS, kind) for kind in self.kinds)
            reader = self._reader(gpu)
            groups.append(Group(f"{self.name}{gpu.place}", columns, SECOND_NS, reader))
            infos += [gpu.info, *self.scenario.instances(gpu, now_ns)]
            tenants += self._tenants(gpu, now_ns)
        return Opened(tuple(groups), tuple(infos), tenants=tuple(tenants))

    def _reader(self, gpu: Gpu) -> Callable[[], Sequence[float]]:
        def read() -> Sequence[float]:
            now_ns = monotonic_ns()
            if self.scenario.fault_of(gpu, now_ns) == "gpu-lost":
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

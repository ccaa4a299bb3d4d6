"""Stands in for `mig`: off, but for the GPU that the scenario `mig` divides."""

from collections.abc import Sequence

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.mig_signals import INSTANCE_MEMORY_SIGNALS, MIG_ENABLED
from gpuwatch.scenario import Gpu, ScenarioSource
from gpuwatch.signals import UNKNOWN_GAUGE, Column
from gpuwatch.source import EntityInfo, Group, Opened

USED_SHARE = 0.62


class SimulatedMig(ScenarioSource):
    """Source of the duty `counters` on a simulated node."""

    name = "mig"

    def look(self, now_ns: int) -> Opened:
        """Return what there is of each GPU and MIG instance."""
        groups, infos = [], []
        for gpu in self.scenario.gpus:
            instances = self.scenario.instances(gpu, now_ns)
            groups.append(self._mode_group(gpu, float(bool(instances))))
            groups += [self._memory_group(gpu, info) for info in instances]
            infos += [gpu.info, *instances]
        return Opened(tuple(groups), tuple(infos))

    def _mode_group(self, gpu: Gpu, on: float) -> Group:
        columns = tuple(Column(gpu.entity, MIG_ENABLED, when) for when in ("current", "pending"))

        def read() -> Sequence[float]:
            lost = self.scenario.fault_of(gpu, monotonic_ns()) == "gpu-lost"
            return (UNKNOWN_GAUGE if lost else on,) * len(columns)

        return Group(f"mig{gpu.place}", columns, 5 * SECOND_NS, read)

    def _memory_group(self, gpu: Gpu, info: EntityInfo) -> Group:
        columns = tuple(Column(info.entity, signal) for signal in INSTANCE_MEMORY_SIGNALS)
        size = int(info.labels["profile"].partition(".")[2].removesuffix("gb")) * 1e9
        row = (USED_SHARE * size, (1 - USED_SHARE) * size, size)
        name = f"mig{gpu.place}-{info.entity.id.rpartition('/')[2]}"
        return Group(name, columns, SECOND_NS, lambda: row)

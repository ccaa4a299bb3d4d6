"""Stands in for `mig`: off, but for the GPU that the scenario `mig` divides."""

from collections.abc import Sequence

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.mig_signals import INSTANCE_MEMORY_SIGNALS, MIG_ENABLED
from gpuwatch.scenario import Gpu, Scenario
from gpuwatch.signals import UNKNOWN_GAUGE, Column
from gpuwatch.source import Context, EntityInfo, Findings, Group, Opened

USED_SHARE = 0.62


class SimulatedMig:
    """Source of the duty `counters` on a simulated node."""

    name = "mig"

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
        return found if found.entities != before.entities else None

    def close(self) -> None:
        """Nothing is held."""

    def _look(self, now_ns: int) -> Opened:
        groups, infos = [], []
        for gpu in self._scenario.gpus:
            instances = self._scenario.instances(gpu, now_ns)
            groups.append(self._mode_group(gpu, float(bool(instances))))
            groups += [self._memory_group(gpu, info) for info in instances]
            infos += [gpu.info, *instances]
        self._found = Opened(tuple(groups), tuple(infos))
        return self._found

    def _mode_group(self, gpu: Gpu, on: float) -> Group:
        columns = tuple(Column(gpu.entity, MIG_ENABLED, when) for when in ("current", "pending"))

        def read() -> Sequence[float]:
            lost = self._scenario.fault_of(gpu, monotonic_ns()) == "gpu-lost"
            return (UNKNOWN_GAUGE if lost else on,) * len(columns)

        return Group(f"mig{gpu.place}", columns, 5 * SECOND_NS, read)

    def _memory_group(self, gpu: Gpu, info: EntityInfo) -> Group:
        columns = tuple(Column(info.entity, signal) for signal in INSTANCE_MEMORY_SIGNALS)
        size = int(info.labels["profile"].partition(".")[2].removesuffix("gb")) * 1e9
        row = (USED_SHARE * size, (1 - USED_SHARE) * size, size)
        name = f"mig{gpu.place}-{info.entity.id.rpartition('/')[2]}"
        return Group(name, columns, SECOND_NS, lambda: row)

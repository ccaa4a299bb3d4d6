"""Stands in for `gpm`: busy while the job computes, nearly idle while it communicates."""

from collections.abc import Callable, Sequence

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.gpu_signals import ACTIVE_SIGNALS
from gpuwatch.mig_signals import INSTANCE_ACTIVE_SIGNALS
from gpuwatch.scenario import REFRESH_NS, Gpu, Scenario
from gpuwatch.signals import UNKNOWN_GAUGE, Column, Entity, Signal
from gpuwatch.source import Context, Findings, Group, Opened

COMPUTING = (0.93, 0.58, 0.37, 0.99)  # in the order of ACTIVE_SIGNALS
COMMUNICATING = (0.22, 0.0, 0.09, 0.97)
NOISE = 0.01
PERIOD_NS = 110 * MILLISECOND_NS


class SimulatedGpm:
    """Source of the duty `counters` on a simulated node."""

    name = "gpm"

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
            groups.append(self._group(f"gpm{gpu.place}", gpu, gpu.entity, ACTIVE_SIGNALS))
            infos.append(gpu.info)
            for info in self._scenario.instances(gpu, now_ns):
                name = f"gpm{gpu.place}-{info.entity.id.rpartition('/')[2]}"
                groups.append(self._group(name, gpu, info.entity, INSTANCE_ACTIVE_SIGNALS))
                infos.append(info)
        self._found = Opened(tuple(groups), tuple(infos))
        return self._found

    def _group(self, name: str, gpu: Gpu, entity: Entity, signals: Sequence[Signal]) -> Group:
        columns = tuple(Column(entity, signal) for signal in signals)
        return Group(name, columns, PERIOD_NS, self._reader(gpu))

    def _reader(self, gpu: Gpu) -> Callable[[], Sequence[float]]:
        scenario = self._scenario

        def read() -> Sequence[float]:
            now = monotonic_ns()
            if scenario.fault_of(gpu, now) == "gpu-lost":
                return (UNKNOWN_GAUGE,) * len(ACTIVE_SIGNALS)
            slot = now // REFRESH_NS
            before = scenario.worked(gpu, (slot - 1) * REFRESH_NS)
            after = scenario.worked(gpu, slot * REFRESH_NS)
            computed, communicated = (
                max(late - early, 0.0) * SECOND_NS / REFRESH_NS  # rounding may go below
                for early, late in zip(before, after, strict=True)
            )
            noise = 1 + NOISE * scenario.noise(gpu, slot)
            return [
                min((high * computed + low * communicated) * noise, 1.0)
                for high, low in zip(COMPUTING, COMMUNICATING, strict=True)
            ]

        return read

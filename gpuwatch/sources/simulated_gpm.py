"""Stands in for `gpm`: busy while the job computes, nearly idle while it communicates."""

from collections.abc import Callable, Sequence

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.gpu_signals import ACTIVE_SIGNALS, GRAPHICS_ACTIVE
from gpuwatch.mig_signals import INSTANCE_ACTIVE_SIGNALS, INSTANCE_GRAPHICS_ACTIVE
from gpuwatch.scenario import REFRESH_NS, Gpu, ScenarioSource
from gpuwatch.signals import UNKNOWN_GAUGE, Column, Entity, Signal
from gpuwatch.source import Group, Opened

# Of each signal, without the entity it is of: while the job computes, while it communicates.
SHARES = {
    "sm_active_ratio": (0.93, 0.22),
    "tensor_active_ratio": (0.58, 0.0),
    "dram_active_ratio": (0.37, 0.09),
    "graphics_active_ratio": (0.99, 0.97),
}
NOISE = 0.01
PERIOD_NS = 110 * MILLISECOND_NS


class SimulatedGpm(ScenarioSource):
    """Source of the duty `counters` on a simulated node."""

    name = "gpm"

    def look(self, now_ns: int) -> Opened:
        """Return what there is of each GPU and MIG instance."""
        groups: list[Group] = []
        infos = []
        for gpu in self.scenario.gpus:
            name = f"gpm{gpu.place}"
            groups += self._groups(name, gpu, gpu.entity, ACTIVE_SIGNALS, GRAPHICS_ACTIVE)
            infos.append(gpu.info)
            for info in self.scenario.instances(gpu, now_ns):
                name = f"gpm{gpu.place}-{info.entity.id.rpartition('/')[2]}"
                signals = (INSTANCE_ACTIVE_SIGNALS, INSTANCE_GRAPHICS_ACTIVE)
                groups += self._groups(name, gpu, info.entity, *signals)
                infos.append(info)
        return Opened(tuple(groups), tuple(infos))

    def _groups(
        self, name: str, gpu: Gpu, entity: Entity, shares: Sequence[Signal], any_work: Signal
    ) -> list[Group]:
        columns = [Column(entity, signal) for signal in (*shares, any_work)]
        return [
            Group(name, tuple(columns[:-1]), PERIOD_NS, self._reader(gpu, columns[:-1], 1)),
            Group(
                f"{name}-any", tuple(columns[-1:]), SECOND_NS, self._reader(gpu, columns[-1:], 10)
            ),
        ]

    def _reader(
        self, gpu: Gpu, columns: Sequence[Column], refreshes: int
    ) -> Callable[[], Sequence[float]]:
        """Return the read of shares over so many refreshes of the driver."""
        scenario, span_ns = self.scenario, refreshes * REFRESH_NS
        levels = [
            SHARES[column.signal.name.removeprefix(f"{column.entity.kind}_")] for column in columns
        ]

        def read() -> Sequence[float]:
            now = monotonic_ns()
            if scenario.fault_of(gpu, now) == "gpu-lost":
                return (UNKNOWN_GAUGE,) * len(columns)
            slot = now // REFRESH_NS
            before = scenario.worked(gpu, slot * REFRESH_NS - span_ns)
            after = scenario.worked(gpu, slot * REFRESH_NS)
            computed, communicated = (
                max(late - early, 0.0) * SECOND_NS / span_ns  # rounding may go below
                for early, late in zip(before, after, strict=True)
            )
            noise = 1 + NOISE * scenario.noise(gpu, slot)
            return [
                min((high * computed + low * communicated) * noise, 1.0) for high, low in levels
            ]

        return read

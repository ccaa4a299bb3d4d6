"""Stands in for `nvml_counters`: the same groups, of GPUs that work and stay healthy."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.delivered import Delivered
from gpuwatch.gpu_health_signals import PCIE_GENERATION_LIMIT, PCIE_WIDTH_LIMIT
from gpuwatch.gpu_readings import GROUPS
from gpuwatch.gpu_signals import (
    BYTES_MOVED,
    CLOCK_LIMIT,
    HUNG,
    PCIE_RECEIVED,
    PCIE_TRANSMITTED,
    POWER_LIMIT,
    POWER_SAMPLE,
    THRESHOLD,
    XIDS_HEARD,
)
from gpuwatch.pm_signals import DRAM_LIMIT, NVLINK_LIMIT
from gpuwatch.scenario import Gpu, Scenario
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Kind
from gpuwatch.source import Context, EntityInfo, Findings, Group, Opened, TimedRow

PCIE_PERIOD_NS = 33 * MILLISECOND_NS
POWER_PERIOD_NS, POWER_DELIVERY_NS = 20 * MILLISECOND_NS, 250 * MILLISECOND_NS
MEMORY = {"used": 118_000_000_000, "free": 32_100_000_000, "reserved": 654_000_000}
STEADY: Mapping[str, float] = {  # what does not move
    **{f"gpu_memory_{part}_bytes": size for part, size in MEMORY.items()},
    "gpu_memory_size_bytes": sum(MEMORY.values()),
    "gpu_processes": 1,
    'gpu_clock_hertz{clock="video"}': 1.545e9,
    "gpu_pcie_link_generation": 5,
    "gpu_pcie_link_width_lanes": 16,
    "gpu_nvlink_links_up": 18,
    "gpu_fabric_state": 3,
    "gpu_temperature_margin_celsius": 31.0,
    'gpu_ecc_lifetime_errors_total{type="corrected"}': 3,
    'gpu_remapped_rows_total{type="corrected"}': 1,
}
RATES: Mapping[str, tuple[float, float]] = {  # per second of computing, and of communication
    "gpu_pcie_received_bytes_total": (2e9, 1e8),
    "gpu_pcie_transmitted_bytes_total": (3e8, 1e8),
    "gpu_nvlink_received_bytes_total": (2e7, 2.4e8),  # KiB
    "gpu_nvlink_transmitted_bytes_total": (2e7, 2.4e8),
    "gpu_energy_joules_total": (560e3, 380e3),  # millijoules
}
FAULTY: Mapping[str, Mapping[str, float]] = {  # by the scenario's fault
    "thermal": {"gpu_temperature_margin_celsius": -2.0},
    "nvlink-down": {"gpu_nvlink_links_up": 17},
    "pcie-degraded": {"gpu_pcie_link_width_lanes": 8},
}
THROTTLED = {  # the reason of which a scenario's time is counted
    "thermal": 'gpu_throttle_seconds_total{reason="hw_thermal_slowdown"}',
    "power-brake": 'gpu_throttle_seconds_total{reason="hw_power_brake"}',
}
CAPPED = 'gpu_throttle_seconds_total{reason="sw_power_cap"}'
ABSENT = ("gpu_retired_pages_total", "gpu_retired_pages_pending")  # on GPUs that remap rows
LIMITS = (
    *((POWER_LIMIT, name, 700.0) for name in ("enforced", "requested", "default", "max")),
    (POWER_LIMIT, "min", 200.0),
    (CLOCK_LIMIT, "video", 1.545e9),
    (THRESHOLD, "shutdown", 95.0),
    (THRESHOLD, "slowdown", 89.0),
    (THRESHOLD, "memory_max", 95.0),
    (THRESHOLD, "core_max", 87.0),
    (PCIE_GENERATION_LIMIT, "", 5.0),
    (PCIE_WIDTH_LIMIT, "", 16.0),
    (DRAM_LIMIT, "", 4.917e12),
    (NVLINK_LIMIT, "", 18 * 26.562e9),
)
MODES = {
    "compute_mode": "default",
    "ecc_mode": "on",
    "ecc_mode_pending": "on",
    "persistence_mode": "on",
}


class SimulatedCounters:
    """Source of the duty `counters` on a simulated node."""

    name = "nvml_counters"

    def __init__(self) -> None:
        self.findings = Findings()

    def open(self, context: Context) -> Opened:
        """Make up the GPUs of the scenario."""
        self._scenario = Scenario(context)
        self._delivered = Delivered(context.runtime, "pm")
        gpus = self._scenario.gpus
        context.pulse.set_names([gpu.entity.id for gpu in gpus])
        hung = Group(
            "hung",
            (
                *(Column(gpu.entity, HUNG, "counters") for gpu in gpus),
                *(Column(gpu.entity, XIDS_HEARD) for gpu in gpus),
            ),
            SECOND_NS,
            lambda: [*(float(gpu.excluded) for gpu in gpus), *(1.0 for _ in gpus)],
        )
        groups = [group for gpu in gpus for group in self._groups(gpu)]
        infos = [
            EntityInfo(gpu.entity, {**gpu.info.labels, **MODES, **self._mig(gpu)}) for gpu in gpus
        ]
        constants = [
            (Column(gpu.entity, signal, label), value)
            for gpu in gpus
            for signal, label, value in LIMITS
        ]
        return Opened((hung, *groups), tuple(infos), tuple(constants))

    def housekeep(self, now_ns: int) -> None:
        """Nothing needs upkeep."""

    def close(self) -> None:
        """Nothing is held."""

    def _mig(self, gpu: Gpu) -> Mapping[str, str]:
        mode = "on" if self._scenario.instances(gpu, monotonic_ns()) else "off"
        return {"mig_mode": mode, "mig_mode_pending": mode}

    def _groups(self, gpu: Gpu) -> Iterator[Group]:
        pcie = (Column(gpu.entity, PCIE_RECEIVED), Column(gpu.entity, PCIE_TRANSMITTED))
        yield Group(f"pcie{gpu.place}", pcie, PCIE_PERIOD_NS, self._reader(gpu, pcie))
        yield Group(
            f"power{gpu.place}",
            (Column(gpu.entity, POWER_SAMPLE),),
            POWER_PERIOD_NS,
            delivery_ns=POWER_DELIVERY_NS,
            drain=self._drain(gpu),
        )
        for group in GROUPS:
            cells = [cell for call in group.calls() for cell in call.cells]
            cells.sort(key=lambda cell: cell[0].kind is Kind.GAUGE)
            columns = tuple(Column(gpu.entity, *cell) for cell in cells)
            name = f"{group.name}{gpu.place}"
            yield Group(name, columns, group.period_ns, self._reader(gpu, columns))

    def _reader(self, gpu: Gpu, columns: Sequence[Column]) -> Callable[[], Sequence[float]]:
        unknown = [
            UNKNOWN_GAUGE if column.signal.kind is Kind.GAUGE else UNKNOWN_INTEGER
            for column in columns
        ]
        moved = [column.name for column in columns if column.signal in BYTES_MOVED]

        def read() -> Sequence[float]:
            now = monotonic_ns()
            fault = self._scenario.fault_of(gpu, now)
            if fault == "gpu-lost":
                return unknown
            left = moved if moved and self._delivered.brings(gpu.entity, moved) else ()
            return [
                nothing
                if column.signal.name in ABSENT or column.name in left
                else self._value(gpu, column, now, fault)
                for column, nothing in zip(columns, unknown, strict=True)
            ]

        return read

    def _value(self, gpu: Gpu, column: Column, now_ns: int, fault: str) -> float:
        name = column.name
        if name in RATES:
            computed, communicated = self._scenario.worked(gpu, now_ns)
            return int(computed * RATES[name][0] + communicated * RATES[name][1])
        if name == CAPPED and self._scenario.name == "power-capped":
            return int(self._scenario.worked(gpu, now_ns)[0] * SECOND_NS)
        if name == THROTTLED.get(self._scenario.name) and gpu.entity == self._scenario.sick:
            return max(0, min(now_ns, self._scenario.end_ns) - self._scenario.start_ns)
        return FAULTY.get(fault, STEADY).get(name, STEADY.get(name, 0))

    def _drain(self, gpu: Gpu) -> Callable[[], Sequence[TimedRow]]:
        """Return what makes up a sample for each 20 ms that have passed."""
        scenario, slot = self._scenario, monotonic_ns() // POWER_PERIOD_NS

        def drain() -> Sequence[TimedRow]:
            nonlocal slot
            now = monotonic_ns()
            first, slot = slot + 1, now // POWER_PERIOD_NS
            if scenario.fault_of(gpu, now) == "gpu-lost":
                return ()
            return [
                (place * POWER_PERIOD_NS, (self._power(gpu, place),))
                for place in range(first, slot + 1)
            ]

        return drain

    def _power(self, gpu: Gpu, place: int) -> float:
        busy = self._scenario.busy(gpu, place * POWER_PERIOD_NS)
        return (560.0 if busy else 380.0) + place * 7 % 17  # never twice the same in a row

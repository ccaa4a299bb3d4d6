"""Stands in for `nvml_state`: the same groups, so all behind them runs as it does live."""

from collections.abc import Callable, Sequence

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.gpu_signals import CLOCK, CLOCK_LIMIT, SLOW_SIGNALS, THROTTLE
from gpuwatch.scenario import CLOCK_MAX, FAULTLESS, REFRESH_NS, SLOWED, Gpu, Scenario
from gpuwatch.signals import HOST, UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Event
from gpuwatch.source import Context, Findings, Group, Opened

CLOCK_MEMORY_MAX = 3.201e9
TOLD_AFTER_NS = 2 * SECOND_NS
POWER_CAP, HW_SLOWDOWN, HW_THERMAL, HW_POWER_BRAKE = 0x4, 0x8, 0x40, 0x80
REASONS = {"thermal": HW_SLOWDOWN | HW_THERMAL, "power-brake": HW_SLOWDOWN | HW_POWER_BRAKE}
FAULTY = {  # the clock event reasons and the SM clock of a GPU with this fault
    **{fault: (bits, SLOWED[fault]) for fault, bits in REASONS.items()},
    "gpu-lost": (UNKNOWN_INTEGER, UNKNOWN_GAUGE),
}


class SimulatedState:
    """Source of the duty `state` on a simulated node; it tells the scenario's fault."""

    name = "nvml_state"

    def __init__(self) -> None:
        self.findings = Findings()
        self._fault_told = False

    def open(self, context: Context) -> Opened:
        """Make up the GPUs of the scenario."""
        self._scenario = scenario = Scenario(context)
        self._capped = scenario.name == "power-capped"
        # An earlier child has told of a fault that began long before this one.
        begun_ns = monotonic_ns() - scenario.start_ns
        self._fault_told = begun_ns > TOLD_AFTER_NS or bool(context.excluded)
        gpus = scenario.gpus
        context.pulse.set_names([gpu.entity.id for gpu in gpus])
        period = int(context.settings["config"]["state"]["period_ms"] * MILLISECOND_NS)
        fast = tuple(
            [Column(gpu.entity, THROTTLE) for gpu in gpus]
            + [Column(gpu.entity, CLOCK, "sm") for gpu in gpus]
        )
        groups = [Group("fast", fast, period, self._fast_reader(gpus))]
        groups += [
            Group(
                f"gpu{gpu.place}",
                tuple(Column(gpu.entity, *signal) for signal in SLOW_SIGNALS),
                period * max(8, len(gpus)),
                self._slow_reader(gpu),
                phase_ns=period * gpu.place,  # with the fast group: to wake costs most of all
            )
            for gpu in gpus
        ]
        constants = tuple(
            constant
            for gpu in gpus
            for constant in (
                (Column(gpu.entity, CLOCK_LIMIT, "sm"), CLOCK_MAX),
                (Column(gpu.entity, CLOCK_LIMIT, "memory"), CLOCK_MEMORY_MAX),
            )
        )
        return Opened(tuple(groups), tuple(gpu.info for gpu in gpus), constants)

    def housekeep(self, now_ns: int) -> None:
        """Tell when the scenario's fault starts."""
        scenario = self._scenario
        scripted = scenario.name not in FAULTLESS
        if scripted and not self._fault_told and now_ns >= scenario.start_ns - SECOND_NS:
            self._fault_told = True
            event = Event(scenario.start_ns, HOST, "scenario_fault", scenario.name)
            self.findings.events.append(event)

    def close(self) -> None:
        """Nothing is held."""

    def _fast_reader(self, gpus: Sequence[Gpu]) -> Callable[[], Sequence[float]]:
        scenario, count = self._scenario, len(gpus)
        row: list[float] = [UNKNOWN_INTEGER] * count + [UNKNOWN_GAUGE] * count

        def read() -> Sequence[float]:
            now = monotonic_ns()
            for place, gpu in enumerate(gpus):
                fault = scenario.fault_of(gpu, now)
                if fault in FAULTY:
                    row[place], row[count + place] = FAULTY[fault]
                elif self._capped and scenario.busy(gpu, now):
                    row[place], row[count + place] = POWER_CAP, scenario.clock(gpu, now)
                else:
                    row[place], row[count + place] = 0, CLOCK_MAX
            return row

        return read

    def _slow_reader(self, gpu: Gpu) -> Callable[[], Sequence[float]]:
        scenario = self._scenario
        unknown = [UNKNOWN_GAUGE] * (len(SLOW_SIGNALS) - 2)
        lost = [0.0, *unknown, float(gpu.excluded)]
        noise, slot = 0.0, -1
        divided = bool(scenario.instances(gpu, 0))  # by MIG: then drivers tell no utilization

        def read() -> Sequence[float]:
            nonlocal noise, slot
            now = monotonic_ns()
            fault = scenario.fault_of(gpu, now)
            if fault == "gpu-lost":
                return lost
            if now // REFRESH_NS != slot:
                slot = now // REFRESH_NS
                noise = scenario.noise(gpu, slot)
            busy, waits = scenario.busy(gpu, slot * REFRESH_NS), scenario.waits(slot * REFRESH_NS)
            power = (690.0 if self._capped else 560.0) if busy else 150.0 if waits else 380.0
            hot = 30.0 if fault == "thermal" else 0.0
            return (
                1.0,
                58.0 + gpu.number * 0.5 + hot + round(noise),
                64.0 + gpu.number * 0.5 + hot / 2 + round(noise),
                power + 8 * noise,
                CLOCK_MEMORY_MAX,
                UNKNOWN_GAUGE if divided else 0.99 if busy else 0.0 if waits else 0.62,
                0.0,
            )

        return read

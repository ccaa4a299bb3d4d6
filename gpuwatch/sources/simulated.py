"""A simulated node: the same groups as the real sources, so all behind them runs as it does live.

GPUs train in steps of 1.3 s. A scenario's fault starts some seconds after the daemon is ready and
is told as the event `scenario_fault`. Everything is a function of time and seed; a hang is a real
one: the read does not return.
"""

import math
import os
import random
import time
from collections.abc import Callable, Sequence

from gpuwatch import pulse as page
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.gpu_signals import CLOCK, CLOCK_LIMIT, POWER_LIMIT, SLOW_SIGNALS, THROTTLE
from gpuwatch.signals import HOST, UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Entity, Event
from gpuwatch.source import Context, EntityInfo, Findings, Group, Opened

SCENARIOS = ("healthy", "power-capped", "thermal", "gpu-lost", "gpu-hang")

SICK = 2  # the GPU that a scenario's fault strikes; the last of a smaller node
STEP_SECONDS = 1.3
COMPUTE_SHARE = 0.8  # of a step; the rest is communication
CLOCK_MAX, CLOCK_MEMORY_MAX, POWER_MAX = 1.98e9, 3.201e9, 700.0
CLOCK_HOT = 1.2e9
TOLD_AFTER_NS = 2 * SECOND_NS
POWER_CAP, HW_SLOWDOWN, HW_THERMAL = 0x4, 0x8, 0x40


class SimulatedState:
    """Stands in for `nvml_state` in the duty `state`."""

    name = "nvml_state"

    def __init__(self) -> None:
        self.findings = Findings()
        self._fault_told = False

    def open(self, context: Context) -> Opened:
        """Make up the GPUs of the scenario."""
        config = context.settings["config"]
        self._words = context.pulse.words
        self._supervisor = os.getppid()
        self._scenario = config["source"]["scenario"]
        self._capped = self._scenario == "power-capped"
        simulated = config["simulated"]
        self._start_ns = context.settings["ready_ns"] + int(
            simulated["fault_after_seconds"] * SECOND_NS
        )
        lasts = int(simulated["fault_seconds"] * SECOND_NS)
        self._end_ns = self._start_ns + lasts if lasts else 2**63
        self._sick = min(SICK, simulated["gpus"] - 1)
        self._seed = simulated["seed"]
        # An earlier child has told of a fault that began long before this one.
        begun_ns = monotonic_ns() - self._start_ns
        self._fault_told = begun_ns > TOLD_AFTER_NS or bool(context.excluded)
        addresses = [
            f"{index // 16:04x}:{0x1B + 8 * (index % 16):02x}:00.0"
            for index in range(simulated["gpus"])
        ]
        chosen = [
            (index, address)
            for index, address in enumerate(addresses)
            if context.only in (None, address)
        ]
        names = [address for _, address in chosen]
        context.pulse.set_names(names)
        period = int(config["state"]["period_ms"] * MILLISECOND_NS)
        excluded = [address in context.excluded for address in names]
        numbers = [index for index, _ in chosen]
        entities = [Entity("gpu", address) for address in names]
        fast = tuple(
            [Column(entity, THROTTLE) for entity in entities]
            + [Column(entity, CLOCK, "sm") for entity in entities]
        )
        groups = [Group("fast", fast, period, self._fast_reader(numbers, excluded))]
        for place, entity in enumerate(entities):
            columns = tuple(Column(entity, *signal) for signal in SLOW_SIGNALS)
            read = self._slow_reader(place, numbers[place], excluded[place])
            groups.append(
                Group(
                    f"gpu{place}",
                    columns,
                    period * max(8, len(names)),
                    read,
                    phase_ns=period * place,  # with the fast group: to wake costs most of all
                )
            )
        return Opened(
            tuple(groups),
            tuple(self._info(index, address) for index, address in chosen),
            tuple(
                constant
                for entity in entities
                for constant in (
                    (Column(entity, CLOCK_LIMIT, "sm"), CLOCK_MAX),
                    (Column(entity, CLOCK_LIMIT, "memory"), CLOCK_MEMORY_MAX),
                    (Column(entity, POWER_LIMIT, "enforced"), POWER_MAX),
                )
            ),
        )

    def housekeep(self, now_ns: int) -> None:
        """Tell when the scenario's fault starts."""
        scripted = self._scenario in ("thermal", "gpu-lost", "gpu-hang")
        if scripted and not self._fault_told and now_ns >= self._start_ns - SECOND_NS:
            self._fault_told = True
            event = Event(self._start_ns, HOST, "scenario_fault", self._scenario)
            self.findings.events.append(event)

    def close(self) -> None:
        """Nothing is held."""

    def _info(self, index: int, address: str) -> EntityInfo:
        return EntityInfo(
            Entity("gpu", address),
            {
                "uuid": f"GPU-51300000-0000-4000-8000-{index:012x}",
                "name": "Simulated H200",
                "pci_bus_id": address,
                "nvml_index": str(index),
                "minor": str(index),
                "serial": f"51300{index}",
                "driver": "simulated",
                "numa": str(index // 4),
            },
        )

    def _struck(self, now_ns: int) -> str:
        """Return the scenario whose fault is on now, "" for none."""
        return self._scenario if self._start_ns <= now_ns < self._end_ns else ""

    def _phase(self, gpu: int, now_ns: int) -> float:
        """Return where in its step a GPU is, 0 to 1; GPUs of a job run nearly together."""
        return (now_ns / SECOND_NS / STEP_SECONDS + gpu * 0.003) % 1.0

    def _noise(self, gpu: int, slot: int) -> float:
        """Return the noise of a tenth of a second, -1 to 1."""
        return random.Random(f"{self._seed} {gpu} {slot}").uniform(-1.0, 1.0)  # noqa: S311 - no secret

    def _hang(self, place: int) -> None:
        """Do not return while the fault lasts, as a call to a sick GPU does not.

        A real one could be ended by nobody; this one ends with the supervisor.
        """
        self._words[page.READING] = place
        while monotonic_ns() < self._end_ns and os.getppid() == self._supervisor:
            time.sleep(0.05)
        self._words[page.READING] = page.NOT_READING
        if os.getppid() != self._supervisor:
            os._exit(0)

    def _fast_reader(
        self, numbers: list[int], excluded: list[bool]
    ) -> Callable[[], Sequence[float]]:
        count = len(numbers)
        row: list[float] = [UNKNOWN_INTEGER] * count + [UNKNOWN_GAUGE] * count

        def read() -> Sequence[float]:
            now = monotonic_ns()
            fault = self._struck(now)
            for place, gpu in enumerate(numbers):
                if excluded[place]:
                    continue
                struck = fault if gpu == self._sick else ""
                if struck == "gpu-hang":
                    self._hang(place)
                if struck == "gpu-lost":
                    row[place], row[count + place] = UNKNOWN_INTEGER, UNKNOWN_GAUGE
                elif struck == "thermal":
                    row[place], row[count + place] = HW_SLOWDOWN | HW_THERMAL, CLOCK_HOT
                elif self._capped and self._phase(gpu, now) <= COMPUTE_SHARE:
                    row[place], row[count + place] = POWER_CAP, self._capped_clock(gpu, now)
                else:
                    row[place], row[count + place] = 0, CLOCK_MAX
            return row

        return read

    def _capped_clock(self, gpu: int, now_ns: int) -> float:
        """Return a clock that moves in steps of 15 MHz about every 50 ms, as the driver's does."""
        return 1.68e9 + 15e6 * int(6 * math.sin(now_ns // (50 * MILLISECOND_NS) + gpu))

    def _slow_reader(self, place: int, gpu: int, excluded: bool) -> Callable[[], Sequence[float]]:
        unknown = [UNKNOWN_GAUGE] * (len(SLOW_SIGNALS) - 2)
        lost = [0.0, *unknown, float(excluded)]
        noise, slot = 0.0, -1

        def read() -> Sequence[float]:
            nonlocal noise, slot
            now = monotonic_ns()
            if excluded:
                return lost
            struck = self._struck(now) if gpu == self._sick else ""
            if struck == "gpu-hang":
                self._hang(place)
            if struck == "gpu-lost":
                return lost
            if now // (100 * MILLISECOND_NS) != slot:  # the driver renews these every 100 ms
                slot = now // (100 * MILLISECOND_NS)
                noise = self._noise(gpu, slot)
            busy = self._phase(gpu, slot * 100 * MILLISECOND_NS) <= COMPUTE_SHARE
            power = (690.0 if self._capped else 560.0) if busy else 380.0
            hot = 30.0 if struck == "thermal" else 0.0
            return (
                1.0,
                58.0 + gpu * 0.5 + hot + round(noise),
                64.0 + gpu * 0.5 + hot / 2 + round(noise),
                power + 8 * noise,
                CLOCK_MEMORY_MAX,
                0.99 if busy else 0.62,
                0.0,
            )

        return read

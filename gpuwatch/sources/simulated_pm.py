"""Stands in for `pm`: a training step as hardware counters see it, millisecond by millisecond.

While the job computes, layers of 40 ms take turns at tensor cores and at memory, and gradients go
out in short bursts. Then all-reduces fill NVLink one after the other, and before the next step the
GPU waits for a moment.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from gpuwatch.clock import MILLISECOND_NS, monotonic_ns
from gpuwatch.pm_signals import columns_of
from gpuwatch.scenario import COMPUTE_NS, STEP_NS, Gpu, Scenario
from gpuwatch.source import Context, Findings, Group, Opened, TimedRow

PERIOD_NS, DELIVERY_NS = MILLISECOND_NS, 500 * MILLISECOND_NS
STEP, COMPUTE = STEP_NS // PERIOD_NS, COMPUTE_NS // PERIOD_NS
LAYER, NORM = 40, 6  # a layer's time, and how much of it memory limits
BUCKET, PAUSE = 24, 3  # an all-reduce, and the time to the next one
WAIT = 14  # without work, at the end of a step
IDLE_CLOCK = 1.98e9

# Bytes of an interval: read and written in memory; of data received and transmitted over NVLink,
# and with what its protocol adds; the same over PCIe; moved through the L2 cache. Shares: anything,
# SMs, tensor cores.
Interval = tuple[tuple[int, ...], tuple[float, ...]]
QUIET = (0, 0, 0, 0)
SENT, REDUCED = ((data, data, data * 6 // 5, data * 6 // 5) for data in (150_000_000, 342_000_000))
MATMUL: Interval = (
    (900_000_000, 350_000_000, *QUIET, 200_000, 100_000, 5_200_000_000),
    (1, 1, 0.8),
)
MEMORY: Interval = ((2_600_000_000, 1_900_000_000, *QUIET, 0, 0, 6_000_000_000), (1, 0.97, 0))
SENDING: Interval = ((1_300_000_000, 700_000_000, *SENT, 0, 0, 5_600_000_000), (1, 1, 0.7))
LOADING: Interval = (
    (900_000_000, 380_000_000, *QUIET, 46_000_000, 2_000_000, 5_200_000_000),
    (1, 1, 0.8),
)
REDUCING: Interval = ((900_000_000, 800_000_000, *REDUCED, 0, 0, 2_200_000_000), (1, 0.25, 0))
LAUNCHING: Interval = ((4_000_000, 2_000_000, *QUIET, 50_000, 50_000, 9_000_000), (0.2, 0.02, 0))
NOTHING: Interval = ((0, 0, *QUIET, 10_000, 10_000, 0), (0, 0, 0))


def _interval(place: int) -> Interval:
    """Return what a GPU does in so many milliseconds of its step."""
    if place >= STEP - WAIT:
        return NOTHING
    if place >= COMPUTE:
        within = (place - COMPUTE) % (BUCKET + PAUSE)
        return REDUCING if within < BUCKET else LAUNCHING
    layer, within = divmod(place, LAYER)
    if within >= LAYER - NORM:
        return MEMORY
    if layer % 3 == 2 and within < 5:
        return SENDING
    return LOADING if layer % 8 == 1 and within < 4 else MATMUL


INTERVALS = [_interval(place) for place in range(STEP)]
# By counter, what a step has moved before each of its milliseconds, and then as a whole.
MOVED = [
    list(accumulate((bytes_[counter] for bytes_, _ in INTERVALS), initial=0))
    for counter in range(len(NOTHING[0]))
]


class SimulatedPm:
    """Source of the duty `pm` on a simulated node."""

    name = "pm"

    def __init__(self) -> None:
        self.findings = Findings()

    def open(self, context: Context) -> Opened:
        """Make up the GPUs of the scenario."""
        self._scenario = scenario = Scenario(context)
        context.pulse.set_names([gpu.entity.id for gpu in scenario.gpus])
        groups = tuple(
            Group(
                f"pm{gpu.place}",
                columns_of(gpu.entity, "full"),
                PERIOD_NS,
                phase_ns=DELIVERY_NS * gpu.place // len(scenario.gpus),
                delivery_ns=DELIVERY_NS,
                drain=self._drain(gpu),
            )
            for gpu in scenario.gpus
        )
        return Opened(groups, tuple(gpu.info for gpu in scenario.gpus))

    def housekeep(self, now_ns: int) -> None:
        """Nothing needs upkeep."""

    def close(self) -> None:
        """Nothing is held."""

    def _drain(self, gpu: Gpu) -> Callable[[], Sequence[TimedRow]]:
        """Return what makes up a row for each millisecond that has passed."""
        slot = monotonic_ns() // PERIOD_NS

        def drain() -> Sequence[TimedRow]:
            nonlocal slot
            now = monotonic_ns()
            slots = range(slot + 1, now // PERIOD_NS + 1)
            slot = max(slot, now // PERIOD_NS)
            return () if self._scenario.silent(gpu, now) else list(self._rows(gpu, slots))

        return drain

    def _rows(self, gpu: Gpu, slots: range) -> Iterator[TimedRow]:
        scenario, hertz = self._scenario, IDLE_CLOCK
        for slot in slots:
            time_ns = slot * PERIOD_NS
            steps, place = divmod(scenario.worked_ns(gpu, time_ns) // PERIOD_NS, STEP)
            if not slot % 10:
                hertz = scenario.clock(gpu, time_ns)
            busy, sms, tensor = NOTHING[1] if scenario.waits(time_ns) else INTERVALS[place - 1][1]
            counters = (steps * moved[STEP] + moved[place] for moved in MOVED)
            yield time_ns, (*counters, busy, hertz, sms, tensor)

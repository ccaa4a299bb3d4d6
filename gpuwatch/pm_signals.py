"""What hardware counters tell of a GPU each millisecond: the columns of its ring, and their loads.

A ring for each GPU, one row an interval, delivered twice a second. Counters hold what was added up
since their source opened: bytes of a time that was not sampled are in none of them, and the row
before it is followed by one later than an interval. Gauges are means over the interval before the
row. A column that the chip does not have is left out of the ring.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gpuwatch.gpu_signals import (
    CLOCK,
    NVLINK_RECEIVED,
    NVLINK_TRANSMITTED,
    PCIE_RECEIVED,
    PCIE_TRANSMITTED,
)
from gpuwatch.signals import Column, Entity, Histogram, Kind, Signal, Total

REFRESH_SECONDS = 0.001
LOAD_BOUNDS = (0.01, 0.05, *(tenth / 10 for tenth in range(1, 10)), 0.95, 0.99)

DRAM_READ, DRAM_WRITTEN = (
    Signal(
        f"gpu_dram_{direction}_bytes_total",
        f"Bytes {direction} {preposition} the GPU's memory, since the daemon's start; without those"
        " of the time in gpu_counters_uncovered_seconds_total.",
        Kind.COUNTER,
        "bytes",
        total=Total.COVERED,
    )
    for direction, preposition in (("read", "from"), ("written", "to"))
)
L2 = Signal(
    "gpu_l2_bytes_total",
    "Bytes of all sectors that the GPU's L2 cache was asked for, since the daemon's start.",
    Kind.COUNTER,
    "bytes",
    total=Total.COVERED,
)
# NVML counts KiB.
NVLINK_DATA = tuple(replace(signal, scale=1.0) for signal in (NVLINK_RECEIVED, NVLINK_TRANSMITTED))
# On two H200 an all-reduce made 1.2 times as many as there were bytes of data.
NVLINK_RAW = NVLINK_RAW_RECEIVED, NVLINK_RAW_TRANSMITTED = tuple(
    Signal(
        f"gpu_nvlink_raw_{direction}_bytes_total",
        f"Bytes {direction} over all the GPU's NVLinks, what the protocol adds to the data"
        " included, since the daemon's start; without those of the time in"
        " gpu_counters_uncovered_seconds_total.",
        Kind.COUNTER,
        "bytes",
        total=Total.COVERED,
    )
    for direction in ("received", "transmitted")
)


def _busy(part: str, text: str, **more: Any) -> Signal:
    return Signal(
        f"gpu_{part}_busy_ratio",
        f"{text}, over the millisecond before.",
        Kind.GAUGE,
        "ratio",
        bounds=(0.0, 1.0),
        refresh_seconds=REFRESH_SECONDS,
        statistics=("",),
        **more,
    )


GRAPHICS_BUSY = _busy("graphics", "Share of time in which any kernel, copy or graphics ran")
SM_BUSY = _busy("sm", "Share of the SMs that were busy")
TENSOR_BUSY = _busy(
    "tensor",
    "Share of what tensor cores can do at most",
    histogram=Histogram(
        "gpu_tensor_load_ratio",
        "Tensor cores: time spent at or below each share of the most they can do.",
        LOAD_BOUNDS,
    ),
)
# The clock of the SMs by the GPU's own count of its cycles.
GPC_CLOCK = (
    replace(
        CLOCK,
        histogram=CLOCK.histogram and replace(CLOCK.histogram, label="gpc"),
        refresh_seconds=REFRESH_SECONDS,
    ),
    "gpc",
)

# Signals with their label, in the order of a ring: counters come first.
_COUNTERS = tuple(
    (signal, "")
    for signal in (
        *(DRAM_READ, DRAM_WRITTEN),
        *NVLINK_DATA,
        *NVLINK_RAW,
        *(PCIE_RECEIVED, PCIE_TRANSMITTED),
    )
)
_GAUGES = ((GRAPHICS_BUSY, ""), GPC_CLOCK)
SETS = {
    "default": (*_COUNTERS, *_GAUGES),
    "full": (*_COUNTERS, (L2, ""), *_GAUGES, (SM_BUSY, ""), (TENSOR_BUSY, "")),
}


def columns_of(gpu: Entity, chosen: str, without: Iterable[str] = ()) -> tuple[Column, ...]:
    """Return the columns of a GPU's ring: a set's, less the names that the chip does not have."""
    left = frozenset(without)
    columns = (Column(gpu, signal, label) for signal, label in SETS[chosen])
    return tuple(column for column in columns if column.name not in left)


@dataclass(frozen=True, slots=True)
class Load:
    """How close each interval's bytes came to the most that can be: a histogram over time.

    `counters` are added up, or the higher one counts if `each` has the limit for itself. `limit`
    is the constant that says how much it is per second.
    """

    histogram: Histogram
    counters: tuple[str, ...]
    limit: str
    each: bool = False


DRAM_LIMIT = Signal(
    "gpu_dram_limit_bytes_per_second",
    "Most that the GPU's memory can move: its highest clock by the width of its bus.",
    Kind.GAUGE,
    "bytes_per_second",
    bounds=(1e9, 1e15),
)
NVLINK_LIMIT = Signal(
    "gpu_nvlink_limit_bytes_per_second",
    "Most that the GPU's NVLinks together can move in one direction, protocol included.",
    Kind.GAUGE,
    "bytes_per_second",
    bounds=(1e9, 1e15),
)
LOADS = (
    Load(
        Histogram(
            "gpu_dram_load_ratio",
            "Memory: time spent at or below each share of the most it can move.",
            LOAD_BOUNDS,
        ),
        (DRAM_READ.name, DRAM_WRITTEN.name),
        DRAM_LIMIT.name,
    ),
    Load(
        Histogram(
            "gpu_nvlink_load_ratio",
            "NVLinks: time spent at or below each share of the most they can move in the busier"
            " direction.",
            LOAD_BOUNDS,
        ),
        (NVLINK_RAW_RECEIVED.name, NVLINK_RAW_TRANSMITTED.name),
        NVLINK_LIMIT.name,
        each=True,
    ),
)
IDLE_GAPS = Histogram(
    "gpu_idle_gap_seconds",
    "How long each stretch lasted in which nothing ran, to the millisecond; those from one kernel"
    " to the next within it are not seen.",
    (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0),
)

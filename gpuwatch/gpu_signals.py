"""What is measured of a GPU: each signal declared once, for every source that reads it."""

from gpuwatch.signals import Histogram, Kind, Signal, Total

# Bit numbers: nvml.h, nvmlClocksEventReason*.
REASONS = (
    (0, "gpu_idle"),
    (1, "applications_clocks"),
    (2, "sw_power_cap"),
    (3, "hw_slowdown"),
    (4, "sync_boost"),
    (5, "sw_thermal_slowdown"),
    (6, "hw_thermal_slowdown"),
    (7, "hw_power_brake"),
    (8, "display_clocks"),
)

THROTTLE = Signal(
    "gpu_throttle_active",
    "Whether this clock event reason was active in the newest quarter second. Reasons overlap;"
    " gpu_idle, applications_clocks and display_clocks are no faults.",
    Kind.BITS,
    "",
    label="reason",
    bits=REASONS,
)
CLOCK = Signal(
    "gpu_clock_hertz",
    "Clock of this part of the GPU.",
    Kind.GAUGE,
    "hertz",
    label="clock",
    bounds=(0.0, 1e10),
    statistics=("sm",),
    histogram=Histogram(
        "gpu_clock_share_hertz",
        "SM clock: time spent at or below each bound.",
        tuple(2e8 * step for step in range(1, 12)),
        label="sm",
    ),
    refresh_seconds=0.05,
)
UP = Signal("gpu_up", "1 if the GPU answers the driver.", Kind.GAUGE, "", bounds=(0.0, 1.0))
HUNG = Signal(
    "gpu_hung",
    "1 while a call of this sampler to the GPU does not return and the GPU is left alone.",
    Kind.GAUGE,
    "",
    label="duty",
    bounds=(0.0, 1.0),
)
XIDS_HEARD = Signal(
    "gpu_xid_events_heard",
    "1 while NVML's events tell of the GPU's Xid errors.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 1.0),
)
TEMPERATURE = Signal(
    "gpu_temperature_celsius",
    "Temperature of the GPU's core or memory.",
    Kind.GAUGE,
    "celsius",
    label="sensor",
    bounds=(-40.0, 126.0),  # 127 and 255 are drivers' markers for no value
    statistics=("core", "memory"),
    refresh_seconds=0.1,
)
POWER = Signal(
    "gpu_power_watts",
    "Power of the board: the newest instant reading, the driver's mean where there is none.",
    Kind.GAUGE,
    "watts",
    bounds=(0.5, 20_000.0),  # between true readings some drivers answer 0
    statistics=("",),
    refresh_seconds=0.1,
)
UTILIZATION = Signal(
    "gpu_utilization_ratio",
    "Share of the driver's last sample period in which a kernel ran.",
    Kind.GAUGE,
    "ratio",
    bounds=(0.0, 1.0),
    statistics=("",),
    refresh_seconds=0.2,
)
CLOCK_LIMIT = Signal(
    "gpu_clock_limit_hertz",
    "Highest clock of this part.",
    Kind.GAUGE,
    "hertz",
    label="clock",
    bounds=(1.0, 1e10),
)
POWER_LIMIT = Signal(
    "gpu_power_limit_watts",
    "Power limit of the board: enforced is what holds, requested what was asked for, default, min"
    " and max are the board's own.",
    Kind.GAUGE,
    "watts",
    label="limit",
    bounds=(0.5, 20_000.0),
)

PERFORMANCE_STATE = Signal(
    "gpu_performance_state",
    "Performance state of the GPU; 0 is the fastest.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 15.0),  # 32 stands for unknown
)
MARGIN = Signal(
    "gpu_temperature_margin_celsius",
    "How far the GPU is from slowing down for heat, by its own reckoning; below 0 it has.",
    Kind.GAUGE,
    "celsius",
    bounds=(-100.0, 126.0),
    refresh_seconds=0.1,
)
THRESHOLD = Signal(
    "gpu_temperature_threshold_celsius",
    "Temperature at which the GPU slows down or shuts down, and the highest that core and memory"
    " are made for.",
    Kind.GAUGE,
    "celsius",
    label="threshold",
    bounds=(1.0, 126.0),  # drivers answer 0 and 127 where there is none
)
POWER_SAMPLE = Signal(
    "gpu_power_sample_watts",
    "Power of the board as the driver itself samples it, about every 20 ms.",
    Kind.GAUGE,
    "watts",
    bounds=(0.5, 20_000.0),
    statistics=("",),
    refresh_seconds=0.02,
)
ENERGY = Signal(
    "gpu_energy_joules_total",
    "Energy that the board has used since the driver was loaded.",
    Kind.COUNTER,
    "joules",
    scale=1e-3,
)
THROTTLE_SECONDS = Signal(
    "gpu_throttle_seconds_total",
    "The driver's own count of the time with this clock event reason active.",
    Kind.COUNTER,
    "seconds",
    label="reason",
    scale=1e-9,
    total=Total.INCREASE,
)
MEMORY_USED = Signal(
    "gpu_memory_used_bytes",
    "Memory that is allocated; where gpu_memory_reserved_bytes is not told, what the driver keeps"
    " for itself too.",
    Kind.GAUGE,
    "bytes",
    bounds=(0.0, 1e15),
)
MEMORY_FREE = Signal(
    "gpu_memory_free_bytes",
    "Memory that can be allocated.",
    Kind.GAUGE,
    "bytes",
    bounds=(0.0, 1e15),
)
MEMORY_RESERVED = Signal(
    "gpu_memory_reserved_bytes",
    "Memory that driver and firmware keep for themselves.",
    Kind.GAUGE,
    "bytes",
    bounds=(0.0, 1e15),
)
MEMORY_SIZE = Signal(
    "gpu_memory_size_bytes",
    "Memory of the GPU.",
    Kind.GAUGE,
    "bytes",
    bounds=(1.0, 1e15),
)
MEMORY_SIGNALS = (MEMORY_USED, MEMORY_FREE, MEMORY_RESERVED, MEMORY_SIZE)
PROCESSES = Signal(
    "gpu_processes",
    "Processes that have the GPU open for compute or graphics.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 1e6),
)
PCIE_RECEIVED, PCIE_TRANSMITTED = (
    Signal(
        f"gpu_pcie_{direction}_bytes_total",
        f"Bytes of PCIe packets that the GPU has {direction}, headers included, since the daemon's"
        " start; without those of the time in gpu_counters_uncovered_seconds_total.",
        Kind.COUNTER,
        "bytes",
        total=Total.COVERED,
    )
    for direction in ("received", "transmitted")
)
NVLINK_RECEIVED, NVLINK_TRANSMITTED = (
    Signal(
        f"gpu_nvlink_{direction}_bytes_total",
        f"Bytes of data that the GPU has {direction} over all its NVLinks, since the daemon's"
        " start; without those of the time in gpu_counters_uncovered_seconds_total.",
        Kind.COUNTER,
        "bytes",
        scale=1024.0,
        total=Total.COVERED,
    )
    for direction in ("received", "transmitted")
)
# Of these hardware counters tell by the same names, where they run.
BYTES_MOVED = frozenset((PCIE_RECEIVED, PCIE_TRANSMITTED, NVLINK_RECEIVED, NVLINK_TRANSMITTED))


def _active(part: str, text: str) -> Signal:
    return Signal(
        f"gpu_{part}_active_ratio",
        f"{text}, over the tenth of a second before; longer on a node of many MIG instances.",
        Kind.GAUGE,
        "ratio",
        bounds=(0.0, 1.0),
        statistics=("",),
        refresh_seconds=0.1,
    )


SM_ACTIVE = _active("sm", "Share of the SMs that were busy")
TENSOR_ACTIVE = _active("tensor", "Share of time in which tensor cores worked")
DRAM_ACTIVE = _active("dram", "Share of the memory's bandwidth that was used")
GRAPHICS_ACTIVE = Signal(
    "gpu_graphics_active_ratio",
    "Share of time in which any kernel or graphics ran, over the second or so before.",
    Kind.GAUGE,
    "ratio",
    bounds=(0.0, 1.0),
    statistics=("",),
    refresh_seconds=1.0,
)

NVLINKS_EXPECTED = Signal(
    "gpu_nvlink_links_expected",
    "NVLinks that the GPU in this slot has had up, as the inventory keeps it.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 64.0),
)

ACTIVE_SIGNALS = (SM_ACTIVE, TENSOR_ACTIVE, DRAM_ACTIVE)

SLOW_SIGNALS = (
    (UP, ""),
    (TEMPERATURE, "core"),
    (TEMPERATURE, "memory"),
    (POWER, ""),
    (CLOCK, "memory"),
    (UTILIZATION, ""),
    (HUNG, "state"),
)

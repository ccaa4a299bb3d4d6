"""What is measured of a GPU: each signal declared once, for every source that reads it."""

from gpuwatch.signals import Histogram, Kind, Signal

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
    "Power limit of the board when the source was opened.",
    Kind.GAUGE,
    "watts",
    label="limit",
    bounds=(0.5, 20_000.0),
)


def _active(part: str, text: str) -> Signal:
    return Signal(
        f"gpu_{part}_active_ratio",
        f"{text}, over the time between two samples of the GPU's own, 0.1 s or a little more.",
        Kind.GAUGE,
        "ratio",
        bounds=(0.0, 1.0),
        statistics=("",),
        refresh_seconds=0.1,
    )


SM_ACTIVE = _active("sm", "Share of the SMs that were busy")
TENSOR_ACTIVE = _active("tensor", "Share of time in which tensor cores worked")
DRAM_ACTIVE = _active("dram", "Share of the memory's bandwidth that was used")
GRAPHICS_ACTIVE = _active("graphics", "Share of time in which any kernel or graphics ran")
ACTIVE_SIGNALS = (SM_ACTIVE, TENSOR_ACTIVE, DRAM_ACTIVE, GRAPHICS_ACTIVE)

SLOW_SIGNALS = (
    (UP, ""),
    (TEMPERATURE, "core"),
    (TEMPERATURE, "memory"),
    (POWER, ""),
    (CLOCK, "memory"),
    (UTILIZATION, ""),
    (HUNG, "state"),
)

"""What the source `nvml_counters` adds to a populated snapshot."""

from gpuwatch import gpu_health_signals as health
from gpuwatch import gpu_signals as signals
from gpuwatch.clock import SECOND_NS
from gpuwatch.gpu_readings import GROUPS
from gpuwatch.signals import Column, Kind
from gpuwatch.window import TICK_NS

MODES = {
    "compute_mode": "default",
    "ecc_mode": "on",
    "ecc_mode_pending": "on",
    "mig_mode": "off",
    "mig_mode_pending": "off",
    "persistence_mode": "on",
}
LIMITS = (
    *((signals.POWER_LIMIT, name) for name in ("enforced", "requested", "default", "min", "max")),
    (signals.CLOCK_LIMIT, "video"),
    *((signals.THRESHOLD, name) for name in ("shutdown", "slowdown", "memory_max", "core_max")),
    (health.PCIE_GENERATION_LIMIT, ""),
    (health.PCIE_WIDTH_LIMIT, ""),
)
HEALTHY = {  # what a fault of GPU or link would make otherwise
    "gpu_nvlink_links_up": 18.0,
    "gpu_pcie_link_generation": 5.0,
    "gpu_pcie_link_width_lanes": 16.0,
    "gpu_fabric_state": 3.0,
    "gpu_temperature_margin_celsius": 31.0,
    "gpu_memory_used_bytes": 2.0**36,
    "gpu_power_sample_watts": 512.0,
    'gpu_clock_hertz{clock="video"}': 1.5e9,
}


def columns(gpus):
    """Return the columns of the GPUs' rings."""
    own = [(signals.PCIE_RECEIVED, ""), (signals.PCIE_TRANSMITTED, ""), (signals.POWER_SAMPLE, "")]
    own += [(signals.HUNG, "counters"), (signals.XIDS_HEARD, "")]
    own += [cell for group in GROUPS for call in group.calls() for cell in call.cells]
    return [Column(gpu, *cell) for gpu in gpus for cell in own]


def values(column):
    """Return what a column holds, and by how much it rose."""
    if column.signal is signals.THROTTLE_SECONDS:
        return 1000.0, TICK_NS / SECOND_NS if column.label == "sw_power_cap" else 0.0
    moves = column.signal.unit in ("bytes", "joules")
    if column.signal.kind is Kind.COUNTER:
        return (1000.0, 10.0) if moves else (0.0, 0.0)
    return HEALTHY.get(column.name, 0.0), 0.0


def constants(gpus):
    """Return the limits of the GPUs."""
    return [(Column(gpu, *limit), 700.0) for gpu in gpus for limit in LIMITS]

"""What is asked of a GPU's counters: the metrics behind the columns, in the order of their worth.

All metrics of a GPU must fit into one pass, so those that no longer do are left out. Names are
those of CUPTI on Hopper; what another chip has not is left out as well.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpuwatch.pm_signals import SETS
from gpuwatch.signals import column_name


class Metric(NamedTuple):
    """A metric of CUPTI and the column that it feeds; `scale` turns it into the column's unit.

    `bytes` is what a sample of it took on an H200, about the same decoded as in the buffer.
    """

    column: str
    name: str
    scale: float
    bytes: int


# Directions are the GPU's view: what it reads over PCIe comes from the host. The plain name of the
# tensor metric makes ten times the records for the same figure (H200: 52 ms a hundred samples).
METRICS = (
    Metric("gpu_dram_read_bytes_total", "dram__bytes_read.sum", 1, 1600),
    Metric("gpu_dram_written_bytes_total", "dram__bytes_write.sum", 1, 1600),
    Metric("gpu_nvlink_received_bytes_total", "nvlrx__bytes_data_user.sum", 1, 600),
    Metric("gpu_nvlink_transmitted_bytes_total", "nvltx__bytes_data_user.sum", 1, 600),
    Metric("gpu_nvlink_raw_received_bytes_total", "nvlrx__bytes.sum", 1, 600),
    Metric("gpu_nvlink_raw_transmitted_bytes_total", "nvltx__bytes.sum", 1, 600),
    Metric("gpu_pcie_received_bytes_total", "pcie__read_bytes.sum", 1, 50),
    Metric("gpu_pcie_transmitted_bytes_total", "pcie__write_bytes.sum", 1, 50),
    Metric(
        "gpu_graphics_busy_ratio", "gr__cycles_active.avg.pct_of_peak_sustained_elapsed", 0.01, 450
    ),
    Metric('gpu_clock_hertz{clock="gpc"}', "gpc__cycles_elapsed.avg.per_second", 1, 450),
    Metric(
        "gpu_tensor_busy_ratio",
        "TPC.TriageCompute.sm__pipe_tensor_cycles_active_realtime"
        ".avg.pct_of_peak_sustained_elapsed",
        0.01,
        4700,
    ),
    Metric("gpu_sm_busy_ratio", "sm__cycles_active.avg.pct_of_peak_sustained_elapsed", 0.01, 7000),
    Metric("gpu_l2_bytes_total", "lts__t_sectors.sum", 32, 5000),  # a sector has 32 bytes
)


class Choice(NamedTuple):
    """The metrics to sample, and why each other column is left out."""

    metrics: tuple[Metric, ...]
    without: dict[str, str]


def choose(
    wanted: str, without: dict[str, str], passes: Callable[[tuple[str, ...]], int]
) -> Choice:
    """Return what of a set fits into one pass, besides what is to be left out anyway.

    `passes` says how many passes metrics take, 0 if the chip has not all of them.
    """
    columns = {column_name(signal, label) for signal, label in SETS[wanted]}
    metrics = [one for one in METRICS if one.column in columns - without.keys()]
    if passes(_names(metrics)) == 1:
        return Choice(tuple(metrics), without)
    kept: list[Metric] = []
    left = dict(without)
    for metric in metrics:
        needed = passes(_names([*kept, metric]))
        if needed == 1:
            kept.append(metric)
        else:
            left[metric.column] = "more than one pass" if needed else "not on this chip"
    return Choice(tuple(kept), left)


def _names(metrics: Iterable[Metric]) -> tuple[str, ...]:
    return tuple(metric.name for metric in metrics)

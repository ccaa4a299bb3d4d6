"""What the source `pm` adds to a populated snapshot."""

from gpuwatch import pm_signals
from gpuwatch.signals import Column, Kind
from gpuwatch.window import TimeHistogram

HELD = {'gpu_clock_hertz{clock="gpc"}': 1.5e9}


def columns(gpus):
    """Return the columns of the GPUs' rings."""
    return [column for gpu in gpus for column in pm_signals.columns_of(gpu, "full")]


def values(column):
    """Return what a column holds, and by how much it rose."""
    if column.signal.kind is Kind.COUNTER:
        return 1000.0, 10.0
    return HELD.get(column.name, 0.5), 0.0


def histograms(covered_ns):
    """Return the histograms of a GPU's loads, all of the time at half of the most there can be."""
    names = [load.histogram.name for load in pm_signals.LOADS]
    names.append(pm_signals.TENSOR_BUSY.histogram.name)
    nanoseconds = [0] * (len(pm_signals.LOAD_BOUNDS) + 1)
    nanoseconds[pm_signals.LOAD_BOUNDS.index(0.5)] = covered_ns
    return {name: TimeHistogram(tuple(nanoseconds), 0.5 * covered_ns) for name in names}


def constants(gpus):
    """Return the most there can be."""
    limits = ((pm_signals.DRAM_LIMIT, 4.917e12), (pm_signals.NVLINK_LIMIT, 4.78e11))
    return [(Column(gpu, signal), value) for gpu in gpus for signal, value in limits]

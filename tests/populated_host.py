"""What the duty `host` adds to a populated snapshot."""

from gpuwatch import host_signals as signals
from gpuwatch.kernel_log import Found
from gpuwatch.signals import HOST, Column, Entity, Event, Kind

KMSG = Entity("source", "kmsg")
DEVICE = Entity("pci_device", "0000:c1:00.0")


def columns():
    """Return the columns of the host's rings."""
    own = (*signals.PRESSURE_COLUMNS, *signals.IO_COLUMNS, *signals.KMSG_COLUMNS)
    return [*own, Column(HOST, signals.BLOCKED)]


def values(column):
    """Return what a column holds, and by how much it rose."""
    return (1000.0, 10.0) if column.signal.kind is Kind.COUNTER else (1.0, 0.0)


def events(time_ns):
    """Return what the kernel log told."""
    gpu = Entity("gpu", "0")
    found = [Found(gpu, "xid", "31: info", "x"), Found(DEVICE, "pcie_error", "corrected", "x")]
    return [Event(time_ns, one.entity, one.event, one.detail(2)) for one in found]

"""What is measured of the host: each signal declared once, for every source that reads it."""

from gpuwatch.kernel_log import COUNTED
from gpuwatch.signals import HOST, Column, Entity, Kind, Signal, Total

# The entity is the resource that is waited for. Source: Documentation/accounting/psi.rst.
PRESSURE = Signal(
    "host_pressure_seconds_total",
    "Time in which some work, or all work at once (full), waited for this resource, since boot.",
    Kind.COUNTER,
    "seconds",
    label="kind",
    scale=1e-6,
)
IO_READ = Signal(
    "host_io_read_bytes_total",
    "Bytes read from this kind of storage, all disks or mounts together, since the daemon's start.",
    Kind.COUNTER,
    "bytes",
    label="storage",
    total=Total.INCREASE,
)
IO_WRITTEN = Signal(
    "host_io_written_bytes_total",
    "Bytes written to this kind of storage, all disks or mounts together, since the daemon's"
    " start.",
    Kind.COUNTER,
    "bytes",
    label="storage",
    total=Total.INCREASE,
)
IO_WAIT = Signal(
    "host_io_wait_seconds_total",
    "Time in which processors had nothing to do but wait for storage, summed over them, since"
    " boot.",
    Kind.COUNTER,
    "seconds",
    scale=0.01,  # the kernel's USER_HZ is 100 wherever GPUs are
    total=Total.CARRIED,
)
NUMA = Signal(
    "host_numa_events_total",
    "Pages by what became of them: allocated on another node than wanted (miss), faulted on by"
    " NUMA balancing (hint_faults), moved by it (pages_migrated), since boot.",
    Kind.COUNTER,
    "",
    label="event",
)
BLOCKED = Signal(
    "host_gpu_processes_blocked",
    "Processes that have a GPU open and were in uninterruptible sleep at two looks 10 s apart.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 1e6),
)
KMSG_EVENTS = Signal(
    "kmsg_events_total",
    "What the kernel log told of this kind since the daemon's start; lines that are forged were"
    " written by a user program.",
    Kind.COUNTER,
    "",
    label="event",
    total=Total.INCREASE,
)

# Of processors `full` has no meaning for a whole host: the kernel writes 0 (psi.rst).
RESOURCES = {"cpu": ("some",), "io": ("some", "full"), "memory": ("some", "full")}
STORAGES = ("disk", "nfs", "lustre")
NUMA_EVENTS = ("miss", "hint_faults", "pages_migrated")

PRESSURE_COLUMNS = tuple(
    Column(Entity("resource", resource), PRESSURE, kind)
    for resource, kinds in RESOURCES.items()
    for kind in kinds
)
IO_COLUMNS = (
    *(Column(HOST, signal, storage) for storage in STORAGES for signal in (IO_READ, IO_WRITTEN)),
    Column(HOST, IO_WAIT),
    *(Column(HOST, NUMA, event) for event in NUMA_EVENTS),
)
KMSG_COLUMNS = tuple(Column(HOST, KMSG_EVENTS, event) for event in COUNTED)

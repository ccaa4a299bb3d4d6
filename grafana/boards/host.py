"""The host beside its GPUs, and what its kernel log told: a row of the node's dashboard."""

from collections.abc import Callable

from board import Row
from palette import YES_NO
from panels import Column, Query, stat, table, timeseries
from promql import over, rate

STEP = "$__rate_interval"


def row(selector: Callable[..., str]) -> Row:
    """Return the row of the node that `selector` chooses."""
    last = f"max by (gpu, xid) ({selector('gpu_xid_last_timestamp_seconds')})"
    times = f"max by (gpu, xid) ({selector('gpu_xid_errors_total')})"
    events = f"increase({selector('kmsg_events_total')}[{STEP}])"
    errors = f"increase({selector('pcie_errors_total')}[{STEP}])"
    return Row(
        "Host and kernel log",
        [
            stat(
                "Kernel log read",
                "Whether the kernel log is followed. NO: only NVML tells of Xids, without process "
                "and text, and of PCIe errors and stalls nobody does.",
                "none",
                selector("kmsg_up"),
                mappings=YES_NO,
                width=4,
                height=7,
            ),
            stat(
                "Xids heard by NVML",
                "Whether NVML tells of the Xids of every GPU; it counts where the log is not read.",
                "none",
                f"min({selector('gpu_xid_events_heard')})",
                mappings=YES_NO,
                width=4,
                height=7,
            ),
            table(
                "Xid errors",
                "Xid errors that the driver logged, the latest first. 13, 31, 43, 45 and 109 are "
                "errors of programs; what each means and asks for is in the log's event `xid`.",
                [
                    Column("GPU", "gpu", width=70),
                    Column("Xid", "xid", width=70),
                    Column("Last", expr=f"{last} * 1000", unit="dateTimeFromNow"),
                    Column("Since the start", expr=f"{times} and {last}"),
                ],
                sort=[("Last", True)],
                width=16,
                height=7,
                no_value="No Xid was logged",
            ),
            timeseries(
                "Told by the kernel log",
                "Lines of each kind and PCIe errors by device, in each step.",
                "none",
                [
                    Query(f"sum by (event) ({events}) > 0", "{{event}}"),
                    Query(f"{errors} > 0", "PCIe {{pci_bus_id}} {{severity}}"),
                ],
                no_value="Nothing was told",
            ),
            timeseries(
                "Pressure",
                "Share of time in which some work, or all of it at once, waited for processors, "
                "storage or memory. Above 20 % while GPUs idle, the job waits for its input.",
                "percentunit",
                [Query(rate(selector("host_pressure_seconds_total")), "{{resource}}, {{kind}}")],
                high=1,
            ),
            timeseries(
                "Storage",
                "Bytes read and written, all disks or mounts together.",
                "Bps",
                [
                    Query(rate(selector("host_io_read_bytes_total")), "{{storage}}, read"),
                    Query(rate(selector("host_io_written_bytes_total")), "{{storage}}, written"),
                ],
            ),
            timeseries(
                "Waiting",
                "Processors that wait for storage, and processes that hold a GPU and cannot be "
                "interrupted: those hang in the driver.",
                "none",
                [
                    Query(rate(selector("host_io_wait_seconds_total")), "processors"),
                    Query(over("max", selector("host_gpu_processes_blocked")), "processes"),
                ],
                width=6,
            ),
            timeseries(
                "Pages on the wrong NUMA node",
                "Allocated there, found there by NUMA balancing, and moved by it.",
                "cps",
                [Query(rate(selector("host_numa_events_total")), "{{event}}")],
                width=6,
            ),
        ],
    )

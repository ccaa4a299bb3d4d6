"""Rules about what the kernel log tells: Xid errors of GPUs, errors of PCIe devices.

How bad an Xid is says the catalogue, and for some codes the line itself; the event carries it. An
application's own errors fire nothing, however many, nor does what follows from an earlier Xid.
"""

from typing import TYPE_CHECKING

from gpuwatch.clock import SECOND_NS
from gpuwatch.kernel_log import PCIE_ERROR, XID, told
from gpuwatch.rule import Rule, View
from gpuwatch.signals import Entity, Event

if TYPE_CHECKING:
    from collections.abc import Callable

KMSG = Entity("source", "kmsg")
BOOT_NS = 180 * SECOND_NS  # links are trained and devices reset while the machine starts
MINUTE_NS = 60 * SECOND_NS
NEWS_NS = 10 * SECOND_NS  # what is older was told to an earlier gpuwatch


def xids(level: str) -> "Callable[[Event], int]":
    """Return what counts the Xid errors of a level in an event."""

    def count(event: Event) -> int:
        said = told(event.detail)
        return said.times if said and said.level == level else 0

    return count


def seen(view: View, count: "Callable[[Event], int]") -> bool:
    """Say whether there is such an error in the tick."""
    return any(
        event.entity == view.entity and event.name == XID and count(event)
        for event in view.tick.events
        if event.time_ns > view.tick.end_ns - NEWS_NS
    )


def errors(view: View, count: "Callable[[Event], int]") -> float | None:
    """Return how many such errors the window has, None if nobody would tell of one."""
    times = sum(times for _, times in view.told(XID, count))
    tellers = (view.tick.window(KMSG, "source_up"), view.window("gpu_xid_events_heard"))
    told = any(teller is not None and teller.last > 0 for teller in tellers)
    return float(times) if times or told else None


def pcie_errors(view: View) -> float:
    """Return the least errors of any minute of the window; one not corrected is beyond count."""
    rows = view.told(PCIE_ERROR, _weight)
    if any(times < 0 for _, times in rows):
        return float("inf")
    minutes = [0] * max(1, round(view.window_seconds / 60))
    for time_ns, times in rows:
        minutes[min(len(minutes) - 1, (view.tick.end_ns - time_ns) // MINUTE_NS)] += times
    return float(min(minutes))


def _weight(event: Event) -> int:
    said = told(event.detail)
    if said is None or event.time_ns < BOOT_NS:
        return 0
    return said.times if said.code == "corrected" else -1


CRITICAL, WARNING = xids("critical"), xids("warning")

RULES = (
    Rule(
        name="gpu_xid",
        severity="critical",
        per="gpu",
        help="In the last hour the driver logged a critical Xid error of the GPU; the value is how "
        "many.",
        next_step="Drain the node and do what the event `xid` says of the code.",
        judge=lambda view: errors(view, CRITICAL),
        limit=1.0,
        window_seconds=3600,
        detect=lambda view: seen(view, CRITICAL),
        record=True,
    ),
    Rule(
        name="gpu_xid_warning",
        severity="warning",
        per="gpu",
        help="In the last hour the driver logged an Xid error that the GPU coped with; the value "
        "is how many.",
        next_step="Do what the event `xid` says of the code when the node is free.",
        judge=lambda view: errors(view, WARNING),
        limit=1.0,
        window_seconds=3600,
        detect=lambda view: seen(view, WARNING),
        record=True,
    ),
    Rule(
        name="pcie_errors",
        severity="warning",
        per="pci_device",
        help="In the last 10 minutes a PCIe error of the device was not corrected, or 100 and more "
        "were in each minute.",
        next_step="Reseat the device or its riser, and look at the devices behind the same switch.",
        judge=pcie_errors,
        limit=100.0,
        window_seconds=600,
    ),
)

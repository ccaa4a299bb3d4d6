"""Rules about whether GPUs are there, answer, and have sound memory and links.

Counters are judged by their increase since gpuwatch first read them: what happened before is no
news. A link is compared with what this GPU in this slot can do or has had, never with other
machines.
"""

from gpuwatch.kernel_log import XID, told
from gpuwatch.rule import Rule, View
from gpuwatch.signals import Event

UNCORRECTED = 'gpu_ecc_errors_total{type="uncorrected"}'
PCIE_LOAD = 1e9  # bytes per second: with less to do, a link may run slower to save power


def seen_down(view: View) -> bool:
    """Say whether the GPU did not answer at any time of the tick."""
    up = view.window("gpu_up")
    return up is not None and up.minimum == 0


def answers(view: View) -> float | None:
    """Return 1 if the GPU answers, 0 if it does not or is said to be off the bus; else None.

    Xid 79 counts where no sampler can tell.
    """
    off_the_bus = view.told(XID, _says_off_the_bus)
    up = view.highest("gpu_up")
    return 0.0 if up is None and off_the_bus else up


def _says_off_the_bus(event: Event) -> int:
    said = told(event.detail)
    return int(said is not None and said.code == "79")


def hung(view: View) -> float | None:
    """Return 1 if any sampler left the GPU alone for a call that hangs, None if none can say."""
    known = [view.highest(name) for name in view.columns("gpu_hung")]
    return max((value for value in known if value is not None), default=None)


def missing_gpus(view: View) -> float | None:
    """Return how many of the node's GPUs do not answer, None if unknown.

    While library and driver do not fit, nothing can be said of any GPU.
    """
    visible, expected = view.highest("gpus_visible"), view.highest("gpus_expected")
    if visible is None or expected is None or view.highest("driver_mismatch"):
        return None
    return expected - visible


def pcie_share(view: View) -> float | None:
    """Return the share of its bandwidth that the PCIe link gives, None if unknown.

    Lanes count always, the generation only under load. Each generation is about twice as fast as
    the one before.
    """
    moved = view.rise("gpu_pcie_received_bytes_total", "gpu_pcie_transmitted_bytes_total")
    lanes = view.highest("gpu_pcie_link_width_lanes")
    most_lanes = view.constant("gpu_pcie_link_width_limit_lanes")
    share = None if lanes is None or not most_lanes else lanes / most_lanes
    if moved is None or moved <= PCIE_LOAD * view.window_seconds:
        return share
    generation = view.highest("gpu_pcie_link_generation")
    newest = view.constant("gpu_pcie_link_generation_limit")
    if generation is None or newest is None:
        return share
    return (1.0 if share is None else share) * 2 ** min(0.0, generation - newest)


def links_down(view: View) -> float | None:
    """Return how many of the NVLinks that the GPU has had are not up, None if unknown."""
    up, expected = view.highest("gpu_nvlink_links_up"), view.highest("gpu_nvlink_links_expected")
    return None if up is None or expected is None else expected - up


def link_errors(view: View) -> float | None:
    """Return the NVLink errors of all types a minute, None if none is counted."""
    names = view.columns("gpu_nvlink_errors_total")
    rise = view.rise(*names) if names else None
    return None if rise is None else rise * 60 / view.window_seconds


def counted(view: View, name: str) -> bool:
    """Say whether a counter rose in the tick."""
    window = view.window(name)
    return window is not None and window.increase > 0


RULES = (
    Rule(
        name="gpu_lost",
        severity="critical",
        per="gpu",
        help="The GPU has not answered for 30 seconds.",
        next_step="Drain the node, look for an Xid in the kernel log, then reset or reboot.",
        judge=answers,
        limit=0.0,
        at_most=True,
        window_seconds=60,
        for_seconds=30,
        sticky=True,
        detect=seen_down,
        record=True,
        verdict="reboot",  # nvidia-smi of a lost GPU: "Reboot the system to recover this GPU"
    ),
    Rule(
        name="gpu_missing",
        severity="critical",
        per="host",
        help="For a minute fewer GPUs have answered than this node should have; the value is how "
        "many are missing.",
        next_step="Drain the node, compare `lspci -d 10de:` with `nvidia-smi -L`, then reboot.",
        judge=missing_gpus,
        limit=1.0,
        for_seconds=60,
    ),
    Rule(
        name="gpu_hung",
        severity="critical",
        per="gpu",
        help="A call to the GPU has not returned for a minute.",
        next_step="Drain the node, look for an Xid in the kernel log, then reboot.",
        judge=hung,
        limit=1.0,
        for_seconds=60,
        record=True,
        verdict="reboot",  # a reset waits for the processes that hang
    ),
    Rule(
        name="gpu_recovery_required",
        severity="critical",
        per="gpu",
        help="The driver asks for a recovery of the GPU; the value is 1 for a reset, 2 for a "
        "reboot, 3 for a drain, 4 for a drain and a reset, more in the runbook.",
        next_step="Drain the node, then do what the value says.",
        judge=lambda view: view.highest("gpu_recovery_action"),
        limit=1.0,
        verdict={1.0: "reset", 2.0: "reboot", 3.0: "reset", 4.0: "reset"},
    ),
    Rule(
        name="gpu_ecc_uncorrected",
        severity="critical",
        per="gpu",
        help="The GPU's memory had an error that could not be corrected.",
        next_step="Drain the node and reset the GPU, then look whether a row was remapped.",
        judge=lambda view: view.rise(UNCORRECTED),
        limit=1.0,
        window_seconds=60,
        hold_seconds=3600,
        detect=lambda view: counted(view, UNCORRECTED),
        record=True,
    ),
    Rule(
        name="gpu_row_remap_pending",
        severity="warning",
        per="gpu",
        help="A faulty row of the GPU's memory is replaced at the next reset.",
        next_step="Reset the GPU when the node is free.",
        judge=lambda view: view.highest("gpu_row_remap_pending"),
        limit=1.0,
    ),
    Rule(
        name="gpu_row_remap_failed",
        severity="critical",
        per="gpu",
        help="A faulty row of the GPU's memory could not be replaced.",
        next_step="Drain the node and send the GPU back.",
        judge=lambda view: view.highest("gpu_row_remap_failed"),
        limit=1.0,
    ),
    Rule(
        name="gpu_pcie_degraded",
        severity="warning",
        per="gpu",
        help="For 5 minutes the PCIe link had fewer lanes than GPU and slot can have, or a lower "
        "generation under load; the value is the share of its bandwidth that is left.",
        next_step="Look for AER errors in the kernel log, then reseat the GPU or its riser.",
        judge=pcie_share,
        limit=0.75,
        at_most=True,
        window_seconds=60,
        for_seconds=300,
    ),
    Rule(
        name="gpu_nvlink_down",
        severity="critical",
        per="gpu",
        help="For 30 seconds fewer NVLinks have been up than this GPU has had; the value is how "
        "many are missing.",
        next_step="Drain the node, look for an Xid in the kernel log, then reset all its GPUs.",
        judge=links_down,
        limit=1.0,
        for_seconds=30,
        detect=lambda view: (links_down(view) or 0) >= 1,
        record=True,
    ),
    Rule(
        name="gpu_nvlink_errors",
        severity="warning",
        per="gpu",
        help="For 10 minutes the GPU's NVLinks have had 10 or more errors a minute.",
        next_step="Compare the types of errors with its peers, then reseat the GPU or its bridge.",
        judge=link_errors,
        limit=10.0,
        window_seconds=60,
        for_seconds=600,
    ),
    Rule(
        name="driver_mismatch",
        severity="warning",
        per="host",
        help="For a minute NVML has refused to work: library and kernel module are of different "
        "versions.",
        next_step="Reload the kernel module or reboot the node.",
        judge=lambda view: view.highest("driver_mismatch"),
        limit=1.0,
        for_seconds=60,
    ),
)

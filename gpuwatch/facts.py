"""Facts: what the daemon itself knows of the node, put into every tick for the rules.

Nothing is said of GPUs while they are left to another tool.
"""

from typing import TYPE_CHECKING

from gpuwatch.signals import HOST, Entity
from gpuwatch.store import SlotRow

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon

# Parts of the reason why a duty is unavailable: NVML's own name of an error, and the roster's word.
MISMATCH = "lib_rm_version_mismatch"
NO_GPU = "no NVIDIA GPU on this host"


def gather(daemon: "Daemon") -> dict[Entity, dict[str, float]]:
    """Return values by entity and name; what is not known is left out."""
    facts = accepted_rates(daemon)
    facts[HOST] = {"recorder_disk_full": float(daemon.archive.full)}
    if daemon.leases.released["gpus"]:
        return facts
    host = {
        "gpus_visible": _visible(daemon),
        "gpus_expected": daemon.gpus_expected,
        "driver_mismatch": _mismatch(daemon),
    }
    facts[HOST] |= {name: float(value) for name, value in host.items() if value is not None}
    for gpu, links in links_expected(daemon).items():
        facts[gpu] = {"gpu_nvlink_links_expected": float(links)}
    return facts


def links_expected(daemon: "Daemon") -> dict[Entity, int]:
    """Return for each GPU the NVLinks that the one in its slot has had."""
    slots = daemon.inventory.slots
    found = {}
    for info in daemon.feed.entities:
        slot = slots.get(info.labels.get("pci_bus_id", ""))
        if info.entity.kind == "gpu" and slot is not None and slot.nvlink_links is not None:
            found[info.entity] = slot.nvlink_links
    return found


def seen_slots(daemon: "Daemon") -> dict[Entity, SlotRow]:
    """Return what each GPU that answers tells of itself; those that tell no uuid are left out."""
    found = {}
    for info in daemon.feed.entities:
        gpu, labels = info.entity, info.labels
        told = gpu.kind == "gpu" and labels.get("uuid") and labels.get("pci_bus_id")
        if told and answers(daemon, gpu):
            found[gpu] = SlotRow(
                pci_bus_id=labels["pci_bus_id"],
                uuid=labels["uuid"],
                serial=labels.get("serial", ""),
                name=labels.get("name", ""),
                nvlink_links=_number(daemon, gpu, "gpu_nvlink_links_up"),
                pcie_width=_number(daemon, gpu, "gpu_pcie_link_width_limit_lanes"),
                pcie_generation=_number(daemon, gpu, "gpu_pcie_link_generation_limit"),
            )
    return found


def accepted_rates(daemon: "Daemon") -> dict[Entity, dict[str, float]]:
    """Return the rate that each RDMA port here should have, unless the config says it."""
    if daemon.config["network"]["expected_gbps"]:
        return {}
    rates = daemon.inventory.rates
    ports = [info.entity for info in daemon.feed.entities if info.entity.kind == "rdma_port"]
    return {port: {"rdma_accepted_rate": rates[port.id]} for port in ports if port.id in rates}


def seen_rates(daemon: "Daemon") -> dict[str, float]:
    """Return the rate of each RDMA port's link that is up."""
    ports = [info.entity for info in daemon.feed.entities if info.entity.kind == "rdma_port"]
    rates = {
        port.id: _newest(daemon, port, "rdma_rate_bytes_per_second")
        for port in ports
        if _newest(daemon, port, "rdma_port_up") == 1
    }
    return {port: rate for port, rate in rates.items() if rate is not None}


def answers(daemon: "Daemon", gpu: Entity) -> bool | None:
    """Say whether a GPU answered in the newest windows, None if they do not tell."""
    up = _number(daemon, gpu, "gpu_up")
    return None if up is None else up == 1


def _number(daemon: "Daemon", entity: Entity, name: str) -> int | None:
    value = _newest(daemon, entity, name)
    return None if value is None else int(value)


def _newest(daemon: "Daemon", entity: Entity, name: str) -> float | None:
    """Return a column's newest value, or a constant's."""
    for tick in daemon.ticks:
        window = tick.window(entity, name)
        if window is not None and window.covered_ns:
            return window.last
        constant = tick.constant(entity, name)
        if constant is not None:
            return constant
    return None


def _visible(daemon: "Daemon") -> int | None:
    """Return how many GPUs answer; None while it is not known of each."""
    if _reason_has(daemon, NO_GPU):
        return 0
    gpus = [info.entity for info in daemon.feed.entities if info.entity.kind == "gpu"]
    found = [answers(daemon, gpu) for gpu in gpus]
    return sum(map(bool, found)) if found and None not in found else None


def _mismatch(daemon: "Daemon") -> bool | None:
    if _reason_has(daemon, MISMATCH):
        return True
    return False if daemon.nvml_up else None


def _reason_has(daemon: "Daemon", text: str) -> bool:
    return any(text in report.get("reason", "") for report in daemon.supervisor.children)

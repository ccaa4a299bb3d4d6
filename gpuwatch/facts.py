"""Facts: what the daemon itself knows of the node, put into every tick for the rules.

Nothing is said of GPUs while they are left to another tool.
"""

import time
from typing import TYPE_CHECKING

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.signals import HOST, Entity
from gpuwatch.store import SlotRow

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon

# Parts of the reason why a duty is unavailable: NVML's own name of an error, and the roster's word.
MISMATCH = "lib_rm_version_mismatch"
NO_GPU = "no NVIDIA GPU on this host"
IDLE_SECONDS = 600.0  # of the last day: time enough for a canary


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
    for entity, values in canaries(daemon).items():
        facts.setdefault(entity, {}).update(values)
    return facts


def canaries(daemon: "Daemon") -> dict[Entity, dict[str, float]]:
    """Return what canaries said of GPUs and host, and of which GPUs they say nothing any more."""
    gpus = by_uuid(daemon)
    daemon.simulated_canaries.look(gpus, monotonic_ns())
    facts = daemon.baseline.facts(gpus)
    daemon.idle.look(daemon.ticks[0] if daemon.ticks else None, gpus.values())
    stuck = daemon.canary_runner.stuck
    if stuck is None:  # none may run here
        return facts
    facts.setdefault(HOST, {})["canary_stuck"] = float(stuck)
    started = time.time() - (monotonic_ns() - daemon.started_ns) / SECOND_NS
    for uuid, gpu in gpus.items():
        since = daemon.baseline.newest(uuid) or started
        divided = _newest(daemon, gpu, 'gpu_mig_enabled{setting="current"}') == 1
        due = daemon.idle.seconds(gpu) >= IDLE_SECONDS and not divided  # they measure whole GPUs
        overdue = max(0.0, time.time() - since) if due else 0.0
        facts.setdefault(gpu, {})["canary_overdue_seconds"] = overdue
    return facts


def by_uuid(daemon: "Daemon") -> dict[str, Entity]:
    """Return the GPUs that are here, as readings of canaries name them."""
    gpus = [info for info in daemon.feed.entities if info.entity.kind == "gpu"]
    return {info.labels["uuid"]: info.entity for info in gpus if info.labels.get("uuid")}


def in_trouble(daemon: "Daemon", about: Entity) -> bool:
    """Say whether an alert of warning or worse fires about a GPU, by uuid; of the host, any."""
    gpu = by_uuid(daemon).get(about.id)
    return any(
        alert.entity.kind == "gpu" and (about == HOST or alert.entity == gpu)
        for alert in daemon.engine.alerts()
        if alert.state == "firing" and alert.severity != "info"
    )


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

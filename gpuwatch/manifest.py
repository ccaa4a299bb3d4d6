"""Manifests: what the samplers' children say of the entities that their rings speak of."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gpuwatch.signals import Column, Entity
from gpuwatch.source import EntityInfo, Tenant


@dataclass(slots=True)
class Manifest:
    """What a duty's child announced; `names` are the entities of its rings as numbered here."""

    duty: str
    generation: int
    sources: dict[str, dict[str, Any]]
    names: dict[Entity, Entity]
    entities: list[EntityInfo] = field(default_factory=list)
    constants: list[tuple[Column, float]] = field(default_factory=list)
    tenants: list[Tenant] = field(default_factory=list)


def entities_of(manifests: Iterable[Manifest]) -> list[EntityInfo]:
    """Return everything that these manifests speak of, each once, GPUs by number."""
    labels: dict[Entity, dict[str, str]] = {}
    for manifest in manifests:
        for info in manifest.entities:
            labels.setdefault(info.entity, {}).update(info.labels)
    numbers = {
        known["pci_bus_id"]: entity.id
        for entity, known in labels.items()
        if entity.kind == "gpu" and "pci_bus_id" in known
    }
    for known in labels.values():  # ports and NICs know the addresses of the GPUs near them
        near = [numbers[pci] for pci in known.pop("near", "").split(",") if pci in numbers]
        if near:
            known["gpu"] = ",".join(near)
    return [EntityInfo(entity, known) for entity, known in labels.items()]


def links_of(infos: Iterable[EntityInfo]) -> dict[Entity, tuple[Entity, ...]]:
    """Return the interfaces of each RDMA port; their labels name the port."""
    links: dict[Entity, tuple[Entity, ...]] = {}
    for info in infos:
        if info.entity.kind == "interface" and "device" in info.labels:
            port = Entity("rdma_port", f"{info.labels['device']}/{info.labels['port']}")
            links[port] = (*links.get(port, ()), info.entity)
    return links


def own_labels(entity: Entity) -> dict[str, str]:
    """Return the labels that an entity's own name stands for."""
    if entity.kind == "gpu_instance":
        gpu, _, instance = entity.id.partition("/")
        return {"gpu": gpu, "gpu_instance": instance}
    return {} if entity.kind == "rdma_port" else {entity.kind: entity.id}

"""The network interfaces to watch: those behind RDMA ports, and those the config names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuwatch.rdma_ports import PCI_ADDRESS, rdma_ports
from gpuwatch.signals import Entity
from gpuwatch.source import EntityInfo
from gpuwatch.topology import nearest_gpus, numa_node


def interfaces(sysfs: Path, settings: Mapping[str, Any]) -> dict[str, EntityInfo]:
    """Return what is known of each interface that is there, by name.

    `settings` is the section `network` of the config. An interface behind an RDMA port has the
    labels `device` and `port` of that port.
    """
    ports = {name: port for port in rdma_ports(sysfs, settings) for name in port.interfaces}
    found = {}
    for name in sorted({*ports, *settings["interfaces"]}):
        path = sysfs / "class/net" / name
        if not path.exists():
            continue
        address = (path / "device").resolve().name
        labels = {"interface": name}
        if PCI_ADDRESS.fullmatch(address):
            labels["pci_bus_id"] = address
            labels["numa"] = numa_node(sysfs, address)
            labels["near"] = ",".join(nearest_gpus(sysfs, address))
        if name in ports:
            labels |= {"device": ports[name].device, "port": str(ports[name].number)}
        labels = {key: text for key, text in labels.items() if text}
        found[name] = EntityInfo(Entity("interface", name), labels)
    return found

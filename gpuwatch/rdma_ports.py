"""Which RDMA ports a host has, as /sys/class/infiniband lists them, and what belongs to each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuwatch import attribute
from gpuwatch.signals import Entity
from gpuwatch.topology import nearest_gpus, numa_node

PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
RATE = re.compile(r"([\d.]+) Gb/sec \((\d+)X")
BITS_OF_A_BYTE = 8


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of a device; `path` is its folder and `interfaces` the NICs its link runs over.

    Its `rate` is not among the labels yet: the device's firmware must answer that, and may not.
    """

    device: str
    number: int
    path: Path
    bus_id: str
    interfaces: tuple[str, ...]
    labels: dict[str, str]

    @property
    def id(self) -> str:
        """The port as people write it, `mlx5_0/1`."""
        return f"{self.device}/{self.number}"

    @property
    def entity(self) -> Entity:
        """The port as an entity."""
        return Entity("rdma_port", self.id)

    @property
    def device_path(self) -> Path:
        """The folder of the port's device."""
        return self.path.parent.parent


def devices(sysfs: Path) -> list[str]:
    """Return the names of the RDMA devices; none where the host has none."""
    try:
        return sorted(path.name for path in (sysfs / "class/infiniband").iterdir())
    except OSError:
        return []


def linked(sysfs: Path) -> bool:
    """Say whether a port of a NIC is up; what is RDMA in software alone is none."""
    return any(
        attribute.read(state).endswith("ACTIVE")
        for device in devices(sysfs)
        if (sysfs / "class/infiniband" / device / "device").exists()
        for state in (sysfs / "class/infiniband" / device).glob("ports/*/state")
    )


def rdma_ports(sysfs: Path, settings: Mapping[str, Any]) -> list[RdmaPort]:
    """Return the ports that the section `network` of the config wants."""
    return [port for device in devices(sysfs) for port in ports_of(sysfs, device, settings)]


def ports_of(sysfs: Path, device: str, settings: Mapping[str, Any]) -> list[RdmaPort]:
    """Return the wanted ports of a device; none of one that has just gone."""
    path = sysfs / "class/infiniband" / device
    virtual = (path / "device/physfn").exists()
    if virtual and not settings["virtual_functions"]:
        return []
    numbers = sorted(int(port.name) for port in path.glob("ports/*") if port.name.isdecimal())
    return [
        _port(sysfs, path, number)
        for number in numbers
        if wanted(device, settings, f"{device}/{number}")
    ]


def wanted(device: str, settings: Mapping[str, Any], port: str = "") -> bool:
    """Say whether the config asks for a device, or for one of its ports."""
    names = (device, port) if port else (device,)

    def named(patterns: Sequence[str]) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in patterns for name in names)

    chosen = not settings["include"] or named(settings["include"])
    return chosen and not named(settings["exclude"])


def _port(sysfs: Path, device: Path, number: int) -> RdmaPort:
    path = device / "ports" / str(number)
    address = (device / "device").resolve().name
    bus_id = address if PCI_ADDRESS.fullmatch(address) else ""
    interfaces = _interfaces(sysfs, device, number)
    labels = {
        "device": device.name,
        "port": str(number),
        "link_layer": attribute.read(path / "link_layer"),
        "board_id": attribute.read(device / "board_id"),
        "firmware": attribute.read(device / "fw_ver"),
        "node_guid": attribute.read(device / "node_guid"),
        "netdev": ",".join(interfaces),
        "pci_bus_id": bus_id,
        "numa": numa_node(sysfs, bus_id) if bus_id else "",
        "near": ",".join(nearest_gpus(sysfs, bus_id)) if bus_id else "",
    }
    return RdmaPort(device.name, number, path, bus_id, interfaces, labels)


def _interfaces(sysfs: Path, device: Path, number: int) -> tuple[str, ...]:
    """Return the NICs of a port: that of its addresses, those of a bond, or its device's own."""
    name = attribute.read(device / f"ports/{number}/gid_attrs/ndevs/0") or attribute.read(
        device / "parent"
    )
    if name:
        bonded = attribute.read(sysfs / "class/net" / name / "bonding/slaves").split()
        return tuple(bonded) or (name,)
    found = sorted((device / "device/net").glob("*"))
    own = [
        path.name for path in found if attribute.read(path / "dev_port") in ("", str(number - 1))
    ]
    return tuple(own)


def link(rate: str) -> tuple[float, float]:
    """Return bytes per second and lanes of a text such as `400 Gb/sec (4X NDR)`.

    Raises ValueError if it says neither.
    """
    found = RATE.match(rate)
    if not found:
        raise ValueError(f"rate {rate!r}")
    return float(found[1]) * 1e9 / BITS_OF_A_BYTE, float(found[2])


def node_guid(written: str) -> int | None:
    """Return the number of a GUID such as `b859:9f03:00d4:1234`, None if it is none."""
    try:
        return int(written.replace(":", ""), 16)
    except ValueError:
        return None

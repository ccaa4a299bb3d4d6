"""What the PCI bus shows, whatever the driver says."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gpuwatch import attribute
from gpuwatch.tmpfs import filesystem

SYSFS = Path("/sys")
NVIDIA = "0x10de"
DISPLAY_CLASS = "0x03"
# What the kernel writes as max_link_speed, in GT/s.
GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
MOST_LANES = 32  # the kernel writes 255 if it does not know
ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")  # a host bridge in /sys/devices


def pci_gpus(sysfs: Path) -> list[str]:
    """Return the addresses of NVIDIA's display controllers (class 03), in domain order."""
    found = []
    for device in (sysfs / "bus/pci/devices").glob("*"):
        if attribute.read(device / "vendor") == NVIDIA and attribute.read(
            device / "class"
        ).startswith(DISPLAY_CLASS):
            found.append(device.name)
    return in_bus_order(found)


def given_gpus(sysfs: Path, devices: Path = Path("/dev")) -> int:
    """Return how many GPUs a container was given, by its device nodes; 0 outside of one.

    A host's /dev is the kernel's devtmpfs. A container has nodes of its own GPUs alone in a tmpfs,
    while its /sys shows the whole bus of the host, or none of it. Of another tree than /sys the
    nodes tell nothing.
    """
    if sysfs != SYSFS or filesystem(devices) == "devtmpfs":
        return 0
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))


def own_gpus(sysfs: Path) -> list[str]:
    """Return the GPUs of the bus; none of a bus that a container has only a part of."""
    on_bus = pci_gpus(sysfs)
    return [] if 0 < given_gpus(sysfs) < len(on_bus) else on_bus


def in_bus_order(addresses: Iterable[str]) -> list[str]:
    """Sort PCI addresses; a domain may have more than four digits."""
    return sorted(addresses, key=lambda one: (len(one), one))


def numa_node(sysfs: Path, bus_id: str) -> str:
    """Return the NUMA node of a device as text, "" where the host has none."""
    node = attribute.read(sysfs / "bus/pci/devices" / bus_id / "numa_node")
    return "" if node == "-1" else node


def node_processors(sysfs: Path, node: str) -> list[int]:
    """Return the processors of a NUMA node, none if it is not known."""
    found: list[int] = []
    for span in re.findall(
        r"\d+(?:-\d+)?", attribute.read(sysfs / f"devices/system/node/node{node}/cpulist")
    ):
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def pci_path(sysfs: Path, bus_id: str) -> tuple[str, ...]:
    """Return the way to a device from its host bridge on: root, switches, the device itself."""
    parts = (sysfs / "bus/pci/devices" / bus_id).resolve().parts
    roots = [index for index, part in enumerate(parts) if ROOT.fullmatch(part)]
    return parts[roots[0] :] if roots else ()


class PcieLink(NamedTuple):
    """The most that an end of a PCIe link can do; None where it does not tell."""

    generation: int | None
    lanes: int | None


def own_link(sysfs: Path, bus_id: str) -> PcieLink:
    """Return what a device itself can do."""
    return _link(sysfs / "bus/pci/devices" / bus_id)


def slot_link(sysfs: Path, bus_id: str) -> PcieLink:
    """Return what the bridge above a device can do; a virtual machine may have none."""
    above = (sysfs / "bus/pci/devices" / bus_id).resolve().parent
    return _link(above)


def _link(device: Path) -> PcieLink:
    speed, _, unit = attribute.read(device / "max_link_speed").partition(" ")
    lanes = attribute.read(device / "max_link_width")
    return PcieLink(
        GENERATIONS.get(speed) if unit.startswith("GT/s") else None,
        int(lanes) if lanes.isdecimal() and 0 < int(lanes) <= MOST_LANES else None,
    )


def nearest_gpus(sysfs: Path, bus_id: str) -> list[str]:
    """Return the GPUs that share the longest way with a device; none that share no bridge."""
    path = pci_path(sysfs, bus_id)
    shared = {gpu: _shared(path, pci_path(sysfs, gpu)) for gpu in pci_gpus(sysfs)}
    longest = max(shared.values(), default=0)
    return [gpu for gpu, length in shared.items() if length == longest and longest]


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Return how many steps two ways have in common from the root on."""
    pairs = zip(one, other, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

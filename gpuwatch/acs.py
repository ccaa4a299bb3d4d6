"""Access Control Services of PCIe bridges: whether peers' packets go through the processor.

By the PCI Express specification: extended capability 0x000d, its control register 6 bytes on; bits
2 to 4 redirect requests, completions and what comes from below.
"""

from collections.abc import Iterable
from pathlib import Path

from gpuwatch.topology import pci_path

FIRST, LAST = 0x100, 0x1000  # of extended capabilities in a device's configuration
CAPABILITY, CONTROL = 0x000D, 6
REDIRECTS = 0b11100
MOST = 64  # capabilities, should they lead in a circle


def redirecting(sysfs: Path, addresses: Iterable[str]) -> list[str] | None:
    """Return the bridges above devices that redirect; None if one cannot be read, or none is there.

    The kernel shows all of a configuration to root alone.
    """
    bridges = dict.fromkeys(
        bridge for address in addresses for bridge in pci_path(sysfs, address)[1:-1]
    )
    controls = {
        bridge: control(sysfs / "bus/pci/devices" / bridge / "config") for bridge in bridges
    }
    if not controls or None in controls.values():
        return None
    return [bridge for bridge, bits in controls.items() if bits and bits & REDIRECTS]


def control(path: Path) -> int | None:
    """Return the control register of a device, 0 if it has none; None if it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < LAST:
        return None
    at = FIRST
    for _ in range(MOST):
        head = int.from_bytes(data[at : at + 4], "little")
        if head & 0xFFFF == CAPABILITY:
            return int.from_bytes(data[at + CONTROL : at + CONTROL + 2], "little")
        at = head >> 20
        if at < FIRST:
            break
    return 0

"""What the PCI bus shows, whatever the driver says."""

from pathlib import Path

NVIDIA = "0x10de"
DISPLAY_CLASS = "0x03"


def pci_gpus(sysfs: Path) -> list[str]:
    """Return the addresses of NVIDIA's display controllers (class 03), in domain order."""
    found = []
    for device in sorted((sysfs / "bus/pci/devices").glob("*")):
        if _text(device / "vendor") == NVIDIA and _text(device / "class").startswith(DISPLAY_CLASS):
            found.append(device.name)
    return found


def numa_node(sysfs: Path, bus_id: str) -> str:
    """Return the NUMA node of a device as text, "" where the host has none."""
    node = _text(sysfs / "bus/pci/devices" / bus_id / "numa_node")
    return "" if node == "-1" else node


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

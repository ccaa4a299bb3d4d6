"""Whether the RDMA ports are up and alike, and can reach the GPUs' memory.

Ports of one kind of board are compared with each other: what one has the others should have.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from gpuwatch import attribute
from gpuwatch.lookup import text
from gpuwatch.matter import Matter
from gpuwatch.rdma_ports import RdmaPort, link, rdma_ports
from gpuwatch.static_check import StaticCheck, entity_of
from gpuwatch.topology import nearest_gpus, pci_path
from gpuwatch.verify import Finding, Node

# Virtual functions are left out only where the device that they are of is here as well.
ALL = {"include": [], "exclude": [], "virtual_functions": False}
ACTIVE = "ACTIVE"
NO_ADDRESS = re.compile(r"^[0:]*$|^fe80:0000:0000:0000:0000:0000:0000:0000$")


def look(node: Node) -> Iterator[Finding]:
    """Compare ports of a kind, and the ways to GPUs."""
    ports = physical_ports(node.sysfs)
    if not ports:
        reason = "this host has no RDMA device"
        yield Matter("rdma", "host").skipped(reason, "nothing, unless it was sold with some")
        return
    kinds: dict[tuple[str, str, int], list[RdmaPort]] = defaultdict(list)
    for port in ports:
        kinds[port.labels["board_id"], port.labels["link_layer"], port.number].append(port)
    used = []
    for kind in kinds.values():
        up = [port for port in kind if port_state(port) == ACTIVE]
        used += up
        if not up:
            reason = f"no port of this kind is up: {', '.join(port.id for port in kind)}"
            yield Matter("rdma", "host", "state").skipped(reason, "cable them, if they are needed")
        else:
            yield from _kind(kind, up)
    if used:
        yield _direct(node)
        yield _near(node, used)


def physical_ports(sysfs: Path) -> list[RdmaPort]:
    """Return the ports of this host, without those of virtual functions."""
    return rdma_ports(sysfs, ALL)


def port_state(port: RdmaPort) -> str:
    """Return a port's state without its number: "4: ACTIVE" is ACTIVE."""
    return attribute.read(port.path / "state").partition(": ")[2]


def _kind(ports: list[RdmaPort], up: list[RdmaPort]) -> Iterator[Finding]:
    rates = {port.id: _rate(port) for port in ports}
    fastest = max((rate for rate in rates.values() if rate), default=0.0)
    firmwares = Counter(port.labels["firmware"] for port in ports if port.labels["firmware"])
    for port in ports:
        state, rate = port_state(port), rates[port.id]
        matter = Matter("rdma", port.id, "state")
        if not state:
            yield matter.unread("its state")
            continue
        fault = f"it is {state}, and others like it are up" if port not in up else ""
        step = "look at cable, transceiver and switch; in INIT at the subnet manager"
        few = len(up) > len(ports) / 2
        yield matter.seen(state, ACTIVE, "siblings").judged(fault, "link", step, fatal=few)
        if fault:
            continue
        matter = Matter("rdma", port.id, "rate", "bytes_per_second")
        if not rate:
            yield matter.unread("the rate of its link")
        else:
            slow = f"its link has {100 * rate / fastest:.0f} % of the rate of others like it"
            yield matter.seen(rate, fastest, "siblings").judged(
                slow if rate < fastest else "",
                "link",
                "look at cable, transceiver and the switch's port",
                fatal=list(rates.values()).count(rate) == 1,  # others like it may be for storage
            )
        yield _address(port)
        yield _mtu(port)
    if len(firmwares) > 1:
        told = ", ".join(f"{times}x {version}" for version, times in firmwares.most_common())
        yield (
            Matter("rdma", "host", "firmware")
            .seen(told, firmwares.most_common(1)[0][0], "siblings")
            .odd("devices of one kind run different firmware", "driver", "update them to one")
        )


def _rate(port: RdmaPort) -> float | None:
    try:
        return link(attribute.read(port.path / "rate"))[0]
    except ValueError:
        return None


def _address(port: RdmaPort) -> Finding:
    """Say whether the port has an address that others can reach."""
    matter = Matter("rdma", port.id, "address")
    if port.labels["link_layer"] not in ("Ethernet", "InfiniBand"):
        return matter.skipped("its addresses are of a kind of their own", "measure it")
    if port.labels["link_layer"] == "InfiniBand":
        lid = attribute.read(port.path / "lid")
        fault = "it has no LID: no subnet manager has seen it" if lid in ("0x0", "0") else ""
        step = "start a subnet manager, opensm or the switch's"
        if not lid:
            return matter.skipped("its LID is not shown", "look at ibstat")
        return matter.seen(lid, "a LID", "InfiniBand").judged(fault, "link", step, fatal=True)
    files = sorted((port.path / "gids").glob("*"))
    if not files:
        return matter.skipped("its addresses are not shown here", "look at show_gids")
    types = port.path / "gid_attrs/types"
    second = [
        path.name
        for path in files
        if not NO_ADDRESS.match(attribute.read(path)) and "v2" in attribute.read(types / path.name)
    ]
    fault = "" if second else "it has no address for RoCE v2"
    step = "give its interface an IP address"
    told = f"{len(second)} of RoCE v2"
    return matter.seen(told, "1 or more", "RoCE v2").judged(fault, "link", step, fatal=True)


def _mtu(port: RdmaPort) -> Finding:
    matter = Matter("rdma", port.id, "mtu", "bytes")
    name = port.interfaces[0] if len(port.interfaces) == 1 else ""
    path = port.device_path / "device/net" / name / "mtu" if name else None
    told = attribute.read(path) if path else ""
    if not told.isdecimal():
        return matter.skipped("the MTU of its interface is not shown", "look at ip link")
    mtu = float(told)
    ethernet = port.labels["link_layer"] == "Ethernet"
    matter = matter.seen(mtu, 4200.0 if ethernet else None, "rule of thumb" if ethernet else "")
    if not ethernet or mtu >= 4200:  # 4096 of RDMA, and headers
        return matter.good()
    fault = f"an MTU of {told} makes packets of RDMA small"
    step = "set it to 9000, on the switch as well"
    return matter.by_thumb().odd(fault, "link", step)


def _direct(node: Node) -> Finding:
    """Say whether NICs can reach GPU memory: by a module, or by dma-buf of the open driver."""
    matter = Matter("rdma", "host", "gpu direct")
    if (node.sysfs / "module/nvidia_peermem").is_dir():
        return matter.seen("nvidia_peermem").good()
    version = attribute.read(node.procfs / "driver/nvidia/version")
    if "Open Kernel Module" in version:
        return matter.seen("dma-buf").good()
    if not version:
        return matter.skipped("the driver's kind is not shown here", "look at lsmod on the host")
    return matter.seen("neither", "nvidia_peermem or dma-buf", "NVIDIA's GPUDirect RDMA").odd(
        "NICs cannot reach GPU memory: what is sent goes through the host's",
        "driver",
        "modprobe nvidia_peermem, or install the open kernel modules",
    )


def _near(node: Node, ports: list[RdmaPort]) -> Finding:
    """Say whether each GPU has a port near it, where some have."""
    matter = Matter("rdma", "host", "near gpus")
    ways = [pci_path(node.sysfs, port.bus_id) for port in ports if port.bus_id]
    if not all(len(way) > 2 for way in ways) or len(ways) < len(ports):
        reason = "no bridges are shown above the ports: who is near to whom is not known"
        return matter.skipped(reason, "look at nvidia-smi topo -m on the host")
    near = {gpu for port in ports for gpu in nearest_gpus(node.sysfs, port.bus_id)}
    addresses = {entity_of(gpu): text(gpu, "pci_bus_id") for gpu in node.answering}
    far = sorted(name for name, address in addresses.items() if address not in near)
    fault = f"no port that is up is near {', '.join(far)}: what they send crosses the processor"
    return matter.seen(f"{len(addresses) - len(far)} GPUs", f"{len(addresses)} GPUs").judged(
        fault if far else "",
        "link",
        "compare nvidia-smi topo -m with the node's plan; look for a port that is down",
    )


CHECK = StaticCheck("rdma", "whether RDMA ports are up, alike and near GPUs", look, seconds=4)

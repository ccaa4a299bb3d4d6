"""RDMA ports and interfaces of the populated snapshot: one of each for every GPU.

The first port counts whatever any driver does, so that each metric is there; the others count what
mlx5 does.
"""

from rdma_tree import MLX5_HW, MLX5_PMA

from gpuwatch import network_signals as signals
from gpuwatch.signals import Column, Entity, Kind
from gpuwatch.source import EntityInfo

MLX5 = {
    counter.signal.name
    for counter in signals.PORT_COUNTERS
    if counter.pma in MLX5_PMA or any(set(names) <= MLX5_HW.keys() for names in counter.names)
}
VALUES = {
    "rdma_port_up": 1.0,
    "rdma_port_enabled": 1.0,
    "rdma_rate_bytes_per_second": 50e9,
    "rdma_expected_rate_bytes_per_second": 50e9,
    "rdma_link_width_lanes": 4.0,
    "rdma_port_counters": 35.0,
    "rdma_queue_pairs": 64.0,
    'rdma_burst_bytes_per_second{direction="received"}': 45e9,
    'rdma_burst_bytes_per_second{direction="transmitted"}': 44e9,
}


def port(index):
    """Return a port's entity."""
    return Entity("rdma_port", f"mlx5_{index}/1")


def interface(index):
    """Return the interface behind a port."""
    return Entity("interface", f"eth{index}")


def infos(count):
    """Return what is known of that many ports and interfaces."""
    found = []
    for index in range(count):
        place = {
            "device": f"mlx5_{index}",
            "port": "1",
            "pci_bus_id": f"0000:{index + 16:02x}:00.1",
            "numa": "0",
            "gpu": str(index),
        }
        about = {
            "link_layer": "Ethernet",
            "rate": "400 Gb/sec (4X NDR)",
            "board_id": "MT_0000000838",
            "firmware": "28.41.1000",
            "node_guid": "b859:9f03:00d4:0000",
            "netdev": f"eth{index}",
        }
        found.append(EntityInfo(port(index), place | about))
        found.append(EntityInfo(interface(index), place | {"interface": f"eth{index}"}))
    return found


def columns(count):
    """Return the columns that the rings of the sources have."""
    found = []
    for index in range(count):
        counters = [one.signal for one in signals.PORT_COUNTERS]
        counters = [one for one in counters if not index or one.name in MLX5]
        found += [Column(port(index), one) for one in (*counters, signals.PORT_DOWNS)]
        found += [Column(port(index), one) for one in signals.PORT_GAUGES]
        found += [Column(port(index), signals.BURST, way) for way in signals.DIRECTIONS]
        nic = interface(index)
        found += [Column(nic, signals.CARRIER_CHANGES), Column(nic, signals.CARRIER_DOWNS)]
        found += [Column(nic, one.signal, one.label) for one in signals.NIC_COUNTERS]
    return found


def values(column):
    """Return what a column holds in every tick, and how much it rises."""
    if column.signal.kind is Kind.COUNTER:
        return 1000.0, 10.0
    return VALUES[column.name], 0.0

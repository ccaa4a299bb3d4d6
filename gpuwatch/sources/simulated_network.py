"""Stand in for `rdma`, `netdev` and `ethtool`: a port for each GPU, over which the job talks.

All ports send and receive while the GPUs communicate. In `rdma-loss` the port of the sick GPU loses
packets; in `rdma-flap` its link goes down for two seconds of every ten.
"""

from collections.abc import Sequence
from functools import partial

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.network_signals import (
    BURST,
    CARRIER_CHANGES,
    CARRIER_DOWNS,
    DIRECTIONS,
    NIC_COUNTERS,
    PORT_COUNTERS,
    PORT_DOWNS,
    PORT_GAUGES,
)
from gpuwatch.scenario import Gpu, Scenario
from gpuwatch.signals import Column, Entity
from gpuwatch.source import Context, EntityInfo, Findings, Group, Opened

RATE, LANES = 50e9, 4.0
BYTES_PER_SECOND = 45e9  # of communication, each way
PACKET_BYTES = 4096
QUEUE_PAIRS = 64.0
LOST = {  # per second of the fault `rdma-loss`
    "rdma_local_ack_timeout_errors_total": 5,
    "rdma_packet_sequence_errors_total": 400,
    "rdma_out_of_sequence_packets_received_total": 300,
}
FLAP_NS, DOWN_NS = 10 * SECOND_NS, 2 * SECOND_NS
SLOW = tuple(counter.signal for counter in PORT_COUNTERS if counter.tells != "bytes")
FAST = tuple(counter.signal for counter in PORT_COUNTERS if counter.tells == "bytes")


class _Ports(Scenario):
    """The ports of the node, each beside a GPU."""

    def port(self, gpu: Gpu) -> EntityInfo:
        """Return what is known of a GPU's port."""
        device = f"mlx5_{gpu.number}"
        labels = {
            "device": device,
            "port": "1",
            "link_layer": "Ethernet",
            "rate": "400 Gb/sec (4X NDR)",
            "board_id": "simulated",
            "firmware": "28.41.1000",
            "node_guid": f"5130:0000:0000:{gpu.number:04x}",
            "netdev": self.interface(gpu),
            "pci_bus_id": self.address(gpu),
            "numa": str(gpu.number // 4),
            "near": gpu.entity.id,
        }
        return EntityInfo(Entity("rdma_port", f"{device}/1"), labels)

    def nic(self, gpu: Gpu) -> EntityInfo:
        """Return what is known of the interface behind a GPU's port."""
        labels = {
            "interface": self.interface(gpu),
            "device": f"mlx5_{gpu.number}",
            "port": "1",
            "pci_bus_id": self.address(gpu),
            "numa": str(gpu.number // 4),
            "near": gpu.entity.id,
        }
        return EntityInfo(Entity("interface", self.interface(gpu)), labels)

    def interface(self, gpu: Gpu) -> str:
        """Return the name of a GPU's interface."""
        return f"rail{gpu.number}"

    def address(self, gpu: Gpu) -> str:
        """Return the PCI address of a GPU's NIC, behind the same switch."""
        return gpu.entity.id.removesuffix(".0") + ".1"

    def struck_ns(self, gpu: Gpu, name: str, now_ns: int) -> int:
        """Return for how long a port has had the fault of this scenario."""
        if self.name != name or gpu.entity != self.sick:
            return 0
        return max(0, min(now_ns, self.end_ns) - self.start_ns)

    def up(self, gpu: Gpu, now_ns: int) -> bool:
        """Say whether a port's link is up."""
        struck = self.struck_ns(gpu, "rdma-flap", now_ns)
        return not (struck and now_ns < self.end_ns and struck % FLAP_NS < DOWN_NS)

    def downs(self, gpu: Gpu, now_ns: int) -> int:
        """Return how often a port's link went down."""
        struck = self.struck_ns(gpu, "rdma-flap", now_ns)
        return (struck + FLAP_NS - 1) // FLAP_NS


class SimulatedRdma:
    """Eight ports of eight devices, or as many as there are GPUs."""

    name = "rdma"

    def __init__(self) -> None:
        self.findings = Findings()

    def open(self, context: Context) -> Opened:
        """Make up the ports."""
        self._ports = ports = _Ports(context)
        infos = tuple(ports.port(gpu) for gpu in ports.gpus)
        groups = [
            Group(
                f"port{gpu.place}",
                tuple(Column(info.entity, one) for one in (*SLOW, PORT_DOWNS, *PORT_GAUGES)),
                500 * MILLISECOND_NS,
                partial(self._port, gpu),
                phase_ns=500 * MILLISECOND_NS * gpu.place // len(infos),
            )
            for gpu, info in zip(ports.gpus, infos, strict=True)
        ]
        columns = [Column(info.entity, signal) for info in infos for signal in FAST]
        columns += [Column(info.entity, BURST, way) for info in infos for way in DIRECTIONS]
        groups.append(Group("bytes", tuple(columns), 100 * MILLISECOND_NS, self._bytes))
        return Opened(tuple(groups), infos)

    def housekeep(self, now_ns: int) -> None:
        """Nothing needs upkeep."""

    def close(self) -> None:
        """Nothing is held."""

    def _moved(self, gpu: Gpu, now_ns: int) -> int:
        return int(self._ports.worked(gpu, now_ns)[1] * BYTES_PER_SECOND)

    def _bytes(self) -> Sequence[float]:
        now = monotonic_ns()
        moved = [self._moved(gpu, now) for gpu in self._ports.gpus for _ in FAST]
        return [*moved, *[BYTES_PER_SECOND] * len(moved)]

    def _port(self, gpu: Gpu) -> Sequence[float]:
        now = monotonic_ns()
        packets = self._moved(gpu, now) // PACKET_BYTES
        lossy = self._ports.struck_ns(gpu, "rdma-loss", now)
        downs = self._ports.downs(gpu, now)
        counted = {name: lossy * count // SECOND_NS for name, count in LOST.items()}
        counted |= {
            "rdma_port_packets_received_total": packets,
            "rdma_port_packets_transmitted_total": packets,
            "rdma_link_downed_total": downs,
        }
        up = float(self._ports.up(gpu, now))
        counts = [counted.get(signal.name, 0) for signal in SLOW]
        return [*counts, downs, up, 1.0, RATE, RATE, LANES, len(PORT_COUNTERS), QUEUE_PAIRS]


class SimulatedNetdev:
    """The carrier of the interfaces behind the ports."""

    name = "netdev"

    def __init__(self) -> None:
        self.findings = Findings()

    def open(self, context: Context) -> Opened:
        """Make up the interfaces."""
        self._ports = ports = _Ports(context)
        infos = tuple(ports.nic(gpu) for gpu in ports.gpus)
        columns = tuple(
            Column(info.entity, signal)
            for info in infos
            for signal in (CARRIER_CHANGES, CARRIER_DOWNS)
        )
        return Opened((Group("carrier", columns, 10 * MILLISECOND_NS, self._carrier),), infos)

    def housekeep(self, now_ns: int) -> None:
        """Nothing needs upkeep."""

    def close(self) -> None:
        """Nothing is held."""

    def _carrier(self) -> Sequence[float]:
        now = monotonic_ns()
        row: list[float] = []
        for gpu in self._ports.gpus:
            downs = self._ports.downs(gpu, now)
            row += (1 + 2 * downs - (not self._ports.up(gpu, now)), downs)
        return row


class SimulatedEthtool:
    """NICs that drop nothing and pause now and then."""

    name = "ethtool"

    def __init__(self) -> None:
        self.findings = Findings()

    def open(self, context: Context) -> Opened:
        """Make up the interfaces."""
        ports = _Ports(context)
        infos = tuple(ports.nic(gpu) for gpu in ports.gpus)
        groups = [
            Group(
                f"ethtool{place}",
                tuple(Column(info.entity, one.signal, one.label) for one in NIC_COUNTERS),
                5 * SECOND_NS,
                self._statistics,
                phase_ns=SECOND_NS * place // len(infos),
            )
            for place, info in enumerate(infos)
        ]
        return Opened(tuple(groups), infos)

    def housekeep(self, now_ns: int) -> None:
        """Nothing needs upkeep."""

    def close(self) -> None:
        """Nothing is held."""

    def _statistics(self) -> Sequence[float]:
        paused_us = monotonic_ns() // 1_000_000  # a thousandth of the time
        return [
            paused_us if one.signal.unit == "seconds" and "pause" in one.signal.name else 0
            for one in NIC_COUNTERS
        ]

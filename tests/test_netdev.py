"""The carrier of interfaces: real links in a network namespace, and trees that stand for /sys."""

import contextlib
import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from rdma_tree import Tree
from reading import Reading

from gpuwatch.clock import monotonic_ns
from gpuwatch.errors import SourceUnsupported
from gpuwatch.network_signals import NIC_COUNTERS
from gpuwatch.sources import ethtool
from gpuwatch.sources.ethtool import Ethtool, chosen
from gpuwatch.sources.netdev import Netdev

SECOND = 10**9
TESTS = Path(__file__).parent

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and `ip`"
)


@pytest.fixture
def tree(tmp_path):
    """Return an empty tree."""
    return Tree(tmp_path / "sys")


@pytest.fixture(scope="module")
def said():
    """Return what the source saw of links that flap in a namespace of their own."""
    name = f"gpuwatch-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        # `ip netns exec` mounts the /sys of the namespace.
        command = ["ip", "netns", "exec", name, sys.executable, "netns_flaps.py"]
        done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=120)
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["ip", "netns", "del", name], check=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_namespaces
def test_a_thousand_flaps_are_counted_to_the_last(said):
    """However fast a link goes and comes, each time is counted once."""
    assert said["flaps"] == [2000, 1000]


@needs_namespaces
def test_an_overflow_of_link_messages_loses_nothing(said):
    """Messages that did not fit are noticed and not needed."""
    assert said["errors"] == {"link messages dropped": 1}
    assert said["after overflow"] == [6, 3]


@needs_namespaces
def test_flaps_are_told_once_a_second(said):
    """One event has all of them, whatever their number."""
    assert said["lost"] == [["rail0", "1000 times"]]


@needs_namespaces
def test_an_interface_that_is_made_anew_counts_on(said):
    """Gone, it is unknown; a new one under its name adds to its count."""
    assert said["gone"] == [None, None]
    assert said["back"][1] >= 1003
    assert said["told"] == [[["rail0", ""]], [["rail0", ""]]]


@needs_namespaces
def test_the_statistics_of_a_driver_are_read(said):
    """What the kernel answers to ETHTOOL_GSTATS belongs to the names of ETHTOOL_GSTRINGS."""
    assert said["ethtool"] is True
    assert said["counting"] == ["rail0"]  # a loopback has none
    assert said["unplugged"] == {"nic_peers_total": None}


def test_interfaces_behind_rdma_ports_are_watched(tree):
    """Also those of a bond, and those of the config; each knows its port and its GPUs."""
    tree.mlx5(0, layer="Ethernet")
    tree.interface("eth0", "mlx5_0")
    tree.mlx5(1, layer="Ethernet")
    tree.interface("bond0", "mlx5_1")
    (tree.root / "class/net/bond0/bonding").mkdir()
    (tree.root / "class/net/bond0/bonding/slaves").write_text("eth1 eth2\n")
    for name in ("eth1", "eth2", "mgmt0"):
        tree.interface(name)
    with Reading(Netdev(), tree.root, interfaces=["mgmt0", "nothere0"]) as netdev:
        labels = {info.entity.id: info.labels for info in netdev.opened.entities}
        assert labels == {
            "eth0": {"interface": "eth0", "device": "mlx5_0", "port": "1"},
            "eth1": {"interface": "eth1", "device": "mlx5_1", "port": "1"},
            "eth2": {"interface": "eth2", "device": "mlx5_1", "port": "1"},
            "mgmt0": {"interface": "mgmt0"},
        }
        assert netdev.read("eth2") == {
            "nic_carrier_changes_total": 2,
            "nic_carrier_downs_total": 1,
        }


def test_a_host_without_interfaces_to_watch_says_so(tree):
    """Nothing behind RDMA, nothing named: nothing to do, for both sources."""
    tree.interface("eth0")
    for source in (Netdev(), Ethtool()):
        with pytest.raises(SourceUnsupported, match=r"network\.interfaces"):
            Reading(source, tree.root)


def test_an_interface_that_comes_later_is_taken_up(tree):
    """Within ten seconds where no message tells of it."""
    tree.interface("eth0")
    with Reading(Netdev(), tree.root, interfaces=["eth0", "eth1"]) as netdev:
        tree.interface("eth1", carrier_changes=7)
        assert netdev.housekeep(3600 * SECOND)
        assert netdev.read("eth1")["nic_carrier_changes_total"] == 7
        assert netdev.read("eth0")["nic_carrier_changes_total"] == 2


MLX5 = [
    "rx_packets",
    "rx_discards_phy",
    "tx_discards_phy",
    "rx_crc_errors_phy",
    "rx_prio0_pause",
    "rx_prio3_pause_duration",
    "tx_prio3_pause_duration",
    "tx_prio4_pause_duration",
    "rx_global_pause_duration",
    "tx_pause_storm_warning_events",
    "tx_pause_storm_error_events",
    "rx_pcs_symbol_err_phy",
    "rx_corrected_bits_phy",
    "outbound_pci_stalled_rd",
    "outbound_pci_stalled_rd_events",
    "outbound_pci_stalled_wr_events",
    "outbound_pci_buffer_overflow",
    "rx_pci_signal_integrity",
    "module_high_temp",
    "module_unplug",
]
BNXT = [
    "rx_total_frames",
    "pfc_pri3_rx_duration_us",
    "pfc_pri3_tx_duration_us",
    "rx_fcs_err_frames",
]


def test_a_driver_with_more_statistics_than_before_is_looked_at_anew(tree, monkeypatch):
    """The kernel writes as many as there are, so it is asked only when there is room for them."""
    tree.interface("eth0")
    names = ["rx_discards_phy"]

    def kernel(_descriptor, _request, interface):
        (address,) = struct.unpack("16xP16x", interface)
        command, number, mask, _ = struct.unpack("=IIQI", ctypes.string_at(address, 20))
        if command == ethtool.GSSET_INFO:
            answer = struct.pack("=IIQI", command, 0, mask, len(names))
        elif command == ethtool.GSTRINGS:
            texts = b"".join(name.encode().ljust(ethtool.NAME_BYTES, b"\0") for name in names)
            answer = struct.pack("=III", command, number, len(names)) + texts
        else:
            assert number == len(names)
            answer = struct.pack(f"=II{number}Q", command, number, *range(7, 7 + number))
        ctypes.memmove(address, answer, len(answer))

    monkeypatch.setattr(ethtool.fcntl, "ioctl", kernel)
    with Reading(Ethtool(), tree.root, interfaces=["eth0"]) as source:
        before = source.read("eth0")
        assert list(before.values()) == [7]
        names[:0] = [f"rx{queue}_packets" for queue in range(100)]
        assert set(source.read("eth0").values()) == {None}
        assert source.errors() == {"the driver's statistics changed": 1}
        assert source.housekeep(monotonic_ns())
        assert {
            name: count and count - 100 for name, count in source.read("eth0").items()
        } == before


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            MLX5,
            {
                "nic_discards_total received": 1,
                "nic_discards_total transmitted": 2,
                "nic_crc_errors_total ": 3,
                "nic_pause_seconds_total received": 5 + 8,
                "nic_pause_seconds_total transmitted": 6 + 7,
                "nic_pause_storms_total warning": 9,
                "nic_pause_storms_total error": 10,
                "nic_symbol_errors_total ": 11,
                "nic_fec_corrections_total ": 12,
                "nic_pcie_stalled_seconds_total read": 14,
                "nic_pcie_stalled_seconds_total write": 15,
                "nic_pcie_errors_total ": 16 + 17,
                "nic_module_faults_total ": 18 + 19,
            },
        ),
        (
            BNXT,
            {
                "nic_pause_seconds_total received": 1,
                "nic_pause_seconds_total transmitted": 2,
                "nic_crc_errors_total ": 3,
            },
        ),
    ],
    ids=["mlx5", "bnxt"],
)
def test_what_drivers_call_their_statistics(names, expected):
    """Each driver's names come out under ours; what belongs together is added."""
    found = {
        f"{one.signal.name} {one.label}": sum(places)
        for one in NIC_COUNTERS
        if (places := chosen(one.patterns, names))
    }
    assert found == expected

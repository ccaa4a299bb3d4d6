"""The network duty in a real daemon: on trees that stand for /sys, and on the simulated node."""

import contextlib
import json
import sqlite3

import pytest
from rdma_tree import Tree
from running import Running, wait_for

from gpuwatch.sources import SOURCES

ONLY_NETWORK = [
    f"--no-collector.{source.name}"
    for duty, sources in SOURCES.items()
    for source in sources
    if duty != "network"
]
QUICK = """
[network]
budget_ratio = 1.0
[rules.rdma_port_down]
for_seconds = 1.0
hold_seconds = 2.0
[rules.rdma_port_flapping]
hold_seconds = 2.0
"""
PORT = ('device="mlx5_3"', 'port="1"')


@pytest.fixture
def tree(tmp_path):
    """Return an empty tree."""
    return Tree(tmp_path / "sys")


def running(tmp_path, tree, *arguments):
    flags = ("--path.sysfs", str(tree.root), *ONLY_NETWORK, *arguments)
    return Running(tmp_path, *flags, config=QUICK)


def stored(daemon):
    """Return the ports of the inventory as the state file has them."""
    with contextlib.closing(sqlite3.connect(daemon.state / "gpuwatch.sqlite")) as file:
        return file.execute("SELECT port, rate FROM rdma_ports").fetchall()


def restarts(daemon):
    """Return how often the sampler of the network was started again."""
    children = daemon.status()["children"]
    return next(child["restarts"] for child in children if child["duty"] == "network")


def test_a_port_from_the_driver_to_the_page(tree, tmp_path):
    """Bytes, infos, a link that goes down: metrics, events and the alert, by device and port."""
    for number in range(4):
        tree.mlx5(number, layer="Ethernet")
        tree.interface(f"eth{number}", f"mlx5_{number}")
    tree.pci("mlx5_3", "0000:18:00.0", "pci0000:15")
    with running(tmp_path, tree) as daemon:
        sent = "gpuwatch_rdma_port_data_transmitted_bytes_total"
        wait_for(lambda: daemon.value(sent, *PORT) == 4 * 51_285_874)
        tree.show("mlx5_3", port_xmit_data=51_285_874 + 10**9)
        wait_for(lambda: daemon.value(sent, *PORT) == 4 * (51_285_874 + 10**9))
        burst = "gpuwatch_rdma_burst_bytes_per_second"
        assert daemon.value(burst, *PORT, 'direction="transmitted"') > 4e9
        assert daemon.value(burst, *PORT, 'direction="received"') == 0
        wait_for(lambda: daemon.value("gpuwatch_rdma_port_up", *PORT) == 1)
        info = 'pci_bus_id="0000:18:00.0"'
        assert daemon.value("gpuwatch_rdma_port_info", *PORT, 'netdev="eth3"', info) == 1
        assert daemon.value("gpuwatch_nic_info", 'interface="eth3"', *PORT) == 1
        assert daemon.value("gpuwatch_alert_firing", 'alert="rdma_port_down"', *PORT) == 0
        # The link goes: the port sees it, the interface counts it.
        tree.show("mlx5_3", state="1: DOWN", phys_state="3: Disabled", link_downed=2)
        net = tree.root / "class/net/eth3"
        (net / "carrier_down_count").write_text("3\n")
        (net / "carrier_changes").write_text("5\n")
        wait_for(lambda: daemon.events("rdma_port_down_detected"))
        firing = ("gpuwatch_alert_firing", 'alert="rdma_port_down"', *PORT)
        wait_for(lambda: daemon.value(*firing) == 1)
        flapping = ("gpuwatch_alert_firing", 'alert="rdma_port_flapping"', *PORT)
        wait_for(lambda: daemon.value(*flapping) == 1)  # two of the interface's count
        assert daemon.value("gpuwatch_nic_carrier_downs_total", 'interface="eth3"') == 3
        assert [one["detail"] for one in daemon.events("nic_carrier_lost")] == ["2 times"]
        assert daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_0"') == 1
        tree.show("mlx5_3", state="4: ACTIVE")
        wait_for(lambda: daemon.value(*firing) == 0)
        assert restarts(daemon) == 0


def test_a_host_without_rdma_is_no_fault_and_takes_up_a_device_that_comes(tree, tmp_path):
    """Said once, in a line; no series of a failing source; a device plugged in later is read."""
    with running(tmp_path, tree) as daemon:
        wait_for(lambda: len(daemon.events("source_unsupported")) == 2)
        status = daemon.status()
        assert {name: status["sources"][name]["state"] for name in ("rdma", "netdev")} == {
            "rdma": "unsupported",
            "netdev": "unsupported",
        }
        assert daemon.value("gpuwatch_source_up", 'source="rdma"') is None
        assert "no RDMA port on this host" in json.dumps(status["sources"]["rdma"])
        tree.mlx5(0)
        wait_for(lambda: daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_0"') == 1)
        assert daemon.value("gpuwatch_source_up", 'source="rdma"') == 1
        assert daemon.log().count("no RDMA port on this host") == 1
        assert restarts(daemon) == 0


def test_a_device_that_goes_and_another_that_comes(tree, tmp_path):
    """The daemon follows: the lost port is down, the new one has its series, in one process."""
    tree.mlx5(0)
    tree.mlx5(1)
    with running(tmp_path, tree) as daemon:
        wait_for(lambda: daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_1"') == 1)
        tree.unplug("mlx5_1")
        wait_for(lambda: daemon.events("rdma_device_lost"))
        wait_for(lambda: daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_1"') == 0)
        tree.mlx5(2)
        wait_for(lambda: daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_2"') == 1)
        assert daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_0"') == 1
        wait_for(
            lambda: daemon.value("gpuwatch_alert_firing", 'device="mlx5_1"', '"rdma_port_down"')
        )
        assert restarts(daemon) == 0


def test_a_link_that_is_slower_after_a_restart_is_noticed(tree, tmp_path):
    """The inventory remembers what the link had, until somebody accepts what it has."""
    tree.mlx5(0, board="")
    rate = ("gpuwatch_rdma_rate_bytes_per_second", 'device="mlx5_0"')
    with running(tmp_path, tree) as daemon:
        wait_for(lambda: daemon.value(*rate) == 50e9)
        wait_for(lambda: stored(daemon) == [("mlx5_0/1", 50e9)])
    tree.show("mlx5_0", rate="200 Gb/sec (2X NDR)")
    with running(tmp_path, tree) as daemon:
        alert = wait_for(lambda: daemon.alert("rdma_degraded", "mlx5_0/1"))
        assert (alert["state"], alert["value"]) == ("pending", 0.5)


@pytest.mark.parametrize(
    ("scenario", "rule"), [("rdma-loss", "rdma_loss"), ("rdma-flap", "rdma_port_flapping")]
)
def test_scenarios_of_the_network(tmp_path, scenario, rule):
    """The fault strikes one port: detected within seconds, and firing by its own window."""
    config = """
[state]
period_ms = 20
[simulated]
gpus = 3
fault_after_seconds = 2.0
"""
    with Running(tmp_path, "--source", f"simulated:{scenario}", config=config) as daemon:
        sick = ["rdma_port", "mlx5_2/1"]
        detected = {
            "rdma_loss": "rdma_loss_detected",
            "rdma_port_flapping": "rdma_port_down_detected",
        }
        (first, *_) = wait_for(lambda: daemon.events(detected[rule]))
        assert first["entity"] == sick
        (fault,) = wait_for(lambda: daemon.events("scenario_fault"))
        assert 0 <= first["time_ns"] - fault["time_ns"] < 10e9
        alerts = {
            tuple(one["entity"]) for one in daemon.status()["alerts"] if "rdma" in one["rule"]
        }
        assert alerts <= {tuple(sick)}
        labels = ('device="mlx5_2"', 'port="1"', 'gpu="2"')
        assert daemon.value("gpuwatch_rdma_port_info", *labels) == 1
        if rule == "rdma_port_flapping":  # its second flap is 10 s later
            alert = wait_for(lambda: daemon.alert(rule, "mlx5_2/1"))
            assert alert["place"] == "(NIC of GPU 2)"

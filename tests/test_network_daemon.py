"""The network duty in a real daemon: on trees that stand for /sys, and on the simulated node."""

import contextlib
import json
import os
import resource
import signal
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rdma_tree import MLX5_HW, MLX5_PMA, Tree
from running import Running, descendants, wait_for
from uninterrupted import Watch

from gpuwatch.history import FOREVER_NS, History
from gpuwatch.signals import Entity
from gpuwatch.sources import SOURCES

ONLY_NETWORK = [
    f"--no-collector.{name}"
    for duty, names in SOURCES.items()
    for name in names
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


def running(tmp_path, tree, *arguments, config=QUICK):
    flags = ("--path.sysfs", str(tree.root), *ONLY_NETWORK, *arguments)
    return Running(tmp_path, *flags, config=config)


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
        for name, count in (("carrier_down_count", 3), ("carrier_changes", 5)):
            with (net / name).open("r+") as file:  # the kernel never shows an empty file
                file.write(f"{count}\n")
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
    # The burst of the beginning is still known, between two reads.
    bytes_of = History(daemon.state / "history/bytes").read(
        0, FOREVER_NS, entities=[Entity("rdma_port", "mlx5_3/1")], signals=[sent[9:]]
    )
    counts = np.concatenate([piece.values[:, 0] for piece in bytes_of])
    assert np.nanmax(np.diff(counts)) == 4e9


def test_no_total_falls_when_the_sampler_is_started_anew(tree, tmp_path):
    """A counter that was reset begins anew in the hardware, and so in a new sampler: not here."""
    tree.mlx5(0)
    tree.interface("ib0", "mlx5_0")
    names = (
        "rdma_port_data_received_bytes",
        "rdma_out_of_sequence_packets_received",
        "nic_carrier_changes",
    )
    with running(tmp_path, tree) as daemon, Watch(daemon) as watch:

        def totals():
            return [daemon.value(f"gpuwatch_{name}_total") for name in names]

        wait_for(lambda: totals() == [4 * 51_282_193, 4, 2])
        tree.show("mlx5_0", port_rcv_data=100, out_of_sequence=1)
        (tree.root / "class/net/ib0/carrier_changes").write_text("1\n")
        before = [4 * (51_282_193 + 100), 5, 3]
        wait_for(lambda: totals() == before)
        manifest = daemon.runtime / "network.json"
        told = manifest.read_text()
        os.kill(daemon.child("network"), signal.SIGKILL)
        wait_for(lambda: restarts(daemon) == 1 and manifest.read_text() != told)
        reads = ("gpuwatch_source_read_seconds_count", 'source="rdma"')
        enough = daemon.value(*reads) + 100  # some of the old one may not be counted yet
        wait_for(lambda: daemon.value(*reads) > enough, what="reads of the new sampler")
        tree.show("mlx5_0", port_rcv_data=150, out_of_sequence=3)
        wait_for(lambda: totals() == [before[0] + 200, before[1] + 2, before[2]])
    assert watch.fell == []


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


def test_firmware_that_does_not_say_a_rate_holds_up_its_own_port_alone(tree, tmp_path):
    """The rate is asked of the device: who waits for it is known, also at the start."""
    for number in range(2):
        tree.mlx5(number)
        tree.interface(f"ib{number}", f"mlx5_{number}")
    hung = tree.port("mlx5_0") / "rate"
    hung.unlink()
    os.mkfifo(hung)
    with running(
        tmp_path, tree, config=QUICK.replace("[network]", "[network]\ninit_deadline_seconds = 2.0")
    ) as daemon:
        wait_for(lambda: daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_1"') == 1)
        assert daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_0"') is None
        wait_for(
            lambda: (
                daemon.value("gpuwatch_nic_carrier_changes_total", 'interface="ib0"') is not None
            )
        )
        assert "mlx5_0/1 holds a driver call" in daemon.log()
        children = [pid for pid, _ in descendants(daemon.process.pid)]
    for pid in children:  # one is in the call, and nobody ends it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["line\nbreak", 'a "quote" \\', "not UTF-8: \udcff"])
def test_a_device_may_have_any_name(tree, tmp_path, name):
    """Users choose names: nobody else is held up by a strange one, nor page and state spoilt."""
    tree.device(name, MLX5_PMA, MLX5_HW)
    tree.mlx5(0)
    with running(tmp_path, tree) as daemon:

        def shown():
            page = text_string_to_metric_families(daemon.get("/metrics")[1].decode())
            ports = [one for one in page if one.name == "gpuwatch_rdma_port_up"]
            return {sample.labels["device"] for family in ports for sample in family.samples}

        valid = name.replace("\udcff", r"\udcff")
        wait_for(lambda: shown() == {"mlx5_0", valid})
        wait_for(lambda: {port for port, _ in stored(daemon)} == {"mlx5_0/1", f"{valid}/1"})
        assert daemon.status()["state"]["fault"] == ""
        assert restarts(daemon) == 0


def test_many_ports_are_read_where_few_open_files_are_usual(tree, tmp_path):
    """The host's usual limit is that of who starts gpuwatch; what may be had beyond it is taken."""
    ports = 6
    for number in range(ports):
        tree.mlx5(number)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (30 * ports, hard))
    try:
        daemon = running(tmp_path, tree)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with daemon:
        wait_for(lambda: daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_5"') == 1)
        sampler = Path(f"/proc/{daemon.child('network')}/fd")
        assert len(list(sampler.iterdir())) > 30 * ports
        assert daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_0"') == 1


def test_what_is_no_count_is_unknown_and_no_count_falls(tree, tmp_path):
    """All ones, numbers below 0 and texts, as of a device that is going: the rest is read on."""
    tree.mlx5(0, layer="Ethernet")
    tree.mlx5(1)
    tree.interface("eth0", "mlx5_0")
    counts = ("port_data_received_bytes", "local_ack_timeout_errors", "rx_write_requests")
    names = [f"gpuwatch_rdma_{count}_total" for count in counts]
    with running(tmp_path, tree) as daemon:
        wait_for(lambda: daemon.value(names[0], 'device="mlx5_0"'))
        files = ("port_rcv_data", "local_ack_timeout_err", "rx_write_requests")

        def errors():
            return daemon.value("gpuwatch_source_errors_total", 'error="no number"') or 0.0

        for text in (str(2**64 - 1), "-5", "N/A", "", "9" * 40):
            before = [daemon.value(name, 'device="mlx5_0"') for name in names]
            tree.show("mlx5_0", **dict.fromkeys(files, text))
            (tree.root / "class/net/eth0/flags").write_text(text)
            enough = errors() + 6
            wait_for(lambda enough=enough: errors() > enough)
            assert [daemon.value(name, 'device="mlx5_0"') for name in names] == before
        tree.show("mlx5_0", port_rcv_data=51_282_200, local_ack_timeout_err=6, rx_write_requests=9)
        wait_for(lambda: daemon.value(names[1], 'device="mlx5_0"') == 6)
        assert daemon.value(names[0], 'device="mlx5_0"') == 4 * 51_282_200
        assert daemon.value("gpuwatch_rdma_port_up", 'device="mlx5_1"') == 1
        assert restarts(daemon) == 0


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
fault_after_seconds = 4.0
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

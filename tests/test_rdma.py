"""RDMA ports from trees that stand for /sys: what each driver counts, and what goes wrong."""

import errno
import itertools
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rdma_tree import (
    BNXT_HW,
    EDR,
    EFA_DEVICE,
    EFA_HW,
    IRDMA_HW,
    MLX5_HW,
    MLX5_PMA,
    NDR,
    RXE_HW,
    Tree,
)
from reading import Reading
from running import wait_for

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.errors import SourceUnsupported
from gpuwatch.network_signals import PORT_COUNTERS
from gpuwatch.sources.rdma import Rdma

CASES = Path(__file__).parent / "data/cases"
HOUR = 3600 * SECOND_NS


@pytest.fixture
def tree(tmp_path):
    """Return an empty tree."""
    return Tree(tmp_path / "sys")


def reading(tree, **network):
    return Reading(Rdma(), tree.root, **network)


def case(tmp_path, name):
    """Return a copy of a case's tree, to be changed."""
    shutil.copytree(CASES / name, tmp_path / "sys")
    return Tree(tmp_path / "sys")


def test_the_table_names_each_counter_once():
    """No driver's name means two things, and no two sections publish one name."""
    names = [counter.signal.name for counter in PORT_COUNTERS]
    assert len(set(names)) == len(names)
    pma = [counter.pma for counter in PORT_COUNTERS if counter.pma]
    assert len(set(pma)) == len(pma)
    hw = [one for counter in PORT_COUNTERS for several in counter.names for one in several]
    assert len(set(hw)) == len(hw)


def test_eight_mlx5_ports_to_the_last_number(tree):
    """Every counter of the table that mlx5 has, its state and its rate, for each of eight."""
    for number in range(8):
        tree.mlx5(number)
        tree.show(f"mlx5_{number}", port_xmit_data=1000 + number)
    with reading(tree) as rdma:
        assert len(rdma.opened.entities) == 8
        for number in range(8):
            found = rdma.read(f"mlx5_{number}/1")
            assert found["port_data_transmitted_bytes_total"] == 4 * (1000 + number)
        rdma.housekeep(monotonic_ns())
        found = rdma.read("mlx5_7/1")
        assert found == {
            "port_data_received_bytes_total": 4 * 51_282_193,
            "port_data_transmitted_bytes_total": 4 * 1007,
            'burst_bytes_per_second{direction="received"}': 0.0,
            'burst_bytes_per_second{direction="transmitted"}': 0.0,
            "port_packets_received_total": 240_037,
            "port_packets_transmitted_total": 242_071,
            "port_transmit_wait_total": 17,
            "symbol_error_total": 0,
            "link_error_recovery_total": 0,
            "link_downed_total": 1,
            "local_link_integrity_errors_total": 0,
            "excessive_buffer_overrun_errors_total": 0,
            "port_errors_received_total": 0,
            "port_receive_remote_physical_errors_total": 0,
            "port_discards_transmitted_total": 0,
            "rx_write_requests_total": 3_810_000_000,
            "local_ack_timeout_errors_total": 5,
            "packet_sequence_errors_total": 2,
            "implied_nak_seq_errors_total": 0,
            "roce_adp_retransmits_total": 0,
            "req_transport_retries_exceeded_total": 0,
            "req_rnr_retries_exceeded_total": 0,
            "out_of_sequence_packets_received_total": 4,
            "duplicate_requests_packets_total": 3,
            "rnr_nak_retry_packets_total": 0,
            "out_of_buffer_drops_total": 0,
            "rp_cnp_packets_handled_total": 7,
            "rp_cnp_ignored_packets_received_total": 0,
            "np_cnp_packets_sent_total": 9,
            "np_ecn_marked_roce_packets_received_total": 8,
            "rx_icrc_encapsulated_errors_total": 0,
            "req_cqes_errors_total": 0,
            "resp_cqes_errors_total": 0,
            "resp_local_length_errors_total": 0,
            "req_remote_access_errors_total": 0,
            "req_remote_invalid_request_errors_total": 0,
            "resp_remote_access_errors_total": 0,
            "port_downs_total": 0,
            "port_up": 1.0,
            "port_enabled": 1.0,
            "rate_bytes_per_second": 50e9,
            "expected_rate_bytes_per_second": 50e9,
            "link_width_lanes": 4.0,
            "port_counters": 35.0,
            "queue_pairs": None,
        }
        assert rdma.errors() == {}
        assert rdma.events == []


@pytest.mark.parametrize(
    ("hw", "expected"),
    [
        (
            BNXT_HW,
            {
                "port_data_received_bytes_total": 640_000,
                "port_data_transmitted_bytes_total": 1_280_000,
                "port_packets_received_total": 1000,
                "port_packets_transmitted_total": 2000,
                "port_errors_received_total": 1,
                "port_discards_received_total": 2,
                "port_discards_transmitted_total": 3,
                "local_ack_timeout_errors_total": 4,
                "packet_sequence_errors_total": 5,
                "req_transport_retries_exceeded_total": 6,
                "rnr_nak_retry_packets_total": 7,
                "implied_nak_seq_errors_total": 8,
                "duplicate_requests_packets_total": 9,
                "out_of_sequence_packets_received_total": 10,
                "out_of_buffer_drops_total": 11,
                "np_cnp_packets_sent_total": 12,
                "rp_cnp_packets_handled_total": 13,
                "np_ecn_marked_roce_packets_received_total": 14,
            },
        ),
        (
            IRDMA_HW,
            {
                "port_discards_received_total": 7,  # of both protocols
                "rp_cnp_packets_handled_total": 5,
                "rp_cnp_ignored_packets_received_total": 6,
                "np_cnp_packets_sent_total": 7,
                "np_ecn_marked_roce_packets_received_total": 8,
                "retransmitted_segments_total": 9,
                "rx_write_requests_total": 10,
            },
        ),
        (
            EFA_HW,
            {
                "port_data_transmitted_bytes_total": 900,
                "port_packets_transmitted_total": 90,
                "port_data_received_bytes_total": 800,
                "port_packets_received_total": 80,
                "port_discards_received_total": 7,
                "retransmitted_packets_total": 6,
                "local_ack_timeout_errors_total": 5,
                "impaired_connections_total": 4,
                "unresponsive_remotes_total": 3,
            },
        ),
        (
            RXE_HW,
            {
                "port_packets_transmitted_total": 100,
                "port_packets_received_total": 101,
                "duplicate_requests_packets_total": 1,
                "out_of_sequence_packets_received_total": 2,
                "rnr_nak_retry_packets_total": 3,
                "rnr_nak_sent_packets_total": 4,
                "packet_sequence_errors_total": 5,
                "req_transport_retries_exceeded_total": 7,
                "req_rnr_retries_exceeded_total": 8,
                "completer_retry_errors_total": 9,
                "send_errors_total": 10,
                "link_downed_total": 11,
            },
        ),
    ],
    ids=["bnxt_re", "irdma", "efa", "rxe"],
)
def test_what_other_drivers_count(tree, hw, expected):
    """Each driver's own names come out under the same ones; its gauges and unknown names do not."""
    tree.device("dev0", None, hw)
    with reading(tree) as rdma:
        found = rdma.read("dev0/1")
        counters = {name: value for name, value in found.items() if name.endswith("_total")}
        assert counters == expected | {"port_downs_total": 0}
        assert found["port_counters"] == len(expected)


def test_counters_that_efa_keeps_with_the_device(tree):
    """A device of one port may have counters that are not in the port's folder."""
    tree.device("efa_0", None, {"rx_bytes": 1})
    folder = tree.root / "class/infiniband/efa_0/hw_counters"
    folder.mkdir()
    for name, value in (EFA_DEVICE | {"rx_drops": 9, "rx_bytes": 777}).items():
        (folder / name).write_text(f"{value}\n")
    with reading(tree) as rdma:
        found = rdma.read("efa_0/1")
        assert found["port_discards_received_total"] == 9
        assert found["port_data_received_bytes_total"] == 1


def test_a_file_that_answers_with_an_error_is_left_out_alone(tree, monkeypatch):
    """EINVAL of one counter takes none of the others along, and is not asked for again."""
    tree.mlx5(0)
    asked = failing(monkeypatch, {"port_xmit_wait": errno.EINVAL})
    with reading(tree) as rdma:
        for _ in range(3):
            found = rdma.read("mlx5_0/1")
        assert found["port_transmit_wait_total"] is None
        assert found["link_downed_total"] == 1
        assert found["port_counters"] == 34
        assert len(asked) == 1
        assert rdma.told("rdma_quarantined") == []


def failing(monkeypatch, faults, paths=("counters", "hw_counters")):
    """Have reads of files by these names fail with an errno; return the names asked for."""
    asked = []
    real = os.pread

    def pread(descriptor, size, offset):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        code = faults.get(path.name) if path.parent.name in paths else None
        if code:
            asked.append(path.name)
            raise OSError(code, os.strerror(code))
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    return asked


def test_a_port_that_begins_to_fail_is_left_alone_and_tried_again(tree, monkeypatch):
    """Errors are not asked for twice a second: the port rests, longer each time, and comes back."""
    tree.mlx5(0)
    tree.mlx5(1)
    with reading(tree) as rdma:
        rdma.read("mlx5_0/1")
        rdma.housekeep(SECOND_NS)
        before = rdma.read("mlx5_0/1")
        faults = dict.fromkeys(("symbol_error", "link_downed", "packet_seq_err"), errno.EREMOTEIO)
        asked = failing(monkeypatch, faults)
        found = rdma.read("mlx5_0/1")
        assert {value for name, value in found.items() if "downs" not in name} == {None}
        seen = len(asked)
        assert seen == 3
        for _ in range(20):
            rdma.read("mlx5_0/1")
        assert len(asked) == seen
        assert [name for name, _ in rdma.told("rdma_quarantined")] == ["mlx5_0/1"]
        now = monotonic_ns()
        rdma.housekeep(now + 9 * SECOND_NS)
        assert len(asked) == seen
        rdma.housekeep(now + 11 * SECOND_NS)  # tried again: it fails again, for longer
        again = len(asked)
        assert again > seen
        assert "20 s" in rdma.told("rdma_quarantined")[-1][1]
        faults.clear()
        rdma.housekeep(now + HOUR)
        after = rdma.read("mlx5_0/1")
        assert {name: one for name, one in after.items() if "burst" not in name} == {
            name: one for name, one in before.items() if "burst" not in name
        }
        assert rdma.errors()["EREMOTEIO"] >= 6


def test_na_is_no_number(tree):
    """A text instead of a number is unknown; when the number is there again, so is the series."""
    tree.mlx5(0)
    with reading(tree) as rdma:
        tree.show("mlx5_0", symbol_error="N/A (no PMA)", port_rcv_data="N/A (no PMA)")
        found = rdma.read("mlx5_0/1")
        assert found["symbol_error_total"] is None
        assert found["port_data_received_bytes_total"] is None
        assert found["port_data_transmitted_bytes_total"] == 4 * 51_285_874
        assert rdma.errors() == {"no number": 2}
        tree.show("mlx5_0", symbol_error=3)
        assert rdma.read("mlx5_0/1")["symbol_error_total"] == 3


def test_a_device_that_vanishes_is_one_event_and_counts_on_when_it_returns(tree):
    """Its port is down meanwhile; a new driver's count from 0 is no jump, and one down."""
    tree.mlx5(0)
    tree.mlx5(1)
    with reading(tree) as rdma:
        assert rdma.read("mlx5_1/1")["port_downs_total"] == 0
        tree.unplug("mlx5_1")
        for second in range(3):
            rdma.housekeep(second * SECOND_NS)
        found = rdma.read("mlx5_1/1")
        assert found["port_up"] == 0.0
        assert found["link_downed_total"] is None
        assert rdma.read("mlx5_0/1")["link_downed_total"] == 1
        assert rdma.told("rdma_device_lost") == [("mlx5_1", "")]
        tree.mlx5(1)
        tree.show("mlx5_1", port_rcv_data=5, link_downed=2)
        rdma.housekeep(4 * SECOND_NS)
        found = rdma.read("mlx5_1/1")
        assert found["port_up"] == 1.0
        assert found["port_downs_total"] == 1
        assert found["link_downed_total"] == 1
        assert found["port_data_received_bytes_total"] == 4 * 51_282_193
        tree.show("mlx5_1", port_rcv_data=6)
        assert rdma.read("mlx5_1/1")["port_data_received_bytes_total"] == 4 * 51_282_194
        assert rdma.told("rdma_device_returned") == [("mlx5_1", "")]


def test_a_device_that_is_plugged_in_later_is_taken_up(tree):
    """Its ports are new entities with groups of their own; the others' groups stay."""
    tree.mlx5(0)
    with reading(tree) as rdma:
        before = rdma.opened
        tree.mlx5(1)
        assert rdma.housekeep(SECOND_NS)
        assert len(rdma.opened.entities) == 2
        assert rdma.read("mlx5_1/1")["link_downed_total"] == 1
        assert rdma.opened.groups[0].columns == before.groups[0].columns
        assert not rdma.housekeep(2 * SECOND_NS)


def test_only_known_names_are_ever_read(tree):
    """A write-only or hanging file beside the counters is never opened."""
    tree.mlx5(0)
    for folder in ("", "counters", "hw_counters"):
        os.mkfifo(tree.port("mlx5_0") / folder / "linkcontrol_reset")  # to open it would hang
    with reading(tree) as rdma:
        assert rdma.read("mlx5_0/1")["link_downed_total"] == 1


def test_saturated_reset_and_wrapped_counters(tree):
    """Exact rises through all three; what stands still or began again is told."""
    tree.mlx5(0)
    tree.show("mlx5_0", link_downed=254, rx_write_requests=2**32 - 10, symbol_error=100)
    with reading(tree) as rdma:
        rdma.read("mlx5_0/1")
        tree.show("mlx5_0", link_downed=255, rx_write_requests=5, symbol_error=3)
        for _ in range(2):
            found = rdma.read("mlx5_0/1")
        assert found["link_downed_total"] == 255
        assert found["rx_write_requests_total"] == 2**32 + 5
        assert found["symbol_error_total"] == 103
        assert rdma.told("rdma_counters_reset") == [("mlx5_0/1", "rdma_symbol_error_total")]
        (told,) = rdma.told("rdma_counter_saturated")
        assert told[1].startswith("rdma_link_downed_total")
        tree.show("mlx5_0", link_downed=0)
        assert rdma.read("mlx5_0/1")["link_downed_total"] == 255
        tree.show("mlx5_0", link_downed=2)
        assert rdma.read("mlx5_0/1")["link_downed_total"] == 257


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_a_port_that_flaps_and_sticks_never_counts_backwards(tmp_path_factory, shown):
    """Whatever an 8-bit counter shows, the published one does not fall."""
    tree = Tree(tmp_path_factory.mktemp("flap") / "sys")
    tree.mlx5(0)
    with reading(tree) as rdma:
        last = rdma.read("mlx5_0/1")["link_downed_total"]
        for value in shown:
            tree.show("mlx5_0", link_downed=min(value, 255))
            total = rdma.read("mlx5_0/1")["link_downed_total"]
            assert total >= last
            last = total


def test_which_ports_are_read_is_the_configs(tree):
    """Regular expressions of devices and ports choose, and leave alone."""
    for number in (0, 1, 8):
        tree.mlx5(number)
    tree.device("roce_mgmt", None, MLX5_HW)
    for network, expected in (
        ({}, ["mlx5_0/1", "mlx5_1/1", "mlx5_8/1", "roce_mgmt/1"]),
        ({"include": ["mlx5_[0-3]"]}, ["mlx5_0/1", "mlx5_1/1"]),
        ({"exclude": ["mlx5_8/1", ".*mgmt"]}, ["mlx5_0/1", "mlx5_1/1"]),
        ({"include": ["mlx5.*"], "exclude": ["mlx5_0"]}, ["mlx5_1/1", "mlx5_8/1"]),
    ):
        with reading(tree, **network) as rdma:
            assert [info.entity.id for info in rdma.opened.entities] == expected


def test_virtual_functions_are_left_to_their_guests(tree):
    """They are many, and nobody on the host uses them; unless the config says so."""
    tree.mlx5(0)
    tree.mlx5(1)
    tree.pci("mlx5_1", "0000:15:00.2", "pci0000:15")
    (tree.root / "devices/pci0000:15/0000:15:00.2/physfn").symlink_to(tree.root)
    for wanted, expected in ((False, ["mlx5_0/1"]), (True, ["mlx5_0/1", "mlx5_1/1"])):
        with reading(tree, virtual_functions=wanted) as rdma:
            assert [info.entity.id for info in rdma.opened.entities] == expected


def test_a_host_without_rdma_says_so(tree, tmp_path):
    """No folder, an empty one, and one whose devices are all left out: nothing to read."""
    with pytest.raises(SourceUnsupported, match="no RDMA port"):
        reading(tree)
    (tree.root / "class/infiniband").mkdir(parents=True)
    with pytest.raises(SourceUnsupported, match="no RDMA port"):
        reading(tree)
    tree.mlx5(0)
    with pytest.raises(SourceUnsupported, match="no RDMA port"):
        reading(tree, exclude=["mlx5_0"])


def test_a_port_knows_its_interface_and_its_gpus(tree):
    """Labels to join with: address, NUMA node, interface, and the GPUs behind the same switch."""
    tree.mlx5(3, layer="Ethernet")
    tree.pci("mlx5_3", "0000:18:00.0", "pci0000:15", "0000:15:01.0", "0000:16:00.0", numa=1)
    tree.pci("gpu", "0000:19:00.0", "pci0000:15", "0000:15:01.0", "0000:16:01.0", numa=1)
    tree.pci("gpu", "0000:1a:00.0", "pci0000:15", "0000:15:01.0", "0000:16:02.0", numa=1)
    tree.pci("gpu", "0000:1b:00.0", "pci0000:15", "0000:15:02.0", numa=1)
    tree.pci("gpu", "0000:9a:00.0", "pci0000:97", "0000:97:01.0", numa=1)
    tree.interface("eth3", "mlx5_3")
    with reading(tree) as rdma:
        assert rdma.labels("mlx5_3/1") == {
            "device": "mlx5_3",
            "port": "1",
            "link_layer": "Ethernet",
            "rate": NDR,
            "board_id": "MT_0000000838",
            "firmware": "28.41.1000",
            "node_guid": "b859:9f03:00d4:0000",
            "netdev": "eth3",
            "pci_bus_id": "0000:18:00.0",
            "numa": "1",
            "near": "0000:19:00.0,0000:1a:00.0",
        }


def test_whether_somebody_switched_the_port_off(tree):
    """On InfiniBand the port says it; on Ethernet only the interface knows a pulled cable."""
    tree.mlx5(0)
    tree.mlx5(1, layer="Ethernet")
    tree.interface("eth1", "mlx5_1")
    with reading(tree) as rdma:
        for device in ("mlx5_0", "mlx5_1"):
            tree.show(device, state="1: DOWN", phys_state="3: Disabled")
        assert rdma.read("mlx5_0/1")["port_enabled"] == 0.0
        assert rdma.read("mlx5_1/1")["port_enabled"] == 1.0  # IFF_UP
        (tree.root / "class/net/eth1/flags").write_text("0x1002\n")
        assert rdma.read("mlx5_1/1")["port_enabled"] == 0.0
        assert rdma.read("mlx5_1/1")["port_downs_total"] == 0  # it was never seen ACTIVE


@pytest.mark.parametrize(
    ("rates", "network", "expected"),
    [
        ([NDR] * 3 + [EDR], {}, [50e9] * 4),
        ([NDR, EDR], {}, [50e9, 12.5e9]),  # too few to say which is right
        ([NDR, NDR, EDR, EDR], {}, [50e9, 50e9, 12.5e9, 12.5e9]),
        ([NDR, EDR], {"expected_gbps": 400.0}, [50e9, 50e9]),
    ],
)
def test_the_rate_a_port_should_have(tree, rates, network, expected):
    """The config's, that of most ports of the board, or the highest the port had."""
    for number, rate in enumerate(rates):
        tree.mlx5(number, rate=rate)
    with reading(tree, **network) as rdma:
        for number in range(len(rates)):
            rdma.read(f"mlx5_{number}/1")
        rdma.housekeep(SECOND_NS)
        found = [rdma.read(f"mlx5_{number}/1") for number in range(len(rates))]
        assert [one["expected_rate_bytes_per_second"] for one in found] == expected


def test_a_link_that_comes_back_slower_shows_it(tree):
    """The rate of now, beside the one it had before."""
    tree.mlx5(0, board="")
    with reading(tree) as rdma:
        rdma.read("mlx5_0/1")
        rdma.housekeep(SECOND_NS)
        tree.show("mlx5_0", rate="200 Gb/sec (2X NDR)")
        rdma.read("mlx5_0/1")
        assert rdma.housekeep(2 * SECOND_NS)  # the label says it too
        found = rdma.read("mlx5_0/1")
        assert found["rate_bytes_per_second"] == 25e9
        assert found["link_width_lanes"] == 2.0
        assert found["expected_rate_bytes_per_second"] == 50e9
        assert rdma.labels("mlx5_0/1")["rate"] == "200 Gb/sec (2X NDR)"


def test_a_burst_at_a_port_is_seen(tree):
    """Bytes that come between two reads are a rate, of their direction, and 0 of the other."""
    tree.mlx5(0)
    with reading(tree) as rdma:
        rdma.read("mlx5_0/1")
        start, words = time.monotonic(), 51_285_874
        for _ in range(5):
            time.sleep(0.02)
            words += 20_000_000
            tree.show("mlx5_0", port_xmit_data=words)
            found = rdma.read("mlx5_0/1")
        mean = 5 * 20_000_000 * 4 / (time.monotonic() - start)
        peak = found['burst_bytes_per_second{direction="transmitted"}']
        assert mean * 0.95 <= peak <= 20_000_000 * 4 / 0.019
        assert found['burst_bytes_per_second{direction="received"}'] == 0.0


def test_bytes_are_read_faster_where_that_is_cheap(tree):
    """From ten to a hundred times a second once the cost is known; told, with its reason."""
    for number in range(2):
        tree.mlx5(number)
    with reading(tree) as rdma:
        assert rdma.group("bytes").period_ns == 100_000_000

        def faster():
            for _ in range(100):
                rdma.group("bytes").read()
            rdma.housekeep(next(hours))
            return rdma.group("bytes").period_ns == 10_000_000

        hours = itertools.count(HOUR, HOUR)
        wait_for(faster)  # not while the machine that tests has no time for it
        assert "every 0.01 s" in rdma.told("rdma_pace")[-1][1]


def test_bytes_are_never_read_faster_than_the_config_says(tree):
    """`period_ms` is the limit."""
    tree.mlx5(0)
    with reading(tree, period_ms=50.0) as rdma:

        def fastest():
            for _ in range(100):
                rdma.group("bytes").read()
            rdma.housekeep(next(hours))
            assert rdma.group("bytes").period_ns >= 50_000_000
            return rdma.group("bytes").period_ns == 50_000_000

        hours = itertools.count(HOUR, HOUR)
        wait_for(fastest)


def test_a_port_left_alone_for_a_hang_is_not_touched(tree):
    """It is listed, nothing is known of it, and the others are read."""
    tree.mlx5(0)
    tree.mlx5(1)
    shutil.rmtree(tree.port("mlx5_0") / "counters")
    os.mkfifo(tree.port("mlx5_0") / "counters")  # whoever opens this hangs
    with reading(tree, excluded=("mlx5_0/1",)) as rdma:
        assert {rdma.read("mlx5_0/1")[name] for name in ("port_up", "rate_bytes_per_second")} == {
            None
        }
        assert rdma.read("mlx5_1/1")["port_up"] == 1.0


# The cases of tests/data/cases.


def test_case_ib_01_no_pma(tmp_path):
    """One device whose files all say N/A: they are absent, it is listed, the other is complete."""
    tree = case(tmp_path, "IB-01/sys")
    with reading(tree) as rdma:
        for _ in range(3):
            found = rdma.read("mlx4_0/1")
        assert found["port_up"] == 1.0
        assert found["port_counters"] == 0.0
        assert rdma.read("mlx5_0/1")["port_data_transmitted_bytes_total"] == 4 * 51_285_874
        assert rdma.read("mlx5_0/1")["local_ack_timeout_errors_total"] == 0
        counters = {name: one for name, one in found.items() if name.endswith("_total")}
        assert set(counters.values()) == {None, 0}
        assert counters["port_downs_total"] == 0
        assert rdma.events == []
        assert rdma.errors() == {}


def test_case_ib_03_missing_folders(tmp_path):
    """Irdma without `counters` and board id beside mlx5: what is there is read of both."""
    with reading(case(tmp_path, "IB-03/sys")) as rdma:
        found = rdma.read("irdma0/1")
        assert found["np_ecn_marked_roce_packets_received_total"] == 0
        assert found["retransmitted_segments_total"] == 0
        assert found["port_counters"] == 2.0
        assert "board_id" not in rdma.labels("irdma0/1")
        assert rdma.read("mlx5_0/1")["port_counters"] > 20
        assert rdma.errors() == {}


def test_case_ib_05_words_of_four_bytes(tmp_path):
    """Four bytes a word whatever the lanes; a rate above the link's is told, not published."""
    tree = case(tmp_path, "IB-05/t0/sys")
    expected = json.loads((CASES / "IB-05/expect.json").read_text())["bytes_per_s"]
    now_files = CASES / "IB-05/t1/sys/class/infiniband"
    with reading(tree) as rdma:
        first = {device: rdma.read(f"{device}/1") for device in expected}
        rdma.housekeep(SECOND_NS)
        start = time.monotonic()
        time.sleep(1)
        for device in expected:
            path = now_files / device / "ports/1/counters/port_xmit_data"
            tree.show(device, port_xmit_data=path.read_text().strip())
        found = {device: rdma.read(f"{device}/1") for device in expected}
        seconds = time.monotonic() - start
        rdma.housekeep(2 * SECOND_NS)
    name, burst = "port_data_transmitted_bytes_total", "burst_bytes_per_second"
    burst += '{direction="transmitted"}'
    for device in ("mlx5_0", "mlx5_1"):
        assert found[device][name] - first[device][name] == expected[device]
        rate = expected[device] / seconds
        assert found[device][burst] == pytest.approx(rate, rel=0.05)
    assert found["mlx5_2"][burst] in (0.0, None)
    ((entity, detail),) = rdma.told("rdma_unit_fault")
    assert entity == "mlx5_2/1"
    assert "100 Gb/sec (4X EDR)" in detail
    assert rdma.errors() == {"rate above the link's": 1}


def test_case_ib_07_a_card_that_is_listed_but_gone(tmp_path):
    """One event for the card that is listed and cannot be read; the others go on."""
    tree = case(tmp_path, "IB-07/sys")
    os.mkfifo(tree.port("mlx5_7") / "linkcontrol_reset")  # mode 0200 says nothing to root
    with reading(tree) as rdma:
        assert rdma.read("mlx5_7/1")["port_up"] == 1.0
        for second in range(3):
            rdma.housekeep(second * SECOND_NS)
        assert rdma.told("rdma_device_lost") == [("mlx5_8", "")]
        assert rdma.errors() == {}


def test_nothing_is_written_and_no_mode_is_changed(tree):
    """Reading leaves the tree as it was."""
    tree.device("mlx5_0", MLX5_PMA, MLX5_HW)
    files = sorted(path for path in tree.root.rglob("*") if path.is_file())
    before = [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    with reading(tree) as rdma:
        for second in range(3):
            rdma.read("mlx5_0/1")
            rdma.housekeep(second * SECOND_NS)
    assert before == [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files]

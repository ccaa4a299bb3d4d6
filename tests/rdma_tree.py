"""Trees that stand for /sys: RDMA devices as their drivers show them, changed while they are read.

Names and values are those that the drivers' own files have (drivers/infiniband/hw of the kernel).
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

MLX5_PMA = {
    "port_rcv_data": 51_282_193,
    "port_xmit_data": 51_285_874,
    "port_rcv_packets": 240_037,
    "port_xmit_packets": 242_071,
    "unicast_rcv_packets": 240_037,
    "unicast_xmit_packets": 242_071,
    "multicast_rcv_packets": 0,
    "multicast_xmit_packets": 0,
    "port_xmit_wait": 17,
    "symbol_error": 0,
    "link_error_recovery": 0,
    "link_downed": 1,
    "port_rcv_errors": 0,
    "port_rcv_remote_physical_errors": 0,
    "port_rcv_switch_relay_errors": 1,
    "port_xmit_discards": 0,
    "port_xmit_constraint_errors": 0,
    "port_rcv_constraint_errors": 0,
    "local_link_integrity_errors": 0,
    "excessive_buffer_overrun_errors": 0,
    "VL15_dropped": 0,
}
MLX5_HW = {
    "rx_write_requests": 3_810_000_000,
    "rx_read_requests": 12,
    "rx_atomic_requests": 0,
    "rx_dct_connect": 0,
    "out_of_buffer": 0,
    "out_of_sequence": 4,
    "duplicate_request": 3,
    "rnr_nak_retry_err": 0,
    "packet_seq_err": 2,
    "implied_nak_seq_err": 0,
    "local_ack_timeout_err": 5,
    "rp_cnp_ignored": 0,
    "rp_cnp_handled": 7,
    "np_ecn_marked_roce_packets": 8,
    "np_cnp_sent": 9,
    "resp_local_length_error": 0,
    "resp_cqe_error": 0,
    "req_cqe_error": 0,
    "req_remote_invalid_request": 0,
    "req_remote_access_errors": 0,
    "resp_remote_access_errors": 0,
    "resp_cqe_flush_error": 21,
    "req_cqe_flush_error": 22,
    "req_transport_retries_exceeded": 0,
    "req_rnr_retries_exceeded": 0,
    "roce_adp_retrans": 0,
    "roce_adp_retrans_to": 0,
    "roce_slow_restart": 0,
    "roce_slow_restart_cnps": 0,
    "roce_slow_restart_trans": 0,
    "rx_icrc_encapsulated": 0,
    "lifespan": 10,
}
BNXT_HW = {
    "active_qps": 42,
    "watermark_qps": 99,
    "rx_pkts": 1000,
    "rx_bytes": 640_000,
    "tx_pkts": 2000,
    "tx_bytes": 1_280_000,
    "rx_roce_errors": 1,
    "rx_roce_discards": 2,
    "tx_roce_discards": 3,
    "to_retransmits": 4,
    "seq_err_naks_rcvd": 5,
    "max_retry_exceeded": 6,
    "rnr_naks_rcvd": 7,
    "missing_resp": 8,
    "dup_req": 9,
    "oos_drop_count": 10,
    "rx_out_of_buffer": 11,
    "tx_cnp_pkts": 12,
    "rx_cnp_pkts": 13,
    "rx_ecn_marked_pkts": 14,
    "pacing_alerts": 15,
    "lifespan": 10,
}
IRDMA_HW = {
    "ip4InDiscards": 3,
    "ip6InDiscards": 4,
    "ip4InOctets": 1,
    "cnpHandled": 5,
    "cnpIgnored": 6,
    "cnpSent": 7,
    "RxECNMrkd": 8,
    "RetransSegs": 9,
    "InRdmaWrites": 10,
    "lifespan": 10,
}
EFA_HW = {
    "tx_bytes": 900,
    "tx_pkts": 90,
    "rx_bytes": 800,
    "rx_pkts": 80,
    "rx_drops": 7,
    "retrans_bytes": 600,
    "retrans_pkts": 6,
    "retrans_timeout_events": 5,
    "impaired_remote_conn_events": 4,
    "unresponsive_remote_events": 3,
    "lifespan": 10,
}
EFA_DEVICE = {"no_completion_cmds": 1, "keep_alive_rcvd": 2, "lifespan": 10}
RXE_HW = {
    "sent_pkts": 100,
    "rcvd_pkts": 101,
    "duplicate_request": 1,
    "out_of_seq_request": 2,
    "rcvd_rnr_err": 3,
    "send_rnr_err": 4,
    "rcvd_seq_err": 5,
    "ack_deferred": 6,
    "retry_exceeded_err": 7,
    "retry_rnr_exceeded_err": 8,
    "completer_retry_err": 9,
    "send_err": 10,
    "link_downed": 11,
    "rdma_sends": 12,
    "rdma_recvs": 13,
}
NDR, EDR = "400 Gb/sec (4X NDR)", "100 Gb/sec (4X EDR)"


class Tree:
    """A tree at `root`; what a port counts and shows is set as the driver would."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def device(
        self,
        name: str,
        pma: Mapping[str, object] | None = None,
        hw: Mapping[str, object] | None = None,
        *,
        rate: str = NDR,
        layer: str = "InfiniBand",
        board: str = "MT_0000000838",
        guid: str = "b859:9f03:00d4:0000",
    ) -> None:
        """Add a device of one port."""
        device = self.root / "class/infiniband" / name
        port = device / "ports/1"
        port.mkdir(parents=True)
        for file, text in (("board_id", board), ("fw_ver", "28.41.1000"), ("node_guid", guid)):
            if text:
                (device / file).write_text(f"{text}\n")
        for file, text in (
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("rate", rate),
            ("link_layer", layer),
        ):
            (port / file).write_text(f"{text}\n")
        for folder, counters in (("counters", pma), ("hw_counters", hw)):
            if counters is not None:
                (port / folder).mkdir()
                for file, value in counters.items():
                    (port / folder / file).write_text(f"{value}\n")

    def mlx5(self, number: int, **about: str) -> None:
        """Add one of the ports that a GPU node has eight of."""
        self.device(f"mlx5_{number}", MLX5_PMA, MLX5_HW, **about)

    def port(self, device: str) -> Path:
        """Return the folder of a device's port."""
        return self.root / "class/infiniband" / device / "ports/1"

    def show(self, device: str, **files: object) -> None:
        """Have files of the port show something else, as a change of the hardware does."""
        port = self.port(device)
        for file, value in files.items():
            found = [port / folder / file for folder in ("", "counters", "hw_counters")]
            path = next(path for path in found if path.exists())
            path.write_text(f"{value}\n")

    def unplug(self, device: str) -> None:
        """Take a device away."""
        shutil.rmtree(self.root / "class/infiniband" / device)

    def pci(self, device: str, address: str, *above: str, numa: int = 0) -> None:
        """Put a device of any name behind a host bridge and switches; `device` may be a GPU."""
        folder = self.root / "devices" / Path(*above) / address
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        bus = self.root / "bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        (bus / address).symlink_to(folder)
        if device == "gpu":
            (folder / "vendor").write_text("0x10de\n")
            (folder / "class").write_text("0x030200\n")
        else:
            (self.root / "class/infiniband" / device / "device").symlink_to(folder)

    def interface(self, name: str, device: str = "", **files: object) -> None:
        """Add an interface, behind a port if `device` is given."""
        folder = self.root / "class/net" / name
        folder.mkdir(parents=True)
        defaults = {"carrier_changes": 2, "carrier_up_count": 1, "carrier_down_count": 1}
        for file, value in (defaults | {"flags": "0x1003", "dev_port": 0} | files).items():
            (folder / file).write_text(f"{value}\n")
        if device:
            ndevs = self.port(device) / "gid_attrs/ndevs"
            ndevs.mkdir(parents=True, exist_ok=True)
            (ndevs / "0").write_text(f"{name}\n")

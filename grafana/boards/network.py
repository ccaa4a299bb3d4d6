"""RDMA ports and the NICs behind them: a row of the node's dashboard."""

from collections.abc import Callable

from board import Row
from fields import Json, dashed
from panels import Column, Query, table, timeline, timeseries
from promql import over, rate

PORT = "{{device}}/{{port}}"
STATES = {
    1: ("active", "semi-dark-green"),
    0: ("DOWN", "dark-red"),
    2: ("switched off", "#808080"),
}
LOST = {
    "local_ack_timeout_errors": "ACK timeouts",
    "packet_sequence_errors": "sequence errors",
    "implied_nak_seq_errors": "implied NAKs",
    "roce_adp_retransmits": "adaptive retransmits",
    "completer_retry_errors": "retries",
    "retransmitted_segments": "segments sent again",
    "retransmitted_packets": "packets sent again",
    "req_transport_retries_exceeded": "given up",
    "req_rnr_retries_exceeded": "given up, not ready",
    "unresponsive_remotes": "unresponsive remotes",
    "out_of_sequence_packets_received": "out of order",
    "duplicate_requests_packets": "duplicates",
}
CONGESTED = {
    "np_cnp_packets_sent": "notifications sent",
    "rp_cnp_packets_handled": "notifications heeded",
    "rp_cnp_ignored_packets_received": "notifications ignored",
    "np_ecn_marked_roce_packets_received": "marked packets",
    "port_transmit_wait": "ticks without credit",
    "rnr_nak_retry_packets": "receiver not ready",
    "rnr_nak_sent_packets": "we were not ready",
    "out_of_buffer_drops": "no buffer",
    "impaired_connections": "impaired connections",
}
LINK = {
    "rdma_link_downed": "went down",
    "rdma_port_downs": "seen down",
    "rdma_link_error_recovery": "recovered",
    "rdma_symbol_error": "symbol errors",
    "rdma_local_link_integrity_errors": "integrity",
    "nic_carrier_downs": "carrier lost",
    "nic_symbol_errors": "symbols not mended",
    "nic_crc_errors": "CRC errors",
    "nic_pcie_errors": "PCIe errors",
    "nic_module_faults": "module faults",
}
ERRORS = {
    "port_errors_received": "received broken",
    "port_receive_remote_physical_errors": "broken elsewhere",
    "port_discards_received": "received and dropped",
    "port_discards_transmitted": "not sent",
    "excessive_buffer_overrun_errors": "buffer overruns",
    "rx_icrc_encapsulated_errors": "checksums",
    "req_cqes_errors": "completions, requester",
    "resp_cqes_errors": "completions, responder",
    "resp_local_length_errors": "lengths",
    "req_remote_access_errors": "access, told",
    "resp_remote_access_errors": "access, found",
    "req_remote_invalid_request_errors": "invalid requests",
    "send_errors": "not sent by rxe",
}


def row(selector: Callable[..., str]) -> Row:
    """Return the row of the node that `selector` chooses."""

    def moving(title: str, text: str, counters: dict[str, str], prefix: str, none: str) -> Json:
        return timeseries(
            title,
            f"{text} Only what moves is drawn.",
            "none",
            [
                Query(
                    f"{rate(selector(f'{prefix}{name}_total'))} > 0",
                    f"{PORT} {what}" if "nic_" not in name else "{{interface}} " + what,
                )
                for name, what in counters.items()
            ],
            no_value=none,
        )

    def nic(name: str, *more: str) -> str:
        return rate(selector(f"nic_{name}_total", *more))

    def moved(direction: str) -> str:
        return rate(selector(f"rdma_port_data_{direction}_bytes_total"))

    up, enabled = selector("rdma_port_up"), selector("rdma_port_enabled")
    burst = over("max", selector("rdma_burst_bytes_per_second"))
    labels = {"Link": "link_layer", "Rate": "rate", "NIC": "netdev", "GPU": "gpu"}
    labels |= {"PCI address": "pci_bus_id", "NUMA node": "numa", "Board": "board_id"}
    labels |= {"Firmware": "firmware", "GUID": "node_guid"}
    by = ", ".join(["device", "port", *labels.values()])
    known = f"max by ({by}) ({selector('rdma_port_info')})"

    def known_with(name: str) -> str:
        """Return a value of each port with all that is known of it, so that it is one row."""
        return f"{known} * on (device, port) group_left () max by (device, port) ({selector(name)})"

    return Row(
        "RDMA ports",
        [
            timeline(
                "Ports",
                "Whether each port is ACTIVE. One that somebody switched off is grey.",
                Query(f"max by (device, port) ({up} + 2 * (1 - {enabled}) or {up})", PORT),
                STATES,
                height=5,
                no_value="No RDMA port",
            ),
            timeseries(
                "Rate of links",
                "Rate of each link, and what it should have. A link that trained at less slows "
                "the whole job down.",
                "Bps",
                [
                    Query(selector("rdma_rate_bytes_per_second"), PORT),
                    Query(f"max({selector('rdma_expected_rate_bytes_per_second')})", "expected"),
                ],
                overrides=[dashed("expected")],
                no_value="No RDMA port",
            ),
            timeseries(
                "Traffic",
                "Bytes a second, sent and received. Rails of one job carry the same: one line "
                "under the others is what holds them up.",
                "Bps",
                [
                    Query(moved("transmitted"), f"{PORT} sent"),
                    Query(moved("received"), f"{PORT} received"),
                ],
                no_value="No counter of bytes",
            ),
            timeseries(
                "Bursts",
                "Highest rate between two reads, 10 to 100 ms apart, in the trailing minute. At "
                "the link's rate the network is what the job waits for, whatever the mean says.",
                "Bps",
                [Query(burst, f"{PORT} {{{{direction}}}}")],
                no_value="No counter of bytes",
            ),
            moving(
                "Loss",
                "Timeouts, packets sent again, requests given up, a second. Out of order and "
                "duplicates come from adaptive routing too.",
                LOST,
                "rdma_",
                "Nothing is lost",
            ),
            timeseries(
                "Paused",
                "Share of time in which pause frames stopped transmission: received, ours; "
                "transmitted, that of the fabric, because we receive slowly. Priorities add up.",
                "percentunit",
                [
                    Query(nic("pause_seconds"), "{{interface}} {{direction}}"),
                    Query(f"{nic('pause_storms')} > 0", "{{interface}} storms, {{severity}}"),
                    Query(f"{nic('discards')} > 0", "{{interface}} dropped, {{direction}}"),
                    Query(f"{nic('pcie_stalled_seconds')} > 0", "{{interface}} PCIe {{direction}}"),
                ],
                no_value="No NIC counts pauses",
            ),
            moving(
                "Congestion",
                "Notifications, marks and waits, a second.",
                CONGESTED,
                "rdma_",
                "No congestion",
            ),
            moving(
                "Link errors",
                "Links that go down or make errors, a second; what each cable, module and bus has.",
                LINK,
                "",
                "No link error",
            ),
            moving(
                "Errors of packets and requests",
                "Packets that came broken or were dropped, requests that ended in an error.",
                ERRORS,
                "rdma_",
                "No error",
            ),
            table(
                "What each port is",
                "Device, place and firmware of each port, the NIC and the GPUs beside it, and "
                "how many of its counters can be read: with none, no loss is seen.",
                [
                    Column("Device", "device", width=110),
                    Column("Port", "port", width=60),
                    *(Column(title, label) for title, label in labels.items()),
                    Column("Counters", expr=known_with("rdma_port_counters")),
                    Column("Queue pairs", expr=known_with("rdma_queue_pairs")),
                    Column("Lanes", expr=known_with("rdma_link_width_lanes")),
                    Column("Known", expr=known, hidden=True),
                ],
                sort=[("Device", False)],
                no_value="No RDMA port",
            ),
        ],
    )

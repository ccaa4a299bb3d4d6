"""What is measured of RDMA ports and of the interfaces behind them.

The counters of a port are those of the table in `data/rdma_counters.toml`, which says what each
driver calls them. What every port has beside them is declared here.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

from gpuwatch.signals import Kind, Signal, Total

DATA = Path(__file__).with_name("data")
TABLE, NIC_TABLE = DATA / "rdma_counters.toml", DATA / "nic_counters.toml"
DIRECTIONS = ("received", "transmitted")


class PortCounter(NamedTuple):
    """A counter of the table: its signal, what it tells, and where drivers have it.

    `names` are those of hw_counters, in order of preference; each is a tuple of names to be added.
    """

    signal: Signal
    tells: str
    pma: str
    pma_bits: int
    factor: int
    names: tuple[tuple[str, ...], ...]
    bits: int


def _port_counters() -> tuple[PortCounter, ...]:
    with TABLE.open("rb") as file:
        table = tomllib.load(file)
    return tuple(
        PortCounter(
            Signal(
                f"rdma_{suffix}",
                row["help"],
                Kind.COUNTER,
                "bytes" if row["class"] == "bytes" else "",
                # Of the narrow counters these alone come round in days rather than centuries.
                total=Total.INCREASE if row["class"] == "requests" else Total.CARRIED,
            ),
            row["class"],
            row.get("pma", ""),
            row.get("pma_bits", 64),
            row.get("factor", 1),
            tuple(tuple(name.split("+")) for name in row.get("hw", ())),
            row.get("hw_bits", 64),
        )
        for suffix, row in table.items()
    )


PORT_COUNTERS = _port_counters()

PORT_UP = Signal(
    "rdma_port_up", "1 if the port is ACTIVE, 0 if not.", Kind.GAUGE, "", bounds=(0.0, 1.0)
)
PORT_ENABLED = Signal(
    "rdma_port_enabled",
    "0 if somebody switched the port off.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 1.0),
)
PORT_DOWNS = Signal(
    "rdma_port_downs_total",
    "Times the port was seen to leave ACTIVE, since the daemon's start.",
    Kind.COUNTER,
    "",
    total=Total.INCREASE,
)
RATE = Signal(
    "rdma_rate_bytes_per_second",
    "Rate of the port's link, in each direction.",
    Kind.GAUGE,
    "bytes_per_second",
    bounds=(1.0, 1e13),
)
EXPECTED_RATE = Signal(
    "rdma_expected_rate_bytes_per_second",
    "Rate the link should have: the config's, else that of most ports of the same board, else the"
    " highest that this one had.",
    Kind.GAUGE,
    "bytes_per_second",
    bounds=(1.0, 1e13),
)
WIDTH = Signal(
    "rdma_link_width_lanes", "Lanes of the port's link.", Kind.GAUGE, "lanes", bounds=(1.0, 16.0)
)
READABLE = Signal(
    "rdma_port_counters",
    "Counters of the port that can be read: at 0 no loss can be seen.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 1000.0),
)
QUEUE_PAIRS = Signal(
    "rdma_queue_pairs",
    "Queue pairs of the port's device, of all processes.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 1e9),
)
BURST = Signal(
    "rdma_burst_bytes_per_second",
    "Highest rate between two reads of the port's bytes in the trailing 60 s.",
    Kind.GAUGE,
    "bytes_per_second",
    label="direction",
    bounds=(0.0, 1e13),
)

PORT_GAUGES = (PORT_UP, PORT_ENABLED, RATE, EXPECTED_RATE, WIDTH, READABLE, QUEUE_PAIRS)

CARRIER_CHANGES = Signal(
    "nic_carrier_changes_total",
    "Times the interface's carrier came or went, since its driver was loaded.",
    Kind.COUNTER,
    "",
    total=Total.CARRIED,
)
CARRIER_DOWNS = Signal(
    "nic_carrier_downs_total",
    "Times the interface's carrier went, since its driver was loaded.",
    Kind.COUNTER,
    "",
    total=Total.CARRIED,
)


class NicCounter(NamedTuple):
    """A counter of `data/nic_counters.toml`: its signal, and what drivers call it.

    `patterns` are regular expressions in order of preference; the numbers of all names that match
    the first one that matches any are added.
    """

    signal: Signal
    label: str
    patterns: tuple[str, ...]


def _nic_counters() -> tuple[NicCounter, ...]:
    with NIC_TABLE.open("rb") as file:
        table = tomllib.load(file)
    counters = []
    for name, row in table.items():
        signal = Signal(
            name,
            row.pop("help"),
            Kind.COUNTER,
            row.pop("unit", ""),
            label=row.pop("label", None),
            scale=row.pop("factor", 1.0),
        )
        for label, patterns in row.items():
            value = "" if signal.label is None else label
            counters.append(NicCounter(signal, value, tuple(patterns)))
    return tuple(counters)


NIC_COUNTERS = _nic_counters()

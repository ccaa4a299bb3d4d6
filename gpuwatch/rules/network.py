"""Rules about RDMA ports: down, flapping, slow, losing packets, paused.

The end of a job looks like a fault: its peers go one after another, and who is left times out. So
what is counted within 30 s of a fall in the number of queue pairs is left out. Packets out of
order and duplicate requests are what adaptive routing does, flush errors are how every job ends,
and a receiver that is not ready is slow, not lossy: no rule judges them.
"""

import statistics
from typing import NamedTuple

from gpuwatch.clock import SECOND_NS
from gpuwatch.network_signals import PORT_COUNTERS
from gpuwatch.rises import Rises
from gpuwatch.rule import Rule, View

ACK_TIMEOUTS = "rdma_local_ack_timeout_errors_total"
LOST = (
    *(counter.signal.name for counter in PORT_COUNTERS if counter.tells == "loss"),
    'nic_discards_total{direction="received"}',
    'nic_discards_total{direction="transmitted"}',
)
FATAL = tuple(counter.signal.name for counter in PORT_COUNTERS if counter.tells == "fatal")
PACKETS = tuple(counter.signal.name for counter in PORT_COUNTERS if counter.tells == "packets")
BYTES = tuple(counter.signal.name for counter in PORT_COUNTERS if counter.tells == "bytes")
DOWNS = ("rdma_link_downed_total", "nic_carrier_downs_total", "rdma_port_downs_total")
TX_PAUSE = 'nic_pause_seconds_total{direction="transmitted"}'

BOOT_NS = 180 * SECOND_NS  # drivers, switches and links take so long to come up
JOB_END_SECONDS = 30.0
ACK_SECONDS, LOSS_SECONDS = 120, 300
BUSY_PACKETS = 1e5  # per second; a share of fewer packets is chance
PER = 1e5  # packets, of which one may be lost
FLAP_SECONDS, DAY_SECONDS, HOUR_SECONDS = 600, 86_400, 3600
DAY_DOWNS, FLAP_DOWNS = 4, 2
SIBLINGS = 3  # others that carry traffic; fewer say nothing about the one
USED = 0.02  # of the others' traffic; a rail with less is not used by the job
LOADED = 0.1  # of the link's rate


def is_up(view: View) -> float | None:
    """Return 1 or 0; None of a port that was not ACTIVE yet, or of a machine that is booting."""
    if view.peak("rdma_port_up") != 1 or view.tick.end_ns < BOOT_NS:
        return None
    return 1.0 if view.highest("rdma_port_enabled") == 0 else view.highest("rdma_port_up")


def downs(view: View, seconds: int) -> float | None:
    """Return how often the port went down, by the count that saw most of it."""
    counts = [rises.over(seconds * SECOND_NS) for name in DOWNS if (rises := view.rises(name))]
    return max(counts, default=None)


def flaps(view: View) -> float | None:
    """Return the downs of a day; two in ten minutes are as bad as four in a day."""
    day, now = downs(view, DAY_SECONDS), downs(view, FLAP_SECONDS)
    if day is None or now is None:
        return None
    return max(day, now * DAY_DOWNS / FLAP_DOWNS)


def rate_share(view: View) -> float | None:
    """Return the rate of a link that is up as a share of what it should be.

    That is what its source expects, or more if the inventory of this node has more.
    """
    names = ("rdma_expected_rate_bytes_per_second", "rdma_accepted_rate")
    expected = [value for name in names if (value := view.highest(name))]
    rate = view.highest("rdma_rate_bytes_per_second")
    if view.highest("rdma_port_up") == 0:
        return 1.0
    return None if rate is None or not expected else rate / max(expected)


def settled(view: View, ending: bool, *names: str) -> Rises | None:
    """Return the increases of counters without those from the end of a job."""
    rises = view.rises(*names, delay_seconds=JOB_END_SECONDS)
    if rises and ending:
        rises.drop_open()
    return rises


def job_ends(view: View) -> bool:
    """Say whether queue pairs went within the last 30 s."""
    calm_ns = view.lasting("calm", not view.fell("rdma_queue_pairs"))
    return calm_ns < JOB_END_SECONDS * SECOND_NS


def loss(view: View) -> float | None:
    """Return ACK timeouts a second or packets lost in 100,000, whichever is more."""
    ending = job_ends(view)
    timeouts, lost = settled(view, ending, ACK_TIMEOUTS), settled(view, ending, *LOST)
    packets = view.rises(*PACKETS, delay_seconds=JOB_END_SECONDS)
    if lost is None:
        return None
    value = timeouts.over(ACK_SECONDS * SECOND_NS) / ACK_SECONDS if timeouts else 0.0
    sent = packets.over(LOSS_SECONDS * SECOND_NS) if packets else 0.0
    if sent >= BUSY_PACKETS * LOSS_SECONDS:
        value = max(value, lost.over(LOSS_SECONDS * SECOND_NS) / sent * PER)
    return value


def seen_loss(view: View) -> bool:
    """Say whether anything was lost in the tick."""
    return any(window.increase > 0 for name in LOST if (window := view.window(name)))


def given_up(view: View) -> float | None:
    """Return how many requests were given up while the job lived."""
    rises = settled(view, job_ends(view), *FATAL)
    return rises.over(LOSS_SECONDS * SECOND_NS) if rises else None


def paused(view: View) -> float | None:
    """Return the share of time in which this port held up the fabric."""
    seconds = view.rise(TX_PAUSE)
    return None if seconds is None else seconds / view.window_seconds


class Traffic(NamedTuple):
    """What ports are compared by: bytes a second in both directions, and the link's rate."""

    bytes_per_second: float
    rate: float


def traffic(view: View) -> Traffic | None:
    """Return the port's traffic, None while it is not known."""
    moved = view.rise(*BYTES)
    rate = view.highest("rdma_rate_bytes_per_second")
    return None if moved is None or not rate else Traffic(moved / view.window_seconds, rate)


def symmetry(view: View) -> float | None:
    """Return the port's traffic as a share of the others' median, 1 where they say nothing."""
    own: Traffic | None = view.measured
    if own is None:
        return None
    others = [
        other.measured.bytes_per_second
        for other in view.siblings
        if other is not view and other.measured and other.measured.rate == own.rate
    ]
    median = statistics.median(others) if len(others) >= SIBLINGS else 0.0
    share = own.bytes_per_second / median if median else 1.0
    return share if median >= LOADED * own.rate and share >= USED else 1.0


RULES = (
    Rule(
        name="rdma_port_down",
        severity="critical",
        per="rdma_port",
        help="An RDMA port that was ACTIVE has not been for 10 seconds.",
        next_step="Check cable, transceiver and switch port, and `dmesg` for the reason.",
        judge=is_up,
        limit=0.0,
        at_most=True,
        for_seconds=10,
        detect=lambda view: is_up(view) == 0,
        record=True,
    ),
    Rule(
        name="rdma_port_flapping",
        severity="warning",
        per="rdma_port",
        help="An RDMA port went down twice in 10 minutes or four times in a day;"
        " of the value, those of the last 10 minutes count twice.",
        next_step="Clean or swap cable and transceiver, and look at the switch port's errors.",
        judge=flaps,
        limit=DAY_DOWNS,
        window_seconds=DAY_SECONDS,
        hold_seconds=DAY_SECONDS,
        record=True,
    ),
    Rule(
        name="rdma_port_flapping_severe",
        severity="critical",
        per="rdma_port",
        help="An RDMA port went down five times in an hour.",
        next_step="Take the node out of the pool, swap cable and transceiver.",
        judge=lambda view: downs(view, HOUR_SECONDS),
        limit=5,
        window_seconds=HOUR_SECONDS,
        record=True,
    ),
    Rule(
        name="rdma_degraded",
        severity="warning",
        per="rdma_port",
        help="An RDMA link is up at less than the rate it should have; the value is its share.",
        next_step="Reseat cable and transceiver, and compare the switch port's setting.",
        judge=rate_share,
        limit=0.99,
        at_most=True,
        for_seconds=60,
    ),
    Rule(
        name="rdma_loss",
        severity="warning",
        per="rdma_port",
        help="An RDMA port has an ACK timeout a second for 2 minutes,"
        " or loses one packet in 100,000 for 5 minutes.",
        next_step="Compare the discards of NIC and switch port, and check flow control and cables.",
        judge=loss,
        limit=1.0,
        window_seconds=LOSS_SECONDS,
        detect=seen_loss,
        record=True,
    ),
    Rule(
        name="rdma_retries_exceeded",
        severity="critical",
        per="rdma_port",
        help="RDMA requests were given up after the last retry while the job lived.",
        next_step="Look for the peer that does not answer: a link that is down, a node that hangs.",
        judge=given_up,
        limit=1.0,
        window_seconds=LOSS_SECONDS,
        record=True,
    ),
    Rule(
        name="rdma_congested",
        severity="warning",
        per="rdma_port",
        help="An RDMA port held up the fabric by pause frames in 10 % of the last 5 minutes.",
        next_step="Look for what receives slowly: PCIe stalls, a slow GPU, the NIC's buffers.",
        judge=paused,
        limit=0.1,
        window_seconds=300,
    ),
    Rule(
        name="rdma_pause_storm",
        severity="critical",
        per="rdma_port",
        help="An RDMA port paused the fabric for so long that the NIC stopped it.",
        next_step="Take the node out of the pool, restart what receives, then the NIC.",
        judge=lambda view: view.rise('nic_pause_storms_total{severity="error"}'),
        limit=1.0,
        window_seconds=300,
    ),
    Rule(
        name="rdma_pause_storm_warning",
        severity="warning",
        per="rdma_port",
        help="An RDMA port pauses the fabric without end.",
        next_step="Look for a process that has stopped receiving, and for PCIe stalls.",
        judge=lambda view: view.rise('nic_pause_storms_total{severity="warning"}'),
        limit=1.0,
        window_seconds=300,
    ),
    Rule(
        name="rdma_asymmetry",
        severity="warning",
        per="rdma_port",
        help="An RDMA port carries less than 60 % of the other ports' median for 5 minutes.",
        next_step="Compare its rate, errors and pauses with the others', and its GPU's clock.",
        judge=symmetry,
        measure=traffic,
        limit=0.6,
        at_most=True,
        window_seconds=60,
        for_seconds=300,
    ),
)

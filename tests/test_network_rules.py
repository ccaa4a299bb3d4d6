"""The rules about RDMA ports: what they fire on, and the noise they must not make."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from ticks import Rise, window

from gpuwatch.alerts import AlertEngine
from gpuwatch.network_signals import NIC_COUNTERS, PORT_COUNTERS, PORT_DOWNS, PORT_GAUGES
from gpuwatch.rules import RULES
from gpuwatch.rules import network as rules
from gpuwatch.signals import Entity, column_name
from gpuwatch.window import Tick

SECOND = 1_000_000_000
AFTER_BOOT = 1000 * SECOND
PORT = Entity("rdma_port", "mlx5_0/1")
NIC = Entity("interface", "eth0")
ACK, SEQUENCE = rules.ACK_TIMEOUTS, "rdma_packet_sequence_errors_total"
SENT, RECEIVED = rules.BYTES[1], rules.BYTES[0]
PACKETS = rules.PACKETS[1]
FATAL = "rdma_req_transport_retries_exceeded_total"
DOWNED, CARRIER, SEEN = rules.DOWNS
NIC_COLUMNS = {column_name(one.signal, one.label) for one in NIC_COUNTERS} | {CARRIER}
HEALTHY = {
    "rdma_port_up": 1.0,
    "rdma_port_enabled": 1.0,
    "rdma_rate_bytes_per_second": 50e9,
    "rdma_expected_rate_bytes_per_second": 50e9,
    "rdma_queue_pairs": 64.0,
}
RULED = {*rules.LOST, *rules.FATAL, *rules.PACKETS, *rules.BYTES, *rules.DOWNS} | NIC_COLUMNS
QUIET = dict.fromkeys(
    [counter.signal.name for counter in PORT_COUNTERS] + [PORT_DOWNS.name, *sorted(NIC_COLUMNS)], 0
)


class Judge:
    """An engine fed in ticks of `step` seconds: counters `rise` by so much a second."""

    def __init__(self, ports=(PORT,), start_ns=AFTER_BOOT, step=1):
        self.step = step
        self.engine = AlertEngine(rules.RULES, {}, None, "")
        self.now_ns = start_ns
        self.ports = ports
        self.events = []

    def feed(self, seconds, rise=None, gauges=None, each=None):
        """Feed seconds; `each` has a port's own rises. A gauge of None is unknown."""
        for _ in range(seconds // self.step):
            end_ns = self.now_ns + self.step * SECOND
            tick = Tick(self.now_ns, end_ns, links={PORT: (NIC,)})
            for port in self.ports:
                counters = QUIET | (rise or {}) | (each or {}).get(port, {})
                windows = tick.windows.setdefault(port, {})
                for name, value in (HEALTHY | (gauges or {})).items():
                    windows[name] = window(tick.start_ns, tick.end_ns, value)
                for name, value in counters.items():
                    if name in RULED:
                        owner = NIC if name in NIC_COLUMNS else port
                        made = window(tick.start_ns, tick.end_ns, Rise(float(value) * self.step))
                        tick.windows.setdefault(owner, {})[name] = made
            self.events += [event.name for event in self.engine.judge(tick)]
            self.now_ns = end_ns
        return self

    def absent(self, seconds):
        """Let time pass without the ports."""
        self.now_ns += seconds * SECOND
        self.engine.judge(Tick(self.now_ns - SECOND, self.now_ns))
        return self

    @property
    def firing(self):
        """Return the rules that fire for the first port."""
        alerts = self.engine.alerts()
        return {one.rule for one in alerts if one.state == "firing" and one.entity == PORT}

    def value(self, rule):
        """Return what is shown of a rule for the first port."""
        return next(
            one.value for one in self.engine.alerts() if one.rule == rule and one.entity == PORT
        )


DOWN = {"rdma_port_up": 0.0}
OFF = {"rdma_port_up": 0.0, "rdma_port_enabled": 0.0}


def test_a_port_that_was_active_and_is_not():
    """Ten seconds; detected at once; over when it is back."""
    judge = Judge().feed(5).feed(10, gauges=DOWN)
    assert judge.firing == set()
    assert judge.events[:1] == ["rdma_port_down_detected"]
    assert judge.feed(1, gauges=DOWN).firing == {"rdma_port_down"}
    assert judge.feed(119).firing == {"rdma_port_down"}
    assert judge.feed(1).firing == set()


@pytest.mark.parametrize(
    "story",
    [
        [(600, DOWN)],  # never up
        [(5, None), (600, OFF)],  # somebody switched it off
        [(5, None), (9, DOWN), (5, None), (9, DOWN)],
        [(5, None), (600, {"rdma_port_up": None})],  # not known: the sampler is away
    ],
)
def test_what_is_no_port_down(story):
    """Never up, switched off, back within ten seconds, or not known."""
    judge = Judge()
    for seconds, gauges in story:
        judge.feed(seconds, gauges=gauges)
    assert "rdma_port_down" not in judge.firing


def test_a_machine_that_boots_is_given_three_minutes():
    """Links come up late; one that is still down then is down."""
    judge = Judge(start_ns=20 * SECOND).feed(30).feed(129, gauges=DOWN)
    assert judge.firing == set()
    assert judge.events == []
    assert judge.feed(12, gauges=DOWN).firing == {"rdma_port_down"}


def test_where_the_port_does_not_know_whether_it_was_switched_off():
    """Down is down."""
    gauges = DOWN | {"rdma_port_enabled": None}
    assert Judge().feed(5).feed(11, gauges=gauges).firing == {"rdma_port_down"}


@pytest.mark.parametrize("counter", [DOWNED, CARRIER, SEEN])
@pytest.mark.parametrize(
    ("downs", "apart", "expected"),
    [
        (1, 1, set()),
        (2, 500, {"rdma_port_flapping"}),
        (2, 601, set()),
        (3, 3600, set()),
        (4, 3600, {"rdma_port_flapping"}),
        (5, 600, {"rdma_port_flapping", "rdma_port_flapping_severe"}),
        (5, 1200, {"rdma_port_flapping"}),
    ],
)
def test_flapping_by_any_of_the_counts(counter, downs, apart, expected):
    """Two in ten minutes, four in a day, five in an hour; the counts of one fault are not added."""
    judge = Judge().feed(1)
    for number in range(downs):
        judge.feed(1, {counter: 1})
        judge.absent(apart - 1 if number < downs - 1 else 0)
    assert judge.firing & {"rdma_port_flapping", "rdma_port_flapping_severe"} == expected


def test_one_fault_that_all_three_counts_see_is_one():
    """The port, the interface and we saw it go down, within a second of each other."""
    judge = Judge().feed(1, {CARRIER: 1}).feed(1, {DOWNED: 1}).feed(1, {SEEN: 1})
    assert judge.firing == set()
    assert judge.value("rdma_port_flapping") == 2  # once, within the last 10 minutes


def test_flapping_stays_for_a_day():
    """A link that flapped is not well because it is quiet now."""
    judge = Judge().feed(1, {DOWNED: 2})
    judge.absent(86_000).feed(2)
    assert judge.firing == {"rdma_port_flapping"}
    judge.absent(700).feed(2)
    assert judge.firing == set()


POLLS = Path(__file__).parent / "data/cases/IB-09/polls.tsv"


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("mlx5_0", {"rdma_port_flapping"}),  # all polls say ACTIVE, the count says 3, 4, 6
        ("mlx5_1", {"rdma_port_down"}),  # down for five minutes: that, and no flapping
        ("mlx5_2", set()),  # never up
    ],
)
def test_case_ib_09_flaps_between_polls(device, expected):
    """A port that goes down and comes back between two polls is known by its count."""
    rows = [line.split("\t") for line in POLLS.read_text().splitlines()[1:]]
    polls = [(int(at), state, int(downs)) for at, name, state, downs in rows if name == device]
    judge = Judge()
    before = polls[0][2]
    for (at, state, downs), (until, _, _) in pairwise([*polls, (polls[-1][0] + 10, "", 0)]):
        gauges = {"rdma_port_up": float(state == "4: ACTIVE")}
        judge.feed(1, {DOWNED: downs - before}, gauges).feed(until - at - 1, None, gauges)
        before = downs
    fired = {name.removesuffix("_firing") for name in judge.events if name.endswith("_firing")}
    assert fired == expected


def test_a_slower_link():
    """A minute under the rate it should have; the value is its share; down is another matter."""
    slow = {"rdma_rate_bytes_per_second": 25e9}
    judge = Judge().feed(60, gauges=slow)
    assert judge.firing == set()
    assert judge.feed(1, gauges=slow).firing == {"rdma_degraded"}
    assert judge.value("rdma_degraded") == pytest.approx(0.5)
    assert Judge().feed(90, gauges=slow | OFF).firing == set()
    unknown = {"rdma_expected_rate_bytes_per_second": None}
    assert Judge().feed(90, gauges=unknown).firing == set()
    # Slower than the rate that belongs here by the inventory, whatever its source expects.
    more = {"rdma_accepted_rate": 100e9}
    assert Judge().feed(90, gauges=more).firing == {"rdma_degraded"}
    assert Judge().feed(90, gauges=unknown | slow | more).firing == {"rdma_degraded"}
    assert Judge().feed(90, gauges={"rdma_accepted_rate": 50e9}).firing == set()


BUSY = {PACKETS: 1_000_000}


@pytest.mark.parametrize(
    ("seconds", "rise", "expected"),
    [
        (160, {ACK: 1}, True),
        (140, {ACK: 1}, False),  # not yet two minutes, beside the 30 s that are held back
        (600, {ACK: 0.9}, False),
        (400, BUSY | {SEQUENCE: 11}, True),
        (400, BUSY | {SEQUENCE: 9}, False),
        (400, BUSY | {SEQUENCE: 6, ACK: 0.5, "rdma_implied_nak_seq_errors_total": 5}, True),
        (400, BUSY | {'nic_discards_total{direction="received"}': 11}, True),
        (400, BUSY | {"rdma_completer_retry_errors_total": 11}, True),
        (400, {PACKETS: 90_000, SEQUENCE: 90}, False),  # a share of few packets
        (400, BUSY | {"rdma_out_of_sequence_packets_received_total": 10_000}, False),
        (400, BUSY | {"rdma_duplicate_requests_packets_total": 10_000}, False),
        (400, BUSY | {"rdma_rnr_nak_retry_packets_total": 10_000}, False),
        (400, BUSY | {"rdma_req_cqes_errors_total": 10_000}, False),
        (400, BUSY | {"rdma_np_cnp_packets_sent_total": 10_000}, False),
    ],
)
def test_loss(seconds, rise, expected):
    """Timeouts by the second, losses by the packet; reordering and congestion are neither."""
    judge = Judge().feed(31).feed(seconds, rise)
    assert ("rdma_loss" in judge.firing) == expected
    assert judge.firing <= {"rdma_loss"}


def test_loss_is_detected_at_once():
    """An event in the tick it is seen, long before the alert."""
    judge = Judge().feed(31).feed(1, {SEQUENCE: 1})
    assert "rdma_loss_detected" in judge.events


GOING = [64, 40, 16, 0]  # queue pairs, as the processes of a job end


def ending_job(judge, rise, before, after):
    """Have a job end: `rise` counts for some seconds before and after its first queue pairs go."""
    judge.feed(400, BUSY)
    judge.feed(before, rise)
    for pairs in GOING:
        judge.feed(1, rise, {"rdma_queue_pairs": float(pairs)})
    judge.feed(after, rise, {"rdma_queue_pairs": 0.0})
    return judge.feed(400, None, {"rdma_queue_pairs": 0.0})


def test_the_end_of_a_job_is_no_loss():
    """Hundreds of timeouts and given-up requests, up to half a minute before and after: nothing."""
    judge = ending_job(Judge(), {ACK: 200, FATAL: 3}, before=25, after=25)
    assert [name for name in judge.events if name.endswith("_firing")] == []


def test_loss_long_before_the_end_of_a_job_counts():
    """Only half a minute is left out."""
    judge = ending_job(Judge(), {ACK: 200}, before=60, after=0)
    assert "rdma_loss_firing" in judge.events


@pytest.mark.parametrize("counter", rules.FATAL)
def test_requests_given_up_while_the_job_lives(counter):
    """One is enough, once it is sure that no job ended."""
    judge = Judge().feed(40).feed(1, {counter: 1}).feed(29)
    assert judge.firing == set()
    assert judge.feed(1).firing == {"rdma_retries_exceeded"}


def test_requests_given_up_where_queue_pairs_are_not_known():
    """Without them no end of a job is seen, and each counts."""
    unknown = {"rdma_queue_pairs": None}
    judge = Judge().feed(40, gauges=unknown).feed(1, {FATAL: 1}, unknown).feed(31, gauges=unknown)
    assert judge.firing == {"rdma_retries_exceeded"}


TX, RX = ('nic_pause_seconds_total{direction="' + way + '"}' for way in ("transmitted", "received"))


def test_pauses_that_hold_up_the_fabric():
    """A tenth of five minutes; pauses that we are told to make, and marks, are the fabric's."""
    assert Judge().feed(300, {TX: 0.11}).firing == {"rdma_congested"}
    assert Judge().feed(300, {TX: 0.09}).firing == set()
    marks = {"rdma_np_ecn_marked_roce_packets_received_total": 9999}
    assert Judge().feed(600, {RX: 0.9, **marks}).firing == set()


def test_pause_storms():
    """One of either kind is enough, each by its own severity."""
    storm = 'nic_pause_storms_total{severity="%s"}'
    assert Judge().feed(1).feed(1, {storm % "error": 1}).firing == {"rdma_pause_storm"}
    judge = Judge().feed(1).feed(1, {storm % "warning": 1})
    assert judge.firing == {"rdma_pause_storm_warning"}
    assert judge.feed(299).firing == {"rdma_pause_storm_warning"}
    assert judge.feed(2).firing == set()


EIGHT = tuple(Entity("rdma_port", f"mlx5_{number}/1") for number in range(8))
LOAD = {SENT: 20e9, RECEIVED: 20e9}


def lagging(share, ports=EIGHT, seconds=400, load=LOAD):
    """Return the judge after the first port carried a share of what the others did."""
    own = {name: value * share for name, value in load.items()}
    return Judge(ports, step=5).feed(seconds, load, each={PORT: own})


def test_a_port_that_lags_behind_its_siblings():
    """Five minutes under 60 % of the others' median, under load."""
    judge = lagging(0.5)
    assert judge.firing == {"rdma_asymmetry"}
    assert judge.value("rdma_asymmetry") == pytest.approx(0.5)
    assert lagging(0.5, seconds=300).firing == set()
    assert lagging(0.65).firing == set()


def test_what_is_no_asymmetry():
    """A rail that the job leaves aside, an idle node, too few ports, ports of other rates."""
    assert lagging(0.0).firing == set()
    assert lagging(0.01).firing == set()
    assert lagging(0.5, load={SENT: 1e9, RECEIVED: 1e9}).firing == set()
    assert lagging(0.5, ports=EIGHT[:3]).firing == set()
    assert lagging(0.5, ports=EIGHT[:4]).firing == {"rdma_asymmetry"}


def test_a_healthy_port_under_load():
    """Nothing fires, whatever is lost now and then."""
    judge = Judge(EIGHT, step=5).feed(1800, LOAD | {PACKETS: 9_000_000, SEQUENCE: 5, RX: 0.01})
    assert judge.firing == set()
    assert set(judge.events) <= {"rdma_loss_detected"}


def test_a_port_that_vanishes_from_the_rings_changes_nothing():
    """No columns, no judgement."""
    judge = Judge().feed(5).absent(3000)
    assert judge.firing == set()
    assert judge.events == []


def test_columns_that_the_rules_read_are_declared():
    """Every name written in a rule is one that a source serves."""
    declared = {*QUIET, *(signal.name for signal in PORT_GAUGES)}
    read = {*rules.LOST, *rules.FATAL, *rules.PACKETS, *rules.BYTES, *rules.DOWNS, ACK, TX, RX}
    assert read <= declared
    assert set(HEALTHY) <= declared
    assert len(rules.LOST) == 8
    assert len(rules.FATAL) == len(rules.PACKETS) == len(rules.BYTES) == 2


def test_names_and_severities():
    """They are the API of dashboards, runbooks and checks."""
    assert {rule.name: rule.severity for rule in RULES if rule.per == "rdma_port"} == {
        "rdma_port_down": "critical",
        "rdma_port_flapping": "warning",
        "rdma_port_flapping_severe": "critical",
        "rdma_degraded": "warning",
        "rdma_loss": "warning",
        "rdma_retries_exceeded": "critical",
        "rdma_congested": "warning",
        "rdma_pause_storm": "critical",
        "rdma_pause_storm_warning": "warning",
        "rdma_asymmetry": "warning",
    }
    assert not math.isnan(sum(rule.limit for rule in rules.RULES))

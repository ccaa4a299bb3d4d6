"""What happened in the guest: RDMA devices of software in a real kernel, the unit under systemd.

Seconds are the guest's. All tests are in one file, so that `pytest -n` boots one machine for them.
"""

import pytest

pytestmark = pytest.mark.timeout(1800)  # the first test boots

SOON = 1.5
RECEIVED, SENT = (f"gpuwatch_rdma_port_packets_{way}_total" for way in ("received", "transmitted"))

ACTIVE = {"ActiveState": "active", "SubState": "running", "Result": "success"}


def rise(step, name, place):
    """Return by how much a total rose: of a device's port, or of an interface."""
    labels = f'interface="{place}"' if place.startswith("v") else f'device="{place}",port="1"'
    return step["rose"].get(f"gpuwatch_{name}_total{{{labels}}}", 0)


def events(step):
    """Return the events of a step; that reading changes its pace is none of a fault's."""
    return [event for event in step["events"] if event[0] != "rdma_pace"]


def is_alive(step, restarts):
    """Say whether the unit runs after so many restarts, every process of it once."""
    shown = step["shown"]
    commands = [command for _, command in step["processes"]]
    return (
        ACTIVE.items() <= shown.items()
        and shown["NRestarts"] == str(restarts)
        and shown["StatusText"] == "serving nvml on 127.0.0.1:9973"
        and {user for user, _ in step["processes"]} == {"gpuwatch"}
        and len(commands) == len(set(commands)) > 1
    )


def test_traffic_alone_raises_nothing(story):
    """Packets are counted at both ends, errors nowhere; no event, no alert."""
    clean = story["clean"]
    assert {series.partition("{")[0] for series in clean["rose"]} == {RECEIVED, SENT}
    assert len(clean["rose"]) == 4
    assert min(clean["rose"].values()) > 100
    assert events(clean) == []
    assert clean["alerts"] == []
    assert set(clean["up"].values()) == {1.0}


def test_lost_packets_are_detected(story):
    """Of 5 % loss there is word at once, for the port that sends again; so little is no alert."""
    loss = story["loss"]
    assert loss["seconds"]["rdma_loss_detected"] < SOON
    assert rise(loss, "rdma_completer_retry_errors", "rxeA") > 0
    assert events(loss) == [["rdma_loss_detected", "rxeA/1"]]
    assert loss["alerts"] == []


def test_a_receiver_that_is_not_ready_is_no_loss(story):
    """It is counted as what it is at both ends, and raises nothing."""
    slow = story["receiver not ready"]
    assert rise(slow, "rdma_rnr_nak_retry_packets", "rxeA") > 10
    assert rise(slow, "rdma_rnr_nak_sent_packets", "rxeB") > 10
    assert events(slow) == []
    assert slow["alerts"] == []


@pytest.mark.parametrize("every", [1, 8])
def test_the_connection_outlived_the_faults(story, every):
    """The program that sends ended when told to, with all its requests done."""
    traffic = story[f"traffic {every}"]
    assert traffic["status"] == 0
    assert int(traffic["arrived"]) > 50


def test_devices_that_come_are_read(story):
    """Ports and interfaces that were not there at the start have their series soon."""
    added = story["added"]
    assert added["seconds"]["up"] < 2 * SOON
    assert added["seconds"]["interface"] < 2 * SOON
    assert added["alerts"] == []


def test_a_flap_of_30_ms_is_seen(story):
    """Both ends count the carrier and the link; one flap is an event and nothing that fires."""
    flap = story["flap"]
    for what in ("carrier", "link", "nic_carrier_lost"):
        assert flap["seconds"][what] < SOON
    for end in "AB":
        assert rise(flap, "nic_carrier_changes", f"v{end}") == 2
        assert rise(flap, "nic_carrier_downs", f"v{end}") == 1
        assert rise(flap, "rdma_link_downed", f"rxe{end}") == 1
        assert ["nic_carrier_lost", f"v{end}"] in flap["events"]
    assert [alert for alert in flap["alerts"] if alert[2] == "firing"] == []


def test_a_port_that_stays_down_fires(story):
    """Detected at once, firing after the rule's 10 s, and only where nobody switched it off."""
    down = story["down"]
    assert down["seconds"]["down"] < SOON
    assert down["seconds"]["rdma_port_down_detected"] < SOON
    assert 10 <= down["seconds"]["firing"] < 10 + 2 * SOON
    assert down["alerts"] == [["rdma_port_down", "rxeC/1", "firing"]]
    assert ["rdma_port_down_detected", "rxeD/1"] not in down["events"]


def test_a_port_that_comes_back_is_up(story):
    """The metric says so at once; the alert stays its two minutes."""
    again = story["up again"]
    assert again["seconds"]["up"] < SOON
    assert ["rdma_port_down", "rxeC/1", "firing"] in again["alerts"]


def test_a_second_down_is_flapping(story):
    """Also if it is one of 30 ms; five of them would be severe."""
    again = story["second flap"]
    assert again["seconds"]["firing"] < SOON
    assert ["rdma_port_flapping", "rxeC/1", "firing"] in again["alerts"]
    assert not [alert for alert in again["alerts"] if alert[0] == "rdma_port_flapping_severe"]


def test_a_device_that_goes_is_missed_and_may_return(story):
    """Lost is an event and a port that is down; the same device counts on when it is back."""
    removed, returned = story["removed"], story["returned"]
    assert removed["seconds"]["rdma_device_lost"] < SOON
    assert removed["seconds"]["down"] < 2 * SOON
    assert returned["seconds"]["up"] < 2 * SOON
    assert ["rdma_device_returned", "rxeC"] in returned["events"]
    assert rise(returned, "rdma_link_downed", "rxeC") == 0


def test_the_daemon_had_no_other_trouble(story):
    """The daemon ended as told, and its log has no error."""
    plain = story["plain"]
    assert plain["status"] == 0
    errors = [line for line in plain["log"].splitlines() if "level=error" in line]
    assert ["rdma_port_down_firing, rdma_port rxeC/1" in line for line in errors] == [True]


def test_started_is_ready(story):
    """`systemctl start` comes back when the page is served, by a user of its own."""
    assert is_alive(story["start"], restarts=0)
    assert story["start"]["runtime"]


def test_confined_it_still_sees(story):
    """Within what the unit allows it reads RDMA ports by netlink and the kernel log."""
    assert story["unit"]["seconds"]["ports"] is not None
    assert story["unit"]["seconds"]["kernel log"] is not None
    assert story["unit"]["alerts"] == []


def test_reload_keeps_the_process(story):
    """The end of a reload is told to systemd, and nothing was restarted."""
    assert is_alive(story["reload"], restarts=0)
    assert story["reload"]["shown"]["MainPID"] == story["start"]["shown"]["MainPID"]


def test_a_supervisor_that_hangs_is_replaced(story):
    """The watchdog is not fed any more: systemd starts the unit again."""
    assert "Watchdog timeout (limit 20s)" in story["journal"]["text"]
    assert is_alive(story["hang"], restarts=1)
    assert story["hang"]["shown"]["MainPID"] != story["start"]["shown"]["MainPID"]


def test_a_supervisor_that_is_killed_is_replaced(story):
    """It takes its children along, and comes back with new ones."""
    assert is_alive(story["crash"], restarts=2)
    assert story["crash"]["shown"]["MainPID"] != story["hang"]["shown"]["MainPID"]


def test_stop_leaves_nothing(story):
    """An orderly end in time: no process, no runtime directory, exit status 0."""
    stop = story["stop"]
    assert {"ActiveState": "inactive", "Result": "success"}.items() <= stop["shown"].items()
    assert stop["shown"]["ExecMainStatus"] == "0"
    assert stop["processes"] == []
    assert not stop["runtime"]
    assert stop["seconds"] < 30


def test_the_unit_had_no_trouble(story):
    """The journal has no error of gpuwatch."""
    assert "level=error" not in story["journal"]["text"]
    assert "Traceback" not in story["journal"]["text"]

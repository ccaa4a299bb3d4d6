"""Real RDMA devices, of software, in a real kernel: what is done to them, and what gpuwatch shows.

Seconds are the guest's.
"""

import pytest

pytestmark = pytest.mark.timeout(1200)  # the first test boots

SOON = 1.5
RECEIVED, SENT = (f"gpuwatch_rdma_port_packets_{way}_total" for way in ("received", "transmitted"))


def rise(step, name, place):
    """Return by how much a total rose: of a device's port, or of an interface."""
    labels = f'interface="{place}"' if place.startswith("v") else f'device="{place}",port="1"'
    return step["rose"].get(f"gpuwatch_{name}_total{{{labels}}}", 0)


def events(step):
    """Return the events of a step; that reading changes its pace is none of a fault's."""
    return [event for event in step["events"] if event[0] != "rdma_pace"]


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
    """Both ends count the carrier and the link; one flap is an event and no alert."""
    flap = story["flap"]
    for what in ("counted", "link", "nic_carrier_lost"):
        assert flap["seconds"][what] < SOON
    for end in "CD":
        assert rise(flap, "nic_carrier_changes", f"v{end}") == 2
        assert rise(flap, "nic_carrier_downs", f"v{end}") == 1
        assert rise(flap, "rdma_link_downed", f"rxe{end}") == 1
    assert sorted(events(flap)) == [["nic_carrier_lost", "vC"], ["nic_carrier_lost", "vD"]]
    assert flap["alerts"] == []


def test_a_port_that_stays_down_fires(story):
    """Detected at once, firing after the rule's 10 s, and only where nobody switched it off."""
    down = story["down"]
    assert down["seconds"]["down"] < SOON
    assert down["seconds"]["rdma_port_down_detected"] < SOON
    assert 10 <= down["seconds"]["firing"] < 10 + 2 * SOON
    assert [one for one in down["alerts"] if one[0] == "rdma_port_down"] == [
        ["rdma_port_down", "rxeC/1", "firing"]
    ]
    assert ["rdma_port_down_detected", "rxeD/1"] not in down["events"]


def test_a_second_down_is_flapping(story):
    """The flap and the fall, within ten minutes."""
    assert ["rdma_port_flapping", "rxeC/1", "firing"] in story["down"]["alerts"]
    assert ["rdma_port_flapping_severe", "rxeC/1", "firing"] not in story["down"]["alerts"]


def test_a_port_that_comes_back_is_up(story):
    """The metric says so at once; the alert stays its two minutes."""
    again = story["up again"]
    assert again["seconds"]["up"] < SOON
    assert ["rdma_port_down", "rxeC/1", "firing"] in again["alerts"]


def test_a_device_that_goes_is_missed_and_may_return(story):
    """Lost is an event and a port that is down; the same device counts on when it is back."""
    removed, returned = story["removed"], story["returned"]
    assert removed["seconds"]["rdma_device_lost"] < SOON
    assert removed["seconds"]["down"] < 2 * SOON
    assert returned["seconds"]["up"] < 2 * SOON
    assert ["rdma_device_returned", "rxeC"] in returned["events"]
    assert rise(returned, "rdma_link_downed", "rxeC") == 0


def test_nothing_went_wrong_beside(story):
    """The daemon ended as told, and its log has no error."""
    plain = story["plain"]
    assert plain["status"] == 0
    errors = [line for line in plain["log"].splitlines() if "level=error" in line]
    assert ["rdma_port_down_firing, rdma_port rxeC/1" in line for line in errors] == [True]

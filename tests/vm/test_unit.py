"""gpuwatch.service, as it is, under a real systemd in a real kernel.

Seconds are the guest's.
"""

import pytest

pytestmark = pytest.mark.timeout(1200)  # the first test boots

ACTIVE = {"ActiveState": "active", "SubState": "running", "Result": "success"}


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


def test_nothing_went_wrong_beside(story):
    """The journal has no error of gpuwatch."""
    assert "level=error" not in story["journal"]["text"]
    assert "Traceback" not in story["journal"]["text"]

"""A daemon whose kernel log is a file that the test appends to: what it serves of it."""

import os
import signal
import time
from pathlib import Path

import pytest
from node import Node, address_of, quiet
from running import wait_for

CASES = Path(__file__).parent / "data/cases"
QUIET = quiet("nvml_state", "host", "kmsg")


class Logged(Node):
    """A node with a kernel log, which forgets nothing."""

    def __init__(self, directory, devices=3):
        super().__init__(directory, devices)
        self.log = directory / "kmsg"
        self.log.touch()
        self.sequence = 0

    def write(self, *texts):
        with self.log.open("a") as file:
            for text in texts:
                self.sequence += 1
                file.write(f"3,{self.sequence},1000000,-;{text}\n")

    def xid(self, code, gpu=0, text="text"):
        """Log an Xid of a GPU of the node."""
        address = address_of(self.script.devices[gpu]).removesuffix(".0")
        self.write(f"NVRM: Xid (PCI:{address}): {code}, {text}")

    def running(self, config=QUIET):
        return super().running("--path.kmsg", str(self.log), config=config)


def count(running, code, gpu="0"):
    return running.value("gpuwatch_gpu_xid_errors_total", f'gpu="{gpu}"', f'xid="{code}"')


def last(running, code, gpu="0"):
    return running.value("gpuwatch_gpu_xid_last_timestamp_seconds", f'gpu="{gpu}"', f'xid="{code}"')


def firing(running):
    """Return the alerts of GPUs that fire."""
    return {
        (alert["rule"], alert["entity"][1])
        for alert in running.status()["alerts"]
        if alert["state"] == "firing" and alert["entity"][0] == "gpu"
    }


def test_xids_are_counted_by_gpu_and_code(tmp_path):
    """Each of several within a second shows, with its time, and is recorded with the others.

    Main codes begin at 0.
    """
    node = Logged(tmp_path)
    config = QUIET.replace("[recorder]", "[recorder]\nafter_seconds = 1.0")
    with node.running(config) as running:
        wait_for(lambda: count(running, 79, "2") == 0)
        assert last(running, 79) is None
        began = time.time()
        for text in (CASES / "PR-09/kmsg.txt").read_text().splitlines():
            code = text.partition("): ")[2].partition(",")[0]
            node.xid(code)
        wait_for(lambda: count(running, 45) == 1)
        assert [count(running, code) for code in (31, 62, 45, 79)] == [1, 1, 1, 0]
        assert count(running, 62, "1") == 0
        assert abs(last(running, 62) - began) < 10
        wait_for(lambda: firing(running) == {("gpu_xid", "0")})
        node.xid(4321, 1)
        wait_for(lambda: count(running, 4321, "1") == 1)
        assert firing(running) == {("gpu_xid", "0")}

        def shown():
            return " ".join(event["detail"] for event in running.events("recording_saved"))

        wait_for(lambda: "gpu_xid on gpu 0" in shown() and "xid on gpu 1" in shown())
        assert running.alert("gpu_xid", "0")["recording"] in shown()
        assert list((running.state / "recordings").glob("*Z-*xid-gpu-*.gwr"))


def test_a_sampler_that_is_killed_counts_nothing_twice(tmp_path):
    """Neither it nor the next, and not what was logged while there was none."""
    node = Logged(tmp_path)
    with node.running() as running:
        wait_for(lambda: count(running, 31) == 0)
        node.xid(31)
        wait_for(lambda: count(running, 31) == 1)
        position = running.runtime / "kmsg.position"
        wait_for(lambda: position.exists() and position.read_text().endswith(" 1\n"))
        os.kill(running.child("host"), signal.SIGKILL)
        node.xid(31)
        node.xid(48)
        wait_for(lambda: count(running, 48) == 1)
        assert count(running, 31) == 2
        assert len(running.events("xid")) == 3


def test_a_storm_does_not_fill_the_log(tmp_path):
    """Of what comes again and again, each code gets a few lines a minute; all of it is counted."""
    node = Logged(tmp_path)
    with node.running() as running:
        wait_for(lambda: count(running, 31) == 0)
        for number in range(1, 13):
            node.xid(31)
            wait_for(lambda number=number: count(running, 31) == number)
        node.xid(48)
        wait_for(lambda: "xid, gpu 0: 48: critical" in running.log())
        assert running.log().count("xid, gpu 0: 31: ") == 5
        wait_for(lambda: len(running.events("xid")) == 13)


def test_a_daemon_started_anew_counts_from_0_and_knows_what_was(tmp_path):
    """What it is told again sets the time and keeps the alert, and no count rises by it."""
    node = Logged(tmp_path)
    with node.running() as running:
        wait_for(lambda: count(running, 48, "1") == 0)
        node.xid(48, 1)
        wait_for(lambda: last(running, 48, "1"))
        when = last(running, 48, "1")
        wait_for(lambda: firing(running) == {("gpu_xid", "1")})
        before = running.child("daemon")
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: running.child("daemon") != before)
        wait_for(lambda: running.is_ready() and last(running, 48, "1"))
        assert last(running, 48, "1") == pytest.approx(when, abs=1)
        assert count(running, 48, "1") == 0
        assert firing(running) == {("gpu_xid", "1")}
        node.xid(48, 1)
        wait_for(lambda: count(running, 48, "1") == 1)


def test_a_gpuwatch_started_anew_reads_what_the_kernel_still_has(tmp_path):
    """A fault from before its start shows with its time, and is not counted again."""
    node = Logged(tmp_path)
    with node.running() as running:
        wait_for(lambda: count(running, 79, "2") == 0)
        node.xid(79, 2)
        wait_for(lambda: count(running, 79, "2") == 1)
    with node.running() as running:
        wait_for(lambda: last(running, 79, "2"))
        assert count(running, 79, "2") == 0


def test_a_daemon_hears_hundreds_of_events_it_missed(tmp_path):
    """A socket holds fewer than a sampler keeps: they come in turns, all of them."""
    node = Logged(tmp_path, 1)
    many = 700
    with node.running() as running:
        wait_for(lambda: count(running, 31) == 0)
        for code in range(many):
            node.xid(1000 + code)
        wait_for(lambda: count(running, 999 + many) == 1)
        before = running.child("daemon")
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: running.child("daemon") != before)
        wait_for(lambda: running.is_ready())
        name = "gpuwatch_gpu_xid_last_timestamp_seconds{"
        wait_for(lambda: sum(one.startswith(name) for one in running.scrape()) == many)


def test_a_gpu_that_left_the_bus_is_named_by_its_number(tmp_path):
    """The log knows it only by its address, and no sampler lists it any more."""
    node = Logged(tmp_path)
    gone = node.sysfs / "bus/pci/devices" / address_of(node.script.devices[1])
    with node.running() as running:
        wait_for(lambda: count(running, 79, "1") == 0)
    for file in gone.iterdir():
        file.unlink()
    gone.rmdir()
    with node.running() as running:
        wait_for(lambda: count(running, 79, "2") == 0)
        assert count(running, 79, "1") is None
        node.xid(79, 1)
        wait_for(lambda: count(running, 79, "1") == 1)
        wait_for(lambda: firing(running) == {("gpu_xid", "1")})


def test_a_gpuwatch_that_the_kernel_killed_says_so_when_it_is_back(tmp_path):
    """The log's line bears our name: every process of ours has it."""
    node = Logged(tmp_path)
    node.log.write_text((CASES / "HG-05/kmsg.txt").read_text())
    with node.running() as running:
        wait_for(lambda: running.events("oom_kill_of_gpuwatch"))
        assert 'level=warning message="oom_kill_of_gpuwatch' in running.log()
        for duty in ("host", "daemon"):
            name = Path(f"/proc/{running.child(duty)}/comm").read_text()
            assert name == "gpuwatch\n"


def test_a_pcie_error_is_that_of_its_device(tmp_path):
    """Counted by address and severity; one that was not corrected is an alert at once."""
    node = Logged(tmp_path)
    with node.running(config=QUIET + "[rules.pcie_errors]\nlimit = 50.0\n") as running:
        wait_for(lambda: count(running, 31) == 0)
        text = "mlx5_core 0000:c1:00.0: PCIe Bus Error: severity={}, type=Data Link Layer, x"
        node.write(*[text.format("Corrected")] * 30)
        place = ("gpuwatch_pcie_errors_total", 'pci_bus_id="0000:c1:00.0"')
        wait_for(lambda: running.value(*place, 'severity="corrected"') == 30)
        assert running.alert("pcie_errors") is None
        node.write(text.format("Uncorrected (Non-Fatal)"))
        wait_for(lambda: running.value(*place, 'severity="nonfatal"') == 1)


def test_a_log_that_is_not_there_is_no_clean_bill(tmp_path):
    """No Xid is shown as 0; the source is down, says why, and the rest of the duty goes on."""
    node = Logged(tmp_path)
    node.log.unlink()
    with node.running() as running:
        wait_for(lambda: running.value("gpuwatch_source_up", 'source="host"') == 1)
        wait_for(lambda: running.value("gpuwatch_kmsg_up") == 0)
        assert running.value("gpuwatch_source_up", 'source="kmsg"') == 0
        assert count(running, 79) is None
        (state,) = [one for name, one in running.status()["sources"].items() if name == "kmsg"]
        assert "No such file or directory: give the container the device" in state["reason"]

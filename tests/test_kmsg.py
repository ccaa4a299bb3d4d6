"""The kernel log as a source: every record once, whatever ends in between, and never in silence."""

import errno
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node import QUIET, Node, address_of
from running import wait_for

from gpuwatch.errors import SourceUnavailable
from gpuwatch.kernel_log import told
from gpuwatch.pulse import Pulse
from gpuwatch.signals import HOST, Entity
from gpuwatch.source import Context
from gpuwatch.sources import kmsg
from gpuwatch.sources.kmsg import Kmsg

CASES = Path(__file__).parent / "data/cases"
XID = "NVRM: Xid (PCI:0000:1b:00): {}, pid=7, name=python3, text"
FORGED = "an Xid line of a test of gpuwatch: NVRM: Xid (PCI:0000:1b:00): 79, x"


def line(sequence, text, facility=0, seconds=1):
    return f"{facility * 8 + 3},{sequence},{seconds * 1_000_000},-;{text}\n"


def case(name):
    return (CASES / name / "kmsg.txt").read_text()


class Log:
    """A log in a file, which a kernel that forgets nothing appends to, and who reads it."""

    def __init__(self, directory, boot_id="one"):
        self.directory = directory
        self.path = directory / "kmsg"
        self.path.touch()
        self.sequence = 100
        (directory / "runtime").mkdir()
        self.boot(boot_id)

    def boot(self, boot_id):
        path = self.directory / "proc/sys/kernel/random/boot_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{boot_id}\n")

    def write(self, *texts, **options):
        with self.path.open("a") as file:
            for text in texts:
                self.sequence += 1
                file.write(line(self.sequence, text, **options))

    def open(self, **settings):
        """Return a new reader, as a sampler that is started has it."""
        paths = {"kmsg": str(self.path), "runtime": str(self.directory / "runtime")}
        settings = {
            "config": {"paths": paths, "host": {"xid_catalogue": ""}},
            "ring_directory": str(self.directory),
            **settings,
        }
        return Reader(Context(settings, Pulse.create(1), procfs=self.directory / "proc"))


class Reader:
    def __init__(self, context):
        self.source = Kmsg()
        (self.group,) = self.source.open(context).groups
        context.pulse.close()

    def read(self, times=1):
        """Read, and take the events as a sampler does; return them and the counts."""
        for _ in range(times):
            self.group.read()
        return self.hand_over()

    def hand_over(self):
        events, self.source.findings.events = self.source.findings.events, []
        return events

    def counts(self):
        cells = self.group.read()
        return {
            column.label: count for column, count in zip(self.group.columns, cells, strict=True)
        }


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path)


def xids(events):
    """Return how often each code was told."""
    found = Counter()
    for event in events:
        if event.name == "xid":
            said = told(event.detail)
            found[said.code] += said.times
    return found


def codes(events):
    return [event.detail.partition(":")[0] for event in events if event.name == "xid"]


def test_what_was_there_before_is_told_with_its_own_time(log):
    """It happened before gpuwatch began and counts nowhere; what comes then is of now, and does."""
    kill = "Out of memory: Killed process 7 (a) total-vm:1kB"
    log.write(XID.format(31), kill, seconds=5)
    reader = log.open()
    past = reader.read()
    assert [(event.name, event.time_ns) for event in past] == [
        ("xid", 5_000_000_000),
        ("oom_kill", 5_000_000_000),
    ]
    assert reader.counts()["oom_kill"] == 0
    log.write(kill, seconds=6)
    (event,) = reader.read()
    assert event.time_ns > 6_000_000_000
    assert reader.counts()["oom_kill"] == 1


def test_a_time_that_is_yet_to_come_is_now(log):
    """The log's clock may run ahead of ours."""
    log.write(XID.format(31), seconds=10**9)
    (event,) = log.open().read()
    assert event.time_ns < 10**18


def test_a_sampler_started_anew_goes_on_where_the_last_one_was(log):
    """Nothing is told twice, and nothing left out that was logged in between."""
    log.write(XID.format(13))
    first = log.open()
    assert codes(first.read()) == ["13"]
    log.write(XID.format(31))
    assert codes(first.read()) == ["31"]
    first.read()
    log.write(XID.format(48))
    second = log.open()
    assert codes(second.read()) == ["48"]
    log.write(XID.format(62))
    assert codes(second.read()) == ["62"]
    second.source.close()
    assert codes(log.open().read()) == []


def test_what_was_not_handed_over_is_told_by_the_next(log):
    """A sampler that is killed with events in hand has not lost them."""
    first = log.open()
    first.read()
    log.write(XID.format(48))
    first.group.read()
    first.group.read()
    assert codes(log.open().read()) == ["48"]
    first.source.close()
    assert codes(log.open().read()) == ["48"]


def test_another_boot_has_another_log(log):
    """Its numbers begin again: the position of the last one says nothing."""
    first = log.open()
    log.write(XID.format(13))
    first.read()
    first.source.close()
    log.boot("two")
    assert codes(log.open().read()) == ["13"]


@pytest.mark.parametrize("text", ["", "one", "one x", "\xff\xfe", "one 1 2"])
def test_a_position_that_is_none_is_left_aside(log, text):
    """Then the log is read from its beginning."""
    (log.directory / "runtime/kmsg.position").write_text(text, "latin-1")
    log.write(XID.format(13))
    assert codes(log.open().read()) == ["13"]


def test_who_only_looks_keeps_no_position(log):
    """`gpuwatch check` beside a running daemon takes nothing from it."""
    paths = {"kmsg": str(log.path), "runtime": str(log.directory / "runtime")}
    config = {"paths": paths, "host": {"xid_catalogue": ""}}
    source = Kmsg()
    (group,) = source.open(Context({"config": config}, Pulse.create(1))).groups
    log.write("a")
    group.read()
    group.read()
    source.close()
    assert not list((log.directory / "runtime").iterdir())


def test_records_overwritten_before_they_were_read_are_told(log, monkeypatch):
    """EPIPE: the kernel says that some are lost, the numbers say how many."""
    log.write("a")
    reader = log.open()
    reader.read()
    read, faults = os.read, [BrokenPipeError(errno.EPIPE, "")]

    def broken(file, size):
        if faults:
            raise faults.pop()
        return read(file, size)

    monkeypatch.setattr(kmsg.os, "read", broken)
    log.sequence += 40
    log.write(XID.format(48))
    events = reader.read()
    assert [(event.name, event.entity) for event in events] == [
        ("kmsg_overrun", HOST),
        ("xid", Entity("gpu", "0000:1b:00.0")),
    ]
    assert events[0].detail == "40 records are lost"
    assert reader.counts()["kmsg_overrun"] == 1


def test_records_overwritten_between_two_samplers_are_told(log):
    """The kernel's buffer is short: a sampler away for long may have missed some."""
    first = log.open()
    log.write("a")
    first.read()
    first.source.close()
    log.path.write_text("")
    log.sequence += 7
    log.write("b")
    assert [event.detail for event in log.open().read()] == ["7 records are lost"]


def test_a_storm_is_a_handful_of_events_that_say_how_many(log):
    """160 follow-ups of one fault on four GPUs: an event a GPU and code, and no count lost."""
    reader = log.open()
    reader.read()
    with log.path.open("a") as file:
        file.write(case("KM-07"))
    events = reader.read()
    assert len(events) == 6
    storm = [event for event in events if event.detail.startswith("45: ")]
    assert sorted(event.detail.split(": ")[1] for event in storm) == ["info x40"] * 4


def test_a_hundred_thousand_lines_are_read_in_turns(log):
    """Other sources of the sampler get their turn between; no line is left out."""
    reader = log.open()
    reader.read()
    with log.path.open("a") as file:
        for number in range(100_000):
            text = XID.format(13) if number % 1000 == 0 else "usb 1-1: new device"
            file.write(line(1000 + number, text))
    found = xids(reader.read())
    assert 0 < found["13"] < 10
    for _ in range(100_000 // kmsg.RECORDS_A_READ):
        found += xids(reader.read())
    assert found == {"13": 100}
    assert reader.source.findings.errors == {}


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30
)
@given(st.lists(st.integers(1, 400), max_size=20))
def test_a_pipe_may_be_cut_anywhere(tmp_path_factory, cuts):
    """A record that comes in pieces is one record."""
    log = Log(tmp_path_factory.mktemp("log"))
    log.path.unlink()
    os.mkfifo(log.path)
    reader = log.open()
    writer = os.open(log.path, os.O_WRONLY)
    reader.read()
    raw = case("KM-01").replace("\n", "\n SUBSYSTEM=pci\n DEVICE=+pci:0000:1b:00.0\n").encode()
    found = Counter()
    for cut in [*cuts, len(raw)]:
        os.write(writer, raw[:cut])
        raw = raw[cut:]
        found += xids(reader.read())
    os.close(writer)
    assert found == {"79": 2} | dict.fromkeys(
        ("14", "13", "109", "31", "119", "74", "94", "4321"), 1
    )
    assert reader.source.findings.errors == {}
    reader.source.close()


def test_what_is_no_record_is_an_error_and_no_end(log):
    """Rubbish in a pipe is counted, and the records behind it are read."""
    reader = log.open()
    reader.read()
    with log.path.open("a") as file:
        file.write("rubbish\n" + "x" * 200_000)
    reader.read()
    with log.path.open("a") as file:
        file.write("\n")
    log.write(XID.format(48))
    assert codes(reader.read(3)) == ["48"]
    assert reader.source.findings.errors["not_a_record"] >= 2


@pytest.mark.parametrize(
    "variant", json.loads((CASES / "CF-05/faults.json").read_text())["variants"]
)
def test_a_log_that_cannot_be_read_says_why_and_what_to_do(log, monkeypatch, variant):
    """A capability, a mode, a device that is not there: each has its fix."""
    name = variant["dev/kmsg"]
    code = getattr(errno, name)

    def refused(*_arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(kmsg.os, "open", refused)
    with pytest.raises(SourceUnavailable) as fault:
        log.open()
    text = str(fault.value)
    assert text.startswith(f"{log.path}: {os.strerror(code)}: ")
    fix = {"EPERM": "dmesg_restrict", "EACCES": "DeviceAllow", "ENOENT": "container"}
    assert fix[name] in text
    assert ("CAP_SYSLOG" in text) == (name == "EPERM")


def test_a_real_log_is_not_fooled(log):
    """What a program writes to /dev/kmsg is marked as such by the kernel, and is no Xid."""
    device = Path("/dev/kmsg")
    if not os.access(device, os.R_OK | os.W_OK):
        pytest.skip("/dev/kmsg is not writable here: needs root outside a container")
    log.path = device
    reader = log.open()
    while reader.read():
        pass
    wait_for(lambda: not reader.read() and not reader.source._history)
    before = reader.counts()["forged"]
    with device.open("w") as file:
        file.write(f"<3>{FORGED}\n")
    wait_for(lambda: reader.counts()["forged"] > before)
    assert [event for event in reader.hand_over() if "1b:00" in event.entity.id] == []


# A real daemon, whose kernel log is a file that this test appends to.


class Logged(Node):
    def __init__(self, directory, devices=3):
        super().__init__(directory, devices)
        self.log = directory / "kmsg"
        self.log.touch()
        self.sequence = 0

    def write(self, *texts):
        with self.log.open("a") as file:
            for text in texts:
                self.sequence += 1
                file.write(line(self.sequence, text))

    def xid(self, code, gpu=0, text="text"):
        """Log an Xid of a GPU of the node."""
        address = address_of(self.script.devices[gpu]).removesuffix(".0")
        self.write(f"NVRM: Xid (PCI:{address}): {code}, {text}")

    def running(self, *arguments, **options):
        return super().running("--path.kmsg", str(self.log), *arguments, **options)


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
    """Each of several within a second shows, with its time; main codes begin at 0."""
    node = Logged(tmp_path)
    with node.running() as running:
        wait_for(lambda: count(running, 79, "2") == 0)
        assert last(running, 79) is None
        began = time.time()
        for text in case("PR-09").splitlines():
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


def test_a_daemon_started_anew_counts_from_0_and_knows_what_was(tmp_path):
    """What it is told again sets the time and keeps the alert, and no count rises by it."""
    node = Logged(tmp_path)
    with node.running() as running:
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
    node.log.write_text(case("HG-05"))
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

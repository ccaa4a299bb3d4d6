"""The kernel log as a source: every record once, whatever ends in between, and never in silence."""

import errno
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
            "config": {"paths": paths, "host": {"period_ms": 100.0, "xid_catalogue": ""}},
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
    config = {"paths": paths, "host": {"period_ms": 100.0, "xid_catalogue": ""}}
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


def test_a_directory_is_no_log(log):
    """It can be opened, and never be read."""
    log.path = log.directory
    with pytest.raises(SourceUnavailable, match="Is a directory"):
        log.open()


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

"""systemd: notifications over its socket, and the unit and user files as systemd judges them."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from gpuwatch import systemd
from gpuwatch.duty import CAPABILITIES

FILES = Path(__file__).parent.parent / "systemd"
UNIT = (FILES / "gpuwatch.service").read_text()
JOBS = (FILES / "gpuwatch.service.d/jobs.conf").read_text()
PM = (FILES / "gpuwatch.service.d/pm.conf").read_text()

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path, monkeypatch):
    """Give a notification socket as systemd does, by path or in the abstract namespace."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@gpuwatch-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0"))
        listening.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield listening


def test_notifications(manager):
    """Each call is one datagram of assignments."""
    systemd.ready("Serving on :9973")
    systemd.status("two\nlines")
    systemd.watchdog()
    systemd.stopping("Stopping")
    systemd.status("")

    assert [manager.recv(4096) for _ in range(4)] == [
        b"READY=1\nSTATUS=Serving on :9973",
        b"STATUS=two lines",
        b"WATCHDOG=1",
        b"STOPPING=1\nSTATUS=Stopping",
    ]
    with pytest.raises(BlockingIOError):
        manager.recv(4096)


def test_reload_carries_the_time(manager):
    """A reload names its monotonic start in microseconds; ready ends it."""
    before = systemd.monotonic_ns() // 1000
    systemd.reloading()
    systemd.ready()

    told = re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=(\d+)", manager.recv(4096))
    assert before <= int(told[1]) <= systemd.monotonic_ns() // 1000
    assert manager.recv(4096) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "/nosuch/notify", "vsock:2:1234", "relative"])
def test_without_manager_nothing_happens(address, monkeypatch):
    """No socket, or one that is gone, is no fault."""
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", address)

    systemd.ready()
    systemd.watchdog()


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("20000000", None, 20.0),
        ("20000000", "own", 20.0),
        ("20000000", "1", None),
        ("0", None, None),
        ("soon", None, None),
        ("20000000", "me", None),
        (None, None, None),
    ],
)
def test_watchdog_seconds(usec, pid, seconds, monkeypatch):
    """The watchdog counts only if it is meant for this process."""
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(os.getpid()) if value == "own" else value)

    assert systemd.watchdog_seconds() == seconds


@pytest.fixture
def unit(tmp_path):
    """Write the unit with a command that exists here."""
    assert "ExecStart=/usr/bin/gpuwatch run " in UNIT
    path = tmp_path / "gpuwatch.service"
    path.write_text(UNIT.replace("ExecStart=/usr/bin/gpuwatch ", "ExecStart=/bin/true "))
    return path


@needs_analyze
def test_unit_is_valid(unit):
    """The service manager knows every key of the unit and has nothing to say."""
    judged = subprocess.run(
        ["systemd-analyze", "verify", unit], stderr=subprocess.STDOUT, stdout=subprocess.PIPE
    )

    assert (judged.returncode, judged.stdout) == (0, b"")


def exposure(judged):
    """Return the figure that systemd-analyze gives, of 10."""
    figure = re.search(r"Overall exposure level for gpuwatch.service: ([0-9.]+)", judged.stdout)
    assert figure, judged.stdout + judged.stderr
    return float(figure[1])


@needs_analyze
def test_unit_is_hardened(unit):
    """The exposure figure of systemd-analyze stays at 3.0 or below, of 10."""
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", unit],
        capture_output=True,
        text=True,
    )

    assert exposure(judged) <= 3.0


def test_the_drop_in_for_jobs_grants_what_its_reader_keeps(unit, tmp_path):
    """It adds the capabilities that one child keeps, and systemd takes it."""
    (tmp_path / "gpuwatch.service.d").mkdir()
    (tmp_path / "gpuwatch.service.d/jobs.conf").write_text(JOBS)
    if shutil.which("systemd-analyze"):
        judged = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True)
        assert (judged.returncode, judged.stdout, judged.stderr) == (0, b"", b"")

    granted = re.findall("^([A-Za-z]+)=(.*)$", JOBS, re.MULTILINE)
    kept = " ".join(f"CAP_{name}" for name in CAPABILITIES["counters"])
    assert granted == [("AmbientCapabilities", kept), ("CapabilityBoundingSet", kept)]


@needs_analyze
def test_the_drop_in_for_hardware_counters_stays_narrow(unit, tmp_path):
    """It grants one capability of those that the reader keeps, and exposes little more."""
    (tmp_path / "gpuwatch.service.d").mkdir()
    (tmp_path / "gpuwatch.service.d/pm.conf").write_text(PM)
    granted = re.findall("^([A-Za-z]+)=(.*)$", PM, re.MULTILINE)
    assert granted == [
        ("AmbientCapabilities", "CAP_PERFMON"),
        ("CapabilityBoundingSet", "CAP_PERFMON"),
    ]
    assert "PERFMON" in CAPABILITIES["pm"]
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", unit],
        capture_output=True,
        text=True,
    )

    assert exposure(judged) <= 3.0


def test_unit_outlives_faults():
    """The unit restarts without end and reaches what samplers need."""
    keys = dict(line.split("=", 1) for line in UNIT.split("\n") if re.match(r"[A-Z]\w*=", line))

    assert keys["StartLimitIntervalSec"] == "0"
    assert keys["Restart"] == "on-failure"
    assert keys["RuntimeDirectoryPreserve"] == "restart"
    assert keys["OOMPolicy"] == "continue"
    for device in ("char-nvidia* rw", "char-infiniband* rw", "/dev/kmsg r"):
        assert f"DeviceAllow={device}\n" in UNIT
    for closed in ("PrivateDevices", "RestrictRealtime", "ProtectKernelLogs"):
        assert closed not in keys


def test_canaries_have_what_torch_needs():
    """Memory and threads of all ranks, /dev/shm, compiled kernels, and NUMA placement."""
    keys = dict(line.split("=", 1) for line in UNIT.split("\n") if re.match(r"[A-Z]\w*=", line))

    assert int(keys["MemoryMax"].removesuffix("G")) >= 1 + 8 * 2
    assert int(keys["TasksMax"]) >= 4096
    assert "MemoryDenyWriteExecute" not in keys
    assert "PrivateIPC" not in keys
    assert "TemporaryFileSystem" not in keys
    assert "SystemCallFilter=mbind set_mempolicy\n" in UNIT


@pytest.mark.skipif(
    shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed"
)
def test_user_file_is_valid():
    """systemd-sysusers reads the file and would make the unit's user."""
    judged = subprocess.run(
        ["systemd-sysusers", "--dry-run", FILES / "gpuwatch.sysusers"],
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
    )

    assert judged.returncode == 0, judged.stdout
    assert "gpuwatch" in judged.stdout
    assert "User=gpuwatch\n" in UNIT

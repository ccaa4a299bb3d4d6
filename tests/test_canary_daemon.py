"""The daemon runs canaries by itself: on idle GPUs, one session at a time, and never in the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import environment
from node import Node, quiet
from pretend import PREAMBLE
from running import Running, descendants, wait_for
from test_canary_command import LASTS, MEASURES, PROCESS

from gpuwatch.canary_host import HOST_PIDS, LOCK, hindrance, session_runs
from gpuwatch.commands.check_canaries import canaries
from gpuwatch.errors import PASS, WARN
from gpuwatch.tmpfs import ring_directory

CONFIG = (
    quiet("nvml_state", "nvml_counters")
    + """
[canary]
python = "{python}"
run = ["matmul"]
settle_seconds = 0
interval_seconds = 3600
seed_seconds = 1
"""
)
PROCESSES = "nvmlDeviceGetComputeRunningProcesses"


class Host:
    """Some idle GPUs, a daemon that watches them, and an interpreter that pretends."""

    def __init__(self, directory: Path, gpus: int = 1) -> None:
        self.directory = directory
        self.node = Node(directory, gpus)
        self.node.now("nvmlDeviceGetMemoryInfo_v2", val=[80 << 30, 1 << 28, 79 << 30, 4 << 20])
        self.node.now("nvmlDeviceGetUtilizationRates", val=[0, 0])
        self.procfs = directory / "proc"
        self.environment = environment(directory / "script", self.node.library)
        (self.procfs / "self/ns").mkdir(parents=True)
        (self.procfs / "self/ns/pid").symlink_to(HOST_PIDS)
        self.python = directory / "python"
        self.python.write_text(f"#!/bin/sh\nexec {sys.executable} {directory}/program.py\n")
        self.python.chmod(0o755)
        self.interpreter(f"MORE = {{}}\n{MEASURES}")

    def interpreter(self, program: str) -> None:
        """Have the children run that program instead of a canary."""
        (self.directory / "program.py").write_text(PREAMBLE + program)

    def running(self, more: str = "", **extra: str) -> Running:
        config = CONFIG.format(python=self.python) + more
        return self.node.running("--path.procfs", str(self.procfs), config=config, **extra)

    def canaries(self, running: Running) -> list[int]:
        """Return the canaries that run."""
        return [pid for pid, line in descendants(running.process.pid) if "program.py" in line]

    def begun(self, running: Running, *words: str) -> subprocess.Popen[str]:
        """Start a command beside the daemon."""
        paths = {"runtime": running.runtime, "sysfs": self.node.sysfs, "procfs": self.procfs}
        places = [f"--path.{name}={path}" for name, path in paths.items()]
        return subprocess.Popen(
            [sys.executable, "-m", "gpuwatch", *words, *places],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def command(self, running: Running, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside the daemon."""
        with self.begun(running, *words) as process:
            output, errors = process.communicate(timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def results(running: Running) -> list[str]:
    """Return the results of the readings that are shown, in order of time."""
    _, body = running.get("/api/v1/canaries")
    courses = json.loads(body)["canaries"]
    found = [reading for course in courses for reading in course["readings"]]
    return [one["result"] for one in sorted(found, key=lambda one: one["time"])]


def test_an_idle_gpu_gets_its_canaries(host):
    """Nobody asks for them: readings come until somebody uses the GPU."""
    host.interpreter(
        "print(os.environ.get('NCCL_NVLS_ENABLE'), file=open(__file__ + '.seen', 'a'))\n"
        f"MORE = {{}}\n{MEASURES}"
    )
    with host.running(NCCL_NVLS_ENABLE="0") as running:
        wait_for(lambda: results(running), 120)
        assert set(results(running)) == {"ok"}
        assert "canaries" not in running.log()
        seen = (host.directory / "program.py.seen").read_text()
        assert set(seen.split()) == {"0"}  # what a site sets for NCCL reaches its canaries
        host.interpreter(LASTS)
        wait_for(lambda: host.canaries(running), 120)
        host.node.now(PROCESSES, val=PROCESS)
        wait_for(lambda: "aborted" in results(running))
        wait_for(lambda: not host.canaries(running))
        wait_for(lambda: not session_runs(running.runtime / LOCK))


def test_pause_ends_what_runs(host):
    """No canary runs when the command returns, nor later, nor by hand; then they go on."""
    host.interpreter(LASTS)
    with host.running() as running:
        (canary,) = wait_for(lambda: host.canaries(running), 120)
        told = host.command(running, "pause", "canaries", "--for", "10m")
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout.startswith("canaries: paused until `gpuwatch resume canaries` or for 6")
        assert not Path(f"/proc/{canary}").exists()
        wait_for(lambda: running.value("gpuwatch_released", 'what="canaries"') == 1)
        told = host.command(running, "canary", "run", "matmul", f"--canary.python={host.python}")
        assert told.returncode == 3
        assert "canaries are paused: gpuwatch resume canaries" in told.stdout
        daemon = running.child("daemon")
        os.kill(daemon, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{daemon}").exists())
        wait_for(running.is_ready)
        assert running.value("gpuwatch_released", 'what="canaries"') == 1  # the lease outlives it
        told = host.command(running, "resume", "canaries")
        assert (told.returncode, told.stdout) == (0, "canaries: run again\n")
        wait_for(lambda: host.canaries(running), 120)
        told = host.command(running, "release", "gpus")  # they hold the GPUs, too
        assert told.returncode == 0
        assert not host.canaries(running)
        assert not host.node.users()


def test_nothing_is_left_of_a_daemon_that_was_killed(host):
    """Its canary ends with it, and the next daemon runs its own, which ends with the supervisor."""
    host.interpreter(LASTS)
    with host.running() as running:
        (canary,) = wait_for(lambda: host.canaries(running), 120)
        os.kill(running.child("daemon"), signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{canary}").exists())
        (other,) = wait_for(lambda: host.canaries(running), 120)
        running.process.kill()
        running.process.wait()
        wait_for(lambda: not Path(f"/proc/{other}").exists())
    shutil.rmtree(ring_directory(running.runtime))


def test_pause_ends_a_user_s_canaries(host):
    """Those that run in a terminal end as well, and say why; two at a time are refused."""
    words = ["canary", "run", "matmul", f"--config={host.directory}/config.toml", "--json"]
    with host.running("enabled = false\n") as running:
        assert host.command(running, *words).returncode == 0
        wait_for(lambda: results(running) == ["ok"])  # the daemon was told
        host.interpreter(LASTS)
        assert "canaries: the daemon runs none: [canary] enabled is false" in running.log()
        with host.begun(running, *words) as user:
            wait_for(lambda: [1 for _, line in descendants(user.pid) if "program.py" in line])
            second = host.command(running, *words)
            assert second.returncode == 3
            assert json.loads(second.stdout)[0]["detail"].startswith("canaries run already")
            assert host.command(running, "pause", "canaries").returncode == 0
            output, _ = user.communicate(timeout=60)
        (result,) = json.loads(output)
        assert (result["result"], result["detail"][:19]) == ("aborted", "canaries are paused")


def test_a_process_that_outlives_its_kill_stops_all(host):
    """It is an alert, and nothing runs until it is gone: the driver is not well."""
    stray = (
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    open('/proc/self/comm', 'w').write('gpuwatch-canary')\n"
        "    os.closerange(0, 3)\n"
        "    time.sleep(150)\n"
        "time.sleep(0.1)\n"
    )
    host.interpreter(f"MORE = {{}}\n{stray}{MEASURES}")
    with host.running() as running:
        wait_for(lambda: running.alert("canary_stuck"), 120)
        (line,) = [line for line in running.log().splitlines() if "does not end when" in line]
        left = int(line.partition("process ")[2].split()[0])
        count = len(results(running))
        host.interpreter(f"MORE = {{}}\n{MEASURES}")
        closed = running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] > closed + 6)
        assert len(results(running)) == count
        os.kill(left, signal.SIGKILL)
        wait_for(lambda: "is gone" in running.log())
        wait_for(lambda: len(results(running)) > count, 90)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, ""),
        ({"source": {"kind": "simulated"}}, "made up"),
        ({"canary": {"enabled": False}}, "[canary] enabled is false"),
        ({"canary": {"run": []}}, "[canary] run names none"),
        ({"canary": {"python": ""}}, "no torch: pip install 'gpuwatch[torch]'"),
        ({"canary": {"python": "/nowhere"}}, "[canary] python /nowhere: not an"),
        ({"paths": {"procfs": "/nowhere"}}, "--pid=host"),
    ],
)
def test_where_the_daemon_runs_none(tmp_path, monkeypatch, changes, part):
    """It is told why, with what to do; a host that lacks nothing has them."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to(HOST_PIDS)
    config = {
        "source": {"kind": "nvml"},
        "canary": {"enabled": True, "python": sys.executable, "run": ["matmul"]},
        "paths": {"procfs": str(tmp_path)},
    }
    for section, keys in changes.items():
        config[section] |= keys
    assert part in hindrance(config)
    assert bool(hindrance(config)) == bool(part)


def test_check_says_whether_there_are_canaries(tmp_path):
    """An interpreter that is named and lacks torch is a warning; to have none is no fault."""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to(HOST_PIDS)
    python = tmp_path / "python"
    settings = {"enabled": True, "python": str(python), "run": ["matmul", "pcie"]}
    config = {"source": {"kind": "nvml"}, "canary": settings, "paths": {"procfs": str(tmp_path)}}
    assert canaries(config)[0] == WARN
    for status, code, text in ((0, PASS, "matmul, pcie, on GPUs"), (1, WARN, "no torch")):
        python.write_text(f"#!/bin/sh\nexit {status}\n")
        python.chmod(0o755)
        told = canaries(config)
        assert told[0] == code
        assert text in told[1]
    assert canaries(config | {"canary": settings | {"enabled": False}})[0] == PASS

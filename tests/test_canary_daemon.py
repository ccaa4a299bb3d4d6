"""The daemon runs canaries by itself: on idle GPUs, one session at a time, and never in the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
LONG = 120.0  # seconds; a busy machine takes that to start some interpreters
SEEN = """
told = [os.environ["NCCL_NVLS_ENABLE"], os.environ["SITE"]]
open(__file__ + ".seen", "w").write(json.dumps(told))
"""
# Leaves a process behind that is in no group of ours any more, and has our files closed.
STRAY = """
if not os.fork():
    os.setsid()
    open("/proc/self/comm", "w").write("gpuwatch-canary")
    os.closerange(0, 3)
    open(__file__ + ".stray", "w").write(str(os.getpid()))
    time.sleep(150)
"""
# One behind which another comes whenever it is killed, as one in a driver call would stay.
REBORN = """
if not os.fork():
    os.setsid()
    os.closerange(0, 3)
    open(__file__ + ".stray", "w").write(str(os.getpid()))
    while True:
        if not os.fork():
            prctl = __import__("ctypes").CDLL(None).prctl
            prctl(1, 9)  # PR_SET_PDEATHSIG
            open("/proc/self/comm", "w").write("gpuwatch-canary")
            time.sleep(150)
        os.wait()
"""
HANGS = "say(phase='measure', rank=0)\nhang()\n"


class Host:
    """Some idle GPUs, a daemon that watches them, and an interpreter that pretends."""

    def __init__(self, directory: Path, gpus: int = 1) -> None:
        self.directory = directory
        self.node = Node(directory, gpus)
        self.node.idle()
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
            output, errors = process.communicate(timeout=LONG)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)


def results(running: Running) -> list[str]:
    """Return the results of the readings that are shown, in order of time."""
    _, body = running.get("/api/v1/canaries")
    courses = json.loads(body)["canaries"]
    found = [reading for course in courses for reading in course["readings"]]
    return [one["result"] for one in sorted(found, key=lambda one: one["time"])]


def idle_gpus_get_them(host: Host) -> None:
    """Nobody asks for them; they end when somebody uses the GPU, is told to or turns them off."""
    host.interpreter(f"{STRAY}{SEEN}MORE = {{}}\n{MEASURES}")
    with host.running(NCCL_NVLS_ENABLE="0", SITE="$(reboot)\n%n\udcff") as running:
        wait_for(lambda: results(running), LONG)
        seen = json.loads((host.directory / "program.py.seen").read_text())
        assert seen == ["0", "$(reboot)\n%n\udcff"]  # what a site sets reaches its canaries
        host.interpreter(LASTS)
        wait_for(lambda: host.canaries(running), LONG)
        left = int((host.directory / "program.py.stray").read_text())
        assert not Path(f"/proc/{left}").exists()
        assert f"process {left} outlived its canary: killed" in running.log()
        assert running.alert("canary_stuck") is None
        host.node.now(PROCESSES, val=PROCESS)
        wait_for(lambda: "aborted" in results(running), LONG)
        wait_for(lambda: not host.canaries(running) and not session_runs(running.runtime / LOCK))
        assert set(results(running)) == {"ok", "aborted"}
        host.node.now(PROCESSES, val=[])
        (canary,) = wait_for(lambda: host.canaries(running), LONG)
        config = (host.directory / "config.toml").read_text()
        (host.directory / "config.toml").write_text(f"{config}enabled = false\n")
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "the daemon runs none: [canary] enabled is false" in running.log(), LONG)
        wait_for(lambda: not Path(f"/proc/{canary}").exists(), LONG)
        wait_for(running.is_ready, LONG)
        pause_ends_a_user_s(host, running)


def pause_ends_a_user_s(host: Host, running: Running) -> None:
    """Those that run in a terminal end as well, and say why; two at a time are refused."""
    words = ["canary", "run", "matmul", f"--config={host.directory}/config.toml", "--json"]
    with host.begun(running, *words) as user:
        wait_for(lambda: [1 for _, line in descendants(user.pid) if "program.py" in line], LONG)
        second = host.command(running, *words)
        assert second.returncode == 3
        assert json.loads(second.stdout)[0]["detail"].startswith("canaries run already")
        assert host.command(running, "pause", "canaries").returncode == 0
        output, _ = user.communicate(timeout=LONG)
    (result,) = json.loads(output)
    assert (result["result"], result["detail"][:19]) == ("aborted", "canaries are paused")
    assert "canaries are paused: gpuwatch resume" in host.command(running, *words).stdout
    assert host.command(running, "resume", "canaries").returncode == 0
    a_user_s_are_kept(host, running)


def a_user_s_are_kept(host: Host, running: Running) -> None:
    """They are handed over, also if the rest is interrupted; not those of another interpreter."""
    host.interpreter(f"MORE = {{}}\nif settings['canary'] == 'memory': hang()\n{MEASURES}")
    other = shutil.copy(host.python, host.directory / "other")
    before = len(results(running))
    words = ["canary", "run", "matmul", "--json"]
    told = host.command(running, *words, f"--canary.python={other}")
    assert told.returncode == 0
    assert f"its canaries run with python {host.python}, these with {other}" in told.stderr
    assert len(results(running)) == before
    words = ["canary", "run", "matmul", "memory", f"--config={host.directory}/config.toml"]
    with host.begun(running, *words) as user:
        assert user.stdout is not None
        lines = [user.stdout.readline(), user.stdout.readline()]  # the header, the first result
        assert "matmul" in lines[1]
        user.send_signal(signal.SIGINT)
        assert user.wait(LONG) == 130
    wait_for(lambda: len(results(running)) == before + 1)


def pause_outlives_the_daemon_and_they_do_not(host: Host) -> None:
    """No canary runs once the command returns, nor later; none is left of whoever was killed."""
    host.interpreter(LASTS)
    with host.running() as running:
        (canary,) = wait_for(lambda: host.canaries(running), LONG)
        daemon = running.child("daemon")
        os.kill(daemon, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{canary}").exists(), LONG)
        (canary,) = wait_for(lambda: host.canaries(running), LONG)
        told = host.command(running, "pause", "canaries", "--for", "10m")
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout == "canaries: paused until `gpuwatch resume canaries` or for 600 s\n"
        assert not Path(f"/proc/{canary}").exists()
        daemon = running.child("daemon")
        os.kill(daemon, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{daemon}").exists(), LONG)
        wait_for(running.is_ready, LONG)
        wait_for(lambda: running.value("gpuwatch_released", 'what="canaries"') == 1, LONG)
        told = host.command(running, "resume", "canaries")
        assert (told.returncode, told.stdout) == (0, "canaries: run again\n")
        wait_for(lambda: host.canaries(running), LONG)
        told = host.command(running, "release", "gpus")  # they hold the GPUs, too
        assert told.returncode == 0
        assert not host.canaries(running)
        assert not host.node.users()


def what_outlives_its_kill_stops_all(host: Host) -> None:
    """Alert, and run nothing until it is gone: the driver is not well."""
    host.interpreter(f"{REBORN}MORE = {{}}\n{MEASURES}")
    with host.running() as running:
        wait_for(lambda: running.alert("canary_stuck"), LONG)
        assert "does not end when killed" in running.log()
        count = len(results(running))
        host.interpreter(LASTS)
        closed = running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] > closed + 6)
        assert len(results(running)) == count
        os.kill(int((host.directory / "program.py.stray").read_text()), signal.SIGKILL)
        wait_for(lambda: "is gone" in running.log(), LONG)
        (canary,) = wait_for(lambda: host.canaries(running), LONG)
        running.process.kill()
        running.process.wait()
        wait_for(lambda: not Path(f"/proc/{canary}").exists(), LONG)
    shutil.rmtree(ring_directory(running.runtime))


def a_hung_worker_is_killed_and_told(host: Host) -> None:
    """Its run has failed, with the phase; all else goes on, and the next may run."""
    host.interpreter(HANGS)
    with host.running() as running:
        wait_for(lambda: running.events("canary_failed"), LONG)
        (event, *_) = running.events("canary_failed")
        assert "hangs: 1" in event["detail"]
        assert "in phase measure" in event["detail"]
        wait_for(lambda: set(results(running)) == {"failed"}, LONG)
        assert running.alert("canary_stuck") is None
        failed = ("gpuwatch_canary_runs_total", 'result="failed"', '"matmul"')
        wait_for(lambda: running.value(*failed) == 1, LONG)
        assert "outlived" not in running.log()


STORIES = (
    idle_gpus_get_them,
    pause_outlives_the_daemon_and_they_do_not,
    what_outlives_its_kill_stops_all,
    a_hung_worker_is_killed_and_told,
)


def test_stories(tmp_path):
    """Each has a daemon of its own; they go on at the same time, for they mostly wait."""
    with ThreadPoolExecutor() as pool:
        ends = []
        for number, story in enumerate(STORIES):
            (tmp_path / str(number)).mkdir()
            ends.append(pool.submit(story, Host(tmp_path / str(number))))
    if faults := [fault for end in ends if (fault := end.exception())]:
        raise BaseExceptionGroup("of daemons with canaries", faults)


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
    package, version = tmp_path / "torch/__init__.py", tmp_path / "torch/version.py"
    package.parent.mkdir()
    for status, cuda, code, text in (
        (0, "'13.0'", PASS, "matmul, pcie, on GPUs"),
        (0, "None", WARN, "torch is built without CUDA"),
        (1, "'13.0'", WARN, "no torch"),
    ):
        version.write_text(f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n")
        python.write_text(f"#!/bin/sh\necho {package}\nexit {status}\n")
        python.chmod(0o755)
        told = canaries(config)
        assert told[0] == code
        assert text in told[1]
    assert canaries(config | {"canary": settings | {"enabled": False}})[0] == PASS

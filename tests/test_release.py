"""Leaving GPUs to another tool: nobody holds them, nothing is judged, and they come back."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_nvml import LIBRARY, build
from node import QUIET, Manager, Node, quiet
from running import Running, descendants, wait_for
from test_failures import gone, killed_later, restarts, state_of  # noqa: F401 - a fixture

from gpuwatch import control
from gpuwatch.cli import main
from gpuwatch.clock import SECOND_NS, read_clocks
from gpuwatch.control import request
from gpuwatch.errors import ControlError
from gpuwatch.lease import HOLDERS, Leases
from gpuwatch.store import LeaseRow, Store
from gpuwatch.tmpfs import ring_directory

UP = ("gpuwatch_gpu_up", 'gpu="0"')
RELEASED = ("gpuwatch_released", 'what="gpus"')
BOTH = quiet("nvml_state", "nvml_counters", "gpm")  # all samplers that hold GPUs
PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"
ASK = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect(sys.argv[2])
for message in sys.argv[3:]:
    client.send(message.encode())
    print(client.recv(1 << 20).decode(), flush=True)
"""
SAMPLERS = ("gpuwatch.sampler state", "gpuwatch.sampler counters")


def command(running: Running, *words: str) -> subprocess.CompletedProcess[str]:
    """Run gpuwatch beside the daemon, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "gpuwatch", *words, "--path.runtime", str(running.runtime)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def users(library: Path) -> Iterator[int]:
    """Yield each process that has a library loaded, also one that was replaced meanwhile."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(library) in maps.read_text():
                yield int(maps.parent.name)
        except OSError:
            continue


def samplers(running: Running) -> list[str]:
    """Return the running children that would touch a GPU."""
    commands = [command for _, command in descendants(running.process.pid)]
    return [command for command in commands if any(name in command for name in SAMPLERS)]


def test_a_driver_of_another_version_is_put_in_place(tmp_path: Path) -> None:
    """No process holds the released GPUs, so the driver can be replaced; the new one is taken."""
    node = Node(tmp_path, 2)
    library = node.library / LIBRARY
    manager = Manager(tmp_path)
    environment = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "1000000"}
    with manager, node.running(config=BOTH, **environment) as running:
        wait_for(lambda: running.value(*UP) == 1)
        assert running.value(*RELEASED) == 0
        assert list(users(library))
        answer = command(running, "release", "gpus", "--for", "10m")
        assert (answer.returncode, answer.stderr) == (0, "")
        assert "gpus: released" in answer.stdout
        assert not list(users(library))
        assert not node.users()
        wait_for(lambda: running.value(*RELEASED) == 1)
        page = running.scrape()
        shown = {name.partition("{")[0] for name in page if name.startswith("gpuwatch_gpu_")}
        assert shown <= {"gpuwatch_gpu_xid_errors_total", "gpuwatch_gpu_xid_last_timestamp_seconds"}
        assert "gpuwatch_nvml_up" not in page
        assert running.value("gpuwatch_source_up", 'source="nvml_state"') is None
        assert running.status()["sources"]["nvml_state"]["state"] == "released"
        assert state_of(running)["phase"] == "released"

        library.unlink()  # as a package upgrade does
        build(node.library, "-DANOTHER_VERSION")
        node.now("driver", val="999.1")  # whoever had kept the old library would not fit it
        fed = len(manager.times("WATCHDOG=1"))
        wait_for(lambda: len(manager.times("WATCHDOG=1")) > fed + 4)
        assert not samplers(running)
        assert not list(users(library))

        answer = command(running, "resume", "gpus")
        assert (answer.returncode, answer.stdout) == (0, "gpus: watched again\n")
        wait_for(lambda: running.value("gpuwatch_gpu_info", 'gpu="0"', 'driver="999.1"') == 1)
        wait_for(lambda: running.value(*UP) == 1)
        (state,) = [pid for pid in users(library) if pid == running.child("state")]
        assert f"{library} (deleted)" not in Path(f"/proc/{state}/maps").read_text()
        assert restarts(running, "state") == restarts(running, "daemon") == 0
        assert [event["name"] for event in running.events("released")] == ["released"]
        assert command(running, "resume", "gpus").stdout == "gpus: not released\n"
        rings = ring_directory(running.runtime)
        assert running.stop() == 0
        assert not list(rings.glob("*.ring"))


def test_what_is_released_is_not_judged(tmp_path: Path) -> None:
    """An alert that was pending is dropped, none comes up, and a lost GPU is lost anew after."""
    node = Node(tmp_path, 2)
    quick = "[rules.source_failing]\nfor_seconds = 2\n[rules.gpu_missing]\nfor_seconds = 2\n"
    with node.running(config=BOTH + quick) as running:
        wait_for(lambda: running.value(*UP) == 1)
        node.now("any", "GPU_IS_LOST", dev=1)
        wait_for(lambda: running.alert("gpu_lost", "1"))
        request(running.runtime / "control.sock", release(60), 20)
        wait_for(lambda: not running.status()["alerts"])
        closed = running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] >= closed + 16)
        assert not running.status()["alerts"]
        request(running.runtime / "control.sock", {"command": "resume", "what": "gpus"}, 20)
        resumed = read_clocks().monotonic_ns
        alert = wait_for(lambda: running.alert("gpu_lost", "1"))
        assert alert["since_ns"] > resumed - SECOND_NS
        wait_for(lambda: running.value(*UP) == 1)


def release(seconds: float, what: str = "gpus") -> dict[str, object]:
    return {"command": "release", "what": what, "seconds": seconds}


def test_a_lease_ends_by_itself(tmp_path: Path) -> None:
    """GPUs that nobody takes back are watched again when the time is over."""
    node = Node(tmp_path, 1)
    with node.running(config=BOTH) as running:
        wait_for(lambda: running.value(*UP) == 1)
        request(running.runtime / "control.sock", release(2), 20)
        wait_for(lambda: running.value(*RELEASED) == 1)
        wait_for(lambda: running.value(*UP) == 1)
        assert running.value(*RELEASED) == 0
        assert "time is over" in running.events("resumed")[0]["detail"]


def test_a_lease_survives_daemon_and_supervisor(tmp_path: Path) -> None:
    """Whoever is started anew while GPUs are released leaves them alone from the start."""
    node = Node(tmp_path, 1)
    with node.running(config=BOTH) as running:
        wait_for(lambda: running.value(*UP) == 1)
        request(running.runtime / "control.sock", release(600), 20)
        generation = state_of(running)["generation"]
        daemon = running.child("daemon")
        os.kill(daemon, signal.SIGKILL)
        wait_for(lambda: gone(daemon))
        wait_for(running.is_ready)
        assert running.value(*RELEASED) == 1
        wait_for(lambda: "state" in phases(running))
        assert state_of(running)["generation"] == generation
        running.process.kill()
        running.process.wait()
    with node.running(config=BOTH) as running:
        wait_for(lambda: running.value(*RELEASED) == 1)
        wait_for(lambda: "state" in phases(running))
        state = state_of(running)
        assert (state["phase"], state["generation"]) == ("released", 0)
        assert not samplers(running)
        assert running.value(*UP) is None
        request(running.runtime / "control.sock", {"command": "resume", "what": "gpus"}, 20)
        wait_for(lambda: running.value(*UP) == 1)


def test_a_collector_switched_on_leaves_released_gpus_alone(tmp_path: Path) -> None:
    """A reload that adds a sampler does not touch what was released before."""
    node = Node(tmp_path, 1)
    with node.running(config=QUIET) as running:
        wait_for(lambda: running.value(*UP) == 1)
        request(running.runtime / "control.sock", release(600), 20)
        running.config.write_text(BOTH)
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "config reloaded" in running.log())
        wait_for(lambda: running.is_ready() and "counters" in phases(running))
        assert phases(running)["counters"] == phases(running)["state"] == "released"
        assert not samplers(running)


def test_a_lease_may_be_ended_without_its_sampler(tmp_path: Path) -> None:
    """Counters that were turned off while they were released are not so for the rest of it."""
    with Running(tmp_path, "--source", "simulated", config=quiet("nvml_state", "pm")) as running:
        path = running.runtime / "control.sock"
        wait_for(lambda: "pm" in phases(running))
        request(path, release(600, "counters"), 20)
        running.config.write_text(QUIET)
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "state" in phases(running) and "pm" not in phases(running))
        assert "counters: released for another 5" in running.log()
        resume = {"command": "resume", "what": "counters"}
        assert request(path, resume, 20)["was_released"]
        with pytest.raises(ControlError, match="counters: no sampler"):
            request(path, resume, 20)


def test_a_lease_that_ends_at_once_is_no_crash(tmp_path: Path) -> None:
    """Who resumes before the sampler has ended waits for the next one, and nothing has failed."""
    with Running(tmp_path, "--source", "simulated", config=quiet("nvml_state", "pm")) as running:
        path = running.runtime / "control.sock"
        wait_for(lambda: "pm" in phases(running))
        before = running.child("pm")
        os.kill(before, signal.SIGSTOP)  # so that it cannot end before
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))
            client.send(json.dumps(release(600, "counters")).encode())
            client.send(json.dumps({"command": "resume", "what": "counters"}).encode())
            client.settimeout(20)
            answers = [client.recv(9999)]
            os.kill(before, signal.SIGCONT)
            answers.append(client.recv(9999))
            assert not [one for one in answers if b"error" in one]
        wait_for(lambda: running.child("pm") != before)
        wait_for(lambda: running.value("gpuwatch_source_up", 'source="pm"') == 1)
        assert running.value("gpuwatch_child_restarts_total", 'duty="pm"') == 0
        assert not [one for one in ("child ended", "tick failed") if one in running.log()]


def phases(running: Running) -> dict[str, str]:
    """Return how each child is, {} while the daemon is started anew."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return {one["duty"]: one.get("phase", "") for one in running.status()["children"]}
    return {}


def test_a_stuck_process_is_named(tmp_path: Path, killed_later: list[int]) -> None:  # noqa: F811
    """A child inside a driver call cannot let go: the answer says so; the lease holds anyhow."""
    node = Node(tmp_path, 2)
    with node.running(config=BOTH) as running:
        wait_for(lambda: running.value(*UP) == 1)
        node.now("any", dev=1, takes_ms=-1)
        wait_for(lambda: running.value("gpuwatch_child_stuck", 'duty="state"') == 1)
        killed_later += [pid for pid, _ in descendants(running.process.pid)]
        answer = command(running, "release", "gpus")
        assert answer.returncode == 1
        holders = [line for line in answer.stdout.splitlines() if "still holds them" in line]
        assert any("0000:43:00.0" in line for line in holders)
        held = {int(line.split()[2]) for line in holders}
        assert held == set(users(node.library / LIBRARY))
        wait_for(lambda: running.value(*RELEASED) == 1)  # the next page says it


def test_what_cannot_be_released(tmp_path: Path) -> None:
    """What no sampler holds, or for no time, is refused in one line that says why."""
    with Running(tmp_path, "--source", "replay:bundled", config=QUIET) as running:
        answer = command(running, "release", "gpus")
        assert answer.returncode == 3
        assert answer.stderr == (
            "gpus: no sampler of this gpuwatch holds them: there is nothing to release\n"
        )
        path = running.runtime / "control.sock"
        with pytest.raises(ControlError, match="not one of gpus, counters, canaries"):
            request(path, {"command": "release", "what": "disks", "seconds": 1}, 10)


def test_only_samplers_that_exist_and_times_that_make_sense(tmp_path: Path) -> None:
    """Counters are refused where no sampler holds them, and so is a lease of no or endless time."""
    with Running(tmp_path, "--source", "simulated", config=QUIET) as running:
        path = running.runtime / "control.sock"
        if not set(HOLDERS["counters"]) & set(phases(running)):
            with pytest.raises(ControlError, match="counters: no sampler of this gpuwatch holds"):
                request(path, {"command": "release", "what": "counters", "seconds": 60}, 10)
        for seconds in (0, -1, 1e9):
            with pytest.raises(ControlError, match="more than 0, at most 604800"):
                request(path, release(seconds), 10)
        assert json.loads(json.dumps(request(path, release(60), 20)))["holding"] == []
        wait_for(lambda: running.value(*UP) is None)
        request(path, {"command": "resume", "what": "gpus"}, 10)
        wait_for(lambda: running.value(*UP) == 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_who_works_on_a_gpu_may_have_its_counters(tmp_path: Path) -> None:
    """A user with a process on a GPU may release hardware counters and no more; others may not."""
    node = Node(tmp_path, 1)
    with node.running(config=quiet("nvml_counters", "pm")) as running:
        path = running.runtime / "control.sock"
        for directory in path.parents:
            if directory.stat().st_mode & 0o001 == 0:
                directory.chmod(directory.stat().st_mode | 0o001)
        asks = [json.dumps(release(60, what)) for what in ("counters", "gpus")]

        def answers(uid: int) -> list[str]:
            words = [sys.executable, "-c", ASK, str(uid), str(path), *asks]
            asked = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            return [json.loads(line).get("error", "") for line in asked.stdout.splitlines()]

        refused = "only root may do that: ask with sudo"
        with subprocess.Popen(["sleep", "300"], user=12345) as job:
            try:
                node.now(PROCESSES, val=[[job.pid, 2**30, 2**32 - 1, 2**32 - 1]])
                wait_for(lambda: answers(12345)[0] != refused)
                assert answers(12345)[1] == refused
                assert answers(12346) == [refused, refused]
            finally:
                job.kill()
        wait_for(lambda: answers(12345)[0] == refused)


def test_a_lease_that_cannot_be_kept_says_so(tmp_path: Path) -> None:
    """Without a place for its state gpuwatch releases GPUs all the same, but not over a restart."""
    (tmp_path / "state").touch()
    with Running(tmp_path, "--source", "simulated", config=QUIET) as running:
        wait_for(lambda: running.value(*UP) == 1)
        answer = command(running, "release", "gpus")
        assert answer.returncode == 0
        assert answer.stderr.startswith("a restart of gpuwatch would end this: ")
        assert str(tmp_path / "state") in answer.stderr


def test_leases_of_another_boot_or_in_the_past_are_over() -> None:
    """Only what was released in this boot, and until later, is still released."""
    store = Store(None)
    now = read_clocks().boottime_ns
    later = now + 600 * SECOND_NS
    store.save_leases([LeaseRow("gpus", "other boot", later), LeaseRow("counters", "this", now)])
    leases = Leases(store, "this")
    assert not any(leases.released.values())
    assert store.leases == ()
    leases.grant("gpus", 600)
    leases.grant("gpus", 60)
    assert leases.duties == set(HOLDERS["gpus"])
    assert Leases(store, "this").released["gpus"]
    assert not Leases(store, "next boot").released["gpus"]


@pytest.mark.parametrize(
    ("words", "holder", "said"),
    [
        (("release", "gpus"), {"pid": 7, "call": "power"}, "process 7 still holds them, in a dr"),
        (("release", "gpus"), {"pid": 7, "call": "a canary"}, "process 7 still runs: end verify"),
        (("pause", "canaries"), {"pid": 0, "call": "a canary"}, "a session still runs: end verify"),
    ],
)
def test_who_does_not_let_go_is_named(
    words: tuple[str, str],
    holder: dict[str, object],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A driver call that hangs, a canary, or a session between two: each by its own words."""
    answer = {"fault": "", "holding": [holder]}
    monkeypatch.setattr(control, "request", lambda *_: answer)
    assert main([*words, "--path.runtime=/nowhere"]) == 1
    assert capsys.readouterr().out.startswith(f"{words[1]}: {said}")

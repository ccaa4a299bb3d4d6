"""Real processes that are killed, hang, crash or find no room: what goes on, and what is told."""

import contextlib
import http.client
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node import QUIET, Manager, Node, quiet, row_times, widest_gap
from running import Running, descendants, free_port, wait_for

from gpuwatch.tmpfs import ring_directory

SIMULATED = QUIET + "[simulated]\ngpus = 3\n"
HANGING = QUIET + "init_deadline_seconds = 2\n"


@pytest.fixture
def killed_later() -> Iterator[list[int]]:
    """Collect process ids that a test may leave behind on purpose."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def gone(pid: int) -> bool:
    """Tell whether a process has ended: a zombie has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def rising(page: dict[str, float]) -> dict[str, float]:
    """Return the series that may not fall while a daemon lives."""
    families = ("_total", "_count", "_bucket")
    return {name: value for name, value in page.items() if name.split("{")[0].endswith(families)}


def samples(running: Running) -> float:
    """Tell how often the state sampler was read, as the daemon counted."""
    return running.value("gpuwatch_source_read_seconds_count", 'source="nvml_state"') or 0.0


def restarts(running: Running, duty: str) -> float:
    """Tell how often a duty was started again."""
    return running.value("gpuwatch_child_restarts_total", f'duty="{duty}"') or 0.0


def test_any_child_may_be_killed(tmp_path: Path) -> None:
    """Whatever child is killed, it is started again and counted; the others and totals go on."""
    chance = random.Random(7)
    victims = ["state", "daemon", "state", "daemon", "state"]
    chance.shuffle(victims)
    killed = {"state": 0, "daemon": 0}
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: samples(running) > 0)
        for victim in victims:
            other = {"state": "daemon", "daemon": "state"}[victim]
            pids = {duty: running.child(duty) for duty in killed}
            before = running.scrape()
            end = time.monotonic() + chance.random()
            wait_for(lambda end=end: time.monotonic() > end)
            os.kill(pids[victim], signal.SIGKILL)
            killed[victim] += 1
            wait_for(lambda pid=pids[victim]: gone(pid))
            wait_for(running.is_ready)
            wait_for(lambda victim=victim: restarts(running, victim) == killed[victim], what=victim)
            assert running.child(other) == pids[other]
            after = running.scrape()
            if victim == "state":
                fallen = {n: v for n, v in rising(before).items() if after.get(n, -1.0) < v}
                assert not fallen
            count = samples(running)
            wait_for(lambda count=count: samples(running) > count, what="new samples")
            wait_for(lambda: running.value("gpuwatch_source_up", 'source="nvml_state"') == 1)
        assert restarts(running, "daemon") == killed["daemon"]
        assert not [pid for pid, _ in descendants(running.process.pid) if gone(pid)]
        assert len(list(running.runtime.glob("state.*.sock"))) == 1  # of none that was killed
        assert running.stop() == 0


def test_supervisor_killed(tmp_path: Path) -> None:
    """With the supervisor all its children end, and another one starts in its place."""
    port = free_port()
    with Running(tmp_path, "--source", "simulated", config=SIMULATED, port=port) as running:
        wait_for(lambda: samples(running) > 0)
        children = [pid for pid, _ in descendants(running.process.pid)]
        assert len(children) == 2
        running.process.kill()
        wait_for(lambda: all(map(gone, children)), what="children that end")
    with Running(tmp_path, "--source", "simulated", config=SIMULATED, port=port) as running:
        wait_for(lambda: samples(running) > 0)
        assert running.stop() == 0


def watched(manager: Manager, seconds: float) -> dict[str, str]:
    """Return the environment of a service that systemd watches."""
    return {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": str(int(seconds * 1e6))}


def observe_hang(running: Running, manager: Manager, watchdog: float, sick: str) -> None:
    """Check all that holds while a GPU hangs, for three watchdog intervals."""
    wait_for(lambda: running.value("gpuwatch_child_stuck", 'duty="state"') == 1, what="stuck")
    wait_for(lambda: running.value("gpuwatch_gpu_up", f'gpu="{sick}"') == 0, what="gpu_up 0")
    daemon, end = running.child("daemon"), time.monotonic() + 3 * watchdog
    seconds = []
    while time.monotonic() < end:
        start = time.monotonic()
        page = running.scrape()
        seconds.append(time.monotonic() - start)
        up = {n: v for n, v in page.items() if n.startswith("gpuwatch_gpu_up{")}
        assert len(up) == 3
        assert [value for name, value in up.items() if f'gpu="{sick}"' in name] == [0]
        time.sleep(0.02)
    assert sum(up.values()) == 2
    assert statistics.median(seconds) < 0.1
    alert = wait_for(lambda: running.alert("gpu_lost", sick))
    assert alert["state"] == "pending"
    others = [group for group in ("gpu0", "gpu1", "gpu2") if group != f"gpu{sick}"]
    for group in others:
        assert widest_gap(row_times(running, group)) < 9  # 3 s, on a busy machine more
    assert running.child("daemon") == daemon
    assert restarts(running, "daemon") == 0
    assert restarts(running, "state") == 1
    fed = manager.times("WATCHDOG=1")
    assert fed
    assert max(b - a for a, b in itertools.pairwise(fed)) < watchdog
    assert time.monotonic() - fed[-1] < watchdog


def test_simulated_gpu_hangs(tmp_path: Path) -> None:
    """A GPU that hangs is left out after a second and taken in again when its call returns."""
    config = SIMULATED + "fault_after_seconds = 2\nfault_seconds = 6\n"
    with (
        Manager(tmp_path) as manager,
        Running(
            tmp_path,
            *("--source", "simulated:gpu-hang"),
            config=config,
            environment={**os.environ, **watched(manager, 1.0)},
        ) as running,
    ):
        assert manager.times("READY=1")
        observe_hang(running, manager, 1.0, "2")
        wait_for(lambda: running.value("gpuwatch_gpu_up", 'gpu="2"') == 1, what="gpu_up 1")
        wait_for(lambda: running.value("gpuwatch_child_stuck", 'duty="state"') == 0)
        wait_for(lambda: running.alert("gpu_lost") is None)
        assert len(running.events("scenario_fault")) == 1
        assert restarts(running, "daemon") == 0


def test_gpu_answers_after_a_minute(tmp_path: Path, killed_later: list[int]) -> None:
    """A GPU whose calls take 45 s and then time out is left out as one that hangs is."""
    node = Node(tmp_path)
    with (
        Manager(tmp_path) as manager,
        node.running(**watched(manager, 1.0)) as running,
    ):
        wait_for(lambda: running.value("gpuwatch_gpu_up", 'gpu="1"') == 1)
        node.now("any", "TIMEOUT", dev=1, takes_ms=45_000)
        observe_hang(running, manager, 1.0, "1")
        killed_later += [pid for pid, _ in descendants(running.process.pid)]


def test_gpu_hangs(tmp_path: Path, killed_later: list[int]) -> None:
    """A GPU that answers again is found by a probe, even while the first call still hangs."""
    node = Node(tmp_path)
    with (
        Manager(tmp_path) as manager,
        node.running(config=HANGING, **watched(manager, 1.0)) as running,
    ):
        wait_for(lambda: running.value("gpuwatch_gpu_up", 'gpu="1"') == 1)
        daemon = running.child("daemon")
        node.now("any", dev=1, takes_ms=-1)
        observe_hang(running, manager, 1.0, "1")
        killed_later += [pid for pid, _ in descendants(running.process.pid)]
        node.heal()
        wait_for(lambda: running.value("gpuwatch_gpu_up", 'gpu="1"') == 1, 60, "gpu_up 1")
        wait_for(lambda: running.alert("gpu_lost") is None)
        assert running.child("daemon") == daemon
        assert restarts(running, "daemon") == 0
        assert running.stop() == 0


def test_first_call_hangs(tmp_path: Path, killed_later: list[int]) -> None:
    """A driver that does not even start is reported, and the watchdog is fed all the same."""
    node = Node(tmp_path)
    node.now("nvmlInit", takes_ms=-1)
    with (
        Manager(tmp_path) as manager,
        node.running(config=QUIET + "init_deadline_seconds = 4\n", **watched(manager, 1)) as run,
    ):
        wait_for(lambda: run.value("gpuwatch_child_stuck", 'duty="state"') == 1)
        killed_later += [pid for pid, _ in descendants(run.process.pid)]
        (state,) = [child for child in run.status()["children"] if child["duty"] == "state"]
        assert state["reason"] == "the driver does not answer"
        wait_for(lambda: run.value("gpuwatch_nvml_up") == 0)
        fed = manager.times("WATCHDOG=1")
        assert max(b - a for a, b in itertools.pairwise(fed)) < 1
        assert run.log().count("the driver does not answer") == 1


def test_library_crashes(tmp_path: Path) -> None:
    """A crash inside the library ends one child only; it is counted and the child comes back."""
    node = Node(tmp_path)
    with node.running() as running:
        wait_for(lambda: samples(running) > 0)
        daemon = running.child("daemon")
        node.now("nvmlDeviceGetUtilizationRates", "crash", signal="SIGSEGV", dev=0)
        wait_for(lambda: restarts(running, "state") >= 1)
        node.heal()
        wait_for(lambda: running.value("gpuwatch_source_up", 'source="nvml_state"') == 1)
        assert "child ended by SIGSEGV" in running.log()
        assert running.child("daemon") == daemon


def state_of(running: Running) -> dict[str, object]:
    """Return what the supervisor says of the state sampler."""
    return next(child for child in running.status()["children"] if child["duty"] == "state")


def check_recovery(node: Node, running: Running, reason: str, advice: str) -> None:
    """Check a driver that does not work: told once, tried again, and found to work at last."""
    wait_for(lambda: reason in str(state_of(running)["reason"]), what=reason)
    first = int(str(state_of(running)["generation"]))
    wait_for(lambda: int(str(state_of(running)["generation"])) >= first + 1, what="retries")
    wait_for(lambda: running.value("gpuwatch_nvml_up") == 0)
    wait_for(lambda: running.value("gpuwatch_source_up", 'source="nvml_state"') == 0)
    assert running.value("gpuwatch_gpus_pci") == 3
    assert advice in str(state_of(running)["reason"])
    lines = [line for line in running.log().splitlines() if reason in line]
    assert len(lines) == 1, lines
    node.heal()
    wait_for(lambda: running.value("gpuwatch_nvml_up") == 1, what="nvml_up 1")
    assert restarts(running, "state") == 0
    assert restarts(running, "daemon") == 0


def test_driver_of_another_version(tmp_path: Path) -> None:
    """A library that does not match the driver is a state, told once, that ends with a reload."""
    node = Node(tmp_path)
    node.now("nvmlInit", "LIB_RM_VERSION_MISMATCH")
    with node.running() as running:
        check_recovery(node, running, "lib_rm_version_mismatch", "reload the module or reboot")


@pytest.mark.parametrize("ret", ["UNINITIALIZED", "DRIVER_NOT_LOADED"])
def test_driver_unloaded(tmp_path: Path, ret: str) -> None:
    """A driver that is unloaded under way is reported and waited for."""
    node = Node(tmp_path)
    with node.running() as running:
        wait_for(lambda: running.value("gpuwatch_nvml_up") == 1)
        node.script.step(node.script.now_ms(), "nvmlInit", ret)
        node.now("any", ret)
        check_recovery(node, running, ret.lower(), "kernel")


def test_driver_that_works_later(tmp_path: Path) -> None:
    """A node whose driver comes up after the daemon is watched from then on."""
    node = Node(tmp_path)
    node.script.step(0, "nvmlInit", "DRIVER_NOT_LOADED")
    node.script.write(tmp_path / "script")
    with node.running() as running:
        wait_for(lambda: running.value("gpuwatch_nvml_up") == 0)
        node.heal()
        wait_for(lambda: running.value("gpuwatch_nvml_up") == 1)
        assert restarts(running, "state") == 0


def test_no_driver_library(tmp_path: Path) -> None:
    """On a host without the driver the daemon serves, and says what to install."""
    try:
        import ctypes

        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this host has a driver")
    with Running(tmp_path, config=QUIET) as running:
        wait_for(lambda: "install the NVIDIA driver" in str(state_of(running)["reason"]))
        wait_for(lambda: running.value("gpuwatch_nvml_up") == 0)
        assert running.stop() == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 256 KiB in memory."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=755", "none", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> None:
    """Leave no room in a file system."""
    with (path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass


@pytest.mark.parametrize("full", [False, True], ids=["too small", "full"])
def test_no_room_for_rings(tmp_path: Path, small_disk: Path, full: bool) -> None:
    """Without room for rings the endpoint is up and says so; with room, samples come."""
    runtime = tmp_path / "runtime"
    runtime.symlink_to(small_disk)
    if full:
        fill(small_disk)
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: "free some space" in str(state_of(running)["reason"]))
        wait_for(lambda: running.value("gpuwatch_source_up", 'source="nvml_state"') == 0)
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        wait_for(lambda: samples(running) > 0, what="samples")
        assert running.stop() == 0


def test_manifest_that_cannot_be_written(tmp_path: Path) -> None:
    """A sampler that cannot announce its rings gives their space back, says why and goes on."""
    obstacle = tmp_path / "runtime" / "state.json.tmp"
    obstacle.mkdir(parents=True)
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        reason = f"{obstacle}: Is a directory: make it writable"
        wait_for(lambda: state_of(running)["reason"] == reason)
        assert not list(ring_directory(running.runtime).glob("*.ring"))
        obstacle.rmdir()
        wait_for(lambda: samples(running) > 0, what="samples")


def record(running: Running) -> subprocess.CompletedProcess[str]:
    """Ask for a recording as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "gpuwatch", "record", "--path.runtime", str(running.runtime)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_no_room_for_state(tmp_path: Path, small_disk: Path, how: str) -> None:
    """Without a place for its state the daemon goes on; the status and `record` say why."""
    (tmp_path / "state").symlink_to(small_disk)
    if how == "full":
        fill(small_disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: samples(running) > 0)
        wait_for(lambda: running.status()["state"]["fault"])
        answer = record(running)
        assert answer.returncode != 0
        (line,) = answer.stderr.splitlines()
        assert str(tmp_path / "state") in line
        count = samples(running)
        wait_for(lambda: samples(running) > count)
        assert not list(small_disk.rglob("*.gwr*"))


def test_two_daemons(tmp_path: Path) -> None:
    """A second daemon in the same place or on the same port is refused and leaves nothing."""
    places = [tmp_path / name for name in ("one", "two", "three")]
    for place in places:
        place.mkdir()
    config = {"config": SIMULATED, "ready": False}
    with Running(places[0], "--source", "simulated", config=SIMULATED) as running:
        same = ("--source", "simulated", "--path.runtime", str(running.runtime))
        with Running(places[1], *same, **config) as second:
            assert second.process.wait(30) == 64
            (line,) = second.log().splitlines()
            assert str(running.process.pid) in line
            assert str(running.runtime) in line
        with Running(places[2], "--source", "simulated", port=running.port, **config) as third:
            assert third.process.wait(30) == 64
            (line,) = third.log().splitlines()
            assert f"127.0.0.1:{running.port}: Address already in use" in line
            assert {path.name for path in third.runtime.iterdir()} <= {"lock"}
            assert not list(ring_directory(third.runtime).iterdir())
        with Running(places[2], "--source", "simulated", config=SIMULATED) as third:
            wait_for(lambda: samples(third) > 0)
        count = samples(running)
        wait_for(lambda: samples(running) > count)


SHIFTED_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift(void)
{
    long seconds = 0;
    FILE *file = fopen(getenv("CLOCK_SHIFT"), "re");
    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1)
            seconds = 0;
        fclose(file);
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (!result && clock == CLOCK_REALTIME)
        now->tv_sec += shift();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
"""


def test_wall_clock_steps(tmp_path: Path) -> None:
    """A step of the wall clock is an event of its size, and nothing else changes."""
    source, library, shift = (tmp_path / name for name in ("shift.c", "shift.so", "shift"))
    source.write_text(SHIFTED_CLOCK)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    shift.write_text("0")
    changed = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(shift)}
    config = SIMULATED + "fault_after_seconds = 0\n"
    with Running(
        tmp_path,
        *("--source", "simulated:gpu-lost"),
        config=config,
        environment={**os.environ, **changed},
    ) as running:
        wait_for(lambda: running.alert("gpu_lost") and running.alert("gpu_missing"))

        def alerts() -> list[tuple[str, list[str], str, int]]:
            return [
                (alert["rule"], alert["entity"], alert["state"], alert["since_ns"])
                for alert in running.status()["alerts"]
            ]

        before, page = alerts(), running.scrape()
        for seconds, step in ((-3600, -3600), (3600, 7200)):
            known = len(running.events("clock_step"))
            fresh = tmp_path / "fresh"
            fresh.write_text(str(seconds))
            fresh.replace(shift)
            wait_for(lambda known=known: len(running.events("clock_step")) > known)
            event = running.events("clock_step")[-1]
            assert abs(float(event["detail"].split()[0]) - step) < 1
            closed = running.status()["ticks_closed"]
            wait_for(lambda closed=closed: running.status()["ticks_closed"] >= closed + 4)
        assert len(running.events("clock_step")) == 2
        assert alerts() == before
        after = running.scrape()
        assert not {name for name, value in rising(page).items() if after[name] < value}
        durations = {name: v for name, v in after.items() if "_seconds" in name and v < 0}
        assert not durations
        assert restarts(running, "state") == restarts(running, "daemon") == 0


def test_stop_waits_for_a_slow_call(tmp_path: Path) -> None:
    """A stop lets a driver call of some seconds end; the child is not killed inside it."""
    from gpuwatch.ring import RingReader

    node = Node(tmp_path)
    config = QUIET + "read_deadline_seconds = 20\n"
    with node.running(config=config) as running:
        wait_for(lambda: samples(running) > 0)
        (path,) = ring_directory(running.runtime).glob("state.*.gpu0.ring")
        ring, state = RingReader(path), running.child("state")
        node.now("nvmlDeviceGetUtilizationRates", dev=0, takes_ms=3000)
        head = 0

        def stands() -> bool:
            nonlocal head
            before, head = head, ring.head
            time.sleep(0.2)
            return head == before

        wait_for(stands)
        assert running.stop() == 0
        assert gone(state)
        assert ring.head == head + 1  # the call came back and its row was written
        assert not [line for line in running.log().splitlines() if "left" in line]


@pytest.mark.parametrize("known", [True, False], ids=["known", "not yet known"])
def test_stop_with_a_hung_call(tmp_path: Path, killed_later: list[int], known: bool) -> None:
    """A stop does not wait for ever for a call that hangs, and says which child was left."""
    node = Node(tmp_path)
    config = QUIET if known else QUIET + "read_deadline_seconds = 60\n"
    with node.running(config=config) as running:
        wait_for(lambda: samples(running) > 0)
        state = running.child("state")
        killed_later.append(state)
        node.now("any", dev=2, takes_ms=-1)
        if known:
            wait_for(lambda: running.value("gpuwatch_child_stuck", 'duty="state"') == 1)
        else:
            wait_for(lambda: running.value("gpuwatch_source_up", 'source="nvml_state"') == 0)
        assert running.stop(seconds=20) == 0
        (line,) = [line for line in running.log().splitlines() if "is left" in line]
        assert f"child {state} " in line
        assert "0000:52:00.0" in line
        assert not gone(state)


def test_reload(tmp_path: Path) -> None:
    """A reload starts anew what the change is about; a bad config changes nothing."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: samples(running) > 0)

        def pids() -> tuple[int, int]:
            return running.child("daemon"), running.child("state")

        def reload(config: str, told: str) -> None:
            count = running.log().count(told)
            running.config.write_text(config)
            running.process.send_signal(signal.SIGHUP)
            wait_for(lambda: running.log().count(told) > count, what=told)

        daemon, state = pids()
        reload(SIMULATED + "colour = 1\n", "config not reloaded")
        (line,) = [line for line in running.log().splitlines() if "not reloaded" in line]
        assert "colour" in line
        reload(SIMULATED, "nothing changed")
        assert pids() == (daemon, state)

        reload(SIMULATED + "[rules.gpu_lost]\nlimit = 0.5\n", "config reloaded: rules")
        wait_for(lambda: gone(daemon))
        wait_for(running.is_ready)
        assert running.child("state") == state
        daemon = running.child("daemon")

        changed = SIMULATED.replace("period_ms = 5", "period_ms = 8")
        reload(changed + "[rules.gpu_lost]\nlimit = 0.5\n", "config reloaded: state")
        wait_for(lambda: gone(state))
        period = "gpuwatch_source_period_seconds"
        wait_for(lambda: running.value(period, "nvml_state") == 0.008, what="the new period")
        assert running.child("daemon") == daemon
        assert restarts(running, "state") == restarts(running, "daemon") == 0


def test_reload_of_one_duty(tmp_path: Path) -> None:
    """A change of one sampler's section starts that sampler anew, and nobody else."""
    changed, duties = "counters", ("daemon", "state", "counters", "host")
    config = quiet("nvml_state", "nvml_counters", "host") + "[simulated]\ngpus = 2\n"
    with Running(tmp_path, "--source", "simulated", config=config) as running:
        wait_for(lambda: samples(running) > 0)
        before = {duty: running.child(duty) for duty in duties}
        assert "[counters]\nbudget_ratio = 1\n" in config
        running.config.write_text(config.replace("[counters]\nbudget_ratio = 1", "[counters]"))
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: gone(before[changed]))
        assert f'config reloaded: {changed}"' in running.log()
        after = {duty: running.child(duty) for duty in duties}
        assert [duty for duty in duties if after[duty] != before[duty]] == [changed]
        assert restarts(running, changed) == 0


def test_collector_switched_off_and_on(tmp_path: Path) -> None:
    """A reload without a collector ends its sampler and its series; with it they come back."""
    config = quiet("nvml_state", "host")
    off = config.replace("nvml_state = true", "nvml_state = false")
    up = ("gpuwatch_source_up", 'source="nvml_state"')
    with Running(tmp_path, "--source", "simulated", config=config) as running:
        wait_for(lambda: samples(running) > 0)
        state = running.child("state")
        running.config.write_text(off)
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: gone(state))
        # The daemon is started anew for this: it may end while it answers.
        wait_for(lambda: running.is_ready() and answered(lambda: running.value(*up) is None))
        running.config.write_text(config)
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: running.is_ready() and answered(lambda: running.value(*up) == 1))
        assert running.stop() == 0


def answered(condition: Callable[[], bool]) -> bool:
    """Return the condition's value, False while nobody answers."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return condition()
    return False


def test_silent_children(tmp_path: Path) -> None:
    """A child that is stopped outside a call is killed and started again, once."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: samples(running) > 0)
        state, daemon = running.child("state"), running.child("daemon")
        os.kill(state, signal.SIGSTOP)
        os.kill(daemon, signal.SIGSTOP)
        wait_for(lambda: gone(state) and gone(daemon), what="ends")
        wait_for(lambda: running.is_ready() and running.alert("source_failing") is None)
        count = samples(running)
        wait_for(lambda: samples(running) > count)
        assert running.log().count("killing it") == 2


def descriptors(pid: int) -> int:
    """Tell how many files a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident(pid: int) -> int:
    """Tell how much memory a process has of its own, in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


def test_nothing_grows(tmp_path: Path) -> None:
    """Memory and descriptors stay level over many scrapes and restarts of a child."""
    config = SIMULATED + "[ring]\nseconds = 10\n"
    with Running(tmp_path, "--source", "simulated", config=config) as running:
        wait_for(lambda: samples(running) > 0)

        def round_of_scrapes(kills: int) -> tuple[dict[str, int], dict[str, int]]:
            for _ in range(kills):
                state = wait_for(lambda: int(str(state_of(running)["pid"])))
                os.kill(state, signal.SIGKILL)
                wait_for(lambda state=state: runs_another_than(state))
            for _ in range(150):
                running.scrape()
            # The rings of an earlier child are held as long as a ring reaches back.
            rings = 4
            wait_for(lambda: len(list(ring_directory(running.runtime).iterdir())) == rings)
            pids = {name: running.child(name) for name in ("supervisor", "daemon")}
            wait_for(lambda: maps(pids["daemon"]) == rings)
            files = {name: descriptors(pid) for name, pid in pids.items()}
            return files, {name: resident(pid) for name, pid in pids.items()}

        def runs_another_than(pid: int) -> bool:
            child = state_of(running)
            return child["phase"] == "running" and child["pid"] != pid

        def maps(pid: int) -> int:
            return Path(f"/proc/{pid}/maps").read_text().count(".ring")

        files, memory = round_of_scrapes(0)
        files_after, memory_after = round_of_scrapes(2)
        assert all(files_after[name] <= count + 2 for name, count in files.items())
        for name, size in memory.items():
            assert memory_after[name] < 1.25 * size, name

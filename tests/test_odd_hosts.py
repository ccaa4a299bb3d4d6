"""Hosts that lack something, users and strangers that do something odd: the daemon goes on."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from node import QUIET, Node
from running import Running, descendants, free_port, wait_for
from test_failures import SIMULATED, descriptors, gone, record, restarts, samples, state_of

from gpuwatch.tmpfs import ring_directory

SOFT = resource.getrlimit(resource.RLIMIT_NOFILE)


def validations(pid: int) -> list[int]:
    """Return the processes that check a config for a supervisor, zombies included."""
    known = ("gpuwatch.daemon", "gpuwatch.sampler")
    return [
        child for child, command in descendants(pid) if not any(name in command for name in known)
    ]


def test_many_reloads_at_once(tmp_path: Path) -> None:
    """However often a reload is asked for, the config is checked once at a time."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        most = 0
        for _ in range(30):
            running.process.send_signal(signal.SIGHUP)
            most = max(most, len(validations(running.process.pid)))
        wait_for(lambda: "config reloaded" in running.log())
        wait_for(lambda: not validations(running.process.pid))
        assert most <= 1
        assert running.stop() == 0


def hang_config(running: Running) -> int:
    """Make the config a file that cannot be read to its end; return who reads it."""
    running.config.unlink()
    os.mkfifo(running.config)
    running.process.send_signal(signal.SIGHUP)
    return int(wait_for(lambda: validations(running.process.pid))[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stop_while_the_config_is_read(tmp_path: Path, number: signal.Signals) -> None:
    """Whoever reads a config on a dead disk ends with the supervisor, however that ends."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        reader = hang_config(running)
        assert running.stop(number) == (0 if number == signal.SIGTERM else -number)
        wait_for(lambda: gone(reader))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_before_anything_runs(tmp_path: Path, number: signal.Signals) -> None:
    """A stop while the config is read for the first time is a stop like any other."""
    os.mkfifo(tmp_path / "pipe.toml")
    arguments = ("--source", "simulated", "--config", str(tmp_path / "pipe.toml"))
    with Running(tmp_path, *arguments, ready=False) as running:
        (reader,) = wait_for(lambda: validations(running.process.pid))
        assert running.stop(number) == 0
        assert gone(reader)
        assert running.log() == ""


def test_supervisor_without_descriptors(tmp_path: Path) -> None:
    """Without room for one more file the supervisor refuses what is asked, and goes on."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: samples(running) > 0)
        pid = running.process.pid
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, SOFT[1]))
        os.kill(running.child("state"), signal.SIGKILL)
        wait_for(lambda: "Too many open files" in str(state_of(running)["reason"]))
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "config not reloaded" in running.log())
        answer = record(running)
        assert answer.returncode == 3
        assert "Too many open files" in answer.stderr
        os.kill(running.child("daemon"), signal.SIGKILL)
        wait_for(lambda: "the daemon cannot be started" in running.log())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, SOFT)
        wait_for(running.is_ready)
        assert "Traceback" not in running.log()
        assert running.stop() == 0


def test_daemon_without_descriptors(tmp_path: Path) -> None:
    """A rush of connections that takes the last descriptor is told in one line, and passes."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: samples(running) > 0)
        pid = running.child("daemon")
        room = descriptors(pid) + 4
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, SOFT[1]))
        clients = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(40)]
        wait_for(lambda: "Too many open files" in running.log())
        for client in clients:
            client.close()
        wait_for(running.is_ready)
        assert running.child("daemon") == pid
        assert running.log().count("Too many open files") == 1
        assert "Traceback" not in running.log()


def test_rush_of_connections(tmp_path: Path) -> None:
    """Of hundreds of connections that say nothing, none keeps a scrape waiting."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        clients = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(400)]
        start = time.monotonic()
        assert running.get("/metrics")[0] == 200
        assert time.monotonic() - start < 1
        for client in clients:
            client.close()
        assert len(running.log().splitlines()) <= 2


def test_standard_streams_closed(tmp_path: Path) -> None:
    """Started without standard input, output and error, it serves and ends with 0."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "gpuwatch", "run", "--source", "simulated"),
        *("--path.runtime", str(tmp_path / "runtime"), "--path.state", str(tmp_path / "state")),
        *("--web.listen-address", f"127.0.0.1:{port}"),
    ]
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    process = subprocess.Popen([*closing, *command])
    try:

        def answers() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        wait_for(answers)
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_name_in_unknown_characters(tmp_path: Path) -> None:
    """A GPU whose name and UUID are no UTF-8 is watched like the others, without them."""
    node = Node(tmp_path)
    node.script.step(0, "nvmlDeviceGetName", dev=1, val="Odd")
    node.script.step(0, "nvmlDeviceGetUUID", dev=1, val="Odd")
    node.script.write(tmp_path / "script")
    script = (tmp_path / "script").read_bytes()
    (tmp_path / "script").write_bytes(script.replace(b'"Odd', b'"\xffOdd'))
    with node.running() as running:
        for gpu in ("0", "1", "2"):
            wait_for(lambda gpu=gpu: running.value("gpuwatch_gpu_up", f'gpu="{gpu}"') == 1)
        page = running.get("/metrics")[1].decode()
        (info,) = [
            line for line in page.splitlines() if line.startswith('gpuwatch_gpu_info{gpu="1"')
        ]
        assert "name=" not in info
        assert "uuid=" not in info


def test_sick_gpu_without_a_pci_bus(tmp_path: Path) -> None:
    """Where a container hides the PCI bus, a GPU without an address does not hide the others."""
    node = Node(tmp_path)
    for device in (node.sysfs / "bus/pci/devices").iterdir():
        (device / "vendor").write_text("0x8086\n")
    node.script.step(0, "nvmlDeviceGetHandleByIndex", "GPU_IS_LOST", dev=1)
    node.script.write(tmp_path / "script")
    with node.running(config=QUIET) as running:
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 2)
        assert running.value("gpuwatch_nvml_up") == 1


@pytest.mark.parametrize(
    "request_text",
    [
        b"\0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
    ids=["garbage", "websocket"],
)
def test_bad_requests_are_not_logged(tmp_path: Path, request_text: bytes) -> None:
    """Who sends what is no request gets an answer, but cannot fill the log."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", running.port), timeout=5) as client:
                client.sendall(request_text)
                assert client.recv(100).startswith(b"HTTP/1.1 ")
        wait_for(lambda: samples(running) > 0)
        assert len(running.log().splitlines()) <= 2


def strange_ring(rings: list[Path], how: str) -> None:
    """Do to rings what a stranger might."""
    for path in rings:
        if how == "removed":
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.write((b"\0" if how == "zeros" else b"\x7f") * 4096)


@pytest.mark.parametrize("how", ["removed", "zeros", "ones"])
def test_rings_removed_or_overwritten(tmp_path: Path, how: str) -> None:
    """Rings that were removed or overwritten are told, and new ones take their place."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: samples(running) > 0)
        state, daemon = running.child("state"), running.child("daemon")
        strange_ring(list(ring_directory(running.runtime).glob("*.ring")), how)
        wait_for(lambda: gone(state))
        count = samples(running)
        wait_for(lambda: samples(running) > count)
        assert "removed or overwritten" in running.log()
        assert running.child("daemon") == daemon
        assert not running.events("tick_failed")
        assert "Traceback" not in running.log()


def test_runtime_directory_removed(tmp_path: Path) -> None:
    """A runtime directory that was removed under way is made again; children start in it."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: samples(running) > 0)
        shutil.rmtree(running.runtime)
        wait_for(running.runtime.is_dir)
        for duty in ("state", "daemon"):
            os.kill(running.child(duty), signal.SIGKILL)
            wait_for(lambda duty=duty: restarts(running, duty) == 1)
        wait_for(running.is_ready)
        count = samples(running)
        wait_for(lambda: samples(running) > count)
        assert "Traceback" not in running.log()
        assert running.stop() == 0


@pytest.mark.parametrize("what", ["pipe", "device", "directory"])
def test_what_never_ends_instead_of_a_manifest(tmp_path: Path, what: str) -> None:
    """A pipe, a device or a directory where manifests lie is told once, and not waited for."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: samples(running) > 0)
        daemon, odd = running.child("daemon"), running.runtime / "odd.json"
        if what == "pipe":
            os.mkfifo(odd)
        elif what == "device":
            odd.symlink_to("/dev/zero")
        else:
            odd.mkdir()
        wait_for(lambda: f"{odd}: not a manifest" in running.log())
        count = samples(running)
        wait_for(lambda: samples(running) > count)
        assert running.child("daemon") == daemon
        assert running.log().count("not a manifest") == 1


def test_rings_that_cannot_be_opened_at_first(tmp_path: Path) -> None:
    """Rings for which the daemon lacks descriptors are taken as soon as it has some."""
    with Running(tmp_path, "--source", "simulated", config=SIMULATED) as running:
        wait_for(lambda: samples(running) > 0)
        daemon, state = running.child("daemon"), running.child("state")
        running.is_ready()
        resource.prlimit(daemon, resource.RLIMIT_NOFILE, (descriptors(daemon), SOFT[1]))
        os.kill(state, signal.SIGKILL)
        wait_for(lambda: "not a manifest" in running.log())
        resource.prlimit(daemon, resource.RLIMIT_NOFILE, SOFT)
        count = samples(running)
        wait_for(lambda: samples(running) > count)
        assert running.child("daemon") == daemon

"""The daemon's control socket: who may ask for what, and that no client can hold it up."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from node import QUIET
from running import Running, wait_for

from gpuwatch.codec import RowsBlock
from gpuwatch.control import PEERS, request
from gpuwatch.errors import ControlError
from gpuwatch.recording import RecordingReader

ASK = """
import json, os, socket, sys
os.setgid(65534)
os.setuid(65534)
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect(sys.argv[1])
for message in sys.argv[2:]:
    client.send(message.encode())
    print(client.recv(1 << 20).decode(), flush=True)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Start one daemon for all tests of this file."""
    directory = tmp_path_factory.mktemp("control")
    config = QUIET + "[simulated]\ngpus = 2\n"
    with Running(directory, "--source", "simulated", config=config) as daemon:
        wait_for(lambda: daemon.value("gpuwatch_source_up", "nvml_state") == 1)
        yield daemon


@pytest.fixture
def path(running: Running) -> Path:
    """Return where the daemon listens."""
    return running.runtime / "control.sock"


def client_of(path: Path) -> socket.socket:
    """Open a conversation."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(path))  # waits while too many others wait
    client.settimeout(10)
    return client


def ask(client: socket.socket, packet: bytes) -> dict[str, Any]:
    """Send a packet and return the answer."""
    client.send(packet)
    answer: dict[str, Any] = json.loads(client.recv(1 << 20))
    return answer


STATUS = b'{"command": "status"}'


@pytest.mark.parametrize(
    "packet",
    [
        b"\x00\xff",
        b"{",
        b"[]",
        b"null",
        b"[" * 50_000,
        b"9" * 10_000,
        b'"' + b"x" * 150_000 + b'"',
        b'{"command": "status"' + b" " * 140_000 + b"}",
        b"{}",
        b'{"command": 1}',
        b'{"command": "reboot"}',
        b'{"command": "record"}',
        b'{"command": "record", "last_seconds": 1e999}',
        b'{"command": "record", "last_seconds": NaN}',
        b'{"command": "record", "last_seconds": ' + b"9" * 400 + b"}",
        b'{"command": "interval", "source": "nvml_state", "scale": ' + b"9" * 400 + b"}",
        b'{"command": "interval", "source": "nvml_state", "scale": -1}',
        b'{"command": "interval", "source": "\\ud800", "scale": 1}',
    ],
    ids=lambda packet: repr(packet[:60]),
)
def test_nonsense_is_answered(running: Running, path: Path, packet: bytes) -> None:
    """What is no request is answered with an error, and the conversation goes on."""
    with client_of(path) as client:
        assert set(ask(client, packet)) == {"error"}
        assert ask(client, STATUS)["ready"] is True
    assert not running.events("tick_failed")


def test_clients_that_do_not_read(running: Running, path: Path) -> None:
    """A client that never reads, or asks without end, holds up nobody."""
    with ExitStack() as stack:
        for _ in range(3):  # the answers fill their sockets, then the requests do
            client = stack.enter_context(client_of(path))
            client.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    client.send(STATUS)
        closed = running.status()["ticks_closed"]
        assert request(path, {"command": "status"}, 10)["ready"]
        wait_for(lambda: running.status()["ticks_closed"] > closed + 2)
    assert not running.events("tick_failed")


def test_many_clients(running: Running, path: Path) -> None:
    """More clients than there is room for are turned away; when they leave there is room again."""
    # A client that left just now may still hold a place.
    wait_for(lambda: answered_of_forty(path) == PEERS, 120, "as many answers as places")
    wait_for(lambda: request_works(path))
    assert not running.events("tick_failed")


def answered_of_forty(path: Path) -> int:
    """Return how many of forty clients that come at once are answered."""
    answered = 0
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(path)) for _ in range(40)]
        for client in clients:
            try:
                client.send(STATUS)
                answered += bool(client.recv(1 << 20))
            except ConnectionError:
                pass
        for client in clients:  # each gives its place back before others come
            with suppress(OSError):
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 20):
                    pass
    return answered


def request_works(path: Path) -> bool:
    """Tell whether a request is answered."""
    try:
        return bool(request(path, {"command": "status"}, 10))
    except ControlError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_other_users(running: Running, path: Path) -> None:
    """Users who are not root may read the status and nothing else, and leave room for root."""
    for directory in path.parents:
        if directory.stat().st_mode & 0o001 == 0:
            directory.chmod(directory.stat().st_mode | 0o001)
    messages = [
        STATUS.decode(),
        '{"command": "record", "last_seconds": 1}',
        '{"command": "interval", "source": "nvml_state", "scale": 0}',
        '{"command": "release", "what": "gpus", "seconds": 60}',
        '{"command": "resume", "what": "gpus"}',
        '{"command": "accept"}',
        '{"command": "inventory"}',
    ]
    output = subprocess.run(
        [sys.executable, "-c", ASK, str(path), *messages],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    status, *others, inventory = map(json.loads, output.splitlines())
    assert status["ready"] is True
    assert others == [{"error": "only root may do that: ask with sudo"}] * 5
    assert len(inventory["slots"]) == 2
    assert not list(running.state.glob("recordings/*"))
    crowd = ASK.replace("client = ", "crowd = [socket.socket(1, 5) for _ in range(60)]\nclient = ")
    crowd = crowd.replace(
        "client.connect(sys.argv[1])",
        "[one.connect(sys.argv[1]) for one in crowd]\nprint(1, flush=True)\nsys.stdin.read()",
    )
    with subprocess.Popen(
        [sys.executable, "-c", crowd, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        wait_for(lambda: request_works(path))
        assert process.stdin is not None
        process.stdin.close()


def test_source_switched_off_and_on(running: Running, path: Path) -> None:
    """A source at scale 0 is off: it has no state and fails nobody; at 1 it is back."""
    up = ("gpuwatch_source_up", 'source="nvml_state"')
    interval = {"command": "interval", "source": "nvml_state"}
    assert request(path, {**interval, "scale": 0}, 10) == {"source": "nvml_state", "scale": 0}
    wait_for(lambda: running.value(*up) is None)
    assert running.status()["sources"]["nvml_state"]["state"] == "off"
    assert running.value("gpuwatch_gpu_up", 'gpu="0"') is None
    wait_for(lambda: running.value("gpuwatch_gpu_power_watts", 'gpu="0"') is None)
    closed = running.status()["ticks_closed"]
    wait_for(lambda: running.status()["ticks_closed"] >= closed + 8)
    assert running.status()["alerts"] == []
    request(path, {**interval, "scale": 1}, 10)
    wait_for(lambda: running.value(*up) == 1)
    wait_for(lambda: running.value("gpuwatch_gpu_power_watts", 'gpu="0"') is not None)
    assert running.status()["alerts"] == []
    with pytest.raises(ControlError, match=r"source tea: not one of .*nvml_state"):
        request(path, {"command": "interval", "source": "tea", "scale": 1}, 10)


def test_slower_source(running: Running, path: Path) -> None:
    """A source at scale 4 is read at a fourth of its rate, and its values are held as long."""
    period = ("gpuwatch_source_period_seconds", 'source="nvml_state"')
    before = running.value(*period)
    assert before is not None
    request(path, {"command": "interval", "source": "nvml_state", "scale": 4}, 10)
    wait_for(lambda: running.value(*period) == pytest.approx(4 * before))
    closed = running.status()["ticks_closed"]
    wait_for(lambda: running.status()["ticks_closed"] >= closed + 8)
    assert running.value("gpuwatch_gpu_power_watts", 'gpu="0"') is not None
    request(path, {"command": "interval", "source": "nvml_state", "scale": 1}, 10)
    wait_for(lambda: running.value(*period) == before)


def test_recordings_at_the_same_time_are_files_of_their_own(running: Running, path: Path) -> None:
    """Who asks while another's recording is being written gets another file, both whole."""
    clients = [client_of(path) for _ in range(3)]
    for client in clients:
        client.send(b'{"command": "record", "last_seconds": 2}')
    answers = [json.loads(client.recv(1 << 20)) for client in clients]
    for client in clients:
        client.close()
    assert len({answer["path"] for answer in answers}) == 3
    for answer in answers:
        reader = RecordingReader(Path(answer["path"]))
        assert sum(len(block.rows) for block in reader if isinstance(block, RowsBlock)) > 0
        assert reader.complete
        reader.close()

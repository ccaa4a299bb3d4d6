"""What nobody should do to a running gpuwatch, and what goes on all the same."""

import http.client
import json
import os
import resource
import shutil
import socket
import time
import urllib.parse
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from running import Running, wait_for
from test_recording import make_head
from test_web import FakePages, serving

from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.recording import RecordingWriter
from gpuwatch.tmpfs import ring_directory

CONFIG = """
[simulated]
gpus = 2
[state]
period_ms = 5
realtime = false
budget_ratio = 1
[recorder]
free_ratio = 0
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """Run a made-up node."""
    directory = tmp_path_factory.mktemp("hostile")
    with Running(directory, "--source", "simulated", config=CONFIG) as running:
        (running.state / "recordings").mkdir(exist_ok=True)
        yield running


def asked(daemon, path, **parameters):
    """Return the status of HTTP, and the JSON."""
    query = urllib.parse.urlencode(parameters)
    status, body = daemon.get(f"/api/v1/{path}?{query}", timeout=60)
    return status, json.loads(body)


def test_names_that_are_no_text():
    """A host that is called by bytes that are no UTF-8 takes no page away."""
    pages = FakePages()
    pages.more = os.fsdecode(b"caf\xe9")
    with serving(pages) as port:
        for path in ("status", "stream"):
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
                connection.request("GET", f"/api/v1/{path}")
                answer = connection.getresponse()
                assert answer.status == 200
                line = next(line for line in answer if b"{" in line)
                assert json.loads(line.removeprefix(b"data: "))["more"] == pages.more


@pytest.mark.parametrize("seconds", ["1e308", "-1e308", "9.1e9"])
def test_times_that_no_clock_tells(daemon, seconds):
    """They are refused, and named."""
    shutil.copy(BUNDLED_RECORDING, daemon.state / "recordings/h200.gwr")
    status, told = asked(daemon, "status", recording="h200.gwr", time=seconds)
    assert status == 400
    assert seconds in told["error"]


@pytest.mark.parametrize("alert", [{}, {"rule": "x"}, {"rule": "x", "entity": float("nan")}])
def test_a_foreign_recording_leaves_the_others_in_the_list(daemon, alert):
    """Alerts that make no sense, as another program may write them, are of their file alone."""
    with RecordingWriter(daemon.state / "recordings/foreign.gwr", make_head()) as writer:
        writer.alerts([{"recording": "foreign.gwr", **alert}])
    shutil.copy(BUNDLED_RECORDING, daemon.state / "recordings/h200.gwr")
    status, told = asked(daemon, "recordings")
    assert status == 200
    assert [one["name"] for one in told["recordings"]] == ["h200.gwr"]


@pytest.mark.parametrize("name", [b"bad\xff.gwr", b"\xed\xa0\x80.gwr"])
def test_a_file_that_no_page_can_ask_for_is_not_in_the_list(daemon, name):
    """A browser has no address for a name that is no text, and would give up on the whole list."""
    path = daemon.state / "recordings" / os.fsdecode(name)
    shutil.copy(BUNDLED_RECORDING, path)
    status, told = asked(daemon, "recordings")
    assert status == 200
    assert path.name not in [one["name"] for one in told["recordings"]]


@pytest.mark.parametrize("size", [0, 8192])
def test_a_ring_that_is_cut_off_ends_nobody_but_its_writer(daemon, size):
    """The daemon goes on, and a new child fills new rings."""
    pid, name = daemon.child("daemon"), "gpuwatch_gpu_power_watts"
    wait_for(lambda: daemon.value(name, 'gpu="0"'))
    path = max(ring_directory(daemon.runtime).glob("state.*.ring"), key=os.path.getmtime)
    before = {ring.name for ring in path.parent.glob("state.*.ring")}
    os.truncate(path, size)
    wait_for(lambda: {ring.name for ring in path.parent.glob("state.*.ring")} - before)
    wait_for(lambda: daemon.value(name, 'gpu="0"'))
    assert daemon.child("daemon") == pid


def test_answers_that_nobody_reads_are_bounded(daemon):
    """Whoever asks for much and reads nothing gets no more after a while, and others do."""
    _, told = asked(daemon, "columns")
    names = sorted({column["name"].partition("{")[0] for column in told["columns"]})[:200]
    lines = sum(len(column.get("bits", "1")) for column in told["columns"])
    now = time.time()
    span = [("start", now - 60), ("end", now), ("points", min(2000, 900_000 // lines))]
    query = urllib.parse.urlencode([*(("signal", name) for name in names), *span])
    before = rss_bytes(daemon.child("daemon"))
    with ExitStack() as stack:
        for _ in range(30):
            one = socket.socket()
            stack.enter_context(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", daemon.port))
            one.sendall(f"GET /api/v1/series?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            one.settimeout(60)
            told = one.recv(12)
            if told == b"HTTP/1.1 503":
                break  # on a slow machine the first are given up before the last have asked
        assert told == b"HTTP/1.1 503"
        assert daemon.get("/metrics")[0] == 200
        assert rss_bytes(daemon.child("daemon")) - before < 150 << 20


def rss_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()

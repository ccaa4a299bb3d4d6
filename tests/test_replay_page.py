"""`gpuwatch replay FILE`: a recording on a page of its own, and in the terminal."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import free_port, wait_for
from terminal import Terminal
from test_replay_command import HW_THERMAL, WALL, recorded  # noqa: F401 - a fixture

from gpuwatch import cli

ALERT = "gpu_hw_thermal_slowdown"
FIRST = WALL / 1e9


@pytest.fixture
def recording(recorded) -> Path:  # noqa: F811
    """Return two minutes of a GPU that is too hot from 20 s on, for 30 s."""
    path: Path = recorded(HW_THERMAL)
    return path


@contextlib.contextmanager
def served(home: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command off a terminal, with directories of its own; yield it and its address."""
    own = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "HOME")
    environment = {**os.environ, **{name: str(home) for name in own}}
    with subprocess.Popen(
        [sys.executable, "-m", "gpuwatch", "replay", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def get(url: str, path: str = "") -> Any:
    """Return what is at a path: JSON as data, else the text."""
    with urllib.request.urlopen(f"{url}{path}", timeout=20) as response:
        body = response.read().decode()
        return json.loads(body) if response.headers["Content-Type"] == "application/json" else body


def test_page_and_api_of_a_file(recording, tmp_path):
    """Off a terminal the address is told and served until a signal; nothing is written."""
    home = tmp_path / "home"
    home.mkdir()
    before = sorted(recording.parent.iterdir())
    with served(home, str(recording)) as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert "<html" in get(url)
        status = get(url, "api/v1/status")
        assert status["recording"]["name"] == recording.name
        assert status["recording"]["start"] == pytest.approx(FIRST)
        assert status["source"]["kind"] == "replay-file"
        hot = get(url, f"api/v1/status?time={FIRST + 45}")
        assert {alert["rule"] for alert in hot["alerts"] if alert["state"] == "firing"} == {ALERT}
        cold = get(url, f"api/v1/status?time={FIRST + 5}")
        assert cold["alerts"] == []
        (one,) = get(url, "api/v1/recordings")["recordings"]
        assert one["name"] == recording.name
        series = get(
            url,
            f"api/v1/series?signal=gpu_throttle_active&start={FIRST}&end={FIRST + 60}&points=6",
        )
        (bit,) = [line for line in series["series"] if "hw_thermal" in line["name"]]
        assert bit["mean"] == pytest.approx([0, 0, 1, 1, 1, 0], abs=0.02)
        assert get(url, "metrics") == ""
        with urllib.request.urlopen(f"{url}api/v1/stream", timeout=20) as stream:
            assert stream.readline() == b"event: status\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert list(home.iterdir()) == []
    assert sorted(recording.parent.iterdir()) == before


def test_rules_of_a_config_hold_on_the_page(recording, tmp_path):
    """What fires is judged by the rules of `--config`, as by `--rules`; the port is as asked."""
    config = tmp_path / "config.toml"
    config.write_text(f"[rules.{ALERT}]\nenabled = false\n")
    address = f"127.0.0.1:{free_port()}"
    words = (str(recording), "--config", str(config), "--web.listen-address", address)
    with served(tmp_path, *words) as (process, url):
        assert url == f"http://{address}/"
        hot = get(url, f"api/v1/status?time={FIRST + 45}")
        assert ALERT not in {alert["rule"] for alert in hot["alerts"]}
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_terminal_moves_in_time(recording):
    """Keys go to any second and from alert to alert; the page is there until one leaves."""
    with Terminal("replay", str(recording), columns=100) as terminal:
        first = terminal.shows("0:00:00 of 0:02:00")
        assert first[0].startswith(recording.name)
        address = re.match(r"http://127\.0\.0\.1:(\d+)/ ", first[-1])
        assert address
        for keys, shown in (
            ("\x1b[C", "0:00:01 of"),
            ("\x1b[6~", "0:00:11 of"),
            ("\x1b[1;2C", "0:00:21 of"),
            ("\x1b[D", "0:00:20 of"),
            ("\x1b[1;2D\x1b[5~\x1b[D", "0:00:00 of"),
            ("\x1b[F", "0:02:00 of"),
            ("\x1b[H", "0:00:00 of"),
        ):
            terminal.press(keys)
            terminal.shows(shown)
        terminal.press("n")
        seen = terminal.shows("0:00:21 of")
        assert "is being judged" in terminal.received
        assert any(f"{ALERT}_detected gpu 3" in line for line in seen)
        terminal.press("n")
        fired = terminal.shows(f"critical {ALERT} gpu 3")
        assert "0:00:21 of" not in fired[-2]
        assert "drain" in fired[0]
        terminal.press("p")
        terminal.shows("0:00:21 of")
        terminal.press("p")  # there is none before
        terminal.press("?")
        assert any("play as it was" in line for line in terminal.shows("Keys"))
        terminal.press("?")
        terminal.press(" ")
        terminal.shows("▶ ")
        terminal.shows("0:00:23 of")
        terminal.press(" ")
        terminal.shows("‖ ")
        get(f"http://127.0.0.1:{address[1]}/", "api/v1/status")
        terminal.press("q")
        assert terminal.ends() == 0
        assert "Traceback" not in terminal.received
        connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=5)
        with pytest.raises(ConnectionRefusedError):
            connection.connect()


def test_a_terminal_and_ctrl_c(recording):
    """Ctrl-C gives the terminal back and ends the page, without a traceback."""
    with Terminal("replay", str(recording)) as terminal:
        terminal.shows("0:00:00 of")
        terminal.press("\x03")
        assert terminal.ends() == 130
        assert "Traceback" not in terminal.received


def test_a_terminal_without_rich(recording, tmp_path):
    """Without what the view is drawn with there is the page, and a line about what is missing."""
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError('rich')\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    with Terminal("replay", str(recording), PYTHONPATH=os.pathsep.join(paths)) as terminal:
        wait_for(lambda: "http://127.0.0.1:" in terminal.read())
        assert "pip install 'gpuwatch[tui]'" in terminal.received
        terminal.send(signal.SIGTERM)
        assert terminal.ends() == 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["nosuch.gwr"], 64, "nosuch.gwr: "),
        (["foreign.gwr"], 64, "foreign.gwr: "),
        (["bundled", "--web.listen-address", "x:y"], 64, "--web.listen-address: "),
        (
            ["bundled", "--web.listen-address", "192.0.2.1:1"],
            64,
            "web.listen_addresses 192.0.2.1:1",
        ),
        (["bundled", "--for", "60s"], 64, "--for: "),
        (["bundled", "--rules", "--web.listen-address", ":0"], 64, "--web.listen-address: "),
        ([".gwr"], 64, "'.gwr': "),
    ],
)
def test_what_cannot_be_shown(words, code, told, tmp_path, monkeypatch, capsys):
    """One line names the file or the flag."""
    monkeypatch.chdir(tmp_path)
    for name in ("foreign.gwr", ".gwr"):
        Path(name).write_bytes(b"no recording")
    assert cli.main(["replay", *words]) == code
    line = capsys.readouterr().err
    assert line.startswith(told)
    assert line.count("\n") == 1

"""`gpuwatch top`: the node in a terminal, whatever the terminal, and whatever it is told."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from populated import snapshot
from rich.cells import cell_len
from rich.console import Console
from running import Running, wait_for
from terminal import SGR, Terminal

from gpuwatch import cli, control, told
from gpuwatch.commands.top import Daemon
from gpuwatch.errors import ControlError
from gpuwatch.minute import Minute
from gpuwatch.screen import keys_of
from gpuwatch.status import describe
from gpuwatch.view import Looks, picture

GPUS = 8
# All sources, gently; the fault comes at once and is judged at once.
CONFIG = f"""
[simulated]
gpus = {GPUS}
fault_after_seconds = 0.5
[state]
period_ms = 10
realtime = false
budget_ratio = 1
[counters]
budget_ratio = 1
[recorder]
free_ratio = 0.999
[rules.gpu_hw_thermal_slowdown]
window_seconds = 2.0
"""
ALERT = "critical gpu_hw_thermal_slowdown gpu 2"
CTRL_C = "\x03"
CTRL_Z = "\x1a"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Start one daemon for all tests of this file: a node with a GPU that is too hot."""
    directory = tmp_path_factory.mktemp("top")
    with Running(directory, "--source", "simulated:thermal", config=CONFIG) as daemon:
        wait_for(lambda: (daemon.alert("gpu_hw_thermal_slowdown") or {}).get("state") == "firing")
        wait_for(lambda: knows_rates(daemon))
        yield daemon


def knows_rates(running: Running) -> bool:
    """Say whether counters were read long enough for the rates of all links."""
    with closing(Daemon(running.runtime / "control.sock")) as daemon:
        minute = told.Minute(daemon.answer()["minute"])
    names = ("gpu_nvlink_received_bytes_total", "gpu_pcie_received_bytes_total")
    return None not in [minute.recent("gpu", "7", name) for name in names]


def top(running: Running, *words: str, **more: Any) -> Terminal:
    """Return a terminal with the view of the daemon."""
    return Terminal("top", "--path.runtime", str(running.runtime), *words, **more)


def asked(capsys, running: Running, *words: str) -> tuple[int, str]:
    """Return code and output of the command off a terminal."""
    code = cli.main(["top", "--path.runtime", str(running.runtime), *words])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("columns", [1, 20, 40, 79, 80, 120, 160, 200, 400])
def test_one_picture_fits_any_width(running, capsys, monkeypatch, columns):
    """No line is wider than the terminal, and a GPU has a row however narrow it is."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code, text = asked(capsys, running, "--once")
    assert code == 2
    assert "\x1b" not in text
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= columns
    if columns < 79:
        return
    assert "drain" in lines[0]
    assert lines[1].startswith(ALERT)
    rows = [line for line in lines if re.match(r" +\d +(ok|critical) ", line)]
    assert [row.split()[0] for row in rows] == [str(number) for number in range(GPUS)]
    assert re.search(r" hw thermal \d+% ", rows[2])
    assert rows[2].split()[1] == "critical"
    assert " 1200/1980 " in rows[2]
    assert ("NVLINK GB/s" in text) == (columns >= 120)
    assert ("POWER 60s" in text) == (columns >= 200)
    for part in ("RDMA PORTS", "mlx5_7/1", "waits for cpu", "nvml_state", "COST OF A CORE"):
        assert part in text


def test_json_is_the_status(running, capsys):
    """`--json` prints what `/api/v1/status` answers, and `--once` ends like `verdict`."""

    def same() -> tuple[dict[str, Any], dict[str, Any]] | None:
        code, text = asked(capsys, running, "--once", "--json")
        assert code == 2
        told, page = json.loads(text), running.status()
        return (told, page) if told["ticks_closed"] == page["ticks_closed"] else None

    told, page = wait_for(same)
    assert told == page
    (port,) = [port for port in page["ports"] if port["device"] == "mlx5_3"]
    assert port["values"]["rdma_port_up"] == 1
    assert page["gpus"][0]["up"] == 1
    assert page["gpus"][0]["values"]['gpu_power_limit_watts{limit="enforced"}'] == 700
    assert page["sources"]["nvml_state"]["age_seconds"] < 30


def test_values_are_those_of_the_endpoint(running, capsys, monkeypatch):
    """What the view shows is what is scraped, in the unit of its head; rates are of counters."""
    monkeypatch.setenv("COLUMNS", "200")

    def row_of(number: int) -> dict[str, str]:
        lines = asked(capsys, running, "--once")[1].splitlines()
        (head,) = [line for line in lines if line.startswith("GPU ")]
        (row,) = [line for line in lines if line.startswith(f"  {number} ")]
        return dict(zip(re.split(r" {2,}", head), re.split(r" {2,}", row.strip()), strict=False))

    def value(name: str, *parts: str) -> float:
        return running.value(f"gpuwatch_gpu_{name}", 'gpu="2"', *parts) or math.nan

    scraped: set[str] = set()  # on a slow machine no two pages in a row have the same power

    def agrees() -> dict[str, str] | None:
        scraped.add(f"{value('power_watts'):.0f}")
        row = row_of(2)
        scraped.add(f"{value('power_watts'):.0f}")
        return row if row["POWER W"].partition("/")[0] in scraped else None

    row = wait_for(agrees)
    clock, limit = (
        value("clock_hertz", 'clock="sm"'),
        value("clock_limit_hertz", 'clock="sm"'),
    )
    assert row["SM MHz"] == f"{clock / 1e6:.0f}/{limit / 1e6:.0f}"
    assert row["POWER W"].endswith("/700")
    used, size = value("memory_used_bytes"), value("memory_size_bytes")
    assert row["MEM GiB"] == f"{used / 2**30:.0f}/{size / 2**30:.0f}"
    assert row["THROTTLED"].startswith("hw thermal ")
    # The node moves 2e7 KiB/s of NVLink while it computes and 2.4e8 while it communicates.
    nvlink = wait_for(lambda: re.fullmatch(r"([\d.]+)↓ ([\d.]+)↑", row_of(0)["NVLINK GB/s"]))
    assert 20 < float(nvlink[1]) < 250


def test_a_line_of_json_each_time(running):
    """Without `--once` the status comes again and again, until Ctrl-C ends it without a word."""
    with top(running, "--json", "--interval", "250ms") as terminal:
        wait_for(lambda: terminal.read().count("\n") >= 3)
        terminal.press(CTRL_C)
        assert terminal.ends() == 130
        lines = terminal.received.replace("^C", "").splitlines()
        numbers = [json.loads(line)["ticks_closed"] for line in lines[:3]]
        assert numbers == sorted(numbers)
        assert "Traceback" not in terminal.received


def test_keys(running):
    """Keys sort, hold, explain, scroll and leave; the terminal is given back as it was."""
    with top(running, "--interval", "250ms") as terminal:
        first = terminal.shows(ALERT)
        assert "?" in first[-1]
        (row,) = [line for line in first if line.startswith("  2 critical ")]
        assert "hw thermal" in row
        terminal.press("s")
        shown = terminal.shows("by state")
        head = next(place for place, line in enumerate(shown) if line.startswith("GPU "))
        assert shown[head + 1].split()[:2] == ["2", "critical"]
        terminal.press("?")
        assert terminal.shows("hold the picture")[1].startswith("Keys")
        terminal.press("?")
        terminal.shows(ALERT)
        terminal.press("p")
        held = terminal.shows("paused")
        closed = running.status()["ticks_closed"]
        wait_for(lambda: running.status()["ticks_closed"] > closed + 6)
        assert terminal.picture() == held
        terminal.press("\x1b[B")
        assert terminal.shows("2-23 of ")[1] == held[2]
        terminal.press("p")
        wait_for(lambda: "paused" not in terminal.picture()[0])
        terminal.press("\x1b[6~")
        terminal.shows("COST OF A CORE")
        terminal.press("\x1b[H")
        terminal.shows("1-22 of ")
        terminal.press("q")
        assert terminal.ends() == 0


def test_a_terminal_of_another_size(running):
    """When the window changes so does the picture, at once, down to a single line."""
    with top(running, "--interval", "60s") as terminal:
        shown = terminal.shows(ALERT)
        assert "NVLINK" not in "".join(shown)
        terminal.resize(200, 50)
        shown = terminal.shows("POWER 60s")
        assert "NVLINK GB/s" in "".join(shown)
        assert len(shown) == 50
        terminal.resize(30, 4)
        wait_for(lambda: len(terminal.picture()) == 4)
        assert max(map(cell_len, terminal.picture())) <= 30
        terminal.resize(7, 1)
        wait_for(lambda: len(terminal.picture()) == 1)
        terminal.send(signal.SIGTERM)
        assert terminal.ends() == 0


def test_a_daemon_that_is_killed(running):
    """The view says since when there is no answer, and goes on with the daemon that follows."""
    with top(running, "--interval", "250ms") as terminal:
        terminal.shows(ALERT)
        os.kill(running.child("daemon"), signal.SIGKILL)
        assert any(ALERT in line for line in terminal.shows("no answer since "))
        terminal.shows("q quit", 60)
        terminal.press(CTRL_C)
        assert terminal.ends() == 130
        assert "Traceback" not in terminal.received
    wait_for(running.is_ready)


def test_stopped_and_gone_on(running):
    """Ctrl-Z gives the terminal back; in the foreground again the view draws itself anew."""
    with top(running, "--interval", "60s") as terminal:
        terminal.shows(ALERT)
        terminal.press(CTRL_Z)
        wait_for(terminal.is_stopped)
        assert terminal.read().endswith("\x1b[?1049l")
        drawn = len(terminal.received)
        terminal.send(signal.SIGCONT)
        wait_for(lambda: "\x1b[J" in terminal.read()[drawn:])
        assert terminal.received[drawn:].startswith("\x1b[?1049h")
        terminal.press("q")
        assert terminal.ends() == 0


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour(running, variables, coloured):
    """On a terminal there is colour, unless NO_COLOR is set."""
    with top(running, "--once", **variables) as terminal:
        assert terminal.ends() == 2
        colours = re.findall(r"\x1b\[(?:\d+;)*3[0-9]m", terminal.received)
        assert bool(colours) == coloured
        lines = SGR.sub("", terminal.received).splitlines()
        assert lines[1].startswith(ALERT)
        assert max(map(cell_len, lines)) <= 80


def test_nobody_listens(running):
    """With standard output closed `--once` ends as it would, without a word."""
    words = f"{sys.executable} -m gpuwatch top --once --path.runtime {running.runtime} >&-"
    ended = subprocess.run(["bash", "-c", words], stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (2, "")


def test_a_terminal_without_unicode(running):
    """Signs that the terminal has not are question marks, and nothing else is lost."""
    with top(running, "--once", PYTHONIOENCODING="latin-1") as terminal:
        assert terminal.ends() == 2
        assert " 1200/1980 " in terminal.received
        assert re.search(r"[\d.]+\? +[\d.]+\? GPU 3", SGR.sub("", terminal.received))


@pytest.mark.parametrize("words", [[], ["--once"], ["--json"]])
def test_without_a_daemon(tmp_path, capsys, words):
    """One line says what to do."""
    assert cli.main(["top", "--path.runtime", str(tmp_path), *words]) == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        f"{tmp_path}/control.sock: no daemon answers: start it or set --path.runtime\n"
    )


def test_without_rich(running, capsys, monkeypatch):
    """One line names the extra to install; JSON needs none."""
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["top", "--path.runtime", str(running.runtime), "--once"]) == 64
    assert "pip install 'gpuwatch[tui]'" in capsys.readouterr().err
    code, text = asked(capsys, running, "--once", "--json")
    assert code == 2
    assert json.loads(text)["ready"] is True


def test_too_short_an_interval(capsys):
    """There is nothing new more often than a quarter second."""
    assert cli.main(["top", "--interval", "10ms"]) == 64
    assert capsys.readouterr().err == "--interval: 0.01 s: at least 250ms\n"


def status_of(gpus: int) -> dict[str, Any]:
    """Return the status of a whole node, with clocks as the daemon gives them."""
    shown = snapshot(gpus)
    about = {"time_ns": 0, "realtime_ns": 1_700_000_000_000_000_000, "sources": {}, **shown.about}
    object.__setattr__(shown, "about", about)
    told: dict[str, Any] = json.loads(json.dumps(describe(shown)))
    return told


STATUS = status_of(4)
MINUTE = {
    "start": 0.0,
    "end": 3.0,
    "step": 1.0,
    "series": [
        {"entity": ["gpu", "0"], "name": name, "mean": means}
        for name, means in (
            ('gpu_clock_hertz{clock="sm"}', [1e9, None, 2e9]),
            ('gpu_throttle_active{reason="sw_power_cap"}', [0.0, 0.5, 1.0]),
            ("gpu_nvlink_received_bytes_total", [1e9, 2e9, None]),
        )
    ],
}


def drawn(status: Any, minute: Any, columns: int = 120, lines: int = 0, **looks: Any) -> list[str]:
    """Return the lines of a picture as they reach a terminal."""
    shown = picture(status, minute, (columns, lines), Looks(**looks))
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=columns + 1, highlight=False)
    for line in (*shown.head, *shown.body):
        assert line.cell_len <= columns
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    return SGR.sub("", file.getvalue()).split("\n")[:-1]


def alert(rule: str, severity: str, number: int, state: str = "firing", **more: Any) -> Any:
    """Return an alert of a GPU as the status has it."""
    return {
        "rule": rule,
        "severity": severity,
        "state": state,
        "entity": ["gpu", str(number)],
        "value": 0.5,
        "limit": 0.1,
        "since": "2026-11-30T12:01:02.000Z",
        "next_step": "Mend it.",
        **more,
    }


def test_alerts_come_first_with_causes_and_the_next_step():
    """The worst is on top; under it what it comes from and what to do; pending ones are last."""
    causes = [{"cause": "power_cap", "share": 0.42, "text": "power limit: the board is at 700 W"}]
    alerts = [
        alert("gpu_slow", "warning", 1),
        alert("gpu_later", "critical", 3, state="pending", causes=causes),
        alert("gpu_bad", "critical", 2, causes=causes, recording="x.gwr"),
        alert("gpu_bad_too", "critical", 2, causes=causes, recording="x.gwr"),
    ]
    gpus = [{**gpu, "causes": causes} for gpu in STATUS["gpus"][:3]]
    lines = drawn({**STATUS, "alerts": alerts, "gpus": gpus}, MINUTE)
    assert lines[1] == "critical gpu_bad gpu 2  0.5, limit 0.1  since 12:01:02Z"
    assert lines[2].strip() == "lost time: 42% power limit: the board is at 700 W"
    assert lines[3].strip() == "Mend it."
    assert lines[4].strip() == "recording x.gwr"
    assert lines[5].startswith("critical gpu_bad_too gpu 2")
    assert lines[7].startswith("warning  gpu_slow gpu 1")
    assert lines[9].startswith("pending  gpu_later gpu 3")
    assert lines[10] == "slowed   GPU 0 1  42% power limit: the board is at 700 W (GPU 0)"
    assert lines[11].startswith("GPU STATE")


def test_many_alerts_leave_room_for_the_gpus():
    """In a small terminal some alerts are only counted, until one asks for all."""
    alerts = [alert(f"rule_{number}", "critical", number) for number in range(20)]
    status = {**STATUS, "alerts": alerts}
    lines = drawn(status, MINUTE, 80, 24)
    assert [line.split()[0] for line in lines[1:8]].count("critical") == 4
    assert lines[9] == "and 16 critical: a shows all"
    assert lines[10].startswith("GPU STATE")
    assert "rule_19" in "".join(drawn(status, MINUTE, 80, 24, all_alerts=True))


def test_the_last_minute():
    """A sparkline goes from 0 to the limit; what is not known is blank, and no rate is made up."""
    lines = drawn(STATUS, MINUTE, 200)
    row = next(line for line in lines if line.startswith("  0 "))
    assert "▅ █" in row
    assert "power cap 50%" in row
    assert "1.50↓    -↑" in row
    assert "█" not in next(line for line in lines if line.startswith("  1 "))


def test_released_gpus_are_not_unknown():
    """Who finds no GPU in the picture reads why, and how to get them back."""
    status = {"gpus": [], "released": {"gpus": True}}
    assert any("gpuwatch resume gpus" in line for line in drawn(status, {}))
    assert not any("gpuwatch resume gpus" in line for line in drawn({"gpus": []}, {}))


def test_mig_instances_have_rows():
    """An instance stands below its GPU, however the GPUs are sorted."""
    lines = drawn(STATUS, MINUTE, 120, sort=3)
    place = next(place for place, line in enumerate(lines) if line.startswith("3/1 3g.71gb"))
    assert lines[place - 1].startswith("  3 ")
    assert re.search(r" 16/48 +12% +50% +25%", lines[place])


NASTY = (
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[31mred",
    "a\nb\r\tc\x00\x7f",
    "\u202egnp.exe",
    "\x9b31m\u2028",
    "日本" * 40,
    "e\u0301" * 50,
    "x" * 5000,
    "\ud800",
)


@pytest.mark.parametrize("name", NASTY)
def test_a_name_does_not_steer_the_terminal(name):
    """Whatever stands in a name, no control character or escape sequence is written."""
    status = json.loads(json.dumps(STATUS))
    status |= {"verdict": name, "source": {"kind": name, "scenario": name}}
    status["alerts"] = [alert(name, "critical", 0, entity=[name, name], next_step=name, place=name)]
    status["sources"][name] = {"state": name, "reason": name, "errors": {name: 3}}
    status["events"] = [{"time": name, "name": name, "entity": [name, name], "detail": name}]
    status["ports"][0] |= {"device": name, "gpu": name}
    gpu = status["gpus"][0]
    gpu |= {"gpu": name, "name": name, "causes": [{"cause": name, "text": name, "share": 1}]}
    gpu["instances"] = [{"gpu_instance": name, "profile": name, "values": {name: 1}}]
    gpu["values"][f'gpu_throttle_active{{reason="{name}"}}'] = 1
    minute = json.loads(json.dumps(MINUTE))
    minute["series"] += [
        {"entity": ["duty", name], "name": "process_cpu_seconds_total", "mean": [1.0]},
        {"entity": ["gpu", name], "name": f'gpu_throttle_active{{reason="{name}"}}', "mean": [1]},
        {
            "entity": ["resource", name],
            "name": 'host_pressure_seconds_total{kind="some"}',
            "mean": [1],
        },
    ]
    for columns in (40, 120):
        for line in drawn(status, minute, columns):
            assert line.isprintable()
            assert cell_len(line) <= columns


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@st.composite
def broken(draw: st.DrawFn, whole: Any) -> Any:
    """Return a copy in which a few members are missing or something else."""
    copy = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 4))):
        place = copy
        while isinstance(place, dict | list) and place:
            if isinstance(place, dict):
                key: Any = draw(st.sampled_from(sorted(place)))
            else:
                key = draw(st.integers(0, len(place) - 1))
            if not isinstance(place[key], dict | list) or draw(st.integers(0, 3)) == 0:
                if isinstance(place, dict) and draw(st.booleans()):
                    del place[key]
                else:
                    place[key] = draw(JUNK)
                break
            place = place[key]
    return copy


@settings(max_examples=100, deadline=None)
@given(
    broken({**STATUS, "alerts": [alert("gpu_bad", "critical", 1, causes=[{"cause": "x"}])]}),
    broken(MINUTE) | JUNK,
    st.sampled_from([(1, 1), (13, 5), (80, 24), (200, 50)]),
    st.integers(0, 6),
)
def test_any_status_can_be_drawn(status, minute, size, sort):
    """A daemon of another version, or a foreign recording, breaks neither view nor terminal."""
    for line in drawn(status, minute, *size, sort=sort):
        assert line.isprintable()


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(STATUS)), JUNK))
def test_junk_can_be_drawn(status):
    """Members of any type are left out."""
    for line in drawn(status, {}):
        assert line.isprintable()


@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_a_status_of_any_size_comes_over_the_socket(tmp_path, gpus):
    """A status is larger than a packet may be; it comes in parts to who has read what came."""
    server = control.Server(tmp_path / "control.sock", 0o600)
    client = control.connect(server.path)
    assert client is not None
    client.send({})
    wait_for(server.poll)
    message = {"status": status_of(gpus), "minute": Minute().series()}
    for packet in control.packets(message):
        assert server.connections[0].send(packet)
    parts: list[control.Message] = []
    while (whole := control.whole(parts)) is None:
        received = client.receive()
        assert received is not None
        parts.append(received)
    assert whole == message
    client.close()
    server.close()


@pytest.mark.parametrize(
    "parts",
    [
        [{"alerts": []}],
        [{"parts": 1, "packed": "?"}],
        [{"parts": 1, "packed": "AAAA"}],
        [{"parts": "2", "packed": ""}],
        [{"parts": 1, "packed": control.packets({})[0]["packed"][:-4]}],
    ],
)
def test_an_answer_of_another_version(parts):
    """What is no whole status is one line that says what to do."""
    with pytest.raises(ControlError, match="restart it"):
        control.whole(parts)


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[6~p", ["up", "page-down", "p"]),
        (b"\x1bOA\x1b[1;2C", ["up", "shift-right"]),
        (b"\x1b[200~", []),
        (b"\x1b", ["\x1b"]),
        (b"\xff?", ["\xff", "?"]),
    ],
)
def test_what_a_terminal_sends_is_keys(data, keys):
    """Arrows in either mode of a terminal are arrows; what means nothing is nothing."""
    assert keys_of(data) == keys


def test_status_goes_to_every_user(running: Running) -> None:
    """The view is for all who may log in: the answer is the same for any user."""
    assert (running.runtime / "control.sock").stat().st_mode & 0o777 == 0o666
    assert Path(running.runtime).stat().st_mode & 0o005 == 0o005

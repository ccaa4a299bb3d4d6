"""The command line: flags, exit codes, one line for each user error, and how little it imports."""

import json
import logging
import os
import subprocess
import sys
import threading
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch import __version__, cli, control, duration
from gpuwatch.commands import COMMANDS
from gpuwatch.errors import ConfigError, ControlError
from gpuwatch.logs import LineFormatter, configure, to_journal
from gpuwatch.paths import control_socket

HEAVY = ("numpy", "pydantic", "starlette", "uvicorn", "prometheus_client", "pynvml", "psutil")


class FakeCommand:
    """A command that does what it is told."""

    name = "fake"
    help = "fail as told"

    def __init__(self, outcome):
        self.outcome = outcome

    def add_arguments(self, parser):
        """Nothing of its own."""

    def run(self, _arguments):
        """Return the outcome, or raise it."""
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def outcome(monkeypatch):
    """Make `gpuwatch fake` end in a given way."""

    def ends(with_):
        monkeypatch.setattr(cli, "COMMANDS", ("fake",))
        monkeypatch.setattr(cli, "load", lambda _name: FakeCommand(with_))

    return ends


@pytest.fixture
def requested(monkeypatch):
    """Collect what `gpuwatch run` asks the supervisor, which ends at once."""
    requests = []

    def run(request):
        requests.append(request)
        return 0

    supervisor = SimpleNamespace(run=run)
    monkeypatch.setitem(sys.modules, "gpuwatch.supervisor", supervisor)
    monkeypatch.setattr("gpuwatch.supervisor", supervisor, raising=False)
    return requests


def test_version(capsys):
    """The version is the installed package's."""
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gpuwatch {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command, capsys):
    """Every command has help, and can be pointed at other paths."""
    assert cli.main([command, "--help"]) == 0

    text = capsys.readouterr().out
    for path in ("runtime", "state", "sysfs", "procfs", "kmsg"):
        assert f"--path.{path} " in text


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nosuch"],
        ["run", "--nosuch"],
        ["run", "--conf", "x"],
        ["run", "--log.level", "loud"],
        ["run", "extra"],
        ["run", "--config"],
        ["record", "--last", "soon"],
        ["record", "--collector.nvml_state"],
    ],
)
def test_usage_errors_are_one_line_and_64(words, capsys):
    """A usage error tells the fault and where to look, and never ends with a check's code 2."""
    assert cli.main(words) == 64

    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.endswith("--help\n")


def test_run_passes_flags_to_the_supervisor(requested):
    """Flags become overrides in the shape of the config file; what is not given is absent."""
    code = cli.main(
        [
            "run",
            "--config",
            "c.toml",
            "--source=simulated:thermal",
            "--web.listen-address=:1",
            "--web.listen-address",
            "[::1]:2",
            "--collector.nvml_state",
            "--no-collector.other",
            "--log.level=debug",
            "--path.sysfs",
            "/host/sys",
        ]
    )

    assert code == 0
    assert requested == [
        {
            "config": "c.toml",
            "overrides": {
                "web": {"listen_addresses": [":1", "[::1]:2"]},
                "collectors": {"nvml_state": True, "other": False},
                "log": {"level": "debug"},
                "paths": {"sysfs": "/host/sys"},
            },
            "source": "simulated:thermal",
        }
    ]


def test_run_without_flags_overrides_nothing(requested):
    """The defaults are the config's, not the command line's."""
    assert cli.main(["run"]) == 0
    assert requested == [{"config": None, "overrides": {}, "source": "nvml"}]


def test_last_collector_flag_wins(requested):
    """A later flag overrides an earlier one, as a wrapper script needs it."""
    cli.main(["run", "--collector.nvml_state", "--no-collector.nvml_state"])

    assert requested[0]["overrides"] == {"collectors": {"nvml_state": False}}


def test_user_errors_are_printed_with_their_code(outcome, capsys):
    """What the user can mend is printed as it is, and ends with the error's own code."""
    outcome(ConfigError("config.toml:1: x\nconfig.toml:2: y"))
    assert cli.main(["fake"]) == 64
    assert capsys.readouterr().err == "config.toml:1: x\nconfig.toml:2: y\n"

    outcome(ControlError("no daemon"))
    assert cli.main(["fake"]) == 3
    assert capsys.readouterr().err == "no daemon\n"


def test_codes_of_commands_are_passed_on(outcome):
    """Exit codes 0 to 3 are the command's verdict."""
    for code in range(4):
        outcome(code)
        assert cli.main(["fake"]) == code


def test_interrupt_is_no_error(outcome, capsys):
    """Ctrl-C ends without a word."""
    outcome(KeyboardInterrupt())

    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == ""


def test_internal_error_is_one_line_without_traceback(outcome, capsys):
    """A fault of gpuwatch is told as such; the traceback is for those who ask."""
    outcome(RuntimeError("two\nlines"))

    assert cli.main(["fake"]) == 70
    assert capsys.readouterr().err == (
        "gpuwatch fake: internal error: RuntimeError: two lines: "
        "add --log.level=debug for a traceback, and report it\n"
    )

    assert cli.main(["fake", "--log.level=debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


TALK = """
import sys
from gpuwatch import cli
class Talk:
    name = help = 'talk'
    def add_arguments(self, parser): pass
    def run(self, arguments): print('hello'); return 0
cli.COMMANDS, cli.load = ('talk',), lambda name: Talk()
sys.exit(cli.main(['talk']))
"""


def test_closed_pipe_ends_quietly():
    """A reader that has gone, as `head` does, is no error of ours."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        ended = subprocess.run(
            [sys.executable, "-c", TALK], stdout=output, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_full_disk_behind_standard_output_is_told():
    """In one line, and Python's own flush at exit adds nothing."""
    with Path("/dev/full").open("wb") as output:
        ended = subprocess.run(
            [sys.executable, "-c", TALK], stdout=output, stderr=subprocess.PIPE, text=True
        )
    told = "standard output: No space left on device: make room\n"
    assert (ended.returncode, ended.stderr) == (64, told)


def test_command_line_is_bare_python():
    """The process that becomes the supervisor has imported nothing heavy."""
    program = "import json, sys, gpuwatch.cli; json.dump(list(sys.modules), sys.stdout)"
    listed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    modules = json.loads(listed.stdout)
    assert [name for name in HEAVY if name in modules] == []


def test_record_prints_the_path(tmp_path, capsys):
    """`record` waits for the daemon's answer and prints where the recording is."""
    server = control.Server(tmp_path / "control.sock", 0o600)
    asked = []

    def answer():
        while not asked:
            for connection, message in server.poll():
                asked.append(message)
                connection.send({"path": "/state/recordings/a.gwr", "rows": 3})

    daemon = threading.Thread(target=answer)
    daemon.start()
    code = cli.main(["record", "--last", "250ms", "--path.runtime", str(tmp_path)])
    daemon.join()
    server.close()

    assert code == 0
    assert asked == [{"command": "record", "last_seconds": 0.25}]
    assert capsys.readouterr().out == "/state/recordings/a.gwr\n"


def test_record_without_daemon(tmp_path, capsys):
    """No daemon is an unknown, not a failed check."""
    assert cli.main(["record", "--path.runtime", str(tmp_path)]) == 3
    assert capsys.readouterr().err.startswith(f"{tmp_path}/control.sock: no daemon answers")


def test_control_socket_of_the_system_serves_users(tmp_path, monkeypatch):
    """Without a daemon of their own, users ask the system's."""
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("gpuwatch.paths.SYSTEM_RUNTIME", tmp_path / "system")
    own, system = tmp_path / "gpuwatch/control.sock", tmp_path / "system/control.sock"

    assert control_socket(None) == own

    system.parent.mkdir()
    system.touch()
    assert control_socket(None) == system

    own.parent.mkdir()
    own.touch()
    assert control_socket(None) == own
    assert control_socket("/elsewhere").parent.name == "elsewhere"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("60s", 60.0), ("1.5s", 1.5), ("5m", 300.0), ("2h", 7200.0)],
)
def test_durations(text, seconds):
    """Spans are written as people write them."""
    assert duration.seconds(text) == seconds


@given(st.text(max_size=12) | st.from_regex(r"-?[0-9.]*(ms|s|m|h|d)?", fullmatch=True))
def test_any_text_is_a_positive_duration_or_refused(text):
    """A span is finite and above 0, everything else is refused."""
    try:
        span = duration.seconds(text)
    except ArgumentTypeError:
        return

    assert 0 < span < 1e14


@pytest.fixture
def line(capsys):
    """Log one record through the root logger, which is put back afterwards; return the line."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]

    def logged(style, level, message, *arguments, **keywords):
        configure({"level": "info", "format": style}, duty="state")
        getattr(logging.getLogger("gpuwatch.test"), level)(message, *arguments, **keywords)
        return capsys.readouterr().err

    yield logged
    root.handlers[:] = handlers
    root.setLevel(level)


def test_logfmt_is_one_line(line):
    """Values are quoted where they must be, line breaks are escaped, extras become fields."""
    text = line("logfmt", "warning", "gpu %d\nlost", 3, extra={"reason": "off", "why": 'a "b"'})

    assert text.startswith("time=20")
    assert text.endswith(
        'level=warning message="gpu 3\\nlost" duty=state reason=off why="a \\"b\\""\n'
    )


def test_json_is_one_line(line):
    """JSON lines hold the same fields."""
    record = json.loads(line("json", "error", "lost", extra={"gpu": 3}))

    assert record.pop("time").endswith("Z")
    assert record == {"level": "error", "message": "lost", "duty": "state", "gpu": 3}


def test_level_is_heeded(line):
    """Records below the level are dropped."""
    assert line("logfmt", "debug", "quiet") == ""


def test_exception_stays_on_the_line(line):
    """A traceback is a field, so that log collectors see one record."""
    try:
        raise ValueError("deep")
    except ValueError:
        text = line("logfmt", "exception", "failed")

    assert text.count("\n") == 1
    assert "ValueError: deep" in text


@pytest.mark.parametrize(("level", "prefix"), [(10, "<7>"), (20, "<6>"), (30, "<4>"), (40, "<3>")])
def test_journal_lines_carry_the_priority(level, prefix):
    """The journal takes priority from the line's start and keeps the time itself."""
    record = logging.makeLogRecord(
        {"levelno": level, "levelname": logging.getLevelName(level), "msg": "hello"}
    )

    text = LineFormatter("logfmt", True, {}).format(record)

    assert text == f"{prefix}level={record.levelname.lower()} message=hello"


def test_journal_is_known_by_device_and_inode():
    """JOURNAL_STREAM counts only if standard error is that stream."""
    program = (
        "import os, sys; from gpuwatch.logs import to_journal; s = os.fstat(2)\n"
        "os.environ['JOURNAL_STREAM'] = f'{s.st_dev}:{s.st_ino}'; yes = to_journal()\n"
        "os.environ['JOURNAL_STREAM'] = '1:2'; no = to_journal(); print(yes, no)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert told.stdout == "True False\n"
    assert to_journal() is False

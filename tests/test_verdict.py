"""The verdict: one word for the node from the alerts that fire, in a file that is quick to read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from node import QUIET, Node
from running import Running, wait_for
from test_release import command

from gpuwatch.alerts import Alert
from gpuwatch.clock import monotonic_ns
from gpuwatch.rule import Rule
from gpuwatch.rules import RULES
from gpuwatch.signals import HOST, Entity
from gpuwatch.verdict import STALE_NS, WORDS, VerdictFile, judge, read

SOON = "\n".join(
    f"[rules.{rule}]\nfor_seconds = 0.0\nhold_seconds = 0.5" for rule in ("gpu_lost", "gpu_missing")
)


def alert(verdict: str, state: str = "firing", entity: Entity = HOST) -> Alert:
    return Alert(
        rule=f"asks_for_{verdict}",
        entity=entity,
        severity="warning",
        value=1.0,
        limit=1.0,
        since_ns=0,
        state=state,  # type: ignore[arg-type]
        sticky=False,
        next_step="Do it.",
        verdict=verdict,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("worst", WORDS)
def test_the_alert_that_asks_for_most_decides(worst: str) -> None:
    """Its reasons come first; what asks for nothing, or does not fire, is no reason."""
    words = WORDS[: WORDS.index(worst) + 1]
    alerts = [alert(word) for word in words] + [alert("reboot", "pending")]
    told = judge(alerts)
    assert told["verdict"] == worst
    assert [reason["verdict"] for reason in told["reasons"]] == list(reversed(words[1:]))


def advice(name: str, value: float | None) -> str:
    (rule,) = [rule for rule in RULES if rule.name == name]
    return rule.advice(value)


def test_what_a_rule_asks_for() -> None:
    """By its severity, by its own word, or by the value that the driver reports."""
    by_severity = {"critical": "drain", "warning": "watch", "info": "ok"}
    plain = [rule for rule in RULES if rule.verdict is None]
    assert all(rule.advice(1.0) == by_severity[rule.severity] for rule in plain)
    assert {rule.name for rule in RULES if rule not in plain} == {
        "gpu_lost",
        "gpu_hung",
        "gpu_recovery_required",
    }
    assert advice("gpu_lost", 0.0) == advice("gpu_hung", 1.0) == "reboot"
    asked = [advice("gpu_recovery_required", value) for value in (1.0, 2.0, 3.0, 4.0, 5.0, None)]
    assert asked == ["reset", "reboot", "reset", "reset", "drain", "drain"]


def test_every_verdict_is_one_of_the_words() -> None:
    """What a rule may ask for is what the metric has a series for."""

    def asked(rule: Rule) -> set[str]:
        found = rule.verdict
        return {found or "ok"} if isinstance(found, str | None) else set(found.values())

    assert set().union(*map(asked, RULES)) <= set(WORDS)


def test_the_file_is_renewed_but_not_at_every_look(tmp_path: Path) -> None:
    """A change is written at once, the same again only when it grows old; all may read it."""
    file, path = VerdictFile(tmp_path), tmp_path / "verdict.json"
    os.umask(0o077)
    assert file.publish(judge([])) == ""
    assert path.stat().st_mode & 0o777 == 0o644
    first = path.read_bytes()
    file.publish(judge([]))
    assert path.read_bytes() == first
    file.publish(judge([alert("drain")]))
    assert read(path)["verdict"] == "drain"
    file._written_ns -= 3 * 10**9
    drained = path.read_bytes()
    file.publish(judge([alert("drain")]))
    assert path.read_bytes() != drained


def test_a_file_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    """It is told in one line, and nothing else stops."""
    fault = VerdictFile(tmp_path / "nowhere").publish(judge([]))
    assert fault.endswith("No such file or directory: the verdict is not kept")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"verdict": "ok"}', '{"verdict": "fine", "time_ns": 0}'],
)
def test_what_is_no_verdict_is_unknown(tmp_path: Path, text: str) -> None:
    """A file of something else says nothing about the node."""
    path = tmp_path / "verdict.json"
    path.write_text(text)
    assert read(path)["verdict"] == "unknown"


def asked(runtime: Path, *flags: str) -> tuple[int, str]:
    """Return the exit code and output of `gpuwatch verdict`."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuwatch", "verdict", *flags, "--path.runtime", str(runtime)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("word", "code"), [("ok", 0), ("watch", 1), ("drain", 2), ("reset", 2), ("reboot", 2)]
)
def test_the_exit_code_is_the_verdict(tmp_path: Path, word: str, code: int) -> None:
    """A scheduler needs no more than the code; a person reads why, and what to do."""
    VerdictFile(tmp_path).publish(judge([alert(word, entity=Entity("gpu", "3"))]))
    line = "ok" if word == "ok" else f"{word}: asks_for_{word} on gpu 3: Do it."
    assert asked(tmp_path) == (code, line)
    assert json.loads(asked(tmp_path, "--json")[1])["verdict"] == word


def test_a_stale_verdict_is_unknown(tmp_path: Path) -> None:
    """Neither a daemon that stands still nor one from before the boot vouches for the node."""
    for time_ns in (monotonic_ns() - STALE_NS - 10**9, monotonic_ns() + 3600 * 10**9):
        told = {**judge([]), "time_ns": time_ns}
        (tmp_path / "verdict.json").write_text(json.dumps(told))
        code, line = asked(tmp_path)
        assert code == 3
        assert "no daemon has renewed it" in line
    (tmp_path / "verdict.json").unlink()
    code, line = asked(tmp_path)
    assert code == 3
    assert "no daemon runs there" in line


def test_the_command_loads_little() -> None:
    """It is run on every node every minute, and its caller waits."""
    code = (
        "import sys; from gpuwatch import cli; cli.main(['verdict']);"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"subprocess", "ctypes", "http.client", "gpuwatch.control", "dataclasses"}
    assert {name for name in loaded if name.startswith("gpuwatch.commands.")} == {
        "gpuwatch.commands.verdict"
    }


def verdicts(running: Running) -> dict[str, float]:
    """Return the series of the verdict, by word."""
    name = 'gpuwatch_node_verdict{verdict="'
    page = running.scrape()
    return {key[len(name) : -2]: page[key] for key in page if key.startswith(name)}


def test_a_node_that_loses_a_gpu(tmp_path: Path) -> None:
    """Metric, status, file and command agree, and go back when it is over."""
    node = Node(tmp_path, 2)
    with node.running(config=QUIET + SOON) as running:
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 2)
        assert set(verdicts(running)) == set(WORDS)
        assert sum(verdicts(running).values()) == 1
        node.now("any", "GPU_IS_LOST", dev=1)
        wait_for(lambda: verdicts(running)["reboot"] == 1)
        assert sum(verdicts(running).values()) == 1
        assert running.status()["verdict"] == "reboot"
        code, line = asked(running.runtime)
        assert code == 2
        assert line.startswith("reboot: gpu_lost on gpu 1: Drain the node")
        node.heal()
        wait_for(lambda: running.value("gpuwatch_gpus_visible") == 2)
        command(running, "inventory", "accept")
        wait_for(lambda: verdicts(running)["ok"] == 1)
        wait_for(lambda: asked(running.runtime)[0] == 0)
        assert running.stop() == 0
        assert asked(running.runtime)[0] == 3
        assert not (running.runtime / "verdict.json").exists()

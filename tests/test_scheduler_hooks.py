"""Scripts for Slurm and the Node Problem Detector, with a gpuwatch and a scontrol of our own."""

import json
import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from gpuwatch.cli import main
from gpuwatch.errors import UNKNOWN

DEPLOY = Path(__file__).parents[1] / "deploy"
PLUGIN = DEPLOY / "kubernetes" / "gpuwatch-verdict"


@pytest.fixture
def hook(tmp_path):
    """Run a script of Slurm's with what gpuwatch and scontrol answer; return it and the calls."""
    tools, calls = tmp_path / "bin", tmp_path / "calls"
    tools.mkdir()

    def tool(name, answers):
        lines = [
            f"{pattern}) echo {shlex.quote(text)}; exit {code} ;;"
            for pattern, text, code in answers
        ]
        body = "\n".join(['case "$*" in', *lines, "esac"])
        path = tools / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{calls}\n{body}\n')
        path.chmod(0o755)

    def run(name, gpuwatch=(), state=""):
        calls.unlink(missing_ok=True)
        tool("gpuwatch", gpuwatch)
        tool("scontrol", [("show*", state, 0)])
        text = (DEPLOY / "slurm" / name).read_text()
        assert "PATH=/usr/sbin:/usr/bin:/sbin:/bin " in text
        text = text.replace("PATH=/usr/sbin", f"PATH={tools}:/usr/sbin")
        done = subprocess.run(
            ["sh", "-c", text], capture_output=True, text=True, check=False, env={}
        )
        return done, calls.read_text().splitlines()

    return run


def test_the_prolog_pauses_and_never_stops_a_job(hook, tmp_path):
    """Whether gpuwatch is there or not."""
    done, calls = hook("prolog.sh")
    assert (done.returncode, calls) == (0, ["gpuwatch pause canaries --for 7d"])
    words = calls[0].split()[1:]
    assert main([*words, f"--path.runtime={tmp_path}"]) == UNKNOWN  # no daemon, and no fault of it
    done, _ = hook("prolog.sh", [("pause*", "", 3)])
    assert done.returncode == 0
    assert "not paused" in done.stdout


@pytest.mark.parametrize(("code", "fails"), [(0, False), (1, False), (2, True), (3, False)])
def test_the_epilog_fails_if_a_gpu_is_bad(hook, code, fails):
    """Only then: what could not be tried drains no node."""
    done, calls = hook("epilog.sh", [("canary*", "GPU 3 is 9 % slower", code)])
    assert calls == [
        "gpuwatch resume canaries",
        "gpuwatch canary run --between-jobs --budget 15s --config /etc/gpuwatch/config.toml",
    ]
    assert bool(done.returncode) is fails
    assert ("GPU 3" in done.stdout) is fails


@pytest.mark.parametrize(
    ("code", "state", "update"),
    [
        (0, "State=IDLE", ""),
        (1, "State=IDLE", ""),
        (2, "State=IDLE", "state=drain reason=gpuwatch: told"),
        (2, "State=IDLE+DRAIN Reason=disk", ""),
        (3, "State=IDLE", ""),
        (0, "State=IDLE+DRAIN Reason=disk", ""),
        (0, "State=IDLE+DRAIN Reason=gpuwatch: gpu_lost", "state=resume"),
        (3, "State=IDLE+DRAIN Reason=gpuwatch: gpu_lost", ""),
    ],
)
def test_the_health_check_drains_and_takes_back(hook, code, state, update):
    """Its own drains alone are ended, and nobody's reason is written over."""
    done, calls = hook("health-check.sh", [("verdict", "told", code)], state)
    assert done.returncode == 0
    updates = [call.partition(" state=")[2] for call in calls if "update" in call]
    assert updates == ([update.removeprefix("state=")] if update else [])


def plugin(path):
    """Return the code and the line of the plugin."""
    done = subprocess.run([str(PLUGIN), str(path)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


def test_the_plugin_says_what_the_daemon_keeps(tmp_path):
    """Well, ill, and not known where the file is old, broken or not there."""
    path = tmp_path / "verdict.json"
    assert plugin(path) == (2, f"{path}: no daemon runs there")
    path.write_text(json.dumps({"verdict": "ok", "reasons": [], "time_ns": 1}))
    assert plugin(path) == (0, "ok")
    reason = {
        "verdict": "reboot",
        "alert": "gpu_lost",
        "severity": "critical",
        "entity": "gpu 3",
        "next_step": 'Drain "it".',
    }
    told = {"verdict": "reboot", "reasons": [reason, {**reason, "alert": "gpu_hung"}], "time_ns": 1}
    path.write_text(json.dumps(told))
    assert plugin(path) == (1, "reboot: gpu_lost on gpu 3")
    old = time.time() - 60
    os.utime(path, (old, old))
    assert plugin(path) == (2, f"{path}: no daemon has renewed it for 10 s")
    path.write_text("{}")
    assert plugin(path) == (2, f"{path}: is no verdict")


def test_the_plugins_settings_are_complete():
    """The rule sets a condition that is declared, and runs the plugin."""
    told = json.loads((DEPLOY / "kubernetes" / "node-problem-detector.json").read_text())
    assert {rule["condition"] for rule in told["rules"]} == {
        one["type"] for one in told["conditions"]
    }
    assert all(rule["path"].endswith(PLUGIN.name) for rule in told["rules"])

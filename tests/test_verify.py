"""`gpuwatch verify` on a node of scripted GPUs, with checks that find, crash, hang or print."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import jsonschema
import pytest
from browser import CHROMIUM, Browser
from node import IdleHost
from running import descendants, wait_for
from verify_checks import Scripted

import gpuwatch
from gpuwatch import checks
from gpuwatch.canary_host import LOCK, only_session
from gpuwatch.cli import main
from gpuwatch.commands import verify
from gpuwatch.errors import ConfigError
from gpuwatch.examination import DEEP_SECONDS, QUICK_SECONDS, Examination
from gpuwatch.verify import Finding, Node
from gpuwatch.verify_compare import compare
from gpuwatch.verify_facts import collect
from gpuwatch.verify_report import Report, overall, undecided
from gpuwatch.verify_text import values

CHECKS = Path(__file__).with_name("verify_checks.py")
SCHEMA = json.loads(
    Path(gpuwatch.__file__).with_name("data").joinpath("verify.schema.json").read_text()
)
UUIDS = [f"GPU-00000000-0000-4000-8000-{number:012d}" for number in range(4)]
RATE = {"unit": "flops_per_second", "expectation": 7e14, "source": "data sheet"}
LANES = {"measure": "lanes", "unit": "lanes", "expectation": 16, "source": "the slot"}
BAD_LINK = {
    **LANES,
    "entity": "gpu2",
    "verdict": "FAIL",
    "value": 8,
    "reason": "the link has half its lanes",
    "cause": "link",
    "next_step": "reseat the card",
}
SOUND = [
    {
        "name": "pcie",
        "essential": True,
        "find": [
            {**LANES, "entity": f"gpu{number}", "verdict": "PASS", "value": 16}
            for number in range(3)
        ],
    }
]
READING = {
    "canary": "matmul",
    "entity": ["gpu", UUIDS[0]],
    "time": time.time(),
    "size": 8192,
    "dtype": "bf16",
    "value": 7e14,
    "spread": 0.001,
    "model": "NVIDIA H100 80GB HBM3",
    "environment": {"torch": "2.9.1", "driver": "580.95.05"},
}


class Verified(IdleHost):
    """An idle node of scripted GPUs, and the command on it."""

    def words(self, *words):
        return ["verify", *words, *self.places]

    def start(self, listed, *words):
        """Start the command with these checks, in a process of its own."""
        return subprocess.Popen(
            [sys.executable, str(CHECKS), *self.words(*words)],
            env={**self.environment, "CHECKS": json.dumps(listed)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, listed, *words):
        """Run it in this process; return the exit code, standard output and standard error."""
        output, errors = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
            patch.setattr(checks, "CHECKS", tuple(Scripted(**one) for one in listed))
            with redirect_stderr(errors):
                code = main(self.words(*words))
        return code, output.getvalue(), errors.getvalue()

    def report(self, listed, *words):
        """Return the exit code and the report, which is as the schema says."""
        code, output, _ = self.run(listed, "--json", "-", *words)
        report = json.loads(output)
        jsonschema.validate(report, SCHEMA)
        for part, described in (
            (report, SCHEMA["properties"]),
            *(
                (one, SCHEMA["properties"]["checks"]["items"]["properties"])
                for one in report["checks"]
            ),
        ):
            assert set(part) <= set(described)
        return code, report

    def refused(self, capsys):
        """Return the report of a node on which nothing may run, so that no checks are needed."""
        assert main(self.words("--json", "-")) == 3
        report = json.loads(capsys.readouterr().out)
        jsonschema.validate(report, SCHEMA)
        assert (report["verdict"], report["ran"]) == ("SKIP", [])
        return report


@pytest.fixture
def host(tmp_path, monkeypatch):
    return Verified(tmp_path, monkeypatch)


def found(**about):
    return Finding(**{"name": "one", "entity": "host", "verdict": "PASS", **about})


@pytest.mark.parametrize(
    ("verdicts", "essential", "whole"),
    [
        (["PASS", "SKIP"], False, "PASS"),
        (["PASS", "WARN"], False, "WARN"),
        (["PASS", "UNKNOWN"], False, "WARN"),
        (["PASS", "UNKNOWN"], True, "UNKNOWN"),
        (["WARN", "UNKNOWN"], True, "UNKNOWN"),
        (["SKIP"], True, "UNKNOWN"),
        (["SKIP", "UNKNOWN"], False, "UNKNOWN"),
        (["FAIL", "UNKNOWN", "PASS"], True, "FAIL"),
        ([], False, "UNKNOWN"),
    ],
)
def test_the_verdict_of_the_whole(verdicts, essential, whole):
    """A failure decides; what an essential check does not know is never a pass."""
    findings = [found(verdict=verdict) for verdict in verdicts]
    thumb = found(verdict="FAIL", thumb=True)
    check = Scripted("one", essential=essential)
    assert overall([*findings, thumb], [check]) == whole
    if whole == "UNKNOWN" and essential:
        assert undecided([*findings, thumb], [check]) == ["one"]


def test_checks_that_end_badly_harm_nobody(host):
    """Each is UNKNOWN for its own reason, what it found before counts, and the next one runs."""
    before = [{"verdict": "PASS", "value": 1.0}]
    listed = [
        {"name": "raises", "then": "raise", "find": before},
        {"name": "unavailable", "then": "unavailable"},
        {"name": "crashes", "then": "crash"},
        {"name": "leaves", "then": "leave"},
        {"name": "invents", "then": "nonsense"},
        {"name": "prints", "then": "print", "find": before},
        {"name": "works", "then": "work", "bound": 0.3},
        *SOUND,
    ]
    code, report = host.report(listed)
    reasons = {one["name"]: one["reason"] for one in report["checks"] if one["reason"]}
    assert reasons == {
        "raises": "internal error: ValueError: of all things",
        "unavailable": "nvml: gone",
        "crashes": "it ended by SIGKILL",
        "leaves": "it ended by exit status 0",
        "invents": "found what is no finding: verdict 'GOOD'",
        "works": "it did not end within 0.3 s",
    }
    assert [one["name"] for one in report["checks"] if one["verdict"] == "PASS"] == [
        *("raises", "invents", "prints", "pcie", "pcie", "pcie")
    ]
    odd = next(one for one in report["checks"] if one["name"] == "invents")
    assert (odd["entity"], odd["value"], odd["curve"]) == ("\\udce9", None, [])
    assert (code, report["verdict"]) == (1, "WARN")
    assert [one["name"] for one in report["ran"]] == [one["name"] for one in listed]
    assert report["versions"]["driver"] == "580.95.05"
    assert [gpu["uuid"] for gpu in report["gpus"]] == UUIDS[:3]


def test_no_check_has_more_time_than_is_left(host):
    """The bound of the mode holds for all of them together."""
    facts = Node(gpus=[{"gpu": 0}])
    examination = Examination(facts, [Scripted("late")], seconds=0)
    assert [check.name for check in examination.run()] == ["late"]
    assert [one.reason for one in examination.findings] == ["no time was left for it"]


def test_the_table(host):
    """80 columns, the worst first, passing GPUs in a row; then why, and what to do."""
    pcie = {**SOUND[0], "find": [*SOUND[0]["find"][:2], BAD_LINK]}
    thumb = {"verdict": "WARN", "value": 0.5, "unit": "ratio", "thumb": True, "measure": "\x1b[2J",
             "reason": "it is half", "next_step": "double it"}  # fmt: skip
    speed = [
        {**RATE, "entity": f"gpu{number}", "verdict": "PASS", "value": 7e14 + number * 1e13}
        for number in range(3)
    ]
    none = {"verdict": "SKIP", "reason": "no port", "next_step": "connect one"}
    listed = [
        pcie,
        {"name": "speed", "phase": "load", "find": speed},
        {"name": "trade", "phase": "load", "find": [none, thumb]},
    ]
    code, output, errors = host.run([*reversed(listed)])
    assert code == 2
    assert errors.splitlines()[0].startswith("[1/3] pcie: FAIL, ")  # what only looks comes first
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [re.split("  +", line) for line in lines]
    assert rows[0] == ["CHECK", "WHERE", "VALUE", "EXPECTED", "VERDICT"]
    assert rows[1] == ["pcie lanes", "gpu2", "8 lanes", "16 lanes", "FAIL"]
    assert rows[2] == ["pcie", "gpu0-1", "1 as expected", "PASS"]
    assert rows[3] == ["speed", "gpu0-2", "700 to 720 TFLOPS", "700 TFLOPS", "PASS"]
    assert "    is:   8 lanes; expected 16 lanes, the slot" in lines
    assert "    why:  the link has half its lanes (looks like: link)" in lines
    assert "    next: reseat the card" in lines
    assert "SKIP  trade, host: no port; next: connect one" in lines
    thumbs = lines.index("Rules of thumb of the trade, which count for nothing above:")
    assert 5 < thumbs < lines.index("    next: double it")
    assert "\x1b" not in output  # a terminal is told nothing
    assert lines[-1].startswith("FAIL: 3 GPUs: 1 FAIL, 1 SKIP, 5 PASS (quick, ")


def test_an_interrupt_leaves_nothing_behind(host):
    """No process and no file; what was done so far is said."""
    listed = [*SOUND, {"name": "works", "then": "work", "bound": 100}]
    target = host.directory / "report.json"
    process = host.start(listed, "--json", str(target))
    wait_for(lambda: any("sleep" in line for _, line in descendants(process.pid)))
    children = [pid for pid, _ in descendants(process.pid)]
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    said = "interrupted: 1 of 2 checks were done: the worst of it is PASS; nothing was written"
    assert errors.splitlines()[-1] == said
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert [path.name for path in host.directory.glob("*report*")] == []


def test_a_node_in_use(host, capsys):
    """It is refused, and who uses it is said; by force every finding is marked."""
    (host.procfs / "77").mkdir()
    (host.procfs / "77/comm").write_text("python3\x1b\n")
    host.node.now("nvmlDeviceGetComputeRunningProcesses", val=[[77, 1 << 30, 0, 0]], dev=1)
    (one,) = host.refused(capsys)["checks"]
    assert (one["entity"], one["verdict"], one["cause"]) == ("gpu1", "SKIP", "busy")
    assert one["reason"] == "in use by process 77 (python3\x1b)"
    listed = [{**SOUND[0], "phase": "load"}]
    code, output, _ = host.run(listed, "--force", "--json", str(host.directory / "forced.json"))
    assert code == 0
    lines = output.splitlines()
    cells = ["pcie lanes", "gpu0-2", "16 lanes", "16 lanes", "PASS forced"]
    assert re.split("  +", lines[1]) == cells
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("PASS (forced): 3 GPUs")
    report = json.loads((host.directory / "forced.json").read_text())
    assert report["forced"]
    assert all(one["forced"] for one in report["checks"])
    code, report = host.report(SOUND)  # looking at it disturbs nobody
    assert (code, report["forced"]) == (0, False)


def test_a_rented_container(host, capsys):
    """It cannot see who else is on the GPUs: memory in use tells that nobody is, and it says so."""
    (host.procfs / "self/ns/pid").unlink()
    listed = [{**SOUND[0], "phase": "load"}]
    code, report = host.report(listed)
    assert (code, report["verdict"]) == (0, "PASS")
    assert [one["name"] for one in report["checks"] if one["verdict"] == "SKIP"] == ["idle"]
    host.node.now("nvmlDeviceGetMemoryInfo_v2", val=[80 << 30, 0, 0, 1 << 30])
    reasons = {one["reason"] for one in host.refused(capsys)["checks"]}
    assert reasons == {"1024 MiB of its memory are in use"}


def test_a_host_without_a_driver(host, capsys, monkeypatch):
    """With a GPU on the bus that is a failure, else there is nothing to accept."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(host.directory))
    assert main(host.words("--json", "-")) == 2
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, SCHEMA)
    (one,) = report["checks"]
    assert (one["name"], one["verdict"], one["cause"]) == ("driver", "FAIL", "driver")
    assert one["reason"].startswith("the bus has 3 NVIDIA GPUs (0000:1b:00.0, ")
    host.node.sysfs = host.directory / "nothing"
    host.node.sysfs.mkdir()
    assert main(host.words()) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("UNKNOWN: 0 GPUs: ")


FAULTS = (
    (["--gpu", "7"], "--gpu 7: no such GPU: here are 0, 1, 2"),
    (["--save", "--force"], "--save: not with --force: such figures are no baseline"),
    (["--json", "/nowhere/report"], "/nowhere/report: cannot be written: name a file in a"),
    (["--html", "/dev/null"], "/dev/null: cannot be written: name a file in a"),
    (["--html", "a", "--json", "a"], "--json, --html: both are a: name two files"),
    (["--canary.python", "/nowhere"], "/nowhere: cannot be run: --canary.python is an"),
    (["--compare", "/nowhere"], "/nowhere: cannot be read: No such file or directory"),
    (["--expect", ""], "gpuwatch verify: argument --expect: '': write 8, A100 or 8xA100"),
)


def test_faults_of_the_flags(host, capsys):
    """One line, before anything runs."""
    damaged = host.directory / "damaged.json"
    damaged.write_text('{"schema": "gpuwatch-verify", "version": 1, "time": 0, "checks": 1}')
    for words, said in (*FAULTS, (["--compare", str(damaged)], f"{damaged}: a damaged report: ")):
        assert main(host.words(*words)) == 64
        assert capsys.readouterr().err.startswith(said)


def test_a_gpu_that_hangs_does_not_hide_the_others(host):
    """It has a fault, and the others tell all."""
    host.node.now("nvmlDeviceGetVbiosVersion", takes_ms=-1, dev=1)
    facts = collect(host.node.sysfs, {}, [], gpu_seconds=1.0)
    assert [facts.gpus[number].get("fault") for number in range(3)] == [
        *(None, "the driver does not answer within 1 s", None)
    ]
    assert facts.gpus[1]["pci_bus_id"] == "0000:43:00.0"
    assert [pair["gpus"] for pair in facts.pairs] == [[0, 2]]
    assert facts.fault == ""


def test_one_file_that_fails_takes_nothing_else_with_it(host, monkeypatch):
    """A disk that is full by then loses its own file alone, and it is said at last."""
    whole = Path.write_text

    def full(path, text, **more):
        if "a.json" in path.name:
            raise OSError(28, "No space left on device")
        return whole(path, text, **more)

    monkeypatch.setattr(Path, "write_text", full)
    files = [host.directory / name for name in ("a.json", "a.html")]
    code, output, errors = host.run(SOUND, "--json", str(files[0]), "--html", str(files[1]))
    assert (code, [file.exists() for file in files]) == (64, [False, True])
    assert output.splitlines()[-1].startswith("PASS: 3 GPUs")
    assert errors.splitlines()[-1] == f"{files[0]}: cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("given", "unit", "shown"),
    [
        ([9e8, 1.2e9], "bytes", "900 MB to 1.2 GB"),
        ([1e9, 1.2e9], "bytes", "1 to 1.2 GB"),
        ([3, 3], "", "3"),
        ([0.021], "ratio", "2.1 %"),
        ([1.98e9, 1.5e9], "hertz", "1500 to 1980 MHz"),
        (["on", "off"], "", "2 different"),
        ([None], "", "-"),
    ],
)
def test_values_as_people_write_them(given, unit, shown):
    """With their unit, from the least to the most of those in a row."""
    assert values([found(value=value, unit=unit) for value in given]) == shown


def reported(findings, gpus=2, time=1.7e9):
    facts = [{"gpu": number, "pci_bus_id": "", "uuid": UUIDS[number]} for number in range(gpus)]
    node = Node(gpus=facts, driver={"version": "580.95.05"})
    return Report(verdict="PASS", findings=findings, time=time, seconds=1.0, node=node)


def rate(gpu, value, **about):
    return found(name="matmul", entity=f"gpu{gpu}", value=value, **RATE, **about)


def test_compared_with_an_earlier_report(tmp_path):
    """Values are compared card by card, wherever it is now; a loss of 5 % or another card warns."""
    before = reported([rate(0, 7e14), rate(1, 6e14)]).to_json()
    swapped = json.loads(json.dumps(before))
    swapped["gpus"][0]["uuid"], swapped["gpus"][1]["uuid"] = UUIDS[1], UUIDS[0]
    now = reported([rate(0, 6.05e14), rate(1, 7e14)])
    told = compare(now.to_json(), swapped, "old")
    assert [(one["what"], one["before"], one["now"]) for one in told["changes"]] == [
        *(("gpu", 0, 1), ("gpu", 1, 0))
    ]
    assert told["verdict"] == "PASS"
    told = compare(now.to_json(), before, "old")
    assert [(one["entity"], one["worse"]) for one in told["changes"]] == [
        *(("gpu0", True), ("gpu1", False))
    ]
    now.compared = told
    assert (told["verdict"], now.verdict, now.code) == ("WARN", "PASS", 1)
    jsonschema.validate(
        json.loads(json.dumps(now.to_json()))["compared"], SCHEMA["properties"]["compared"]
    )
    for damaged in ({**before, "time": 1e300}, {**before, "checks": [1]}, {"time": 0}):
        with pytest.raises(ConfigError, match="old: a damaged report"):
            compare(now.to_json(), damaged, "old")
    noisy = compare(reported([rate(0, 6.5e14, noise=0.1), rate(1, 6e14)]).to_json(), before, "old")
    assert noisy["changes"] == []
    replaced = json.loads(json.dumps(before))
    replaced["gpus"][0]["uuid"], replaced["versions"]["driver"] = "GPU-old", "570.1"
    told = compare(now.to_json(), replaced, "old")
    assert [(one["kind"], one["before"], one["now"], one["worse"]) for one in told["changes"]][
        :2
    ] == [*(("gpu", "GPU-old", UUIDS[0], True), ("version", "570.1", "580.95.05", False))]


def test_readings_become_the_baseline(host, capsys):
    """Those of a node that is accepted, in the state directory; then they are shown."""
    listed = [*SOUND, {"name": "speed", "read": [READING], "find": [BAD_LINK]}]
    code, _, errors = host.run(listed, "--save")
    assert (code, errors.splitlines()[-1]) == (2, "not saved: the verdict is FAIL")
    listed[1]["find"] = []
    code, report = host.report(listed, "--save")
    assert (code, report["versions"]["torch"]) == (0, "2.9.1")
    assert main(["baseline", "show", "--json", f"--path.state={host.directory / 'state'}",
                 f"--path.runtime={host.directory / 'runtime'}"]) == 0  # fmt: skip
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["canary"], shown["readings"], shown["last"]) == ("matmul", 1, 7e14)


def test_a_running_daemon_takes_the_readings(host, capsys, monkeypatch):
    """It has them at once, and by its lock no canary of its own comes in between."""
    listed = [{**SOUND[0], "phase": "load"}, {"name": "speed", "read": [READING]}]
    with host.node.running() as daemon:
        code, _, errors = host.run(listed, "--save")
        assert (code, errors.splitlines()[-1][:18]) == (0, "saved: 1 readings ")

        def kept():
            courses = json.loads(daemon.get("/api/v1/canaries")[1])["canaries"]
            return [reading["value"] for course in courses for reading in course["readings"]]

        assert wait_for(kept) == [7e14]
        with only_session(daemon.runtime / LOCK) as alone:
            assert alone
            monkeypatch.setattr(verify, "CANARIES_SECONDS", 0.0)
            assert main(host.words("--json", "-")) == 3
        report = json.loads(capsys.readouterr().out)
        assert report["checks"][0]["reason"] == "canaries run already on this host: try again later"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_page(host):
    """One file that asks for nothing; names of any kind are text, bars and sweep are drawn."""
    hostile = "<img src=x onerror=alert(1)><script>document.title='taken'</script>"
    speed = [
        {**RATE, "entity": f"gpu{number}", "verdict": "PASS", "value": 7e14 + number * 1e13}
        for number in range(3)
    ]
    sweep = {"verdict": "WARN", "entity": hostile, "reason": hostile, "next_step": "$verdict",
             "curve": [[1 << 20, 1e10], [1 << 28, 4e11]], "unit": "bytes_per_second"}  # fmt: skip
    host.node.script.devices[0]["name"] = hostile
    host.node.script.write(host.directory / "script")
    target = host.directory / "report.html"
    listed = [
        *SOUND,
        {"name": "matmul", "phase": "load", "find": speed},
        {"name": "sum", "phase": "load", "find": [sweep]},
    ]
    code, _, _ = host.run(listed, "--html", str(target))
    assert code == 1
    with Browser() as browser:
        browser.open(f"file://{target}")
        assert browser.run("document.title").startswith("WARN: ")
        assert browser.run("document.querySelectorAll('script, img, link').length") == 0
        assert browser.run("document.querySelectorAll('rect').length") == 3
        assert browser.run("document.querySelectorAll('polyline').length") == 1
        assert browser.text("body").count("NVIDIA H100") >= 2
        paper = "getComputedStyle(document.body).backgroundColor"
        light = browser.run(paper)
        browser.theme("dark")
        assert browser.run(paper) != light
        assert hostile in browser.text("body")
        assert browser.problems == []
        assert browser.requests == [f"file://{target}"]


def test_the_list_and_its_bounds(capsys):
    """What each check may take is said, and each may take something."""
    assert main(["verify", "--list"]) == 0
    listed = capsys.readouterr().out
    assert len({check.name for check in checks.CHECKS}) == len(checks.CHECKS)
    for check in checks.CHECKS:
        assert check.name in listed
        assert 0 < check.bound_seconds(8, False) <= QUICK_SECONDS
        assert 0 < check.bound_seconds(8, True) <= DEEP_SECONDS

"""`gpuwatch replay`: what today's rules say of a recording, and how it ends."""

import numpy as np
import pytest

from gpuwatch import cli
from gpuwatch.clock import ClockTriple
from gpuwatch.codec import Head, RowsBlock
from gpuwatch.commands import replay
from gpuwatch.gpu_signals import THROTTLE
from gpuwatch.recording import RecordingWriter
from gpuwatch.ring import RingSchema
from gpuwatch.signals import Column, Entity
from gpuwatch.summation import row_dtype

SECOND = 1_000_000_000
START = 3_000 * SECOND
WALL = 1_700_000_000 * SECOND  # 2023-11-14T22:13:20Z
PERIOD = 10_000_000
SCHEMA = RingSchema(
    "state.fast", "state", "nvml_state", (Column(Entity("gpu", "3"), THROTTLE),), PERIOD
)
HW_THERMAL, POWER_BRAKE, POWER_CAP = 0x40, 0x80, 0x4


@pytest.fixture
def recorded(tmp_path):
    """Return a function that records two minutes with a reason on between two seconds."""

    def make(bits=0, since=20, until=50, cut=False):
        count = 120 * SECOND // PERIOD
        rows = np.zeros(count, row_dtype(SCHEMA))
        passed = np.arange(count) * PERIOD
        rows["time_ns"] = START + passed
        on = (passed >= since * SECOND) & (passed < until * SECOND)
        rows["integers"][:, 0] = np.where(on, bits, 0)
        rows["sequence"] = np.arange(count) + 1
        head = Head(
            START,
            START + 120 * SECOND,
            (SCHEMA,),
            clocks=(ClockTriple(START, WALL, START),),
        )
        path = tmp_path / "made.gwr"
        writer = RecordingWriter(path, head)
        for second in range(120):
            low, high = second * 100, (second + 1) * 100
            floor = START + second * SECOND
            writer.rows(RowsBlock(0, PERIOD, floor, rows[low:high]))
        if cut:
            writer.abandon()
            return writer.temporary
        writer.close()
        return path

    return make


def run(capsys, *words):
    """Run the command; return its code, lines and errors."""
    code = cli.main(["replay", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out.splitlines(), told.err


def test_a_quiet_recording_ends_with_0(recorded, capsys):
    """Nothing fired is said, with how much was judged."""
    path = recorded()
    code, lines, _ = run(capsys, path, "--rules")

    assert (code, lines) == (0, [f"{path}: 0:02:00 judged: nothing fired"])


def test_an_alert_tells_when_where_and_what_to_do(recorded, capsys):
    """Offset, wall time, severity, rule, entity, value, limit and next step, and the top cause."""
    code, lines, _ = run(capsys, recorded(HW_THERMAL), "--rules")

    assert code == 2
    assert len(lines) == 3
    # 5 % of five minutes are fifteen seconds.
    assert lines[0].startswith(
        "+0:00:35 2023-11-14T22:13:55Z critical gpu_hw_thermal_slowdown on gpu 3:"
        " value 0.05, limit 0.05: Take the node out of the pool"
    )
    assert lines[1].startswith("    heat: hw_thermal_slowdown held 43 % of the last 35 s")
    assert lines[2].endswith("1 critical; detected: gpu_hw_thermal_slowdown 1")


@pytest.mark.parametrize(
    ("bits", "until", "code", "fired"),
    [(POWER_BRAKE, 30, 1, "1 warning"), (POWER_BRAKE, 50, 2, "1 warning, 1 critical")],
)
def test_the_worst_severity_is_the_code(recorded, capsys, bits, until, code, fired):
    """1 for warnings, 2 once anything critical fired."""
    found, lines, _ = run(capsys, recorded(bits, until=until), "--rules")

    assert found == code
    assert f"judged: {fired}" in lines[-1]


def test_information_is_no_fault(recorded, capsys):
    """A power cap for long enough is listed, and ends with 0."""
    path = recorded(POWER_CAP, since=0, until=120)
    code, lines, _ = run(capsys, path, "--rules", "--for", "6m")

    assert code == 0
    # Beyond the first round there is no wall time to tell.
    assert lines[0].startswith("+0:05:00 info     gpu_power_capped on gpu 3: ")
    assert "0:06:00 judged: 1 info" in lines[-1]


def test_the_configs_rules_are_used(recorded, tmp_path, capsys):
    """What was tuned in the config is what is tried on the recording."""
    config = tmp_path / "c.toml"
    config.write_text("[rules.gpu_hw_thermal_slowdown]\nenabled = false\n")
    path = recorded(HW_THERMAL)
    code, lines, _ = run(capsys, path, "--rules", "--config", config)
    assert (code, lines) == (0, [f"{path}: 0:02:00 judged: nothing fired"])

    config.write_text("[rules.nosuch]\nlimit = 1\n")
    code, lines, error = run(capsys, path, "--rules", "--config", config)
    assert (code, lines) == (64, [])
    assert "nosuch" in error


def test_a_recording_cut_short_is_judged_as_far_as_it_goes(recorded, capsys):
    """What is there is judged, and that it was cut is said."""
    code, lines, _ = run(capsys, recorded(cut=True), "--rules")

    assert code == 0
    assert lines[0].endswith(
        "0:01:59 judged (cut short: the last 1.0 s are missing): nothing fired"
    )


def test_bundled_is_the_recording_of_the_package(recorded, capsys, monkeypatch):
    """The word stands for the file that comes with gpuwatch."""
    monkeypatch.setattr(replay, "BUNDLED_RECORDING", recorded())
    code, lines, _ = run(capsys, "bundled", "--rules", "--for", "2s")

    assert code == 0
    assert "0:00:02 judged: nothing fired" in lines[0]


@pytest.mark.parametrize("content", [None, b"", b"no recording\n"])
def test_what_is_no_recording_is_refused_in_one_line(tmp_path, capsys, content):
    """A missing, empty or foreign file names itself and the fix."""
    path = tmp_path / "x.gwr"
    if content is not None:
        path.write_bytes(content)
    code, lines, error = run(capsys, path, "--rules")

    assert (code, lines) == (64, [])
    assert error.count("\n") == 1
    assert str(path) in error

"""`gpuwatch check`: what it says of this host, and that nothing can hang it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import Script, build, environment
from running import Running, free_port, only

QUIET = only("nvml_state") + "[state]\nbudget_ratio = 1.0\nrealtime = false\n"


def check(directory, *words, config=QUIET, env=None, runtime=None, prefix=()):
    """Run the command in a directory of its own; return its code and its lines."""
    (directory / "check.toml").write_text(config)
    done = subprocess.run(
        [
            *prefix,
            *(sys.executable, "-m", "gpuwatch", "check", "--config", "check.toml"),
            *("--path.runtime", str(runtime or directory / "runtime")),
            *("--path.state", str(directory / "state")),
            *("--web.listen-address", f"127.0.0.1:{free_port()}"),
            *words,
        ],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout.splitlines(), done.stderr


def line(lines, what, text=""):
    """Return the one line about `what` that has the text, as (verdict, line)."""
    found = [one for one in lines if one.split()[1:2] == [what] and text in one]
    assert len(found) == 1, (what, text, lines)
    return found[0].split()[0], found[0]


def test_a_healthy_node_passes_and_nothing_is_made(tmp_path):
    """Every part of the host is told, the refresh of values is measured, the disk is untouched."""
    code, lines, error = check(tmp_path, "--source", "simulated")

    assert (code, error) == (0, "")
    for what in ("config", "runtime", "rings", "state", "listen", "privileges", "source", "cost"):
        assert line(lines, what)[0] == "ok"
    assert "Simulated H200, GPU-51300000-0000-4000-8000-000000000005" in "".join(lines)
    power = next(one for one in lines if one.split()[0] == "gpu_power_watts").split()
    assert power[1:4] == ["8", "of", "8"]
    assert 80 <= float(power[4]) <= 120
    assert power[5:8] == ["ms", "8", "ms"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.toml"]


def test_a_running_gpuwatch_is_no_fault(tmp_path):
    """The port of a daemon that runs is taken, and that is well; by anyone else it is not."""
    with Running(tmp_path, "--source", "simulated", config="[simulated]\ngpus = 1\n") as running:
        mine = ("--web.listen-address", f"127.0.0.1:{running.port}")
        code, lines, _ = check(tmp_path, "--source", "simulated", *mine)
        elsewhere = check(tmp_path, "--source", "simulated", *mine, runtime=tmp_path / "elsewhere")
        pid = running.child("daemon")

    assert code == 0
    assert f"process {pid}" in line(lines, "listen", "taken by the running gpuwatch")[1]
    assert f"process {pid}" in line(lines, "runtime")[1]
    assert elsewhere[0] == 64
    assert "--web.listen-address" in line(elsewhere[1], "listen", mine[1])[1]


def test_what_run_would_refuse_is_64(tmp_path):
    """A port that something else holds and a directory that cannot be: each names its fix."""
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code, lines, _ = check(
            tmp_path,
            *("--source", "simulated", "--web.listen-address", address),
            runtime=tmp_path / "file" / "below",
        )

    assert code == 64
    verdict, told = line(lines, "listen", address)
    assert verdict == "fail"
    assert "--web.listen-address" in told
    verdict, told = line(lines, "runtime")
    assert verdict == "fail"
    assert "choose another" in told


def test_all_faults_of_the_config_are_told(tmp_path):
    """A wrong config ends the check with one line for each fault."""
    code, lines, error = check(tmp_path, config="[ring]\nseconds = 1\n[nosuch]\n")

    assert (code, lines) == (64, [])
    assert error.count("\n") == 2


def test_a_recording_is_checked_instead_of_a_driver(tmp_path):
    """With a replay the file is looked at, and must be a recording."""
    (tmp_path / "no.gwr").write_text("no recording")
    code, _, error = check(tmp_path, "--source", "replay:no.gwr")

    assert code == 64
    assert "not a gpuwatch recording" in error


def test_a_collector_that_is_off_is_told(tmp_path):
    """Nothing to read is a warning that names the flag."""
    code, lines, _ = check(tmp_path, "--source", "simulated", "--no-collector.nvml_state")

    assert code == 1
    assert "--collector" in line(lines, "sources")[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a capability to give up")
def test_a_missing_privilege_is_told(tmp_path):
    """Without CAP_SYS_NICE the priority is a warning, with the fix."""
    without = ("setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice")
    config = QUIET.replace("realtime = false\n", "")
    code, lines, _ = check(tmp_path, "--source", "simulated", config=config, prefix=without)

    assert code == 1
    assert "CAP_SYS_NICE" in line(lines, "privileges")[1]


@pytest.fixture
def nvml(tmp_path):
    """Return a function that checks against a fake driver with two GPUs and a script."""
    for bus in ("1b", "43"):
        device = tmp_path / f"sys/bus/pci/devices/0000:{bus}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
    library = build(tmp_path / "lib")

    def run(*steps, config=QUIET):
        script = Script(devices=2)
        for function, arguments in steps:
            script.step(0, function, **arguments)
        script.write(tmp_path / "script")
        env = environment(tmp_path / "script", library)
        return check(tmp_path, "--path.sysfs", str(tmp_path / "sys"), config=config, env=env)

    yield run
    # A call that never returns holds its process, as a real one does.
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(tmp_path / "script").encode() in (path / "environ").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


def test_gpus_are_told_by_address_and_name(nvml):
    """A driver that answers is told with its GPUs and signals."""
    code, lines, _ = nvml()

    assert code == 0
    for address in ("0000:1b:00.0", "0000:43:00.0"):
        verdict, told = line(lines, "gpu", address)
        assert verdict == "ok"
        assert "NVIDIA H100 80GB HBM3, GPU-00000000-0000-4000-8000-" in told
    assert line(lines, "source", "nvml_state")[0] == "ok"


def test_a_signal_that_no_gpu_has_is_absent_and_no_fault(nvml):
    """What the hardware does not offer is told, and is not 0."""
    code, lines, _ = nvml(("nvmlDeviceGetUtilizationRates", {"ret": "NOT_SUPPORTED"}))

    assert code == 0
    row = next(one for one in lines if one.split()[0] == "gpu_utilization_ratio")
    assert row.split()[1] == "absent"
    assert line(lines, "errors", "not_supported")[0] == "ok"


def test_a_lost_gpu_is_a_warning_with_its_reason(nvml):
    """A GPU that the driver refuses is named with the reason; the other one passes."""
    code, lines, _ = nvml(("nvmlDeviceGetHandleByPciBusId", {"ret": "GPU_IS_LOST", "dev": 1}))

    assert code == 1
    verdict, told = line(lines, "gpu", "0000:43:00.0")
    assert verdict == "warn"
    assert "gpu_is_lost" in told
    assert line(lines, "gpu", "0000:1b:00.0")[0] == "ok"


HANGING = QUIET + "read_deadline_seconds = 0.3\ninit_deadline_seconds = 2\n"


@pytest.mark.parametrize("function", ["nvmlDeviceGetTemperature", "nvmlDeviceGetHandleByPciBusId"])
def test_a_gpu_that_hangs_is_named_and_the_other_is_checked(nvml, function):
    """A call that never returns cannot hang the check, when reading or when opening."""
    patient = HANGING.replace("init_deadline_seconds = 2", "init_deadline_seconds = 10")
    code, lines, _ = nvml((function, {"dev": 0, "takes_ms": -1}), config=patient)

    assert code == 1
    verdict, told = line(lines, "gpu", "0000:1b:00.0")
    assert verdict == "warn"
    assert "holds a driver call" in told
    assert line(lines, "gpu", "0000:43:00.0")[0] == "ok"


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (("nvmlInit", {"takes_ms": -1}), "does not answer within 2 s"),
        (("nvmlInit", {"ret": "LIB_RM_VERSION_MISMATCH"}), "reload the module or reboot"),
        (("nvmlInit", {"ret": "DRIVER_NOT_LOADED"}), "load the NVIDIA kernel module"),
        (("nvmlDeviceGetTemperature", {"ret": "crash", "dev": 0}), "SIGSEGV"),
        (("nvmlDeviceGetHandleByPciBusId", {"ret": "GPU_IS_LOST"}), "none answers"),
    ],
)
def test_a_driver_that_does_not_work_fails(nvml, step, told):
    """No driver, one that hangs, another version, a crash, no GPU: code 2 and the fix."""
    code, lines, _ = nvml(step, config=HANGING)

    assert code == 2
    assert any(told in one for one in lines)


def test_fewer_gpus_than_expected_is_a_warning(nvml):
    """The config may know better how many there should be."""
    code, lines, _ = nvml(config=QUIET + "[gpus]\nexpected = 8\n")

    assert code == 1
    assert "2 answer of 8 expected" in line(lines, "gpus")[1]


def test_reading_above_the_budget_is_a_warning(tmp_path):
    """Cost is measured against the budget, and the fix is named."""
    code, lines, _ = check(tmp_path, "--source", "simulated", config=QUIET.replace("1.0", "0.001"))

    assert code == 1
    assert "state.period_ms" in line(lines, "cost")[1]

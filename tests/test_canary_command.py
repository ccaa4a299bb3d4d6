"""`gpuwatch canary run` on a node of scripted GPUs, with interpreters that only pretend."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from node import IdleHost
from pretend import PREAMBLE
from rdma_tree import Tree
from running import descendants, wait_for

from gpuwatch.canaries import CANARIES, USUAL
from gpuwatch.cli import main
from gpuwatch.errors import SourceUnavailable
from gpuwatch.lease import Leases, this_boot
from gpuwatch.look import Looks
from gpuwatch.paths import CONTROL
from gpuwatch.store import Store

UUIDS = [f"GPU-00000000-0000-4000-8000-{number:012d}" for number in range(2)]
# A canary's child that tells one result, of the time since it began, after some looks at the GPU.
MEASURES = """
start = time.monotonic_ns()
time.sleep(0.2)
for rank in range(settings["ranks"]):
    say(reading={"gpu": rank, "size": settings["size"], "dtype": "bf16", "value": 7.84e14,
        "spread": 0.01, "environment": {"torch": "2.9.1", "cuda": None}, "start_ns": start,
        "end_ns": time.monotonic_ns(), **MORE})
"""
PROCESS = [[1, 1 << 30, 0, 0]]  # as a driver lists it
LASTS = """
say(phase="measure", rank=0)
time.sleep(100)
"""


class Host(IdleHost):
    """Some idle GPUs, and what is called on them."""

    def __init__(self, directory, monkeypatch, gpus):
        super().__init__(directory, monkeypatch, gpus)
        self.interpreter(f"MORE = {{}}\n{MEASURES}")

    def interpreter(self, program):
        """Have the children run that program instead of a canary."""
        (self.directory / "program.py").write_text(PREAMBLE + program)
        self.python = self.directory / "python"
        self.python.write_text(f"#!/bin/sh\nexec {sys.executable} {self.directory}/program.py\n")
        self.python.chmod(0o755)

    def words(self, *words):
        return ["canary", "run", *words, *self.places, f"--canary.python={self.python}"]

    def command(self, *words):
        """Start the command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "gpuwatch", *self.words(*words)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, capsys, *words):
        """Return the exit code and the results."""
        code = main(self.words(*words, "--json"))
        output, errors = capsys.readouterr()
        assert errors == ""
        return code, json.loads(output)


@pytest.fixture
def host(tmp_path, monkeypatch, request):
    return Host(tmp_path, monkeypatch, getattr(request, "param", 2))


def test_readings_of_idle_gpus(host, capsys):
    """Each GPU's reading has its identity, its clock meanwhile, and what a healthy card gives."""
    host.node.now("nvmlDeviceGetClockInfo:sm", val=1_600, dev=1)
    host.node.now("nvmlDeviceGetCurrentClocksThrottleReasons", val=0x40 | 0x4, dev=1)
    host.node.now("nvmlDeviceGetCurrentClocksEventReasons", val=0x40 | 0x4, dev=1)
    code, results = host.run(capsys, "matmul")
    assert code == 0
    assert [one["gpu"] for one in results] == [0, 1]
    assert [one["entity"] for one in results] == [["gpu", uuid] for uuid in UUIDS]
    first, second = results
    assert (first["canary"], first["result"], first["size"]) == ("matmul", "ok", 8192)
    assert first["model"] == "NVIDIA H100 80GB HBM3"
    assert first["environment"] == {
        "driver": "580.95.05",
        "vbios": "96.00.89.00.00",
        "power_limit_watts": "700",
        "ecc": "on",
        "torch": "2.9.1",
    }
    assert first["clock_hertz"] == 1.98e9
    assert first["value_per_hertz"] == pytest.approx(7.84e14 / 1.98e9)
    assert second["value_per_hertz"] == pytest.approx(7.84e14 / 1.6e9)
    assert first["power_watts"] == pytest.approx(310)
    assert (first["throttle_seconds"], first["temperature_celsius"]) == (0, 41)
    assert second["throttle_seconds"] >= 0.2
    assert 0.9 < first["expected_ratio"] < 1.2  # of 784 TFLOPS in bf16
    assert first["expected_ratio"] == pytest.approx(first["value"] / first["expected"])


def test_clocks_that_somebody_set_are_a_part_of_the_environment(host, capsys):
    """Application clocks as NVML has them; a lock of the GPU's clocks only by what it does."""
    host.node.now("nvmlDeviceGetApplicationsClock:graphics", val=1_410, dev=0)
    host.node.now("nvmlDeviceGetClockInfo:sm", val=1_515, dev=1)
    for name in ("Throttle", "Event"):
        host.node.now(f"nvmlDeviceGetCurrentClocks{name}Reasons", val=0x2, dev=1)
    _, results = host.run(capsys, "matmul")
    assert [one["environment"].get("locked_clocks") for one in results] == ["2619/1410", "1500"]
    host.node.now("nvmlDeviceGetApplicationsClock", ret="NOT_SUPPORTED", dev=0)
    host.node.now("nvmlDeviceGetClockInfo:sm", val=1_965, dev=1)  # as high as ever
    _, results = host.run(capsys, "matmul")
    assert ["locked_clocks" in one["environment"] for one in results] == [False, False]


def test_a_table_for_people(host, capsys):
    """One GPU, chosen by number, in a line; another size is no measure of the card."""
    code = main(host.words("matmul", "--gpu", "1", "--size", "tiny"))
    header, line = capsys.readouterr().out.splitlines()
    assert code == 0
    titles = ("GPU", "CANARY", "SHAPE", "VALUE", "EXPECTED", "SPREAD", "SM CLOCK", "RESULT")
    assert tuple(re.split("  +", header)) == titles
    cells = ("1", "matmul", "256 bf16", "784 TFLOPS", "-", "1.0%", "1980 MHz", "ok")
    assert tuple(re.split("  +", line)) == cells


USED = [
    ("nvmlDeviceGetComputeRunningProcesses", {"val": PROCESS}, "in use by process 1"),
    ("nvmlDeviceGetGraphicsRunningProcesses", {"val": PROCESS}, "in use by process 1"),
    ("nvmlDeviceGetMPSComputeRunningProcesses", {"val": PROCESS}, "in use by process 1"),
    ("nvmlDeviceGetComputeRunningProcesses", {"ret": "UNKNOWN"}, "does not tell"),
    ("nvmlDeviceGetUtilizationRates", {"val": [100, 0]}, "utilization is 100%"),
    ("nvmlDeviceGetMemoryInfo_v2", {"val": [80 << 30, 0, 0, 1 << 30]}, "1024 MiB"),
    ("nvmlDeviceGetComputeMode", {"val": 3}, "exclusive process"),
    ("mig", {"val": [{"gi": 1}]}, "MIG is on"),
    ("nvmlDeviceGetHandleByPciBusId", {"ret": "GPU_IS_LOST"}, "does not answer (gpu_is_lost)"),
]


@pytest.mark.parametrize("host", [len(USED) + 1], indirect=True)
def test_busy_gpus_are_left_alone(host, capsys):
    """What runs there is not disturbed: they are skipped with the reason, the idle one is not."""
    for number, (function, step, _) in enumerate(USED):
        host.node.now(function, dev=number, **step)
    code, results = host.run(capsys, "matmul")
    assert code == 3
    assert [one["gpu"] for one in results] == list(range(len(USED) + 1))
    for told, (_, _, part) in zip(results, USED, strict=False):
        assert (told["result"], told.get("value")) == ("skipped", None)
        assert part in told["detail"]
    assert results[-1]["result"] == "ok"


def test_force_runs_and_says_so(host, capsys):
    """Who must measure beside somebody may, and the reading tells beside whom."""
    host.node.now("nvmlDeviceGetComputeRunningProcesses", dev=0, val=PROCESS)
    code, (first, second) = host.run(capsys, "matmul", "--force")
    assert code == 0
    assert (first["result"], first["detail"]) == ("ok", "forced, GPU 0: in use by process 1")
    assert second["detail"] == ""


def test_a_container_that_sees_nobody_is_left_alone(host, capsys):
    """Without the host's process ids it is not known who else uses the GPU."""
    (host.procfs / "self/ns/pid").unlink()
    (host.procfs / "self/ns/pid").symlink_to("pid:[4026532445]")
    code, results = host.run(capsys, "matmul", "--gpu", "0")
    assert code == 3
    assert "--pid=host" in results[0]["detail"]


def test_a_scheduler_s_job_is_left_alone(host, capsys, monkeypatch):
    """Unless it is the one that calls: in its prolog, or by its user."""
    (host.procfs / "20").mkdir()
    (host.procfs / "20/cgroup").write_text("0::/system.slice/slurmstepd.scope/job_9/step_0\n")
    code, results = host.run(capsys, "matmul")
    assert code == 3
    assert [one["detail"] for one in results] == ["a job of Slurm runs here: 9"]
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    assert host.run(capsys, "startup", "--gpu", "0")[0] == 0


@pytest.mark.parametrize(
    ("call", "value", "detail"),
    [
        ("nvmlDeviceGetComputeRunningProcesses", PROCESS, "process 1 came"),
        # A prolog's: the job's own context would fail beside ours.
        ("nvmlDeviceGetComputeMode", 3, "compute mode was set to exclusive process"),
    ],
)
def test_a_process_that_comes_ends_the_run(host, call, value, detail):
    """The canary is gone soon after somebody else is on its GPU, and gives no value."""
    host.interpreter(LASTS)
    with host.command("matmul", "--gpu", "0", "--json") as command:
        (canary,) = wait_for(lambda: children_named(command.pid, "program.py"))
        host.node.now(call, dev=0, val=value)
        output, _ = command.communicate(timeout=60)
    assert command.returncode == 3
    (result,) = json.loads(output)
    assert (result["result"], result["value"]) == ("aborted", None)
    assert result["detail"] == f"GPU 0: {detail}"
    assert not Path(f"/proc/{canary}").exists()


@pytest.mark.parametrize("host", [3], indirect=True)
def test_a_job_that_begins_ends_all_that_is_to_come(host):
    """It may have no process on a GPU yet; the canary that runs is ended, and none follows."""
    host.interpreter(LASTS)
    with host.command("matmul", "--json") as command:
        wait_for(lambda: children_named(command.pid, "program.py"))
        (host.procfs / "20").mkdir()
        (host.procfs / "20/cgroup").write_text("0::/system.slice/slurmstepd.scope/job_9/step_0\n")
        output, _ = command.communicate(timeout=60)
    results = json.loads(output)
    assert [one["result"] for one in results] == ["aborted", "skipped", "skipped"]
    assert {one["detail"] for one in results} == {"a job of Slurm runs here: 9"}


@pytest.mark.parametrize("host", [6], indirect=True)
def test_a_pause_ends_all_that_is_to_come(host):
    """Of many GPUs the one that runs is the last; none begins after the word."""
    host.interpreter(f"open(__file__ + '.starts', 'a').write('.')\n{LASTS}")
    (host.directory / "state").mkdir()
    store = Store(host.directory / "state/gpuwatch.sqlite")
    with host.command("matmul", "memory", "--json") as command:
        starts = wait_for(host.directory.joinpath("program.py.starts").exists)
        Leases(store, this_boot()).grant("canaries", 60.0)
        output, _ = command.communicate(timeout=60)
    store.close()
    assert starts
    assert (host.directory / "program.py.starts").read_text() == "."
    results = json.loads(output)
    assert [one["result"] for one in results][:2] == ["aborted", "skipped"]
    assert {one["reason"] for one in results[1:]} == {"paused"}


def test_an_interpreter_by_a_relative_path(host, capsys, monkeypatch):
    """It is that of the directory in which the command is called."""
    monkeypatch.chdir(host.directory)
    host.python = "./python"
    assert host.run(capsys, "matmul", "--gpu", "0")[0] == 0


def test_the_size_of_the_config(host, capsys):
    """It is that of the daemon's canaries, so that readings compare; a flag counts more."""
    config = host.directory / "config.toml"
    config.write_text('[canary]\nsize = "small"\n')
    words = ("matmul", "--gpu", "0", f"--config={config}")
    assert host.run(capsys, *words)[1][0]["size"] == 4096
    assert host.run(capsys, *words, "--size", "full")[1][0]["size"] == 8192


def test_a_daemon_of_another_version_costs_no_verdict(host, capsys, monkeypatch):
    """After an upgrade without a restart: results are printed, and a line says what to do."""
    runtime = host.directory / "daemon"
    runtime.mkdir()
    (runtime / CONTROL).touch()
    monkeypatch.setattr("gpuwatch.control.request", lambda *_: {"version": "0"})
    code = main([*host.words("matmul", "--gpu", "0"), f"--path.runtime={runtime}"])
    assert code == 0
    assert capsys.readouterr().err == (
        "not handed over to the daemon: it is of another version: restart it\n"
    )


@pytest.mark.parametrize("host", [5], indirect=True)
def test_what_is_not_well_is_told(host, capsys):
    """Of each GPU, whether it was wrong, failed, said nonsense or could not be tested."""
    host.interpreter(
        "number = int(os.environ['CUDA_VISIBLE_DEVICES'][-12:])\n"
        "MORE = [{'result': 'wrong', 'detail': 'rows 5 are wrong'}, {'environment': None}, {}, {},"
        " {'value': float('nan')}][number]\n"
        "say(phase='context', rank=0)\n"
        "if number == 2: os.kill(os.getpid(), 11)\n"
        "if number == 3: say(error='no torch', cause='environment'); sys.exit()\n" + MEASURES
    )
    code, results = host.run(capsys, "matmul")
    assert code == 2
    assert [(one["gpu"], one["result"], one["detail"]) for one in results] == [
        (0, "wrong", "rows 5 are wrong"),
        (1, "failed", "says a result that is none"),
        (2, "failed", "ended by SIGSEGV in phase context"),
        (3, "skipped", "no torch"),
        (4, "failed", "says a result that is none"),
    ]
    assert results[2]["entity"] == ["gpu", "GPU-00000000-0000-4000-8000-000000000002"]


def test_torch_of_processors_on_a_node_with_gpus(host, capsys, tmp_path, monkeypatch):
    """It is told at once that this torch cannot reach them: nothing was tested."""
    package = tmp_path / "site/torch"
    (package / "distributed").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "class version:\n    cuda = None\n__version__ = '2.13.0+cpu'\n"
    )
    (package / "distributed/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    host.python = sys.executable
    code, results = host.run(capsys, "matmul", "--gpu", "0")
    assert code == 3
    assert "torch 2.13.0+cpu is built without CUDA" in results[0]["detail"]


def test_what_is_done_together(host, capsys):
    """An all-reduce is one run of all GPUs; with one of them busy, or alone, it is skipped."""
    host.interpreter(
        "MORE = {}"
        + MEASURES.replace('"gpu": rank', '"gpu": -1').replace(
            "range(settings", "range(1, settings"
        )
    )
    code, (result,) = host.run(capsys, "allreduce")
    assert (code, result["gpu"], result["entity"]) == (0, None, ["host", ""])
    assert result["model"] == "NVIDIA H100 80GB HBM3"
    assert result["environment"]["gpu_set"] == "0,1"
    code, (result,) = host.run(capsys, "allreduce", "--gpu", "1")
    assert (code, result["result"]) == (3, "skipped")
    assert "2 GPUs or more" in result["detail"]
    host.node.now("nvmlDeviceGetComputeMode", val=3, dev=1)
    code, (result,) = host.run(capsys, "allreduce")
    assert (code, result["detail"][:6]) == (3, "GPU 1:")


def test_what_goes_by_nics_takes_one(host, capsys):
    """Without a NIC whose RDMA port is up it is skipped, and with RDMA in software alone."""
    host.interpreter(
        "MORE = {}"
        + MEASURES.replace('"gpu": rank', '"gpu": -1').replace(
            "range(settings", "range(1, settings"
        )
    )
    tree = Tree(host.node.sysfs)
    code, (result,) = host.run(capsys, "allreduce_net")
    assert (code, result["result"], result["reason"]) == (3, "skipped", "not_ready")
    assert "no RDMA port of a NIC is up" in result["detail"]
    tree.device("rxe0")
    assert host.run(capsys, "allreduce_net")[0] == 3
    tree.device("mlx5_0")
    tree.pci("mlx5_0", "0000:1a:00.0")
    code, (result,) = host.run(capsys, "allreduce_net")
    assert (code, result["result"], result["expected"]) == (0, "ok", None)
    tree.show("mlx5_0", state="1: DOWN")
    assert host.run(capsys, "allreduce_net")[0] == 3


def test_a_state_that_is_kept_from_us(tmp_path):
    """Who may not see whether canaries are paused is told so in a line: none runs."""
    (tmp_path / "state").mkdir(mode=0o700)
    shell = f"""
import os, pathlib
from gpuwatch.commands.canary import kept
os.setuid(65534)
try:
    kept(pathlib.Path({str(tmp_path / "state")!r}))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", shell], capture_output=True, text=True, check=True)
    file = tmp_path / "state/gpuwatch.sqlite"
    assert done.stdout == f"StateError {file}: permission denied: run as root\n"


def test_all_leaves_the_network_alone(host, capsys):
    """What puts load on it is run where it is named."""
    _, results = host.run(capsys, "all")
    assert {one["canary"] for one in results} == set(USUAL)
    _, results = host.run(capsys, "all", "allreduce_net")
    assert {one["canary"] for one in results} == set(CANARIES)


def test_what_a_daemon_has_kept(host, capsys):
    """Its numbers of the GPUs are used, and what was released stays so when it has ended."""
    (host.directory / "state").mkdir()
    store = Store(host.directory / "state/gpuwatch.sqlite")
    assert store.gpu_numbers(["0000:43:00.0"]) == {"0000:43:00.0": 0}
    leases = Leases(store, this_boot())
    leases.grant("gpus", 60.0)
    code, results = host.run(capsys, "startup")
    assert code == 3
    assert [(one["result"], one["gpu"]) for one in results] == [("skipped", None)]
    assert "gpuwatch resume gpus" in results[0]["detail"]
    leases.end("gpus")
    store.close()
    code, (result,) = host.run(capsys, "startup", "--gpu", "0")
    assert (code, result["entity"]) == (0, ["gpu", UUIDS[1]])


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["matmul", "--gpu", "7"], 3, "--gpu 7: no such GPU: here are 0, 1"),
        (["nothing"], 64, "invalid choice: 'nothing'"),
        (["matmul", "--cpu", "--gpu", "0"], 64, "--cpu: takes no --gpu, --force, --size"),
        (["matmul", "--cpu", "--size", "full"], 64, "--cpu: takes no --gpu, --force, --size"),
        (["matmul", "--cpu", "--budget", "3s"], 64, "--cpu: takes no --gpu, --force, --size"),
        (
            ["matmul", "--canary.python=/nowhere"],
            64,
            "[canary] python /nowhere: not an interpreter",
        ),
    ],
)
def test_faults_of_the_caller(host, capsys, words, code, part):
    """They are one line that names the flag."""
    assert main([*host.words(), *words]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line


def test_a_driver_that_hangs_does_not_hang_the_command(host):
    """A look that is not answered ends the run; the canary is gone, the command returns."""
    host.interpreter(LASTS)
    with host.command("matmul", "--gpu", "0") as command:
        wait_for(lambda: children_named(command.pid, "program.py"), what="the canary runs")
        host.node.now("nvmlDeviceGetClockInfo", takes_ms=-1)
        output, _ = command.communicate(timeout=60)
    assert command.returncode == 3
    assert "the driver has not answered for 2 s" in output
    wait_for(lambda: not host.node.users(), what="the child that looked is gone")


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_gpu_that_hangs_when_it_is_opened_is_named(host):
    """The look ends at its deadline and says which GPU holds it; the child is told to end."""
    host.node.now("nvmlDeviceGetHandleByPciBusId", dev=1, takes_ms=-1)
    with pytest.raises(SourceUnavailable, match="GPU 1: the driver does not answer"):
        Looks(host.node.sysfs, {}, [], open_seconds=1)
    wait_for(lambda: not host.node.users())


def test_a_driver_without_gpus_is_told_at_once(tmp_path, monkeypatch):
    """A node whose driver runs but has no GPU: one line, no wait."""
    host = Host(tmp_path, monkeypatch, 0)
    with pytest.raises(SourceUnavailable, match="no NVIDIA GPU"):
        Looks(host.node.sysfs, {}, [])


def children_named(pid, part):
    return [child for child, command in descendants(pid) if part in command]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_canary(host, number):
    """Ctrl-C, or the word of a timeout, leaves nothing behind: no process, no file."""
    host.environment["TMPDIR"] = str(host.directory)
    host.interpreter(LASTS)
    with host.command("matmul", "--gpu", "0") as command:
        (canary,) = wait_for(lambda: children_named(command.pid, "program.py"))
        command.send_signal(number)
        _, errors = command.communicate(timeout=60)
    assert (command.returncode, errors) == (130, "")
    wait_for(lambda: not host.node.users() and not Path(f"/proc/{canary}").exists())
    assert not list(host.directory.glob("gpuwatch-canary-*"))

"""`gpuwatch canary run --between-jobs`: what an epilog has time for, and its verdict."""

import pytest
from test_canary_command import LASTS, MEASURES, PROCESS, Host

from gpuwatch.canary_reading import CanaryReading
from gpuwatch.commands.canary import BETWEEN_JOBS, USED_UP, verdict
from gpuwatch.session import Result
from gpuwatch.signals import HOST

BETWEEN = ["--between-jobs", "--budget", "90s"]
ALONE = ("matmul", "memory", "pcie")
# Goes on once another has come to the same canary.
MEETS = """
place = os.path.dirname(__file__) + "/" + settings["canary"]
open(place, "a").write(".")
while settings["ranks"] == 1 and len(open(place).read()) < 2:
    time.sleep(0.01)
"""


def test_between_jobs(tmp_path, capsys, monkeypatch):
    """Those of the job's GPUs that its epilog has time for, side by side; its code is a verdict."""
    host = Host(tmp_path, monkeypatch, 2)
    host.interpreter(f"{MEETS}MORE = {{}}\n{MEASURES}")
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    code, results = host.run(capsys, *BETWEEN)
    assert code == 0
    assert [one["canary"] for one in results[::2]] == list(BETWEEN_JOBS)
    assert {one["gpus"] for one in results if one["canary"] in ALONE} == {2}
    assert {str(one["at_once"]) for one in results if one["canary"] in ALONE} == {"[0, 1]"}
    host.node.now("nvmlDeviceGetComputeRunningProcesses", dev=0, val=PROCESS)
    host.interpreter(f"MORE = {{}}\n{MEASURES}")
    code, results = host.run(capsys, *BETWEEN)
    assert code == 3  # one is in use
    ran = [(one["canary"], one["gpu"], one["gpus"]) for one in results if one["result"] == "ok"]
    assert ran == [(name, 1, 1) for name in ALONE]
    monkeypatch.setenv("SLURM_JOB_GPUS", "1")
    assert {one["gpu"] for one in host.run(capsys, "--between-jobs", "matmul")[1]} == {1}
    monkeypatch.delenv("SLURM_JOB_GPUS")  # no scheduler, or one of another kind
    assert {one["gpu"] for one in host.run(capsys, "--between-jobs", "matmul")[1]} == {0, 1}
    host.interpreter(LASTS)
    code, results = host.run(capsys, "--between-jobs", "--budget", "50ms", "--gpu", "1")
    assert code == 3  # nothing came to its end
    assert {one["detail"] for one in results if one["canary"] != "allreduce"} == {USED_UP}


@pytest.mark.parametrize(
    ("judged", "code"),
    [
        ([{}], 0),
        ([{"loss": 0.0, "retest": False}, {"loss": None}], 0),
        ([{"loss": None, "retest": True}], 1),
        ([{"loss": 0.03, "retest": False}], 1),
        ([{"loss": 0.03}, {"loss": 0.05}], 2),
        ([{"loss": 0.0, "node_loss": 0.2}], 1),  # the whole node is slower
    ],
)
def test_what_the_daemon_thinks_of_it_is_the_verdict(judged, code):
    """A GPU that is slower than it was is a warning, or a failure if it is much."""
    passed = Result(canary="matmul", reading=CanaryReading(canary="matmul", entity=HOST, time=1.0))
    assert verdict([passed], judged) == code
    assert verdict([Result(canary="matmul", reason="job")], judged) == max(
        3, code, key=(0, 1, 3, 2).index
    )

"""A canary's run against children that do everything a driver can make them do."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pretend import PREAMBLE
from running import wait_for

from gpuwatch.canaries import CANARIES
from gpuwatch.canary import DEADLINES, WORKER, Run, Task, members
from gpuwatch.errors import ConfigError

GRANDCHILD = """
found = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True);"
    "time.sleep(1000)"], stdout=subprocess.PIPE)
found.stdout.readline()
reading(value=found.pid)
"""


def child(directory, program):
    path = directory / "child.py"
    path.write_text(PREAMBLE + program)
    return path


def outcome_of(run):
    """Wait until a run has ended; return how."""
    return wait_for(run.poll, 60)


def done(directory, program, **task):
    """Return how a child of that program ended, after its run has been put away."""
    with Run(
        Task(**{"canary": "matmul", "size": 64, **task}), sys.executable, child(directory, program)
    ) as run:
        outcome = outcome_of(run)
    assert not members(run.group)
    assert not list(Path(run.scratch).parent.glob(Path(run.scratch).name))
    return outcome


def test_what_goes_by_nics_leaves_the_network_to_the_site(tmp_path, monkeypatch):
    """NCCL is kept from all other ways; a site's network, plugin and devices are left as set."""
    monkeypatch.setenv("NCCL_NET_PLUGIN", "site")
    monkeypatch.setenv("NCCL_NET_DISABLE_INTRA", "1")  # as clouds advise for jobs
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    outcome = done(
        tmp_path,
        """
reading(environment={name: os.environ[name] for name in os.environ if name.startswith("NCCL_")})
""",
        canary="allreduce_net",
        gpus=["GPU-a", "GPU-b"],
    )
    (reading,) = outcome.readings
    told = reading["environment"]
    assert [told[f"NCCL_{name}_DISABLE"] for name in ("P2P", "SHM")] == ["1", "1"]
    assert (told["NCCL_NET_PLUGIN"], told["NCCL_NET_DISABLE_INTRA"]) == ("site", "0")
    assert not {"NCCL_IB_DISABLE", "NCCL_NET"} & told.keys()


def test_a_network_of_the_site_is_not_looked_for_within_the_node(tmp_path, monkeypatch):
    """Where it names one, as clouds do, NCCL would end for want of it: its plugin is left out."""
    monkeypatch.setenv("NCCL_NET", "gIB")
    outcome = done(tmp_path, "reading(environment={'net': os.environ['NCCL_NET']})")
    assert outcome.readings[0]["environment"] == {"net": "Socket"}


def test_a_child_that_does_its_work(tmp_path):
    """Its readings are handed on as it told them; its settings and environment are its own."""
    outcome = done(
        tmp_path,
        """
say(phase="measure", rank=0)
say(phase="measure", rank=1)
names = "CUDA_VISIBLE_DEVICES", "NCCL_ALGO", "NCCL_IB_DISABLE", "CUDA_MPS_PIPE_DIRECTORY"
reading(value=settings["size"], environment={name: os.environ.get(name) for name in names})
reading(value=os.getpgid(0) == os.getpid())
""",
        gpus=["GPU-a"],
    )
    assert (outcome.ended, outcome.fault) == ("ok", "")
    first, second = outcome.readings
    environment = first["environment"]
    assert first["value"] == 64
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert environment["NCCL_IB_DISABLE"] == "1"
    assert environment["NCCL_ALGO"] is None
    assert not Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    assert second["value"] is True


@pytest.mark.parametrize("phase", ["start", "import", "context", "join", "measure", "end"])
def test_a_child_that_hangs(tmp_path, phase):
    """In any phase its deadline ends it, heeding signals or not, and the phase is named."""
    phases = [name for name in DEADLINES if name != "start"]
    until = phases[: phases.index(phase) + 1] if phase in phases else []
    outcome = done(
        tmp_path,
        f"for name in {until!r}: say(phase=name, rank=0)\nhang()",
        deadlines={**DEADLINES, phase: 0.1},
    )
    before_gpu = phase in ("start", "import")
    assert outcome.ended == ("skipped" if before_gpu else "failed")
    assert "hangs: " in outcome.fault
    assert f"in phase {phase}" in outcome.fault
    assert ("mend it, or [canary] python" in outcome.fault) is before_gpu
    assert not outcome.stuck


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("os.kill(os.getpid(), 11)", "ended by SIGSEGV in phase context"),
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL in phase context"),
        (
            "sys.exit('undefined symbol: cuInit')",
            "exit status 1 in phase context: undefined symbol: cuInit",
        ),
        ("", "ended without a result"),
        ("print('[rank0] NCCL INFO')", "says what is no result: '[rank0] NCCL INFO'"),
        ("os.write(1, b'\\xff\\x00\\n')", "says what is no result: '\ufffd\\x00'"),
        ("os.write(1, b'{\"reading\": {')", "ended without a result"),
        ("print('[1]')", "says what is no result: '[1]'"),
        ("print('[' * 100_000)", "says what is no result: '[[[["),
        ("say(phase=3, rank=0)", "says what is no result"),
        ("while True: say(phase='measure', rank=0)", "says what is no result"),
        ("while True: os.write(1, b'x' * 65536)", "says what is no result: 'xxx"),
        ("say(error='it is broken', cause='')", "it is broken"),
        ("reading()\nsay(error='it is broken', cause='')", "it is broken"),
        ("say(error='\\x1b[31mCUDA\\nerror\\x07', cause='')", "?[31mCUDA error?"),
    ],
)
def test_a_child_that_fails(tmp_path, program, fault):
    """Crash, kill, silence and nonsense are each told in a line."""
    outcome = done(tmp_path, f"say(phase='context', rank=0)\n{program}")
    assert outcome.ended == "failed"
    assert fault in outcome.fault
    assert "\n" not in outcome.fault


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("sys.exit('apptainer: image not found')", "by exit status 1 in phase start: apptainer"),
        ("say(phase='import', rank=0)\nos.kill(os.getpid(), 11)", "by SIGSEGV in phase import"),
        ("say(phase='import', rank=0)\nsay(error='libcudart.so.13: no', cause='')", "libcudart"),
        ("print('a listing')", "says what is no result: 'a listing'"),
        ("", "ended without a result"),
    ],
)
def test_an_interpreter_that_does_not_work(tmp_path, program, fault):
    """What goes wrong before a GPU is asked for anything speaks against no GPU."""
    outcome = done(tmp_path, program)
    assert outcome.ended == "skipped"
    assert fault in outcome.fault
    assert outcome.fault.endswith(": mend it, or [canary] python")


def test_what_cannot_be_started(tmp_path):
    """A file that is no program is named, as the config's fault."""
    python = tmp_path / "python"
    python.write_text("no program")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"\[canary\] python .*/python: Exec format error"):
        Run(Task(canary="startup", size=0), str(python))


def test_a_child_that_writes_without_end_is_not_kept(tmp_path):
    """What it says on standard error is read, and only the end of it is told."""
    outcome = done(
        tmp_path, "for _ in range(20): os.write(2, b'noise ' * 10_000)\nsys.exit('\\nat last')"
    )
    assert ": at last: mend it" in outcome.fault


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 11)", "hang()"])
def test_grandchildren_end_with_the_run(tmp_path, end):
    """Whatever a child started is gone with it, however it ended."""
    outcome = done(tmp_path, GRANDCHILD + end, deadlines={**DEADLINES, "start": 2.0})
    (reading,) = outcome.readings
    wait_for(lambda: state_of(reading["value"]) in ("", "Z"), what="the grandchild is gone")


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_process_lives_as_long_as_one_of_its_threads():
    """One that was killed in a driver call has a first thread that has ended, and another."""
    program = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(100,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    process = subprocess.Popen([sys.executable, "-c", program], process_group=0)
    with process:
        wait_for(lambda: state_of(process.pid) == "Z")
        assert members(process.pid) == [process.pid]
        process.kill()
        wait_for(lambda: not members(process.pid))


def test_a_run_can_be_stopped(tmp_path):
    """A child that does not heed the word is killed soon after, and the reason is kept."""
    path = child(tmp_path, "say(phase='measure', rank=0)\nreading()\nhang()")
    with Run(Task(canary="matmul", size=64), sys.executable, path) as run:
        wait_for(lambda: run.poll() is None and run.phase == "measure")
        run.stop("process 7 came")
        outcome = outcome_of(run)
    assert (outcome.ended, outcome.fault) == ("aborted", "process 7 came")
    assert not members(run.group)


def test_an_interrupted_caller_leaves_nothing(tmp_path):
    """Leaving the block ends the child and removes its files."""
    path = child(tmp_path, "say(phase='measure', rank=0)\nhang()")
    runs = []

    def interrupted():
        with Run(Task(canary="matmul", size=64), sys.executable, path) as run:
            runs.append(run)
            wait_for(lambda: run.poll() is None and run.phase == "measure")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (run,) = runs
    assert not members(run.group)
    assert not Path(run.scratch).exists()


# The worker itself, with a torch that is only a name.


def worker(directory, monkeypatch, torch, **task):
    """Return how the real worker ends with a torch of that text."""
    package = directory / "site/torch"
    (package / "distributed").mkdir(parents=True)
    (package / "__init__.py").write_text(torch)
    (package / "distributed/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with Run(Task(canary="startup", size=0, **task), sys.executable) as run:
        return outcome_of(run)


CUDA = """
class version:
    cuda = "12.8"
__version__ = "2.9.1"
class cuda:
    @staticmethod
    def init():
        raise RuntimeError({!r})
"""


@pytest.mark.parametrize(
    ("torch", "ended", "parts"),
    [
        (
            "raise ImportError(\"No module named 'torch'\")",
            "skipped",
            [sys.executable, "no torch", "gpuwatch[torch]", "[canary] python"],
        ),
        (
            "class version:\n    cuda = None\n__version__ = '2.13.0+cpu'",
            "skipped",
            [sys.executable, "torch 2.13.0+cpu", "without CUDA"],
        ),
        (
            CUDA.format("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet"),
            "skipped",
            ["CUDA error 802", "fabric manager"],
        ),
        (
            CUDA.format(
                "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"
            ),
            "skipped",
            ["/dev/shm"],
        ),
        (
            CUDA.format("Error 804: forward compatibility was attempted on non supported HW"),
            "skipped",
            ["does not fit driver or GPU"],
        ),
        (CUDA.format("CUDA error: device(s) is/are busy or unavailable"), "skipped", ["in use"]),
        (CUDA.format("The NVIDIA driver on your system is too old"), "skipped", ["newer driver"]),
        (
            CUDA.format("CUDA out of memory. Tried to allocate 768.00 MiB."),
            "failed",
            ["out of memory", "--size small"],
        ),
        (
            CUDA.format("CUDA error: uncorrectable ECC error\nencountered"),
            "failed",
            ["RuntimeError: CUDA error: uncorrectable ECC error encountered"],
        ),
    ],
)
def test_what_torch_says_becomes_a_line(tmp_path, monkeypatch, torch, ended, parts):
    """What the machine lacks speaks not against the GPU; what CUDA says is told in a line."""
    outcome = worker(tmp_path, monkeypatch, torch, gpus=["GPU-a"])
    assert (outcome.ended, outcome.readings) == (ended, [])
    assert "\n" not in outcome.fault
    for part in parts:
        assert part in outcome.fault


def test_a_rank_that_fails_ends_the_others(tmp_path, monkeypatch):
    """One that dies is told at once; the others do not wait for it."""
    torch = "import os, time\ntime.sleep(0 if os.getppid() in (os.getpgid(0),) else 60)\n"
    outcome = worker(tmp_path, monkeypatch, torch + "os._exit(3)", processes=2)
    assert outcome.ended == "skipped"
    assert "rank 1 ended with status 3" in outcome.fault


def test_ranks_die_with_the_caller(tmp_path, monkeypatch):
    """All processes of a run are named gpuwatch-canary, and gone when gpuwatch was killed."""
    package = tmp_path / "torch.py"
    package.write_text("import time\ntime.sleep(1000)")
    program = """
import sys, time
from gpuwatch.canary import Run, Task
with Run(Task(canary="startup", size=0, processes=2), sys.executable) as run:
    print(run.group, flush=True)
    time.sleep(1000)
"""
    caller = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    with caller:
        assert caller.stdout is not None
        group = int(caller.stdout.readline())

        def names():
            found = members(group)
            lines = [Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0") for pid in found]
            return lines == [b"gpuwatch-canary"] * 2

        wait_for(names, what="two processes of that name")
        assert {Path(f"/proc/{pid}/comm").read_text() for pid in members(group)} == {
            "gpuwatch-canary\n"
        }
        caller.kill()
        wait_for(lambda: not members(group), what="all of them are gone")


def test_canaries_import_nothing_but_torch():
    """They run in the users' interpreter, which need not have gpuwatch, nor be as new."""
    paths = [WORKER, *(WORKER.with_name("canaries") / f"{name}.py" for name in CANARIES)]
    for path in paths:
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition(".")[0])
        typing = {"gpuwatch"} if path != WORKER else set()  # under TYPE_CHECKING
        assert names - sys.stdlib_module_names - typing <= {"torch"}, path

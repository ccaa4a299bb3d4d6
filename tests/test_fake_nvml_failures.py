"""The fake NVML's failures: delays, hangs, crashes, an init that does not work."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from fake_nvml import Script
from fake_nvml.child import Child, compiled, run


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the fake once."""
    return compiled(tmp_path_factory.mktemp("fake_nvml"))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where the script of a test lies."""
    return tmp_path / "script"


def test_delay(library: Path, script: Path) -> None:
    """A call takes as long as scripted, fractions and interruptions by signals included."""
    steps = Script().step(0, "nvmlDeviceGetTemperature", dev=0, takes_ms=200.5)
    steps.write(script)
    [[took, interruptions]] = run(
        library,
        script,
        """
n.nvmlInit()
(h,) = handles()
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
start = time.monotonic_ns()
temperature(h)
took = time.monotonic_ns() - start
signal.setitimer(signal.ITIMER_REAL, 0)  # Python's end would let it kill
say(took, len(os.read(read, 1000)))
""",
    )
    assert took >= 200_500_000
    assert interruptions > 1


def test_hang(library: Path, script: Path) -> None:
    """A call that hangs goes on through signals that are handled; SIGKILL ends the process."""
    Script().step(0, "nvmlDeviceGetTemperature", dev=0, takes_ms=-1).write(script)
    read, write = os.pipe()
    os.set_blocking(write, False)
    program = f"""
n.nvmlInit()
(h,) = handles()
signal.set_wakeup_fd({write})
for number in signal.SIGALRM, signal.SIGTERM:
    signal.signal(number, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
say("calling")
temperature(h)
say("returned")
"""
    try:
        with Child(library, script, program, pass_fds=(write,)) as child:
            assert child.hear() == ["calling"]
            for _ in range(20):  # that many interruptions of a call that is under way
                assert os.read(read, 1) == bytes([signal.SIGALRM])
            child.process.send_signal(signal.SIGTERM)
            while os.read(read, 1) != bytes([signal.SIGTERM]):
                pass
            for _ in range(5):
                os.read(read, 1)
            assert child.process.poll() is None
            child.process.kill()
            assert child.process.communicate(timeout=30)[0] == ""
            assert child.process.returncode == -signal.SIGKILL
    finally:
        os.close(read)
        os.close(write)


def test_hung_device_leaves_the_others(library: Path, script: Path) -> None:
    """While one thread is stuck in a call on one GPU, another thread can ask the next GPU."""
    steps = Script(devices=2).step(0, "nvmlDeviceGetTemperature", dev=0, takes_ms=-1)
    steps.write(script)
    program = """
import threading
n.nvmlInit()
zero, one = handles()
stuck = threading.Thread(target=temperature, args=(zero,), daemon=True)
stuck.start()
say(temperature(one), stuck.is_alive())
os._exit(0)
"""
    assert run(library, script, program) == [[41, True]]


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT", "SIGKILL"])
def test_crash(library: Path, script: Path, name: str) -> None:
    """A crash ends the calling process by the scripted signal."""
    Script().step(0, "nvmlDeviceGetTemperature", "crash", dev=0, signal=name).write(script)
    with Child(library, script, "n.nvmlInit()\ntemperature(handles()[0])") as child:
        assert child.process.wait(timeout=30) == -signal.Signals[name]


def test_crash_past_a_handler(library: Path, script: Path) -> None:
    """A handler of the signal sees a crash but does not survive it; SIGSEGV is the default."""
    Script().step(0, "nvmlDeviceGetTemperature", "crash", dev=0).write(script)
    program = """
import faulthandler
faulthandler.enable()
n.nvmlInit()
temperature(handles()[0])
"""
    with Child(library, script, program, stderr=subprocess.PIPE) as child:
        assert "Segmentation fault" in child.process.communicate(timeout=30)[1]
        assert child.process.returncode == -11


def test_init_fails_then_works(library: Path, script: Path) -> None:
    """Init may fail until a later step; before it works, all calls say so."""
    steps = Script().step(0, "nvmlInit", "LIB_RM_VERSION_MISMATCH")
    steps.write(script)
    program = """
say(code(n.nvmlInit), code(n.nvmlDeviceGetCount), n.nvmlErrorString(18))
while code(n.nvmlInit):
    pass
say(n.nvmlDeviceGetCount(), time.monotonic_ns())
"""
    with Child(library, script, program) as child:
        message = "Driver/library version mismatch"
        assert child.hear() == ["LibRmVersionMismatch", "Uninitialized", message]
        start_ms = steps.now_ms() + 100
        steps.step(start_ms, "nvmlInit").write(script)
        count, when = child.hear()
        assert count == 1
        assert steps.epoch_ns is not None
        assert when >= steps.epoch_ns + round(start_ms * 1e6)


def test_shutdown_counts(library: Path, script: Path) -> None:
    """The library is usable until as many shutdowns as inits."""
    Script().write(script)
    program = """
n.nvmlInit(), n.nvmlInit(), n.nvmlShutdown()
say(code(n.nvmlDeviceGetCount))
n.nvmlShutdown()
say(code(n.nvmlDeviceGetCount), code(n.nvmlShutdown))
"""
    assert run(library, script, program) == [[1], ["Uninitialized", "Uninitialized"]]


def test_first_call_after_open(library: Path, script: Path) -> None:
    """The first call on a device after each init may take long, or fail."""
    Script().step(0, "first call after open", "TIMEOUT", dev=0, takes_ms=30).write(script)
    program = """
n.nvmlInit()
start = time.monotonic_ns()
say(code(n.nvmlDeviceGetHandleByIndex, 0), time.monotonic_ns() - start)
(h,) = handles()
n.nvmlShutdown()
n.nvmlInit()
say(temperature(h), temperature(h))
"""
    [[first, took], rest] = run(library, script, program)
    assert (first, rest) == ("Timeout", ["Timeout", 41])
    assert took >= 30_000_000

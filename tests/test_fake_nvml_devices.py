"""The fake NVML's devices: lists that change, MIG, who uses the library, versions of the driver."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from fake_nvml import Script, build, mig_uuid, users
from fake_nvml.child import Child, compiled, play, run
from running import wait_for

UUID = "GPU-00000000-0000-4000-8000-00000000000"

# Numbers of devices are the last digit of their UUID here; a moment comes by a file.
LIST = """
n.nvmlInit()

def digit(handle):
    return int(n.nvmlDeviceGetUUID(handle)[-1])

def listed():
    return [digit(handle) for handle in handles()]

def until(expected, call, *args):
    while code(call, *args) != expected:
        time.sleep(0.001)
"""


def test_the_list_of_devices_changes(tmp_path: Path) -> None:
    """GPUs are moved in the order, go and come; every way to a handle follows."""
    steps = Script(4).step(0, "devices", val=[0, 1, 2])
    steps.write(tmp_path / "script")
    program = """
h = handles()
say(listed(), [n.nvmlDeviceGetIndex(handle) for handle in h])
address = "00000000:%s:00.0"
for there in ([2, 0, 1], [2, 1], [2, 1, 0, 3]):
    until(there, listed)
    say(n.nvmlDeviceGetCount(), [code(n.nvmlDeviceGetIndex, handle) for handle in h],
        [code(n.nvmlDeviceGetModuleId, handle) for handle in h],
        [temperature(handle) for handle in h],
        code(lambda: digit(n.nvmlDeviceGetHandleByPciBusId(address % "1B"))),
        code(lambda: digit(n.nvmlDeviceGetHandleByPciBusId(address % "61"))),
        code(lambda: digit(n.nvmlDeviceGetHandleByUUID("%s3"))))
say(code(n.nvmlDeviceGetHandleByIndex, 4))
"""
    program = program.replace("%s3", f"{UUID}3")
    with Child(compiled(tmp_path / "library"), tmp_path / "script", LIST + program) as child:
        assert child.hear() == [[0, 1, 2], [0, 1, 2]]
        none, lost = "NotFound", "GpuIsLost"
        steps.step(steps.now_ms(), "devices", val=[2, 0, 1]).write(tmp_path / "script")
        assert child.hear() == [3, [1, 2, 0], [0, 1, 2], [41] * 3, 0, none, none]
        steps.step(steps.now_ms(), "devices", val=[2, 1]).write(tmp_path / "script")
        assert child.hear() == [2, [lost, 1, 0], [lost, 1, 2], [lost, 41, 41], none, none, none]
        steps.step(steps.now_ms(), "devices", val=[2, 1, 0, 3]).write(tmp_path / "script")
        assert child.hear() == [4, [2, 1, 0], [0, 1, 2], [41] * 3, 0, 3, 3]
        assert child.hear() == ["InvalidArgument"]


def test_no_devices_at_all(tmp_path: Path) -> None:
    """A list may be empty; without a value all are there again."""
    script = Script(2).step(0, "devices", val=[])
    assert play(tmp_path, script, LIST + "say(listed())") == [[[]]]
    script.step(script.now_ms(), "devices")
    assert play(tmp_path, script, LIST + "say(listed())") == [[[0, 1]]]


def test_a_device_that_is_gone_may_hang(tmp_path: Path) -> None:
    """What a step says of a GPU that is gone still holds, unless it is a value."""
    script = Script(3).step(0, "nvmlDeviceGetTemperature", dev="all", val=50)
    script.step(0, "nvmlDeviceGetPowerUsage", "RESET_REQUIRED", dev=1)
    script.write(tmp_path / "script")
    program = """
h = handles()
say(temperature(h[1]))
until("GpuIsLost", temperature, h[1])
say(code(n.nvmlDeviceGetPowerUsage, h[1]), code(n.nvmlDeviceGetFieldValues, h[1], [82]))
"""
    with Child(compiled(tmp_path / "library"), tmp_path / "script", LIST + program) as child:
        assert child.hear() == [50]
        script.step(script.now_ms(), "devices", val=[0, 2]).write(tmp_path / "script")
        assert child.hear() == ["ResetRequired", "GpuIsLost"]


def test_searching_hangs_where_an_address_does_not(tmp_path: Path) -> None:
    """A search by UUID meets the hung GPU on its way; an address leads past it."""
    script = Script(3).step(0, "any", dev=1, takes_ms=-1)
    script.write(tmp_path / "script")
    program = f"""
say(digit(n.nvmlDeviceGetHandleByPciBusId("0000:52:00.0")))
say(digit(n.nvmlDeviceGetHandleByUUID("{UUID}0")))
say("searching")
say(digit(n.nvmlDeviceGetHandleByUUID("{UUID}2")))
"""
    with Child(compiled(tmp_path / "library"), tmp_path / "script", LIST + program) as child:
        assert [child.hear() for _ in range(3)] == [[2], [0], ["searching"]]
        asleep = Path(f"/proc/{child.process.pid}/syscall")
        clock_nanosleep = "230 "  # its number on x86-64
        if os.uname().machine == "x86_64":
            wait_for(lambda: asleep.read_text().startswith(clock_nanosleep), what="a hang")
        assert child.process.poll() is None


MIG = """
n.nvmlInit()
h, other = handles()

def migs(handle=h):
    found = []
    for index in range(n.nvmlDeviceGetMaxMigDeviceCount(handle)):
        mig = code(n.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if not isinstance(mig, str):
            found.append(mig)
    return found

def uuids(handle=h):
    return [n.nvmlDeviceGetUUID(mig) for mig in migs(handle)]
"""
TWO = [{"gi": 1, "slices": 3, "memory": 40448}, {"gi": 2, "uuid": "MIG-two", "ci": 4}]


def test_mig_devices(tmp_path: Path) -> None:
    """MIG devices have handles, names, sizes and numbers of their own, and a parent."""
    script = Script(2).step(0, "mig", dev=0, val=TWO)
    script.step(0, "nvmlDeviceGetMemoryInfo", dev="MIG-two", val={"used": 77})
    program = """
say(n.nvmlDeviceGetMigMode(h), n.nvmlDeviceGetMigMode(other), uuids())
one, two = migs()
say(n.nvmlDeviceGetName(one))
say(n.nvmlDeviceGetGpuInstanceId(two), n.nvmlDeviceGetComputeInstanceId(two))
memory, sizes = n.nvmlDeviceGetMemoryInfo(one), n.nvmlDeviceGetAttributes(one)
say(memory.total >> 20, n.nvmlDeviceGetMemoryInfo(two).used, n.nvmlDeviceGetIndex(two))
say(sizes.multiprocessorCount, sizes.gpuInstanceSliceCount, sizes.memorySizeMB)
say([n.nvmlDeviceIsMigDeviceHandle(handle).value for handle in (h, one)])
parent = n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(two)
say(n.nvmlDeviceGetUUID(parent), n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID("MIG-two")))
"""
    assert play(tmp_path, script, MIG + program) == [
        [[1, 1], [0, 0], [mig_uuid(0, 1), "MIG-two"]],
        ["NVIDIA H100 80GB HBM3 MIG 3g.40gb"],
        [2, 4],
        [40448, 77, 1],
        [48, 3, 40448],
        [[0, 1]],
        [UUID + "0", "MIG-two"],
    ]


def test_what_mig_takes_away(tmp_path: Path) -> None:
    """With MIG the GPU has no utilization; a MIG device has no sensors; without it, no devices."""
    script = Script(2).step(0, "mig", dev=0, val=TWO)
    script.step(0, "nvmlDeviceGetPowerUsage", dev="all", val=1)
    program = """
say(code(n.nvmlDeviceGetUtilizationRates, h), temperature(h), n.nvmlDeviceGetPowerUsage(h))
one, two = migs()
say(temperature(one), code(n.nvmlDeviceGetPowerUsage, one), code(n.nvmlDeviceGetSerial, one))
say(code(n.nvmlDeviceGetUtilizationRates, one), code(n.nvmlDeviceGetFieldValues, one, [82]))
say(*(code(n.nvmlDeviceGetMigDeviceHandleByIndex, h, index) for index in (2, 7)))
say(migs(other), code(n.nvmlDeviceGetMigDeviceHandleByIndex, other, 0))
say(code(n.nvmlDeviceGetGpuInstanceId, h), code(n.nvmlDeviceGetAttributes, h))
say(code(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, h))
"""
    no = "NotSupported"
    assert play(tmp_path, script, MIG + program) == [
        [no, 41, 1],
        [no, no, no],
        [no, no],
        ["NotFound", "InvalidArgument"],
        [[], "InvalidArgument"],
        [no, no],
        ["InvalidArgument"],
    ]


def test_the_mig_layout_changes(tmp_path: Path) -> None:
    """Handles of instances that were destroyed answer errors; those that stay keep working."""
    script = Script(2).step(0, "mig", dev=0, val=TWO)
    script.write(tmp_path / "script")
    program = """
one, two = migs()
say(uuids())
until = lambda condition: [None for _ in iter(condition, True)]
until(lambda: len(migs()) == 3)
say(code(n.nvmlDeviceGetUUID, one), code(n.nvmlDeviceGetGpuInstanceId, two), uuids())
until(lambda: n.nvmlDeviceGetMigMode(h) == [0, 0])
say(*(code(call, two) for call in (n.nvmlDeviceGetUUID, n.nvmlDeviceGetName)))
say(migs(), n.nvmlDeviceGetUtilizationRates(h).gpu)
until(lambda: n.nvmlDeviceGetCount() == 1)
say(code(n.nvmlDeviceGetUUID, two))
"""
    with Child(compiled(tmp_path / "library"), tmp_path / "script", MIG + program) as child:
        assert child.hear() == [[mig_uuid(0, 1), "MIG-two"]]
        three = [{"gi": 7}, TWO[1], {"gi": 8}]
        script.step(script.now_ms(), "mig", dev=0, val=three).write(tmp_path / "script")
        there = [mig_uuid(0, 7), "MIG-two", mig_uuid(0, 8)]
        assert child.hear() == ["InvalidArgument", 2, there]
        script.step(script.now_ms(), "nvmlDeviceGetName", "NOT_FOUND", dev="MIG-two")
        script.step(script.now_ms(), "mig", dev=0).write(tmp_path / "script")
        assert child.hear() == ["InvalidArgument", "NotFound"]
        assert child.hear() == [[], 55]
        script.step(script.now_ms(), "devices", val=[1]).write(tmp_path / "script")
        assert child.hear() == ["GpuIsLost"]


def test_what_ails_a_gpu_ails_its_mig_devices(tmp_path: Path) -> None:
    """An error of the parent is one of its MIG devices, a value is not; their own steps win."""
    script = Script(2).step(0, "mig", dev=0, val=TWO)
    script.write(tmp_path / "script")
    program = """
one, two = migs()
say(n.nvmlDeviceGetUUID(one))
while code(n.nvmlDeviceGetUUID, one) != "GpuIsLost":
    time.sleep(0.001)
say(code(n.nvmlDeviceGetUUID, two), code(n.nvmlDeviceGetName, two))
"""
    with Child(compiled(tmp_path / "library"), tmp_path / "script", MIG + program) as child:
        assert child.hear() == [mig_uuid(0, 1)]
        script.step(script.now_ms(), "any", "GPU_IS_LOST", dev=0)
        script.step(script.now_ms(), "nvmlDeviceGetName", dev="MIG-two", val="mine")
        script.write(tmp_path / "script")
        assert child.hear() == ["GpuIsLost", "mine"]


def test_users_of_the_library(tmp_path: Path) -> None:
    """A process is a user from its first init to its last shutdown, or to its end of any kind."""
    script = tmp_path / "script"
    Script(1).write(script)
    library = compiled(tmp_path / "library")
    program = """
say(os.getpid())
sys.stdin.readline()
n.nvmlInit(), n.nvmlInit(), n.nvmlShutdown()
say("init")
sys.stdin.readline()
n.nvmlShutdown()
say("shutdown")
sys.stdin.readline()
n.nvmlInit()
say("init")
sys.stdin.readline()
"""
    for end in ("killed", "exit"):
        with Child(library, script, program, stdin=subprocess.PIPE) as child:
            assert child.process.stdin is not None

            def go(child: Child = child) -> None:
                child.process.stdin.write("\n")
                child.process.stdin.flush()

            [pid] = child.hear()
            assert users(script) == set()
            go()
            assert (child.hear(), users(script)) == (["init"], {pid})
            go()
            assert (child.hear(), users(script)) == (["shutdown"], set())
            go()
            assert (child.hear(), users(script)) == (["init"], {pid})
            if end == "killed":
                child.process.send_signal(signal.SIGKILL)
                child.process.wait()
                assert list((tmp_path / "users").iterdir())  # it could not tidy up
            else:
                go()
                child.process.wait()
            assert users(script) == set()


def test_a_failed_init_uses_nothing(tmp_path: Path) -> None:
    """A process whose init fails is no user."""
    script = Script(1).step(0, "nvmlInit", "DRIVER_NOT_LOADED")
    assert play(tmp_path, script, "say(code(n.nvmlInit))") == [["DriverNotLoaded"]]
    assert not (tmp_path / "users").exists()


def test_a_driver_update(tmp_path: Path) -> None:
    """After another kernel module is loaded a process needs to be a new one to use it."""
    script = Script(1)
    script.write(tmp_path / "script")
    program = """
n.nvmlInit()
say(n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetNVMLVersion())
n.nvmlShutdown()
while code(n.nvmlInit) is None:
    n.nvmlShutdown()
say(code(n.nvmlInit), code(n.nvmlDeviceGetCount))
"""
    with Child(compiled(tmp_path / "library"), tmp_path / "script", program) as child:
        assert child.hear() == ["580.95.05", "13.580.95.05"]
        script.step(script.now_ms(), "driver", val="590.12").write(tmp_path / "script")
        assert child.hear() == ["LibRmVersionMismatch", "Uninitialized"]
    program = "n.nvmlInit()\nsay(n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetNVMLVersion())"
    assert play(tmp_path, script, program) == [["590.12", "13.590.12"]]


def test_a_library_without_a_function(tmp_path: Path) -> None:
    """An older library lacks symbols: those that are renamed when it is built."""
    function = "nvmlDeviceGetMarginTemperature"
    Script(1).step(0, function, val=1).write(tmp_path / "script")
    library = build(tmp_path / "old", f"-D{function}=absent")
    program = f"n.nvmlInit()\nsay(code(n.{function}, handles()[0]), temperature(handles()[0]))"
    assert run(library, tmp_path / "script", program) == [["FunctionNotFound", 41]]

"""The fake NVML itself: what it answers, how it fails, and that no script breaks it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import (
    FUNCTIONS,
    RETURNS,
    Script,
    UnknownFunctionError,
    build,
    environment,
    load,
)
from hypothesis import given, settings
from hypothesis import strategies as st

DATA = Path(__file__).parent / "data" / "fake_nvml"

# What each child program starts with; `say` hands a result to the test.
PREAMBLE = """
import json, os, select, signal, sys, time
import pynvml as n

def say(*results):
    print(json.dumps(results), flush=True)

def code(call, *args):
    "The name of the error that a call gives, or its result."
    try:
        return call(*args)
    except n.NVMLError as error:
        return type(error).__name__.removeprefix("NVMLError_")

def handles():
    return [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]

def temperature(handle):
    return code(n.nvmlDeviceGetTemperature, handle, 0)
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the fake, with the flags in FAKE_NVML_CFLAGS (a sanitizer, say) besides its own."""
    flags = os.environ.get("FAKE_NVML_CFLAGS", "").split()
    return build(tmp_path_factory.mktemp("fake_nvml"), *flags)


class Child:
    """A Python program that talks to the fake and prints JSON lines."""

    def __init__(self, library: Path, script: Path, program: str, **popen: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + program],
            env=environment(script, library),
            stdout=subprocess.PIPE,
            text=True,
            **popen,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> Any:
        """Wait for the next results that the program says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait()}"
        return json.loads(line)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where the script of a test lies."""
    return tmp_path / "script"


def run(library: Path, script: Path, program: str) -> list[Any]:
    """All results of a program that ends well."""
    output = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program],
        env=environment(script, library),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_defaults(library: Path, script: Path) -> None:
    """Without a step every call succeeds, with what a healthy H100 might answer."""
    Script(devices=2).write(script)
    results = run(
        library,
        script,
        """
n.nvmlInit()
h = handles()[1]
say(n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetNVMLVersion())
say(n.nvmlSystemGetCudaDriverVersion())
pci = n.nvmlDeviceGetPciInfo(h)
say(n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetName(h), pci.busId, pci.busIdLegacy, pci.bus)
say(n.nvmlDeviceGetIndex(h), n.nvmlDeviceGetMinorNumber(h), n.nvmlDeviceGetModuleId(h))
say(n.nvmlDeviceGetSerial(h), n.nvmlDeviceGetVbiosVersion(h))
say(temperature(h), n.nvmlDeviceGetTemperatureV(h, 0), n.nvmlDeviceGetPowerUsage(h))
say([n.nvmlDeviceGetClockInfo(h, kind) for kind in range(4)], n.nvmlDeviceGetMaxClockInfo(h, 2))
use = n.nvmlDeviceGetUtilizationRates(h)
say(use.gpu, use.memory, n.nvmlDeviceGetEnforcedPowerLimit(h), n.nvmlDeviceGetPerformanceState(h))
say(n.nvmlDeviceGetCurrentClocksEventReasons(h), n.nvmlDeviceGetCurrentClocksThrottleReasons(h))
one, two = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
say(one.total - one.free - one.used, two.total - two.free - two.used - two.reserved)
say(n.nvmlDeviceGetMigMode(h), n.nvmlDeviceGetComputeRunningProcesses(h))
say(n.nvmlDeviceGetPersistenceMode(h), n.nvmlDeviceGetTotalEnergyConsumption(h) >= 5_000_000_000)
fields = n.nvmlDeviceGetFieldValues(h, [186, 82, 74, 269, 1])
say([[f.nvmlReturn, f.value.ullVal] for f in fields], fields[0].timestamp > 0)
""",
    )
    uuid = "GPU-00000000-0000-4000-8000-000000000001"
    assert results == [
        ["580.95.05", "13.580.95.05"],
        [13000],
        [uuid, "NVIDIA H100 80GB HBM3", "00000000:43:00.0", "0000:43:00.0", 0x43],
        [1, 1, 1],
        ["1650923000001", "96.00.89.00.01"],
        [41, 41, 310_000],
        [[1980, 1980, 2619, 1545], 2619],
        [55, 20, 700_000, 0],
        [0, 0],
        [0, 0],
        [[0, 0], []],
        [1, True],
        [[[0, 310_000], [0, 52], [0, 0], [0, 0], [3, 0]], True],
    ]


def test_every_symbol_exists(library: Path) -> None:
    """Each function of the table is a symbol of the library, under the name pynvml looks up."""
    loaded = ctypes.CDLL(str(library / "libnvidia-ml.so.1"))
    versioned = {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}
    versioned |= {"nvmlDeviceGetHandleByPciBusId"}
    for name in FUNCTIONS:
        if name.startswith("nvml") and ":" not in name:
            assert hasattr(loaded, f"{name}_v2" if name in versioned else name), name
    assert hasattr(loaded, "nvmlInitWithFlags")
    assert hasattr(loaded, "nvmlSystemGetCudaDriverVersion_v2")


def test_timeline_shared_by_restarts(library: Path, script: Path) -> None:
    """A step starts at its time after the epoch, and a later process finds it started."""
    steps = Script().step(0, "nvmlDeviceGetTemperature", dev=0, val=50)
    steps.step(300, "nvmlDeviceGetTemperature", dev=0, val=60)
    steps.write(script)
    watch = """
n.nvmlInit()
(h,) = handles()
seen = []
while temperature(h) != 60:
    seen.append(temperature(h))
say(sorted(set(seen) - {60}), time.monotonic_ns())
"""
    [[seen, when]] = run(library, script, watch)
    assert steps.epoch_ns is not None
    assert seen in ([50], [])
    assert when >= steps.epoch_ns + 300_000_000
    [[seen, _]] = run(library, script, watch)
    assert seen == []


def test_steps_of_one_time_in_order(library: Path, script: Path) -> None:
    """Steps of one time are answered one a call, `times` of them if given, and the last stays."""
    steps = Script()
    for val, times in (1, None), (2, 3), (3, None), (4, None):
        steps.step(0, "nvmlDeviceGetTemperature", dev=0, val=val, times=times)
    steps.write(script)
    [[values]] = run(
        library, script, "n.nvmlInit()\nsay([temperature(handles()[0]) for _ in 'x' * 8])"
    )
    assert values == [1, 2, 2, 2, 3, 4, 4, 4]


def test_used_up_step_uncovers_the_one_before(library: Path, script: Path) -> None:
    """After `times` uses, or times * every_ms, the step that held before holds again."""
    steps = Script(devices=2).step(0, "nvmlDeviceGetTemperature", dev="all", val=50)
    steps.step(0, "nvmlDeviceGetTemperature", "TIMEOUT", dev=0, times=2)
    steps.step(0, "nvmlDeviceGetTemperature", "GPU_IS_LOST", dev=1, times=3, every_ms=100)
    steps.write(script)
    [[counted], [lost, when]] = run(
        library,
        script,
        """
n.nvmlInit()
zero, one = handles()
say([temperature(zero) for _ in 'xxxx'])
lost = temperature(one)
while temperature(one) != 50:
    pass
say(lost, time.monotonic_ns())
""",
    )
    assert counted == ["Timeout", "Timeout", 50, 50]
    assert lost in ("GpuIsLost", 50)  # a slow start may miss the 300 ms
    assert steps.epoch_ns is not None
    assert when >= steps.epoch_ns + 300_000_000


def test_precedence(library: Path, script: Path) -> None:
    """The newer step wins; of one time, a named device beats a named function, key and all."""
    steps = Script(devices=3)
    steps.step(0, "any", "TIMEOUT", dev="all")
    steps.step(0, "nvmlDeviceGetHandleByIndex", dev="all")
    steps.step(0, "nvmlDeviceGetTemperature", dev="all", val=50)
    steps.step(0, "any", "GPU_IS_LOST", dev=1)
    steps.step(0, "nvmlDeviceGetHandleByIndex", dev=1)
    steps.step(0, "nvmlDeviceGetClockInfo", dev=0, val=700)
    steps.step(0, "nvmlDeviceGetClockInfo:sm", dev=0, val=800)
    steps.step(0, "nvmlDeviceGetPowerUsage", dev=2, val=1)
    steps.step(1, "any", "NO_PERMISSION", dev=2)
    steps.step(1, "nvmlDeviceGetHandleByIndex", dev=2)
    steps.write(script)
    results = run(
        library,
        script,
        """
n.nvmlInit()
zero, one, two = handles()
say(temperature(zero), code(n.nvmlDeviceGetPowerUsage, zero))
say(temperature(one), temperature(two), code(n.nvmlDeviceGetPowerUsage, two))
say([n.nvmlDeviceGetClockInfo(zero, kind) for kind in range(4)])
""",
    )
    assert results == [
        [50, "Timeout"],
        ["GpuIsLost", "NoPermission", "NoPermission"],
        [[700, 800, 700, 700]],
    ]


@pytest.mark.parametrize(
    ("val", "uint", "ull"),
    [
        (-1, 2**32 - 1, 2**64 - 1),
        (2**64 - 1, 2**32 - 1, 2**64 - 1),
        (2**63 + 16, 16, 2**63 + 16),
        (2**31 - 16, 2**31 - 16, 2**31 - 16),
    ],
)
def test_truncation(library: Path, script: Path, val: int, uint: int, ull: int) -> None:
    """A scripted number is stored as C would: its low bits, as many as the type has."""
    steps = Script().step(0, "nvmlDeviceGetTemperature", dev=0, val=val)
    steps.step(0, "nvmlDeviceGetUtilizationRates", dev=0, val={"gpu": val, "memory": 7})
    steps.step(0, "nvmlDeviceGetCurrentClocksEventReasons", dev=0, val=val)
    steps.write(script)
    [[temperature, gpu, memory, reasons]] = run(
        library,
        script,
        """
n.nvmlInit()
(h,) = handles()
use = n.nvmlDeviceGetUtilizationRates(h)
say(temperature(h), use.gpu, use.memory, n.nvmlDeviceGetCurrentClocksEventReasons(h))
""",
    )
    assert (temperature, gpu, memory, reasons) == (uint, uint, 7, ull)


def test_fields(library: Path, script: Path) -> None:
    """Each field has its own return code, value, type and delay, besides the call's own."""
    steps = Script(devices=2)
    steps.step(0, "nvmlDeviceGetFieldValues:82", "NOT_SUPPORTED", dev=0)
    steps.step(0, "nvmlDeviceGetFieldValues:186", dev=0, val=-1, takes_ms=5)
    steps.step(0, "nvmlDeviceGetFieldValues:300", dev=0, val=1.5)
    steps.step(0, "nvmlDeviceGetFieldValues:301", dev=0, val={"value": -2, "type": "slonglong"})
    steps.step(0, "nvmlDeviceGetFieldValues", "GPU_IS_LOST", dev=1)
    steps.write(script)
    results = run(
        library,
        script,
        """
n.nvmlInit()
zero, one = handles()
fields = n.nvmlDeviceGetFieldValues(zero, [82, 186, 300, 301, 400, 9999])
say([[f.nvmlReturn, f.valueType] for f in fields], fields[1].latencyUsec >= 5000)
say(fields[1].value.ullVal, fields[2].value.dVal, fields[3].value.sllVal)
say(code(n.nvmlDeviceGetFieldValues, one, [82]))
""",
    )
    assert results == [
        [[[3, 3], [0, 1], [0, 0], [0, 4], [3, 3], [3, 3]], True],
        [2**32 - 1, 1.5, -2],
        ["GpuIsLost"],
    ]


def test_texts_and_lists(library: Path, script: Path) -> None:
    """Texts, processes and modes come out as scripted."""
    steps = Script().step(0, "nvmlSystemGetDriverVersion", val="535.1 beta")
    steps.step(0, "nvmlDeviceGetUUID", dev=0, val="GPU-x")
    steps.step(0, "nvmlDeviceGetPciInfo", dev=0, val="0000000f:01:00.0")
    steps.step(0, "nvmlDeviceGetMigMode", dev=0, val={"current": 1, "pending": 0})
    steps.step(0, "nvmlDeviceGetRemappedRows", dev=0, val=[1, 2, 0, 1])
    steps.step(0, "nvmlDeviceGetVirtualizationMode", dev=0, val="VGPU")
    steps.step(0, "nvmlDeviceGetMemoryInfo_v2", dev=0, val=[4, 1, 1, 2])
    steps.step(
        0, "nvmlDeviceGetComputeRunningProcesses", dev=0, val=[[10, 2**40, 0, 0], [11, 5, 1, 2]]
    )
    steps.write(script)
    results = run(
        library,
        script,
        """
n.nvmlInit()
(h,) = handles()
pci = n.nvmlDeviceGetPciInfo(h)
say(n.nvmlSystemGetDriverVersion(), n.nvmlDeviceGetUUID(h), pci.busId, pci.domain)
say(n.nvmlDeviceGetMigMode(h), n.nvmlDeviceGetRemappedRows(h), n.nvmlDeviceGetVirtualizationMode(h))
say(n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).used)
say([[p.pid, p.usedGpuMemory, p.gpuInstanceId] for p in n.nvmlDeviceGetComputeRunningProcesses(h)])
""",
    )
    assert results == [
        ["535.1 beta", "GPU-x", "0000000F:01:00.0", 15],
        [[1, 0], [1, 2, 0, 1], 2],
        [2],
        [[[10, 2**40, 0], [11, 5, 1]]],
    ]


def test_finding_devices(library: Path, script: Path) -> None:
    """Addresses match in either length and case; by UUID, a lost GPU on the way is in the way."""
    Script(devices=3).step(0, "any", "GPU_IS_LOST", dev=1).write(script)
    results = run(
        library,
        script,
        """
def index(call, *args):
    found = code(call, *args)
    return found if isinstance(found, str) else n.nvmlDeviceGetIndex(found)

say(code(n.nvmlDeviceGetCount), n.nvmlInit(), n.nvmlDeviceGetCount())
address = n.nvmlDeviceGetHandleByPciBusId
say(*(index(address, at) for at in ['00000000:1B:00.0', '0000:1b:00.0', '0000:52:00.0']))
say(*(index(address, at) for at in ['0000:43:00.0', '0000:44:00.0', 'x']))
uuid = 'GPU-00000000-0000-4000-8000-00000000000'
say(*(index(n.nvmlDeviceGetHandleByUUID, uuid + last) for last in '0123'))
say(*(index(n.nvmlDeviceGetHandleByIndex, i) for i in range(4)))
""",
    )
    assert results[0] == ["Uninitialized", None, 3]
    assert results[1:] == [
        [0, 0, 2],
        ["GpuIsLost", "NotFound", "NotFound"],
        [0, "GpuIsLost", "GpuIsLost", "GpuIsLost"],
        [0, "GpuIsLost", 2, "InvalidArgument"],
    ]


def test_uuid_of_nobody(library: Path, script: Path) -> None:
    """A UUID that no device has is not found."""
    Script(devices=2).write(script)
    [[found]] = run(
        library, script, "n.nvmlInit()\nsay(code(n.nvmlDeviceGetHandleByUUID, 'GPU-1'))"
    )
    assert found == "NotFound"


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


def test_live_change(library: Path, script: Path) -> None:
    """A script written again is noticed; unchanged steps keep their place, handles their device."""
    steps = Script(devices=2)
    steps.step(0, "nvmlDeviceGetTemperature", dev=0, val=10)
    steps.step(0, "nvmlDeviceGetTemperature", dev=0, val=20)
    steps.write(script)
    program = """
n.nvmlInit()
zero, one = handles()
say(temperature(zero), temperature(zero))
while temperature(one) == 41:
    pass
say(temperature(one), temperature(zero))
while n.nvmlDeviceGetCount() == 2:
    pass
say(n.nvmlDeviceGetCount(), temperature(one))
"""
    with Child(library, script, program) as child:
        assert child.hear() == [10, 20]
        steps.step(steps.now_ms(), "any", "GPU_IS_LOST", dev=1).write(script)
        assert child.hear() == ["GpuIsLost", 20]
        Script(devices=1, epoch_ns=steps.epoch_ns).write(script)
        assert child.hear() == [1, "InvalidArgument"]


def test_live_change_to_a_bad_script(library: Path, script: Path) -> None:
    """A bad script that replaces a good one is reported; running processes keep the good one."""
    Script().step(0, "nvmlDeviceGetTemperature", dev=0, val=10).write(script)
    program = """
n.nvmlInit()
(h,) = handles()
say(temperature(h))
while not select.select([sys.stdin], [], [], 0)[0]:
    temperature(h)
say(temperature(h))
"""
    with Child(library, script, program, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.hear() == [10]
        fresh = script.with_name("fresh")
        fresh.write_text("nonsense\n")
        fresh.replace(script)
        assert child.process.stderr is not None
        assert child.process.stdin is not None
        line = child.process.stderr.readline()
        assert line == f"fake nvml: {script}:1: not a script of format nvml-lines 1\n"
        child.process.stdin.write("go\n")
        child.process.stdin.flush()
        assert child.hear() == [10]


DEVICE = "device GPU-0 00000000:1B:00.0 0 NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("nonsense", "unknown kind of line"),
        ("epoch -1", "bad epoch"),
        ("device GPU-0", "device needs UUID PCI MINOR NAME, not too long"),
        ("device GPU-0 00000000:1B 0 NVIDIA", "bad PCI address"),
        ("device GPU-0 00000000:1B:00.0 x NVIDIA", "bad minor number"),
        ("step", "bad start"),
        ("step 99999999999999999999 any 0 0 0 0 -1 -1", "bad start"),
        ("step 0 nvmlFoo 0 0 0 0 -1 -1", "unknown function"),
        ("step 0 any 1 0 0 0 -1 -1", "no such device"),
        ("step 0 any 0 1000 0 0 -1 -1", "bad return code"),
        ("step 0 any 0 -1 0 0 -1 -1", "bad signal"),
        ("step 0 any 0 0 0 -2 -1 -1", "bad delay"),
        ("step 0 any 0 0 0 0 x -1", "bad number of times"),
        ("step 0 any 0 0 0 0 -1", "bad span"),
        ("step 0 any 0 0 0 0 -1 -1 1 2 -3", "bad value"),
        ("step 0 any 0 0 0 0 -1 -1 \0", "NUL byte"),
    ],
)
def test_bad_line(library: Path, script: Path, line: str, what: str) -> None:
    """A bad line fails init and is named on stderr, by file and number."""
    script.write_text("\n".join(["nvml-lines 1", "epoch 0", DEVICE, line, ""]))
    with Child(library, script, "say(code(n.nvmlInit))", stderr=subprocess.PIPE) as child:
        output, errors = child.process.communicate(timeout=30)
    assert json.loads(output) == ["Unknown"]
    assert errors == f"fake nvml: {script}:4: {what}\n"


def test_no_script(library: Path, script: Path) -> None:
    """Without a script init fails and says where it looked."""
    with Child(library, script, "say(code(n.nvmlInit))", stderr=subprocess.PIPE) as child:
        output, errors = child.process.communicate(timeout=30)
    assert json.loads(output) == ["Unknown"]
    assert errors == f"fake nvml: no script at FAKE_NVML_SCRIPT={script}\n"


def test_load_json(library: Path, script: Path) -> None:
    """A JSON script with versioned names and gaps between its devices works as it stands."""
    loaded = load(DATA / "script.json")
    loaded.epoch_ns = time.monotonic_ns() + 3600 * 10**9  # nothing has started yet
    assert loaded.write(script) == []
    assert run(library, script, "n.nvmlInit()\nsay(temperature(handles()[0]))") == [[41]]
    loaded.epoch_ns = time.monotonic_ns() - 3 * 10**9
    assert loaded.write(script) == []
    results = run(
        library,
        script,
        """
say(code(n.nvmlInit), code(n.nvmlInit))
zero = n.nvmlDeviceGetHandleByIndex(0)
say(n.nvmlDeviceGetCount(), code(n.nvmlDeviceGetHandleByIndex, 1), temperature(zero))
six = n.nvmlDeviceGetHandleByPciBusId('000F:01:00.0')
say(n.nvmlDeviceGetName(six), n.nvmlDeviceGetMinorNumber(six), n.nvmlDeviceGetIndex(six))
say(n.nvmlDeviceGetUtilizationRates(zero).gpu, n.nvmlDeviceGetVirtualizationMode(zero))
""",
    )
    assert results == [
        ["LibRmVersionMismatch", None],
        [2, "GpuIsLost", "NotSupported"],
        ["NVIDIA GB10", 6, 1],
        [2**32 - 1, 2],
    ]
    assert loaded.to_json()["steps"] == json.loads((DATA / "script.json").read_text())["steps"]


def test_load_of_another_format(tmp_path: Path) -> None:
    """A JSON file of another format is refused."""
    other = tmp_path / "other.json"
    other.write_text('{"format": "nvml-script/2", "devices": [], "steps": []}')
    with pytest.raises(ValueError, match="nvml-script/2"):
        load(other)


def test_unknown_function(script: Path) -> None:
    """A step that the library could not obey is an error, or is left out and named."""
    steps = Script().step(0, "nvmlDeviceGetTemprature", dev=0)
    with pytest.raises(UnknownFunctionError, match="Temprature"):
        steps.write(script)
    assert not script.exists()
    assert steps.write(script, strict=False) == ["nvmlDeviceGetTemprature"]
    assert "Temprature" not in script.read_text()


@pytest.mark.parametrize(
    "step",
    [
        {"fn": "any", "dev": 1},
        {"fn": "any", "dev": 0, "ret": "LOST"},
        {"fn": "any", "dev": 0, "takes": 3},
        {"fn": "any", "dev": 0, "takes_ms": -2},
        {"fn": "any", "dev": 0, "every_ms": 5},
        {"fn": "any", "dev": 0, "val": 5},
        {"fn": "nvmlInit", "dev": 0},
        {"fn": "nvmlDeviceGetName", "dev": 0, "val": "two\nlines"},
        {"fn": "nvmlDeviceGetTemperature", "dev": 0, "val": "hot"},
        {"fn": "nvmlDeviceGetTemperature", "dev": 0, "val": [1, 2]},
        {"fn": "nvmlDeviceGetUtilizationRates", "dev": 0, "val": {"gpu": 1}},
    ],
)
def test_bad_step(script: Path, step: dict[str, Any]) -> None:
    """A mistake in a step is found when the script is written."""
    with pytest.raises(ValueError, match=r"."):
        Script(1, [{"t_ms": 0, **step}]).write(script)


class Loader:
    """A process that tells for one script after another whether init takes it."""

    PROGRAM = """
import ctypes, os, sys
library = ctypes.CDLL("libnvidia-ml.so.1")
for line in sys.stdin:
    os.environ["FAKE_NVML_SCRIPT"] = line[:-1]
    ret = library.nvmlInit_v2()
    if ret == 0:
        handle, value = ctypes.c_void_p(), ctypes.c_uint()
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        for _ in range(3):
            library.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(value))
    print(ret, flush=True)
"""

    def __init__(self, library: Path, script: Path) -> None:
        self.script = script
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM],
            env=environment(script, library),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def load(self) -> int:
        """Have the script as it is now loaded, and some calls made."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{self.script}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the process died: {self.process.wait()}"
        return int(answer)


@pytest.fixture(scope="module")
def loader(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    """One process for all examples: a crash shows as its end."""
    loader = Loader(library, tmp_path_factory.mktemp("loader") / "script")
    yield loader
    loader.process.kill()
    loader.process.communicate()


numbers = st.one_of(st.integers(-3, 3), st.integers(-(2**65), 2**65), st.just(2**63)).map(str)
words = st.one_of(
    numbers,
    st.sampled_from([*FUNCTIONS, "nvmlDeviceGetFieldValues:82", "nvmlDeviceGetFieldValues:9999"]),
    st.sampled_from(["*", "step", "device", "epoch", '"text', "0:1:2.3", "", DEVICE]),
    st.text(max_size=5),
)
plain = st.tuples(
    st.just("step 0"), st.sampled_from([*FUNCTIONS]), st.just("* 0 0 0"), numbers, numbers, words
)
lines = st.one_of(st.just(DEVICE), plain.map(" ".join), st.lists(words, max_size=12).map(" ".join))


@settings(max_examples=300, deadline=None)
@given(st.lists(lines, max_size=12))
def test_no_script_breaks_the_parser(loader: Loader, script_lines: list[str]) -> None:
    """Whatever the lines, init works or says UNKNOWN, and the process lives."""
    text = "\n".join(["nvml-lines 1", "epoch 0", *script_lines])
    loader.script.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert loader.load() in (0, RETURNS["UNKNOWN"])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_break_the_parser(loader: Loader, content: bytes) -> None:
    """Files that are no scripts at all are refused."""
    loader.script.write_bytes(content)
    assert loader.load() == RETURNS["UNKNOWN"]


steps_of_two_devices = st.fixed_dictionaries(
    {
        "t_ms": st.one_of(st.integers(0, 10**7), st.floats(0, 1e7)),
        "fn": st.sampled_from(
            [
                "any",
                "nvmlDeviceGetTemperature",
                "nvmlDeviceGetPowerUsage_v2",
                "nvmlDeviceGetClockInfo",
            ]
        ),
        "dev": st.sampled_from([0, 1, "all"]),
        "ret": st.sampled_from(sorted(RETURNS.keys() - {"crash"})),
    },
    optional={"times": st.integers(0, 5), "takes_ms": st.just(0.001)},
)


@settings(max_examples=100, deadline=None)
@given(st.lists(steps_of_two_devices, max_size=20))
def test_what_is_written_is_read(loader: Loader, steps: list[dict[str, Any]]) -> None:
    """Every script that the writer accepts is one that the library accepts."""
    Script(2, steps).write(loader.script)
    assert loader.load() == 0


def test_no_attach_finds_no_gpu(library: Path, script: Path) -> None:
    """After an init with NO_ATTACH there are no GPUs, as on real drivers; with NO_GPUS all are."""
    Script(devices=2).write(script)
    program = """
for flags in (2, 3, 1, 0):
    n.nvmlInitWithFlags(flags)
    address = "00000000:1B:00.0"
    found = code(n.nvmlDeviceGetHandleByPciBusId, address)
    say(flags, n.nvmlDeviceGetCount(), found if isinstance(found, str) else "handle")
    n.nvmlShutdown()
"""
    assert run(library, script, program) == [
        [2, 0, "NotFound"],
        [3, 0, "NotFound"],
        [1, 2, "handle"],
        [0, 2, "handle"],
    ]

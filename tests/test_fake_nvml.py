"""The fake NVML itself: what it answers, when, and how its devices are found."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from fake_nvml import FUNCTIONS, Script
from fake_nvml.child import Child, compiled, run


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the fake once."""
    return compiled(tmp_path_factory.mktemp("fake_nvml"))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where the script of a test lies."""
    return tmp_path / "script"


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
fields = n.nvmlDeviceGetFieldValues(h, [186, 82, 74, 269, 60])
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

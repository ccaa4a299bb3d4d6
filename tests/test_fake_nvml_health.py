"""The fake NVML's links and health: PCIe, NVLink, ECC, limits, processes."""

from __future__ import annotations

from pathlib import Path

from fake_nvml import Script
from fake_nvml.child import play

OPEN = """
n.nvmlInit()
h, other = handles()
"""


def test_healthy_links(tmp_path: Path) -> None:
    """By default PCIe runs at its full speed and all 18 NVLinks are up, without an error."""
    program = """
say(n.nvmlDeviceGetCurrPcieLinkGeneration(h), n.nvmlDeviceGetMaxPcieLinkGeneration(h))
say(n.nvmlDeviceGetGpuMaxPcieLinkGeneration(h), n.nvmlDeviceGetPcieReplayCounter(h))
say(n.nvmlDeviceGetCurrPcieLinkWidth(h), n.nvmlDeviceGetMaxPcieLinkWidth(h))
say(n.nvmlDeviceGetPcieSpeed(h), n.nvmlDeviceGetPcieLinkMaxSpeed(h))
say({code(n.nvmlDeviceGetNvLinkState, h, link) for link in range(18)} == {1})
say(code(n.nvmlDeviceGetNvLinkState, h, 18), n.nvmlDeviceGetNvLinkVersion(h, 17))
say(n.nvmlDeviceGetNvLinkRemotePciInfo(h, 1).busId, n.nvmlDeviceGetNvLinkRemoteDeviceType(h, 0))
say({n.nvmlDeviceGetNvLinkErrorCounter(h, 0, kind) for kind in range(5)} == {0})
say(code(n.nvmlDeviceGetNvLinkErrorCounter, h, 0, 5))
"""
    assert play(tmp_path, Script(2), OPEN + program) == [
        [5, 5],
        [5, 0],
        [16, 16],
        [32000, 5],
        [True],
        ["InvalidArgument", 6],
        ["00000000:06:00.0", 2],
        [True],
        ["InvalidArgument"],
    ]


def test_links_one_by_one(tmp_path: Path) -> None:
    """A step may be about one link, one kind of error, or one direction."""
    script = Script(2)
    script.step(0, "nvmlDeviceGetNvLinkState:3", dev=0, val=0)
    script.step(0, "nvmlDeviceGetNvLinkState:4", "NOT_SUPPORTED", dev=0)
    script.step(0, "nvmlDeviceGetNvLinkErrorCounter:3:crc_flit", dev=0, val=2**40)
    script.step(0, "nvmlDeviceGetNvLinkErrorCounter:*:replay", dev="all", val=7)
    script.step(0, "nvmlDeviceGetNvLinkRemotePciInfo:2", dev=0, val="0000000f:aa:00.0")
    script.step(0, "nvmlDeviceGetPcieThroughput", arg="TX", dev=0, val=1)
    script.step(0, "nvmlDeviceGetPcieThroughput:rx", dev=0, val=2)
    program = """
say(*(code(n.nvmlDeviceGetNvLinkState, h, link) for link in (2, 3, 4)))
say(*(n.nvmlDeviceGetNvLinkErrorCounter(h, *at) for at in ((3, 2), (3, 0), (3, 1), (4, 2))))
say(n.nvmlDeviceGetNvLinkErrorCounter(other, 9, 0), n.nvmlDeviceGetNvLinkState(other, 3))
say(n.nvmlDeviceGetNvLinkRemotePciInfo(h, 2).busId)
say(n.nvmlDeviceGetPcieThroughput(h, 0), n.nvmlDeviceGetPcieThroughput(h, 1))
"""
    assert play(tmp_path, script, OPEN + program) == [
        [1, 0, "NotSupported"],
        [2**40, 7, 0, 0],
        [7, 1],
        ["0000000F:AA:00.0"],
        [1, 2],
    ]


def test_ecc(tmp_path: Path) -> None:
    """Errors by kind, life time and place; what Hopper does not tell apart is not supported."""
    script = Script(2)
    script.step(0, "nvmlDeviceGetTotalEccErrors:uncorrected:volatile", dev=0, val=3)
    script.step(0, "nvmlDeviceGetTotalEccErrors:corrected", dev=0, val=1000)
    script.step(0, "nvmlDeviceGetMemoryErrorCounter:uncorrected:aggregate:sram", dev=0, val=5)
    script.step(0, "nvmlDeviceGetRemappedRows", dev=0, val={"uncorrected": 1, "pending": 1})
    script.step(0, "nvmlDeviceGetRowRemapperHistogram", dev=0, val={"max": 2559, "partial": 1})
    script.step(0, "nvmlDeviceGetEccMode", dev=1, val=[0, 1])
    script.step(0, "nvmlDeviceGetRetiredPages:double_bit", dev=1, val=[[4096, 17], [8192, 18]])
    script.step(0, "nvmlDeviceGetRetiredPagesPendingStatus", dev=1, val=1)
    program = """
say(*(n.nvmlDeviceGetTotalEccErrors(h, kind, life) for kind in (0, 1) for life in (0, 1)))
counters = [[code(n.nvmlDeviceGetMemoryErrorCounter, h, 1, life, at) for at in range(8)]
            for life in (0, 1)]
say(counters[0], counters[1][7], code(n.nvmlDeviceGetTotalEccErrors, h, 2, 0))
rows = n.nvmlDeviceGetRowRemapperHistogram(h)
say(n.nvmlDeviceGetRemappedRows(h), [rows.max, rows.high, rows.partial, rows.low, rows.none])
say(n.nvmlDeviceGetEccMode(h), n.nvmlDeviceGetEccMode(other))
say(code(n.nvmlDeviceGetRetiredPages_v2, h, 1), code(n.nvmlDeviceGetRetiredPages_v2, other, 0))
say(n.nvmlDeviceGetRetiredPages_v2(other, 1), n.nvmlDeviceGetRetiredPagesPendingStatus(other))
"""
    pages = [{"address": 4096, "timestamp": 17}, {"address": 8192, "timestamp": 18}]
    absent = "NotSupported"
    assert play(tmp_path, script, OPEN + program) == [
        [1000, 1000, 3, 0],
        [[absent, absent, 0, *[absent] * 4, 0], 5, "InvalidArgument"],
        [[0, 1, 1, 0], [2559, 0, 1, 0, 0]],
        [[1, 1], [0, 1]],
        [absent, absent],
        [pages, 1],
    ]


def test_limits(tmp_path: Path) -> None:
    """Thresholds by kind, the signed margin to the slowdown, power limits and what is constant."""
    script = Script(2)
    script.step(0, "nvmlDeviceGetMarginTemperature", dev=0, val=-5)
    script.step(0, "nvmlDeviceGetTemperatureThreshold:slowdown", dev=0, val=127)
    script.step(0, "nvmlDeviceGetPowerManagementLimitConstraints", dev=0, val={"min": 100_000})
    program = """
say([code(n.nvmlDeviceGetTemperatureThreshold, h, kind) for kind in range(9)])
say(n.nvmlDeviceGetMarginTemperature(h), n.nvmlDeviceGetMarginTemperature(other))
say(n.nvmlDeviceGetPowerManagementLimitConstraints(h))
say(n.nvmlDeviceGetPowerManagementDefaultLimit(h))
say(n.nvmlDeviceGetNumGpuCores(h), n.nvmlDeviceGetMemoryBusWidth(h), n.nvmlDeviceGetComputeMode(h))
say(code(n.nvmlDeviceGetFanSpeed, h), code(n.nvmlDeviceGetTemperature, h, 1))
"""
    assert play(tmp_path, script, OPEN + program) == [
        [[95, 127, 95, 87, *["NotSupported"] * 4, "InvalidArgument"]],
        [-5, 46],
        [[100_000, 700_000]],
        [700_000],
        [16896, 5120, 0],
        ["NotSupported", "NotSupported"],
    ]


def test_fabric_and_recovery(tmp_path: Path) -> None:
    """The fabric's state in each version of its structure, and what would bring a GPU back."""
    script = Script(2)
    script.step(0, "nvmlDeviceGetGpuFabricInfo", dev=0, val={"state": 2, "clique": 7})
    broken = {"state": 3, "status": 999, "uuid3": 0xFF000000, "health_mask": 1, "health_summary": 2}
    script.step(0, "nvmlDeviceGetGpuFabricInfoV", dev=0, val=broken)
    script.step(0, "nvmlDeviceGetFieldValues:GET_GPU_RECOVERY_ACTION", dev=0, val=2)
    program = """
from ctypes import byref
one, two = n.c_nvmlGpuFabricInfo_t(), n.c_nvmlGpuFabricInfo_v2_t()
three = n.c_nvmlGpuFabricInfo_v3_t()
n.nvmlDeviceGetGpuFabricInfo(h, byref(one))
n.nvmlDeviceGetGpuFabricInfoV(h, byref(two))
n.nvmlDeviceGetGpuFabricInfoV(h, byref(three))
say(one.state, one.cliqueId, one.status)
say(two.state, two.status, list(two.clusterUuid)[12:], two.healthMask)
say(three.state, three.status, three.healthMask, three.healthSummary)
n.nvmlDeviceGetGpuFabricInfoV(other, byref(three))
say(three.state, three.status, three.healthSummary)
three.version = 9
say(code(n.nvmlDeviceGetGpuFabricInfoV, h, byref(three)))
say(*(n.nvmlDeviceGetFieldValues(gpu, [n.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0].value.uiVal
      for gpu in (h, other)))
"""
    assert play(tmp_path, script, OPEN + program) == [
        [2, 7, 0],
        [3, 999, [0, 0, 0, 255], 1],
        [3, 999, 1, 2],
        [3, 0, 0],
        ["ArgumentVersionMismatch"],
        [2, 0],
    ]


def test_processes_of_each_kind(tmp_path: Path) -> None:
    """Compute, graphics and MPS processes are told apart."""
    script = Script(2)
    for pid, kind in enumerate(("Compute", "Graphics", "MPSCompute"), 100):
        record = [pid, 2**30, 0xFFFFFFFF, 0xFFFFFFFF]
        script.step(0, f"nvmlDeviceGet{kind}RunningProcesses", dev=0, val=[record])
    program = """
for kind in ("Compute", "Graphics", "MPSCompute"):
    call = getattr(n, f"nvmlDeviceGet{kind}RunningProcesses_v3")
    say([p.pid for p in call(h)], [p.pid for p in call(other)])
"""
    assert play(tmp_path, script, OPEN + program) == [[[100], []], [[101], []], [[102], []]]


def test_cost_table(tmp_path: Path) -> None:
    """A call takes as long as its cost says, to a fraction of a millisecond."""
    costs = {"nvmlDeviceGetTemperature": 30.5, "nvmlDeviceGetPowerUsage": 2500}
    script = Script(2)
    for fn, us in costs.items():
        script.step(0, fn, dev="all", takes_ms=us / 1000)
    program = """
def took(call, *args):
    before = time.monotonic_ns()
    call(*args)
    return time.monotonic_ns() - before

say(min(took(temperature, h) for _ in range(50)), took(n.nvmlDeviceGetPowerUsage, other))
"""
    [[cheap, dear]] = play(tmp_path, script, OPEN + program)
    assert cheap >= 30_500
    assert dear >= 2_500_000
    assert cheap < dear

"""The fake NVML's counters: rates, field values by scope, the power ring, GPM."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import Script
from fake_nvml.child import play

ENERGY = "nvmlDeviceGetTotalEnergyConsumption"
ALL_LINKS = 0xFFFFFFFF

# `reads` gives what a call answers as [monotonic ns before, value, ns after], some 10 ms apart.
READS = """
n.nvmlInit()
h = handles()[0]

def reads(call, count=3):
    found = []
    for _ in range(count):
        before = time.monotonic_ns()
        found.append([before, call(), time.monotonic_ns()])
        time.sleep(0.01)
    return found

def field(which, handle=h):
    f = n.nvmlDeviceGetFieldValues(handle, [which])[0]
    members = "dVal uiVal ulVal ullVal sllVal siVal usVal".split()
    return f.nvmlReturn or getattr(f.value, members[f.valueType])
"""


def bounds(script: Script, t_ms: float, start: int, per_second: float, read: Any) -> bool:
    """Whether a read lies between what its rate gives before and after it (18 for rounding)."""
    before, value, after = read
    assert script.epoch_ns is not None
    zero = script.epoch_ns + t_ms * 1e6
    low, high = (start + per_second * (ns - zero) / 1e9 for ns in (before, after))
    return low - 18 <= value <= high + 18


def test_a_rate_advances_by_itself(tmp_path: Path) -> None:
    """A counter given as a rate is at each time where the rate puts it, since its step's start."""
    script = Script(1)
    script.step(5, ENERGY, dev=0, val={"start": 1000, "per_second": 700_000})
    [reads] = play(tmp_path, script, READS + f"say(*reads(lambda: n.{ENERGY}(h)))")
    assert all(bounds(script, 5, 1000, 700_000, read) for read in reads)
    assert all(one[1] < other[1] for one, other in pairwise(reads))


def test_a_rate_wraps(tmp_path: Path) -> None:
    """With "wrap" a counter starts anew there, as it does where its type ends."""
    script = Script(1)
    rate = {"start": 2**32 - 1000, "per_second": 0.001}
    script.step(0, ENERGY, dev=0, val={**rate, "per_second": 50e9, "wrap": 1000})
    script.step(0, "nvmlDeviceGetFieldValues:PCIE_COUNT_TX_BYTES", dev=0, val=rate)
    script.step(0, "nvmlDeviceGetFieldValues:198", dev=0, val={**rate, "start": 2**32 + 7})
    program = f"say(n.{ENERGY}(h) < 1000, field(197), field(198))"
    assert play(tmp_path, script, READS + program) == [[True, 2**32 - 1000, 7]]


def test_a_rate_without_a_start_goes_on(tmp_path: Path) -> None:
    """A counter keeps what it has come to when only its rate changes."""
    script = Script(1)
    script.step(0, ENERGY, dev=0, val={"start": 10**6, "per_second": 10**12})
    script.step(1, ENERGY, dev=0, val={"per_second": -(10**12)})
    script.step(2, ENERGY, dev=0, val={"per_second": 0})
    script.step(0, "nvmlDeviceGetFieldValues:197", dev=0, val={"per_second": 0})
    script.step(1, "nvmlDeviceGetFieldValues:139", dev=0, val={"per_second": 0})
    program = f"say(n.{ENERGY}(h), field(197), field((139, {ALL_LINKS})))"
    [[energy, pcie, nvlink]] = play(tmp_path, script, READS + program)
    assert (energy, pcie) == (10**6, 0)
    assert nvlink == 18 * 1048  # what the default had come to in 1 ms


def test_any_part_may_be_a_rate(tmp_path: Path) -> None:
    """Rates are not for counters alone, and the other parts keep their values."""
    script = Script(1)
    memory = {"used": {"start": 5, "per_second": 10**9}, "total": 2**40}
    script.step(0, "nvmlDeviceGetMemoryInfo", dev=0, val=memory)
    program = """
info = n.nvmlDeviceGetMemoryInfo(h)
say(reads(lambda: n.nvmlDeviceGetMemoryInfo(h).used, 1)[0], info.total, info.free)
"""
    [[read, total, free]] = play(tmp_path, script, READS + program)
    assert bounds(script, 0, 5, 10**9, read)
    assert (total, free) == (2**40, 64045973504)


def test_byte_counters_advance_by_default(tmp_path: Path) -> None:
    """A healthy GPU has traffic: PCIe bytes in 32 bits, NVLink KiB by link and over all links."""
    script = Script(1)
    program = f"""
first = n.nvmlDeviceGetFieldValues(h, [197, (138, 3), (138, {ALL_LINKS})])
say([[f.valueType, f.nvmlReturn] for f in first])
say(reads(lambda: field(197), 1)[0], reads(lambda: field((138, 3)), 1)[0])
say(reads(lambda: field((138, {ALL_LINKS})), 1)[0], field((138, 18)))
"""
    types, [pcie, link], [links, no_link] = play(tmp_path, script, READS + program)
    assert types == [[[1, 0], [3, 0], [3, 0]]]
    assert bounds(script, 0, 0, 122_880_000, pcie)
    assert bounds(script, 0, 0, 1 << 20, link)
    assert bounds(script, 0, 0, 18 << 20, links)
    assert no_link == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_fields_by_scope(tmp_path: Path) -> None:
    """A step may be about one scope of a field; without one it is about all the others too."""
    script = Script(2)
    script.step(0, "nvmlDeviceGetFieldValues:NVLINK_ERROR_DL_REPLAY", dev=0, val=1)
    script.step(0, "nvmlDeviceGetFieldValues:161:7", dev=0, val=500)
    script.step(0, f"nvmlDeviceGetFieldValues:161:{ALL_LINKS}", "TIMEOUT", dev=0)
    program = f"""
one = handles()[1]
say(*(field((161, scope)) for scope in (0, 7, {ALL_LINKS})), field((161, 7), one))
"""
    assert play(tmp_path, script, READS + program) == [[1, 500, pynvml.NVML_ERROR_TIMEOUT, 0]]


def test_a_field_of_another_type(tmp_path: Path) -> None:
    """A driver may give a field in another type than the header says, and so may a script."""
    script = Script(1)
    script.step(0, "nvmlDeviceGetFieldValues:197", dev=0, val={"value": 2**40, "type": "ulonglong"})
    script.step(0, "nvmlDeviceGetFieldValues:82", dev=0, val={"value": 51.5, "type": "double"})
    rate = {"start": 9, "per_second": 0}
    script.step(0, "nvmlDeviceGetFieldValues:74", dev=0, val={"value": rate, "type": "uint"})
    program = """
fields = n.nvmlDeviceGetFieldValues(h, [197, 82, 74, 194])
say([f.valueType for f in fields], *map(field, [197, 82, 74, 194]))
"""
    assert play(tmp_path, script, READS + program) == [[[3, 0, 1, 5], 2**40, 51.5, 9, -2]]


def test_every_field_of_a_healthy_gpu(tmp_path: Path) -> None:
    """What an H100 supports is there without a step, what it lacks is not."""
    there = [1, 91, 94, *range(74, 84), 138, 139, 161, 162, 163, 185, 186, 191, 193, 194, 195, 196]
    there += [197, 198, 230, 269, 270, 271]
    absent = [pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0, 170, 201, 222, 400]
    program = f"""
for ids in ({there}, {absent}):
    say(*sorted({{f.nvmlReturn for f in n.nvmlDeviceGetFieldValues(h, ids)}}))
"""
    assert play(tmp_path, Script(1), READS + program) == [[0], [pynvml.NVML_ERROR_NOT_SUPPORTED]]


RING = """
def samples(since, kind=0):
    kind, found = n.nvmlDeviceGetSamples(h, kind, since)
    return [[s.timeStamp, s.sampleValue.uiVal] for s in found]
"""


def test_the_power_ring(tmp_path: Path) -> None:
    """The driver keeps a power reading each 20 ms; a caller gets those after the last it saw."""
    program = """
ring = samples(0)
now = time.time_ns() // 1000
say(len(ring), sorted({b[0] - a[0] for a, b in zip(ring, ring[1:])}), *{v for _, v in ring})
say(now - ring[-1][0])
while code(samples, ring[-1][0]) == "NotFound":
    pass
say([t for t, _ in samples(ring[-1][0])][0] - ring[-1][0], code(samples, now + 10**9))
say(len(samples(0, 1)), code(samples, 0, 5), code(samples, 0, 10))
"""
    results = play(tmp_path, Script(1), READS + RING + program)
    assert results[0] == [119, [20_000], 310_000]
    assert results[1][0] < 1_000_000
    assert results[2][0] % 20_000 == 0
    assert results[2][1:] == ["NotFound"]
    assert results[3] == [119, "NotFound", "InvalidArgument"]


def test_a_peak_that_only_the_ring_shows(tmp_path: Path) -> None:
    """The ring has what the steps said at each of its moments, however late it is read."""
    script = Script(1)
    power = "nvmlDeviceGetSamples:power"
    script.step(0, power, dev=0, val=300_000)
    script.step(100, power, dev=0, val=900_000)
    script.step(160, power, dev=0, val=200_000)
    script.step(200, power, dev=0, val={"start": 10**6, "per_second": 10**6})
    program = """
while time.monotonic_ns() < %d:
    time.sleep(0.01)
say(time.time_ns() - time.monotonic_ns(), samples(0))
"""
    script.write(tmp_path / "script")
    assert script.epoch_ns is not None
    epoch = script.epoch_ns
    [[offset, ring]] = play(tmp_path, script, READS + RING + program % (epoch + 300_000_000))
    for stamp, power_mw in ring:
        ms = (stamp * 1000 - offset - epoch) / 1e6
        edges = [abs(ms - edge) for edge in (0, 100, 160, 200)]
        if min(edges) < 2 or ms < 0:
            continue
        steps = {100: 300_000, 160: 900_000, 200: 200_000}
        constant = [mw for edge, mw in steps.items() if ms < edge]
        if constant:
            assert power_mw == constant[0], ms
        else:
            assert power_mw == pytest.approx(10**6 + (ms - 200) * 1000, abs=1000)


GPM = """
def asked(first, second, *ids, version=n.NVML_GPM_METRICS_GET_VERSION):
    asked = n.c_nvmlGpmMetricsGet_t()
    asked.version, asked.numMetrics, asked.sample1, asked.sample2 = version, len(ids), first, second
    for place, metric in enumerate(ids):
        asked.metrics[place].metricId = metric
    failed = code(n.nvmlGpmMetricsGet, asked)
    if isinstance(failed, str):
        return failed
    return [[m.nvmlReturn, str(m.value)] for m in asked.metrics[:len(ids)]]

def pair(handle=h, between=lambda: time.sleep(0.11), get=n.nvmlGpmSampleGet):
    samples = [n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()]
    get(handle, samples[0])
    between()
    get(handle, samples[1])
    return samples
"""


def test_gpm(tmp_path: Path) -> None:
    """Two samples of different refreshes give the metrics, each with its own return code."""
    script = Script(2)
    script.step(0, "nvmlGpmMetricsGet:SM_UTIL", dev=0, val=12.5)
    script.step(0, "nvmlGpmMetricsGet:5", "TIMEOUT", dev=0)
    script.step(0, "nvmlGpmMetricsGet:10", dev=0, val=float("inf"))
    script.step(0, "nvmlGpmQueryDeviceSupport", dev=1, val=0)
    program = """
zero, one = pair()
say(asked(zero, one, 2, 5, 10, 7, 60, 400))
say(*(n.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice for gpu in handles()))
say(code(n.nvmlGpmSampleFree, zero), code(n.nvmlGpmSampleFree, None))
"""
    assert play(tmp_path, script, READS + GPM + program) == [
        [[[0, "12.5"], [5 * 2, "0.0"], [0, "inf"], [0, "92.5"], [0, "18432.0"], [3, "0.0"]]],
        [1, 0],
        [None, "InvalidArgument"],
    ]


def test_gpm_within_a_refresh(tmp_path: Path) -> None:
    """Two samples of one 100 ms refresh have nothing between them: success, and not a number."""
    program = """
seen = []
while len(seen) < 2:
    zero, one = pair(between=lambda: time.sleep(0.001))
    seen += [result for [result] in [asked(zero, one, 2)] if result not in seen]
say(*sorted(seen))
"""
    assert play(tmp_path, Script(1), READS + GPM + program) == [[[0, "95.4"], [0, "nan"]]]


def test_gpm_misused(tmp_path: Path) -> None:
    """Samples of two GPUs, empty samples and unknown versions are errors, and so is a lost GPU."""
    script = Script(3).step(0, "any", "GPU_IS_LOST", dev=2)
    script.step(0, "nvmlDeviceGetHandleByIndex", dev=2)
    program = """
zero, one = pair()
other, _ = pair(handles()[1])
say(asked(zero, n.nvmlGpmSampleAlloc(), 2), asked(zero, other, 2), asked(None, one, 2))
say(asked(zero, one, 2, version=2), code(pair, handles()[2]))
"""
    assert play(tmp_path, script, READS + GPM + program) == [
        ["InvalidArgument", "InvalidArgument", "InvalidArgument"],
        ["ArgumentVersionMismatch", "GpuIsLost"],
    ]


def test_gpm_of_an_instance(tmp_path: Path) -> None:
    """A metric may be of one GPU instance, whose samples are taken by its number."""
    script = Script(1).step(0, "nvmlGpmMetricsGet:2", dev=0, val=80.0)
    script.step(0, "nvmlGpmMetricsGet:2:5", dev=0, val=30.0)
    program = """
five = pair(get=lambda gpu, sample: n.nvmlGpmMigSampleGet(gpu, 5, sample))
say(asked(*five, 2), asked(*pair(), 2))
"""
    assert play(tmp_path, script, READS + GPM + program) == [[[[0, "30.0"]], [[0, "80.0"]]]]

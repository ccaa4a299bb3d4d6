"""A driver that does anything at any time: random scripts, and what must hold through all of them.

More rounds than CI runs: GPUWATCH_ROUNDS=200 GPUWATCH_SEED=7 pytest tests/test_random_drivers.py
"""

import math
import os
import random
import re
import time

import pytest
from fake_nvml import FUNCTIONS
from node import Node, row_times, widest_gap
from running import only

GPUS = 4
ROUNDS = int(os.environ.get("GPUWATCH_ROUNDS", "12"))
SEED = int(os.environ.get("GPUWATCH_SEED", "0"))
ROUND_SECONDS = 1.5
CONFIG = f"""
{only("nvml_state", "nvml_counters", "gpm")}
[ring]
seconds = 600
[state]
period_ms = 10
realtime = false
budget_ratio = 1
[counters]
budget_ratio = 1
"""
ERRORS = (
    "NOT_SUPPORTED", "UNKNOWN", "TIMEOUT", "NO_PERMISSION", "INVALID_ARGUMENT", "NOT_FOUND",
    "GPU_IS_LOST", "RESET_REQUIRED", "NO_DATA", "INSUFFICIENT_SIZE", "FUNCTION_NOT_FOUND",
)  # fmt: skip
# What drivers were seen to answer in place of a value, in whatever unit the call has.
NARROW = (0xFFFFFFFF, 2147483632)
WIDE = (2**64 - 1, 2**63 - 1, 2**63 - 16)
WIDE_CALLS = ("Energy", "Reasons", "TotalEcc", "MemoryErrorCounter")
WIDE_FIELDS = (74, 138, 139, 161, 162, 163, 269, 270, 271)
NARROW_FIELDS = (82, 186, 197, 198, 230)
READ = sorted(
    name
    for name, function in FUNCTIONS.items()
    if not function.process_wide
    and name.startswith("nvmlDeviceGet")
    and "Handle" not in name
    and function.parts
    and set(function.parts) == {"value"}
)
READ += [f"nvmlDeviceGetFieldValues:{number}" for number in WIDE_FIELDS + NARROW_FIELDS]
SCALES = (1.0, 1e-2, 1e-3, 1e-9, 1024.0, 1e6)  # from what a call answers to base units
TOTAL = re.compile(r"gpuwatch_\w+_total\{|gpuwatch_\w+_(bucket|count)\{")
# Of the hardware's own counts, which may be reset.
HARDWARE = ("ecc", "remapped", "energy", "nvlink", "replays", "retired")


def is_sentinel(value: float) -> bool:
    """Say whether a value is a marker, in any unit it may have been turned into."""
    return any(
        math.isclose(abs(value), marker * scale, rel_tol=1e-12)
        for marker in NARROW + WIDE
        for scale in SCALES
    )


def unrest(node: Node, source: random.Random) -> int | None:
    """Have the driver do something; return the GPU that is sick of it, None if none is."""
    gpu = source.randrange(GPUS)
    name = source.choice(READ)
    match source.randrange(6):
        case 0:
            node.now("any", source.choice(ERRORS), dev=gpu)
        case 1:
            node.now(name, source.choice(ERRORS), dev=source.choice([gpu, "all"]))
            return None
        case 2:
            field = int(name.rpartition(":")[2] or 0) if ":" in name else 0
            wide = field in WIDE_FIELDS or any(part in name for part in WIDE_CALLS)
            marker = source.choice(WIDE if wide else NARROW)
            node.now(name, val=marker, dev=source.choice([gpu, "all"]))
            return None
        case 3:
            node.now("any", dev=gpu, takes_ms=source.choice([20, 300, 1500, -1]))
        case 4:
            node.now(name, "crash", dev=gpu, signal="SIGSEGV", times=1)
        case _:
            node.now("any", "GPU_IS_LOST", dev=gpu)
            node.now("nvmlDeviceGetHandleByPciBusId", "GPU_IS_LOST", dev=gpu)
    return gpu


@pytest.mark.timeout(60 + 8 * ROUNDS)
def test_whatever_the_driver_does(tmp_path):
    """The page answers, totals never fall, others are hardly touched, no marker is a value."""
    source = random.Random(SEED)
    node = Node(tmp_path, GPUS)
    told = []
    with node.running(config=CONFIG) as running:
        highest: dict[str, float] = {}
        slowest = 0.0
        for number in range(ROUNDS):
            if number % 3 == 0:
                node.heal()
            sick = unrest(node, source)
            told.append((number, sick, node.script.steps[-1] if node.script.steps else None))
            end = time.monotonic() + ROUND_SECONDS
            while time.monotonic() < end:
                start = time.monotonic()
                page = running.scrape()
                slowest = max(slowest, time.monotonic() - start)
                for name, value in page.items():
                    assert not is_sentinel(value), (name, value, told)
                    if "gpu_" in name:
                        assert not math.isnan(value), (name, told)
                        assert abs(value) < 2**62, (name, value, told)
                    if TOTAL.match(name) and not any(part in name for part in HARDWARE):
                        assert value >= highest.get(name, value), (name, told)
                        highest[name] = value
                time.sleep(0.1)
        assert slowest < 2.0, (slowest, told)  # a hundredth of the hang; some 10 ms on a free host
        node.heal()
        gaps = {}
        struck = {sick for _, sick, _ in told}
        for gpu in set(range(GPUS)) - struck:
            times = row_times(running, f"gpu{gpu}")
            gaps[gpu] = widest_gap(times)
        assert all(gap < 3 * 2 for gap in gaps.values()), (gaps, told)  # 3 s, on a loaded host 6
        running.status()

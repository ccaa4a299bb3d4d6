"""Canaries of a populated node: everything ran on every GPU, and everything is known of it."""

from gpuwatch.baseline import Baseline
from gpuwatch.canary_ledger import CanaryLedger
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.signals import HOST, Entity
from gpuwatch.standings import Standings
from gpuwatch.store import Store

SECONDS = 0.8
PERIOD = 1800.0
ON_GPU = (
    *({"canary": "matmul", "size": 8192, "dtype": dtype, "value": 7e14}
      for dtype in ("fp8", "bf16", "fp16", "tf32")),
    {"canary": "memory", "size": 1 << 29, "value": 4e12},
    *({"canary": "pcie", "size": 1 << 28, "direction": direction, "value": 5e10}
      for direction in ("to_gpu", "from_gpu")),
    {"canary": "startup", "value": 3.0},
    {"canary": "integrity", "size": 4096, "dtype": "int", "value": 0.4},
)  # fmt: skip
AT_ONCE = (
    {"canary": "matmul", "size": 8192, "dtype": "bf16", "value": 6.6e14},
    {"canary": "memory", "size": 1 << 29, "value": 4.1e12},
)
ON_HOST = (
    {"canary": "allreduce", "size": 1 << 28, "value": 3e11, "environment": {"algorithm": "ring"}},
    {"canary": "integrity", "size": 1 << 22, "dtype": "int32", "value": 0.1},
)


def samples(gpus):
    """Return the metrics after each canary has run often enough to have a baseline."""
    baseline = Baseline(Store(None))
    ledger = CanaryLedger(baseline, lambda _: None)
    uuids = {f"GPU-0000-{gpu.id}": gpu for gpu in gpus}
    shared = {"model": "NVIDIA H200", "seconds": SECONDS, "environment": {}}
    for number in range(8):
        when = 1.7e9 + number * PERIOD
        told = (
            [
                {"entity": Entity("gpu", uuid), "gpu": gpu.id, **one}
                for uuid, gpu in uuids.items()
                for one in ON_GPU
            ]
            + [
                {"entity": Entity("gpu", uuid), "gpu": gpu.id, "gpus": len(gpus), **one}
                for uuid, gpu in uuids.items()
                for one in AT_ONCE
            ]
            + [{"entity": HOST, "gpu": None, "gpus": len(gpus), **one} for one in ON_HOST]
        )
        for one in told:
            reading = CanaryReading.from_json({**shared, **one, "time": when})
            ledger.take({**reading.to_json(), "gpu": one["gpu"]})
    standings = Standings()
    standings.look(baseline, uuids, ledger.runs, ledger.skips, now=when)
    return standings.samples

"""A child that pretends to be any canary of a healthy H100, but for what a test scripted.

$CHANGES is JSON: by canary, or canary and GPU ("matmul", "matmul/1"), what its readings have
instead, or {"text": Python} that is run in their place. A "factor" multiplies the value; it "lasts"
so many seconds, on a busy machine enough for looks at the GPU.
"""

import json
import os
import sys
import time
from pathlib import Path

VALUES = {
    "startup": [{"value": 0.6}],
    "matmul": [
        {"dtype": "fp8", "value": 1.4e15},
        {"dtype": "bf16", "value": 7.84e14},
        {"dtype": "fp32", "value": 5e13},
    ],
    "memory": [{"value": 2.97e12}],
    "pcie": [{"direction": "to_gpu", "value": 5.5e10}, {"direction": "from_gpu", "value": 5.5e10}],
    "integrity": [{"dtype": "int", "value": 0.1}],
    "sustained": [{"dtype": "bf16", "value": 7.3e14}] * 6,
    "patterns": [{"value": 1e12, "memory_bytes": 8 << 30, "patterns": 8}],
}
# Of all-reduce by message: a quarter of it at 1 MiB, as NVLink gives.
BUS = {1 << 20: 60e9, 1 << 28: 270e9, 1 << 30: 320e9}
SLICE_SECONDS = 0.15  # several looks, also on a busy machine


def say(**message):
    os.write(1, json.dumps(message).encode() + b"\n")


def main():
    settings = json.load(sys.stdin)
    canary = settings["canary"]
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    changes = json.loads(Path(os.environ["CHANGES"]).read_text())
    for rank, gpu in enumerate(gpus):
        number = int(gpu[-12:])
        told = changes.get(f"{canary}/{number}", changes.get(canary, {}))
        if "text" in told:
            exec(told["text"], globals() | {"settings": settings})
            continue
        if canary == "allreduce":
            break
        for place, one in enumerate(VALUES[canary]):
            tell(settings, rank, one, told, place)
    if len(gpus) > 1:
        told = changes.get(canary, {})
        if canary == "allreduce":
            for size in settings["sizes"]:
                near = min(BUS, key=lambda known: abs(known - size))
                one = {"value": BUS[near], "transports": ["P2P"], "size": size}
                tell(settings, -1, {**one, "gpus": len(gpus)}, told, 0)
        if canary == "integrity":
            tell(settings, -1, {"dtype": "int32", "value": 0.1, "gpus": len(gpus)}, told, 0)


def tell(settings, rank, one, told, place):
    factor = told.get("factor", 1)
    factor = factor[place] if isinstance(factor, list) else factor
    start = time.monotonic_ns()
    time.sleep(told.get("lasts", SLICE_SECONDS))
    base = {"gpu": rank, "size": settings["size"], "environment": {"torch": "2.9.1"}}
    change = {name: value for name, value in told.items() if name not in ("factor", "lasts")}
    moments = {"start_ns": start, "end_ns": time.monotonic_ns()}
    say(
        reading={
            **base,
            **one,
            "value": one["value"] * factor,
            "spread": 0.004,
            **moments,
            **change,
        }
    )


main()

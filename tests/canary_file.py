"""An exported file of baselines as a node of four GPUs would have made it, to be imported."""

import json
import time
from pathlib import Path
from typing import Any

PERIOD = 1800.0
READINGS = 46
DRIVER_AT = 14  # the reading that is the first under another driver
LOSS = 0.08  # of GPU 1, in the last readings
SLOW = 6
AGE = 600.0  # of the newest readings
USUAL: dict[str, dict[str, Any]] = {
    "matmul": {"size": 8192, "dtype": "bf16", "value": 784e12},
    "memory": {"size": 1 << 29, "value": 4.17e12},
    "pcie": {"size": 1 << 28, "direction": "to_gpu", "value": 55.2e9},
    "startup": {"value": 3.3},
    "integrity": {"size": 4096, "value": 0.4},
    "allreduce": {"size": 1 << 28, "dtype": "bf16", "gpus": 4, "value": 330e9},
}
SHAPE = {"size": 0, "dtype": "", "direction": "", "gpus": 1}


def write(path: Path, uuids: list[str]) -> Path:
    """Write readings of all canaries on these GPUs.

    GPU 1 became slower in matmul; GPU 2 computed one wrong result; on GPU 3 a copy failed. The
    driver changed under way, and cost all-reduce a tenth.
    """
    now = time.time()
    courses = []
    for canary, usual in USUAL.items():
        told = {**SHAPE, **usual}
        base = told.pop("value")
        for number, entity in enumerate(
            [["host", ""]] if canary == "allreduce" else [["gpu", uuid] for uuid in uuids]
        ):
            for driver, places in (
                ("570.86", range(DRIVER_AT)),
                ("580.95", range(DRIVER_AT, READINGS)),
            ):
                readings = [_reading(canary, number, base, place, now) for place in places]
                courses.append(
                    {
                        "entity": entity,
                        "canary": canary,
                        **told,
                        "model": "NVIDIA H200",
                        "environment": {"driver": driver, "power_limit_watts": "700"},
                        "reference": None,
                        "readings": readings,
                    }
                )
    content = {"schema": "gpuwatch-baseline", "version": 1, "written": "", "courses": courses}
    path.write_text(json.dumps(content))
    return path


def _reading(canary: str, number: int, base: float, place: int, now: float) -> dict[str, Any]:
    wave = ((place * 7 + number * 5) % 11 - 5) / 5  # from -1 to 1, the same each time
    share = (1 - 0.01 * number) * (1 + 0.003 * wave)
    left = READINGS - place
    if canary == "matmul" and number == 1 and left <= SLOW:
        share *= 1 - LOSS
    if canary == "allreduce" and place >= DRIVER_AT:
        share *= 0.9
    told: dict[str, Any] = {
        "time": now - AGE - (left - 1) * PERIOD + 20 * number,
        "result": "ok",
        "value": base / share if canary == "startup" else base * share,
        "spread": 0.004,
        "clock_hertz": 1.98e9,
        "value_per_hertz": base * share / 1.98e9,
        "power_watts": 690.0,
        "temperature_celsius": 55.0 + number,
        "throttle_seconds": 0.0,
        "detail": "",
        "frozen": False,
    }
    if canary == "integrity" and number == 2 and left == 4:
        told |= {"result": "wrong", "detail": "1 of 16777216 sums is wrong"}
    if canary == "memory" and number == 3 and left == 2:
        told |= {"result": "failed", "value": None, "detail": "CUDA out of memory"}
    return told

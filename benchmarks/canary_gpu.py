"""Canaries on this host's GPUs: are their figures right, do they leave when somebody comes.

    python benchmarks/canary_gpu.py --output DIRECTORY [--parts commands,killed] [--seconds 380]
    python benchmarks/canary_gpu.py --output DIRECTORY --parts spread,spread_starts --readings 30
    python benchmarks/canary_gpu.py --output DIRECTORY --cpu    # the script itself, without a GPU

Each part is tried whatever became of the others; those that no longer fit into the seconds are left
out, and said so. `results.json` has all that was found, and is written after each part. No setting
of a GPU is changed.
"""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from canary_bench import PASSED_ON, Bench
from canary_parts import (
    allreduce,
    commands,
    flips,
    integrity,
    intruded,
    killed,
    looks,
    per_hertz,
    reference,
    startup,
)
from canary_spread import between_jobs, spread, spread_starts

PART_SECONDS = 100
# In order of weight, with the seconds that each is likely to take on two GPUs.
PARTS: dict[str, tuple[Callable[[Bench], dict[str, Any]], float]] = {
    "commands": (commands, 60),
    "allreduce": (allreduce, 25),
    "intruded": (intruded, 15),
    "killed": (killed, 25),
    "integrity": (integrity, 16),
    "flips": (flips, 10),
    "per_hertz": (per_hertz, 40),
    "spread": (spread, 75),  # for ten readings
    "spread_starts": (spread_starts, 50),
    "between_jobs": (between_jobs, 90),
    "reference": (reference, 27),
    "looks": (looks, 13),
    "again": (commands, 60),
    "startup": (startup, 20),
}


def expired(*_: Any) -> None:
    raise TimeoutError("a part took too long")


def tried(bench: Bench, name: str) -> dict[str, Any]:
    """Return a part's findings, or what went wrong in it."""
    part, likely = PARTS[name]
    if name.startswith("spread"):
        likely *= bench.readings / 10
    if bench.left < likely:
        return {"left_out": f"{bench.left:.0f} s are left, it takes {likely:.0f}"}
    if bench.ranks < 2 and name in ("allreduce", "killed"):
        return {"left_out": "takes two GPUs"}
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, max(PART_SECONDS, 1.5 * likely))
    try:
        found = part(bench)
    except Exception:  # noqa: BLE001 - the one guard: the next part is worth its time all the same
        found = {"traceback": traceback.format_exc()}
        print(found["traceback"], flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        bench.end_children()
    return {**found, "part_seconds": time.monotonic() - start}


def shown(value: Any, indent: str = "    ") -> None:
    for name, one in value.items():
        if isinstance(one, dict) and one:
            print(f"{indent}{name}:")
            shown(one, indent + "  ")
        elif isinstance(one, list) and one and isinstance(one[0], dict | list):
            print(f"{indent}{name}:")
            for row in one:
                cells = row.values() if isinstance(row, dict) else row
                print(indent, *(short(cell) for cell in cells if cell not in (None, "")))
        else:
            print(f"{indent}{name}: {short(one)}")


def short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(short, value))
    return str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=380.0)
    parser.add_argument("--readings", type=int, default=10)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ.update(PASSED_ON, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    here = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.getenv("PYTHONPATH")])])
    signal.signal(signal.SIGALRM, expired)
    bench = Bench(options)
    print(f"{len(bench.uuids)} GPUs, host pids {bench.host_pids}, forced {bench.force}", flush=True)
    found: dict[str, Any] = {}
    for name in options.parts.split(","):
        print(f"{name} ...", flush=True)
        found[name] = tried(bench, name)
        (options.output / "results.json").write_text(json.dumps(found, indent=1))
        hidden = ("raw", "log", "values", "checks", "traceback")
        shown({key: one for key, one in found[name].items() if key not in hidden})
        sys.stdout.flush()
    print()
    failed = 0
    for name, one in found.items():
        state = one.get("left_out") or ("DIED" if "traceback" in one else "")
        print(f"{name:10} {one.get('part_seconds', 0):6.1f} s  {state}")
        for check, right in one.get("checks", {}).items():
            failed += not right
            print(f"    {'ok  ' if right else 'FAIL'}  {check}")
        failed += "traceback" in one
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

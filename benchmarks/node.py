"""gpuwatch on a whole node of GPUs, in one run: what it costs, how it behaves beside jobs.

    python benchmarks/node.py --output DIRECTORY [--seconds 470] [--parts soak,jobs]
    python benchmarks/node.py --output DIRECTORY --seconds 150 --pretend    # without a GPU
    python benchmarks/node.py --output DIRECTORY --seconds 480 --parts churn

The daemon runs all the while with everything on, beside jobs that come and go. It is over when the
seconds are, whatever happens; parts that no longer fit are left out, and said so. `churn` has jobs
come and go for minutes, and is run if it is named. `results.json` is written after each part, and
`churn.json` meanwhile; beside it are the report of `gpuwatch verify` as JSON and HTML, a recording
`host.gwr`, and the daemon's log. Needs torch; no setting of a GPU is changed.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pm_sampler
from canary_bench import PASSED_ON
from node_bench import Bench
from node_churn import churn
from node_jobs import jobs
from node_parts import allreduce, killed, pm_sets, recording, soak, verify
from node_table import table

CLOSING_SECONDS = 15.0
RINGS_SECONDS = 80.0  # until rings are full, and memory is what it will be
# In the order in which they run, with the seconds that each takes of 470, and at least.
PARTS: dict[str, tuple[Callable[[Bench, float], dict[str, Any]], float, float]] = {
    "soak": (soak, 130, 60),
    "jobs": (jobs, 100, 45),
    "recording": (recording, 55, 40),
    "verify": (verify, 90, 40),
    "allreduce": (allreduce, 40, 20),
    "killed": (killed, 25, 8),
    "pm_sets": (pm_sets, 40, 25),
    "churn": (churn, 470, 60),
}
ALONE = ("churn",)  # takes all the seconds
WHOLE_SECONDS = 470.0


class PartOver(BaseException):
    """A part took too long; nobody who waits for something else takes it for his own."""


def expired(*_: Any) -> None:
    raise PartOver


def tried(bench: Bench, name: str, scale: float, alone: bool) -> dict[str, Any]:
    """Return a part's findings, or what went wrong in it."""
    part, planned, least = PARTS[name]
    left = bench.left - CLOSING_SECONDS
    if left < least:
        return {"left_out": f"{max(0.0, left):.0f} s are left, it takes {least:.0f}"}
    seconds = min(left, max(least, planned * scale))
    longest = left if alone or name == "verify" else min(left, 1.4 * seconds + 15)
    bench.partial, start = {}, time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, longest)
    try:
        found = part(bench, seconds)
    except (Exception, PartOver):  # noqa: BLE001 - the one guard: the next part is worth its time
        found = {**bench.partial, "traceback": traceback.format_exc(), "errors": bench.errors()}
        print(found["traceback"], found["errors"], flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(Exception):
            bench.end_children()
    return {**found, "part_seconds": time.monotonic() - start}


def environment(pretend: bool) -> None:
    """Set what is passed on to all that is started."""
    os.environ.update(PASSED_ON, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    here = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.getenv("PYTHONPATH")])])
    if pretend:
        pm_sampler.PRETEND.append("--pretend")
        pm_sampler.ORIGIN[:] = ["simulated"]


def about(pretend: bool) -> dict[str, Any]:
    """Return what node this is."""
    load = os.getloadavg()[0]
    found = {"processors": os.cpu_count(), "load": load, "kernel": os.uname().release}
    if pretend:
        return {"gpus": 2, "pretended": True, **found}
    import pynvml

    pynvml.nvmlInit()
    name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    found |= {"gpus": pynvml.nvmlDeviceGetCount(), "name": name}
    found["driver"] = pynvml.nvmlSystemGetDriverVersion()
    pynvml.nvmlShutdown()
    return found


def main() -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=WHOLE_SECONDS)
    parser.add_argument("--parts", default=",".join(name for name in PARTS if name not in ALONE))
    parser.add_argument("--pretend", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    environment(options.pretend)
    signal.signal(signal.SIGALRM, expired)
    found: dict[str, Any] = {"node": about(options.pretend)}

    def write() -> None:
        text = json.dumps(found, indent=1, default=str)
        (options.output / "results.json").write_text(text)

    end = begun + options.seconds
    bench = Bench(options.output, end, found["node"]["gpus"], options.pretend)

    def cut() -> None:
        """End it all: something does not return."""
        print("The seconds are over: cut off.", flush=True)
        bench.kill()
        with contextlib.suppress(Exception):
            write()
            print(table(found), flush=True)
        os._exit(2)

    timer = threading.Timer(max(1.0, end - time.monotonic() - 2), cut)
    timer.daemon = True
    timer.start()
    names = options.parts.split(",")
    # A part alone gets the seconds that there are.
    scale = options.seconds / WHOLE_SECONDS
    for name in names:
        print(f"{time.monotonic() - begun:5.0f} s  {name} ...", flush=True)
        found[name] = tried(bench, name, scale, alone=len(names) == 1)
        with contextlib.suppress(Exception):
            found["memory"] = bench.memory.since(begun + min(RINGS_SECONDS, options.seconds / 2))
        write()
    with contextlib.suppress(Exception):
        events = bench.status()["events"]
        found["events"] = [f"{one['name']} {one['entity']}: {one['detail']}" for one in events][
            -60:
        ]
    found["closed"] = bench.close()
    timer.cancel()
    found["seconds"] = time.monotonic() - begun
    write()
    print(table(found))
    return 1 if any("traceback" in one for one in found.values() if isinstance(one, dict)) else 0


if __name__ == "__main__":
    sys.exit(main())

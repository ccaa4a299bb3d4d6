"""Says who is on each GPU by NVML, looking twenty times a second, until it is ended.

    python node_watch.py [--pretend] [--period 0.05]

A line of JSON at each change: the time on the monotonic clock, the GPU, processes of canaries,
others. --pretend takes canaries and jobs of this host to be on two GPUs.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path

import pynvml
from canary_bench import TITLE, read
from node_job import JOB


def listed() -> list[list[int]]:
    """Return the processes on each GPU."""
    count = pynvml.nvmlDeviceGetCount()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    return [[one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)] for gpu in gpus]


def pretended() -> list[list[int]]:
    pids = [path.parent for path in Path("/proc").glob("[0-9]*/comm")]
    found = [int(path.name) for path in pids if read(f"{path}/comm").strip() in (TITLE, JOB)]
    return [found, found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("--period", type=float, default=0.05)
    options = parser.parse_args()
    pretend = options.pretend
    if not pretend:
        pynvml.nvmlInit()
    names: dict[int, str] = {}
    before: dict[int, list[list[int]]] = {}
    while True:
        with contextlib.suppress(pynvml.NVMLError if not pretend else OSError):
            for gpu, pids in enumerate(pretended() if pretend else listed()):
                for pid in pids:
                    # A process may be listed a little longer than it lives.
                    if name := names.get(pid) or read(f"/proc/{pid}/comm").strip():
                        names[pid] = name
                known = sorted(pid for pid in pids if pid in names)
                canaries = [pid for pid in known if names[pid] == TITLE]
                now = [canaries, [pid for pid in known if pid not in canaries]]
                if now != before.get(gpu, [[], []]):
                    print(json.dumps([time.monotonic_ns(), gpu, *now]), flush=True)
                before[gpu] = now
        time.sleep(options.period)


if __name__ == "__main__":
    main()

"""Draw the burst that pm.py has measured: `python benchmarks/burst_plot.py burst.json burst.png`.

Needs matplotlib, which gpuwatch does not install.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

BANDWIDTH = 4.917e12  # of an H200's memory, as its ratios are told


def main() -> int:
    told = json.loads(Path(sys.argv[1]).read_text())
    zero_ns = told["burst"]["start_ns"]
    pm, gpm = told["pm"], told["gpm"]
    names = [name for name in pm if name.startswith("gpu_dram_")]
    moved = [sum(values) for values in zip(*(pm[name] for name in names), strict=True)]
    times = [(time_ns - zero_ns) / 1e6 for time_ns in pm["times_ns"]]
    rates = [
        (moved[i] - moved[i - 1]) / (times[i] - times[i - 1]) / 1e9 for i in range(1, len(moved))
    ]
    slow_times = [(time_ns - zero_ns) / 1e6 for time_ns in gpm["times_ns"]]
    slow = [share * BANDWIDTH / 1e12 for share in gpm["gpu_dram_active_ratio"]]
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, parts = plt.subplots(1, 2, figsize=(8, 2.6), width_ratios=(2, 1), sharey=True)
    for axes, limits in zip(parts, ((-600, 600), (-12, 18)), strict=True):
        # A row tells of the interval before its time.
        axes.step(times[1:], rates, where="pre", color="#1a6fb5", lw=1, label="counters, 1 ms")
        axes.step(slow_times, slow, where="pre", color="#d1495b", lw=1.5, label="GPM, 100 ms")
        axes.set(xlim=limits, xlabel="ms since the burst began")
    parts[0].set(ylabel="memory, TB/s", ylim=(0, None))
    parts[0].legend(frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the state sampler gives and costs on this host's real GPUs, in one run.

    python benchmarks/gpu_state.py --seconds 420 --output DIRECTORY

Starts the daemon, then: values against nvidia-smi under steady load; time under the power cap
from the bits against the driver's own nanoseconds; CPU and lateness against a C loop with the same
calls; scrape latency and memory; a recording; and the slowdown of a training-like job with its
off/off control. Prints a table; needs torch for the loads.
"""

import argparse
import csv
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pynvml
from measured import HERE, Host, columns, load, scrape, scrapes, total

from gpuwatch import clock
from gpuwatch.control import request

SMI_FIELDS = (
    "timestamp,index,clocks.sm,clocks.mem,temperature.gpu,temperature.memory,power.draw.instant"
)
POWER_CAP_NS = 74  # NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP


def against_smi(host: Host, seconds: float) -> None:
    """Compare what nvidia-smi says with what was recorded within 150 ms of it."""
    smi = subprocess.Popen(
        [
            *("nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"),
            *("-lms", "250"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    smi.terminate()
    lines = list(csv.reader(smi.communicate()[0].splitlines()))
    recorded = columns(host.record(seconds + 5))
    offset = clock.read_clocks()
    compared = dict.fromkeys(("sm", "memory", "core", "memory_core"), 0)
    agreed = dict(compared)
    watts: dict[str, list[float]] = {}
    names = (
        ("sm", 2, 'gpu_clock_hertz{clock="sm"}', 1e6, 0.0),
        ("memory", 3, 'gpu_clock_hertz{clock="memory"}', 1e6, 0.0),
        ("core", 4, 'gpu_temperature_celsius{sensor="core"}', 1.0, 1.0),
        ("memory_core", 5, 'gpu_temperature_celsius{sensor="memory"}', 1.0, 1.0),
    )
    for line in lines:
        if len(line) < 7:
            continue
        stamp = datetime.datetime.strptime(line[0].strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp()
        moment = int(stamp * 1e9) - offset.realtime_ns + offset.monotonic_ns
        gpu = line[1].strip()
        watts.setdefault(gpu, []).append(float(line[6]))
        for name, place, column, unit, tolerance in names:
            times, values = recorded[gpu, column]
            near = values[(times > moment - 150e6) & (times < moment + 150e6)]
            if len(near):
                compared[name] += 1
                difference = np.abs(near - float(line[place]) * unit).min()
                agreed[name] += bool(difference <= tolerance + 1e-6 * unit)
    for name in compared:
        print(f"nvidia-smi {name}: {agreed[name]} of {compared[name]} agree")
    for gpu, values in watts.items():
        times, power = recorded[gpu, "gpu_power_watts"]
        ours = float(np.nanmean(power[times > times[-1] - seconds * 1e9]))
        smi_mean = statistics.fmean(values)
        print(
            f"power gpu {gpu}: ours {ours:.1f} W nvidia-smi {smi_mean:.1f} W"
            f" {ours / smi_mean - 1:+.2%}"
        )


def driver_capped_seconds() -> list[float]:
    """Return each GPU's time under the power cap by the driver's own counter."""
    script = (
        "import pynvml as n; n.nvmlInit();"
        "print(*[n.nvmlDeviceGetFieldValues(n.nvmlDeviceGetHandleByIndex(i),"
        f" [{POWER_CAP_NS}])[0].value.ullVal for i in range(n.nvmlDeviceGetCount())])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return [int(value) / 1e9 for value in done.stdout.split()]


def capped_seconds() -> list[float]:
    series = scrape()
    gpus = int(series["gpuwatch_gpus_visible"])
    name = "gpuwatch_gpu_throttle_seconds_total"
    return [total(series, name, f'gpu="{gpu}"', "sw_power_cap") for gpu in range(gpus)]


def power_cap(seconds: float) -> None:
    """Compare the cap's time by bits and by the driver over a load with idle gaps."""
    time.sleep(1.5)
    driver, ours = driver_capped_seconds(), capped_seconds()
    events = total(scrape(), "gpuwatch_gpu_throttle_events_total", "sw_power_cap")
    load(seconds, "--busy", "5", "--idle", "2.5").wait()
    time.sleep(2.0)
    edges = total(scrape(), "gpuwatch_gpu_throttle_events_total", "sw_power_cap") - events
    after_driver, after_ours = driver_capped_seconds(), capped_seconds()
    for gpu, (start, end) in enumerate(zip(driver, after_driver, strict=True)):
        bits = after_ours[gpu] - ours[gpu]
        print(
            f"power cap gpu {gpu}: driver {end - start:.3f} s, bits {bits:.3f} s,"
            f" difference {bits - end + start:+.3f} s; raised {edges:.0f} times on all GPUs"
        )


def cost(host: Host, seconds: float) -> None:
    """CPU of each duty and lateness under load, and the C loop's for the same calls."""
    before, start = scrape(), time.monotonic()
    time.sleep(seconds)
    after, passed = scrape(), time.monotonic() - start
    for duty in ("supervisor", "state", "daemon"):
        name = f'gpuwatch_process_cpu_seconds_total{{duty="{duty}"}}'
        print(f"CPU {duty}: {100 * (after[name] - before[name]) / passed:.2f} % of a core")
    recorded = columns(host.record(seconds))
    for (kind, ring), (times, late) in sorted(recorded.items()):
        if kind == "late":
            quantiles = np.percentile(late * 1e6, [50, 99, 99.9])
            rate = (len(times) - 1) / ((times[-1] - times[0]) / 1e9)
            print(
                f"{ring}: {rate:.1f} Hz, lateness us p50 {quantiles[0]:.1f}"
                f" p99 {quantiles[1]:.1f} p99.9 {quantiles[2]:.1f} max {late.max() * 1e6:.0f}"
            )
    request(host.control, {"command": "interval", "source": "nvml_state", "scale": 0}, 5)
    binary = host.output / "state_loop"
    source = HERE / "state_loop.c"
    subprocess.run(["gcc", "-O2", "-o", str(binary), str(source), "-ldl", "-lm"], check=True)
    subprocess.run([str(binary), str(seconds)], check=True)
    binary.unlink()
    request(host.control, {"command": "interval", "source": "nvml_state", "scale": 1}, 5)


def refreshes() -> None:
    for name, value in sorted(scrape().items()):
        if name.startswith(("gpuwatch_signal_refresh_seconds", "gpuwatch_source_period")):
            print(f"{name} {value:g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--classes", default="off,off,10,1")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    print(f"{count} x {name}, driver {pynvml.nvmlSystemGetDriverVersion()}, {os.uname().release}")
    pynvml.nvmlShutdown()
    host = Host(options.output)
    try:
        steady = load(48)
        time.sleep(10)
        against_smi(host, 12)
        cost(host, 10)
        steady.wait()
        power_cap(60)
        refreshes()
        bundle = host.record(58)
        (options.output / "host.gwr").write_bytes(bundle.path.read_bytes())
        scrapes(100)
        left = end - time.monotonic() - 25
        if left > 20:
            subprocess.run(
                [
                    *(sys.executable, str(HERE / "training_step.py")),
                    *("--segments", str(options.output / "segments")),
                    *("--control", str(host.control), "--classes", options.classes),
                    *("--seconds", str(left)),
                ],
                check=True,
            )
        print(json.dumps({key: v for key, v in scrape().items() if "errors_total" in key}))
    finally:
        host.stop()
        print((options.output / "daemon.log").read_text()[-3000:])
    return 0


if __name__ == "__main__":
    sys.exit(main())

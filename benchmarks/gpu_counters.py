"""What the counters of this host's real GPUs are worth, and what all reads together cost.

    python benchmarks/gpu_counters.py --seconds 420 --output DIRECTORY

Starts the daemon with its defaults, then: what is there; PCIe bytes of known copies across many
wraps, NVLink bytes of a known all-reduce, energy against the integral of the power points; CPU of
each duty, beside nvitop-exporter where it is installed; and the slowdown of a training-like job.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
from measured import HERE, Host, columns, load, scrape, scrapes, total

SOURCES = "nvml_state,nvml_counters,gpm"
SETTLE = 2.5  # seconds until all that was moved has been read and shown
GPU0 = 'gpu="0"'


def moved(arguments: list[str], name: str) -> tuple[float, float, float, float]:
    """Run a known move; return its bytes, seconds, what was counted and what went uncovered."""
    job = subprocess.Popen(
        [sys.executable, str(HERE / "moves.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdin
    assert job.stdout
    assert job.stdout.readline().strip() == "ready"
    time.sleep(SETTLE)
    before = scrape()
    job.stdin.write("\n")
    job.stdin.flush()
    answer = json.loads(job.stdout.readline())
    time.sleep(SETTLE)
    after = scrape()
    job.stdin.close()
    job.wait()
    uncovered = "gpuwatch_gpu_counters_uncovered_seconds_total"
    return (
        answer["bytes"],
        answer["seconds"],
        total(after, name, GPU0) - total(before, name, GPU0),
        total(after, uncovered, GPU0) - total(before, uncovered, GPU0),
    )


def pcie() -> None:
    for direction, name in (("h2d", "received"), ("d2h", "transmitted")):
        series = f"gpuwatch_gpu_pcie_{name}_bytes_total"
        overhead = 0.0
        for gib in (1, 800):
            arguments = ["pcie", "--direction", direction, "--gib", str(gib)]
            size, seconds, counted, uncovered = moved(arguments, series)
            ratio = counted / size
            print(
                f"pcie {direction} {size / 2**30:.0f} GiB at {size / seconds / 1e9:.1f} GB/s:"
                f" counted {ratio:.4f} of the payload, {counted / 2**32:.0f} wraps,"
                f" uncovered {uncovered:.3f} s"
                + (f"; against the short copy {ratio / overhead - 1:+.2%}" if overhead else "")
            )
            overhead = overhead or ratio


def nvlink() -> None:
    for count in (100, 800):
        arguments = ["allreduce", "--mib", "256", "--count", str(count)]
        series = "gpuwatch_gpu_nvlink_transmitted_bytes_total"
        size, seconds, counted, _ = moved(arguments, series)
        print(
            f"all-reduce {count} x 256 MiB at {size / seconds / 1e9:.1f} GB/s:"
            f" nvlink sent {counted / size:.4f} of the algorithm's bytes"
        )


def energy(host: Host, seconds: float) -> None:
    """Compare the driver's joules with the sum of its own power points under steady load."""
    job = load(seconds + 15)
    time.sleep(8)
    time.sleep(min(seconds, 58))
    recorded = columns(host.record(min(seconds, 56)))
    job.wait()
    for gpu in sorted({key[0] for key in recorded if key[1] == "gpu_energy_joules_total"}):
        times, joules = recorded[gpu, "gpu_energy_joules_total"]
        points, watts = recorded[gpu, "gpu_power_sample_watts"]
        known = joules >= 0
        times, joules = times[known], joules[known] * 1e-3  # the ring holds millijoules
        inside = (points >= times[0]) & (points <= times[-1]) & ~np.isnan(watts)
        steps = np.diff(np.append(points[inside], times[-1])) / 1e9
        summed = float((watts[inside].astype(float) * steps).sum())
        drawn = float(joules[-1] - joules[0])
        print(
            f"energy gpu {gpu}: driver {drawn:.0f} J, power points {summed:.0f} J over"
            f" {(times[-1] - times[0]) / 1e9:.0f} s: {summed / drawn - 1:+.2%};"
            f" {inside.sum()} points, spacing p50 {np.median(np.diff(points)) / 1e6:.1f} ms"
        )
    for (kind, ring), (times, late) in sorted(recorded.items()):
        if kind == "late" and len(times) > 2:
            rate = (len(times) - 1) / ((times[-1] - times[0]) / 1e9)
            p50, p99 = np.percentile(late * 1e3, [50, 99])
            print(f"  {ring}: {rate:.2f} Hz, lateness ms p50 {p50:.2f} p99 {p99:.2f}")


def presence() -> None:
    series = scrape()
    families: dict[str, list[float]] = {}
    for name, value in series.items():
        if name.startswith(("gpuwatch_gpu", "gpuwatch_node")):
            families.setdefault(name.split("{")[0], []).append(value)
    for name, values in sorted(families.items()):
        if not name.endswith(("_bucket", "_sum", "_count")):
            print(f"  {name}: {len(values)} series, {min(values):g} to {max(values):g}")
    errors = {key: value for key, value in series.items() if "source_errors_total" in key}
    print(f"errors: {errors}")
    for name, value in sorted(series.items()):
        if name.startswith(("gpuwatch_source_period", "gpuwatch_signal_refresh")):
            print(f"  {name} {value:g}")


def cpu(seconds: float) -> None:
    """CPU of each process, and of nvitop-exporter at its default interval, per value sampled."""
    rival = None
    if shutil.which("nvitop-exporter") or os.environ.get("NVITOP"):
        command = [sys.executable, "-m", "nvitop_exporter", "--port", "19974"]
        rival = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(5)
    before, start = scrape(), time.monotonic()
    rival_before = sum(rival.cpu_times()[:2]) if rival else 0.0
    time.sleep(seconds)
    after, passed = scrape(), time.monotonic() - start
    name = "gpuwatch_process_cpu_seconds_total"
    shares = {
        key.split('"')[1]: (after[key] - before[key]) / passed
        for key in after
        if key.startswith(name) and key in before
    }
    print("CPU of a core: " + ", ".join(f"{duty} {share:.2%}" for duty, share in shares.items()))
    reads = total(after, "gpuwatch_source_read_seconds_count") - total(
        before, "gpuwatch_source_read_seconds_count"
    )
    print(f"all {sum(shares.values()):.2%}; {reads / passed:.0f} reads (rows) a second")
    if rival:
        share = (sum(rival.cpu_times()[:2]) - rival_before) / passed
        import urllib.request

        page = urllib.request.urlopen("http://127.0.0.1:19974/metrics", timeout=10).read()
        values = sum(not line.startswith(b"#") for line in page.splitlines())
        print(f"nvitop-exporter: {share:.2%} of a core, {values} series, each once a second")
        rival.terminate()
        rival.wait(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--classes", default="off,off,1")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    host = Host(options.output)
    try:
        time.sleep(12)
        presence()
        pcie()
        if len([key for key in scrape() if key.startswith("gpuwatch_gpu_up")]) > 1:
            nvlink()
        energy(host, 60)
        job = load(40)
        time.sleep(10)
        cpu(20)
        job.wait()
        cpu(10)
        scrapes(100)
        bundle = host.record(58)
        (options.output / "host.gwr").write_bytes(bundle.path.read_bytes())
        left = end - time.monotonic() - 25
        if left > 20:
            subprocess.run(
                [
                    *(sys.executable, str(HERE / "training_step.py")),
                    *("--segments", str(options.output / "segments")),
                    *("--control", str(host.control), "--classes", options.classes),
                    *("--source", SOURCES, "--seconds", str(left)),
                ],
                check=True,
            )
    finally:
        host.stop()
        print((options.output / "daemon.log").read_text()[-3000:])
    return 0


if __name__ == "__main__":
    sys.exit(main())

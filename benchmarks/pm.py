"""What PM sampling gives and costs on this host's real GPUs: one script, one run.

    python benchmarks/pm.py --output DIRECTORY [--parts truth,burst,cost,image,lifecycle,soak]
    python benchmarks/pm.py --output DIRECTORY --parts sysclk,ring,standby
    python benchmarks/pm.py --output DIRECTORY --parts slowdown --slowdown 100

Uses the product's own sampler. Each part has its `--seconds`-like option, is reported even when it
fails, and goes into DIRECTORY/pm.json at once; the burst's series are in DIRECTORY/burst.json. No
clock, persistence or power setting is touched. Needs torch for the loads; --pretend runs all of it
without a GPU, against a scripted library.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pm_sampler
from pm_sampler import ARRIVE_SECONDS, HERE, SETTLE_SECONDS, Load, Sampler, Series, busy, collectors

import gpuwatch
from gpuwatch.capabilities import NUMBERS
from gpuwatch.clock import monotonic_ns
from gpuwatch.control import request
from gpuwatch.recording import RecordingReader, RowsBlock

MS = 1_000_000
# Dense bf16 of one SM a cycle on Hopper: 4 tensor cores of 512 fused multiply-adds.
FLOPS_PER_SM_CYCLE = 4096
PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {}
DRAM = ("gpu_dram_read_bytes_total", "gpu_dram_written_bytes_total")
NVLINK = ("gpu_nvlink_received_bytes_total", "gpu_nvlink_transmitted_bytes_total")
NVLINK_RAW = ("gpu_nvlink_raw_received_bytes_total", "gpu_nvlink_raw_transmitted_bytes_total")
PCIE = ("gpu_pcie_received_bytes_total", "gpu_pcie_transmitted_bytes_total")
TENSOR, SM, CLOCK = "gpu_tensor_busy_ratio", "gpu_sm_busy_ratio", 'gpu_clock_hertz{clock="gpc"}'


def part(function: Callable[[argparse.Namespace], Any]) -> Callable[[argparse.Namespace], Any]:
    PARTS[function.__name__] = function
    return function


def started(options: argparse.Namespace, duty: str = "pm", source: str = "pm", **keys: Any):
    if options.library and duty == "pm":
        keys = {"library": options.library, **keys}
    return Sampler(duty, source, options.sysfs, **keys)


def guarded(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or how it failed."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the other measurements go on
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def moved(sampler: Sampler, load: Load, names: tuple[str, ...]) -> dict[str, Any]:
    """Compare counters with the bytes of a known load."""
    did = load.run()
    time.sleep(ARRIVE_SECONDS)
    found = sampler.of_gpu(0, did["start_ns"] - 100 * MS, did["end_ns"] + 100 * MS)
    load.end()
    took = (did["end_ns"] - did["start_ns"]) / 1e9
    counted = {name: found.rise(name) if name in found.cells else None for name in names}
    ratios = {name: count / did["bytes"] for name, count in counted.items() if count is not None}
    return {"bytes": did["bytes"], "bytes_per_second": did["bytes"] / took, "counted": counted,
            "ratio": ratios, **found.about()}  # fmt: skip


@part
def truth(options: argparse.Namespace) -> Any:
    """Counters against known work, and against GPM."""
    found: dict[str, Any] = {}
    with started(options, set="full") as sampler:
        found["start_seconds"], found["reason"] = sampler.start_seconds, sampler.reason
        wanted = [("copy", DRAM), ("h2d", (*PCIE, *DRAM)), ("d2h", (*PCIE, *DRAM))]
        loads = {what: Load(what, options.truth) for what, _ in wanted}  # start side by side
        matmul = Load("matmul", options.agreement)
        for what, names in wanted:
            found[what] = guarded(lambda what=what, names=names: moved(sampler, loads[what], names))
        if options.gpus > 1:
            found["allreduce"] = guarded(
                lambda: links(options, sampler, Load("allreduce", options.truth))
            )
        found["matmul"] = guarded(lambda: against_flops(options, sampler, matmul))
        found["errors"] = sampler.hear()
        found["events"] = sampler.events
    return found


def links(options: argparse.Namespace, sampler: Sampler, load: Load) -> dict[str, Any]:
    """Compare NVLink's bytes with an algorithm's and with what NVML counts, GPU by GPU.

    NVML is read once a second: nothing else may move while it is waited for, before and after.
    """
    slow = started(options, "counters", "nvml_counters")
    try:
        did = load.run()
        time.sleep(ARRIVE_SECONDS + 1.0)
        start_ns, end_ns = did["start_ns"] - 100 * MS, did["end_ns"] + 100 * MS
        every = slow.series(start_ns - 1_500 * MS, monotonic_ns())
        told = {rows.entity: rows for rows in every if NVLINK[0] in rows.cells}
        found: dict[str, Any] = {"bytes": did["bytes"], "seconds": (end_ns - start_ns) / 1e9}
        for rows in sampler.series(start_ns, end_ns):
            counted = {
                name: rows.rise(name) for name in (*NVLINK, *NVLINK_RAW) if name in rows.cells
            }
            # NVML counts in KiB.
            by_nvml = {name: told[rows.entity].rise(name) * 1024 for name in NVLINK
                       if rows.entity in told}  # fmt: skip
            found[rows.entity] = {
                "counted": counted, "nvml": by_nvml,
                "to_payload": {name: count / did["bytes"] for name, count in counted.items()},
                "to_nvml": {name: counted.get(name, 0) / n for name, n in by_nvml.items() if n},
                **rows.about(),
            }  # fmt: skip
        load.end()
        return found
    finally:
        slow.stop()


def against_flops(options: argparse.Namespace, sampler: Sampler, load: Load) -> dict[str, Any]:
    """Compare tensor activity with the arithmetic of matmuls, and all with GPM."""
    gpm = started(options, "counters", "gpm")
    try:
        did = load.run()
        time.sleep(ARRIVE_SECONDS)
        # The first half second warms up.
        inside = did["start_ns"] + 500 * MS, did["end_ns"] - 50 * MS
        pm = sampler.of_gpu(0, *inside)
        achieved = did["flops"] / (did["end_ns"] - did["start_ns"]) * 1e9
        tensor, clock = pm.mean(TENSOR), pm.mean(CLOCK)
        by_counters = tensor * clock * did["sms"] * FLOPS_PER_SM_CYCLE
        seconds = (pm.times[-1] - pm.times[0]) / 1e9
        dram = sum(pm.rise(name) for name in DRAM) / seconds
        found = {"flops_per_second": achieved, "tensor_ratio": tensor, "gpc_clock": clock,
                 "sm_ratio": pm.mean(SM), "flops_by_counters": by_counters,
                 "counters_over_achieved": by_counters / achieved,
                 "dram_bytes_per_second": dram, "l2_bytes_per_second":
                 pm.rise("gpu_l2_bytes_total") / seconds, **pm.about()}  # fmt: skip
        found["gpm"] = guarded(lambda: means(gpm.of_gpu(0, *inside)))
        load.end()
        return found
    finally:
        gpm.stop()


def means(rows: Series) -> dict[str, float]:
    return {name: rows.mean(name) for name in rows.cells}


@part
def burst(options: argparse.Namespace) -> Any:
    """Show 5 ms of copies in an idle second: seen by pm, lost in GPM's 100 ms."""
    gpm = started(options, "counters", "gpm")
    try:
        with started(options) as sampler:
            load = Load("burst", 2.0)
            did = load.run()
            time.sleep(ARRIVE_SECONDS)
            inside = did["start_ns"] - 900 * MS, did["start_ns"] + 900 * MS
            pm = sampler.of_gpu(0, *inside)
            series = {
                "burst": did,
                "pm": {"times_ns": pm.times.tolist(),
                       **{name: values.tolist() for name, values in pm.cells.items()}},
                "gpm": {},
            }  # fmt: skip
            rates = sum((pm.cells[name][1:] - pm.cells[name][:-1]) for name in DRAM)
            rates = rates / (pm.times[1:] - pm.times[:-1]) * 1e9
            found = {"seconds": did["seconds"], "peak_bytes_per_second": float(rates.max()),
                     "median_bytes_per_second": float(sorted(rates)[len(rates) // 2]),
                     "milliseconds_above_half": int((rates > rates.max() / 2).sum()),
                     "counted": {name: pm.rise(name) / did["bytes"] for name in DRAM},
                     **pm.about()}  # fmt: skip
            load.end()
            if list(gpm.readers()):
                rows = gpm.of_gpu(0, *inside)
                series["gpm"] = {"times_ns": rows.times.tolist(),
                                 **{n: v.tolist() for n, v in rows.cells.items()}}  # fmt: skip
                shares = rows.cells["gpu_dram_active_ratio"]
                found["gpm_dram_ratio_max"] = float(max(shares[shares == shares], default=-1))
            else:
                found["gpm"] = gpm.reason
        (options.output / "burst.json").write_text(json.dumps(series))
        return found
    finally:
        gpm.stop()


@part
def cost(options: argparse.Namespace) -> Any:
    """CPU of the sampler by set, interval and load, as a share of one core for each GPU."""
    found: list[dict[str, Any]] = []

    def measure(load: str) -> None:
        for chosen in ("default", "full"):
            for interval in ("100us", "1ms", "10ms"):
                if not wanted or f"{load}:{chosen}:{interval}" in wanted:
                    found.append(guarded(lambda c=chosen, i=interval: one(options, load, c, i)))

    wanted = options.combinations.split(",") if options.combinations else []
    measure("idle")
    with busy(600):
        measure("busy")
    return found


def one(options: argparse.Namespace, load: str, chosen: str, interval: str) -> dict[str, Any]:
    with started(options, set=chosen, interval=interval) as sampler:
        time.sleep(SETTLE_SECONDS)
        before, start_ns = sampler.cpu_seconds(), monotonic_ns()
        time.sleep(options.cost)
        used = (sampler.cpu_seconds() - before) / ((monotonic_ns() - start_ns) / 1e9)
        end_ns = monotonic_ns()
        time.sleep(ARRIVE_SECONDS)
        series = sampler.series(start_ns, end_ns)
        errors = sampler.hear()
        return {"load": load, "set": chosen, "interval": interval,
                "core_per_gpu": used / max(1, len(series)), "gpus": len(series),
                "pss_mib": sampler.pss_mib(), "mappings": pm_sampler.memory(sampler.process.pid),
                "start_seconds": sampler.start_seconds,
                "errors": errors, "reason": sampler.reason, "events": sampler.events[-2:],
                **(series[0].about() if series else {})}  # fmt: skip


class Daemon:
    """`gpuwatch run` with pm alone."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.directory = pm_sampler.SHARED_MEMORY / f"gpuwatch-pm-daemon-{os.getpid()}"
        self.directory.mkdir()
        text = "[collectors]\n"
        text += "".join(f"{k} = {str(v).lower()}\n" for k, v in collectors("pm").items())
        text += f'[pm]\nbudget_ratio = 1.0\nlibrary = "{options.library}"\n'
        (self.directory / "config.toml").write_text(text)
        self.control = self.directory / "control.sock"
        self.log = (options.output / "daemon.log").open("w")
        self.process = subprocess.Popen(
            [*(sys.executable, "-m", "gpuwatch", "run"),
             *("--config", str(self.directory / "config.toml")),
             *("--path.runtime", str(self.directory), "--path.sysfs", options.sysfs),
             *("--path.state", str(self.directory / "state")),
             *("--web.listen-address", "127.0.0.1:19974")],
            stderr=self.log,
        )  # fmt: skip
        self.wait_for_rows(0)

    def manifest(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.directory / "pm.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def wait_for_rows(self, since_ns: int, seconds: float = 40) -> float:
        """Wait until all rings have rows from after a time; return how long that took."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            rings = [pm_sampler.RingReader(Path(one)) for one in self.manifest().get("rings", ())]
            live = [reader.before(2**62) > reader.before(since_ns) for reader in rings]
            for reader in rings:
                reader.close()
            if live and all(live):
                return time.monotonic() - start
            time.sleep(0.02)
        raise RuntimeError(f"no rows within {seconds} s: {self.manifest().get('sources')}")

    def stop(self) -> float:
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        finally:
            self.process.kill()
            shutil.rmtree(self.directory, ignore_errors=True)
        return time.monotonic() - start


@part
def slowdown(options: argparse.Namespace) -> Any:
    """Slowdown of a training-like job: off, off again as control, and 1 ms.

    A segment is long beside the settling that a change of the hardware's sampling takes, and a
    hundred seconds hold more than twenty blocks.
    """
    daemon = Daemon(options)
    try:
        command = [
            *(sys.executable, str(HERE / "training_step.py"), "--source", "pm"),
            *("--segments", str(daemon.directory / "segments"), "--control", str(daemon.control)),
            *("--classes", "off,off,1", "--seconds", str(options.slowdown)),
            *("--settle-steps", "30", "--segment-steps", "64"),
        ]
        if options.pretend:
            command.append("--pretend")
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.slowdown + 120, check=False
        )
        return {"lines": done.stdout.splitlines(), "status": done.returncode,
                "error": done.stderr[-500:]}  # fmt: skip
    finally:
        daemon.stop()


@part
def image(options: argparse.Namespace) -> Any:
    """Compare sizes of the image: CPU, memory, samples lost; and what a start takes of memory."""
    return told(options, "pm_image.py", "--seconds", str(options.image))


@part
def sysclk(options: argparse.Namespace) -> Any:
    """Sample by the sys clock, as GA100 and Turing have to: intervals, and bytes of known loads."""
    return told(
        options, "pm_raw.py", "sysclk", "--seconds", str(options.truth), *pm_sampler.PRETEND
    )


@part
def ring(options: argparse.Namespace) -> Any:
    """Record into a buffer that keeps the latest: CPU meanwhile, and what a drain gives by size."""
    return told(options, "pm_raw.py", "ring", "--seconds", str(options.ring), *pm_sampler.PRETEND)


def told(options: argparse.Namespace, script: str, *arguments: str) -> Any:
    """Return what a script of its own prints, or how it failed."""
    command = [sys.executable, str(HERE / script), *arguments]
    command += ["--library", options.library] if options.library else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        return {"failed": done.stderr[-800:]}
    return json.loads(done.stdout)


@part
def standby(options: argparse.Namespace) -> Any:
    """Have the hardware keep the latest alone, as above the budget: CPU, and what is recorded."""
    daemon = Daemon(options)
    try:
        load = Load("copy", options.truth)
        load.ready()
        scaled(daemon, 11)
        wait_until(lambda: daemon.manifest()["sources"]["pm"]["state"] == "standby")
        tasks = Path(f"/proc/{daemon.manifest()['pid']}/task")

        def used() -> float:
            return sum(int(one.read_text().split()[0]) for one in tasks.glob("*/schedstat")) / 1e9

        before = used()
        time.sleep(options.ring)
        resting, before = (used() - before) / options.ring, used()
        load.go()
        did = load.answer()
        asked_ns, start = monotonic_ns(), time.monotonic()
        words = {"command": "record", "last_seconds": 30}
        path = Path(request(daemon.control, words, 60)["path"])
        took, found = time.monotonic() - start, {}
        with contextlib.closing(RecordingReader(path)) as reader:
            schemas = reader.head.rings
            blocks = [one for one in reader if isinstance(one, RowsBlock)]
        for number, schema in enumerate(schemas):
            parts = [one.rows for one in blocks if one.ring == number]
            if not parts:
                continue
            rows = np.concatenate(parts)
            rows = rows[np.isnan(rows["late"]) & (rows["integers"][:, 0] >= 0)]
            names = [column.name for column in schema.columns]
            inside = (rows["time_ns"] > did["start_ns"] - 100 * MS) & (
                rows["time_ns"] < did["end_ns"] + 100 * MS
            )
            counts = rows["integers"][inside]
            found[schema.name] = {
                "rows": len(rows), "reach_seconds": float(np.ptp(rows["time_ns"]) / 1e9),
                "age_ms": (asked_ns - int(rows["time_ns"][-1])) / MS,
                "apart_ms": (np.percentile(np.diff(rows["time_ns"]), (0, 50, 100)) / MS).tolist(),
                "ratio": {name: float(counts[-1][at] - counts[0][at]) / did["bytes"]
                          for at, name in enumerate(names) if name in DRAM},
            }  # fmt: skip
        reading = used() - before
        scaled(daemon, 1)
        load.end()
        return {"core_at_rest": resting, "core_seconds_to_read": reading, "record_seconds": took,
                "recorded": found, "live_again_seconds": daemon.wait_for_rows(monotonic_ns()),
                "pss_mib": sum(pm_sampler.memory(daemon.manifest()["pid"]).values())}  # fmt: skip
    finally:
        daemon.stop()


def scaled(daemon: Daemon, scale: float) -> None:
    request(daemon.control, {"command": "interval", "source": "pm", "scale": scale}, 20)


def wait_until(condition: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.05)


@part
def lifecycle(options: argparse.Namespace) -> Any:
    """Jobs that come and go, a rival, a kill, a wrong library, and what each privilege allows."""
    found: dict[str, Any] = {}
    for name, what in (
        ("jobs", jobs),
        ("rival", rival),
        ("kill", kill),
        ("wrong_library", wrong_library),
        ("privileges", privileges),
    ):
        found[name] = guarded(lambda what=what: what(options))
    return found


def jobs(options: argparse.Namespace) -> dict[str, Any]:
    """Two jobs one after the other, with no process on the GPU before, between and after."""
    with started(options) as sampler:
        start_ns = monotonic_ns()
        time.sleep(1.5)
        ended = []
        for load in [Load("matmul", 0.5), Load("matmul", 0.5)]:
            load.run()
            load.end()
            ended.append((monotonic_ns() - start_ns) / 1e9)
            time.sleep(2)
        time.sleep(ARRIVE_SECONDS)
        series = sampler.of_gpu(0, start_ns, monotonic_ns() - 600 * MS)
        return {"ended_after": ended, "errors": sampler.hear(), "events": sampler.events,
                "reason": sampler.reason, **series.about()}  # fmt: skip


def rival(options: argparse.Namespace) -> dict[str, Any]:
    """Try a second client while the first has the counters, and after it let go."""
    first = started(options)
    try:
        with started(options) as second:
            time.sleep(1)
            second.hear()
            found = {"refused": second.reason, "events": list(second.events)}
            start_ns = monotonic_ns()
            time.sleep(ARRIVE_SECONDS)
            found["first_meanwhile"] = first.of_gpu(0, start_ns, monotonic_ns()).about()
            found["let_go_seconds"] = first.stop()
            start = time.monotonic()
            while time.monotonic() - start < 15 and not list(second.readers()):
                time.sleep(0.05)
            found["second_after_seconds"] = time.monotonic() - start
            second.hear()
            found["then"] = second.reason or second.events[-1:]
            return found
    finally:
        first.stop()


def kill(options: argparse.Namespace) -> dict[str, Any]:
    """Kill the daemon's sampler: another takes the counters up."""
    daemon = Daemon(options)
    try:
        os.kill(daemon.manifest()["pid"], signal.SIGKILL)
        return {"back_after_seconds": daemon.wait_for_rows(monotonic_ns()),
                "sources": daemon.manifest()["sources"]}  # fmt: skip
    finally:
        print(f"the daemon stopped within {daemon.stop():.2f} s")


def wrong_library(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    wrong = [Path("/nonexistent/libcupti.so.13"), Path("/lib/x86_64-linux-gnu/libm.so.6")]
    for path in (*wrong, *options.other_libraries):
        with started(options, library=str(path)) as sampler:
            found[str(path)] = sampler.reason or sampler.manifest().get("sources")
    return found


def privileges(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `gpuwatch check` says as an ordinary user with one capability, or none."""
    found: dict[str, Any] = {}
    params = Path("/proc/driver/nvidia/params")
    if params.exists():
        found["params"] = [x for x in params.read_text().splitlines() if "Profil" in x]
    directory = Path(f"/tmp/gpuwatch-pm-check-{os.getpid()}")
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    text = "[collectors]\n"
    text += "".join(f"{k} = {str(v).lower()}\n" for k, v in collectors("pm").items())
    text += f'[pm]\nlibrary = "{options.library}"\n'
    (directory / "config.toml").write_text(text)
    # The working tree may be closed to others.
    shutil.copytree(Path(gpuwatch.__file__).parent, directory / "site/gpuwatch")
    path = f"{directory / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    for name, number in (("none", None), ("perfmon", 38), ("sys_admin", 21)):
        caps = "-all" if number is None else f"-all,+cap_{number}"
        command = [
            *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", f"--inh-caps={caps}"),
            *(f"--ambient-caps={caps}", f"--bounding-set={caps}", sys.executable, "-m", "gpuwatch"),
            *("check", "--config", str(directory / "config.toml"), "--path.sysfs", options.sysfs),
            *("--path.runtime", str(directory / name), "--path.state", str(directory / "state")),
            *("--web.listen-address", "127.0.0.1:19975"),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": path},
        )
        lines = [line for line in done.stdout.splitlines() if "source" in line[:12]]
        found[name] = {"status": done.returncode, "lines": lines[:6], "error": done.stderr[-300:]}
    shutil.rmtree(directory, ignore_errors=True)
    return found


@part
def soak(options: argparse.Namespace) -> Any:
    """Sample for long beside a load that comes and goes: overflows, gaps, memory."""
    with started(options) as sampler, busy(options.soak + 30, "--busy", "3", "--idle", "1"):
        sampler.hear()
        cpu_seconds = sampler.cpu_seconds()  # of the start
        memory, gaps, rows, uncovered = [(0.0, sampler.pss_mib())], 0, 0, 0.0
        start_ns = seen_ns = monotonic_ns()
        while (passed := (monotonic_ns() - start_ns) / 1e9) < options.soak:
            time.sleep(min(20.0, options.soak - passed + 0.01))
            memory.append(((monotonic_ns() - start_ns) / 1e9, sampler.pss_mib()))
            now_ns = monotonic_ns() - 700 * MS
            about = sampler.of_gpu(0, seen_ns, now_ns).about()
            seen_ns = now_ns
            rows, gaps = rows + about["rows"], gaps + about["gaps"]
            uncovered += about["uncovered"]
        hours = (memory[-1][0] - memory[1][0]) / 3600
        return {"seconds": options.soak, "rows": rows, "expected": (seen_ns - start_ns) / MS,
                "gaps": gaps, "uncovered": uncovered, "errors": sampler.hear(),
                "mib_per_hour": (memory[-1][1] - memory[1][1]) / max(hours, 1e-9),
                "pss_mib": memory, "start_cpu_seconds": cpu_seconds,
                "core": (sampler.cpu_seconds() - cpu_seconds) / memory[-1][0],
                "events": sampler.events}  # fmt: skip


def first_start(options: argparse.Namespace) -> dict[str, Any]:
    """Try a sampler; if it has nothing to sample, one with all capabilities, and keep to that."""
    found: dict[str, Any] = {}
    for name, keep in (("product", []), ("all_capabilities", [*NUMBERS])):
        pm_sampler.KEEP[:] = keep
        with started(options) as sampler:
            sampler.hear()
            found[name] = {"seconds": sampler.start_seconds, "reason": sampler.reason,
                           "events": sampler.events}  # fmt: skip
            if list(sampler.readers()):
                return found
    pm_sampler.KEEP.clear()
    return found


def table(value: Any, name: str = "") -> None:
    """Print what was found, a line for each figure."""
    if isinstance(value, dict):
        for key, inner in value.items():
            table(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            print("  " + "  ".join(f"{key} {_short(shown)}" for key, shown in inner.items()))
    elif isinstance(value, list) and value and isinstance(value[0], str):
        for number, inner in enumerate(value):
            table(inner, f"{name}.{number}")
    else:
        print(f"  {name:<60} {_short(value)}")


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--truth", type=float, default=1.0, help="seconds of each known load")
    parser.add_argument("--agreement", type=float, default=10.0, help="seconds of matmul")
    parser.add_argument("--cost", type=float, default=3.0, help="seconds of each combination")
    parser.add_argument("--slowdown", type=float, default=100.0)
    parser.add_argument("--image", type=float, default=2.0, help="seconds of each size")
    parser.add_argument("--ring", type=float, default=6.0, help="seconds recorded into each buffer")
    parser.add_argument("--soak", type=float, default=30.0)
    parser.add_argument("--combinations", default="", help="load:set:interval,... of the cost")
    parser.add_argument("--library", default="", help='file of CUPTI; "" as gpuwatch finds it')
    parser.add_argument("--other-libraries", type=Path, nargs="*", default=[])
    parser.add_argument("--sysfs", default="/sys")
    parser.add_argument("--pretend", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1"
    )
    if options.pretend:
        pm_sampler.PRETEND.append("--pretend")
    options.gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or 2
    found: dict[str, Any] = {"start": guarded(lambda: first_start(options))}
    table(found)
    for name in options.parts.split(","):
        start = time.monotonic()
        print(f"{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}", flush=True)
        found[name] = guarded(lambda name=name: PARTS[name](options))
        table(found[name])
        print(f"  {name} took {time.monotonic() - start:.1f} s", flush=True)
        (options.output / "pm.json").write_text(json.dumps(found, indent=1, default=float))
    return 0


if __name__ == "__main__":
    sys.exit(main())

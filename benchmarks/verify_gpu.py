"""Figures of `gpuwatch verify` beside independent ones, on this host's GPUs, in one run.

    python benchmarks/verify_gpu.py --output DIRECTORY [--seconds 330] [-- MORE FLAGS OF VERIFY]

Parts: "quick" and "deep" run the command as a user does, the second with shorter loads; "reference"
measures the same by other code: torch.utils.benchmark, copies by the host's clock, an all-reduce of
its own; nvidia-smi looks on meanwhile; "p2p_off" runs the all-reduce with NCCL_P2P_DISABLE=1, which
must be caught and named. Whatever becomes of one part, the others are tried. The deep run has what
is left of the time. Four files are left in the directory: `results.json` with the reports,
`verify.txt` with what was printed, and the pages of the quick and the deep run. No setting of a GPU
is changed, and what the environment says to NCCL stays.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuwatch.verify_text import amount

EDGE, REPEATS = 8192, 20
COPY_BYTES, HOST_BYTES, SUM_BYTES = 1 << 30, 256 << 20, 256 << 20
SMI = "index,temperature.gpu,clocks.sm,power.draw,pcie.link.gen.current,pcie.link.width.current"
QUICK_SECONDS, PART_SECONDS, END_SECONDS = 200.0, 100.0, 15.0
# The command with shorter loads: the checks are the same, but for their length.
SHORT = """
import sys
from gpuwatch.checks import memory_patterns, storage, sustained
from gpuwatch.commands import verify
verify.DEEP_SECONDS = {seconds}
sustained.DEEP_SECONDS = max(10.0, min(45.0, {seconds} / 4))
memory_patterns.SECONDS, storage.DEEP_SECONDS = 10.0, 4.0
from gpuwatch.cli import main
sys.exit(main(sys.argv[1:]))
"""


def verified(
    output: Path, name: str, program: list[str], flags: list[str], seconds: float, **extra: str
) -> dict[str, Any]:
    """Run the command; return its report, exit code, time and what nvidia-smi saw meanwhile."""
    start = time.monotonic()
    with nvidia_smi() as seen, tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        command = [*(sys.executable, *program, "verify"), "--json", str(report), *flags]
        done = subprocess.run(
            command,
            env={**os.environ, **extra},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        told = json.loads(report.read_text()) if report.exists() else {}
    with (output / "verify.txt").open("a") as file:
        file.write(f"===== {name}: {done.returncode}\n{done.stderr}\n{done.stdout}\n")
    return {
        "code": done.returncode,
        "seconds": time.monotonic() - start,
        "verdict": told.get("verdict"),
        "forced": told.get("forced"),
        "ran": told.get("ran"),
        "report": told,
        "bad": [one for one in told.get("checks", ()) if one["verdict"] not in ("PASS", "SKIP")],
        "checks": told.get("checks", []),
        "nvidia_smi": seen,
        "errors": done.stderr[-2000:],
    }


@contextmanager
def nvidia_smi() -> Iterator[dict[str, dict[str, float]]]:
    """Have nvidia-smi look twice a second; fill in the highest of each value, by GPU."""
    seen: dict[str, dict[str, float]] = {}
    if shutil.which("nvidia-smi") is None:
        yield seen
        return
    smi = subprocess.Popen(
        ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader,nounits", "-lms", "500"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield seen
    finally:
        smi.terminate()
        names = [name.replace(".", "_") for name in SMI.split(",")[1:]]
        for line in smi.communicate()[0].splitlines():
            gpu, *cells = [cell.strip() for cell in line.split(",")]
            for name, cell in zip(names, cells, strict=False):
                try:
                    known = seen.setdefault(gpu, {})
                    known[name] = max(float(cell), known.get(name, 0.0))
                except ValueError:
                    continue


def reference_here() -> dict[str, Any]:
    """Measure by other means; in a process of its own."""
    import torch

    found: dict[str, Any] = {}
    for number in range(torch.cuda.device_count()):
        found[str(number)] = of_gpu(torch, torch.device("cuda", number))
        torch.cuda.empty_cache()
    if torch.cuda.device_count() > 1:
        try:
            found["host"] = {"allreduce": summed(torch)}
        except RuntimeError as fault:
            found["fault"] = str(fault)
    return found


def of_gpu(torch: Any, device: Any) -> dict[str, float]:
    """Return matmul, memory and PCIe of a GPU."""
    from torch.utils import benchmark

    torch.cuda.set_device(device)
    left, right = (torch.randn(EDGE, EDGE, device=device, dtype=torch.bfloat16) for _ in range(2))
    timer = benchmark.Timer("torch.mm(a, b)", globals={"torch": torch, "a": left, "b": right})
    median = timer.blocked_autorange(min_run_time=0.3).median
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.ones(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    part = source[:HOST_BYTES]
    return {
        "matmul bf16": 2 * EDGE**3 / median,
        "memory": 2 * COPY_BYTES / timed(torch, lambda: target.copy_(source)),
        "pcie to_gpu": HOST_BYTES / timed(torch, lambda: part.copy_(host)),
        "pcie from_gpu": HOST_BYTES / timed(torch, lambda: host.copy_(part)),
    }


def timed(torch: Any, work: Callable[[], object]) -> float:
    """Return the seconds of some work by the host's clock, the median."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def summed(torch: Any) -> float:
    """Return the bus bandwidth of an all-reduce in one process, through torch.cuda.nccl."""
    count = torch.cuda.device_count()
    data = [torch.zeros(SUM_BYTES // 4, device=f"cuda:{number}") for number in range(count)]

    def work() -> None:
        torch.cuda.nccl.all_reduce(data)
        for number in range(count):
            torch.cuda.synchronize(number)

    seconds = timed(torch, work)
    return SUM_BYTES / seconds * 2 * (count - 1) / count


def reference(output: Path) -> dict[str, Any]:
    """Measure by other code, and with another call of fio."""
    found: dict[str, Any] = {}
    command = [sys.executable, __file__, "--reference-here", "--output", str(output)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PART_SECONDS, check=False
    )
    try:
        found["torch"] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        found["fault"] = done.stderr[-2000:]
    if shutil.which("fio"):
        path = output / "fio.reference"
        command = [
            *("fio", "--name=reference", f"--filename={path}", "--size=256M", "--rw=randread"),
            *("--bs=4k", "--direct=1", "--ioengine=io_uring", "--iodepth=128", "--numjobs=2"),
            *("--runtime=3", "--time_based", "--group_reporting", "--output-format=json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        path.unlink(missing_ok=True)
        found["fio"] = done.stdout[-20_000:]
    return found


def compared(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each figure of the quick run beside the independent one."""
    checks = results.get("quick", {}).get("checks", [])
    told = results.get("reference", {}).get("torch", {})
    rows = []
    for one in checks:
        where = one["entity"].removeprefix("gpu")
        name = f"{one['name']} {one['measure']}".strip()
        other = told.get(where, {}).get(name)
        if other and isinstance(one["value"], float | int) and not one["thumb"]:
            rows.append(
                {
                    "entity": one["entity"],
                    "figure": name,
                    "verify": one["value"],
                    "reference": other,
                    "ratio": one["value"] / other,
                }
            )
    for when in ("quick", "deep"):
        seen = results.get(when, {}).get("nvidia_smi", {})
        for one in results.get(when, {}).get("checks", []):
            smi = seen.get(one["entity"].removeprefix("gpu"), {})
            if one["measure"] == "temperature" and smi:
                rows.append(
                    {
                        "entity": one["entity"],
                        "figure": f"{when} hottest",
                        "verify": one["value"],
                        "reference": smi.get("temperature_gpu"),
                    }
                )
            field = {"generation": "gen", "lanes": "width"}.get(one["measure"])
            if one["name"] == "pcie" and field and smi:
                rows.append(
                    {
                        "entity": one["entity"],
                        "figure": f"{when} PCIe {one['measure']}",
                        "verify": one["value"],
                        "reference": smi.get(f"pcie_link_{field}_current"),
                    }
                )
    return rows


def caught(run: dict[str, Any]) -> dict[str, Any]:
    """Say whether P2P that was switched off was found, and named as the cause."""
    bad = [one for one in run["checks"] if one["name"] == "allreduce" and one["verdict"] == "FAIL"]
    return {
        "failed": bool(bad),
        "named": any("NCCL_P2P_DISABLE=1" in one["reason"] for one in bad),
        "reasons": [one["reason"] for one in bad],
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=330.0, help="for all parts together")
    parser.add_argument("--parts", default="quick,reference,p2p_off,deep")
    parser.add_argument("--reference-here", action="store_true")
    parser.add_argument("more", nargs="*", help="flags of gpuwatch verify")
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    if arguments.reference_here:
        print(json.dumps(reference_here()))
        return 0
    (output / "verify.txt").unlink(missing_ok=True)
    end = time.monotonic() + arguments.seconds
    module, more = ["-m", "gpuwatch"], arguments.more

    def page(name: str) -> list[str]:
        return ["--html", str(output / f"{name}.html"), *more]

    def deep() -> dict[str, Any]:
        left = end - time.monotonic()
        short = ["-c", SHORT.format(seconds=left - END_SECONDS)]
        return verified(output, "deep", short, ["--deep", *page("deep")], left)

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "quick": lambda: verified(output, "quick", module, page("quick"), QUICK_SECONDS),
        "reference": lambda: reference(output),
        "p2p_off": lambda: verified(
            output,
            "p2p_off",
            module,
            ["--only", "allreduce", *more],
            PART_SECONDS,
            NCCL_P2P_DISABLE="1",
        ),
        "deep": deep,
    }
    results: dict[str, Any] = {}
    for name in arguments.parts.split(","):
        try:
            results[name] = parts[name]()
        except Exception:  # noqa: BLE001 - the one guard: the next part is worth its time all the same
            results[name] = {"traceback": traceback.format_exc(), "checks": []}
        run = results[name]
        if run.get("verdict") == "SKIP" and "--force" not in more:
            # A container that does not see all processes, as those that are rented by the hour.
            print(f"{name}: refused, {run['bad'] or run['checks']}: again with --force", flush=True)
            more.append("--force")
            results[f"{name} refused"], results[name] = run, parts[name]()
            run = results[name]
        print(f"{name}: {run.get('verdict')} {run.get('seconds', 0):.0f} s", flush=True)
        print(run.get("traceback") or run.get("fault") or "", flush=True)
        for one in run.get("bad", ()):
            print(
                f"  {one['verdict']} {one['name']} {one['measure']} {one['entity']}"
                f"{' (thumb)' if one['thumb'] else ''}: {amount(one['value'], one['unit'])} of"
                f" {amount(one['expectation'], one['unit'])}: {one['reason']} [{one['cause']}]",
                flush=True,
            )
        for one in run.get("ran") or ():
            print(f"  {one['name']}: {one['seconds']:.1f} s", flush=True)
        results["compared"] = compared(results)
        if "p2p_off" in results:
            results["caught"] = caught(results["p2p_off"])
        (output / "results.json").write_text(json.dumps(results, indent=1))
    for row in results["compared"]:
        print(row)
    print("P2P switched off:", results.get("caught"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What `node.py` found, as a table: each figure beside its budget, where there is one."""

import re
from collections.abc import Iterator
from typing import Any

Row = tuple[str, Any, str]
CPU = {"state": 5.0, "counters": 7.0, "daemon": 8.0, "pm": 20.0}  # percent of a core, 8 busy GPUs


def table(found: dict[str, Any]) -> str:
    """Return the lines; a part that has failed or was left out is said to be so."""
    lines = []
    for name, one in found.items():
        if not isinstance(one, dict):
            continue
        state = one.get("left_out") or ("DIED: " + last(one) if "traceback" in one else "")
        lines.append(f"{name}  {one.get('part_seconds', 0):.0f} s  {state}".rstrip())
        if "left_out" not in one and name in ROWS:
            lines += listed(ROWS[name](one))
    return "\n".join(lines)


def listed(rows: Iterator[Row]) -> list[str]:
    """Return the lines of a part, as far as it has come."""
    lines = []
    try:
        for what, value, budget in rows:
            lines.append(f"    {what:<44} {shown(value):<36} {budget}".rstrip())
    except Exception as fault:  # noqa: BLE001 - the rest of the table is worth printing
        lines.append(f"    and no more: {type(fault).__name__}: {fault}")
    return lines


def last(one: dict[str, Any]) -> str:
    return str(one["traceback"]).strip().splitlines()[-1]


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " ".join(map(shown, value)) or "-"
    if isinstance(value, dict):
        return " ".join(f"{key}={shown(one)}" for key, one in value.items()) or "-"
    return str(value)


def percent(share: float) -> str:
    return f"{share:+.3%}"


def soak(one: dict[str, Any]) -> Iterator[Row]:
    cpu = one["cpu_percent"]
    for duty, used in cpu.items():
        yield f"CPU {duty}", f"{used:.2f} %", f"{CPU[duty]:g} %" if duty in CPU else ""
    yield "CPU, all but pm", f"{sum(cpu.values()) - cpu.get('pm', 0.0):.2f} %", "25 %"
    figures = {ring: [run["hertz"], *run["us_p50_p99_max"]] for ring, run in one["late"].items()}
    for ring, late in merged(figures).items():
        budget = "p99 300 us" if late[0] > 500 else ""
        yield f"late {ring}: Hz, us p50 p99 max", late, budget
    for coding, times in one["scrape"]["ms_p50_p99"].items():
        size = one["scrape"]["bytes"][coding]
        yield f"scrape {coding}: ms p50 p99", f"{shown(times)}, {size} bytes", "p99 25 ms"
    yield "series", one["scrape"]["series"], ""
    yield from memory(one["memory"])
    yield "hardware counters", one["pm"], "no gaps"
    yield "uncovered seconds by GPU", one["uncovered"], ""
    yield "period of pm", one["periods"].get("pm"), "0.001"
    yield "power cap on the page", one["power_cap"], "1500 ms"
    yield "errors", one["errors"], ""
    yield "sources that are not on", one["states"], ""
    for name, run in one["slowdown"].items():
        if name in ("on", "control"):
            interval = f"[{percent(run['low'])}, {percent(run['high'])}] of {run['blocks']} blocks"
            budget = "upper end at most 0.5 %" if name == "on" else ""
            yield f"slowdown, {name}: worst rank", f"{percent(run['slowdown'])} {interval}", budget
            yield f"p99 of a step, {name}", percent(run["p99_ratio"]), ""
    yield "slowdown by rank", [percent(share) for share in one["slowdown"]["by_rank"]], ""


def merged(figures: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return of rings that differ by the GPU alone the highest of each figure."""
    found: dict[str, list[float]] = {}
    for ring, one in figures.items():
        name = re.sub("[0-9]+", "*", ring.partition(".")[2] or ring)
        found[name] = [max(pair) for pair in zip(one, found.get(name, one), strict=True)]
    return found


def memory(one: dict[str, Any]) -> Iterator[Row]:
    if "mib_per_hour" in one:
        yield "PSS MiB, first and last", [one["start_mib"], one["end_mib"]], "350 MB"
        yield f"MiB an hour, 95 %, of {one['seconds']:.0f} s", one["mib_per_hour"], ""
        yield "the same of RSS", one["rss_mib_per_hour"], ""
        for name, line in one["mib_per_hour_of_each"].items():
            yield f"    {name}", line, ""
        yield "PSS MiB of each, last", one["last"], ""


def jobs(one: dict[str, Any]) -> Iterator[Row]:
    for job in one["jobs"]:
        text = (f"start {job['start_seconds']:.2f} s, first second x{job['first_second_ratio']:.3f}"
                f", met {job['met'] or 'nobody'}")  # fmt: skip
        yield f"job of {job['seconds']:.0f} s on {len(job['gpus'])} GPUs", text, ""
    yield "jobs that failed", one.get("failed", []), "none"
    yield "first second, nobody met", one["first_second_ratio_alone"], ""
    yield "canary processes seen", one["canary_processes"], ""
    yield "together on a GPU, times", len(one["overlaps"]), ""
    yield "longest together", f"{one['longest_overlap_ms']:.0f} ms", "500 ms"
    yield "canaries begun beside a job", one["began_beside"], "none"
    yield "still together at the end", one["still_open"], "none"
    for what in ("runs", "skips"):
        for labels, count in one[what].items():
            yield f"{what} {labels}", count, ""
    yield "baselines", len(one["baselines"]), ""


def churn(one: dict[str, Any]) -> Iterator[Row]:
    yield "jobs, of them failed", [len(one["jobs"]), len(one["failed"])], "none failed"
    yield "jobs that met a canary", sum(bool(job["met"]) for job in one["jobs"]), ""
    for name, found in one["first_second_ratio"].items():
        yield f"first second by later ones, {name}", found, ""
    for what in ("runs", "skips"):
        for labels, count in one[what].items():
            yield f"{what} {labels}", count, ""
    yield "canary gone after the job was listed, ms", one["gone_after_listed_ms"], "500 ms"
    most = [job["overlap_at_most_ms"] for job in one["jobs"] if job["gone_ms"] is not None]
    yield "there after the job's first kernel, ms", most, "50 ms"
    yield "jobs beside kernels of a canary for more", one["overlapped"], "none"
    yield "canaries begun beside a job", one["began_beside"], "none"
    yield "still together at the end", one["still_open"], "none"
    worst: dict[str, dict[str, Any]] = {}
    for ring, run in one["rings"].items():
        # Of rings that differ by the GPU or port alone the one that lost most, or was latest.
        name = ring if ring.startswith("pm.") else re.sub("[0-9]+", "*", ring)
        worst[name] = max(run, worst.get(name, run), key=behind)
    for name, run in worst.items():
        text = (
            f"{run['rows']} of {run['expected']:.0f}, {run['gaps']} gaps of {run['gaps_ms']:.0f} ms"
        )
        late = run.get("late_us_p50_p99_p999_max")
        yield f"rows {name}", text + (f", late us {shown(late)}" if late else ""), "none lost"
    overflows = sum(count for labels, count in one["errors"].items() if "overflow" in labels)
    yield "overflows of hardware counters", overflows, "none"
    yield "uncovered seconds of hardware counters", one["uncovered"], "none"
    yield "errors of sources", one["errors"], "none"
    yield "planned reads that were not made", one["missing"], "none"
    yield "restarts", one["restarts"], "none"
    yield "CPU of a core, %", one["cpu_percent"], ""
    yield "sources that are not on", one["states"], ""
    yield "alerts", one["alerts"], ""


def behind(run: dict[str, Any]) -> tuple[float, float]:
    """Return what a ring lost, and how late its latest row was."""
    return run["expected"] - run["rows"], run.get("late_us_p50_p99_p999_max", [0.0])[-1]


def verify(one: dict[str, Any]) -> Iterator[Row]:
    yield "verdict", f"{one['verdict']} in {one['seconds']:.0f} s, code {one['code']}", "180 s"
    yield "findings", one["counts"], ""
    for check in one["not_passed"][:24]:
        what = f"{check['verdict']} {check['name']} {check['measure']} {check['entity']}"
        yield what, f"{shown(check['value'])}: {str(check['reason'])[:90]}", ""
    for size, value in one.get("bus_bytes_per_second", {}).items():
        yield f"all-reduce {size}", f"{value / 1e9:.1f} GB/s", ""
    if one["printed"]:
        yield "it said", one["printed"][-300:], ""


def recording(one: dict[str, Any]) -> Iterator[Row]:
    yield "recording", f"{one['bytes']} bytes of {one['seconds']:.0f} s", "14 MiB"
    yield "load", one["load"], ""


def pm_sets(one: dict[str, Any]) -> Iterator[Row]:
    for name in ("default", "full"):
        run = one[name]
        if "failed" in run or run.get("reason"):
            yield name, run.get("failed") or run["reason"], ""
            continue
        text = (
            f"{run['core_per_gpu']:.2%} of a core for each of {run['gpus']}, {run['core']:.1%} all"
        )
        yield name, text, "20 % for 8" if name == "default" else ""
        spacing = {key: run[key] for key in ("rows", "spacing", "gaps", "uncovered") if key in run}
        yield f"{name}: GPU 0", spacing, ""
        yield f"{name}: errors", run["errors"], "none"
    yield "the daemon's own back after", one["back_after_seconds"], ""


def killed(one: dict[str, Any]) -> Iterator[Row]:
    for duty in ("state", "counters", "pm"):
        run = one[duty]
        if "left_out" in run:
            yield duty, run["left_out"], ""
            continue
        yield (
            f"{duty}: noticed, rows again after",
            [
                run["noticed_after_seconds"],
                run["back_after_seconds"],
            ],
            "s",
        )
        for other, (before, after) in run["widest_gap_ms"].items():
            wide = {ring: [before.get(ring, [0.0])[0], gap] for ring, (gap, _) in after.items()}
            yield f"    {other}: widest gap ms", merged(wide), "as before"


def closed(one: dict[str, Any]) -> Iterator[Row]:
    yield "stopped", f"in {one['stop_seconds']:.1f} s with {one['status']}", ""
    yield (
        "left",
        {key: one[key] for key in ("runtime", "canaries", "on_gpus", "more_bytes")},
        "nothing",
    )
    if one["errors"]:
        yield "errors of children", one["errors"][-300:], ""


ROWS = {
    "soak": soak,
    "memory": memory,
    "jobs": jobs,
    "churn": churn,
    "verify": verify,
    "allreduce": verify,
    "recording": recording,
    "pm_sets": pm_sets,
    "killed": killed,
    "closed": closed,
}

"""The survey: what a duty's sources find here, how often values are renewed, what reading costs.

`python -m gpuwatch.survey` is the short child in which `gpuwatch check` touches the driver: it
opens the sources as a sampler does, reads every group at its period for some seconds, and writes
what it saw as JSON to the descriptor `output` of its settings. It makes no rings.
"""

import heapq
import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuwatch import pulse as page
from gpuwatch.calibration import RefreshEstimator
from gpuwatch.child import Child
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.errors import SourceUnavailable, SourceUnsupported
from gpuwatch.ring import MAX_BYTES, RingSchema
from gpuwatch.sampler import prepare_process
from gpuwatch.signals import UNKNOWN_INTEGER, Kind
from gpuwatch.source import Context, Group, Opened, Source
from gpuwatch.sources import sources_of


class Reads(NamedTuple):
    """The reads of one group, in order."""

    times_ns: list[int]
    cost_ns: list[int]  # one a read; a drain's stands for all its rows
    rows: list[list[float]]


def main() -> int:
    """Survey the duty that the settings name; 0 also if no source works, which is told."""
    child = Child()
    # One that hangs in the driver outlives the command, and must not keep its pipes open.
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    duty = child.settings["duty"]
    sources = sources_of(duty, child.settings)
    child.beat(page.OPENING)
    opened, told = _open(child, sources)
    prepare_process(bool(child.config[duty]["realtime"]))
    child.beat(page.RUNNING)
    groups = [group for found in opened.values() for group in found.groups]
    cpu, start = time.process_time(), time.monotonic()
    reads = _read(child, groups)
    share = (time.process_time() - cpu) / (time.monotonic() - start)
    if child.stopping or not child.current:  # a read hung: nobody waits for the answer any more
        return 0
    for source in sources:
        if source.name in opened:
            told[source.name] |= _describe(duty, child, source, opened[source.name], reads)
    answer = {
        "realtime": os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO,
        "cpu_ratio": share,
        "sources": told,
    }
    with os.fdopen(child.settings["output"], "w") as output:
        json.dump(answer, output)
    for source in sources:
        if source.name in opened:
            source.close()
    return 0


def _open(child: Child, sources: list[Source]) -> tuple[dict[str, Opened], dict[str, Any]]:
    context = Context(
        settings=child.settings,
        pulse=child.pulse,
        sysfs=Path(child.config["paths"]["sysfs"]),
        procfs=Path(child.config["paths"]["procfs"]),
        excluded=frozenset(child.settings["excluded"]),
    )
    opened: dict[str, Opened] = {}
    told: dict[str, Any] = {}
    for source in sources:
        told[source.name] = {"reason": "", "unsupported": False}
        try:
            found = opened[source.name] = source.open(context)
            told[source.name]["reason"] = "" if found.groups else found.reason
        except SourceUnavailable as fault:
            told[source.name]["reason"] = str(fault)
            told[source.name]["unsupported"] = isinstance(fault, SourceUnsupported)
    child.pulse.words[page.READING] = page.NOT_READING
    return opened, told


def _read(child: Child, groups: list[Group]) -> dict[str, Reads]:
    """Read the groups when they are due, as the sampler does."""
    reads = {group.name: Reads([], [], []) for group in groups}
    start = monotonic_ns()
    end = start + int(child.settings["seconds"] * SECOND_NS)
    heap = [(start + group.phase_ns, order) for order, group in enumerate(groups)]
    heapq.heapify(heap)
    while heap and heap[0][0] < end and not child.stopping and child.current:
        due, order = heap[0]
        now = monotonic_ns()
        if due > now:
            time.sleep((due - now) * 1e-9)
            now = monotonic_ns()
        child.pulse.words[page.HEARTBEAT] = now
        group = groups[order]
        fresh = group.rows(now)
        done = monotonic_ns()
        times, costs, rows = reads[group.name]
        times += [time_ns for time_ns, _ in fresh]
        costs.append(done - now)
        rows += [list(cells) for _, cells in fresh]
        period_ns = group.delivery_ns if group.drain else group.period_ns
        due += period_ns
        if due <= done:
            due += ((done - due) // period_ns + 1) * period_ns
        heapq.heapreplace(heap, (due, order))
    return reads


def _describe(
    duty: str, child: Child, source: Source, opened: Opened, reads: dict[str, Reads]
) -> dict[str, Any]:
    keep_seconds = float(child.config["ring"]["seconds"])
    return {
        "entities": [info.to_json() for info in opened.entities],
        "errors": dict(source.findings.errors),
        "events": [event.to_json() for event in source.findings.events],
        "groups": [
            _group(
                RingSchema(group.name, duty, source.name, group.columns, group.period_ns),
                reads[group.name],
                keep_seconds,
            )
            for group in opened.groups
        ],
    }


def _group(schema: RingSchema, reads: Reads, keep_seconds: float) -> dict[str, Any]:
    """Return what the reads of a group say: cost of a row, and of each column how it did."""
    values = np.array(reads.rows, np.float64).reshape(len(reads.rows), len(schema.columns))
    estimator = RefreshEstimator(schema.gauges)
    gauges = values[:, schema.integers :].astype(np.float32)
    estimator.add(np.array(reads.times_ns, np.int64), gauges, schema.period_ns)
    costs = np.array(reads.cost_ns or [0]) / SECOND_NS
    columns = []
    for index, column in enumerate(schema.columns):
        cells, signal = values[:, index], column.signal
        low, high = signal.bounds or (-np.inf, np.inf)
        known = (cells >= low) & (cells <= high)
        refresh = None
        if signal.kind is Kind.GAUGE:
            refresh = estimator.refresh_ns(index - schema.integers)
        else:
            known = cells != UNKNOWN_INTEGER
        columns.append(
            {
                "entity": list(column.entity),
                "name": signal.name if signal.kind is Kind.BITS else column.name,
                "known": int(known.sum()),
                "last": float(cells[known][-1]) if known.any() else None,
                "refresh_seconds": None if refresh is None else refresh / SECOND_NS,
                "declared_seconds": signal.refresh_seconds,
            }
        )
    size = schema.rows(keep_seconds) * struct.calcsize(schema.row_format)
    return {
        "period_seconds": schema.period_ns / SECOND_NS,
        "reads": len(reads.cost_ns),
        "read_seconds": [float(np.median(costs)), float(np.percentile(costs, 99))],
        "ring_bytes": min(size, MAX_BYTES),
        "columns": columns,
    }


if __name__ == "__main__":
    sys.exit(main())

"""A simulated node read by hand, with time of its own."""

import sys

import numpy as np

from gpuwatch import scenario
from gpuwatch.clock import SECOND_NS
from gpuwatch.pulse import Pulse
from gpuwatch.ring import RingSchema
from gpuwatch.source import Context
from gpuwatch.sources.simulated import SimulatedState
from gpuwatch.summation import RingWindows, row_dtype
from gpuwatch.window import TICK_NS, Tick

BASE = 10**15


class SimulatedNode:
    """One source of a simulated node."""

    def __init__(self, monkeypatch, name="healthy", source=SimulatedState, **options):
        self.now_ns = BASE
        for module in (scenario, sys.modules[source.__module__]):
            monkeypatch.setattr(module, "monotonic_ns", lambda: self.now_ns)
        self.source = source()
        self.pulse = Pulse.create(1)
        settings = {
            "config": {
                "source": {"kind": "simulated", "scenario": name, "file": ""},
                "simulated": {
                    "gpus": options.get("gpus", 4),
                    "fault_after_seconds": options.get("fault_after", 5.0),
                    "fault_seconds": options.get("fault_seconds", 0.0),
                    "seed": options.get("seed", 1),
                },
                "state": {"period_ms": options.get("period_ms", 10.0)},
                "host": {"period_ms": 100.0, "xid_catalogue": ""},
            },
            "ready_ns": BASE - int(options.get("ready_before", 0) * SECOND_NS),
        }
        self.opened = self.source.open(
            Context(
                settings=settings,
                pulse=self.pulse,
                excluded=frozenset(options.get("excluded", ())),
            )
        )
        self.events = []

    def rows(self, seconds):
        """Return (group, rows) as the sampler reads them, group by group, tick by tick."""
        begin, self.now_ns = self.now_ns, self.now_ns + int(seconds * SECOND_NS)
        end, found = self.now_ns, []
        due = sorted(
            (time_ns, order)
            for order, group in enumerate(self.opened.groups)
            for time_ns in range(
                begin + group.phase_ns, end, group.delivery_ns if group.drain else group.period_ns
            )
        )
        read = [[] for _ in self.opened.groups]
        housekept = begin
        for time_ns, order in due:
            self.now_ns = time_ns
            if time_ns - housekept >= SECOND_NS:
                housekept = time_ns
                self.source.housekeep(time_ns)
            rows = self.opened.groups[order].rows(time_ns)
            read[order] += [(when, tuple(cells)) for when, cells in rows]
        self.now_ns = end
        self.events += self.source.findings.events
        self.source.findings.events = []
        for group, cells in zip(self.opened.groups, read, strict=True):
            columns, period_ns = group.columns, group.period_ns
            delivery_ns = group.delivery_ns
            schema = RingSchema(group.name, "duty", "source", columns, period_ns, delivery_ns)
            rows = np.zeros(len(cells), row_dtype(schema))
            for index, (time_ns, row) in enumerate(cells):
                split = schema.integers
                rows[index] = (time_ns, 0.0, 0.0, row[:split], row[split:], index + 1)
            found.append((schema, rows))
        return found

    def ticks(self, seconds):
        """Return the ticks of the time to come, GPUs by address."""
        found = []
        rings = []
        for schema, rows in self.rows(seconds):
            ring = RingWindows(schema)
            ring.add(rows.tobytes())
            rings.append(ring)
        constants = {}
        for column, value in self.opened.constants:
            constants.setdefault(column.entity, {})[column.name] = value
        for number in range(int(seconds * SECOND_NS) // TICK_NS):
            start = self.now_ns - int(seconds * SECOND_NS) + number * TICK_NS
            tick = Tick(start, start + TICK_NS, constants=constants)
            for ring in rings:
                ring.close(tick)
            found.append(tick)
        return found

    @property
    def gpus(self):
        return [info.entity for info in self.opened.entities if info.entity.kind == "gpu"]

"""Tenants: who uses each GPU now, as a source of the duty `counters` tells it.

The processes of a GPU are those of the driver's lists, of each MIG instance apart; whose they are
the kernel says. Several jobs on a GPU are several tenants. At most 16 of a kind are told of a GPU,
the others are counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

from gpuwatch import nvml
from gpuwatch import pulse as page
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.gpu_readings import process_ids
from gpuwatch.holders import Holder, Holders
from gpuwatch.job_signals import TENANTS
from gpuwatch.mig import CHANGED, Layout
from gpuwatch.roster import Gpu, Roster
from gpuwatch.signals import Column, Entity
from gpuwatch.source import Context, Findings, Group, Opened, Tenant

PERIOD_NS = SECOND_NS
MOST_TENANTS = 16  # of a kind and GPU that are told

Labels = Mapping[str, str]


class Kind(NamedTuple):
    """The labels that tell two tenants apart; those of a process's tenant, {} if it has none."""

    identity: tuple[str, ...]
    labels: Callable[[Holder], Labels]


class Tenants:
    """What the sources of tenants have in common; `kinds` are those that one tells of, by name."""

    name: str

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._kinds = kinds
        self.findings = Findings()
        self._roster = Roster(self.findings, tells=False)
        self._layout = Layout(self._roster)
        self._found: dict[Gpu, tuple[Tenant, ...]] = {}
        self._told: dict[Gpu, tuple[Tenant, ...]] = {}

    def open(self, context: Context) -> Opened:
        """Find the GPUs and their MIG instances.

        Raises SourceUnavailable if there is no driver or no GPU.
        """
        logs = Path(context.settings["config"]["counters"]["container_logs"])
        self._holders = Holders(context.procfs, context.sysfs, logs)
        self._roster.open(context)
        self._layout.look(monotonic_ns())
        return self._opened()

    def housekeep(self, now_ns: int) -> Opened | None:
        """See to lost and new GPUs, to changed instances, and to tenants that came or went.

        Raises SourceUnavailable when the driver was unloaded or replaced.
        """
        self._holders.forget(now_ns)
        came = self._roster.upkeep(now_ns, lambda gpu: self._processes(gpu) is not None)
        changed = self._layout.look(now_ns) or self._found != self._told
        return self._opened() if changed or came else None

    def close(self) -> None:
        """Let go of the driver."""
        self._roster.close()

    def _opened(self) -> Opened:
        gpus = self._roster.gpus
        groups = tuple(
            Group(
                f"{self.name}{gpu.index}",
                tuple(Column(gpu.entity, TENANTS, kind) for kind in self._kinds),
                PERIOD_NS,
                self._reader(gpu),
                phase_ns=gpu.index * SECOND_NS // len(gpus),
            )
            for gpu in gpus
        )
        infos = (*self._roster.infos(), *(instance.info for instance in self._layout.parts))
        self._told = self._found.copy()
        tenants = tuple(tenant for gpu in gpus for tenant in self._told.get(gpu, ()))
        return Opened(groups, infos, tenants=tenants)

    def _reader(self, gpu: Gpu) -> Callable[[], Sequence[float]]:
        def read() -> Sequence[float]:
            counts: list[float] = []
            tenants: list[Tenant] = []
            holders = self._holders_of(gpu)
            for name, kind in self._kinds.items():
                found = None if holders is None else tenants_of(name, kind, holders)
                counts.append(math.nan if found is None else float(len(found)))
                tenants += found[:MOST_TENANTS] if found else ()
            self._found[gpu] = tuple(tenants)
            return counts

        return read

    def _holders_of(self, gpu: Gpu) -> dict[Entity, list[Holder]] | None:
        """Return who has processes on a GPU, or on each of its instances; None if not known."""
        found = {}
        for entity, pids in (self._processes(gpu) or {}).items():
            holders = self._holders.of(pids)
            if holders is None:
                return None
            found[entity] = holders
        return found or None

    def _processes(self, gpu: Gpu) -> dict[Entity, set[int]] | None:
        """Return the processes of a GPU, or of each of its instances; None if not known."""
        if gpu.handle is None:
            return None
        handles: dict[Entity, list[Any]] = {
            instance.entity: self._layout.parts[instance] for instance in self._layout.of(gpu)
        } or {gpu.entity: [gpu.handle]}
        self._roster.words[page.READING] = gpu.index
        try:
            return {
                entity: set().union(*(process_ids(handle) for handle in parts))
                for entity, parts in handles.items()
            }
        except pynvml.NVMLError as error:
            if error.value not in nvml.ABSENT:
                self._roster.failed(gpu, "processes", error.value)
            if error.value in CHANGED:
                self._layout.doubt()
            return None
        finally:
            self._roster.words[page.READING] = page.NOT_READING


def tenants_of(name: str, kind: Kind, holders: Mapping[Entity, list[Holder]]) -> list[Tenant]:
    """Return each tenant of these once; what one of its processes does not tell, another may."""
    found: dict[tuple[Entity, tuple[str, ...]], Labels] = {}
    for entity, processes in holders.items():
        for labels in map(kind.labels, processes):
            if labels:
                key = entity, tuple(labels.get(label, "") for label in kind.identity)
                found[key] = {**labels, **found.get(key, {})}
    return [Tenant(name, entity, labels) for (entity, _), labels in found.items()]

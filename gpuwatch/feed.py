"""The feed: from the rings of all children to closed ticks.

A tick closes on data time: when every ring's watermark has passed its end, or 300 ms plus the
longest delivery period later. What comes later is missing; who seems dead is not waited for.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.errors import ConfigError
from gpuwatch.kernel_log import XID, XID_BY_NVML
from gpuwatch.manifest import Manifest, entities_of, links_of, own_labels
from gpuwatch.paths import VERDICT, open_regular
from gpuwatch.ring import SHAPE_ERRORS, RingReader, RingSchema
from gpuwatch.signals import Column, Entity, Event, Kind, column_name
from gpuwatch.source import NOT_PLANNED, STANDBY, EntityInfo, Tenant, constant_from_json
from gpuwatch.summation import RingWindows
from gpuwatch.window import STARTING_NS, TICK_NS, Tick, Window

log = logging.getLogger("gpuwatch.feed")

GRACE_NS = 300_000_000
DOWN_NS = 2 * SECOND_NS  # without a sign of life: not waited for
SILENT_NS = 3 * SECOND_NS  # without a row of what hardware samples: others tell of the same
MANIFEST_BYTES = 16 * 1024 * 1024
CATCH_UP_TICKS = 40  # closed in one go at most, so that a look stays short
CATCH_UP_NS = SECOND_NS  # no other is begun after so long, where each takes long


class Numbers(Protocol):
    """Gives GPUs their numbers."""

    def gpu_numbers(self, pci_bus_ids: list[str]) -> Mapping[str, int]:
        """Return a number for each address: once given, always the same."""


@dataclass(slots=True)
class Attached:
    """A ring being read; `columns` and `windows` have GPUs by number.

    `watermark_ns` is that from before the latest read: what it promises has been read.
    """

    reader: RingReader
    windows: RingWindows
    sequence: int = 0
    watermark_ns: int = 0
    current: bool = True

    @property
    def columns(self) -> tuple[Column, ...]:
        """The ring's columns."""
        return self.windows.schema.columns


class Feed:
    """Attaches rings as their manifests appear, reads them, closes ticks.

    `sources` are those expected to feed, with their duty, before their child has opened anything.
    """

    def __init__(
        self,
        runtime: Path,
        numbers: Numbers,
        sources: Mapping[str, str],
        keep_seconds: float,
    ) -> None:
        self.manifests: dict[str, Manifest] = {}
        self.rings: dict[Path, Attached] = {}
        self.released: frozenset[str] = frozenset()  # duties left to other tools
        self.entities: list[EntityInfo] = []  # all that is watched, each once, GPUs by number
        self.constants: list[tuple[Column, float]] = []  # what a source has told once
        self.columns: list[Column] = []  # of all rings that are current
        self.feeders: dict[str, str] = {}  # source by column name, bit sets by their signal's
        self.bit_feeders: dict[tuple[Entity, str], str] = {}  # source by column, each bit is one
        self._told: dict[str, str] = dict.fromkeys(sources, "on")
        self._duties = dict(sources)
        self._runtime = runtime
        self._numbers = numbers
        self._keep_ns = int(keep_seconds * SECOND_NS)
        self._seen: dict[Path, tuple[int, int]] = {}
        self._faults: dict[Path, str] = {}
        self._events: deque[Event] = deque()
        self._constants: dict[Entity, dict[str, float]] = {}
        self._links: dict[Entity, tuple[Entity, ...]] = {}
        self._next_end_ns = 0
        self._starting_until_ns = 0
        self._heard: set[str] = set()  # sources that have ever fed a tick
        self._silent: set[Path] = set()  # dense rings without rows, as of counters that are taken
        # Entities that are no more, by the names they have in rings that are still kept.
        self.ended: dict[Entity, EntityInfo] = {}
        self.facts: dict[Entity, dict[str, float]] = {}  # what the daemon knows, for the rules

    @property
    def states(self) -> dict[str, str]:
        """How each source is: on, off on request, in standby, unavailable, released."""
        released = {name for name, duty in self._duties.items() if duty in self.released}
        return {
            name: "released" if name in released else state for name, state in self._told.items()
        }

    def hear(self, states: Mapping[str, str]) -> None:
        """Take over what children say of their sources."""
        told = {**self._told, **states}
        if told != self._told:
            self._told = told
            self._gather()  # who tells what depends on it

    def release(self, duties: Iterable[str]) -> None:
        """Expect nothing of exactly these duties; what they told before is shown no more."""
        self.released = frozenset(duties)
        for ring in self.rings.values():
            if ring.reader.schema.duty in self.released:
                ring.current = False
        self._gather()

    @property
    def live(self) -> dict[str, Manifest]:
        """The manifests of duties that are not released."""
        return {duty: m for duty, m in self.manifests.items() if duty not in self.released}

    def add_event(self, duty: str, event: Event) -> Event | None:
        """Put a child's event into the tick to come; return it with the entity's number.

        What NVML tells of an Xid is None where the kernel log tells it, too.
        """
        if event.name == XID_BY_NVML:
            if self._follows_kernel_log:
                return None
            event = replace(event, name=XID)
        names = self.manifests[duty].names if duty in self.manifests else {}
        event = replace(event, entity=names.get(event.entity) or self._numbered(event.entity))
        self._events.append(event)
        return event

    @property
    def _follows_kernel_log(self) -> bool:
        """Whether the kernel log is read, or may be soon: it tells what was before, too."""
        told = self._told.get("kmsg")
        if told is None:
            return "kmsg" in self._duties and monotonic_ns() < self._starting_until_ns
        return told == "on"

    def _numbered(self, entity: Entity) -> Entity:
        """Return a GPU by number also if it is in no manifest, as one that has left the bus."""
        if entity.kind != "gpu" or ":" not in entity.id:
            return entity
        return Entity("gpu", str(self._numbers.gpu_numbers([entity.id])[entity.id]))

    def poll(self, now_ns: int) -> list[Tick]:
        """Read what has come and return the ticks that can be closed."""
        self.look_for_manifests()
        for path, ring in list(self.rings.items()):
            if ring.reader.intact:
                ring.watermark_ns = ring.reader.watermark_ns
            else:
                log.error("%s: overwritten by somebody: its samples are lost", path)
                ring.reader.close()
                del self.rings[path]
                self._gather()
        if self._complete(self._next_end_ns, now_ns):
            for ring in self.rings.values():
                self._read(ring)
        if not self._next_end_ns:
            self._next_end_ns = self._first_end(now_ns)
            self._starting_until_ns = now_ns + STARTING_NS
        ticks: list[Tick] = []
        start_ns = monotonic_ns()
        while len(ticks) < CATCH_UP_TICKS and self._complete(self._next_end_ns, now_ns):
            ticks.append(self._close(self._next_end_ns))
            self._next_end_ns += TICK_NS
            if monotonic_ns() - start_ns > CATCH_UP_NS:
                break
        for path, ring in list(self.rings.items()):
            if not ring.current and ring.reader.heartbeat_ns < now_ns - self._keep_ns:
                ring.reader.close()
                del self.rings[path]
                self._forget_ended()
        self._look_for_silent()
        return ticks

    def _look_for_silent(self) -> None:
        oldest_ns = self._next_end_ns - SILENT_NS
        silent = {
            path
            for path, ring in self.rings.items()
            if ring.windows.dense and (ring.windows.newest_ns or oldest_ns) < oldest_ns
        }
        if silent != self._silent:
            self._silent = silent
            self._gather()  # who tells what depends on it

    def _forget_ended(self) -> None:
        schemas = [ring.reader.schema for ring in self.rings.values()]
        kept = {column.entity for schema in schemas for column in schema.columns}
        self.ended = {entity: info for entity, info in self.ended.items() if entity in kept}

    def look_for_manifests(self) -> None:
        """Attach the rings of manifests that are new or have changed."""
        for path in self._runtime.glob("*.json"):
            if path.stem in self.released or path.name == VERDICT:
                continue
            try:
                stat = path.stat()
            except OSError:  # its sampler was switched off
                continue
            mark = (stat.st_ino, stat.st_mtime_ns)
            if self._seen.get(path) == mark:
                continue
            fault = ""
            try:
                with open_regular(path) as file:
                    self._attach(json.loads(file.read(MANIFEST_BYTES)))
                self._seen[path] = mark
            except OSError as error:  # too many open files, say: tried again
                fault = str(error)
            except (ConfigError, *SHAPE_ERRORS) as error:
                fault = str(error)
                self._seen[path] = mark
            if fault and fault != self._faults.get(path):
                log.error("%s: not a manifest: %s", path, fault)
            self._faults[path] = fault

    def _attach(self, data: Mapping[str, Any]) -> None:
        infos = [EntityInfo.from_json(info) for info in data["entities"]]
        manifest = Manifest(
            duty=str(data["duty"]),
            generation=int(data["generation"]),
            sources={str(name): dict(state) for name, state in data["sources"].items()},
            names=self._names(infos),
        )
        manifest.entities = [
            EntityInfo(entity, {**info.labels, **own_labels(entity)})
            for info in infos
            for entity in [manifest.names[info.entity]]
        ]
        for column, value in map(constant_from_json, data["constants"]):
            entity = manifest.names.get(column.entity, column.entity)
            manifest.constants.append((column._replace(entity=entity), value))
        for tenant in map(Tenant.from_json, data.get("tenants", ())):
            manifest.tenants.append(replace(tenant, entity=manifest.names[tenant.entity]))
        paths = [Path(path) for path in data["rings"]]
        readers = {path: RingReader(path) for path in paths if path not in self.rings}
        for path, ring in list(self.rings.items()):
            if ring.reader.schema.duty == manifest.duty:
                ring.current = path in paths
                if not ring.current and not path.exists():  # of too many that have ended
                    ring.reader.close()
                    del self.rings[path]
        for path, reader in readers.items():
            windows = RingWindows(reader.schema.with_entities(manifest.names))
            self.rings[path] = Attached(reader, windows)
        before = self.manifests.get(manifest.duty)
        if before is not None:
            known = {info.entity: info for info in before.entities}
            self.ended |= {
                old: known[new] for old, new in before.names.items() if old not in manifest.names
            }
        self.manifests[manifest.duty] = manifest
        for source, state in manifest.sources.items():
            self._duties[source] = manifest.duty
            self._told[source] = str(state["state"])
        self._gather()

    def _gather(self) -> None:
        """Take together what manifests and rings say, after one of them has changed."""
        live = self.live.values()
        self.entities = entities_of(live)
        self.constants = [constant for manifest in live for constant in manifest.constants]
        self.columns, self.feeders, self.bit_feeders = [], {}, {}
        for path in sorted(self.rings, key=self._rank):
            ring = self.rings[path]
            if ring.current:
                self.columns += ring.columns
                self._gather_feeders(ring.windows.schema)
        self._constants = {}
        for column, value in self.constants:
            self._constants.setdefault(column.entity, {})[column.name] = value
        self._links = links_of(self.entities)

    def _rank(self, path: Path) -> int:
        """Return which rings count of those that have the same: those with the highest rank."""
        ring = self.rings[path]
        if path in self._silent or self._told.get(ring.windows.schema.source) == STANDBY:
            return 0
        return 1 + ring.windows.dense

    def _gather_feeders(self, schema: RingSchema) -> None:
        for entity, signal, label in schema.columns:
            if signal.kind is not Kind.BITS:
                self.feeders[column_name(signal, label)] = schema.source
                continue
            self.feeders[signal.name] = schema.source
            for _, bit in signal.bits:
                self.bit_feeders[entity, column_name(signal, bit)] = schema.source

    def _names(self, infos: list[EntityInfo]) -> dict[Entity, Entity]:
        """Return each GPU's entity by number: the recorded one, else the store's."""
        gpus = [info for info in infos if info.entity.kind == "gpu"]
        given = {info.entity: info.labels["gpu"] for info in gpus if "gpu" in info.labels}
        asked = [info.entity.id for info in gpus if info.entity not in given]
        numbers = self._numbers.gpu_numbers(asked) if asked else {}
        names = {info.entity: info.entity for info in infos}
        names.update({entity: Entity("gpu", number) for entity, number in given.items()})
        names.update({Entity("gpu", pci): Entity("gpu", str(n)) for pci, n in numbers.items()})
        for part in (info.entity for info in infos if info.entity.kind == "gpu_instance"):
            pci, _, instance = part.id.partition("/")
            whole = names.get(Entity("gpu", pci))
            if whole is not None:
                names[part] = Entity(part.kind, f"{whole.id}/{instance}")
        return names

    def _read(self, ring: Attached) -> None:
        """Take in what has come; what cannot be closed before long waits in the ring."""
        newest_ns = ring.windows.newest_ns
        if newest_ns and newest_ns > self._next_end_ns + CATCH_UP_TICKS * TICK_NS:
            return
        first, rows = ring.reader.read(ring.sequence)
        ring.windows.period_ns = ring.reader.period_ns
        if rows:
            ring.windows.add(rows)
            ring.sequence = first + len(rows) // ring.reader.row_bytes

    def _first_end(self, now_ns: int) -> int:
        """Start where the rings reach back to: a restarted daemon misses nothing."""
        firsts = [ring.windows.oldest_ns for ring in self.rings.values()]
        oldest = [first for first in firsts if first is not None]
        start = max(min(oldest, default=now_ns), now_ns - self._keep_ns)
        return (start // TICK_NS + 1) * TICK_NS

    def _complete(self, end_ns: int, now_ns: int) -> bool:
        rings = [ring for ring in self.rings.values() if ring.current and not ring.windows.ended]
        rings = [ring for ring in rings if ring.reader.heartbeat_ns > now_ns - DOWN_NS]
        if rings and all(ring.watermark_ns >= end_ns for ring in rings):
            return True
        delivery = max((ring.reader.schema.delivery_ns for ring in rings), default=0)
        return now_ns >= end_ns + GRACE_NS + delivery

    def _close(self, end_ns: int) -> Tick:
        tick = Tick(end_ns - TICK_NS, end_ns, constants=self._constants, links=self._links)
        states, fed = self.states, dict.fromkeys(self._duties, False)
        for ring in sorted(self.rings.values(), key=lambda ring: not ring.windows.dense):
            source = ring.reader.schema.source
            ended = ring.windows.ended or (not ring.current and ring.windows.oldest_ns is None)
            if ended or states.get(source) in NOT_PLANNED:
                continue  # nobody plans to read there: nothing is missing
            ring.windows.close(tick)
            rows = tick.rows[-1].late_seconds
            # By its rows too, not by its watermark alone: that may be of a look after the tick.
            reach_ns = min(ring.watermark_ns, ring.windows.reach_ns)
            if len(rows) or (ring.current and reach_ns >= end_ns):
                fed[source] = True
        for entity, values in self.facts.items():
            tick.windows.setdefault(entity, {}).update(
                (name, Window.steady(tick.start_ns, tick.end_ns, value))
                for name, value in values.items()
            )
        self._heard |= {source for source, up in fed.items() if up}
        for source, up in fed.items():
            if source not in self._heard and end_ns < self._starting_until_ns:
                continue  # its sampler has had no time yet
            if states.get(source) not in NOT_PLANNED:
                tick.windows[Entity("source", source)] = {
                    "source_up": Window.steady(tick.start_ns, tick.end_ns, float(up)),
                    **tick.lateness(source),
                }
        while self._events and self._events[0].time_ns < end_ns:
            tick.events.append(self._events.popleft())
        return tick

    def ring_paths(self) -> list[str]:
        """Return the files of all rings that still hold samples, for a recording."""
        return [os.fspath(path) for path in self.rings]

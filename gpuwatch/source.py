"""What a source is: it opens a part of the machine and reads groups of cells from it.

To add a source: one file in `sources/` with a class as below, and one line in `sources/__init__`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gpuwatch.pulse import Pulse
from gpuwatch.signals import Column, Entity, Event, Signal, checked_name, valid

# States in which nobody means to read a source.
STANDBY = "standby"  # hardware keeps the latest rows, which are read when somebody wants them
NOT_PLANNED = ("off", "released", "unsupported", STANDBY)
USER = "user"  # the kind of a tenant that is shown nowhere: it says what somebody may do

TimedRow = tuple[int, Sequence[float]]  # monotonic nanoseconds, cells


class Pace(NamedTuple):
    """How hardware goes on: so many times more rarely than planned, and the time between rows.

    In `standby` it only keeps the latest rows, until they are asked for.
    """

    scale: float
    period_ns: int
    standby: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that are always read together: one ring, one row a read.

    `read` returns the cells in the order of `columns` (integer kinds first), with UNKNOWN_INTEGER
    or NaN for what could not be read; it may return the same list every time. The first reads of
    groups are spread by `phase_ns`, at most a second: nobody waits long for a slow group.

    A group that the hardware samples by itself has `drain` instead: called every `delivery_ns`,
    it returns what has come since, in order, each row with its own monotonic time; `period_ns` is
    the time between such rows. `pace` is told how many times more rarely the hardware is to sample,
    0 for not at all, and returns how it goes on. `ask` has the next drain of hardware in standby
    return what it has kept: rows of a time that is told of nowhere else.
    """

    name: str
    columns: tuple[Column, ...]
    period_ns: int
    read: Callable[[], Sequence[float]] | None = None
    phase_ns: int = 0
    delivery_ns: int = 0
    drain: Callable[[], Sequence[TimedRow]] | None = None
    pace: Callable[[float], Pace] | None = None
    ask: Callable[[], None] | None = None

    def rows(self, now_ns: int) -> Sequence[TimedRow]:
        """Return one read, as of `now_ns`, or what a drain gives."""
        if self.drain is not None:
            return self.drain()
        assert self.read is not None
        return ((now_ns, self.read()),)


@dataclass(frozen=True, slots=True)
class EntityInfo:
    """What is known of an entity beside its samples: the labels of its `_info` metric."""

    entity: Entity
    labels: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as manifests and recordings keep it."""
        return {"entity": list(self.entity), "labels": dict(self.labels)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "EntityInfo":
        """Rebuild it; KeyError, TypeError or ValueError if `data` is not one."""
        labels = {checked_name(key): valid(value) for key, value in data["labels"].items()}
        return cls(Entity.from_json(data["entity"]), labels)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who uses a GPU or a MIG instance now: a "job", a "pod", a "process" or a "user".

    They come and go, so they are no entities: nothing that is measured has their labels.
    """

    kind: str
    entity: Entity
    labels: Mapping[str, str]

    @property
    def gpu(self) -> Entity:
        """The GPU, also of who uses an instance of it."""
        return Entity("gpu", self.entity.id.partition("/")[0])

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as manifests keep it."""
        return {"kind": self.kind, "entity": list(self.entity), "labels": dict(self.labels)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Tenant":
        """Rebuild it; KeyError, TypeError or ValueError if `data` is not one."""
        labels = {checked_name(key): valid(value) for key, value in data["labels"].items()}
        return cls(checked_name(data["kind"]), Entity.from_json(data["entity"]), labels)


def constant_to_json(column: Column, value: float) -> list[Any]:
    """Return a constant as manifests and recordings keep it."""
    return [list(column.entity), column.signal.to_json(), column.label, value]


def constant_from_json(data: Sequence[Any]) -> tuple[Column, float]:
    """Rebuild a constant; TypeError, KeyError or ValueError if `data` is not one."""
    entity, signal, label, value = data
    return Column(Entity.from_json(entity), Signal.from_json(signal), valid(label)), float(value)


@dataclass(frozen=True, slots=True)
class Opened:
    """What `open` found: groups to read, the entities they speak of, values that do not change.

    `tenants` are those who use them now. `reason` says why not all of it can be read; without any
    group the source is unavailable, and looks again by itself. In `standby` all groups are.
    """

    groups: tuple[Group, ...]
    entities: tuple[EntityInfo, ...] = ()
    constants: tuple[tuple[Column, float], ...] = ()
    tenants: tuple[Tenant, ...] = ()
    reason: str = ""
    standby: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """What a source is given: settings, roots of /sys and /proc, and what to leave alone.

    `excluded` holds ids of entities that hung: they are listed as not up and never touched;
    `known` then are all there were, for a source that cannot list them without touching them.
    `only` is set in a probe, which opens that entity alone. `runtime` is where other duties name
    their rings, None if none runs beside.
    Before each driver call the source writes the index of the entity into the pulse.
    """

    settings: Mapping[str, Any]
    pulse: Pulse
    sysfs: Path = Path("/sys")
    procfs: Path = Path("/proc")
    excluded: frozenset[str] = frozenset()
    known: tuple[str, ...] = ()
    only: str | None = None
    runtime: Path | None = None


@dataclass(slots=True)
class Findings:
    """What a source has to tell between reads; the sampler takes events and keeps the counts."""

    events: list[Event] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class Source(Protocol):
    """One part of the machine. All calls come from the sampler's one thread."""

    name: str
    findings: Findings

    def open(self, context: Context) -> Opened:
        """Find what is there.

        Raises SourceUnavailable if it cannot work now; it is opened again later in a new process.
        """

    def housekeep(self, now_ns: int) -> Opened | None:
        """Do slow upkeep about once a second: look again at what failed.

        Returns what is there now if entities, constants, tenants or groups are others than
        before; a group with the same name and columns keeps its ring. Raises SourceUnavailable if
        the source as a whole stopped working.
        """

    def close(self) -> None:
        """Let go of the driver."""

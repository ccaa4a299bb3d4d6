"""A source of the network opened in this process on a tree that stands for /sys."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpuwatch.config import load
from gpuwatch.pulse import Pulse
from gpuwatch.signals import UNKNOWN_INTEGER
from gpuwatch.source import Context, Group, Opened


class Reading:
    """A source, what it opened, and what its groups read; `housekeep` takes changes over."""

    def __init__(
        self, source: Any, sysfs: Path, *, excluded: tuple[str, ...] = (), **network: Any
    ) -> None:
        self.source = source
        config = load(None, {"network": network} if network else {})
        self.pulse = Pulse.create(1)
        context = Context({"config": config}, self.pulse, sysfs=sysfs, excluded=frozenset(excluded))
        self.opened: Opened = source.open(context)
        self.events: list[tuple[str, str, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.source.close()
        self.pulse.close()

    def group(self, name: str) -> Group:
        """Return the group whose name begins so."""
        return next(group for group in self.opened.groups if group.name.startswith(name))

    def read(self, entity: str) -> dict[str, float | None]:
        """Read everything of an entity; None is unknown."""
        found: dict[str, float | None] = {}
        for group in self.opened.groups:
            if any(column.entity.id == entity for column in group.columns):
                cells = group.rows(0)[0][1]
                for column, cell in zip(group.columns, cells, strict=True):
                    if column.entity.id == entity:
                        known = cell == cell and cell != UNKNOWN_INTEGER
                        found[column.name.removeprefix("rdma_")] = cell if known else None
        self._take_events()
        return found

    def housekeep(self, now_ns: int) -> bool:
        """Let the source look after itself; return whether it has other groups or entities now."""
        found = self.source.housekeep(now_ns)
        self._take_events()
        if found is not None:
            self.opened = found
        return found is not None

    def errors(self) -> dict[str, int]:
        """Return the failed reads by error."""
        return dict(self.source.findings.errors)

    def labels(self, entity: str) -> dict[str, str]:
        """Return what is known of an entity."""
        return dict(next(info.labels for info in self.opened.entities if info.entity.id == entity))

    def _take_events(self) -> None:
        events = self.source.findings.events
        self.events += [(event.name, event.entity.id, event.detail) for event in events]
        events.clear()

    def told(self, name: str) -> list[tuple[str, str]]:
        """Return entity and detail of each event of that name."""
        self._take_events()
        return [(entity, detail) for event, entity, detail in self.events if event == name]

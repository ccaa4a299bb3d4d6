"""Presence: which GPUs answer, and what entities are called, also while nobody tells it."""

from collections.abc import Mapping
from dataclasses import replace

from gpuwatch.clock import SECOND_NS
from gpuwatch.signals import Entity
from gpuwatch.snapshot import Snapshot
from gpuwatch.source import EntityInfo

UP_HOLD_NS = 5 * SECOND_NS  # a sampler that is started anew is silent for at most 3 s


class Presence:
    """Remembers what snapshots said; has to see each of them."""

    def __init__(self) -> None:
        self._labels: dict[Entity, Mapping[str, str]] = {}
        self._up: dict[Entity, tuple[int | None, int]] = {}  # what was said, and of which time

    def complete(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with what is known from those before it.

        A GPU that does not answer cannot tell its uuid: it keeps the labels that it had.
        """
        for info in snapshot.entities:
            entity, labels = info.entity, info.labels
            silent = entity.kind == "gpu" and not labels.get("uuid")
            self._labels[entity] = {**self._labels.get(entity, {}), **labels} if silent else labels
        entities = [
            EntityInfo(info.entity, self._labels[info.entity]) for info in snapshot.entities
        ]
        gpus = [info.entity for info in entities if info.entity.kind == "gpu"]
        ups = {gpu: self._is_up(snapshot, gpu) for gpu in gpus}
        return replace(snapshot, entities=entities, labels=dict(self._labels), gpus_up=ups)

    def _is_up(self, snapshot: Snapshot, gpu: Entity) -> int | None:
        """Return 1 or 0; the last word counts while the sampler is silent for a few seconds."""
        feeder = snapshot.sources.get(snapshot.signal_sources.get("gpu_up", ""))
        off = snapshot.released.get("gpus") or (feeder is not None and not feeder.planned)
        if not snapshot.ticks or off:
            self._up.pop(gpu, None)
            return None
        window = snapshot.live(gpu, "gpu_up")
        newest_ns = snapshot.ticks[0].end_ns
        if window is not None:
            self._up[gpu] = (int(window.last), window.end_ns)
        value, since_ns = self._up.setdefault(gpu, (None, newest_ns))
        if newest_ns - since_ns > UP_HOLD_NS:
            value = 0
            self._up[gpu] = (value, since_ns)
        return value

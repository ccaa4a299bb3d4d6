"""What another duty's rings bring already: then nobody need ask the driver for the same.

Seen where it is, in the rings that the duty's manifest names. So a sampler that was released or
killed, one that hangs, and a GPU that it does not have are noticed without a word from anybody.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.errors import ConfigError
from gpuwatch.paths import open_regular
from gpuwatch.ring import SHAPE_ERRORS, RingReader
from gpuwatch.signals import UNKNOWN_INTEGER, Entity

LOOK_NS = SECOND_NS  # at the manifest, while something is not delivered
LATE_NS = 250 * MILLISECOND_NS  # what has not come by then does not come

Key = tuple[Entity, str]


class _Ring:
    """A ring with counters."""

    def __init__(self, path: Path) -> None:
        self.reader = RingReader(path)
        schema = self.reader.schema
        self.keys = [(column.entity, column.name) for column in schema.columns[: schema.integers]]
        self._unpack = Struct(schema.row_format).unpack
        self._delivery_ns = schema.delivery_ns

    def brings(self, keys: Sequence[Key], now_ns: int) -> bool:
        """Say whether it is written to, and its newest row knows all of these counters."""
        reader = self.reader
        row = reader.newest()
        if not row or reader.heartbeat_ns < now_ns - LATE_NS:
            return False
        time_ns, late_seconds, _, *cells, _ = self._unpack(row)
        oldest_ns = now_ns - self._delivery_ns - 2 * reader.period_ns - LATE_NS
        is_of_now = oldest_ns <= time_ns <= now_ns + LATE_NS
        if not is_of_now or math.isnan(late_seconds):  # nobody planned to read that row
            return False
        told = zip(self.keys, cells, strict=False)
        return {key for key, cell in told if cell != UNKNOWN_INTEGER}.issuperset(keys)


class Delivered:
    """The counters that a duty delivers; none without a directory of manifests."""

    def __init__(self, runtime: Path | None, duty: str) -> None:
        self._manifest = runtime and runtime / f"{duty}.json"
        self._mark: tuple[int, ...] = ()
        self._looked_ns = -LOOK_NS
        self._rings: list[_Ring] = []
        self._ring_of: dict[Key, _Ring] = {}

    def brings(self, entity: Entity, names: Sequence[str]) -> bool:
        """Say whether all of these columns of an entity are delivered now."""
        keys = [(entity, name) for name in names]
        now = monotonic_ns()
        ring = self._ring_of.get(keys[0])
        if ring is not None and ring.brings(keys, now):
            return True
        if self._manifest is not None and now - self._looked_ns >= LOOK_NS:
            self._looked_ns = now
            self._look(self._manifest)
        return False

    def _look(self, manifest: Path) -> None:
        """Open the rings of a manifest that has changed; of one that is none the daemon tells."""
        mark: tuple[int, ...] = ()
        rings: list[_Ring] = []
        try:
            stat = manifest.stat()
            mark = (stat.st_ino, stat.st_mtime_ns)
            if mark == self._mark:
                return
            with open_regular(manifest) as file:
                rings = [_Ring(Path(path)) for path in json.load(file)["rings"]]
        except (OSError, ConfigError, *SHAPE_ERRORS):
            mark = ()
        for ring in self._rings:
            ring.reader.close()
        self._mark, self._rings = mark, rings
        self._ring_of = {key: ring for ring in rings for key in ring.keys}

"""Pages: what is served of one snapshot, each made when it is first asked for, and only then.

Nearly all snapshots are never asked for: there are four a second, and a scrape every few. Who asks
makes the page in its own thread, so that nobody waits for a tick, nor a tick for anybody.
"""

import gzip
import logging
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gpuwatch import dcgm
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.control import Message, packets
from gpuwatch.exposition import Exposition
from gpuwatch.minute import Minute
from gpuwatch.snapshot import Snapshot
from gpuwatch.status import describe

log = logging.getLogger("gpuwatch.pages")

FAULT_QUIET_NS = 60 * SECOND_NS  # a bug that is met at every scrape must not fill the log


class Body:
    """A page that is compressed when it is first asked for that way, and only then."""

    def __init__(self, plain: bytes) -> None:
        self.plain = plain
        self._compressed: bytes | None = None

    @property
    def compressed(self) -> bytes:
        """The page in gzip's format, at level 1: a third of level 6's time."""
        if self._compressed is None:
            self._compressed = gzip.compress(self.plain, compresslevel=1, mtime=0)
        return self._compressed


class Pages:
    """The pages of one snapshot; `exposition` is used by the web server's thread alone.

    `before` are the counters of the seconds before, for rates.
    """

    def __init__(
        self, shown: Snapshot, exposition: Exposition, before: Sequence[dcgm.Counts] = ()
    ) -> None:
        self.shown = shown
        self._exposition = exposition
        self._before = before
        self._whole: Sequence[Message] | None = None

    @cached_property
    def metrics(self) -> Body:
        """The page of metrics."""
        return Body(self._exposition.render(self.shown))

    @cached_property
    def dcgm(self) -> Body:
        """The page under dcgm-exporter's names."""
        return Body(dcgm.render(self.shown, self._before))

    @cached_property
    def status(self) -> dict[str, Any]:
        """The status page's JSON; the daemon's own thread asks for it, too."""
        return describe(self.shown)

    def whole(self, minute: Minute) -> Sequence[Message]:
        """Return the status with the last minute, as packets; for the daemon's own thread."""
        if self._whole is None:
            self._whole = packets({"status": self.status, "minute": minute.series()})
        return self._whole


class Shelf:
    """The newest pages, and of each sort the last one that could be made.

    A page that cannot be made is a bug, and must not end a scrape: the one before it is given
    instead. The log has it once a minute, and `faults` then get a line, for the daemon to tell.
    """

    def __init__(self) -> None:
        self.newest: Pages
        self.faults: deque[str] = deque(maxlen=10)
        self._made: dict[str, Any] = {}
        self._told_ns = -FAULT_QUIET_NS

    def metrics(self) -> Body:
        """Return the page of metrics."""
        body: Body = self._last("metrics")
        return body

    def dcgm(self) -> Body:
        """Return the page under dcgm-exporter's names."""
        body: Body = self._last("dcgm")
        return body

    def status(self) -> dict[str, Any]:
        """Return the status page's JSON."""
        status: dict[str, Any] = self._last("status")
        return status

    def _last(self, name: str) -> Any:
        try:
            self._made[name] = getattr(self.newest, name)
        except Exception as fault:  # the one guard of the web server's thread
            self._tell(name, fault)
            if name not in self._made:
                raise
        return self._made[name]

    def _tell(self, name: str, fault: Exception) -> None:
        now_ns = monotonic_ns()
        if now_ns - self._told_ns >= FAULT_QUIET_NS:
            self._told_ns = now_ns
            log.error("the page of %s cannot be made", name, exc_info=fault)
            self.faults.append(f"{name}: {fault!r}")

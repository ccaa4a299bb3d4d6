"""Pages: what is served of one snapshot, each made when it is first asked for, and only then.

Nearly all snapshots are never asked for: there are four a second, and a scrape every few. Who asks
makes the page in its own thread, so that nobody waits for a tick, nor a tick for anybody.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gpuwatch.control import Message, packets
from gpuwatch.exposition import Exposition
from gpuwatch.minute import Minute
from gpuwatch.snapshot import Snapshot
from gpuwatch.status import describe
from gpuwatch.web import Body


class Pages:
    """The pages of one snapshot; `exposition` is used by the web server's thread alone."""

    def __init__(self, shown: Snapshot, exposition: Exposition) -> None:
        self.shown = shown
        self._exposition = exposition
        self._whole: Sequence[Message] | None = None

    @cached_property
    def metrics(self) -> Body:
        """The page of metrics."""
        return Body(self._exposition.render(self.shown))

    @cached_property
    def status(self) -> dict[str, Any]:
        """The status page's JSON; the daemon's own thread asks for it, too."""
        return describe(self.shown)

    def whole(self, minute: Minute) -> Sequence[Message]:
        """Return the status with the last minute, as packets; for the daemon's own thread."""
        if self._whole is None:
            self._whole = packets({"status": self.status, "minute": minute.series()})
        return self._whole

    def firing(self) -> list[str]:
        """Return a line for each firing alert."""
        return [
            f"{alert['severity']}: {alert['rule']} on"
            f" {' '.join((*alert['entity'], alert['place'])).strip()}"
            f" since {alert['since']}: {alert['next_step']}"
            for alert in self.status["alerts"]
            if alert["state"] == "firing"
        ]

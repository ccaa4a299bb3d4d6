"""Leases: what is left to another tool for a while, so that it finds the hardware free.

A lease ends by CLOCK_BOOTTIME, which goes on while the machine sleeps, and with the boot. It is in
the store, so it survives daemon and supervisor.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from gpuwatch.clock import SECOND_NS, read_clocks
from gpuwatch.store import LeaseRow, Store

log = logging.getLogger(__name__)

LONGEST_SECONDS = 7 * 86400.0
# The duties whose processes hold what can be released: they end for as long as the lease lasts.
HOLDERS: Mapping[str, tuple[str, ...]] = {
    "gpus": ("state", "counters", "pm"),
    "counters": ("pm",),
    "canaries": (),  # the daemon's own doing
}


def this_boot() -> str:
    """Return the kernel's name for the time since the machine started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Leases:
    """What is released now."""

    def __init__(self, store: Store, boot_id: str) -> None:
        self._store = store
        self._boot_id = boot_id
        self.look()
        for what, _, until_ns in store.leases:
            left = (until_ns - read_clocks().boottime_ns) / SECOND_NS
            log.info("%s: released for another %.0f s: gpuwatch resume %s", what, left, what)

    def grant(self, what: str, seconds: float) -> None:
        """Release something for so long from now on, in place of an earlier lease of it."""
        until_ns = read_clocks().boottime_ns + int(seconds * SECOND_NS)
        kept = [lease for lease in self._store.leases if lease.what != what]
        self._store.save_leases([*kept, LeaseRow(what, self._boot_id, until_ns)])

    def end(self, what: str) -> bool:
        """Take something back; False if it was not released."""
        kept = [lease for lease in self._store.leases if lease.what != what]
        ended = len(kept) < len(self._store.leases)
        if ended:
            self._store.save_leases(kept)
        return ended

    def look(self) -> list[str]:
        """Return what is no longer released because its time, or its boot, is over."""
        now_ns = read_clocks().boottime_ns
        over = [
            lease.what
            for lease in self._store.leases
            if lease.boot_id != self._boot_id or lease.until_boottime_ns <= now_ns
        ]
        for what in over:
            self.end(what)
        return over

    @property
    def released(self) -> dict[str, bool]:
        """Of each thing that can be released, whether it is."""
        held = {lease.what for lease in self._store.leases}
        return {what: what in held for what in HOLDERS}

    @property
    def duties(self) -> set[str]:
        """The duties that must not run now, whether the config has them or not."""
        return {duty for lease in self._store.leases for duty in HOLDERS.get(lease.what, ())}

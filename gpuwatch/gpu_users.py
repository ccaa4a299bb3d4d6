"""Users: who has a process on a GPU, so that they may have its hardware counters released."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import pynvml

from gpuwatch import pulse as page
from gpuwatch.gpu_readings import process_ids
from gpuwatch.roster import Gpu, Roster
from gpuwatch.source import USER, Tenant


class Users:
    """The users of GPUs by number, as the kernel tells whose a process is."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._found: dict[Gpu, frozenset[int]] = {}
        self.procfs = Path("/proc")

    def look(self) -> bool:
        """Ask the driver for processes; say whether other users have them than before."""
        before = self._found
        self._found = {
            gpu: users
            for gpu in self._roster.gpus
            if gpu.handle is not None and (users := self._users(gpu))
        }
        return self._found != before

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """The users as tenants of their GPUs."""
        return tuple(
            Tenant(USER, gpu.entity, {"uid": str(uid)})
            for gpu, users in self._found.items()
            for uid in sorted(users)
        )

    def _users(self, gpu: Gpu) -> frozenset[int]:
        self._roster.words[page.READING] = gpu.index
        pids: Iterable[int] = ()
        with contextlib.suppress(pynvml.NVMLError):  # told where processes are counted
            pids = process_ids(gpu.handle)
        self._roster.words[page.READING] = page.NOT_READING
        found = set()
        for pid in pids:
            with contextlib.suppress(OSError):
                found.add((self.procfs / str(pid)).stat().st_uid)
        return frozenset(found)

"""Takes: what is to be recorded of which time, so that many alerts make few recordings.

A take begins some seconds before what set it off and ends some seconds after. Whatever is seen
until then shares it and may prolong it, as far as the rings reach. After it the same rule gets no
other one of the same entity for a while.
"""

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuwatch.clock import SECOND_NS
from gpuwatch.quota import stamp, stamped_ns
from gpuwatch.signals import Entity

SUFFIX = ".gwr"
MARGIN_NS = 5 * SECOND_NS  # what a ring is about to overwrite cannot be counted on
SETTLE_NS = SECOND_NS  # after this all rows and events of an instant are there
NAMES_KEPT = 100
NAME_LENGTH = 120

_NOT_IN_NAMES = re.compile(r"[^\w.]+")

Key = tuple[str, Entity]  # rule, entity


@dataclass(slots=True)
class Take:
    """A recording to be made of the time from `since_ns` up to `until_ns`, and what it shows."""

    name: str
    since_ns: int
    until_ns: int
    keys: list[Key] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """What it shows, in words."""
        return ", ".join(f"{rule} on {entity}" for rule, entity in self.keys)


class Takes:
    """Plans takes; one is made at a time.

    `newest` has the last recording of each rule and entity: its name tells when it was. `names`
    are those of the files there are.
    """

    def __init__(
        self,
        config: Mapping[str, float],
        ring_seconds: float,
        newest: Mapping[Key, str],
        names: Iterable[str],
    ) -> None:
        self.newest = dict(newest)
        self.running: Take | None = None
        self._reach_ns = int(ring_seconds * SECOND_NS) - MARGIN_NS
        self._after_ns = min(int(config["after_seconds"] * SECOND_NS), self._reach_ns)
        before_ns = int(config["before_seconds"] * SECOND_NS)
        self._before_ns = min(before_ns, self._reach_ns - self._after_ns)
        self._quiet_ns = int(config["quiet_seconds"] * SECOND_NS)
        self._waiting: deque[Take] = deque()
        self._names = deque(sorted(names), maxlen=NAMES_KEPT)

    def plan(self, key: Key, time_ns: int, wall_ns: int) -> bool:
        """Plan a take of what was seen at `time_ns`; False if there was one a short time ago."""
        if any(key in take.keys for take in (*self._waiting, self.running) if take):
            return True
        if self.is_quiet(self.newest.get(key, ""), wall_ns):
            return False
        take = self._waiting[-1] if self._waiting else None
        if take is None or time_ns > take.until_ns:
            name = self.name(wall_ns, f"{key[0]}-{key[1]}")
            take = Take(name, time_ns - self._before_ns, time_ns)
            self._waiting.append(take)
        take.keys.append(key)
        until_ns = min(time_ns + self._after_ns, take.since_ns + self._reach_ns)
        take.until_ns = max(take.until_ns, until_ns)
        return True

    def is_quiet(self, name: str, wall_ns: int) -> bool:
        """Say whether the recording of that name is so young that it stands for this time too."""
        since_ns = stamped_ns(name)
        return since_ns is not None and 0 <= wall_ns - since_ns < self._quiet_ns

    def begin(self, now_ns: int) -> Take | None:
        """Return the take that is to be made now, which runs from then on."""
        if self.running or not self._waiting or now_ns < self._waiting[0].until_ns + SETTLE_NS:
            return None
        self.running = self._waiting.popleft()
        return self.running

    def name(self, wall_ns: int, what: str) -> str:
        """Return a name that no other take has: those of one second are numbered."""
        base = f"{stamp(wall_ns)}-{_NOT_IN_NAMES.sub('-', what)[:NAME_LENGTH]}"
        numbers = ("", *(f"-{number}" for number in range(2, NAMES_KEPT + 2)))
        names = (f"{base}{number}{SUFFIX}" for number in numbers)
        self._names.append(next(name for name in names if name not in self._names))
        return self._names[-1]

"""The pulse: a page of memory through which the supervisor sees what a child is doing.

An anonymous file inherited by the child: no path to clean up, and it can be read while the child
sits in a driver call. The child writes its phase, a heartbeat and the entity whose call it is in;
the supervisor writes the generation that is current, so an abandoned child knows not to write.
"""

import mmap
import os
from collections.abc import Sequence

PAGE_BYTES = 16384
NAMES_OFFSET = 1024

# Words, by index.
PHASE, HEARTBEAT, READING, GENERATION = range(4)

# Phases.
STARTING, OPENING, RUNNING, UNAVAILABLE, CLOSING = range(5)
PHASES = ("starting", "opening", "running", "unavailable", "closing")

NOT_READING = -1


class Pulse:
    """One child's page. `words` is written directly in hot loops: one store, no call."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self.words = memoryview(self._map)[:NAMES_OFFSET].cast("q")

    @classmethod
    def create(cls, generation: int) -> "Pulse":
        """Make a page for a new child of `generation`."""
        descriptor = os.memfd_create("gpuwatch-pulse", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, PAGE_BYTES)
        pulse = cls(descriptor)
        pulse.words[GENERATION] = generation
        pulse.words[READING] = NOT_READING
        return pulse

    def set_names(self, names: Sequence[str]) -> None:
        """Name the entities that `READING` counts, before the first of them is touched."""
        text = "\0".join(names).encode(errors="surrogateescape")
        text = text[: PAGE_BYTES - NAMES_OFFSET - 2] + b"\0\0"
        self._map[NAMES_OFFSET : NAMES_OFFSET + len(text)] = text

    def reading(self) -> str | None:
        """Return the entity whose driver call the child is in, None if it is in none."""
        index = self.words[READING]
        names = self.names()
        return names[index] if 0 <= index < len(names) else None

    def names(self) -> list[str]:
        """Return the names set last: entities, or the reason of a child that is unavailable."""
        text = self._map[NAMES_OFFSET:PAGE_BYTES].split(b"\0\0", 1)[0]
        return text.decode(errors="surrogateescape").split("\0")

    @property
    def phase(self) -> str:
        """The child's phase in words."""
        return PHASES[self.words[PHASE]]

    def close(self) -> None:
        """Let go of the page in this process."""
        self.words.release()
        self._map.close()
        os.close(self.descriptor)

"""Idle time: for how long each GPU had nothing to do within the last day."""

from collections import deque
from collections.abc import Iterable

from gpuwatch.clock import SECOND_NS
from gpuwatch.signals import Entity
from gpuwatch.window import Tick

IDLE_RATIO = 0.02
HOUR_NS = 3600 * SECOND_NS
HOURS = 24
LONGEST_NS = 5 * SECOND_NS  # between two looks; what lies longer between them is not known


def is_idle(tick: Tick, gpu: Entity) -> bool | None:
    """Say whether nobody uses a GPU: no process, and next to no activity; None if not known."""
    processes, activity = tick.window(gpu, "gpu_processes"), tick.activity(gpu)
    if processes is None or not processes.covered_ns:
        return None
    if processes.maximum != 0:
        return False
    return None if activity is None else activity <= IDLE_RATIO


class IdleTime:
    """Sums up, hour by hour, looks at the newest tick; on data time."""

    def __init__(self) -> None:
        self._hours: dict[Entity, deque[tuple[int, int]]] = {}  # (hour, idle nanoseconds)
        self._looked_ns = 0

    def look(self, tick: Tick | None, gpus: Iterable[Entity]) -> None:
        """Take in the time since the last look."""
        if tick is None or tick.end_ns <= self._looked_ns:
            return
        passed_ns = min(tick.end_ns - self._looked_ns, LONGEST_NS)
        self._looked_ns = tick.end_ns
        hour = tick.end_ns // HOUR_NS
        for gpu in gpus:
            hours = self._hours.setdefault(gpu, deque(maxlen=HOURS))
            if not is_idle(tick, gpu):
                continue
            before = hours.pop()[1] if hours and hours[-1][0] == hour else 0
            hours.append((hour, before + passed_ns))

    def seconds(self, gpu: Entity) -> float:
        """Return the idle time of the last day that is known of a GPU."""
        oldest = self._looked_ns // HOUR_NS - HOURS
        hours = self._hours.get(gpu, ())
        return sum(idle_ns for hour, idle_ns in hours if hour > oldest) / SECOND_NS

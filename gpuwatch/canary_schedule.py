"""When canaries run: soon after a GPU's last process has left, and every so often while it is idle.

GPUs that a job has left together have their turn side by side, else each has it alone. All of it
on the monotonic clock, so that no step of the wall clock starts or loses a run. Pure: it is told
what is seen of the GPUs, and says whose turn it is.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuwatch.canaries import CANARIES
from gpuwatch.clock import SECOND_NS

SEED_TURNS = 8  # six readings make a baseline; one or two may be noise
RETEST_SECONDS = (5.0, 10.0)
LATE_NS = 60 * SECOND_NS  # a retest that could not be made until then is none any more
DOUBT_NS = 10 * SECOND_NS  # a GPU that is not seen for less is as it was
POSTPONE_NS = 5 * SECOND_NS
GATHER_NS = 10 * SECOND_NS  # within which processes of a job end, and a GPU waits for the others

Gpu = int | None  # None: all of the host together


@dataclass(frozen=True, slots=True)
class Turn:
    """Canaries that are due on some GPUs, side by side, or (none) on all of the host together.

    `idle` if nobody is there.
    """

    canaries: tuple[str, ...]
    gpus: tuple[int, ...]
    idle: bool

    @property
    def gpu(self) -> Gpu:
        """The GPU that it is about, None if they are several."""
        return self.gpus[0] if len(self.gpus) == 1 else None

    @property
    def courses(self) -> tuple[Gpu, ...]:
        """What has its turn by it."""
        return self.gpus or (None,)


@dataclass(slots=True)
class _Course:
    """One GPU, or all together: since when nobody is there, and when its next turn is."""

    due_ns: int
    known_ns: int  # when it was last seen who is there
    idle_since_ns: int | None = None
    used: bool = False  # since its last turn
    ran_ns: int | None = None
    seeds: int = 0  # turns of those that make a baseline


class Schedule:
    """Says whose turn it is; `settings` are those of [canary].

    `seeded` says whether all canaries of a GPU, or of the host, have a baseline.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        seeded: Callable[[Gpu, Sequence[str]], bool],
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._interval_seconds: float = settings["interval_seconds"]
        self._seed_seconds: float = settings["seed_seconds"]
        self._settle_ns = int(settings["settle_seconds"] * SECOND_NS)
        self._seeded, self._uniform = seeded, uniform
        chosen = list(dict.fromkeys(settings["run"]))
        self._alone = tuple(name for name in chosen if CANARIES[name].least_gpus == 1)
        # Of one that takes one GPU or more it is what lies between them.
        self._together = tuple(name for name in chosen if CANARIES[name].together)
        self._courses: dict[Gpu, _Course] = {}
        self._retests: list[tuple[int, str, tuple[int, ...]]] = []

    def see(self, now_ns: int, idle: Mapping[int, bool | None]) -> None:
        """Take in which GPUs have nobody now; None is not known."""
        if not idle:
            return
        seen: dict[Gpu, bool | None] = {gpu: state for gpu, state in idle.items() if self._alone}
        if self._together and len(idle) > 1:
            states = set(idle.values())
            seen[None] = False if False in states else None if None in states else True
        self._courses = {gpu: course for gpu, course in self._courses.items() if gpu in seen}
        for gpu, state in seen.items():
            if gpu not in self._courses:
                self._courses[gpu] = _Course(now_ns + self._first(gpu), now_ns)
            self._look(gpu, self._courses[gpu], state, now_ns)

    def _look(self, gpu: Gpu, course: _Course, state: bool | None, now_ns: int) -> None:
        if state is None and now_ns - course.known_ns < DOUBT_NS:
            return
        if state is not None:
            course.known_ns = now_ns
        course.used |= state is False
        if not state:
            course.idle_since_ns = None
            return
        if course.idle_since_ns is None:
            course.idle_since_ns = now_ns
        if course.used and course.due_ns > now_ns and self._settled(course, now_ns):
            seeds = course.seeds < SEED_TURNS and not self._seeded(gpu, self._canaries(gpu))
            rest = self._seed_seconds if seeds else self._interval_seconds / 2
            if course.ran_ns is None or now_ns - course.ran_ns >= rest * SECOND_NS:
                course.due_ns = now_ns

    def _settled(self, course: _Course, now_ns: int) -> bool:
        since_ns = course.idle_since_ns
        return since_ns is not None and now_ns - since_ns >= self._settle_ns

    def _taken(self, course: _Course, now_ns: int) -> bool:
        """Say whether somebody is there, or it is not known for longer."""
        unknown = now_ns - course.known_ns >= DOUBT_NS
        return course.idle_since_ns is None and (course.used or unknown)

    def due(self, now_ns: int) -> Turn | None:
        """Return the turn that has waited longest; one of a GPU that has just become idle waits."""
        self._retests = [one for one in self._retests if one[0] + LATE_NS > now_ns]
        for retest in sorted(self._retests):
            due_ns, name, gpus = retest
            turn = Turn((name,), gpus, idle=True)
            if due_ns <= now_ns and all(self._ready(one, now_ns) for one in turn.courses):
                self._retests.remove(retest)
                return turn
        waiting = [
            (course.due_ns, gpu)
            for gpu, course in self._courses.items()
            if course.due_ns <= now_ns
            and (self._settled(course, now_ns) or self._taken(course, now_ns))
        ]
        if not waiting:
            return None
        gpu = min(waiting, key=lambda one: one[0])[1]
        course = self._courses[gpu]
        idle = course.idle_since_ns is not None
        gpus = () if gpu is None else (gpu,)
        if gpu is not None and course.used and course.idle_since_ns is not None:
            # All that the job has left, so that they are the same after each of its kind.
            gpus = tuple(self._left_with(course.idle_since_ns))
            if not all(self._ready(one, now_ns) for one in gpus):
                return None
        return Turn(self._canaries(gpu), gpus, idle)

    def _left_with(self, since_ns: int) -> list[int]:
        """Return the GPUs that have nobody since about that time, in order."""
        return sorted(
            gpu
            for gpu, course in self._courses.items()
            if gpu is not None and course.used and course.idle_since_ns is not None
            if abs(course.idle_since_ns - since_ns) < GATHER_NS
        )

    def _ready(self, gpu: Gpu, now_ns: int) -> bool:
        course = self._courses.get(gpu)
        return course is not None and self._settled(course, now_ns)

    def _canaries(self, gpu: Gpu) -> tuple[str, ...]:
        return self._together if gpu is None else self._alone

    def want(self, canary: str, gpus: tuple[int, ...], now_ns: int) -> None:
        """Have a canary run again soon, on the GPUs of a turn: what it gave is not believed yet."""
        due_ns = now_ns + int(self._uniform(*RETEST_SECONDS) * SECOND_NS)
        if all(one[1:] != (canary, gpus) for one in self._retests):
            self._retests.append((due_ns, canary, gpus))

    def ended(
        self, turn: Turn, now_ns: int, *, started: bool, ran: bool, made_room: bool = False
    ) -> None:
        """Take in that a turn is over: whether a job was started for it, and gave a result.

        If it has made room for somebody, they may have left before they are seen.
        """
        for gpu in turn.courses:
            course = self._courses.get(gpu)
            if course is None or turn.canaries != self._canaries(gpu):
                continue  # a retest
            course.used = made_room
            if made_room:  # again soon, but not for ever
                course.seeds = min(SEED_TURNS, course.seeds + 1)
            if started:
                course.ran_ns = now_ns
            course.due_ns = now_ns + self._next(course, gpu, ran=ran)

    def postpone(self, turn: Turn, now_ns: int) -> None:
        """Have a turn some seconds later: somebody else runs canaries now."""
        if any(turn.canaries != self._canaries(gpu) for gpu in turn.courses):
            self._retests.append((now_ns + POSTPONE_NS, turn.canaries[0], turn.gpus))
            return
        for gpu in turn.courses:
            if (course := self._courses.get(gpu)) is not None:
                course.due_ns = now_ns + POSTPONE_NS

    def ran(self, gpu: Gpu, now_ns: int) -> None:
        """Take in that a user's command has tried a GPU: that is a turn after a job, too."""
        if (course := self._courses.get(gpu)) is not None:
            course.ran_ns = now_ns

    def wake(self) -> None:
        """Go on after a time in which nothing might run, as after a job."""
        for course in self._courses.values():
            course.used = True

    def _first(self, gpu: Gpu) -> int:
        """Return how long the first turn waits: no two nodes are to agree."""
        seeded = self._seeded(gpu, self._canaries(gpu))
        period = self._interval_seconds if seeded else self._seed_seconds
        return int(self._uniform(0.0, period) * SECOND_NS)

    def _next(self, course: _Course, gpu: Gpu, *, ran: bool) -> int:
        if self._seeded(gpu, self._canaries(gpu)):
            course.seeds = 0
        elif ran and course.seeds < SEED_TURNS:
            course.seeds += 1
            return int(self._seed_seconds * SECOND_NS)
        return int(self._interval_seconds * self._uniform(0.5, 1.5) * SECOND_NS)

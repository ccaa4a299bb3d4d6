"""The daemon's canaries: starts the job whose turn it is, ends it on demand, knows what became.

It waits for nobody and calls no driver: the job is a child of the supervisor, and its results come
over the control socket, as those of users' commands do.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuwatch import canary_host
from gpuwatch.canary import LONGEST_SECONDS
from gpuwatch.canary_schedule import Gpu, Schedule, Turn
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.control import Message
from gpuwatch.facts import by_uuid
from gpuwatch.idle import IDLE_RATIO, is_idle
from gpuwatch.paths import CONTROL
from gpuwatch.signals import HOST, Entity

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon

log = logging.getLogger("gpuwatch.daemon")

JOB_SECONDS = 120.0  # beside its canaries: a driver that opens slowly
AFTER_NS = 3 * SECOND_NS  # until lists of processes have forgotten a job, and what it left is known
STUCK_NS = 5 * SECOND_NS
QUIET_NS = 15 * SECOND_NS
SHARED = "pcie"  # GPUs share bridges and the host's memory

Quiet = Callable[[Sequence[Message]], object]


class CanaryRunner:
    """Runs canaries when it is time; `stuck` are processes that did not end, None if none may run.

    All calls come from the daemon's thread.
    """

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._settings: Mapping[str, Any] = daemon.config["canary"]
        self._lock = daemon.runtime / canary_host.LOCK
        self._schedule = Schedule(self._settings, self._seeded)
        self._job: int | None = None
        self._turn: Turn | None = None
        self._expected: set[str] = set()  # of the turn's canaries, those without a result yet
        self._ran = self._made_room = False
        self._ending = ""  # why the job was told to end
        self._blind_until_ns = monotonic_ns()
        self._waiting: list[tuple[int, Quiet]] = []
        self._strays: list[int] = []
        self._killed = False  # some that a session left
        self._looked_ns = self._paced_ns = 0
        self.hindrance = canary_host.hindrance(daemon.config)
        if not daemon.made_up:
            canary_host.session_runs(self._lock)  # makes it, for who may not
        if self.hindrance and not daemon.made_up:
            log.info("canaries: the daemon runs none: %s", self.hindrance)

    @property
    def stuck(self) -> int | None:
        """How many processes of canaries did not end when they were killed."""
        return None if self.hindrance else len(self._strays)

    def look(self, now_ns: int) -> None:
        """Start what is due, at most once a second; tell those who wait for quiet."""
        self._answer(now_ns)
        if now_ns - self._paced_ns < SECOND_NS:
            return
        self._paced_ns = now_ns
        if self.hindrance or self._job is not None or now_ns < self._blind_until_ns:
            return
        if self._looked_ns < self._blind_until_ns or self._strays:
            self._look_for_strays(now_ns)
            if now_ns < self._blind_until_ns:
                return
        self._schedule.see(now_ns, self._idle())
        turn = self._schedule.due(now_ns)
        if turn is None:
            return
        reason = self._obstacle() or ("" if turn.idle else "busy")
        if reason:
            self._skip(turn.canaries, turn.gpu, reason)
            self._schedule.ended(turn, now_ns, started=False, ran=False)
        elif canary_host.session_runs(self._lock):
            self._schedule.postpone(turn, now_ns)
        elif canaries := self._undisturbed(turn):
            self._start(turn, canaries)
        else:
            self._schedule.ended(turn, now_ns, started=False, ran=False)

    def _undisturbed(self, turn: Turn) -> tuple[str, ...]:
        """Return the turn's canaries, without what others' work on the way to the host slows."""
        gpus = by_uuid(self._daemon).values()
        others = [gpu for gpu in gpus if int(gpu.id) not in turn.gpus]
        if not turn.gpus or SHARED not in turn.canaries or not any(map(self._works, others)):
            return turn.canaries
        self._skip((SHARED,), turn.gpu, "busy")
        return tuple(name for name in turn.canaries if name != SHARED)

    def _look_for_strays(self, now_ns: int) -> None:
        """End what the last session left, and see whether it has ended."""
        if now_ns - self._looked_ns < STUCK_NS and self._looked_ns >= self._blind_until_ns:
            return
        self._looked_ns = now_ns
        if canary_host.session_runs(self._lock):
            return  # they are its own
        strays = canary_host.processes(self._lock)
        for pid in strays:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        before, self._killed = self._killed, bool(strays)
        if strays and not before:
            log.warning("canaries: process %d outlived its canary: killed", strays[0])
            self._blind_until_ns = now_ns + AFTER_NS
            return
        if strays and not self._strays:
            log.error(
                "canaries: process %d does not end when killed: none runs any more", strays[0]
            )
        elif self._strays and not strays:
            log.info("canaries: what did not end when killed is gone")
            self._schedule.wake()
        self._strays = strays

    def _idle(self) -> dict[int, bool | None]:
        """Return of each GPU that is here whether nobody uses it."""
        ticks = self._daemon.ticks
        found = by_uuid(self._daemon).values()
        return {int(gpu.id): is_idle(ticks[0], gpu) if ticks else None for gpu in found}

    def _seeded(self, gpu: Gpu, canaries: Sequence[str]) -> bool:
        uuids = {entity.id: uuid for uuid, entity in by_uuid(self._daemon).items()}
        about = HOST if gpu is None else Entity("gpu", uuids.get(str(gpu), ""))
        baseline = self._daemon.baseline
        return all(baseline.is_seeded(about, canary) for canary in canaries)

    def _obstacle(self) -> str:
        released = self._daemon.leases.released
        if released["gpus"]:
            return "released"
        if released["canaries"]:
            return "paused"
        return "stuck" if self._strays else ""

    def _skip(self, canaries: Sequence[str], gpu: Gpu, reason: str) -> None:
        for canary in canaries:
            self._daemon.canary_ledger.skipped(canary, gpu, reason)

    def _works(self, gpu: Entity) -> bool:
        """Say whether somebody is at work on a GPU; a process that does nothing slows nobody."""
        ticks = self._daemon.ticks
        if not ticks or is_idle(ticks[0], gpu) is not False:
            return False
        activity = ticks[0].activity(gpu)
        return activity is None or activity > IDLE_RATIO

    def _start(self, turn: Turn, canaries: Sequence[str]) -> None:
        daemon = self._daemon
        paths = daemon.config["paths"]
        settings = {
            "python": canary_host.interpreter(self._settings["python"]),
            "size": self._settings["size"],
            "canaries": list(canaries),
            "gpus": list(turn.gpus),
            "numbers": daemon.store.numbers,
            "released": [what for what, held in daemon.leases.released.items() if held],
            "lock": str(self._lock),
            "control": str(daemon.runtime / CONTROL),
            "sysfs": paths["sysfs"],
            "procfs": paths["procfs"],
        }
        self._turn, self._expected, self._ran = turn, set(canaries), False
        self._made_room = False
        deadline_seconds = JOB_SECONDS + LONGEST_SECONDS * len(canaries)
        self._job = daemon.supervisor.spawn("canaries", settings, deadline_seconds, self._ended)

    def _ended(self, message: Message) -> None:
        """Count what the job has not come to, and let the machine come to rest."""
        turn, now_ns = self._turn, monotonic_ns()
        assert turn is not None
        if message["status"] != 0 and not self._ending:
            how = "it took too long" if message.get("late") else f"status {message['status']}"
            log.warning("canaries: their process ended early (%s): %s", how, message["output"])
        self._skip(sorted(self._expected), turn.gpu, self._ending or "other")
        self._schedule.ended(turn, now_ns, started=True, ran=self._ran, made_room=self._made_room)
        self._job = self._turn = None
        self._ending = ""
        self._blind_until_ns = now_ns + AFTER_NS

    def take(self, results: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Take in what canaries gave, the job's or those of a user; return what is thought of it.

        `retest` if it is not believed yet, `loss` is a confirmed one of that canary, a share, and
        `node_loss` one that all GPUs of the node share.
        """
        judged = []
        for result in results:
            canary, gpu = str(result.get("canary")), result.get("gpu")
            again = self._daemon.canary_ledger.take(result)
            at_once = result.get("at_once") or ([] if gpu is None else [gpu])
            numbers = isinstance(at_once, list) and all(isinstance(one, int) for one in at_once)
            if again and not self.hindrance and numbers:
                self._schedule.want(canary, tuple(at_once) or self._some(result), monotonic_ns())
            self._expected.discard(canary)
            ran = result.get("result") in ("ok", "wrong", "failed")
            self._ran |= ran
            came = result.get("result") == "aborted" or result.get("reason") == "busy"
            self._made_room |= came
            if ran and self._job is None and numbers:
                for one in at_once or [None]:
                    self._schedule.ran(one, monotonic_ns())
            judged.append({"canary": canary, "gpu": gpu, "retest": again})
        losses = self._daemon.baseline.facts(by_uuid(self._daemon))
        for one in judged:
            entity = HOST if one["gpu"] is None else Entity("gpu", str(one["gpu"]))
            name = f'canary_loss_ratio{{canary="{one["canary"]}"}}'
            one["loss"] = losses.get(entity, {}).get(name)
            one["node_loss"] = losses.get(HOST, {}).get("canary_node_loss_ratio")
        return judged

    def _some(self, result: Mapping[str, Any]) -> tuple[int, ...]:
        """Return between which GPUs something was measured, () if all that are here."""
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            numbers = {int(one) for one in result["environment"]["gpu_set"].split(",")}
            if numbers < {int(gpu.id) for gpu in by_uuid(self._daemon).values()}:
                return tuple(sorted(numbers))
        return ()

    def quiet(self, reason: str, done: Quiet) -> None:
        """End what runs; `done` gets the processes that still do, none once all have ended."""
        if self._job is not None:
            self._ending = reason
            self._daemon.supervisor.cancel(self._job)
        self._waiting.append((monotonic_ns() + QUIET_NS, done))

    def resumed(self) -> None:
        """Go on after a time in which none might run."""
        self._schedule.wake()

    def _answer(self, now_ns: int) -> None:
        """Tell those who wait for quiet, once nothing runs or it takes too long."""
        for waiting in list(self._waiting):
            deadline_ns, done = waiting
            runs = self._job is not None or canary_host.session_runs(self._lock)
            holders = canary_host.processes(self._lock)
            ending = holders and not self._strays  # killed with their job, they take a moment
            if (runs or ending) and now_ns < deadline_ns:
                continue
            self._waiting.remove(waiting)
            holders = holders or ([0] if runs else [])  # a session between two of its canaries
            done([{"pid": pid, "call": "a canary"} for pid in holders])

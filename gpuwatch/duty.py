"""Keeping one sampler alive: restart with back-off, abandon what hangs, probe what was sick."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuwatch.child import EXIT_UNAVAILABLE
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.process import Process, cause

log = logging.getLogger("gpuwatch.supervisor")

CAPABILITIES: Mapping[str, tuple[str, ...]] = {
    "state": ("SYS_NICE",),
    # Environments of jobs, which take both: their files are closed, and so are their processes.
    "counters": ("DAC_READ_SEARCH", "SYS_PTRACE"),
    # Either lets it have hardware counters: the narrower one only drivers from 565 on.
    "pm": ("PERFMON", "SYS_ADMIN"),
    "host": ("SYSLOG",),
}
START_DEADLINE_NS = 30 * SECOND_NS
SILENT_DEADLINE_NS = 10 * SECOND_NS
SILENT = "does nothing"
STEADY_NS = 60 * SECOND_NS  # who ran this long starts again without delay
RETIRED_AT_MOST = 3
MAX_DELAY_SECONDS = 30.0
PROBE_SECONDS = (5.0, 300.0)  # first and longest wait before a sick entity is tried again
HUNG_AT_MOST = 3  # children left in calls to one entity; then the next waits for one to return


@dataclass(slots=True)
class Suspect:
    """An entity that hung a child: left out until a probe of it alone comes back.

    `hung` are the children it holds: the first, and probes that did not come back either.
    """

    probe_at_ns: int
    wait_seconds: float
    hung: list[Process] = field(default_factory=list)
    probe: Process | None = None


class Duty:
    """One sampler process after another. `poll` is called about ten times a second."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        changed: Callable[[], None],
        *,
        released: bool = False,
    ) -> None:
        self.name = name
        self.settings = dict(settings)
        self.restarts = 0
        self.process: Process | None = None
        self.abandoned: list[Process] = []
        self.suspects: dict[str, Suspect] = {}
        self._returned: dict[str, tuple[float, int]] = {}  # the wait before, and when it came back
        self._known: list[str] = []  # entities of a child that hung: to list them may hang too
        self._speechless: list[Process] = []  # abandoned in calls to no entity
        self.reason = ""
        self._phase = ""
        self._changed = changed
        self._start_at_ns = 0
        self._failures = 0
        self._attempt = 0
        self.stopping = False
        self.released = released  # left to another tool: nothing runs until it is given back
        self._told_to_end = False  # of the present child
        self._retired: list[tuple[int, int]] = []  # (when, generation): its rings go then
        self._generation = 0

    def poll(self) -> None:
        """Look after the child: reap, start, judge its pulse, probe."""
        self._reap()
        now = monotonic_ns()
        due = now >= self._start_at_ns and len(self._speechless) < HUNG_AT_MOST
        if self.process is None and due:
            self._start()
        if self.process is not None:
            self._judge(self.process)
        for entity, suspect in list(self.suspects.items()):
            self._probe(entity, suspect)
        while self._retired and now >= self._retired[0][0]:
            self._delete_rings(self._retired.pop(0)[1])

    def reload(self, settings: Mapping[str, Any]) -> None:
        """Start the child anew with other settings, also of a duty that was stopped."""
        self.settings = dict(settings)
        self.stopping = False
        self._told_to_end = True
        if self.process is not None:
            self.process.terminate()

    def stop(self) -> None:
        """Ask everything of this duty to end; `processes` says what is left."""
        self.stopping = True
        for process in self.processes():
            process.terminate()

    def set_released(self, released: bool) -> None:
        """Let go of the hardware, or take it up again; nothing if it is so already."""
        if released == self.released:
            return
        self.released = released
        self.reason = ""
        if released:
            self._told_to_end = True
            for process in self.processes():
                process.terminate()
            return
        now = monotonic_ns()
        self._start_at_ns, self._failures, self._attempt = now, 0, 0
        for suspect in self.suspects.values():  # a reset may have healed it
            suspect.probe_at_ns = now

    @property
    def _resting(self) -> bool:
        """Whether nothing is to be started."""
        return self.stopping or self.released

    def remove_files(self) -> None:
        """Remove what a duty that was switched off had announced, and its rings."""
        for _, generation in self._retired:
            self._delete_rings(generation)
        self._remove_manifest()

    def processes(self) -> list[Process]:
        """Return all that still run, the abandoned and probes too."""
        probes = [suspect.probe for suspect in self.suspects.values()]
        found = [self.process, *self.abandoned, *probes]
        return [process for process in found if process is not None and process.status is None]

    def stuck(self) -> bool:
        """Return whether a child of this duty sits in a call that does not return."""
        return any(process.status is None for process in self.abandoned)

    def advancing(self) -> bool:
        """Return whether the child makes progress, or what keeps it is known and has a deadline."""
        process = self.process
        return process is None or process.in_call or process.still_ns < 2 * SILENT_DEADLINE_NS

    def report(self) -> dict[str, Any]:
        """Return what the daemon publishes of this duty."""
        process = self.process
        return {
            "duty": self.name,
            "pid": process.pid if process else 0,
            "generation": self._generation,
            "phase": process.phase if process else "released" if self.released else "waiting",
            "reason": self.reason,
            "restarts": self.restarts,
            "stuck": self.stuck(),
            "excluded": sorted(self.suspects),
            "holding": [
                {
                    "pid": process.pid,
                    "call": process.pulse.reading() or process.phase,
                    "stuck": process in self.abandoned,
                }
                for process in (self.processes() if self.released else ())
            ],
        }

    def _start(self) -> None:
        """Start the next child, unless none is wanted."""
        if self._resting:
            return
        self._generation += 1
        self._told_to_end = False
        excluded = sorted(self.suspects)
        settings = {"excluded": excluded, "known": self._known, "attempt": self._attempt}
        self.process = self._spawn(settings)
        if self.process is None:
            self._start_at_ns = monotonic_ns() + int(MAX_DELAY_SECONDS * SECOND_NS)
        self._changed()

    def _spawn(self, settings: Mapping[str, Any]) -> Process | None:
        """Return a new child of the present generation; None if the host allows no more."""
        sampler = ("gpuwatch.sampler", self.name)
        try:
            return Process(
                ("gpuwatch.replay",) if self.name == "replay" else sampler,
                {**self.settings, **settings},
                generation=self._generation,
                keep=CAPABILITIES.get(self.name, ()),
            )
        except OSError as error:
            self.reason = f"cannot be started: {error.strerror}"
            log.error("duty %s %s", self.name, self.reason)
            return None

    def _reap(self) -> None:
        for process in [process for process in self.abandoned if process.status is not None]:
            log.info("duty %s: abandoned child %d has ended", self.name, process.pid)
            self.abandoned.remove(process)
            if process in self._speechless:
                self._speechless.remove(process)
                self._start_at_ns = min(self._start_at_ns, monotonic_ns())
            for suspect in self.suspects.values():
                if process in suspect.hung:
                    suspect.hung.remove(process)
                    suspect.probe_at_ns = min(suspect.probe_at_ns, monotonic_ns())
            process.close()
            self._changed()
        ended = self.process
        status = ended.status if ended is not None else None
        if ended is None or status is None:
            return
        self.process = None
        lived = ended.lived_ns
        if status == EXIT_UNAVAILABLE:
            self._attempt += 1
        elif self._told_to_end or self._resting:
            pass
        else:
            self.restarts += 1
            self._failures = 1 if lived > STEADY_NS else self._failures + 1
            delay = min(MAX_DELAY_SECONDS, 0.1 * 4.0 ** (self._failures - 1))
            self._start_at_ns = monotonic_ns() + int(delay * SECOND_NS)
            self.reason = f"child ended by {cause(status)}"
            log.warning("duty %s: %s: starting again in %g s", self.name, self.reason, delay)
        if self._resting:  # else a daemon would take its rings for a sampler's that stands still
            self._remove_manifest()
        self._retire(ended.generation)
        ended.close()
        self._changed()

    def _judge(self, process: Process) -> None:
        before = self.reason
        process.look()
        phase, reading = process.phase, process.pulse.reading()
        if process.still_ns > self._deadline_ns(process):
            if process.in_call:
                self._abandon(process, reading)
            else:
                self._end_silent(process)
        elif phase == "unavailable":
            self.reason = process.pulse.names()[0]
        elif phase == "running":
            self._attempt = 0
            self.reason = ""
        if self.reason != before:
            if self.reason:
                log.warning("duty %s: %s", self.name, self.reason)
            else:
                log.info("duty %s: running", self.name)
        if (self.reason, phase) != (before, self._phase):
            self._phase = phase
            self._changed()

    @property
    def _section(self) -> Mapping[str, Any]:
        """The duty's own section of the config; a replay reads no device."""
        config: Mapping[str, Any] = self.settings["config"]
        return config.get(self.name, config["state"])  # type: ignore[no-any-return]

    def _deadline_ns(self, process: Process) -> float:
        """Return how long the child may stand still where it is now."""
        match process.phase:
            case "opening" | "closing":
                return float(self._section["init_deadline_seconds"]) * SECOND_NS
            case "running" if process.in_call:
                return float(self._section["read_deadline_seconds"]) * SECOND_NS
            case "starting":
                return START_DEADLINE_NS
            case _:
                return SILENT_DEADLINE_NS

    def _abandon(self, process: Process, entity: str | None) -> None:
        """Leave a child in its call and start another without the entity that holds it."""
        process.abandon()
        self.abandoned.append(process)
        self._retire(process.generation)
        self.process = None
        self.restarts += 1
        now = monotonic_ns()
        if entity is None:
            self.reason = "the driver does not answer"
            self._speechless.append(process)
            self._start_at_ns = now + int(MAX_DELAY_SECONDS * SECOND_NS)
            return
        self._known = process.pulse.names()
        wait, returned_ns = self._returned.get(entity, (0.0, 0))
        # One that comes back only to hang again is left alone for longer each time.
        again = now - returned_ns < STEADY_NS
        wait = min(PROBE_SECONDS[1], wait * 2) if again else PROBE_SECONDS[0]
        self.suspects[entity] = Suspect(now + int(wait * SECOND_NS), wait, [process])
        log.error(
            "duty %s: %s holds a driver call (child %d): going on without it",
            self.name,
            entity,
            process.pid,
        )
        self._start()

    def _end_silent(self, process: Process) -> None:
        """Kill a child that is in no driver call and does nothing."""
        if self.reason != SILENT:
            self.reason = SILENT
            log.error("duty %s: child %d %s: killing it", self.name, process.pid, SILENT)
        process.kill()
        if process.still_ns > SILENT_DEADLINE_NS + 2 * SECOND_NS:  # it cannot even be killed
            self._abandon(process, None)

    def _probe(self, entity: str, suspect: Suspect) -> None:
        probe = suspect.probe
        if probe is None:
            due = monotonic_ns() >= suspect.probe_at_ns and len(suspect.hung) < HUNG_AT_MOST
            if due and not self._resting:
                suspect.probe = self._spawn({"only": entity, "known": self._known})
                suspect.probe_at_ns = monotonic_ns() + int(suspect.wait_seconds * SECOND_NS)
            return
        probe.look()
        if probe.status == 0 and not self._resting:
            log.info("duty %s: %s answers again", self.name, entity)
            probe.close()
            del self.suspects[entity]
            self._returned[entity] = (suspect.wait_seconds, monotonic_ns())
            self.reload(self.settings)
            self._changed()
            return
        if probe.status is not None:
            probe.close()
        elif probe.still_ns > self._section["init_deadline_seconds"] * SECOND_NS:
            probe.abandon()
            self.abandoned.append(probe)
            suspect.hung.append(probe)
        else:
            return
        suspect.probe = None
        suspect.wait_seconds = min(PROBE_SECONDS[1], suspect.wait_seconds * 2)
        suspect.probe_at_ns = monotonic_ns() + int(suspect.wait_seconds * SECOND_NS)

    def _retire(self, generation: int) -> None:
        """Keep of a child that ended its rings alone, as long as a ring reaches back."""
        runtime = Path(self.settings["config"]["paths"]["runtime"])
        (runtime / f"{self.name}.{generation}.sock").unlink(missing_ok=True)
        keep_seconds = self.settings["config"]["ring"]["seconds"]
        while len(self._retired) >= RETIRED_AT_MOST:  # of a child that ends again and again
            self._delete_rings(self._retired.pop(0)[1])
        self._retired.append((monotonic_ns() + int(keep_seconds * SECOND_NS), generation))

    def _remove_manifest(self) -> None:
        runtime = Path(self.settings["config"]["paths"]["runtime"])
        (runtime / f"{self.name}.json").unlink(missing_ok=True)

    def _delete_rings(self, generation: int) -> None:
        for path in Path(self.settings["ring_directory"]).glob(f"*.{generation}.*.ring"):
            if path.name.startswith(f"{self.name}.") or self.name == "replay":
                path.unlink(missing_ok=True)

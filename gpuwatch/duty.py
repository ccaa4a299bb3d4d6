"""Keeping one sampler alive: restart with back-off, abandon what hangs, probe what was sick."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuwatch.child import EXIT_UNAVAILABLE
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.process import Process

log = logging.getLogger("gpuwatch.supervisor")

CAPABILITIES: Mapping[str, tuple[str, ...]] = {"state": ("SYS_NICE",)}
START_DEADLINE_NS = 30 * SECOND_NS
SILENT_DEADLINE_NS = 10 * SECOND_NS
STEADY_NS = 60 * SECOND_NS  # who ran this long starts again without delay
MAX_DELAY_SECONDS = 30.0
PROBE_SECONDS = (5.0, 300.0)  # first and longest wait before a sick entity is tried again


@dataclass(slots=True)
class Suspect:
    """An entity that hung a child: left out until a probe of it alone comes back."""

    probe_at_ns: int
    wait_seconds: float
    culprit: Process
    probe: Process | None = None


class Duty:
    """One sampler process after another. `poll` is called about ten times a second."""

    def __init__(self, name: str, settings: Mapping[str, Any], changed: Callable[[], None]) -> None:
        self.name = name
        self.settings = dict(settings)
        self.restarts = 0
        self.process: Process | None = None
        self.abandoned: list[Process] = []
        self.suspects: dict[str, Suspect] = {}
        self.reason = ""
        self._changed = changed
        self._start_at_ns = 0
        self._failures = 0
        self._attempt = 0
        self._stopping = False
        self._restarting = False
        self._retired: list[tuple[int, int]] = []  # (when, generation): its rings go then
        self._generation = 0

    def poll(self) -> None:
        """Look after the child: reap, start, judge its pulse, probe."""
        self._reap()
        now = monotonic_ns()
        if self.process is None and not self._stopping and now >= self._start_at_ns:
            self._start()
        if self.process is not None:
            self._judge(self.process)
        for entity, suspect in list(self.suspects.items()):
            self._probe(entity, suspect)
        while self._retired and now >= self._retired[0][0]:
            self._delete_rings(self._retired.pop(0)[1])

    def reload(self, settings: Mapping[str, Any]) -> None:
        """Start the child anew with other settings."""
        self.settings = dict(settings)
        self._restarting = True
        if self.process is not None:
            self.process.terminate()

    def stop(self) -> None:
        """Ask everything of this duty to end; `processes` says what is left."""
        self._stopping = True
        for process in self.processes():
            process.terminate()

    def processes(self) -> list[Process]:
        """Return all that still run, the abandoned and probes too."""
        probes = [suspect.probe for suspect in self.suspects.values()]
        found = [self.process, *self.abandoned, *probes]
        return [process for process in found if process is not None and process.status is None]

    def stuck(self) -> bool:
        """Return whether a child of this duty sits in a call that does not return."""
        return any(process.status is None for process in self.abandoned)

    def advancing(self) -> bool:
        """Return whether the child makes progress, or what keeps it is known and reported."""
        return self.process is None or self.process.still_ns < 2 * SILENT_DEADLINE_NS

    def report(self) -> dict[str, Any]:
        """Return what the daemon publishes of this duty."""
        process = self.process
        return {
            "duty": self.name,
            "pid": process.pid if process else 0,
            "generation": self._generation,
            "phase": process.phase if process else "waiting",
            "reason": self.reason,
            "restarts": self.restarts,
            "stuck": self.stuck(),
            "excluded": sorted(self.suspects),
        }

    def _start(self) -> None:
        self._generation += 1
        settings = {
            **self.settings,
            "excluded": sorted(self.suspects),
            "attempt": self._attempt,
        }
        sampler = ("gpuwatch.sampler", self.name)
        arguments = ("gpuwatch.replay",) if self.name == "replay" else sampler
        self.process = Process(
            arguments,
            settings,
            generation=self._generation,
            keep=CAPABILITIES.get(self.name, ()),
        )
        self._restarting = False
        self._changed()

    def _reap(self) -> None:
        for process in [process for process in self.abandoned if process.status is not None]:
            log.info("duty %s: abandoned child %d has ended", self.name, process.pid)
            self.abandoned.remove(process)
            for suspect in self.suspects.values():
                if suspect.culprit is process:
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
        elif self._restarting or self._stopping:
            pass
        else:
            self.restarts += 1
            self._failures = 1 if lived > STEADY_NS else self._failures + 1
            delay = min(MAX_DELAY_SECONDS, 0.1 * 4.0 ** (self._failures - 1))
            self._start_at_ns = monotonic_ns() + int(delay * SECOND_NS)
            self.reason = f"child ended by {_cause(status)}"
            log.warning("duty %s: %s: starting again in %g s", self.name, self.reason, delay)
        self._retire(ended.generation)
        ended.close()
        self._changed()

    def _judge(self, process: Process) -> None:
        before = self.reason
        process.look()
        state = self.settings["config"]["state"]
        reading = process.pulse.reading()
        match process.phase:
            case "unavailable":
                self.reason = process.pulse.names()[0]
            case "running":
                self._attempt = 0
                self.reason = ""
                if reading is not None and process.still_ns > state["read_deadline_seconds"] * 1e9:
                    self._abandon(process, reading)
                elif process.still_ns > SILENT_DEADLINE_NS:
                    self._end_silent(process)
            case "opening":
                if process.still_ns > state["init_deadline_seconds"] * 1e9:
                    self._abandon(process, reading)
            case _:
                if process.still_ns > START_DEADLINE_NS:
                    self._end_silent(process)
        if self.reason != before:
            if self.reason:
                log.warning("duty %s: %s", self.name, self.reason)
            else:
                log.info("duty %s: running", self.name)
            self._changed()

    def _abandon(self, process: Process, entity: str | None) -> None:
        """Leave a child in its call and start another without the entity that holds it."""
        process.abandon()
        self.abandoned.append(process)
        self._retire(process.generation)
        self.process = None
        self._changed()
        if entity is None:
            # A second call would hang as the first does: wait until this one returns.
            self.reason = "the driver does not answer"
            log.error("duty %s: %s: waiting for it", self.name, self.reason)
            self._start_at_ns = monotonic_ns() + int(MAX_DELAY_SECONDS * SECOND_NS)
            return
        self.restarts += 1
        known = self.suspects.get(entity)
        wait = min(PROBE_SECONDS[1], known.wait_seconds * 2) if known else PROBE_SECONDS[0]
        self.suspects[entity] = Suspect(
            monotonic_ns() + int(wait * SECOND_NS), wait, culprit=process
        )
        log.error(
            "duty %s: %s holds a driver call (child %d): going on without it",
            self.name,
            entity,
            process.pid,
        )
        self._start()

    def _end_silent(self, process: Process) -> None:
        """Kill a child that is in no driver call and does nothing."""
        log.error("duty %s: child %d does nothing: killing it", self.name, process.pid)
        process.kill()
        if process.still_ns > SILENT_DEADLINE_NS + 2 * SECOND_NS:  # it cannot even be killed
            self._abandon(process, None)

    def _probe(self, entity: str, suspect: Suspect) -> None:
        probe = suspect.probe
        if probe is not None:
            probe.look()
            if probe.status is None:
                return
            suspect.probe = None
            answered = probe.status == 0
            probe.close()
            if answered:
                log.info("duty %s: %s answers again", self.name, entity)
                del self.suspects[entity]
                self.reload(self.settings)
                self._changed()
                return
            suspect.wait_seconds = min(PROBE_SECONDS[1], suspect.wait_seconds * 2)
            suspect.probe_at_ns = monotonic_ns() + int(suspect.wait_seconds * SECOND_NS)
        # While the first call still hangs, another would too.
        hangs = suspect.culprit in self.abandoned
        if not self._stopping and not hangs and monotonic_ns() >= suspect.probe_at_ns:
            suspect.probe = Process(
                ("gpuwatch.sampler", self.name),
                {**self.settings, "excluded": [], "only": entity},
                generation=self._generation,
            )

    def _retire(self, generation: int) -> None:
        """Keep the rings of a child that ended as long as a ring reaches back."""
        keep_seconds = self.settings["config"]["ring"]["seconds"]
        self._retired.append((monotonic_ns() + int(keep_seconds * SECOND_NS), generation))

    def _delete_rings(self, generation: int) -> None:
        for path in Path(self.settings["ring_directory"]).glob(f"*.{generation}.*.ring"):
            if path.name.startswith(f"{self.name}.") or self.name == "replay":
                path.unlink(missing_ok=True)


def _cause(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"

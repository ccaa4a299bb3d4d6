"""The daemon's ends of its siblings' channels: the supervisor's, and one to each sampler."""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.control import Connection, Message, connect
from gpuwatch.process import settings_file
from gpuwatch.signals import Event

log = logging.getLogger("gpuwatch.daemon")

PACKET_BYTES = 256 * 1024
RELEASE_NS = 15 * SECOND_NS  # a child that stands still outside a call is killed after 10 s

Done = Callable[[Message], object]


class SupervisorChannel:
    """Hears what the children do, asks for one-off jobs, has duties let go; never waits."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._jobs: dict[int, Done] = {}
        self._number = 0
        self._release = 0
        self._heard = 0  # the latest release that the supervisor's reports know of
        self._releases: list[tuple[int, int, Done]] = []  # number, deadline, who waits
        self.children: list[Message] = []

    def ready(self) -> None:
        """Say that the endpoint listens."""
        self._send({"ready": True})

    def renew(self) -> None:
        """Have another daemon started when this one ends, which it is asked to."""
        self._send({"renew": True})

    def release(self, duties: Iterable[str], done: Done | None = None) -> None:
        """Have exactly these duties let go of the hardware, and all others go on.

        `done` gets {"holding"}: nobody once they have let go, else the processes that still hold
        it, when all of them are stuck or after some seconds; {"error"} if the supervisor is silent.
        """
        self._release += 1
        self._send({"release": sorted(duties), "number": self._release})
        if done is not None:
            self._releases.append((self._release, monotonic_ns() + RELEASE_NS, done))

    def spawn(
        self,
        kind: str,
        settings: Mapping[str, Any],
        deadline_seconds: float,
        done: Done,
    ) -> int:
        """Have a job run; `done` gets its result, `status`, `output`, `late`. Return its number."""
        self._number += 1
        request = {"spawn": kind, "job": self._number, "deadline_seconds": deadline_seconds}
        descriptor = settings_file(settings)
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [descriptor])
        finally:
            os.close(descriptor)
        self._jobs[self._number] = done
        return self._number

    def cancel(self, job: int) -> None:
        """Have a job end before its time; it is killed if it does not within seconds."""
        self._send({"cancel": job})

    def poll(self) -> None:
        """Take in what has come."""
        with contextlib.suppress(BlockingIOError):
            while packet := self._socket.recv(PACKET_BYTES):
                message = json.loads(packet)
                if "children" in message:
                    self.children, self._heard = message["children"], message["release"]
                elif "job" in message and message["job"] in self._jobs:
                    self._jobs.pop(message["job"])(message)
        self._answer_releases()

    def _answer_releases(self) -> None:
        """Tell who waits, once a report that knows of the request says how it is."""
        holding = [one for report in self.children for one in report.get("holding", ())]
        for waiting in list(self._releases):
            number, deadline_ns, done = waiting
            late = monotonic_ns() > deadline_ns
            if self._heard >= number and (late or all(one["stuck"] for one in holding)):
                done({"holding": holding})
            elif late:
                done({"error": "the supervisor does not answer: see the log"})
            else:
                continue
            self._releases.remove(waiting)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.send(json.dumps(message).encode())


class SamplerChannels:
    """A conversation with each sampler's present child: its events and states."""

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self._connections: dict[str, tuple[int, Connection]] = {}
        self._heard: dict[str, tuple[int, int]] = {}  # generation, number of its last event
        self._errors: dict[str, tuple[int, dict[str, int]]] = {}  # by source, with the generation
        self._ended: dict[str, dict[str, int]] = {}  # counts of earlier generations
        self.states: dict[str, str] = {}

    def poll(self, generations: Mapping[str, int]) -> list[tuple[str, Event]]:
        """Return new events with their duty; `generations` are the children to talk to."""
        events = []
        for duty, generation in generations.items():
            known = self._connections.get(duty)
            if known is None or known[0] != generation:
                self._connect(duty, generation)
            connection = self._connections.get(duty)
            if connection is not None:
                events += self._hear(duty, connection[1])
        return events

    def send(self, duty: str, message: Mapping[str, Any]) -> bool:
        """Send a command; False if that sampler cannot be reached."""
        connection = self._connections.get(duty)
        return connection is not None and connection[1].send(message)

    def total_errors(self, source: str) -> dict[str, int]:
        """Return the source's errors by name, over all its children: never falling."""
        total = dict(self._ended.get(source, {}))
        for error, count in self._errors.get(source, (0, {}))[1].items():
            total[error] = total.get(error, 0) + count
        return total

    def _connect(self, duty: str, generation: int) -> None:
        old = self._connections.pop(duty, None)
        if old is not None:
            old[1].close()
        connection = connect(self._runtime / f"{duty}.{generation}.sock")
        if connection is None:
            return
        if self._heard.get(duty, (0, 0))[0] != generation:
            self._heard[duty] = (generation, 0)
        if connection.send({"command": "events", "after": -1}):
            self._connections[duty] = (generation, connection)

    def _hear(self, duty: str, connection: Connection) -> list[tuple[str, Event]]:
        events = []
        try:
            while (message := connection.receive()) is not None:
                if "event" in message:
                    generation, last = self._heard[duty]
                    number = int(message["sequence"])
                    if number > last:  # after a lost connection all are told again
                        self._heard[duty] = (generation, number)
                        events.append((duty, Event.from_json(message["event"])))
                elif "state" in message:
                    self._take_state(self._heard[duty][0], message["state"])
        except EOFError:
            connection.close()
            del self._connections[duty]
        except (ValueError, KeyError, TypeError) as error:
            log.error("duty %s: a message that is none: %s", duty, error)
        return events

    def _take_state(self, generation: int, state: Mapping[str, Any]) -> None:
        for source, told in state["sources"].items():
            self.states[source] = str(told["state"])
        for source, errors in state["errors"].items():
            if source in self._errors and self._errors[source][0] != generation:
                self._ended[source] = self.total_errors(source)  # a new child counts from 0
            self._errors[source] = (generation, dict(errors))


class ProcessorTime:
    """CPU seconds by duty, over all children a duty has had: never falling."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._now: dict[str, tuple[int, float]] = {}

    def look(self, duty: str, pid: int) -> float:
        """Return the duty's seconds so far, with those of its present process (0: none)."""
        known_pid, known = self._now.get(duty, (pid, 0.0))
        if known_pid != pid:
            self._before[duty] = self._before.get(duty, 0.0) + known
            known = 0.0
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            known = times.user + times.system
        self._now[duty] = (pid, known)
        return self._before.get(duty, 0.0) + known

"""The supervisor: starts, watches and restarts everything else; never serves, never samples.

Bare Python: no HTTP, no driver, no numpy. It validates the config in a short child, locks the
runtime directory, binds the sockets, starts the daemon and, once that listens, the samplers.
"""

import contextlib
import errno
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuwatch import logs, systemd
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.duty import Duty
from gpuwatch.errors import INTERNAL, USAGE
from gpuwatch.job import Job
from gpuwatch.process import Process, cause
from gpuwatch.reload import Reload
from gpuwatch.startup import CRASHED, Validation, prepared

log = logging.getLogger("gpuwatch.supervisor")

STOPS = frozenset({signal.SIGTERM, signal.SIGINT})
LOOP_SECONDS = 0.1
REPORT_NS = SECOND_NS
DAEMON_SILENT_NS = 10 * SECOND_NS
DAEMON_START_NS = 60 * SECOND_NS
STOP_NS = 20 * SECOND_NS  # below systemd's TimeoutStopSec
POLITE_NS = 8 * SECOND_NS
PACKET_BYTES = 64 * 1024
MAX_DELAY_SECONDS = 10.0

# Config sections that a child must be started anew for; a sampler also for that of its own name.
SAMPLER_SECTIONS = frozenset({"simulated", "ring", "collectors", "log"})
DAEMON_SECTIONS = frozenset(
    {"rules", "gpus", "canary", "ring", "recorder", "history", "collectors", "log"}
)


def run(request: Mapping[str, Any]) -> int:
    """Run until SIGTERM or SIGINT; return the exit status.

    `request` is what `gpuwatch.config` reads: config file, overrides and source. Raises
    ConfigError if the config, a directory or a port cannot be used: then nothing was started.
    """
    signals: set[int] = set()  # from the start, so that a stop in the midst of it is clean too
    for number in (*STOPS, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda number, _frame: signals.add(number))
    validation = Validation(request)
    while (config := validation.poll()) is None:
        if signals & STOPS:
            validation.kill()
            return 0
        select.select([], [], [], 0.01)
    logs.configure(config["log"])
    with prepared(config) as (sockets, rings):
        return Supervisor(Reload(request), config, sockets, rings, signals).run()


class Supervisor:
    """The life of the daemon and its samplers."""

    def __init__(
        self,
        reload: Reload,
        config: dict[str, Any],
        sockets: list[socket.socket],
        rings: Path,
        signals: set[int],
    ) -> None:
        self.config = config
        self.sockets = sockets
        self.rings = rings
        self.duties: list[Duty] = []
        self.jobs: list[Job] = []
        self.daemon: Process | None = None
        self.daemon_restarts = 0
        self._daemon_failures = 0
        self._daemon_fault = ""
        self._daemon_start_ns = 0
        self._channel: socket.socket | None = None
        self._generation = 0
        self._reported_ns = 0
        self._signals = signals  # that have come and were not heeded yet
        self._ready = False
        self._reload = reload
        self._renewing = False  # the daemon ends because it was asked to, for another one
        self._released: frozenset[str] = frozenset()  # duties left to other tools
        self._release = 0  # number of the latest request that said so
        self._status = 0

    def run(self) -> int:
        """Supervise until told to stop."""
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        watchdog = systemd.watchdog_seconds()
        fed_ns = 0
        while not self._signals & STOPS and not self._status:
            # Another reload while one is under way is the next one, however often it was asked for.
            if signal.SIGHUP in self._signals and not self._reload.running:
                self._signals.discard(signal.SIGHUP)
                self._reload.begin()
            if (config := self._reload.poll(self.config)) is not None:
                self._take(config)
            self._poll_daemon()
            self._poll_duties()
            self._poll_jobs()
            now = monotonic_ns()
            if now - self._reported_ns > REPORT_NS:
                self._report()
                self._keep_directories()
            if watchdog and now - fed_ns > watchdog * SECOND_NS / 4 and self._healthy():
                systemd.watchdog()
                fed_ns = now
            waiting = [wake, *([self._channel] if self._channel else [])]
            select.select(waiting, [], [], LOOP_SECONDS)
            with contextlib.suppress(BlockingIOError):
                wake.recv(4096)
            self._hear_daemon()
        self._stop()
        log.info("stopped")
        return self._status

    def _healthy(self) -> bool:
        """Return whether systemd may be told that all is well.

        A hung GPU is reported, not a reason to have the endpoint killed.
        """
        served = self.daemon is not None and self.daemon.still_ns < DAEMON_SILENT_NS
        return served and all(duty.advancing() for duty in self.duties)

    def _poll_daemon(self) -> None:
        now = monotonic_ns()
        daemon = self.daemon
        if daemon is None:
            if now >= self._daemon_start_ns:
                self._start_daemon()
            return
        daemon.look()
        limit = DAEMON_SILENT_NS if daemon.phase == "running" else DAEMON_START_NS
        if daemon.status is None:
            if daemon.still_ns > limit:
                log.error("daemon %d does not advance: killing it", daemon.pid)
                daemon.kill()
                daemon.still_ns = 0
            return
        if not self._ready and not self._renewing:
            log.error("the daemon ended by %s before it listened", cause(daemon.status))
            self._status = USAGE if daemon.status == USAGE else INTERNAL
            return
        if not self._renewing:
            self.daemon_restarts += 1
            self._daemon_failures += 1
            if daemon.lived_ns > DAEMON_START_NS:
                self._daemon_failures = 1
            delay = 0 if self._daemon_failures == 1 else 2.0 ** (self._daemon_failures - 2)
            self._daemon_start_ns = now + int(min(delay, MAX_DELAY_SECONDS) * SECOND_NS)
            log.warning("the daemon ended by %s: starting it again", cause(daemon.status))
        self._renewing = False
        self._drop_daemon()

    def _drop_daemon(self) -> None:
        if self.daemon is not None:
            self.daemon.close()
        self.daemon = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        for job in self.jobs:  # nobody waits for them any more
            job.awaited = False
            job.end()

    def _start_daemon(self) -> None:
        self._generation += 1
        # If the host allows no more processes now, the next try may find it otherwise.
        self._daemon_start_ns = monotonic_ns() + SECOND_NS
        try:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channel.setblocking(False)
            descriptors = [theirs.fileno(), *(listener.fileno() for listener in self.sockets)]
            with theirs:
                self.daemon = Process(
                    ("gpuwatch.daemon",),
                    {
                        "config": self.config,
                        "channel": theirs.fileno(),
                        "sockets": descriptors[1:],
                        "crashed": str(self.rings / CRASHED),
                    },
                    generation=self._generation,
                    death_signal=signal.SIGKILL,  # it must not hold the port when we are gone
                    descriptors=descriptors,
                )
            self._daemon_fault = ""
        except OSError as error:
            fault = error.strerror or str(error)
            if fault != self._daemon_fault:  # it is tried again each second
                self._daemon_fault = fault
                log.error("the daemon cannot be started: %s", fault)
            self._drop_daemon()

    def _sampler_settings(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "ring_directory": str(self.rings),
            "ready_ns": monotonic_ns(),
        }

    def _start_duties(self) -> None:
        """Start the samplers that the config asks for and that do not run yet."""
        running = {duty.name for duty in self.duties}
        settings = self._sampler_settings()
        self.duties += [
            Duty(name, settings, self._report, released=name in self._released)
            for name in self.config["duties"]
            if name not in running
        ]

    def _poll_duties(self) -> None:
        for duty in list(self.duties):
            duty.poll()
            if duty.stopping and not duty.processes():
                duty.remove_files()
                self.duties.remove(duty)
                self._start_duties()  # it may have been switched on again meanwhile

    def _hear_daemon(self) -> None:
        while self._channel is not None:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._channel, PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            if not packet:  # it has ended: the next look at it says how
                self._channel.close()
                self._channel = None
                return
            message = json.loads(packet)
            if "ready" in message:
                self._daemon_is_ready()
            elif "release" in message:
                self._set_released(message)
            elif "renew" in message:
                self._renew_daemon()
            elif "spawn" in message:
                self._spawn(message, descriptors)
            elif "cancel" in message:
                for job in self.jobs:
                    if job.awaited and job.number == message["cancel"]:
                        job.end()

    def _daemon_is_ready(self) -> None:
        if not self._ready:
            self._ready = True
            self._start_duties()
            names = [listener.getsockname()[:2] for listener in self.sockets]
            hosts = [
                f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in names
            ]
            source = self.config["source"]
            more = source["file"] or source["scenario"] if source["kind"] != "nvml" else ""
            what = f"{source['kind']} {more}".strip()
            status = f"serving {what} on {', '.join(hosts)}"
            systemd.ready(status)
            log.info("ready: %s", status)
        self._report()

    def _set_released(self, message: Mapping[str, Any]) -> None:
        """Leave exactly the named duties to other tools."""
        self._released, self._release = frozenset(message["release"]), message["number"]
        for duty in self.duties:
            duty.set_released(duty.name in self._released)
        self._report()

    def _renew_daemon(self) -> None:
        """Have the daemon end, and another one start in its place."""
        if self.daemon is not None:
            self._renewing = True
            self.daemon.terminate()

    def _spawn(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        try:
            if not descriptors:  # the kernel drops what there is no room for
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            kind, deadline = message["spawn"], message["deadline_seconds"]
            self.jobs.append(Job(message["job"], kind, descriptors[0], deadline))
        except (OSError, KeyError) as error:  # too many processes; a kind that is none
            output = json.dumps({"error": f"{message['spawn']} cannot be started: {error}"})
            self._send({"job": message["job"], "status": INTERNAL, "output": output})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _poll_jobs(self) -> None:
        for job in list(self.jobs):
            result = job.poll()
            if result is not None:
                self.jobs.remove(job)
                if job.awaited:
                    self._send(result)

    def _report(self) -> None:
        """Tell the daemon what its siblings do."""
        self._reported_ns = monotonic_ns()
        children = [duty.report() for duty in self.duties]
        own = {"duty": "supervisor", "pid": os.getpid(), "restarts": 0}
        daemon = {
            "duty": "daemon",
            "pid": self.daemon.pid if self.daemon else 0,
            "restarts": self.daemon_restarts,
        }
        self._send({"children": [own, daemon, *children], "release": self._release})

    def _keep_directories(self) -> None:
        """Make the directories again that a stranger removed: no child could start without."""
        for path, mode in ((Path(self.config["paths"]["runtime"]), 0o755), (self.rings, 0o750)):
            with contextlib.suppress(OSError):
                path.mkdir(mode)
                log.warning("%s was removed: made again", path)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._channel is not None:
            # A daemon that does not read is found by its pulse.
            with contextlib.suppress(OSError):
                self._channel.send(json.dumps(message).encode())

    def _take(self, config: dict[str, Any]) -> None:
        """Go on with a changed config: only whom the change is about starts anew."""
        old, self.config = self.config, config
        changed = {name for name in config if config[name] != old[name]}
        log.info("config reloaded: %s", ", ".join(sorted(changed)) or "nothing changed")
        for duty in self.duties:
            if duty.name not in config["duties"]:
                duty.stop()
            elif changed & {*SAMPLER_SECTIONS, duty.name}:
                duty.reload(self._sampler_settings())
        if self._ready:
            self._start_duties()
        if changed & DAEMON_SECTIONS:
            self._renew_daemon()
        systemd.ready()

    def _stop(self) -> None:
        """End all children; none is killed inside a driver call."""
        systemd.stopping("Stopping")
        start = monotonic_ns()
        for duty in self.duties:
            duty.stop()
        for job in self.jobs:
            job.end()
        self._reload.kill()
        while left := [process for duty in self.duties for process in duty.processes()]:
            passed = monotonic_ns() - start
            known = {process for duty in self.duties for process in duty.abandoned}
            if passed > POLITE_NS + SECOND_NS or (passed > SECOND_NS and known.issuperset(left)):
                break
            for process in left:
                if passed > POLITE_NS and not process.in_call:
                    process.kill()
            select.select([], [], [], 0.02)
        while self.jobs and monotonic_ns() - start < 2 * SECOND_NS:  # they put things away
            self.jobs = [job for job in self.jobs if job.poll() is None]
            select.select([], [], [], 0.02)
        for job in self.jobs:
            job.kill()
        if self.daemon is not None:
            self.daemon.terminate()
            start = monotonic_ns()
            while self.daemon.status is None and monotonic_ns() - start < STOP_NS - POLITE_NS:
                if monotonic_ns() - start > POLITE_NS:
                    self.daemon.kill()
                select.select([], [], [], 0.02)
        for process in left:
            log.error(
                "child %d is in a driver call (%s) and is left to end by itself",
                process.pid,
                process.pulse.reading() or process.phase,
            )

"""The daemon: closes ticks, judges them, serves what is known. It never calls a driver."""

import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuwatch import logs
from gpuwatch import pulse as page
from gpuwatch.alerts import AlertEngine
from gpuwatch.archive import Archive
from gpuwatch.baseline import Baseline
from gpuwatch.byte_history import kept_of
from gpuwatch.canary_ledger import TOLD, CanaryLedger
from gpuwatch.canary_runner import CanaryRunner
from gpuwatch.child import Child
from gpuwatch.clock import SECOND_NS, ClockWatch, monotonic_ns
from gpuwatch.control import Message, Server
from gpuwatch.dcgm import Past
from gpuwatch.errors import INTERNAL, ConfigError
from gpuwatch.event_log import EventLog
from gpuwatch.evidence import FlightRecorder
from gpuwatch.exposition import Exposition
from gpuwatch.facts import by_uuid, gather, in_trouble, seen_rates, seen_slots
from gpuwatch.feed import Feed
from gpuwatch.idle import IdleTime
from gpuwatch.inventory import Inventory
from gpuwatch.kernel_log import OVERRUN, OWN_OOM_KILL
from gpuwatch.lease import Leases, this_boot
from gpuwatch.lost_time import LostTime
from gpuwatch.manifest import entities_of
from gpuwatch.minute import Minute
from gpuwatch.pages import Pages, Shelf
from gpuwatch.paths import DATABASE
from gpuwatch.place import Place, names_of
from gpuwatch.presence import Presence
from gpuwatch.repeats import Repeats
from gpuwatch.requests import answer
from gpuwatch.rules import RULES
from gpuwatch.siblings import Done, ProcessorTime, SamplerChannels, SupervisorChannel
from gpuwatch.signals import HOST, Event
from gpuwatch.simulated_canaries import SimulatedCanaries
from gpuwatch.snapshot import ChildState
from gpuwatch.standings import Standings
from gpuwatch.status import READER, snapshot
from gpuwatch.store import Store
from gpuwatch.topology import given_gpus, pci_gpus
from gpuwatch.totals import Totals
from gpuwatch.verdict import VerdictFile
from gpuwatch.web import WebServer
from gpuwatch.window import Tick

log = logging.getLogger("gpuwatch.daemon")

LOOK_SECONDS = 0.125
EVENTS_KEPT, EVENTS_SHOWN = 10_000, 200
UPKEEP_NS = SECOND_NS
# Events that an operator should see at the usual level of a log.
WARNINGS = frozenset(
    TOLD
    | {"sampling_budget", "gpu_lost", "gpu_unreachable", "clock_step", "suspended", "tick_failed"}
    | {
        OWN_OOM_KILL,
        OVERRUN,
        "page_failed",
        "recording_failed",
        "rdma_device_lost",
        "rdma_quarantined",
        "rdma_unit_fault",
    }
)
FAULT_QUIET_NS = 60 * SECOND_NS  # a bug that is met at every tick must not fill the log


class Daemon:
    """Everything between rings and web pages; one thread, beside the web server's."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.config = child.config
        paths = self.config["paths"]
        self.runtime = Path(paths["runtime"])
        self.state = Path(paths["state"])
        self.store = Store(self.state / DATABASE)
        self.feed = Feed(
            self.runtime,
            self.store,
            {source: duty for duty, sources in self.config["duties"].items() for source in sources},
            float(self.config["ring"]["seconds"]),
        )
        boot_id = this_boot()
        self.engine = AlertEngine(RULES, self.config["rules"], self.store, boot_id)
        self.leases = Leases(self.store, boot_id)
        self.baseline = Baseline(self.store, lambda about: in_trouble(self, about))
        self.canary_ledger = CanaryLedger(self.baseline, self.note, self.config["canary"]["run"])
        self.standings = Standings(self.config["source"]["file"])
        self.simulated_canaries = SimulatedCanaries(self)
        self.idle = IdleTime()
        self.made_up = self.config["source"]["kind"] != "nvml"
        given = 0 if self.made_up else given_gpus(Path(paths["sysfs"]))
        self.inventory = Inventory(self.store, given)
        self._severities = {rule.name: rule.severity for rule in RULES}
        for alert in self.engine.alerts():
            if alert.state == "firing":
                log.warning("%s still fires, %s: from before this start", alert.rule, alert.entity)
        self.started_ns = monotonic_ns()
        self.totals = Totals(self.started_ns)
        self.minute = Minute()
        self.lost_time = LostTime()
        self.presence = Presence()
        self._exposition = Exposition()
        self._past = Past()
        self.events, self.events_shown = EventLog(EVENTS_KEPT), EventLog(EVENTS_SHOWN)
        self.ticks: tuple[Tick, ...] = ()
        self.ticks_closed = 0
        self._waiting: deque[Tick] = deque()
        self.archive = Archive(self.state, self.config, boot_id, self.made_up)
        self.recorder = FlightRecorder(self)
        self.supervisor = SupervisorChannel(child.settings["channel"])
        self.samplers = SamplerChannels(self.runtime)
        self.control = Server(self.runtime / "control.sock", 0o666)
        self.canary_runner = CanaryRunner(self)
        self.processor_time = ProcessorTime()
        self.children = {
            duty: ChildState() for duty in ("supervisor", "daemon", *self.config["duties"])
        }
        self._repeats = Repeats()
        self._clock_watch = ClockWatch()
        self._upkeep_ns = 0
        self.addresses: list[str] = []  # of GPUs on the PCI bus
        self.gpus_pci: int | None = None
        self.gpus_expected: int | None = None
        self.nvml_up: bool | None = None
        self._verdict = VerdictFile(self.runtime)
        self._verdict_fault = ""
        self._shelf = Shelf()
        self._place = Place()
        self._status: dict[str, Any] = {}
        self._store_fault = ""
        self._fault = ""
        self._fault_told_ns = 0
        self._rings_seen: set[Path] = set()
        sockets = [socket.socket(fileno=number) for number in child.settings["sockets"]]
        web = self.config["web"]
        self.web = WebServer(
            sockets, self, scrapes=web["max_requests"], config_file=web["config_file"]
        )

    def run(self) -> int:
        """Work until told to stop."""
        self._publish()
        self.web.start()
        self.follow_leases()  # before anybody may touch what is released
        self.supervisor.ready()
        self.recorder.salvage(Path(self.child.settings["crashed"]))
        self.child.beat(page.RUNNING)
        while not self.child.stopping and self.web.serving:
            start = time.monotonic()
            self.child.beat(page.RUNNING)
            try:
                self.on_tick(monotonic_ns())
            except Exception as fault:  # noqa: BLE001 - the one guard: the endpoint outlives a bug
                self._tell_fault(fault, monotonic_ns())
            time.sleep(max(0.01, LOOK_SECONDS - (time.monotonic() - start)))
        self.web.stop()
        self.control.close()
        self._write_history()
        self.archive.close()
        self.store.close()
        if not self.child.stopping:
            log.error("the web server ended: the daemon must be started anew")
            return INTERNAL
        return 0

    def follow_leases(self, done: Done | None = None) -> None:
        """Have exactly what is released now let go; `done` hears who does not."""
        self.feed.release(self.leases.duties)
        self.feed.facts = gather(self)
        self.supervisor.release(self.leases.duties, done)

    def _tell_fault(self, fault: Exception, now_ns: int) -> None:
        if repr(fault) != self._fault or now_ns - self._fault_told_ns > FAULT_QUIET_NS:
            self._fault, self._fault_told_ns = repr(fault), now_ns
            log.error("tick failed", exc_info=fault)
            self._keep(Event(now_ns, HOST, "tick_failed"))

    def on_tick(self, now_ns: int) -> None:
        """Take in what has come; close, judge and publish the ticks that are complete."""
        self.supervisor.poll()
        if now_ns - self._upkeep_ns >= UPKEEP_NS:
            self._upkeep_ns = now_ns
            self._upkeep(now_ns)
        generations = {duty: manifest.generation for duty, manifest in self.feed.live.items()}
        for duty, event in self.samplers.poll(generations):
            told = self.feed.add_event(duty, event)
            if told is not None:
                self.note(told)
        self.feed.hear(self.samplers.states)
        self._waiting += self.feed.poll(now_ns)
        closed = len(self._waiting)
        while self._waiting:  # one that fails is lost alone
            self._take(self._waiting.popleft())
            self.child.beat(page.RUNNING)
        if closed:
            self._publish()
        for connection, message in self.control.poll():
            answer(self, connection, message)
        self.canary_runner.look(now_ns)
        self.recorder.look(now_ns)

    def _take(self, tick: Tick) -> None:
        if self._rings_seen != self.feed.rings.keys():
            self._rings_seen = set(self.feed.rings)
            for ring in self.feed.rings.values():
                if ring.current:
                    self.totals.attach(ring.columns, ring.windows.schema.name)
            self.minute.attach(self.feed.columns)
            self.lost_time.attach(self.feed.entities)
            self.archive.attach(self.feed.columns)
        self.totals.note(tick.events)
        # What a restarted daemon reads again from the rings is judged, but was counted before.
        if tick.start_ns >= self.started_ns:
            for event in self.totals.add(tick):
                self.note(event)
        self.minute.add(tick)
        self.lost_time.add(tick)
        self.archive.add(tick)
        events = self.engine.judge(tick)
        for event in events:
            self.note(event)
        self.recorder.hear((*events, *tick.events))
        if self.feed.released:
            self.engine.drop_pending()
        self.ticks = (tick, *self.ticks[:1])
        self.ticks_closed += 1

    def note(self, event: Event) -> None:
        """Keep an event and log it as it deserves, unless it is one of very many alike."""
        self._keep(event)
        self.archive.note(event)
        if event.time_ns < self.started_ns - SECOND_NS:
            return  # told again by a sampler, or read again from its rings: logged when it was new
        if not self._repeats.worth_a_line(event):
            return
        rule, _, state = event.name.rpartition("_")
        severity = self._severities.get(rule) if state == "firing" else None
        level = {"critical": logging.ERROR, "warning": logging.WARNING}.get(severity or "")
        log.log(
            level or (logging.WARNING if event.name in WARNINGS else logging.INFO),
            "%s, %s%s",
            event.name,
            event.entity,
            f": {event.detail}" if event.detail else "",
        )

    def _keep(self, event: Event) -> None:
        self.events.add(event)
        self.events_shown.add(event)

    def _upkeep(self, now_ns: int) -> None:
        for line in self._repeats.left_out(now_ns):
            log.info("%s", line)
        step_ns, suspend_ns = self._clock_watch.look()
        if step_ns:
            detail = f"{step_ns / SECOND_NS:+.3f} s"
            self.note(Event(now_ns, HOST, "clock_step", detail))
        if suspend_ns:
            self.note(Event(now_ns, HOST, "suspended", f"{suspend_ns / SECOND_NS:.0f} s"))
        stepped = bool(step_ns or suspend_ns)
        if stepped or self.archive.is_due(now_ns):
            self._write_history(stepped=stepped)
        if self.store.fault != self._store_fault:
            self._store_fault = self.store.fault
            log.warning("state: %s", self._store_fault or "written to disk again")
        for what in self.leases.look():
            self.note(Event(now_ns, HOST, "resumed", f"{what}: its time is over"))
            self.follow_leases()
            self.canary_runner.resumed()
        self._look_at_gpus()
        for report in self.supervisor.children:
            duty, pid = report["duty"], report["pid"]
            cpu_seconds = self.processor_time.look(duty, pid)
            self.minute.add_processor_time(duty, cpu_seconds)
            self.children[duty] = ChildState(
                restarts=report["restarts"],
                stuck=report.get("stuck", False),
                cpu_seconds=cpu_seconds,
            )
        cpu_seconds = self.web.reader_cpu_seconds
        self.minute.add_processor_time(READER, cpu_seconds)
        self.children[READER] = ChildState(cpu_seconds=cpu_seconds)

    def _write_history(self, *, stepped: bool = False) -> None:
        constants = {duty: manifest.constants for duty, manifest in self.feed.live.items()}
        rings = [path for path, ring in self.feed.rings.items() if kept_of(ring.reader.schema)]
        self.archive.hand_over(
            self.feed.entities, constants, self.recorder.kept, rings=rings, stepped=stepped
        )

    def _look_at_gpus(self) -> None:
        """Compare the GPUs, and the links, that are here with those that belong here."""
        seen = seen_slots(self)
        if self.made_up:
            told = entities_of(self.feed.manifests.values())
            gpus = [info.labels for info in told if info.entity.kind == "gpu"]
            self.addresses = [gpu["pci_bus_id"] for gpu in gpus if "pci_bus_id" in gpu]
            self.gpus_pci = len(self.addresses) or None
        else:
            self.addresses = pci_gpus(Path(self.config["paths"]["sysfs"]))
            self.gpus_pci = len(self.addresses)
            self.store.gpu_numbers(self.addresses)  # in order, before anybody speaks of one alone
        for event in self.inventory.look(seen):
            self.note(event)
        self.inventory.look_at_ports(seen_rates(self))
        configured = self.config["gpus"]["expected"]
        self.gpus_expected = (
            self.inventory.expected(configured, self.gpus_pci or 0) or self.gpus_pci
        )
        self.feed.facts = gather(self)
        ledger = self.canary_ledger
        self.standings.look(self.baseline, by_uuid(self), ledger.runs, ledger.skips)

    def whole_status(self) -> Sequence[Message]:
        """Return the newest status with the minute before it, as packets."""
        return self._shelf.newest.whole(self.minute)

    # What the web server shows; called from its thread.

    def metrics(self) -> bytes:
        """Return the newest page of metrics."""
        return self._shelf.metrics().plain

    def metrics_gzip(self) -> bytes:
        """Return the newest page of metrics, compressed."""
        return self._shelf.metrics().compressed

    def dcgm(self) -> bytes:
        """Return the newest page under dcgm-exporter's names."""
        return self._shelf.dcgm().plain

    def dcgm_gzip(self) -> bytes:
        """Return the newest page under dcgm-exporter's names, compressed."""
        return self._shelf.dcgm().compressed

    def status(self) -> dict[str, Any]:
        """Return the newest status."""
        return self._shelf.status()

    def canaries(self) -> Sequence[Mapping[str, Any]]:
        """Return the last readings of canaries."""
        return self.standings.courses

    def place(self) -> Place:
        """Return where samples and recordings lie."""
        return self._place

    def ready(self) -> bool:
        """Return whether a closed window is shown yet."""
        return bool(self._shelf.newest.shown.ticks)

    def _publish(self) -> None:
        shown = snapshot(self)
        if shown.verdict is not None:
            self._keep_verdict(shown.verdict)
        self._shelf.newest = Pages(shown, self._exposition, self._past.add(shown))
        self._place = Place(
            rings=self.feed.ring_paths(),
            names=names_of(self.feed),
            history=str(self.state / "history"),
            recordings=str(self.state / "recordings"),
            rules=self.config["rules"],
        )
        while self._shelf.faults:
            self.note(Event(monotonic_ns(), HOST, "page_failed", self._shelf.faults.popleft()))

    def _keep_verdict(self, verdict: Mapping[str, Any]) -> None:
        fault = self._verdict.publish(verdict)
        if fault and fault != self._verdict_fault:
            log.warning("%s", fault)
        self._verdict_fault = fault


def main() -> int:
    """Run the daemon until it is told to stop."""
    child = Child()
    logs.configure(child.config["log"])
    try:
        return Daemon(child).run()
    except ConfigError as error:
        for line in str(error).splitlines():
            log.error("%s", line)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""The sampler: reads groups when they are due and puts the rows into rings.

`python -m gpuwatch.sampler DUTY` is one process with one thread and nothing else in it: a busy
Python thread beside a 1 kHz loop, or a slow driver call beside a fast one, ruins the fast one.
Lateness is data (each row keeps it), missed slots are skipped and count as missing.
"""

import contextlib
import ctypes
import gc
import heapq
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuwatch import logs
from gpuwatch import pulse as page
from gpuwatch.budget import Budget
from gpuwatch.child import Child, no_room
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.control import Connection, Message, Server
from gpuwatch.errors import SourceUnavailable, SourceUnsupported
from gpuwatch.event_log import EventLog
from gpuwatch.ring import W_HEARTBEAT, W_WATERMARK
from gpuwatch.signals import HOST, Event
from gpuwatch.source import STANDBY, Context, Opened, Source, constant_to_json
from gpuwatch.sources import sources_of
from gpuwatch.task import Rings, Task

CONTROL_PERIOD_NS = 50 * MILLISECOND_NS
HOUSEKEEPING_NS = SECOND_NS
BUDGET_PERIOD_NS = 5 * SECOND_NS
UNSUPPORTED_NS = 10 * SECOND_NS  # what a source has nothing to read of may come
REALTIME_PRIORITY = 1
PR_SET_TIMERSLACK = 29


class Sampler:
    """One duty: its sources, their rings, the schedule and the daemon's control channel."""

    def __init__(self, child: Child, duty: str, sources: list[Source]) -> None:
        self.child = child
        self.duty = duty
        self.sources = sources
        self.runtime = Path(child.config["paths"]["runtime"])
        self.events = EventLog()
        self.tasks: list[Task] = []
        self._schedule: list[tuple[int, int, Task | None]] = []  # due, order, what (None: control)
        self._rings = Rings(child, duty)
        self.opened: dict[str, Opened] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.scales = {source.name: 1.0 for source in sources}  # as asked for; 0 is off
        self._told: dict[Connection, int] = {}
        self._state_sent: Message = {}
        self._housekept_ns = 0
        self._sought_ns = 0
        self._budget_ns = 0
        self._cpu_seconds = 0.0
        self._budget = Budget(float(child.config[duty]["budget_ratio"]))
        self._budget_scale = 1.0

    def open(self) -> None:
        """Open the sources. Raises SourceUnavailable if none works that could."""
        child = self.child
        child.beat(page.OPENING)
        settings = child.settings
        self._context = Context(
            settings=settings,
            pulse=child.pulse,
            sysfs=Path(child.config["paths"]["sysfs"]),
            procfs=Path(child.config["paths"]["procfs"]),
            excluded=frozenset(settings.get("excluded", ())),
            known=tuple(settings.get("known", ())),
            only=settings.get("only"),
            runtime=self.runtime,
        )
        for source in self.sources:
            found = self._open(source)
            state = self.states[source.name]
            if found is not None:
                self.opened[source.name] = found
            elif state["state"] == "unsupported":
                event = Event(monotonic_ns(), HOST, "source_unsupported", state["reason"])
                self.events.add(event)
        states = self.states.values()
        faults = [state["reason"] for state in states if state["state"] == "unavailable"]
        if faults and not self.opened:
            raise SourceUnavailable("; ".join(faults))

    def _open(self, source: Source) -> Opened | None:
        """Open one source and note how it is; return what it found, None if it cannot work."""
        found = None
        try:
            found = source.open(self._context)
            self.states[source.name] = _state_of(found)
        except SourceUnavailable as fault:
            state = "unsupported" if isinstance(fault, SourceUnsupported) else "unavailable"
            self.states[source.name] = {"state": state, "reason": str(fault)}
        finally:
            self.child.pulse.words[page.READING] = page.NOT_READING
        return found

    def make_rings(self) -> None:
        """Make the ring files and announce them in the manifest.

        Raises OSError if there is no space for them.
        """
        for source, opened in self.opened.items():
            for group in opened.groups:
                self.tasks.append(self._rings.task(source, group))
        self._write_manifest()

    def _take_over(self, source: str, found: Opened, now: int) -> None:
        """Go on with what is there now: groups with other columns get new rings.

        Raises OSError if there is no space for them.
        """
        self.opened[source] = found
        if self.scales[source]:
            self.states[source] = _state_of(found)
        old = {task.group.name: task for task in self.tasks if task.source == source}
        tasks = [task for task in self.tasks if task.source != source]
        for group in found.groups:
            task = old.get(group.name)
            if task is not None and task.group.columns == group.columns:
                task.group = group
                del old[group.name]
            else:
                task = self._rings.task(source, group)
            tasks.append(task)
        for task in old.values():
            self._rings.end(task, now)
        self.tasks = tasks
        self._set_periods()
        self._plan(now)
        self._write_manifest()

    def remove_rings(self) -> None:
        """Give back the space of rings that nobody was told of."""
        for task in self.tasks:
            task.writer.path.unlink(missing_ok=True)

    def _write_manifest(self) -> None:
        opened = self.opened.values()
        about = {
            "sources": self.states,
            "entities": [info.to_json() for found in opened for info in found.entities],
            "tenants": [tenant.to_json() for found in opened for tenant in found.tenants],
            "constants": [
                constant_to_json(column, value)
                for found in opened
                for column, value in found.constants
            ],
        }
        self.child.announce(self.duty, [task.writer.path for task in self.tasks], about)

    def run(self) -> int:
        """Sample until told to stop or abandoned; return the exit status.

        Raises SourceUnavailable when a source as a whole has stopped working.
        """
        server = Server(self.runtime / f"{self.duty}.{self.child.generation}.sock", 0o600)
        try:
            return self._loop(server)
        finally:
            server.close()

    def _loop(self, server: Server) -> int:
        child, words = self.child, self.child.pulse.words
        generation = child.generation
        self._plan(monotonic_ns() + MILLISECOND_NS)
        child.beat(page.RUNNING)
        while not child.stopping:
            schedule = self._schedule
            due, order, task = schedule[0]
            now = monotonic_ns()
            if due > now:
                time.sleep((due - now) * 1e-9)
                now = monotonic_ns()
            words[page.HEARTBEAT] = now
            if task is None:
                self._control(server, now)
                period = CONTROL_PERIOD_NS
                if words[page.GENERATION] != generation:
                    break
                if self._schedule is not schedule:  # made anew
                    continue
            elif self.scales[task.source] == 0:
                period = SECOND_NS
            elif (read := task.group.read) is None:
                task.drain(now)
                period = task.period_ns
            else:
                cells = read()
                done = monotonic_ns()
                # A read may have hung for minutes: then another child has taken over.
                if words[page.GENERATION] != generation:
                    break
                writer = task.writer
                writer.append(now, (now - due) * 1e-9, (done - now) * 1e-9, cells)
                writer.words[W_WATERMARK] = now
                period = task.period_ns
            due += period
            if due <= now:
                due += ((now - due) // period + 1) * period
            heapq.heapreplace(schedule, (due, order, task))
        return 0

    def _plan(self, start: int) -> None:
        """Make the schedule anew: what is in it stays due, what is new is due within a second."""
        planned = {id(task): due for due, _, task in self._schedule if task is not None}
        self._schedule = [
            (planned.get(id(task), start + task.group.phase_ns), order, task)
            for order, task in enumerate(self.tasks)
        ]
        self._schedule.append((start + CONTROL_PERIOD_NS, len(self._schedule), None))
        heapq.heapify(self._schedule)

    def _control(self, server: Server, now: int) -> None:
        for task in self.tasks:
            task.writer.words[W_HEARTBEAT] = now
            if task.group.drain is None or not self.scales[task.source]:
                task.writer.words[W_WATERMARK] = now
        for connection, message in server.poll():
            self._answer(connection, message)
        if now - self._housekept_ns >= HOUSEKEEPING_NS:
            self._housekept_ns = now
            for task in self.tasks:
                if not task.writer.intact:
                    path = task.writer.path
                    raise SourceUnavailable(f"{path}: removed or overwritten: starting anew")
                task.writer.note_clocks()
            self._keep_budget(now)  # what it changes in a source is told at once
            for source in self.sources:
                if source.name in self.opened:
                    found = source.housekeep(now)
                    if found is not None:
                        self._take_over(source.name, found, now)
            self._seek(now)
            self._rings.sweep(now)
        for source in self.sources:
            events, source.findings.events = source.findings.events, []
            for event in events:
                self.events.add(event)
        self._tell(server)

    def _seek(self, now: int) -> None:
        """Try again to open what this machine had nothing of, a device plugged in late, say."""
        if now - self._sought_ns < UNSUPPORTED_NS:
            return
        before, self._sought_ns = self._sought_ns, now
        for source in self.sources if before else ():
            if self.states[source.name]["state"] == "unsupported":
                found = self._open(source)
                if found is not None:
                    self._take_over(source.name, found, now)

    def _answer(self, connection: Connection, message: Mapping[str, Any]) -> None:
        match message:
            case {"command": "events", "after": int(after)}:
                self._told[connection] = after
            case {"command": "interval", "source": str(source), "scale": int() | float() as scale}:
                if source in self.opened and 0 <= scale <= 10_000:
                    self._set_scale(source, float(scale))
            case {"command": "latest"}:
                for ask in filter(None, (task.group.ask for task in self.tasks)):
                    ask()
            case {"command": "stop"}:
                self.child.stopping = True
            case _:
                connection.send({"error": f"unknown command: {json.dumps(message)[:200]}"})

    def _set_scale(self, source: str, scale: float) -> None:
        """Read a source more slowly, as its user asks; 0 is off."""
        self.scales[source] = scale
        off = {"state": "off", "reason": ""}
        self.states[source] = _state_of(self.opened[source]) if scale else off
        self._set_periods()

    def _set_periods(self) -> float:
        """Have all go on at their scales; return the largest that the budget's has led to."""
        asked = [(task, self.scales[task.source]) for task in self.tasks]
        slowed = [(task.scale(scale * self._budget_scale), scale) for task, scale in asked]
        steps = [now / scale for now, scale in slowed if scale]
        return max(1.0, *steps) if steps else self._budget_scale

    def _tell(self, server: Server) -> None:
        """Send new events, and the state when it changed, to each connection that asked."""
        errors = {source.name: dict(source.findings.errors) for source in self.sources}
        state: Message = {"state": {"sources": self.states, "errors": errors}}
        text = json.loads(json.dumps(state)) if state != self._state_sent else self._state_sent
        for connection in list(self._told):
            if connection not in server.connections:
                del self._told[connection]
                continue
            told = self._told[connection]
            messages = self.events.after(told)
            self._told[connection] = messages[-1]["sequence"] if messages else max(told, 0)
            if text is not self._state_sent or told < 0:
                messages.append(text)
            for message in messages:
                if not connection.send(message):
                    server.drop(connection)
                    break
        self._state_sent = text

    def _keep_budget(self, now: int) -> None:
        """Sample more slowly while this process takes more of a core than it may."""
        cpu = time.process_time()
        if not self._budget_ns:
            self._budget_ns, self._cpu_seconds = now, cpu
        if now - self._budget_ns < BUDGET_PERIOD_NS:
            return
        share = (cpu - self._cpu_seconds) * SECOND_NS / (now - self._budget_ns)
        self._budget_ns, self._cpu_seconds = now, cpu
        before = self._budget_scale
        scale = self._budget.scale(before, share) if any(self.scales.values()) else before
        if scale == before:
            return
        self._budget_scale = scale
        slowest = self._set_periods()
        if scale > before:  # what it uses from now on is of these steps
            self._budget_scale = scale = slowest
        if scale != before:
            detail = f"{self.duty} used {share:.1%} of a core: periods x{scale:g} from now"
            self.events.add(Event(now, HOST, "sampling_budget", detail))


def _state_of(found: Opened) -> dict[str, str]:
    """Return how a source that was opened is, and why it is not better."""
    state = "on" if found.groups or not found.reason else "unavailable"
    return {"state": STANDBY if found.standby else state, "reason": found.reason}


def probe(sampler: Sampler) -> int:
    """Read every group of a suspect entity once; 0 if all of it answered."""
    sampler.open()
    sampler.child.beat(page.RUNNING)
    up = all(_state_of(opened)["state"] != "unavailable" for opened in sampler.opened.values())
    for opened in sampler.opened.values():
        for group in opened.groups:
            for _, cells in group.rows(monotonic_ns()):
                for column, value in zip(group.columns, cells, strict=True):
                    if column.signal.name == "gpu_up":
                        up = up and value == 1
    return 0 if up else 1


def prepare_process(realtime: bool) -> None:
    """Make this process wake on time: no timer slack, and realtime priority if the host allows."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    if realtime:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(
                0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(REALTIME_PRIORITY)
            )
    # What was made so far stays: the collector need not walk it in the loop.
    gc.collect()
    gc.freeze()


def main() -> int:
    """Run one duty until it is told to stop."""
    child = Child()
    duty = sys.argv[1]
    logs.configure(child.config["log"])
    sampler = Sampler(child, duty, sources_of(duty, child.settings))
    try:
        if child.settings.get("only"):
            return probe(sampler)
        sampler.open()
        if child.stopping or not child.current:  # it hung in there: another may have taken over
            return 0
        try:
            sampler.make_rings()
        except OSError:
            sampler.remove_rings()
            raise
        prepare_process(bool(child.config[duty]["realtime"]))
        return sampler.run()
    except SourceUnavailable as fault:
        return child.unavailable(str(fault))
    except OSError as fault:
        return child.unavailable(no_room(fault))
    finally:
        if child.current:
            child.beat(page.CLOSING)
            for source in sampler.sources:
                if source.name in sampler.opened:
                    source.close()


if __name__ == "__main__":
    sys.exit(main())

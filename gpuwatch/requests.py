"""The users' control socket: what may be asked of the running daemon, and by whom."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwatch import pulse as page
from gpuwatch.baseline_file import load
from gpuwatch.canary_host import interpreter
from gpuwatch.clock import monotonic_ns
from gpuwatch.control import Connection, Message
from gpuwatch.errors import ConfigError
from gpuwatch.facts import answers, seen_rates, seen_slots
from gpuwatch.lease import HOLDERS, LONGEST_SECONDS
from gpuwatch.signals import HOST, Event
from gpuwatch.source import USER
from gpuwatch.store import SlotRow
from gpuwatch.topology import in_bus_order

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon

MAX_RECORD_SECONDS = 3600.0
FREE = ("status", "inventory")  # for every user of the machine


def answer(daemon: "Daemon", connection: Connection, message: Mapping[str, Any]) -> None:
    """Do what a user asks and answer: at once, or when a recording is written or a GPU let go.

    Root and the daemon's own user may do all, others read; who has a process on a GPU may release
    and resume hardware counters.
    """
    if not _may(daemon, connection.peer.uid, message):
        connection.send({"error": "only root may do that: ask with sudo"})
        return
    match message:
        case {"command": "status", "whole": True}:
            for packet in daemon.whole_status():
                connection.send(packet)
        case {"command": "status"}:
            connection.send(_brief(daemon))
        case {"command": "inventory"}:
            connection.send(_inventory(daemon))
        case {"command": "accept"}:
            _accept(daemon, connection)
        case {"command": "release", "what": str(what), "seconds": int() | float() as seconds}:
            _release(daemon, connection, what, _float(seconds))
        case {"command": "resume", "what": str(what)}:
            _resume(daemon, connection, what)
        case {"command": "record", "last_seconds": int() | float() as seconds}:
            _record(daemon, connection, _float(seconds))
        case {"command": "canary_results", "results": list(results)}:
            _take_results(daemon, connection, results)
        case {"command": "import_baselines", "path": str(path), "replace": bool(replace)}:
            _import_baselines(daemon, connection, path, replace)
        case {"command": "acknowledge"}:
            connection.send({"acknowledged": daemon.engine.acknowledge()})
        case {"command": "interval", "source": str(source), "scale": int() | float() as scale}:
            _set_interval(daemon, connection, source, _float(scale))
        case _:
            text = json.dumps(message)[:200]
            connection.send({"error": f"{text}: not a command with its arguments"})


def _may(daemon: "Daemon", uid: int, message: Mapping[str, Any]) -> bool:
    if message.get("command") in FREE or uid in (0, os.geteuid()):
        return True
    if message.get("command") not in ("release", "resume") or message.get("what") != "counters":
        return False
    return any(
        tenant.kind == USER and tenant.labels["uid"] == str(uid)
        for manifest in daemon.feed.live.values()
        for tenant in manifest.tenants
    )


def _float(number: float) -> float:
    """Return a number of JSON, which may be an integer too large for a float."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _brief(daemon: "Daemon") -> Message:
    keys = ("version", "source", "ready", "ticks_closed", "alerts", "sources", "state")
    found = {key: daemon.status()[key] for key in keys if key in daemon.status()}
    alerts = [dict(alert) for alert in found["alerts"]]
    for alert in alerts:
        del alert["causes"]  # with them very many alerts would be more than a packet holds
    settings = daemon.config["canary"]
    canary = {"python": interpreter(settings["python"]), "size": settings["size"]}
    return {**found, "alerts": alerts, "canary": canary}


def _set_interval(daemon: "Daemon", connection: Connection, source: str, scale: float) -> None:
    duty = next((d for d, m in daemon.feed.manifests.items() if source in m.sources), None)
    if duty is None:
        known = ", ".join(sorted(daemon.feed.states)) or "none"
        connection.send({"error": f"source {source}: not one of {known}"})
    elif scale != 0 and not 1 <= scale <= 10_000:
        connection.send({"error": f"scale {scale:g}: 0 (off) or 1 to 10000 times the period"})
    elif daemon.samplers.send(duty, {"command": "interval", "source": source, "scale": scale}):
        connection.send({"source": source, "scale": scale})
    else:
        connection.send({"error": f"source {source}: its sampler {duty} does not answer"})


def _fault(daemon: "Daemon", what: str) -> str:
    """Return why something can be neither released nor resumed here, "" if it can."""
    if what not in HOLDERS:
        return f"{what}: not one of {', '.join(HOLDERS)}"
    if HOLDERS[what] and not daemon.config["duties"].keys() & HOLDERS[what]:
        return f"{what}: no sampler of this gpuwatch holds them: there is nothing to release"
    return ""


def _release(daemon: "Daemon", connection: Connection, what: str, seconds: float) -> None:
    fault = _fault(daemon, what)
    if not fault and not 0 < seconds <= LONGEST_SECONDS:
        fault = f"seconds {seconds:g}: more than 0, at most {LONGEST_SECONDS:g}"
    if fault:
        connection.send({"error": fault})
        return
    daemon.leases.grant(what, seconds)
    daemon.note(Event(monotonic_ns(), HOST, "released", f"{what} for {seconds:g} s"))

    def quiet(canaries: Sequence[Message]) -> None:
        def done(result: Message) -> None:
            fault = daemon.store.fault
            told = {"released": what, "seconds": seconds, "fault": fault, **result}
            if "holding" in told:
                told["holding"] = [*canaries, *told["holding"]]
            connection.send(told)

        if HOLDERS[what]:
            daemon.follow_leases(done)
        else:
            done({"holding": []})

    if what == "counters":
        quiet(())
    else:
        daemon.canary_runner.quiet("paused" if what == "canaries" else "released", quiet)


def _resume(daemon: "Daemon", connection: Connection, what: str) -> None:
    was = daemon.leases.end(what)  # also of what was turned off meanwhile
    if not was and (fault := _fault(daemon, what)):
        connection.send({"error": fault})
        return
    if was:
        daemon.note(Event(monotonic_ns(), HOST, "resumed", what))
        daemon.follow_leases()
        daemon.canary_runner.resumed()
    connection.send({"resumed": what, "was_released": was})


def _present(daemon: "Daemon") -> list[str]:
    """Return the addresses of the GPUs that are here.

    A container sees the bus of its host, or none: there those count that its driver lists.
    """
    if daemon.addresses and not daemon.inventory.given:
        return daemon.addresses
    gpus = [info for info in daemon.feed.entities if info.entity.kind == "gpu"]
    return in_bus_order(gpu.labels["pci_bus_id"] for gpu in gpus if "pci_bus_id" in gpu.labels)


def _inventory(daemon: "Daemon") -> Message:
    """Return what belongs here, slot by slot, and how what is here compares."""
    present = _present(daemon)
    seen = {slot.pci_bus_id: slot.uuid for slot in seen_slots(daemon).values()}
    silent = {
        info.labels.get("pci_bus_id")
        for info in daemon.feed.entities
        if info.entity.kind == "gpu" and answers(daemon, info.entity) is False
    }

    def state(slot: SlotRow) -> str:
        if slot.pci_bus_id not in present:
            return "gone"
        if slot.pci_bus_id in silent:
            return "silent"
        uuid = seen.get(slot.pci_bus_id)
        return "unknown" if uuid is None else "present" if uuid == slot.uuid else "replaced"

    slots = daemon.inventory.slots
    return {
        "expected": daemon.gpus_expected,
        "slots": [
            {
                "gpu": daemon.store.numbers.get(address),
                "state": state(slots[address]),
                **slots[address]._asdict(),
                "uuid_now": seen.get(address),
            }
            for address in in_bus_order(slots)
        ],
    }


def _accept(daemon: "Daemon", connection: Connection) -> None:
    """Take what is here for what belongs here; GPUs are numbered anew if that changes a number."""
    seen = seen_slots(daemon)
    if not seen or daemon.config["source"]["kind"] == "replay":
        what = "a recording's GPUs are as they were" if seen else "no GPU answers now"
        connection.send({"error": f"{what}: there is nothing to accept"})
        return
    present = _present(daemon)
    gone = daemon.inventory.accept(present, seen.values())
    daemon.inventory.accept_ports(seen_rates(daemon))
    acknowledged = sum(map(daemon.engine.acknowledge, (HOST, *seen)))
    text = f"{len(present)} GPUs, gone: {', '.join(gone) or 'none'}"
    daemon.note(Event(monotonic_ns(), HOST, "inventory_accepted", text))
    others = in_bus_order(set(daemon.addresses) - set(present))  # a container's host has them
    order = [*present, *others]
    renumbered = daemon.store.numbers != {address: n for n, address in enumerate(order)}
    answer = {
        "accepted": len(present),
        "gone": gone,
        "acknowledged": acknowledged,
        "renumbered": renumbered,
    }

    def renumber(result: Message) -> None:
        """Start everything anew, once nobody speaks of a GPU by its address any more."""
        if "error" in result:
            connection.send(result)
            return
        daemon.store.renumber(order)
        daemon.supervisor.renew()
        daemon.child.stopping = True
        connection.send(answer)

    if renumbered:
        daemon.supervisor.release({*daemon.leases.duties, *HOLDERS["gpus"]}, renumber)
    else:
        connection.send(answer)


def _take_results(daemon: "Daemon", connection: Connection, results: Sequence[Any]) -> None:
    if not all(isinstance(one, dict) for one in results):
        connection.send({"error": "results: a list of objects is needed"})
        return
    connection.send({"judged": daemon.canary_runner.take(results)})


def _import_baselines(daemon: "Daemon", connection: Connection, path: str, replace: bool) -> None:
    def advance() -> None:
        daemon.child.beat(page.RUNNING)  # years of readings take longer than a daemon may be silent

    try:
        courses = load(Path(path), advance)
    except ConfigError as error:
        connection.send({"error": str(error)})
        return
    taken, left = daemon.baseline.take(courses, replace=replace, advance=advance)
    daemon.note(Event(monotonic_ns(), HOST, "baselines_imported", f"{taken} from {path}"))
    connection.send({"taken": taken, "left": left, "fault": daemon.store.fault})


def _record(daemon: "Daemon", connection: Connection, seconds: float) -> None:
    if not 0 < seconds <= MAX_RECORD_SECONDS:
        connection.send(
            {"error": f"last_seconds {seconds:g}: more than 0, at most {MAX_RECORD_SECONDS:g}"}
        )
        return
    daemon.recorder.request(seconds, connection.send)

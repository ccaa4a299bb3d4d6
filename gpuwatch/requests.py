"""The users' control socket: what may be asked of the running daemon, and by whom."""

import json
import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.control import Connection, Message
from gpuwatch.source import constant_to_json
from gpuwatch.status import alert_json

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon

RECORD_DEADLINE_SECONDS = 120.0
MAX_RECORD_SECONDS = 3600.0


def answer(daemon: "Daemon", connection: Connection, message: Mapping[str, Any]) -> None:
    """Do what a user asks and answer: at once, or for a recording when it is written.

    Root and the daemon's own user may do all, others read the status.
    """
    if message.get("command") != "status" and connection.peer.uid not in (0, os.geteuid()):
        connection.send({"error": "only root may do that: ask with sudo"})
        return
    match message:
        case {"command": "status"}:
            connection.send(_brief(daemon))
        case {"command": "record", "last_seconds": int() | float() as seconds}:
            _record(daemon, connection, _float(seconds))
        case {"command": "acknowledge"}:
            connection.send({"acknowledged": daemon.engine.acknowledge()})
        case {"command": "interval", "source": str(source), "scale": int() | float() as scale}:
            _set_interval(daemon, connection, source, _float(scale))
        case _:
            text = json.dumps(message)[:200]
            connection.send({"error": f"{text}: not a command with its arguments"})


def _float(number: float) -> float:
    """Return a number of JSON, which may be an integer too large for a float."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _brief(daemon: "Daemon") -> Message:
    keys = ("version", "source", "ready", "ticks_closed", "alerts", "sources", "state")
    return {key: daemon.status()[key] for key in keys if key in daemon.status()}


def _sampled_events(daemon: "Daemon", since_ns: int) -> list[dict[str, Any]]:
    """Return what happened, without what the rules said of it: a replay judges again."""
    rules = {rule for rule, _ in daemon.engine.transitions}
    return [
        event.to_json()
        for event in daemon.events
        if event.time_ns >= since_ns and event.name.rpartition("_")[0] not in rules
    ]


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


def _record(daemon: "Daemon", connection: Connection, seconds: float) -> None:
    if not 0 < seconds <= MAX_RECORD_SECONDS:
        connection.send(
            {"error": f"last_seconds {seconds:g}: more than 0, at most {MAX_RECORD_SECONDS:g}"}
        )
        return
    now = monotonic_ns()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    manifests = daemon.feed.manifests.values()
    since = now - int(seconds * SECOND_NS)
    directory = daemon.state / "recordings"
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as error:
        connection.send({"error": f"{directory}: {error.strerror}: make it writable"})
        return
    settings = {
        "output": str(directory / f"{stamp}-{daemon.recordings_begun:04d}.gwr"),
        "rings": daemon.feed.ring_paths(),
        "since_ns": since,
        "until_ns": now,
        "names": [[old, new] for m in manifests for old, new in m.names.items()],
        "entities": [info.to_json() for info in daemon.feed.entities],
        "constants": {
            m.duty: [constant_to_json(column, value) for column, value in m.constants]
            for m in manifests
        },
        "events": _sampled_events(daemon, since),
        "alerts": [alert_json(alert) for alert in daemon.engine.alerts()],
        "config": daemon.config,
    }

    def done(result: Message) -> None:
        output = result["output"].strip().splitlines()
        if result["status"] == 0 and output:
            daemon.recordings += 1
            connection.send(json.loads(output[-1]))
        elif output:
            connection.send(json.loads(output[-1]))
        else:
            connection.send({"error": "the recorder ended without a word: see the log"})

    daemon.recordings_begun += 1  # two of one second are two files
    daemon.supervisor.spawn("recorder", settings, RECORD_DEADLINE_SECONDS, done)

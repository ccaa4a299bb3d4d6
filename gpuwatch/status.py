"""What the daemon shows: the snapshot that metrics are made of, and the status page's JSON."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpuwatch import __version__
from gpuwatch.alerts import Alert
from gpuwatch.clock import SECOND_NS, monotonic_ns, read_clocks, wall_text
from gpuwatch.gpu_signals import NVLINKS_EXPECTED
from gpuwatch.signals import Column, Entity, Kind, column_name
from gpuwatch.snapshot import Snapshot, SourceState
from gpuwatch.source import NOT_PLANNED
from gpuwatch.totals import seconds_name
from gpuwatch.verdict import judge

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon

EVENTS_SHOWN = 200
NVML = "nvml_state"


def snapshot(daemon: "Daemon") -> Snapshot:
    """Gather what is known now, for the metrics."""
    alerts = daemon.engine.alerts()
    refresh: dict[str, float] = {}
    feeders: dict[str, str] = {}
    counted = {key for key, value in daemon.totals.counters.items() if not math.isnan(value)}
    for ring in daemon.feed.rings.values():
        if not ring.current:
            continue
        schema = ring.windows.schema
        for column, seconds in ring.windows.refresh_seconds.items():
            refresh[column.name] = max(seconds, refresh.get(column.name, 0.0))
        for column in schema.columns:
            if column.signal.kind is not Kind.BITS:
                feeders[column.name] = schema.source
                continue
            feeders[column.signal.name] = schema.source
            for _, label in column.signal.bits:
                name = column_name(column.signal, label)
                if (column.entity, seconds_name(name)) not in counted:
                    feeders[seconds_name(name)] = schema.source
    return Snapshot(
        totals=daemon.totals,
        ticks=daemon.ticks,
        columns=daemon.feed.columns,
        constants=[*daemon.feed.constants, *_expected_links(daemon)],
        entities=daemon.feed.entities,
        alerts=alerts,
        transitions=daemon.engine.transitions,
        sources=_sources(daemon),
        children=daemon.children,
        signal_refresh=refresh,
        signal_sources=feeders,
        released=daemon.leases.released,
        nvml_up=_nvml_up(daemon),
        gpus_pci=daemon.gpus_pci,
        gpus_expected=daemon.gpus_expected,
        verdict=judge(alerts) if daemon.ticks else None,
        recordings=daemon.recorder.saved,
        recordings_skipped=daemon.recorder.skipped,
        history_rows=daemon.archive.rows,
        history_rows_lost=daemon.archive.rows_lost,
    )


def _expected_links(daemon: "Daemon") -> list[tuple[Column, float]]:
    name = NVLINKS_EXPECTED.name
    return [
        (Column(gpu, NVLINKS_EXPECTED), values[name])
        for gpu, values in daemon.feed.facts.items()
        if name in values
    ]


def _sources(daemon: "Daemon") -> dict[str, SourceState]:
    found = {}
    now = monotonic_ns()
    for source, state in daemon.feed.states.items():
        rings = [
            ring
            for ring in daemon.feed.rings.values()
            if ring.current and ring.windows.schema.source == source
        ]
        if not rings:
            continue
        newest = [ns for ring in rings if (ns := ring.windows.newest_ns) is not None]
        fastest = min(rings, key=lambda ring: ring.reader.period_ns)  # it stands for its source
        planned = state not in NOT_PLANNED
        found[source] = SourceState(
            age_seconds=max(0, now - max(newest)) / SECOND_NS if newest else None,
            period_seconds=fastest.reader.period_ns / SECOND_NS if planned else None,
            period_achieved_seconds=fastest.windows.achieved_seconds if planned else None,
            errors=daemon.samplers.total_errors(source),
            planned=planned,
        )
    return found


def _nvml_up(daemon: "Daemon") -> bool | None:
    """Return whether the driver's library answers; None while that is not known or is off.

    The sampler says so by running or by being unavailable; between two samplers its word holds.
    """
    if daemon.feed.states.get(NVML, "off") in NOT_PLANNED:
        daemon.nvml_up = None  # what is there when it is read again may be another driver
        return None
    for report in daemon.supervisor.children:
        feeds = report["duty"] == "replay" or NVML in daemon.config["duties"].get(
            report["duty"], ()
        )
        if feeds and report["phase"] == "running":
            daemon.nvml_up = True
        elif feeds and (report["phase"] == "unavailable" or _driver_is_silent(report)):
            daemon.nvml_up = False
    return daemon.nvml_up


def _driver_is_silent(report: Mapping[str, Any]) -> bool:
    """Say whether a child hangs in the driver and no GPU could be named for it."""
    return bool(report["stuck"]) and not report["excluded"]


def describe(daemon: "Daemon", shown: Snapshot) -> dict[str, Any]:
    """Return the status page's JSON; null where something is not known."""
    alerts = [alert for alert in shown.alerts if alert.state != "inactive"]
    clocks = read_clocks()
    return {
        "version": __version__,
        "source": daemon.config["source"],
        "ready": bool(daemon.ticks),
        "ticks_closed": daemon.ticks_closed,
        "time_ns": clocks.monotonic_ns,
        "realtime_ns": clocks.realtime_ns,
        "verdict": shown.verdict["verdict"] if shown.verdict else None,
        "released": shown.released,
        "alerts": [
            {
                **alert_json(alert),
                "since": wall_text(clocks.wall_ns(alert.since_ns)),
                "place": _place(shown, alert.entity),
            }
            for alert in alerts
        ],
        "gpus": [
            {"gpu": info.entity.id, **info.labels, "values": _values(shown, info.entity)}
            for info in shown.entities
            if info.entity.kind == "gpu"
        ],
        "sources": {
            name: {
                "state": state,
                "reason": _reason(daemon, name),
                "period_seconds": found.period_seconds if found else None,
                "period_achieved_seconds": found.period_achieved_seconds if found else None,
                "errors": dict(found.errors) if found else {},
            }
            for name, state in daemon.feed.states.items()
            for found in [shown.sources.get(name)]
        },
        "children": daemon.supervisor.children,
        "events": [
            {**event.to_json(), "time": wall_text(clocks.wall_ns(event.time_ns))}
            for event in list(daemon.events)[-EVENTS_SHOWN:]
        ],
        "state": {
            "path": str(daemon.state),
            "fault": daemon.store.fault,
            "history_fault": daemon.archive.fault,
        },
    }


def _reason(daemon: "Daemon", source: str) -> str:
    """Return why a source does not work beside others of its sampler that do, "" if it does."""
    sources = [manifest.sources.get(source, {}) for manifest in daemon.feed.manifests.values()]
    return next((str(told["reason"]) for told in sources if told.get("reason")), "")


def _place(shown: Snapshot, entity: Entity) -> str:
    """Return which GPU a port or NIC sits beside, "" of anything else or if it is not known."""
    labels = next((info.labels for info in shown.entities if info.entity == entity), {})
    near = labels.get("gpu") if entity.kind in ("rdma_port", "interface") else None
    return f"(NIC of GPU {near})" if near else ""


def _values(shown: Snapshot, entity: Entity) -> dict[str, float]:
    tick = shown.ticks[0] if shown.ticks else None
    windows = tick.windows.get(entity, {}) if tick else {}
    return {name: window.last for name, window in windows.items() if window.covered_ns}


def alert_json(alert: Alert) -> dict[str, Any]:
    """Return an alert as plain data."""
    return {
        "rule": alert.rule,
        "entity": list(alert.entity),
        "severity": alert.severity,
        "state": alert.state,
        "value": alert.value,
        "limit": alert.limit,
        "since_ns": alert.since_ns,
        "sticky": alert.sticky,
        "recording": alert.recording,
        "next_step": alert.next_step,
        "detail": alert.detail,
        "verdict": alert.verdict,
    }

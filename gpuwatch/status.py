"""What the daemon shows: the snapshot that metrics are made of, and the status page's JSON."""

from typing import TYPE_CHECKING, Any

from gpuwatch import __version__
from gpuwatch.alerts import Alert
from gpuwatch.clock import SECOND_NS, monotonic_ns, read_clocks
from gpuwatch.signals import Entity
from gpuwatch.snapshot import Snapshot, SourceState

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon

EVENTS_SHOWN = 200


def snapshot(daemon: "Daemon") -> Snapshot:
    """Gather what is known now, for the metrics."""
    now = monotonic_ns()
    entities = daemon.feed.entities
    gpus = sum(info.entity.kind == "gpu" for info in entities)
    pci = daemon.pci_gpus if daemon.config["source"]["kind"] == "nvml" else gpus
    refresh: dict[str, float] = {}
    feeders: dict[str, str] = {}
    sources: dict[str, SourceState] = {}
    for ring in daemon.feed.rings.values():
        if not ring.current:
            continue
        schema = ring.windows.schema
        for column, seconds in ring.windows.refresh_seconds().items():
            refresh[column.name] = max(seconds, refresh.get(column.name, 0.0))
        for column in schema.columns:
            feeders[column.signal.name] = schema.source
        period = ring.reader.period_ns / SECOND_NS
        known = sources.get(schema.source)
        # The fastest ring stands for its source.
        if known is None or known.period_seconds is None or period < known.period_seconds:
            sources[schema.source] = SourceState(
                age_seconds=max(0.0, (now - ring.reader.watermark_ns) / SECOND_NS),
                period_seconds=period,
                period_achieved_seconds=ring.windows.achieved_seconds,
                errors=daemon.samplers.total_errors(schema.source),
            )
    return Snapshot(
        totals=daemon.totals,
        ticks=daemon.ticks,
        columns=daemon.feed.columns,
        constants=daemon.feed.constants,
        entities=entities,
        alerts=daemon.engine.alerts(),
        transitions=daemon.engine.transitions,
        sources=sources,
        children=daemon.children,
        signal_refresh=refresh,
        signal_sources=feeders,
        released={source: state == "off" for source, state in daemon.feed.states.items()},
        nvml_up=_nvml_up(daemon),
        gpus_pci=pci,
        gpus_expected=daemon.config["gpus"]["expected"] or pci,
        recordings=daemon.recordings,
    )


def _nvml_up(daemon: "Daemon") -> bool | None:
    """Return whether the driver answers, that is its source feeds; None if that is off."""
    if daemon.feed.states.get("nvml_state", "off") == "off" or not daemon.ticks:
        return None
    window = daemon.ticks[0].window(Entity("source", "nvml_state"), "source_up")
    return window is not None and window.last == 1


def describe(daemon: "Daemon", shown: Snapshot) -> dict[str, Any]:
    """Return the status page's JSON; null where something is not known."""
    alerts = [alert for alert in daemon.engine.alerts() if alert.state != "inactive"]
    clocks = read_clocks()
    return {
        "version": __version__,
        "source": daemon.config["source"],
        "ready": daemon.ready(),
        "ticks_closed": daemon.ticks_closed,
        "time_ns": clocks.monotonic_ns,
        "realtime_ns": clocks.realtime_ns,
        "alerts": [alert_json(alert) for alert in alerts],
        "gpus": [
            {"gpu": info.entity.id, **info.labels, "values": _values(shown, info.entity)}
            for info in shown.entities
            if info.entity.kind == "gpu"
        ],
        "sources": {
            name: {
                "state": state,
                "period_seconds": found.period_seconds if found else None,
                "period_achieved_seconds": found.period_achieved_seconds if found else None,
                "errors": dict(found.errors) if found else {},
            }
            for name, state in daemon.feed.states.items()
            for found in [shown.sources.get(name)]
        },
        "children": daemon.supervisor.children,
        "events": [event.to_json() for event in list(daemon.events)[-EVENTS_SHOWN:]],
        "state": {"path": str(daemon.state), "fault": daemon.store.fault},
    }


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
    }

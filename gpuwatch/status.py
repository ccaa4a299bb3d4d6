"""What the daemon shows: the snapshot that pages are made of, and the status page's JSON."""

import math
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpuwatch import __version__
from gpuwatch.alerts import Alert
from gpuwatch.causes import ranked
from gpuwatch.clock import SECOND_NS, monotonic_ns, read_clocks, wall_text
from gpuwatch.gpu_signals import NVLINKS_EXPECTED
from gpuwatch.signals import HOST, Column, Entity, valid
from gpuwatch.snapshot import Snapshot, SourceState
from gpuwatch.source import NOT_PLANNED
from gpuwatch.totals import seconds_name
from gpuwatch.verdict import judge

if TYPE_CHECKING:
    from gpuwatch.daemon import Daemon
    from gpuwatch.feed import Attached

NVML = "nvml_state"
READER = "reader"  # a child of the web server, and none of the supervisor's
KMSG = Entity("source", "kmsg")


def snapshot(daemon: "Daemon") -> Snapshot:
    """Gather what is known now; quick, for it is done at every tick whether anybody asks or not."""
    alerts = daemon.engine.alerts()
    rings = [ring for ring in daemon.feed.rings.values() if ring.current]
    refresh: dict[str, float] = {}
    for ring in rings:
        for name, seconds in ring.windows.refresh_seconds.items():
            refresh[name] = max(seconds, refresh.get(name, 0.0))
    shown = Snapshot(
        totals=daemon.totals.frozen(),
        ticks=daemon.ticks,
        columns=daemon.feed.columns,
        constants=[*daemon.feed.constants, *_expected_links(daemon)],
        entities=daemon.feed.entities,
        tenants=[tenant for told in daemon.feed.live.values() for tenant in told.tenants],
        losses=daemon.lost_time.all(),
        alerts=alerts,
        transitions=daemon.engine.transitions.copy(),
        sources=_sources(daemon, rings),
        children=daemon.children.copy(),
        signal_refresh=refresh,
        signal_sources=_feeders(daemon),
        released=daemon.leases.released,
        nvml_up=_nvml_up(daemon),
        gpus_pci=daemon.gpus_pci,
        gpus_expected=daemon.gpus_expected,
        verdict=judge(alerts) if daemon.ticks else None,
        canaries=daemon.standings.brief,
        canary_samples=daemon.standings.samples,
        recordings=daemon.recorder.saved,
        recordings_skipped=daemon.recorder.skipped.copy(),
        history_rows=daemon.archive.rows,
        history_rows_lost=daemon.archive.rows_lost,
        events=list(reversed(daemon.events_shown)),
        about=_about(daemon),
    )
    return daemon.presence.complete(shown)


def _feeders(daemon: "Daemon") -> dict[str, str]:
    """Return the source of each signal; time that no driver counts is of who samples its bits."""
    feeders, counters = daemon.feed.feeders.copy(), daemon.totals.counters
    for (entity, bit), source in daemon.feed.bit_feeders.items():
        name = seconds_name(bit)
        if math.isnan(counters.get((entity, name), math.nan)):
            feeders[name] = source
    return feeders


def _expected_links(daemon: "Daemon") -> list[tuple[Column, float]]:
    name = NVLINKS_EXPECTED.name
    return [
        (Column(gpu, NVLINKS_EXPECTED), values[name])
        for gpu, values in daemon.feed.facts.items()
        if name in values
    ]


def _sources(daemon: "Daemon", rings: Iterable["Attached"]) -> dict[str, SourceState]:
    by_source: defaultdict[str, list[Attached]] = defaultdict(list)
    for ring in rings:
        by_source[ring.windows.schema.source].append(ring)
    found = {}
    now = monotonic_ns()
    for source, state in daemon.feed.states.items():
        if source not in by_source:
            continue
        newest = [ns for ring in by_source[source] if (ns := ring.windows.newest_ns) is not None]
        # It stands for its source.
        fastest = min(by_source[source], key=lambda ring: ring.reader.period_ns)
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


def _about(daemon: "Daemon") -> dict[str, Any]:
    """Return what the status page shows as it is."""
    clocks = read_clocks()
    return {
        "version": __version__,
        "hostname": valid(socket.gethostname()),
        "source": daemon.config["source"],
        "ready": bool(daemon.ticks),
        "ticks_closed": daemon.ticks_closed,
        "time_ns": clocks.monotonic_ns,
        "realtime_ns": clocks.realtime_ns,
        "released": daemon.leases.released,
        "sources": {
            name: {"state": state, "reason": _reason(daemon, name)}
            for name, state in daemon.feed.states.items()
        },
        "children": daemon.supervisor.children,
        "state": {
            "path": str(daemon.state),
            "fault": daemon.store.fault,
            "history_fault": daemon.archive.fault,
        },
    }


def describe(shown: Snapshot) -> dict[str, Any]:
    """Return the status page's JSON; null where something is not known."""
    about = shown.about
    offset_ns = about["realtime_ns"] - about["time_ns"]
    constants = _constants(shown)
    causes = {gpu: [one.to_json() for one in ranked(loss)] for gpu, loss in shown.losses.items()}
    return {
        **about,
        "verdict": shown.verdict["verdict"] if shown.verdict else None,
        "alerts": [
            {
                **alert_json(alert),
                "since": wall_text(alert.since_ns + offset_ns),
                "place": _place(shown, alert.entity),
                "causes": causes.get(alert.entity, []),
            }
            for alert in shown.alerts
            if alert.state != "inactive"
        ],
        "gpus": [
            {
                "gpu": info.entity.id,
                **info.labels,
                "up": shown.gpus_up.get(info.entity),
                "causes": causes.get(info.entity, []),
                "xids": _xids(shown, info.entity),
                "values": {**constants[info.entity], **_values(shown, info.entity)},
                "tenants": [
                    {"kind": tenant.kind, "entity": list(tenant.entity), **tenant.labels}
                    for tenant in shown.present()
                    if tenant.gpu == info.entity
                ],
                "instances": [
                    {**part.labels, "values": _values(shown, part.entity)}
                    for part in shown.entities
                    if part.entity.kind == "gpu_instance"
                    and part.entity.id.partition("/")[0] == info.entity.id
                ],
            }
            for info in shown.entities
            if info.entity.kind == "gpu"
        ],
        "ports": [
            {**info.labels, "values": _values(shown, info.entity)}
            for info in shown.entities
            if info.entity.kind == "rdma_port"
        ],
        "host": {"values": _values(shown, HOST)},
        **({"canaries": shown.canaries} if shown.canaries else {}),
        "children": [
            {**report, "cpu_seconds": told.cpu_seconds if told else None}
            for report in about.get("children", ())
            for told in [shown.children.get(report["duty"])]
        ]
        + [
            {"duty": duty, "cpu_seconds": child.cpu_seconds}
            for duty, child in shown.children.items()
            if duty == READER
        ],
        "sources": {
            name: {
                **told,
                "age_seconds": found.age_seconds if found else None,
                "period_seconds": found.period_seconds if found else None,
                "period_achieved_seconds": found.period_achieved_seconds if found else None,
                "errors": dict(found.errors) if found else {},
            }
            for name, told in about["sources"].items()
            for found in [shown.sources.get(name)]
        },
        "events": [
            {**event.to_json(), "time": wall_text(event.time_ns + offset_ns)}
            for event in reversed(shown.events)
        ],
    }


def _reason(daemon: "Daemon", source: str) -> str:
    """Return why a source does not work beside others of its sampler that do, "" if it does."""
    sources = [manifest.sources.get(source, {}) for manifest in daemon.feed.live.values()]
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


def _xids(shown: Snapshot, gpu: Entity) -> list[dict[str, Any]] | None:
    """Return the Xid errors of a GPU, None if there are none and nobody listens to them."""
    found = [
        {"xid": code, "count": total.count, "last": total.last_seconds or None}
        for (entity, code), total in shown.totals.xids.items()
        if entity == gpu
    ]
    ears = (shown.live(KMSG, "source_up"), shown.live(gpu, "gpu_xid_events_heard"))
    return found if found or any(ear is not None and ear.last for ear in ears) else None


def _constants(shown: Snapshot) -> Mapping[Entity, dict[str, float]]:
    """Return what does not change of each entity, but of a GPU that does not answer."""
    found: defaultdict[Entity, dict[str, float]] = defaultdict(dict)
    for column, value in shown.constants:
        if math.isfinite(value) and shown.gpus_up.get(column.entity) != 0:
            found[column.entity][column.name] = value
    return found


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

"""The metrics page: the Prometheus text format 0.0.4, written from one snapshot of the daemon.

Pure but for `process_*`, which are read while rendering. A series is written only if its value is
known: one HELP and TYPE per family, directly before its samples, families without samples left
out. The text of a line up to its value is made once and kept.
"""

import itertools
import logging
import math
from collections.abc import Mapping, Set
from functools import lru_cache
from typing import NamedTuple

from prometheus_client import ProcessCollector
from prometheus_client.utils import floatToGoString

from gpuwatch import __version__
from gpuwatch.clock import SECOND_NS
from gpuwatch.families import ENTITY_LABELS, FAMILIES, INFOS, MODES, TENANT_INFOS
from gpuwatch.page import Line, Page, header, number
from gpuwatch.pm_signals import IDLE_GAPS, LOADS
from gpuwatch.signals import HOST, Column, Entity, Histogram, Kind, Signal, quote
from gpuwatch.snapshot import KMSG, Snapshot
from gpuwatch.source import EntityInfo
from gpuwatch.totals import Durations, EventTotal, TimeShares
from gpuwatch.verdict import WORDS
from gpuwatch.xid import MAIN_CODES

log = logging.getLogger("gpuwatch.exposition")

NAMESPACE = "gpuwatch_"
SERIES_LIMIT = 10_000
KEPT_LINES = 4 * SERIES_LIMIT
LOGGED_DUPLICATES = 100


class Shown(NamedTuple):
    """A column with its texts made once."""

    column: Column
    name: str
    fragment: str


class Exposition:
    """Renders snapshots; one per daemon, called from one thread."""

    def __init__(self, series_limit: int = SERIES_LIMIT) -> None:
        self._limit = series_limit
        self._headers: dict[str, str] = {}
        self._lines: dict[tuple[str, Entity, str], Line] = {}
        self._histograms: dict[tuple[str, Entity], list[Line]] = {}
        self._columns: tuple[Column, ...] = ()
        self._shown: list[Shown] = []
        self._labels: Mapping[Entity, Mapping[str, str]] = {}
        self._dropped = 0
        self._duplicates = 0
        self._logged: set[str] = set()
        self._process = ProcessCollector(registry=None)
        for name, kind, text in FAMILIES:
            self._declare(name, kind, text)
        for load in LOADS:
            self._declare_shares(load.histogram)
        self._declare(IDLE_GAPS.name, "histogram", IDLE_GAPS.help)

    def render(self, snapshot: Snapshot) -> bytes:
        """Return the page."""
        if snapshot.labels != self._labels or len(self._lines) > KEPT_LINES:
            self._labels = snapshot.labels
            self._lines.clear()
            self._histograms.clear()
        if tuple(snapshot.columns) != self._columns:
            self._columns = tuple(snapshot.columns)
            # A column of two rings (a restarted sampler's old and new) has one window.
            once = {(column.entity, column.name): column for column in self._columns}
            self._shown = [self._show(column) for column in once.values()]
        page = Page(self._limit)
        self._put(page, "build_info", HOST, 1, f"version={quote(__version__)}")
        self._put_node(page, snapshot)
        self._put_alerts(page, snapshot)
        self._put_self(page, snapshot)
        for column, value in snapshot.constants:
            self._declare(column.signal.name, "gauge", column.signal.help)
            if snapshot.gpus_up.get(column.entity) != 0:
                self._put(page, column.signal.name, column.entity, value, _fragment(column))
        for shown in self._shown:
            self._put_column(page, snapshot, shown)
        self._put_totals(page, snapshot)
        for name, entity, fragment, value in snapshot.canary_samples:
            self._put(page, name, entity, value, fragment)
        for metric in self._process.collect():
            for sample in metric.samples:
                self._header(sample.name, metric.type, metric.documentation)
                page.put(Line(sample.name, f"{sample.name} "), sample.value)
        self._note(page)
        return page.text(self._headers).encode("utf-8", "replace")

    def _declare(self, name: str, kind: str, text: str) -> None:
        self._header(NAMESPACE + name, kind, text)

    def _declare_shares(self, histogram: Histogram) -> None:
        text = f"{histogram.help} Counts microseconds, since the daemon's start."
        self._declare(histogram.name, "histogram", text)

    def _header(self, family: str, kind: str, text: str) -> None:
        if family not in self._headers:
            self._headers[family] = header(family, kind, text)

    def _line(self, name: str, entity: Entity, fragment: str = "", suffix: str = "") -> Line:
        """Return a new line; `fragment` is label text that follows the entity's labels."""
        info = self._labels.get(entity, {})
        labels = ENTITY_LABELS.get(entity.kind, (entity.kind,))
        own = labels[0] if len(labels) == 1 else entity.kind
        values = {own: entity.id, **info}
        pairs = [f"{label}={quote(values[label])}" for label in labels if values.get(label)]
        text = ",".join([*pairs, fragment] if fragment else pairs)
        family = NAMESPACE + name
        return Line(family, f"{family}{suffix}{{{text}}} " if text else f"{family}{suffix} ")

    def _put(
        self, page: Page, name: str, entity: Entity, value: float | None, fragment: str = ""
    ) -> None:
        if value is not None:
            line = self._lines.get((name, entity, fragment))
            if line is None:
                line = self._line(name, entity, fragment)
                self._lines[name, entity, fragment] = line
            page.put(line, value)

    def _put_histogram(
        self, page: Page, name: str, entity: Entity, histogram: Durations | TimeShares
    ) -> None:
        lines = self._histograms.get((name, entity))
        if lines is None:
            bounds = [
                f'le="{floatToGoString(bound)}"'  # type: ignore[no-untyped-call]
                for bound in (*histogram.bounds, math.inf)
            ]
            lines = [self._line(name, entity, bound, "_bucket") for bound in bounds]
            lines += [self._line(name, entity, suffix=suffix) for suffix in ("_sum", "_count")]
            self._histograms[name, entity] = lines
        counts = histogram.cumulative
        page.put_histogram(lines, [*counts, histogram.sum, counts[-1]])

    def _put_node(self, page: Page, snapshot: Snapshot) -> None:
        self._put(page, "nvml_up", HOST, snapshot.nvml_up)
        self._put(page, "gpus_pci", HOST, snapshot.gpus_pci)
        self._put(page, "gpus_expected", HOST, snapshot.gpus_expected)
        for what, released in snapshot.released.items():
            self._put(page, "released", Entity("what", what), released)
        if snapshot.verdict is not None:
            for word in WORDS:
                self._put(
                    page,
                    "node_verdict",
                    Entity("verdict", word),
                    word == snapshot.verdict["verdict"],
                )
        for gpu, up in snapshot.gpus_up.items():
            self._put(page, "gpu_up", gpu, up)
        for info in snapshot.entities:
            if info.entity.kind in INFOS:
                keys = info.labels.keys() - set(ENTITY_LABELS[info.entity.kind])
                self._put_info(page, INFOS[info.entity.kind][0], info, keys - MODES)
                if keys & MODES:
                    self._put_info(page, "gpu_mode_info", info, keys & MODES)
        self._put_tenants(page, snapshot)
        ups = list(snapshot.gpus_up.values())
        if snapshot.nvml_up is not None and None not in ups:
            self._put(page, "gpus_visible", HOST, ups.count(1))

    def _put_tenants(self, page: Page, snapshot: Snapshot) -> None:
        for tenant in snapshot.present():
            labels = tenant.labels
            fragment = ",".join(f"{key}={quote(labels[key])}" for key in sorted(labels))
            self._put(page, TENANT_INFOS[tenant.kind][0], tenant.entity, 1, fragment)

    def _put_info(self, page: Page, name: str, info: EntityInfo, keys: Set[str]) -> None:
        fragment = ",".join(f"{key}={quote(info.labels[key])}" for key in sorted(keys))
        self._put(page, name, info.entity, 1, fragment)

    def _put_alerts(self, page: Page, snapshot: Snapshot) -> None:
        for alert in snapshot.alerts:
            fragment = f"alert={quote(alert.rule)},severity={quote(alert.severity)}"
            self._put(page, "alert_firing", alert.entity, alert.state == "firing", fragment)
        for (rule, state), count in snapshot.transitions.items():
            fragment = f"alert={quote(rule)},to={quote(state)}"
            self._put(page, "alert_transitions_total", HOST, count, fragment)

    def _put_self(self, page: Page, snapshot: Snapshot) -> None:
        totals = snapshot.totals
        if snapshot.ticks:
            for entity in snapshot.ticks[0].windows:
                window = snapshot.live(entity, "source_up") if entity.kind == "source" else None
                self._put(page, "source_up", entity, int(window.last) if window else None)
        self._put_kernel_log(page, snapshot)
        for name, source in snapshot.sources.items():
            entity = Entity("source", name)
            self._put(page, "source_age_seconds", entity, source.age_seconds)
            self._put(page, "source_period_seconds", entity, source.period_seconds)
            achieved = source.period_achieved_seconds
            self._put(page, "source_period_achieved_seconds", entity, achieved)
            for error, count in source.errors.items():
                self._put(page, "source_errors_total", entity, count, f"error={quote(error)}")
        for name, count in totals.missing.items():
            self._put(page, "samples_missing_total", Entity("source", name), count)
        for name, read in totals.read.items():
            self._put_histogram(page, "source_read_seconds", Entity("source", name), read)
        for duty, late in totals.late.items():
            self._put_histogram(page, "sampler_late_seconds", Entity("duty", duty), late)
        for duty, child in snapshot.children.items():
            entity = Entity("duty", duty)
            self._put(page, "child_restarts_total", entity, child.restarts)
            self._put(page, "child_stuck", entity, child.stuck)
            self._put(page, "process_cpu_seconds_total", entity, child.cpu_seconds)
        for name, seconds in snapshot.signal_refresh.items():
            self._put(page, "signal_refresh_seconds", Entity("signal", name), seconds)
        for name, feeder in snapshot.signal_sources.items():
            fragment = f"source={quote(feeder)}"
            self._put(page, "signal_source_info", Entity("signal", name), 1, fragment)
        self._put(page, "recordings_total", HOST, snapshot.recordings)
        for reason, count in snapshot.recordings_skipped.items():
            fragment = f"reason={quote(reason)}"
            self._put(page, "recordings_skipped_total", HOST, count, fragment)
        self._put(page, "history_rows_total", HOST, snapshot.history_rows)
        self._put(page, "history_rows_lost_total", HOST, snapshot.history_rows_lost)

    def _put_kernel_log(self, page: Page, snapshot: Snapshot) -> None:
        """Put what it told; nothing is not 0 while nobody reads it."""
        source = snapshot.live(KMSG, "source_up")
        self._put(page, "kmsg_up", HOST, int(source.last) if source else None)
        xids = dict(snapshot.totals.xids)
        for gpu, code in itertools.product(snapshot.xids_heard(), MAIN_CODES):
            xids.setdefault((gpu, str(code)), EventTotal())
        for (gpu, xid), total in xids.items():
            fragment = f"xid={quote(xid)}"
            self._put(page, "gpu_xid_errors_total", gpu, total.count, fragment)
            last = total.last_seconds or None
            self._put(page, "gpu_xid_last_timestamp_seconds", gpu, last, fragment)
        for (device, severity), total in snapshot.totals.pcie_errors.items():
            fragment = f"severity={quote(severity)}"
            self._put(page, "pcie_errors_total", device, total.count, fragment)

    def _show(self, column: Column) -> Shown:
        """Declare the families that the column feeds."""
        signal = column.signal
        counter = signal.kind is Kind.COUNTER
        self._declare(signal.name, "counter" if counter else "gauge", signal.help)
        if signal.statistics:
            for suffix, what in (("min", "Minimum"), ("max", "Maximum"), ("mean", "Mean")):
                text = f"{what} over the trailing 60 s. {signal.help}"
                self._declare(f"{signal.name}_{suffix}", "gauge", text)
        if signal.histogram is not None:
            self._declare_shares(signal.histogram)
        return Shown(column, column.name, _fragment(column))

    def _put_column(self, page: Page, snapshot: Snapshot, shown: Shown) -> None:
        (entity, signal, label), name, fragment = shown
        if signal.kind is Kind.COUNTER:
            counter = snapshot.totals.counters.get((entity, name), math.nan)
            if not math.isnan(counter) and (entity, name) not in snapshot.totals.bit_seconds:
                self._put(page, signal.name, entity, counter, fragment)
        elif signal.kind is Kind.BITS:
            self._put_bits(page, snapshot, entity, signal)
        elif signal.name != "gpu_up":
            window = snapshot.live(entity, name)
            if window is None:
                return
            self._put(page, signal.name, entity, window.last, fragment)
            trailing = snapshot.totals.trailing.get(entity, name)
            if trailing is not None and label in signal.statistics:
                self._put(page, f"{signal.name}_min", entity, trailing.minimum, fragment)
                self._put(page, f"{signal.name}_max", entity, trailing.maximum, fragment)
                self._put(page, f"{signal.name}_mean", entity, trailing.mean, fragment)

    def _put_bits(self, page: Page, snapshot: Snapshot, entity: Entity, signal: Signal) -> None:
        """Put 1 for each bit that was set at any time in the newest window, 0 for the others."""
        prefix = signal.name + "{"
        windows = snapshot.ticks[0].windows.get(entity, {}) if snapshot.ticks else {}
        for name in windows:
            window = snapshot.live(entity, name) if name.startswith(prefix) else None
            if window is not None:
                self._put(page, signal.name, entity, int(window.maximum), _parts(name)[1])

    def _put_totals(self, page: Page, snapshot: Snapshot) -> None:
        totals = snapshot.totals
        if snapshot.released.get("gpus"):  # all that is summed up here is of GPUs
            return
        for (entity, name), total in totals.bits.items():
            stem, fragment = _parts(name)
            seconds = total.active_ns / SECOND_NS
            self._put(page, f"{stem}_seconds_total", entity, seconds, fragment)
            self._put(page, f"{stem}_events_total", entity, total.events, fragment)
        for entity, lost_ns in totals.lost_clock_ns.items():
            self._put(page, "gpu_lost_clock_seconds_total", entity, lost_ns / SECOND_NS)
        uncovered: dict[Entity, int] = {}
        for (entity, _), missed_ns in totals.uncovered_ns.items():
            uncovered[entity] = max(missed_ns, uncovered.get(entity, 0))
        for entity, missed_ns in uncovered.items():
            self._put(page, "gpu_counters_uncovered_seconds_total", entity, missed_ns / SECOND_NS)
        for (entity, name), shares in totals.shares.items():
            self._put_histogram(page, name, entity, shares)
        for entity, gaps in totals.gaps.items():
            self._put_histogram(page, IDLE_GAPS.name, entity, gaps)

    def _note(self, page: Page) -> None:
        """Count and log what the page had to leave out, each duplicate once."""
        self._dropped += page.dropped
        self._duplicates += len(page.duplicates)
        if page.dropped and "limit" not in self._logged:
            self._logged.add("limit")
            log.warning("more than %d series: %d left out", self._limit, page.dropped)
        for prefix, kept, left in page.duplicates:
            if prefix not in self._logged and len(self._logged) < LOGGED_DUPLICATES:
                self._logged.add(prefix)
                log.warning("series given twice: %skept %s, left out %r", prefix, kept, left)
        for name, count in (
            ("series_dropped_total", self._dropped),
            ("duplicate_series_total", self._duplicates),
        ):
            line = self._line(name, HOST)
            page.families[line.family] = {line.prefix: number(count)}


def _fragment(column: Column) -> str:
    if column.signal.label is None:
        return ""
    return f"{column.signal.label}={quote(column.label)}"


@lru_cache(maxsize=1024)
def _parts(name: str) -> tuple[str, str]:
    """Return the stem of a bit column's name and the label text inside its braces."""
    signal, _, rest = name.partition("{")
    return signal.removesuffix("_active"), rest[:-1]

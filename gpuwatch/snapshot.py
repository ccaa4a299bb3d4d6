"""The snapshot: everything the daemon shows at one instant, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuwatch.alerts import Alert
from gpuwatch.canary_metrics import Sample
from gpuwatch.job_signals import TENANTS
from gpuwatch.lost_time import Loss
from gpuwatch.signals import Column, Entity, Event, column_name
from gpuwatch.source import EntityInfo, Tenant
from gpuwatch.totals import Totals
from gpuwatch.window import Tick, Window

KMSG = Entity("source", "kmsg")


@dataclass(frozen=True, slots=True)
class SourceState:
    """What the daemon knows of a source; None is not known. `errors` counts by error name.

    `planned`: whether anybody means to read it now.
    """

    age_seconds: float | None = None
    period_seconds: float | None = None
    period_achieved_seconds: float | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    planned: bool = True


@dataclass(frozen=True, slots=True)
class ChildState:
    """What the daemon knows of a child of the supervisor."""

    restarts: int = 0
    stuck: bool = False
    cpu_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the pages show, at one instant; what is None or missing is not shown.

    Nothing of it changes later: pages are made of it in another thread.

    `ticks` are the newest closed tick and the one before it, newest first; empty before the
    first. `columns` are those of all attached rings and `constants` the values that do not
    change, both with GPUs named by number. `entities` are there now, `labels` has those of all that
    ever were, `tenants` are who used GPUs when that was last looked at, and `gpus_up` says of each
    GPU whether it answers. `transitions` counts by (rule, new state) and holds every pair from the
    start; `released` says of each thing that can be released whether it is. `events` are the newest
    ones, and `about` is what else the status page shows.
    `verdict` is what `verdict.judge` says of the alerts, None before the first tick.
    `canaries` is what the status says of canaries, {} without readings, `canary_samples` what their
    metrics do.
    `losses` are what each GPU lost time to, and `recordings_skipped` counts by reason.
    `signal_refresh` and `signal_sources` go by column name, bit sets by their signal's.
    """

    totals: Totals
    ticks: tuple[Tick, ...] = ()
    columns: Sequence[Column] = ()
    constants: Sequence[tuple[Column, float]] = ()
    entities: Sequence[EntityInfo] = ()
    tenants: Sequence[Tenant] = ()
    labels: Mapping[Entity, Mapping[str, str]] = field(default_factory=dict)
    gpus_up: Mapping[Entity, int | None] = field(default_factory=dict)
    losses: Mapping[Entity, Loss] = field(default_factory=dict)
    alerts: Sequence[Alert] = ()
    transitions: Mapping[tuple[str, str], int] = field(default_factory=dict)
    sources: Mapping[str, SourceState] = field(default_factory=dict)
    children: Mapping[str, ChildState] = field(default_factory=dict)
    signal_refresh: Mapping[str, float] = field(default_factory=dict)
    signal_sources: Mapping[str, str] = field(default_factory=dict)
    released: Mapping[str, bool] = field(default_factory=dict)
    nvml_up: bool | None = None
    gpus_pci: int | None = None
    gpus_expected: int | None = None
    verdict: Mapping[str, Any] | None = None
    canaries: Mapping[str, Any] = field(default_factory=dict)
    canary_samples: Sequence[Sample] = ()
    recordings: int = 0
    recordings_skipped: Mapping[str, int] = field(default_factory=dict)
    history_rows: int = 0
    history_rows_lost: int = 0
    events: Sequence[Event] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def live(self, entity: Entity, name: str) -> Window | None:
        """Return the column's newest window with a known value, None if the last two have none."""
        for tick in self.ticks:
            window = tick.window(entity, name)
            if window is not None and window.covered_ns:
                return window
        return None

    def xids_heard(self) -> list[Entity]:
        """Return the GPUs of whose Xid errors the kernel log tells, or else NVML's events."""
        gpus = [info.entity for info in self.entities if info.entity.kind == "gpu"]
        source = self.live(KMSG, "source_up")
        if source and source.last:
            return gpus
        heard = [self.live(gpu, "gpu_xid_events_heard") for gpu in gpus]
        return [gpu for gpu, window in zip(gpus, heard, strict=True) if window and window.last]

    def present(self) -> list[Tenant]:
        """Return who uses GPUs, of those GPUs that were looked at within the last seconds."""
        return [
            tenant
            for tenant in self.tenants
            if self.live(tenant.gpu, column_name(TENANTS, tenant.kind)) is not None
        ]

"""NVML's counters and health: what costs time to read, in a process apart from the fast samples.

A ring for each GPU and cadence. Reads of a group are spread over the GPUs, so that the firmware of
no two is asked back to back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.delivered import Delivered
from gpuwatch.errors import ConfigError, SourceUnavailable
from gpuwatch.gpu_limits import Limits
from gpuwatch.gpu_readings import GROUPS
from gpuwatch.gpu_signals import (
    BYTES_MOVED,
    HUNG,
    PCIE_RECEIVED,
    PCIE_TRANSMITTED,
    POWER_SAMPLE,
    XIDS_HEARD,
)
from gpuwatch.gpu_users import Users
from gpuwatch.pcie_counter import PcieBytes
from gpuwatch.power_ring import PowerRing
from gpuwatch.reading import Call, Row
from gpuwatch.roster import Gpu, Roster
from gpuwatch.signals import Column, Event
from gpuwatch.source import Context, Findings, Group, Opened
from gpuwatch.xid import catalogue
from gpuwatch.xid_events import XidEvents

PCIE_CELLS = ((PCIE_RECEIVED, ""), (PCIE_TRANSMITTED, ""))
POWER_PERIOD_NS, POWER_DELIVERY_NS = 20 * MILLISECOND_NS, 250 * MILLISECOND_NS
XIDS_PERIOD_NS = 250 * MILLISECOND_NS
LOOK_NS = 60 * SECOND_NS  # limits and modes of a GPU are asked for again


@dataclass(slots=True)
class Readers:
    """All that reads one GPU; what they remember lasts as long as the process."""

    limits: Limits
    pcie: PcieBytes
    pcie_row: Row
    power: PowerRing
    rows: tuple[Row, ...]  # in the order of GROUPS


class NvmlCounters:
    """Source of the duty `counters`."""

    name = "nvml_counters"

    def __init__(self) -> None:
        self.findings = Findings()
        self._roster = Roster(self.findings, tells=False)
        self._readers: dict[Gpu, Readers] = {}
        self._users = Users(self._roster)

    def open(self, context: Context) -> Opened:
        """Find the GPUs, their limits and their modes.

        Raises SourceUnavailable if there is no driver or no GPU.
        """
        self._sysfs, self._users.procfs = context.sysfs, context.procfs
        self._delivered = Delivered(context.runtime, "pm")
        try:
            codes = catalogue(context.settings["config"]["host"]["xid_catalogue"])
        except ConfigError as fault:
            raise SourceUnavailable(str(fault)) from fault
        self._roster.open(context)
        self._xids = XidEvents(self._roster, self.findings, codes)
        return self._opened()

    def housekeep(self, now_ns: int) -> Opened | None:
        """See to lost and new GPUs, and to limits and modes that were changed, of one at a time.

        Raises SourceUnavailable when the driver was unloaded or replaced.
        """
        came = self._roster.upkeep(now_ns, self._look)
        changed = False
        oldest = min(self._readers, key=lambda gpu: self._readers[gpu].limits.looked_ns)
        if now_ns - self._readers[oldest].limits.looked_ns >= LOOK_NS:
            before = (list(oldest.constants), dict(oldest.labels))
            self._look(oldest)
            changed = before != (oldest.constants, oldest.labels)
        return self._opened() if self._users.look() or came or changed else None

    def close(self) -> None:
        """Let go of the driver."""
        self._roster.close()

    def _look(self, gpu: Gpu) -> bool:
        """Ask a GPU for limits and modes; False if it does not answer."""
        limits = self._readers[gpu].limits
        now, before = monotonic_ns(), gpu.labels.get("persistence_mode")
        if gpu.handle is None:
            limits.looked_ns = now
            return False
        if not limits.look(now):
            return False
        self._readers[gpu].pcie.rate = limits.bytes_per_second
        if gpu.labels.get("persistence_mode") == "off" != before:
            detail = "each program that opens the GPU waits for its start: nvidia-smi -pm 1"
            self.findings.events.append(Event(now, gpu.entity, "gpu_persistence_off", detail))
        return True

    def _opened(self) -> Opened:
        for gpu in self._roster.gpus:
            if gpu not in self._readers:
                self._readers[gpu] = self._made(gpu)
                self._look(gpu)
        gpus = self._roster.gpus
        hung = Group(
            "hung",
            (
                *(Column(gpu.entity, HUNG, "counters") for gpu in gpus),
                *(Column(gpu.entity, XIDS_HEARD) for gpu in gpus),
            ),
            XIDS_PERIOD_NS,
            self._read_hung,
        )
        groups = [group for gpu in gpus for group in self._groups(gpu)]
        constants = [constant for gpu in gpus for constant in gpu.constants]
        infos = self._roster.infos()
        return Opened((hung, *groups), infos, tuple(constants), self._users.tenants)

    def _read_hung(self) -> list[float]:
        """Return which GPUs are left alone, and whose Xids are heard; take those that came."""
        self._xids.look()
        gpus = self._roster.gpus
        return [
            *(float(gpu.excluded) for gpu in gpus),
            *(float(self._xids.hears(gpu)) for gpu in gpus),
        ]

    def _made(self, gpu: Gpu) -> Readers:
        roster, pcie = self._roster, PcieBytes()
        bytes_moved = Call("nvmlDeviceGetFieldValues:197,198", PCIE_CELLS, pcie.read)
        return Readers(
            Limits(roster, gpu, self._sysfs),
            pcie,
            Row(roster, gpu, (self._spared(gpu, bytes_moved),)),
            PowerRing(roster, gpu),
            tuple(
                Row(roster, gpu, [self._spared(gpu, call) for call in group.calls()])
                for group in GROUPS
            ),
        )

    def _spared(self, gpu: Gpu, call: Call) -> Call:
        """Return a call that is not made while hardware counters tell of its bytes."""
        if not BYTES_MOVED.issuperset(signal for signal, _ in call.cells):
            return call
        names, unknown = [signal.name for signal, _ in call.cells], [None] * len(call.cells)

        def read(handle: Any) -> Sequence[float | None]:
            return unknown if self._delivered.brings(gpu.entity, names) else call.read(handle)

        return replace(call, read=read)

    def _groups(self, gpu: Gpu) -> Iterator[Group]:
        readers, share = self._readers[gpu], gpu.index / len(self._roster.gpus)
        period = readers.pcie.period_ns
        row = readers.pcie_row
        yield Group(f"pcie{gpu.index}", row.columns, period, row.read, int(share * period))
        yield Group(
            f"power{gpu.index}",
            (Column(gpu.entity, POWER_SAMPLE),),
            POWER_PERIOD_NS,
            phase_ns=int(share * POWER_DELIVERY_NS),
            delivery_ns=POWER_DELIVERY_NS,
            drain=readers.power.drain,
        )
        slot = SECOND_NS / len(self._roster.gpus)
        for place, (group, row) in enumerate(zip(GROUPS, readers.rows, strict=True)):
            phase = int(slot * (gpu.index + place / len(GROUPS)))
            yield Group(f"{group.name}{gpu.index}", row.columns, group.period_ns, row.read, phase)

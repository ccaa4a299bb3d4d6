"""Link time: what the links of a GPU did in each tick: PCIe, NVLink, the RDMA ports near it.

How long a link was full, down or losing is what a wait in the same tick may coincide with; missing
lanes and links are kept as time, for what they cost cannot be seen.
"""

import math

from gpuwatch import pm_signals
from gpuwatch.clock import SECOND_NS
from gpuwatch.gpu_signals import (
    NVLINK_RECEIVED,
    NVLINK_TRANSMITTED,
    PCIE_RECEIVED,
    PCIE_TRANSMITTED,
)
from gpuwatch.ledger import TIME, Ledger, Windows, highest, risen
from gpuwatch.rules.gpu_health import PCIE_LOAD
from gpuwatch.rules.network import DOWNS, JOB_END_SECONDS, LOST, PACKETS
from gpuwatch.signals import Entity
from gpuwatch.window import Tick

NEVER_NS = -(2**62)
NEWS_NS = SECOND_NS // 2  # RDMA errors are read twice a second: a loss may be as old as that
NVLINK_READ_NS = SECOND_NS  # NVLink bytes are read once a second

PCIE = (PCIE_RECEIVED.name, PCIE_TRANSMITTED.name)
NVLINK = (NVLINK_RECEIVED.name, NVLINK_TRANSMITTED.name)
NVLINK_RAW = tuple(signal.name for signal in pm_signals.NVLINK_RAW)
NVLINK_ERRORS = tuple(
    f'gpu_nvlink_errors_total{{type="{one}"}}' for one in ("replay", "recovery", "crc")
)
# What is counted of a port, and of an interface behind it, by the beginnings of their names.
COUNTED = {
    kind: tuple((name, ("rise", name)) for name in (*LOST, *DOWNS, *PACKETS) if name[:4] == start)
    for kind, start in (("rdma_port", "rdma"), ("interface", "nic_"))
}
LANES, GENERATION = "gpu_pcie_link_width_lanes", "gpu_pcie_link_generation"
MOST_LANES, NEWEST = "gpu_pcie_link_width_limit_lanes", "gpu_pcie_link_generation_limit"
LINKS_UP, LINKS_EXPECTED = "gpu_nvlink_links_up", "gpu_nvlink_links_expected"

# Bytes a second of one lane of generation 1, each way; each generation is twice as fast.
LANE_BYTES = 250e6
PCIE_FULL = 0.8  # of the link's rate; packets of bulk copies fill 93 % of it (H200, generation 5)
NVLINK_BYTES = 25e9  # a second of a link each way, NVLink 2 to 4; of 5 it is twice that
NVLINK_BUSY = 0.25  # of the links' rate

PCIE_MOVED, NVLINK_MOVED = ("moved", "pcie"), ("moved", "nvlink")
PCIE_DEGRADED, PCIE_EXTRA = ("time", "pcie_degraded"), ("extra", "pcie")
NVLINK_DEGRADED, PORT_DOWN = ("time", "nvlink_degraded"), ("time", "port_down")


class LinkTime:
    """The links of one GPU; `near` are the RDMA ports and interfaces beside it.

    `links_expected` are the NVLinks that it should have, None if unknown.
    """

    def __init__(self, entity: Entity, near: tuple[Entity, ...], ledger: Ledger) -> None:
        self.near = near
        self.links_expected: float | None = None
        self._entity = entity
        self._ledger = ledger
        self._were_up: set[Entity] = set()
        self._queue_pairs: dict[Entity, float] = {}
        self.restart()

    def restart(self) -> None:
        """Forget when things happened: data time went back."""
        self.job_ended_ns = self._lossy_until_ns = self._nvlink_until_ns = NEVER_NS

    def look(self, tick: Tick, windows: Windows, gap_ns: int) -> dict[str, int]:
        """Return by cause for how long of the tick a wait may coincide with it.

        `gap_ns` is for how long the GPU has waited already, before this tick.
        """
        return {
            "rdma": self._rdma_ns(tick),
            "pcie": self._pcie_ns(tick, windows),
            "nvlink": self._nvlink_ns(tick, windows, gap_ns),
        }

    def _rdma_ns(self, tick: Tick) -> int:
        """Return for how long the network beside the GPU was down or lost packets."""
        put, lost, down_ns = self._ledger.put, 0, 0
        for port in self.near:
            windows = tick.windows.get(port)
            if windows is None:
                continue
            self._look_for_job_end(tick, port, windows)
            for name, key in COUNTED[port.kind]:
                rise = risen(windows, name)
                if rise:
                    put(key, rise)
                    lost += rise if name in LOST else 0
            down_ns = max(down_ns, self._down_ns(port, windows))
        put(PORT_DOWN, down_ns)
        # Whose peer has ended times out: that is no loss.
        if lost and tick.end_ns - self.job_ended_ns >= JOB_END_SECONDS * SECOND_NS:
            self._lossy_until_ns = tick.end_ns + NEWS_NS
        lossy = self._lossy_until_ns >= tick.end_ns
        return tick.end_ns - tick.start_ns if lossy else down_ns

    def _look_for_job_end(self, tick: Tick, port: Entity, windows: Windows) -> None:
        pairs = highest(windows, "rdma_queue_pairs")
        if pairs is not None:
            if pairs < self._queue_pairs.get(port, 0.0):
                self.job_ended_ns = tick.end_ns
            self._queue_pairs[port] = pairs

    def _down_ns(self, port: Entity, windows: Windows) -> int:
        """Return for how long a port that was up before was not, unless it was switched off."""
        up = windows.get("rdma_port_up")
        if up is None or not up.covered_ns:
            return 0
        if up.maximum:
            self._were_up.add(port)
        off = highest(windows, "rdma_port_enabled") == 0
        return 0 if off or port not in self._were_up else round(up.covered_ns - up.integral)

    def _pcie_ns(self, tick: Tick, windows: Windows) -> int:
        """Return for how long the PCIe link was busy if it was full; note what it is without."""
        put, tick_ns = self._ledger.put, tick.end_ns - tick.start_ns
        moved = max(risen(windows, name) for name in PCIE)
        if not moved:
            return 0
        put(PCIE_MOVED, moved)
        lanes, generation = highest(windows, LANES), highest(windows, GENERATION)
        if not lanes or not generation:
            return 0
        rate = link_rate(lanes, generation)
        used = moved * SECOND_NS / tick_ns / rate
        if used > 1:  # the link was looked at while it was idle, and slower
            return 0
        constant = tick.constants.get(self._entity, {}).get
        most, newest = constant(MOST_LANES, lanes), constant(NEWEST, generation)
        sums = self._ledger.sums
        # With less to do a link may run at a lower generation to save power.
        loaded = sums[PCIE_MOVED] * SECOND_NS > PCIE_LOAD * sums[TIME]
        full = link_rate(max(most, lanes), max(newest, generation) if loaded else generation)
        if rate < full:
            put(PCIE_DEGRADED, tick_ns)
            put(PCIE_EXTRA, round(moved * SECOND_NS * (1 / rate - 1 / full)))
        return round(tick_ns * used) if used >= PCIE_FULL else 0

    def _nvlink_ns(self, tick: Tick, windows: Windows, gap_ns: int) -> int:
        """Return the tick if NVLink is busy in this gap, else 0; note links that are missing.

        NVML's bytes are read once a second. Those of a second that lies in the gap as a whole stand
        for the second after it too, while the gap lasts. Hardware counters tell of the tick itself.
        """
        put, tick_ns = self._ledger.put, tick.end_ns - tick.start_ns
        raw = windows.get(NVLINK_RAW[0])
        at_once = raw is not None and raw.covered_ns > 0  # else another has taken the counters
        moved = max(risen(windows, name) for name in (NVLINK_RAW if at_once else NVLINK))
        span_ns = tick_ns if at_once else NVLINK_READ_NS
        put(NVLINK_MOVED, moved)
        for name in NVLINK_ERRORS:
            rise = risen(windows, name)
            if rise:
                put(("rise", name), rise)
        up = highest(windows, LINKS_UP)
        if up is None:
            return 0
        expected = highest(windows, LINKS_EXPECTED)
        self.links_expected = max(up, expected or 0.0, self.links_expected or 0.0)
        if up < self.links_expected:
            put(NVLINK_DEGRADED, tick_ns)
        if not gap_ns:
            self._nvlink_until_ns = NEVER_NS
        elif moved and gap_ns >= span_ns:
            busy = moved * SECOND_NS >= NVLINK_BUSY * up * NVLINK_BYTES * span_ns
            after_ns = 0 if span_ns == tick_ns else span_ns
            self._nvlink_until_ns = tick.end_ns + after_ns if busy else NEVER_NS
        return tick_ns if self._nvlink_until_ns >= tick.end_ns else 0


def link_rate(lanes: float, generation: float) -> float:
    """Return the bytes a second that a PCIe link carries each way, coding left out."""
    return lanes * LANE_BYTES * math.exp2(generation - 1)

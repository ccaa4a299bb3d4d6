"""PCIe byte counters of 32 bits, made into such that do not come round.

NVML's fields 197 and 198 count the bytes of packets as the GPU sees them: what the host sends it is
received. They have 32 bits (H200, driver 580), so at the 64 GB/s of 16 lanes of generation 5 they
come round every 67 ms. Between two reads that are closer than that at the link's highest rate, the
increase is exact. After a longer gap it is not known, and not guessed: counting goes on from there.
"""

from collections.abc import Sequence
from typing import Any

import pynvml

from gpuwatch import nvml
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns

FIELDS = (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES)
UNSIGNED_INT = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
LANE_BYTES = (250_000_000, 500_000_000, 10**9, 2 * 10**9, 4 * 10**9, 8 * 10**9, 16 * 10**9)
LANES = 16
WRAP = 2**32
SHORTEST_NS, LONGEST_NS = 20 * MILLISECOND_NS, SECOND_NS


def link_bytes_per_second(generation: float | None, lanes: float | None) -> int:
    """Return the most that a link can carry in one direction, that of generation 6 if unknown.

    Source: signalling rate of the PCI Express base specifications, less 8b/10b coding below
    generation 3; the little that later coding and packets take is left in.
    """
    place = min(max(int(generation or 6), 1), len(LANE_BYTES)) - 1
    return LANE_BYTES[place] * int(lanes or LANES)


class Unwrapped:
    """One counter: its increases, added up from what it showed first."""

    __slots__ = ("_raw", "_total")

    def __init__(self) -> None:
        self._raw: int | None = None
        self._total = 0

    def take(self, raw: int, modulus: int, most: float) -> int | None:
        """Return the total now that it shows `raw`; None if `most` cannot tell the increase.

        `most` is what can have been added since it was taken last. An increase beyond it is none:
        the counter was reset.
        """
        before, self._raw = self._raw, raw
        if before is None:
            self._total = raw
            return raw
        rise = (raw - before) % modulus
        if most >= modulus or rise > most:
            return None
        self._total += rise
        return self._total


class PcieBytes:
    """Both directions of one GPU's link; `rate` is the most bytes per second it can carry."""

    def __init__(self) -> None:
        self.rate = link_bytes_per_second(None, None)
        self._counters = (Unwrapped(), Unwrapped())
        self._since_ns = 0

    @property
    def period_ns(self) -> int:
        """How often to read: 4 times in 3 rounds of a counter at the link's highest rate.

        A read of both costs 0.5 to 0.8 ms of a core (H200), so no more often than lateness asks.
        """
        return min(max(WRAP * SECOND_NS // self.rate * 3 // 4, SHORTEST_NS), LONGEST_NS)

    def read(self, handle: Any) -> Sequence[int | None]:
        """Return the bytes received and transmitted. Raises NVMLError."""
        start = monotonic_ns()
        answers = pynvml.nvmlDeviceGetFieldValues(handle, FIELDS)
        most = self.rate * (monotonic_ns() - self._since_ns) / SECOND_NS
        raws = [nvml.count(answer) for answer in answers]
        self._since_ns = start
        return [
            counter.take(raw, WRAP if answer.valueType == UNSIGNED_INT else 2**64, most)
            for counter, raw, answer in zip(self._counters, raws, answers, strict=True)
        ]

"""What a NIC's driver counts beyond the kernel's own counters, every 5 s, as `ethtool -S` shows it.

Each read makes the driver ask its firmware, so this is not of the 10 ms loop's process.
Source: include/uapi/linux/ethtool.h of the kernel.
"""

import array
import errno
import fcntl
import os
import re
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuwatch import pulse as page
from gpuwatch.clock import SECOND_NS
from gpuwatch.errors import SourceUnsupported
from gpuwatch.interfaces import interfaces
from gpuwatch.network_signals import NIC_COUNTERS, NicCounter
from gpuwatch.signals import UNKNOWN_INTEGER, Column
from gpuwatch.source import Context, EntityInfo, Findings, Group, Opened

SIOCETHTOOL = 0x8946
GSTRINGS, GSTATS, GSSET_INFO = 0x1B, 0x1D, 0x37
SET_STATS = 1
NAME_BYTES = 32
PERIOD_NS = 5 * SECOND_NS
LOOK_NS = 60 * SECOND_NS
INT64 = 2**63 - 1
ROOM_BYTES = 1 << 16  # the kernel writes as many as there are now, whatever it was asked for


@dataclass(slots=True)
class Statistics:
    """The statistics of one interface: which of its numbers make each counter."""

    info: EntityInfo
    counters: list[tuple[NicCounter, list[int]]]
    numbers: int


class Ethtool:
    """Source of the duty `host`."""

    name = "ethtool"

    def __init__(self) -> None:
        self.findings = Findings()
        self._statistics: dict[str, Statistics] = {}
        self._looked_ns = 0

    def open(self, context: Context) -> Opened:
        """Find the interfaces that count. Raises SourceUnsupported if there is none."""
        self._sysfs = context.sysfs
        self._settings = context.settings["config"]["network"]
        self._pulse, self._excluded = context.pulse, context.excluded
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._look()
        if not self._statistics:
            self._socket.close()
            raise SourceUnsupported(
                "ethtool: no interface behind an RDMA port or in network.interfaces counts more"
                " than the kernel"
            )
        return self._opened()

    def housekeep(self, now_ns: int) -> Opened | None:
        """Look for other interfaces, and for another driver's names, once a minute."""
        if now_ns - self._looked_ns < LOOK_NS:
            return None
        self._looked_ns = now_ns
        before = self._statistics
        self._look()
        return self._opened() if self._statistics != before else None

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()

    def _look(self) -> None:
        self._statistics = {}
        for name, info in interfaces(self._sysfs, self._settings).items():
            if name in self._excluded:  # it hung
                continue
            try:
                names = self._names(name)
            except OSError as fault:
                self.findings.errors[f"names: {fault.strerror}"] += 1
                continue
            counters = [
                (counter, places)
                for counter in NIC_COUNTERS
                if (places := chosen(counter.patterns, names))
            ]
            if counters:
                self._statistics[name] = Statistics(info, counters, len(names))
        if self._statistics:
            self._pulse.set_names(list(self._statistics))

    def _opened(self) -> Opened:
        groups = [
            Group(
                f"ethtool{place}",
                tuple(
                    Column(one.info.entity, counter.signal, counter.label)
                    for counter, _ in one.counters
                ),
                PERIOD_NS,
                self._reader(place, name, one),
                phase_ns=SECOND_NS * place // len(self._statistics),
            )
            for place, (name, one) in enumerate(self._statistics.items())
        ]
        return Opened(tuple(groups), tuple(one.info for one in self._statistics.values()))

    def _reader(
        self, place: int, name: str, statistics: Statistics
    ) -> Callable[[], Sequence[float]]:
        words = self._pulse.words

        def read() -> Sequence[float]:
            words[page.READING] = place
            try:
                numbers = self._numbers(name, statistics.numbers)
            except OSError as fault:
                self.findings.errors[fault.strerror or "EIO"] += 1
                return [UNKNOWN_INTEGER] * len(statistics.counters)
            finally:
                words[page.READING] = page.NOT_READING
            return [
                sum(numbers[place] for place in places) & INT64 for _, places in statistics.counters
            ]

        return read

    def _names(self, interface: str) -> list[str]:
        """Return the names of the driver's statistics, in order; raises OSError."""
        total = self._count(interface)
        if not total:
            return []
        head = struct.Struct("=III")
        answer = self._ask(
            interface, head.pack(GSTRINGS, SET_STATS, total) + bytes(NAME_BYTES * total)
        )
        texts = [
            answer[place : place + NAME_BYTES]
            for place in range(head.size, head.size + NAME_BYTES * total, NAME_BYTES)
        ]
        return [text.split(b"\0")[0].decode(errors="replace") for text in texts]

    def _count(self, interface: str) -> int:
        """Return how many statistics the driver has now; raises OSError."""
        count = struct.Struct("=IIQI")
        answer = self._ask(interface, count.pack(GSSET_INFO, 0, 1 << SET_STATS, 0))
        _, _, mask, total = count.unpack_from(answer)
        return int(total) if mask else 0

    def _numbers(self, interface: str, total: int) -> Sequence[int]:
        """Return the driver's statistics, if they are still so many; raises OSError."""
        if self._count(interface) == total:
            answer = self._ask(interface, struct.pack("=II", GSTATS, total) + bytes(8 * total))
            if struct.unpack_from("=I", answer, 4)[0] == total:
                return struct.unpack_from(f"={total}Q", answer, 8)
        self._looked_ns = -LOOK_NS  # their names are others too: look at the next opportunity
        raise OSError(errno.ESTALE, "the driver's statistics changed")

    def _ask(self, interface: str, command: bytes) -> bytes:
        """Give the driver a command and return its answer, with some room behind it."""
        memory = array.array("B", command + bytes(ROOM_BYTES))
        address, _ = memory.buffer_info()
        request = struct.pack("16sP16x", os.fsencode(interface), address)
        fcntl.ioctl(self._socket, SIOCETHTOOL, request)
        return memory.tobytes()


def chosen(patterns: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the places of the names that the first matching pattern matches; none if none does."""
    for pattern in patterns:
        places = [place for place, name in enumerate(names) if re.fullmatch(pattern, name)]
        if places:
            return places
    return []

"""The carrier of interfaces: how often it came and went, every 10 ms, from held files.

The kernel's link messages come late and merged (about one a second for a NIC, whatever happened
between), but its counts lose nothing. So counts are read, and messages only say that interfaces
may have come, gone or been renamed. They are not decoded: that takes a millisecond each, and a
link that flaps makes thousands.
"""

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.count import Count
from gpuwatch.errors import SourceUnsupported
from gpuwatch.interfaces import interfaces
from gpuwatch.network_signals import CARRIER_CHANGES, CARRIER_DOWNS
from gpuwatch.signals import UNKNOWN_INTEGER, Column, Event
from gpuwatch.source import Context, EntityInfo, Findings, Group, Opened

LOOK_NS = 10 * SECOND_NS  # look for interfaces anyway, where no message may come
MESSAGE_BYTES = 65536
FILE_BYTES = 32


@dataclass(slots=True, eq=False)
class Carrier:
    """One interface; `files` are its counts of changes and of losses, none while it is gone."""

    info: EntityInfo
    number: str = ""  # the kernel's index: another one is another interface of this name
    lost: bool = False
    files: tuple[int, ...] = ()
    changes: Count = field(default_factory=Count)
    downs: Count = field(default_factory=Count)
    shown: bytes = b""
    told: int = 0

    def close(self) -> None:
        """Let go of the files; what comes under this name later counts on from here."""
        for file in self.files:
            os.close(file)
        self.files, self.shown = (), b""
        self.changes.renew()
        self.downs.renew()


class Netdev:
    """Source of the duty `network`."""

    name = "netdev"

    def __init__(self) -> None:
        self.findings = Findings()
        self._carriers: dict[str, Carrier] = {}
        self._route: Any = None
        self._wake: socket.socket | None = None
        self._looked_ns = 0

    def open(self, context: Context) -> Opened:
        """Find the interfaces. Raises SourceUnsupported if there is none to watch."""
        self._sysfs = context.sysfs
        network = context.settings["config"]["network"]
        self._settings = network
        self._period_ns = int(network["period_ms"] * MILLISECOND_NS)
        if not interfaces(self._sysfs, network):
            raise SourceUnsupported(
                "netdev: no interface behind an RDMA port, none in network.interfaces"
            )
        self._listen()
        self._look()
        return self._opened()

    def housekeep(self, now_ns: int) -> Opened | None:
        """Look at the interfaces again if the kernel has told of links; tell what was lost."""
        columns = self._columns()
        if self._told() or now_ns - self._looked_ns >= LOOK_NS:
            self._looked_ns = now_ns
            self._look()
        for carrier in self._carriers.values():
            downs = carrier.downs.total - carrier.told
            if carrier.files and downs > 0:
                carrier.told = carrier.downs.total
                self._tell(carrier, "nic_carrier_lost", f"{downs} times")
        return self._opened() if self._columns() != columns else None

    def close(self) -> None:
        """Let go of files and sockets."""
        for carrier in self._carriers.values():
            carrier.close()
        if self._wake is not None:
            self._wake.close()
            self._route.close()

    def _listen(self) -> None:
        from pyroute2 import IPRoute
        from pyroute2.netlink.rtnl import RTMGRP_LINK

        try:
            self._route = IPRoute()
            self._route.bind(groups=RTMGRP_LINK)
            self._wake = socket.socket(fileno=os.dup(self._route.fileno()))
            self._wake.setblocking(False)
        except OSError as fault:  # then they are looked at every ten seconds
            self.findings.errors[f"link messages: {fault.strerror}"] += 1

    def _told(self) -> bool:
        """Return whether the kernel has told of links since the last time."""
        told = False
        while self._wake is not None:
            try:
                self._wake.recv(MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError as fault:
                if fault.errno != errno.ENOBUFS:  # messages were dropped: all the more to see
                    raise
                self.findings.errors["link messages dropped"] += 1
            told = True
        return told

    def _look(self) -> None:
        """Open what has come, close what has gone."""
        found = interfaces(self._sysfs, self._settings)
        for name, carrier in self._carriers.items():
            if name not in found and not carrier.lost:
                carrier.close()
                carrier.lost = True
                self._tell(carrier, "nic_lost", "")
        for name, info in found.items():
            carrier = self._carriers.setdefault(name, Carrier(info))
            carrier.info = info
            number = self._number(name)
            if carrier.number != number or not carrier.files:
                carrier.close()
                self._open_files(carrier, name, number)
            if carrier.lost:
                carrier.lost = False
                self._tell(carrier, "nic_returned", "")

    def _number(self, name: str) -> str:
        try:
            return (self._sysfs / "class/net" / name / "ifindex").read_text().strip()
        except OSError:
            return "?"

    def _open_files(self, carrier: Carrier, name: str, number: str) -> None:
        folder = self._sysfs / "class/net" / name
        carrier.number = number
        try:
            for file in ("carrier_changes", "carrier_down_count"):
                carrier.files += (os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC),)
            self._count(carrier)
            carrier.told = carrier.downs.total
        except (OSError, ValueError) as fault:
            self._failed(carrier, fault)

    def _opened(self) -> Opened:
        infos = tuple(carrier.info for carrier in self._carriers.values())
        return Opened((Group("carrier", self._columns(), self._period_ns, self._read),), infos)

    def _columns(self) -> tuple[Column, ...]:
        return tuple(
            Column(carrier.info.entity, signal)
            for carrier in self._carriers.values()
            for signal in (CARRIER_CHANGES, CARRIER_DOWNS)
        )

    def _read(self) -> Sequence[float]:
        row: list[float] = []
        for carrier in self._carriers.values():
            if not carrier.files:
                row += (UNKNOWN_INTEGER, UNKNOWN_INTEGER)
                continue
            try:
                self._count(carrier)
                row += (carrier.changes.total, carrier.downs.total)
            except (OSError, ValueError) as fault:
                self._failed(carrier, fault)
                row += (UNKNOWN_INTEGER, UNKNOWN_INTEGER)
        return row

    def _count(self, carrier: Carrier) -> None:
        """Read how often the carrier changed, and, if it did, how often it went."""
        shown = os.pread(carrier.files[0], FILE_BYTES, 0)
        if shown != carrier.shown:
            carrier.changes.take(int(shown))
            carrier.downs.take(int(os.pread(carrier.files[1], FILE_BYTES, 0)))
            carrier.shown = shown

    def _failed(self, carrier: Carrier, fault: Exception) -> None:
        """Leave an interface alone until it is looked at again: most likely it has gone."""
        carrier.close()
        self.findings.errors[type(fault).__name__] += 1

    def _tell(self, carrier: Carrier, name: str, detail: str) -> None:
        event = Event(monotonic_ns(), carrier.info.entity, name, detail)
        self.findings.events.append(event)

"""RDMA ports: their bytes up to a hundred times a second, their errors and state twice a second.

The hardware is never changed: no counter is reset or switched on, and queue pairs are counted,
not looked at. What a read costs is measured; where it costs too much, it is done less often.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence

from gpuwatch import pulse as page
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.errors import SourceUnsupported
from gpuwatch.nldev import Link
from gpuwatch.pace import Pace
from gpuwatch.rdma_ports import RdmaPort, devices, node_guid, ports_of, wanted
from gpuwatch.rdma_reader import RdmaReader
from gpuwatch.signals import HOST, UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column, Entity, Event
from gpuwatch.source import Context, EntityInfo, Findings, Group, Opened

BYTES_MS = (10, 20, 50, 100)
BYTES_START_NS = 100 * MILLISECOND_NS
BYTES_READ_NS = 200_000  # of one port, at the 99th percentile: faster only if it is cheap
ERRORS_NS = tuple(int(seconds * SECOND_NS) for seconds in (0.5, 1, 2, 5, 10, 30, 60))
SAME_BOARDS = 3  # so many ports of one board say what its rate is
UNIT_QUIET_NS = 60 * SECOND_NS


class Rdma:
    """Source of the duty `network`."""

    name = "rdma"

    def __init__(self) -> None:
        self.findings = Findings()
        self._readers: list[RdmaReader] = []
        self._paces: dict[RdmaReader, Pace] = {}
        self._highest: dict[RdmaReader, float] = {}
        self._before: dict[RdmaReader, tuple[int, Sequence[float]]] = {}
        self._faulty_ns: dict[RdmaReader, int] = {}
        self._gone: set[str] = set()
        self._link: Link | None = None
        self._numbers: dict[str, tuple[int, int]] = {}  # netlink's index and GUID of each device

    def open(self, context: Context) -> Opened:
        """Find the ports. Raises SourceUnsupported if the host has none, or none is wanted."""
        self._sysfs = context.sysfs
        self._pulse = context.pulse
        self._only, self._excluded = context.only, context.excluded
        self._settings = context.settings["config"]["network"]
        try:
            self._link = Link()
        except OSError:  # no RDMA in this kernel, or not in this container
            self._link = None
        for device in devices(self._sysfs):
            self._take(device)
        if not self._readers:
            raise SourceUnsupported("rdma: no RDMA port on this host: nothing to read")
        fastest = self._settings["period_ms"]
        periods = [int(ms * MILLISECOND_NS) for ms in BYTES_MS if ms > fastest]
        self._bytes_pace = Pace(
            [int(fastest * MILLISECOND_NS), *periods],
            max(BYTES_START_NS, int(fastest * MILLISECOND_NS)),
            BYTES_READ_NS * len(self._readers),
        )
        return self._opened()

    def housekeep(self, now_ns: int) -> Opened | None:
        """See which devices came and went, look again at ports left alone, choose the paces."""
        before = self._shape()
        present = devices(self._sysfs)
        known = {reader.port.device for reader in self._readers}
        for device in known - set(present) - self._gone:
            self._lose(device)
        for device in present:
            if device in self._gone or device not in known:
                self._take(device)
        for reader in self._readers:
            if reader.retry_ns and now_ns >= reader.retry_ns:
                self._open_port(reader)
        self._expect()
        self._check_units(now_ns)
        self._choose_paces(now_ns)
        return self._opened() if self._shape() != before else None

    def close(self) -> None:
        """Let go of all descriptors."""
        for reader in self._readers:
            reader.close()
        if self._link is not None:
            self._link.close()

    def _take(self, device: str) -> None:
        """Take up a device that is new, or was lost and has come back."""
        readers = [reader for reader in self._readers if reader.port.device == device]
        if not readers:
            for port in ports_of(self._sysfs, device, self._settings):
                if self._only in (None, port.id):
                    reader = RdmaReader(port, self._link, self._teller(port), self.findings.errors)
                    self._readers.append(reader)
                    self._paces[reader] = Pace(ERRORS_NS, ERRORS_NS[0])
                    readers.append(reader)
            self._pulse.set_names([reader.port.id for reader in self._readers])
        if not (self._sysfs / "class/infiniband" / device / "ports").is_dir():
            if wanted(device, self._settings):
                self._lose(device)  # listed still, but it is going
            return
        if device in self._gone:
            self._gone.remove(device)
            self._numbers.pop(device, None)
            self._tell(Entity("rdma_device", device), "rdma_device_returned", "")
        if readers and self._link is not None and device not in self._numbers:
            with contextlib.suppress(OSError):
                self._numbers = self._link.devices()
        for reader in readers:
            self._open_port(reader)

    def _open_port(self, reader: RdmaReader) -> None:
        if reader.port.id in self._excluded:
            return
        words = self._pulse.words
        words[page.READING] = self._readers.index(reader)
        reader.open(self._sysfs, self._index(reader.port))
        words[page.READING] = page.NOT_READING

    def _index(self, port: RdmaPort) -> int | None:
        """Return the number that netlink has for the port's device, None if it has none."""
        index, guid = self._numbers.get(port.device, (None, None))
        # In a container, or with another root of /sys, the same name may be another device.
        return index if guid == node_guid(port.labels["node_guid"]) else None

    def _lose(self, device: str) -> None:
        if device in self._gone:
            return
        self._gone.add(device)
        self._tell(Entity("rdma_device", device), "rdma_device_lost", "")
        for reader in self._readers:
            if reader.port.device == device:
                reader.lose()

    def _opened(self) -> Opened:
        infos = [
            EntityInfo(
                reader.port.entity, {key: text for key, text in reader.port.labels.items() if text}
            )
            for reader in self._readers
        ]
        groups = [
            Group(
                f"port{place}",
                reader.columns,
                self._paces[reader].period_ns,
                self._port_read(place, reader),
                phase_ns=ERRORS_NS[0] * place // len(self._readers),
            )
            for place, reader in enumerate(self._readers)
        ]
        counts, bursts = self._bytes_columns()
        if counts:
            period_ns = self._bytes_pace.period_ns
            # A ring of its own for each pace: each reaches back as far as it should.
            name = f"bytes.{period_ns // MILLISECOND_NS}ms"
            groups.append(Group(name, (*counts, *bursts), period_ns, self._read_bytes))
        return Opened(tuple(groups), tuple(infos))

    def _bytes_columns(self) -> tuple[list[Column], list[Column]]:
        columns = [reader.bytes_columns for reader in self._readers]
        return (
            [column for counts, _ in columns for column in counts],
            [column for _, bursts in columns for column in bursts],
        )

    def _shape(self) -> tuple[object, ...]:
        """Return all of what decides about groups and entities."""
        ports = [(reader.columns, dict(reader.port.labels)) for reader in self._readers]
        paces = [self._paces[reader].period_ns for reader in self._readers]
        return ports, paces, self._bytes_columns(), self._bytes_pace.period_ns

    def _port_read(self, place: int, reader: RdmaReader) -> Callable[[], Sequence[float]]:
        words, pace = self._pulse.words, self._paces[reader]

        def read() -> Sequence[float]:
            start = monotonic_ns()
            words[page.READING] = place
            row = reader.read()
            words[page.READING] = page.NOT_READING
            pace.add(monotonic_ns() - start)
            return row

        return read

    def _read_bytes(self) -> Sequence[float]:
        start, words = monotonic_ns(), self._pulse.words
        row: list[float] = []
        peaks: list[float] = []
        for place, reader in enumerate(self._readers):
            words[page.READING] = place
            counts, bursts = reader.read_bytes()
            row += counts
            peaks += bursts
        words[page.READING] = page.NOT_READING
        self._bytes_pace.add(monotonic_ns() - start)
        return row + peaks

    def _choose_paces(self, now_ns: int) -> None:
        why = self._bytes_pace.look(now_ns)
        if why:
            self._tell(HOST, "rdma_pace", f"bytes of all ports {why}")
        for reader, pace in self._paces.items():
            why = pace.look(now_ns)
            if why:
                self._tell(reader.port.entity, "rdma_pace", f"errors {why}")

    def _expect(self) -> None:
        """Tell each port which rate it should have."""
        for reader in self._readers:
            if reader.state.up and math.isfinite(reader.state.rate):
                before = self._highest.get(reader, 0.0)
                self._highest[reader] = max(before, reader.state.rate)
        for reader in self._readers:
            reader.expect(self._expected(reader))
            if reader.state.rate_text:
                reader.port.labels["rate"] = reader.state.rate_text

    def _expected(self, reader: RdmaReader) -> float:
        if self._settings["expected_gbps"]:
            return float(self._settings["expected_gbps"]) * 1e9 / 8
        board = reader.port.labels["board_id"]
        rates = Counter(
            rate for other, rate in self._highest.items() if other.port.labels["board_id"] == board
        )
        if board and rates.total() >= SAME_BOARDS:
            rate, ports = rates.most_common(1)[0]
            if 2 * ports > rates.total():
                return rate
        return self._highest.get(reader, UNKNOWN_GAUGE)

    def _check_units(self, now_ns: int) -> None:
        """Tell of ports that count more bytes in a second than their link can carry."""
        for reader in self._readers:
            when_ns, counts = reader.newest
            before_ns, before = self._before.get(reader, (0, ()))
            self._before[reader] = reader.newest
            known = UNKNOWN_INTEGER not in (*counts, *before) and len(counts) == len(before)
            if not (known and counts) or when_ns - before_ns < SECOND_NS // 2:
                continue
            seconds = (when_ns - before_ns) / SECOND_NS
            rate = max((new - old) / seconds for new, old in zip(counts, before, strict=True))
            if rate <= reader.limit:
                continue
            self.findings.errors["rate above the link's"] += 1
            if now_ns - self._faulty_ns.get(reader, -UNIT_QUIET_NS) >= UNIT_QUIET_NS:
                text = reader.state.rate_text
                detail = f"{rate / 1e9:.3g} GB/s on a link of {text}: its unit is in doubt"
                self._tell(reader.port.entity, "rdma_unit_fault", detail)
            self._faulty_ns[reader] = now_ns

    def _teller(self, port: RdmaPort) -> Callable[[str, str], None]:
        return lambda name, detail: self._tell(port.entity, name, detail)

    def _tell(self, entity: Entity, name: str, detail: str) -> None:
        self.findings.events.append(Event(monotonic_ns(), entity, name, detail))

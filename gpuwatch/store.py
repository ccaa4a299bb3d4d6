"""The store: what must outlive the daemon.

All of it is small and held in memory; the file is written through. So the state is optional: no
fault of the file or the disk is raised, `fault` tells it, and the next write tries again with
everything. A file that is broken, foreign or of a newer gpuwatch is put aside.
All calls come from one thread.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import NamedTuple

from gpuwatch import database
from gpuwatch.alerts import AlertRow
from gpuwatch.database import APPLICATION_ID, VERSION, Answer, Broken, Connection
from gpuwatch.topology import in_bus_order

ALERT_TYPES = (str, str, str, str, int, str, (float, NoneType), int, str)
SLOT_TYPES = (str, str, str, str, *[(int, NoneType)] * 3)
LEASE_TYPES = (str, str, int)
PORT_TYPES = (str, float)

SCHEMA = f"""
BEGIN;
CREATE TABLE gpu_numbers (pci_bus_id TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE);
CREATE TABLE alerts (
    rule TEXT NOT NULL,
    entity_kind TEXT NOT NULL,
    entity_id TEXT NOT NULL,
    state TEXT NOT NULL,
    since_realtime_ns INTEGER NOT NULL,
    boot_id TEXT NOT NULL,
    value REAL,
    acknowledged INTEGER NOT NULL,
    recording TEXT NOT NULL,
    PRIMARY KEY (rule, entity_kind, entity_id)
);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""
# Tables that files of this version may lack: they are from before the tables were.
LATER = """
CREATE TABLE IF NOT EXISTS inventory (
    pci_bus_id TEXT PRIMARY KEY,
    uuid TEXT NOT NULL,
    serial TEXT NOT NULL,
    name TEXT NOT NULL,
    nvlink_links INTEGER,
    pcie_width INTEGER,
    pcie_generation INTEGER
);
CREATE TABLE IF NOT EXISTS leases (
    what TEXT PRIMARY KEY,
    boot_id TEXT NOT NULL,
    until_boottime_ns INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS rdma_ports (port TEXT PRIMARY KEY, rate REAL NOT NULL);
"""


class SlotRow(NamedTuple):
    """What belongs into a PCI slot of this host; None is not known yet."""

    pci_bus_id: str
    uuid: str
    serial: str
    name: str
    nvlink_links: int | None = None
    pcie_width: int | None = None
    pcie_generation: int | None = None


class LeaseRow(NamedTuple):
    """Something left to other tools, until CLOCK_BOOTTIME of that boot reaches the time."""

    what: str
    boot_id: str
    until_boottime_ns: int


class PortRow(NamedTuple):
    """The rate that the link of an RDMA port belongs to have, in bytes per second."""

    port: str
    rate: float


class Store:
    """What is known of GPUs, alerts and leases, in the file `path` or (None) in memory alone.

    `inventory`, `leases` and `ports` are read only: what is saved takes their place. `fault` is ""
    or one line: why what is here is not in the file, or what was lost with it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: Connection | None = None
        self._numbers: dict[str, int] = {}
        self._alerts: dict[tuple[str, str, str], AlertRow] = {}
        self.inventory: tuple[SlotRow, ...] = ()
        self.leases: tuple[LeaseRow, ...] = ()
        self.ports: tuple[PortRow, ...] = ()
        self._adopted = False  # once the file's content is here, the file has nothing else
        self._lost = ""
        self._fault = ""
        self._attempt(())

    @property
    def fault(self) -> str:
        """Return the present fault, else what this daemon lost when it started, else ""."""
        return self._fault or self._lost

    def gpu_numbers(self, pci_bus_ids: Sequence[str]) -> dict[str, int]:
        """Return each GPU's number: given once per address in the order of the bus, then kept.

        Addresses not seen before are numbered after all that were.
        """
        new = in_bus_order(set(pci_bus_ids) - self._numbers.keys())
        for number, address in enumerate(new, max(self._numbers.values(), default=-1) + 1):
            self._numbers[address] = number
        if new:
            self._attempt(())
        return {address: self._numbers[address] for address in pci_bus_ids}

    @property
    def numbers(self) -> dict[str, int]:
        """The number of every address that has one."""
        return dict(self._numbers)

    def renumber(self, pci_bus_ids: Iterable[str]) -> None:
        """Give these GPUs numbers in this order; forget all others, with their alerts."""
        addresses = {str(number): address for address, number in self._numbers.items()}
        self._numbers = {address: number for number, address in enumerate(pci_bus_ids)}
        alerts = list(self._alerts.values())
        self._alerts.clear()
        for row in alerts:
            if row.entity_kind.startswith("gpu"):  # gpu 3, gpu_instance 3/1
                number, slash, part = row.entity_id.partition("/")
                address = addresses.get(number, "")
                if address not in self._numbers:
                    continue
                row = row._replace(entity_id=f"{self._numbers[address]}{slash}{part}")
            self._alerts[row[:3]] = row
        self._attempt(())

    def save_inventory(self, rows: Iterable[SlotRow]) -> None:
        """Keep these slots, and no others."""
        self.inventory = tuple(rows)
        self._attempt(())

    def save_leases(self, rows: Iterable[LeaseRow]) -> None:
        """Keep these leases, and no others."""
        self.leases = tuple(rows)
        self._attempt(())

    def save_ports(self, rows: Iterable[PortRow]) -> None:
        """Keep these ports, and no others."""
        self.ports = tuple(rows)
        self._attempt(())

    def save_alerts(self, rows: Sequence[AlertRow]) -> None:
        """Keep these rows in place of earlier ones of the same rule and entity."""
        self._attempt(rows)

    def load_alerts(self) -> list[AlertRow]:
        """Return the latest row of every rule and entity."""
        return list(self._alerts.values())

    def close(self) -> None:
        """Close the file; what is in memory stays readable."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def run(self, work: Callable[[Connection], Answer]) -> Answer | None:
        """Do something with tables of one's own, in one transaction.

        None if it was not done: there is no file, or `fault` says what is wrong with it. A table
        may be missing: the file may be another one than the last time.
        """
        if self._path is None:
            return None
        if self._fault:
            self._attempt(())
        try:
            with self._opened(self._path) as file:
                return work(file)
        except database.FAULTS as error:
            self._give_up(error)
            return None

    def _attempt(self, alerts: Iterable[AlertRow]) -> None:
        """Keep the rows and bring the file up to date, as far as it lets us."""
        self._alerts.update({row[:3]: row for row in alerts})
        if self._path is None:
            return
        try:
            self._write(self._path)
            self._fault = ""
        except database.FAULTS as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.close()
        self._fault = f"{self._path}: {error}; state is kept in memory only"

    def _opened(self, path: Path) -> Connection:
        if self._file is not None and not path.exists():  # removed while we ran
            self.close()
        if self._file is None:
            self._open(path)
        assert self._file is not None
        return self._file

    def _write(self, path: Path) -> None:
        with self._opened(path) as file:
            for table, rows in (
                ("gpu_numbers", list(self._numbers.items())),
                ("alerts", list(self._alerts.values())),
                ("inventory", self.inventory),
                ("leases", self.leases),
                ("rdma_ports", self.ports),
            ):
                file.execute(f"DELETE FROM {table}")  # noqa: S608 - names of our own
                if rows:
                    marks = ", ".join("?" * len(rows[0]))
                    file.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)  # noqa: S608

    def _open(self, path: Path) -> None:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        try:
            self._file = database.connect(path, self._prepare)
        except Broken as broken:
            aside = database.put_aside(path)
            self._lost = f"{path}: {broken}; put aside as {aside.name}, its state is lost"
            self._file = database.connect(path, self._prepare)
        except database.NOT_OPENED:
            # A log cannot be opened where nothing may be written, the file alone still can.
            database.salvage(path, self._adopt)
            raise

    def _prepare(self, file: Connection) -> None:
        tables, identity = file.execute(
            "SELECT (SELECT count(*) FROM sqlite_master), application_id FROM pragma_application_id"
        ).fetchone()
        if not tables and not identity:
            file.executescript(SCHEMA)
        self._adopt(file)
        file.executescript(LATER)

    def _adopt(self, file: Connection) -> None:
        """Take over what the file has and we do not; what is in use stays as it is."""
        database.check(file)
        numbers = database.rows(file, "gpu_numbers", ("pci_bus_id", "number"), (str, int))
        alerts = database.rows(file, "alerts", AlertRow._fields, ALERT_TYPES)
        later = {name for (name,) in file.execute("SELECT name FROM sqlite_master")}
        slots, leases, ports = (
            database.rows(file, name, kind._fields, types) if name in later else []
            for name, kind, types in (
                ("inventory", SlotRow, SLOT_TYPES),
                ("leases", LeaseRow, LEASE_TYPES),
                ("rdma_ports", PortRow, PORT_TYPES),
            )
        )
        if self._adopted:
            return
        self._adopted = True
        for address, number in numbers:
            if number not in self._numbers.values():
                self._numbers.setdefault(address, number)
        for row in alerts:
            self._alerts.setdefault(row[:3], AlertRow(*row))
        here = {slot.pci_bus_id for slot in self.inventory}
        self.inventory += tuple(SlotRow(*row) for row in slots if row[0] not in here)
        held = {lease.what for lease in self.leases}
        self.leases += tuple(LeaseRow(*row) for row in leases if row[0] not in held)
        linked = {port.port for port in self.ports}
        self.ports += tuple(PortRow(*row) for row in ports if row[0] not in linked)

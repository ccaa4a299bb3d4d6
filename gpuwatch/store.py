"""The only door to SQLite: what must outlive the daemon.

All of it is small and held in memory; the file is written through. So the state is optional: no
fault of the file or the disk is raised, `fault` tells it, and the next write tries again with
everything. A file that is broken, foreign or of a newer gpuwatch is put aside.
All calls come from one thread.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

from gpuwatch.alerts import AlertRow

APPLICATION_ID = 0x67707577  # "gpuw", in the file's header
VERSION = 1
LOCK_SECONDS = 0.2  # no longer, the daemon's tick waits for it
# Codes of damage; SQLITE_ERROR is a table or column that should be there.
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
ALERT_TYPES = (str, str, str, str, int, str, (float, NoneType), int, str)
BROKEN_KEPT = 5  # more broken files than these would fill the disk of a restarting daemon

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


class _Broken(Exception):
    """The file is not one of ours, or not one that can be read."""


class Store:
    """Numbers of GPUs and states of alerts, in the file `path` or (None) in memory alone.

    `fault` is "" or one line: why what is here is not in the file, or what was lost with it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: sqlite3.Connection | None = None
        self._numbers: dict[str, int] = {}
        self._alerts: dict[tuple[str, str, str], AlertRow] = {}
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
        new = sorted(set(pci_bus_ids) - self._numbers.keys(), key=lambda one: (len(one), one))
        for number, address in enumerate(new, max(self._numbers.values(), default=-1) + 1):
            self._numbers[address] = number
        if new:
            self._attempt(())
        return {address: self._numbers[address] for address in pci_bus_ids}

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

    def _attempt(self, alerts: Iterable[AlertRow]) -> None:
        """Keep the rows and bring the file up to date, as far as it lets us."""
        self._alerts.update({row[:3]: row for row in alerts})
        if self._path is None:
            return
        try:
            self._write(self._path)
            self._fault = ""
        except (_Broken, sqlite3.Error, OSError, UnicodeError) as error:
            self.close()
            self._fault = f"{self._path}: {error}; state is kept in memory only"

    def _write(self, path: Path) -> None:
        if self._file is not None and not path.exists():  # removed while we ran
            self.close()
        if self._file is None:
            self._open(path)
        assert self._file is not None
        with self._file as file:
            file.execute("DELETE FROM gpu_numbers")
            file.executemany("INSERT INTO gpu_numbers VALUES (?, ?)", self._numbers.items())
            file.execute("DELETE FROM alerts")
            file.executemany(
                "INSERT INTO alerts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", self._alerts.values()
            )

    def _open(self, path: Path) -> None:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        try:
            self._connect(path)
        except _Broken as broken:
            aside = _put_aside(path)
            self._lost = f"{path}: {broken}; put aside as {aside.name}, its state is lost"
            self._connect(path)
        except sqlite3.OperationalError:
            # A log cannot be opened where nothing may be written, the file alone still can.
            self._read_only(path)
            raise

    def _connect(self, path: Path) -> None:
        connection = sqlite3.connect(path, timeout=LOCK_SECONDS)
        try:
            tables, identity = connection.execute(
                "SELECT (SELECT count(*) FROM sqlite_master), application_id "
                "FROM pragma_application_id"
            ).fetchone()
            if not tables and not identity:
                connection.executescript(SCHEMA)
            self._adopt(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            self._file = connection
        except UnicodeDecodeError as error:  # damage within a text
            raise _Broken(str(error)) from error
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE:
                raise _Broken(str(error)) from error
            raise
        finally:
            if self._file is None:
                connection.close()

    def _read_only(self, path: Path) -> None:
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with suppress(sqlite3.Error, UnicodeDecodeError, _Broken):
            connection = sqlite3.connect(uri, uri=True)
            try:
                self._adopt(connection)
            finally:
                connection.close()

    def _adopt(self, file: sqlite3.Connection) -> None:
        """Take over what the file has and we do not; what is in use stays as it is."""
        (identity,) = file.execute("PRAGMA application_id").fetchone()
        if identity != APPLICATION_ID:
            raise _Broken("not a gpuwatch database")
        (version,) = file.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            raise _Broken(f"has version {version}, this gpuwatch knows {VERSION}")
        (verdict,) = file.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise _Broken(f"is damaged ({verdict.splitlines()[-1]})")
        numbers = file.execute("SELECT pci_bus_id, number FROM gpu_numbers").fetchall()
        alerts = file.execute(f"SELECT {', '.join(AlertRow._fields)} FROM alerts").fetchall()  # noqa: S608
        if not (_typed(numbers, (str, int)) and _typed(alerts, ALERT_TYPES)):
            raise _Broken("is damaged (a value of another type)")
        for address, number in numbers:
            if number not in self._numbers.values():
                self._numbers.setdefault(address, number)
        for row in alerts:
            self._alerts.setdefault(row[:3], AlertRow(*row))


def _typed(rows: Iterable[tuple[Any, ...]], kinds: tuple[Any, ...]) -> bool:
    return all(all(map(isinstance, row, kinds)) for row in rows)


def _put_aside(path: Path) -> Path:
    """Rename a file, and what SQLite keeps beside it, out of the way."""
    names = [path.with_name(f"{path.name}.broken-{n}") for n in range(1, BROKEN_KEPT + 1)]
    aside = next((name for name in names if not name.exists()), names[-1])
    path.replace(aside)
    for suffix in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            Path(f"{path}{suffix}").replace(f"{aside}{suffix}")
    return aside

"""The only door to SQLite: opens our file, checks that it is sound, puts aside what is not."""

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from gpuwatch.errors import StateError

Answer = TypeVar("Answer")
Connection = sqlite3.Connection

APPLICATION_ID = 0x67707577  # "gpuw", in the file's header
VERSION = 1
LOCK_SECONDS = 0.2  # no longer, the daemon's tick waits for it
PATIENT_SECONDS = 5.0  # for a command, which nobody waits for
# Codes of damage; SQLITE_ERROR is a table or column that should be there.
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
BROKEN_KEPT = 5  # more broken files than these would fill the disk of a restarting daemon


class Broken(Exception):
    """The file is not one of ours, or not one that can be read."""


FAULTS = (Broken, sqlite3.Error, OSError, UnicodeError)
NOT_OPENED = sqlite3.OperationalError


def connect(path: Path, prepare: Callable[[Connection], None]) -> Connection:
    """Open a file to write it, once `prepare` has found it sound.

    Raises Broken for a file that is damaged, and what SQLite says of all else.
    """
    connection = sqlite3.connect(path, timeout=LOCK_SECONDS)
    opened = False
    try:
        prepare(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        opened = True
    except UnicodeDecodeError as error:  # damage within a text
        raise Broken(str(error)) from error
    except sqlite3.Error as error:
        if _is_damage(error):
            raise Broken(str(error)) from error
        raise
    finally:
        if not opened:
            connection.close()
    return connection


def check(file: Connection) -> None:
    """Raise Broken unless the file is ours, of this version and whole."""
    (identity,) = file.execute("PRAGMA application_id").fetchone()
    if identity != APPLICATION_ID:
        raise Broken("not a gpuwatch database")
    (version,) = file.execute("PRAGMA user_version").fetchone()
    if version != VERSION:
        raise Broken(f"has version {version}, this gpuwatch knows {VERSION}")
    (verdict,) = file.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise Broken(f"is damaged ({verdict.splitlines()[-1]})")


def salvage(path: Path, adopt: Callable[[Connection], None]) -> None:
    """Read what can be read of a file beside which nothing may be written."""
    uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    with suppress(sqlite3.Error, UnicodeDecodeError, Broken):
        connection = sqlite3.connect(uri, uri=True)
        try:
            adopt(connection)
        finally:
            connection.close()


def look(path: Path, work: Callable[[Connection], Answer]) -> Answer:
    """Read a file that a daemon may be writing; nothing of it is changed.

    Raises StateError if it is missing, cannot be read or is not one of ours.
    """
    if not is_there(path):
        raise StateError(f"{path}: no such file: no daemon has kept its state there")
    try:
        if not os.access(path, os.R_OK):
            raise PermissionError
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=PATIENT_SECONDS)) as file:
            check(file)
            return work(file)
    except PermissionError as error:
        raise StateError(f"{path}: permission denied: run as root") from error
    except FAULTS as error:
        damage = isinstance(error, Broken) or _is_damage(error)
        fix = "the daemon sets it aside when it starts" if damage else "try again as root"
        raise StateError(f"{path}: {error}: {fix}") from error


def is_there(path: Path) -> bool:
    """Say whether there is such a file; StateError if that cannot be seen."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError as error:
        raise StateError(f"{path}: permission denied: run as root") from error
    except OSError as error:  # too long a name, a loop of links
        raise StateError(f"{path}: {error.strerror}: name another") from error
    return True


def _is_damage(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE


def rows(
    file: Connection, table: str, columns: Sequence[str], types: tuple[Any, ...]
) -> list[tuple[Any, ...]]:
    """Return a table's rows; raises Broken for a value of another type."""
    found = file.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()  # noqa: S608
    if not _typed(found, types):
        raise Broken("is damaged (a value of another type)")
    return found


def _typed(found: Iterable[tuple[Any, ...]], kinds: tuple[Any, ...]) -> bool:
    return all(all(map(isinstance, row, kinds)) for row in found)


def put_aside(path: Path) -> Path:
    """Rename a file, and what SQLite keeps beside it, out of the way."""
    names = [path.with_name(f"{path.name}.broken-{n}") for n in range(1, BROKEN_KEPT + 1)]
    aside = next((name for name in names if not name.exists()), names[-1])
    path.replace(aside)
    for suffix in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            Path(f"{path}{suffix}").replace(f"{aside}{suffix}")
    return aside

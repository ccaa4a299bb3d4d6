"""What of readings, baselines and runs without a result is kept: tables in the store's file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpuwatch.canary_reading import UNITS, CanaryReading, Shape
from gpuwatch.database import Connection
from gpuwatch.judgement import Course
from gpuwatch.signals import Entity
from gpuwatch.soundness import Computer

READINGS_KEPT = 500  # of each course: ten days of every half hour
EPOCHS_KEPT = 5  # environments of each canary on each GPU
COURSES_KEPT = 2000  # of all GPUs that ever were here
FAILED_KEPT = 20  # runs without a result, of each canary on each GPU

KEY = ("entity_kind", "entity_id", *Shape._fields, "environment")
MEASURED = (
    "time",
    "result",
    "value",
    "spread",
    "value_per_hertz",
    "clock_hertz",
    "power_watts",
    "temperature_celsius",
    "throttle_seconds",
    "detail",
    "seconds",
)
# Columns of readings that files of this version may lack: they are from before the columns were.
LATER = {"judged": "TEXT NOT NULL DEFAULT ''", "seconds": "REAL"}
TABLES = (
    """
CREATE TABLE IF NOT EXISTS canary_courses (
    id INTEGER PRIMARY KEY,
    entity_kind TEXT NOT NULL,
    entity_id TEXT NOT NULL,
    canary TEXT NOT NULL,
    size INTEGER NOT NULL,
    dtype TEXT NOT NULL,
    direction TEXT NOT NULL,
    gpus INTEGER NOT NULL,
    environment TEXT NOT NULL,
    model TEXT NOT NULL,
    newest REAL NOT NULL,
    state TEXT NOT NULL,
    UNIQUE (entity_kind, entity_id, canary, size, dtype, direction, gpus, environment)
)""",
    """
CREATE TABLE IF NOT EXISTS canary_readings (
    course INTEGER NOT NULL,
    time REAL NOT NULL,
    result TEXT NOT NULL,
    value REAL,
    spread REAL,
    value_per_hertz REAL,
    clock_hertz REAL,
    power_watts REAL,
    temperature_celsius REAL,
    throttle_seconds REAL,
    detail TEXT NOT NULL,
    frozen INTEGER NOT NULL,
    judged TEXT NOT NULL DEFAULT '',
    seconds REAL
)""",
    "CREATE INDEX IF NOT EXISTS canary_readings_of ON canary_readings (course, time)",
    """
CREATE TABLE IF NOT EXISTS canary_failures (
    entity_kind TEXT NOT NULL,
    entity_id TEXT NOT NULL,
    canary TEXT NOT NULL,
    reading TEXT NOT NULL
)""",
)


@dataclass(slots=True)
class Entry:
    """A course with what it is of. `environment` is JSON, `newest` the time of its last reading.

    `shared` is whether the whole node had its loss when that was last seen.
    """

    entity: Entity
    shape: Shape
    environment: str
    model: str = ""
    newest: float = 0.0
    readings: int = 0
    course: Course = field(default_factory=Course)
    shared: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from all others."""
        return (*self.entity, *self.shape, self.environment)

    @property
    def place(self) -> tuple[Entity, Shape, str]:
        """What its environments have in common: of an all-reduce, also between which GPUs."""
        return self.entity, self.shape, gpu_set(self.environment)

    @property
    def computer(self) -> Computer:
        """What computes its results."""
        return self.entity, gpu_set(self.environment)


class Taken(NamedTuple):
    """A reading as it was taken in: whether it could move no baseline, and what was judged of it.

    `kind` is a judgement's, "" if that is not known.
    """

    reading: CanaryReading
    frozen: bool
    kind: str = ""


class Kept(NamedTuple):
    """A course with its readings, oldest first."""

    entry: Entry
    readings: Sequence[Taken]


def gpu_set(environment: str) -> str:
    """Return between which GPUs something ran, by its environment; "" for one GPU alone."""
    return str(json.loads(environment).get("gpu_set", ""))


def epoch(environment: Mapping[str, str]) -> str:
    """Return an environment as it is kept and compared; what is not known is left out."""
    return json.dumps({name: value for name, value in environment.items() if value}, sort_keys=True)


def load(file: Connection) -> list[Entry]:
    """Return all courses; those that cannot be read are left out, and begin anew."""
    if not _is_there(file):
        return []
    counts = dict(file.execute("SELECT course, count(*) FROM canary_readings GROUP BY course"))
    columns = ", ".join(("id", *KEY, "model", "newest", "state"))
    found = []
    for row in file.execute(f"SELECT {columns} FROM canary_courses"):  # noqa: S608 - our own names
        number, kind, identifier, *shape, environment, model, newest, state = row
        try:
            course = Course.from_json(json.loads(state))
            if not isinstance(json.loads(environment), dict) or shape[0] not in UNITS:
                continue
            entry = Entry(Entity(kind, identifier), Shape(*shape), environment, model, newest)
        except (ValueError, TypeError, KeyError):
            continue
        entry.course, entry.readings = course, counts.get(number, 0)
        found.append(entry)
    return found


def load_recent(file: Connection, entries: Iterable[Entry], most: int) -> list[Kept]:
    """Return so many of the last readings of each course; those that make no sense are left out."""
    found = []
    for entry in entries if _is_there(file) else ():
        with suppress(ValueError, TypeError, KeyError):
            found.append(Kept(entry, load_readings(file, entry, most)))
    return found


def load_readings(file: Connection, entry: Entry, most: int = -1) -> list[Taken]:
    """Return the readings of a course, oldest first; with `most` the last of them alone."""
    lacking = dict.fromkeys(_lacking(file), "NULL")
    columns = ", ".join(lacking.get(name, name) for name in (*MEASURED, "frozen", "judged"))
    query = f"""
        SELECT {columns} FROM canary_readings
        WHERE course = ({_ID}) ORDER BY time DESC LIMIT ?"""  # noqa: S608
    shared = {
        **entry.shape._asdict(),
        "entity": entry.entity,
        "model": entry.model,
        "environment": json.loads(entry.environment),
    }
    found = []
    for *values, frozen, kind in file.execute(query, (*entry.key, most)):
        told = dict(zip(MEASURED, values, strict=True))
        reading = CanaryReading.from_json({**shared, **told})
        found.append(Taken(reading, bool(frozen), str(kind or "")))
    return found[::-1]


def load_results(file: Connection) -> dict[Computer, list[tuple[float, bool]]]:
    """Return when what computed something that was checked, and whether it was right."""
    if not _is_there(file):
        return {}
    found: dict[Computer, list[tuple[float, bool]]] = {}
    for kind, identifier, environment, time, result in file.execute(
        """
        SELECT entity_kind, entity_id, environment, time, result FROM canary_readings
        JOIN canary_courses ON id = course
        WHERE result = 'wrong' OR (canary = 'integrity' AND result = 'ok') ORDER BY time"""
    ):
        with suppress(ValueError, AttributeError):  # damaged
            computer = Entity(kind, identifier), gpu_set(environment)
            found.setdefault(computer, []).append((time, result == "ok"))
    return found


def save(file: Connection, entry: Entry, readings: Iterable[Taken]) -> None:
    """Keep a course as it is now, with these readings of it beside those that are kept."""
    for table in TABLES:
        file.execute(table)
    for name in _lacking(file):
        file.execute(f"ALTER TABLE canary_readings ADD COLUMN {name} {LATER[name]}")
    row = (*entry.key, entry.model, entry.newest, json.dumps(entry.course.to_json()))
    columns = (*KEY, "model", "newest", "state")
    file.execute(
        f"""
        INSERT INTO canary_courses ({", ".join(columns)}) VALUES ({_marks(columns)})
        ON CONFLICT DO UPDATE SET
            model = excluded.model, newest = excluded.newest, state = excluded.state""",  # noqa: S608
        row,
    )
    (number,) = file.execute(_ID, entry.key).fetchone()
    file.executemany(
        f"INSERT INTO canary_readings (course, {', '.join(MEASURED)}, frozen, judged) "  # noqa: S608
        f"VALUES ({_marks((*MEASURED, 0, 0, 0))})",
        [
            (number, *(getattr(reading, name) for name in MEASURED), int(frozen), kind)
            for reading, frozen, kind in readings
        ],
    )
    file.execute(
        """
        DELETE FROM canary_readings WHERE course = ?1 AND time <= (
            SELECT time FROM canary_readings WHERE course = ?1
            ORDER BY time DESC LIMIT 1 OFFSET ?2)
        AND time NOT IN (SELECT value FROM json_each(?3))""",
        (number, READINGS_KEPT, json.dumps([look.time for look in entry.course.accepted])),
    )
    _forget_epochs(file, entry)


def save_failed(file: Connection, reading: CanaryReading) -> None:
    """Keep a run without a result, and of each canary on each GPU the last ones alone."""
    for table in TABLES:
        file.execute(table)
    key = (*reading.entity, reading.canary)
    file.execute(
        "INSERT INTO canary_failures VALUES (?, ?, ?, ?)", (*key, json.dumps(reading.to_json()))
    )
    of_key = "FROM canary_failures WHERE (entity_kind, entity_id, canary) = (?, ?, ?)"
    file.execute(
        f"""
        DELETE {of_key} AND rowid NOT IN (SELECT rowid {of_key} ORDER BY rowid DESC LIMIT ?)""",
        (*key, *key, FAILED_KEPT),
    )
    file.execute(
        """
        DELETE FROM canary_failures WHERE rowid NOT IN (
            SELECT rowid FROM canary_failures ORDER BY rowid DESC LIMIT ?)""",
        (COURSES_KEPT,),
    )


def load_failed(file: Connection) -> list[CanaryReading]:
    """Return the runs without a result, oldest first; what makes no sense is left out."""
    if not file.execute("SELECT 1 FROM sqlite_master WHERE name = 'canary_failures'").fetchone():
        return []
    found = []
    for (told,) in file.execute("SELECT reading FROM canary_failures ORDER BY rowid"):
        with suppress(ValueError, TypeError, KeyError, OverflowError):
            found.append(CanaryReading.from_json(json.loads(told)))
    return found


def _forget_epochs(file: Connection, entry: Entry) -> None:
    """Remove environments of the canary that are long past, and GPUs that are long gone.

    By number and not by age: a clock that is years ahead for a while must not cost baselines.
    """
    alike = " AND ".join(f"{name} = ?" for name in KEY[:-1])
    alike += " AND ifnull(json_extract(environment, '$.gpu_set'), '') = ?"
    place = (*entry.key[:-1], entry.place[-1])
    gone = file.execute(
        f"""
        DELETE FROM canary_courses WHERE
        ({alike} AND id NOT IN (
            SELECT id FROM canary_courses WHERE {alike} ORDER BY newest DESC LIMIT ?))
        OR id NOT IN (SELECT id FROM canary_courses ORDER BY newest DESC LIMIT ?)""",  # noqa: S608
        (*place, *place, EPOCHS_KEPT, COURSES_KEPT),
    ).rowcount
    if gone:
        file.execute(
            "DELETE FROM canary_readings WHERE course NOT IN (SELECT id FROM canary_courses)"
        )


def remove(file: Connection, entry: Entry) -> None:
    """Forget a course and its readings."""
    if _is_there(file):
        file.execute(f"DELETE FROM canary_readings WHERE course = ({_ID})", entry.key)  # noqa: S608
        file.execute(f"DELETE FROM canary_courses WHERE id = ({_ID})", entry.key)  # noqa: S608


def _is_there(file: Connection) -> bool:
    query = "SELECT count(*) FROM sqlite_master WHERE name IN ('canary_courses', 'canary_readings')"
    return bool(file.execute(query).fetchone()[0] == 2)


def _lacking(file: Connection) -> list[str]:
    here = {row[1] for row in file.execute("PRAGMA table_info (canary_readings)")}
    return [name for name in LATER if name not in here]


def _marks(columns: Iterable[Any]) -> str:
    return ", ".join("?" for _ in columns)


_ID = f"SELECT id FROM canary_courses WHERE ({', '.join(KEY)}) = ({_marks(KEY)})"  # noqa: S608

"""The store: what survives in the file, and that no fault of file or disk reaches the caller."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.alerts import AlertRow
from gpuwatch.database import APPLICATION_ID, BROKEN_KEPT, VERSION
from gpuwatch.signals import Entity, Event
from gpuwatch.source import EntityInfo
from gpuwatch.store import SCHEMA, LeaseRow, PortRow, SlotRow, Store

BUS = ["0000:1b:00.0", "0000:43:00.0", "000f:01:00.0"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "gpuwatch.sqlite"


@pytest.fixture
def opened():
    """Return a function that opens stores and closes them in the end."""
    stores = []

    def open_store(path):
        stores.append(Store(path))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def row(entity="0", **changes):
    fields = AlertRow("gpu_lost", "gpu", entity, "firing", 17 * 10**17, "boot-1", 0.5, False, "")
    return fields._replace(**changes)


def test_numbers_follow_the_bus_and_stay(path, opened):
    """GPUs are numbered in the order of the bus; new ones append, lost ones keep theirs."""
    store = opened(path)
    assert store.gpu_numbers([BUS[1], BUS[2]]) == {BUS[1]: 0, BUS[2]: 1}
    store.close()
    again = opened(path)
    assert again.gpu_numbers([BUS[2], BUS[0]]) == {BUS[2]: 1, BUS[0]: 2}
    assert again.gpu_numbers(["10000:01:00.0", "f000:01:00.0"]) == {
        "f000:01:00.0": 3,
        "10000:01:00.0": 4,
    }
    assert again.fault == ""


@given(st.lists(st.lists(st.sampled_from([f"0000:{n:02x}:00.0" for n in range(9)])), max_size=8))
@settings(deadline=None)
def test_numbers_are_unique_and_never_change(looks):
    """Whatever is seen in whatever order, a number belongs to one address for good."""
    store = Store(None)
    given_out = {}
    for look in looks:
        numbers = store.gpu_numbers(look)
        assert numbers.keys() == set(look)
        assert given_out.items() & numbers.items() == {
            (address, number) for address, number in numbers.items() if address in given_out
        }
        given_out |= numbers
    assert sorted(given_out.values()) == list(range(len(given_out)))


def test_the_latest_row_of_an_alert_survives(path, opened):
    """A later row takes the place of the earlier one of the same rule and entity."""
    store = opened(path)
    store.save_alerts([row("0"), row("1", value=None)])
    store.save_alerts([row("0", state="inactive", recording="lost-1.gwr")])
    store.close()
    assert sorted(opened(path).load_alerts()) == [
        row("0", state="inactive", recording="lost-1.gwr"),
        row("1", value=None),
    ]


SLOTS = [
    SlotRow(BUS[0], "GPU-0", "165", "NVIDIA H200", 18, 16, 5),
    SlotRow(BUS[1], "GPU-1", "", "NVIDIA H200"),
]
LEASE = LeaseRow("gpus", "boot-1", 3600 * 10**9)


def test_inventory_and_leases_survive_and_can_be_taken_back(path, opened):
    """What is saved is there again, whole; what was left out of a later save is not."""
    store = opened(path)
    store.save_inventory(SLOTS)
    store.save_leases([LEASE])
    store.close()
    again = opened(path)
    assert again.inventory == tuple(SLOTS)
    assert again.leases == (LEASE,)
    again.save_inventory(SLOTS[1:])
    again.save_leases([])
    again.close()
    last = opened(path)
    assert (last.inventory, last.leases, last.fault) == ((SLOTS[1],), (), "")


def test_any_name_that_was_told_can_be_kept(path, opened):
    """A sampler or a recording may tell of a device whose name is no UTF-8, or half a character."""
    told = json.loads(r'{"name": "mlx5_\udcff", "label": "\ud800", "event": "\udc80: lost"}')
    entity = Entity.from_json(["rdma_port", told["name"]])
    info = EntityInfo.from_json({"entity": ["gpu", "0"], "labels": {"uuid": told["label"]}})
    event = {"time_ns": 1, "entity": ["host", ""], "name": "odd", "detail": told["event"]}
    names = [entity.id, info.labels["uuid"], Event.from_json(event).detail]
    assert names == [r"mlx5_\udcff", r"\ud800", r"\udc80: lost"]
    store = opened(path)
    store.save_ports([PortRow(name, 1.0) for name in names])
    assert store.fault == ""
    store.close()
    assert [port.port for port in opened(path).ports] == names


def test_a_file_from_before_the_inventory_gains_it(path, opened):
    """A file of the same version without the later tables keeps its numbers and alerts."""
    path.parent.mkdir()
    file = sqlite3.connect(path)
    file.executescript(SCHEMA)
    file.execute("INSERT INTO gpu_numbers VALUES (?, 5)", BUS[:1])
    file.commit()
    file.close()
    store = opened(path)
    assert (store.inventory, store.leases, store.fault) == ((), (), "")
    assert store.gpu_numbers(BUS[:1]) == {BUS[0]: 5}
    store.save_inventory(SLOTS)
    store.close()
    assert opened(path).inventory == tuple(SLOTS)


def test_what_was_taken_back_stays_so_while_the_file_is_locked(path, opened):
    """A lease that ended while nothing could be written does not come back from the file."""
    store = opened(path)
    store.save_leases([LEASE])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.save_leases([])
    assert "locked" in store.fault
    other.execute("ROLLBACK")
    other.close()
    store.save_alerts([])
    assert (store.leases, store.fault) == ((), "")
    store.close()
    assert opened(path).leases == ()


def test_new_numbers_follow_the_bus_and_take_alerts_along(path, opened):
    """GPUs that stay are numbered without a gap, with their alerts; those of others are gone."""
    store = opened(path)
    store.gpu_numbers([BUS[2]])
    store.gpu_numbers([BUS[1]])
    store.gpu_numbers([BUS[0]])
    host = row("", entity_kind="host", rule="gpu_missing")
    store.save_alerts([row("0"), row("1"), row("2/1", entity_kind="gpu_instance"), host])
    store.renumber([BUS[0], BUS[2]])
    store.close()
    again = opened(path)
    assert again.gpu_numbers([BUS[0], BUS[2]]) == {BUS[0]: 0, BUS[2]: 1}
    expected = [row("1"), row("0/1", entity_kind="gpu_instance"), host]
    assert sorted(again.load_alerts()) == sorted(expected)


def test_memory_alone_needs_no_file(opened):
    """Without a path everything works and nothing is a fault."""
    store = opened(None)
    store.save_alerts([row()])
    assert store.load_alerts() == [row()]
    assert store.gpu_numbers(BUS) == {BUS[0]: 0, BUS[1]: 1, BUS[2]: 2}
    assert store.fault == ""


def test_the_file_is_in_wal_mode(path, opened):
    """Readers do not wait for the daemon, nor it for them."""
    opened(path).close()
    other = sqlite3.connect(path)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


def foreign(path):
    file = sqlite3.connect(path)
    file.execute("CREATE TABLE songs (title)")
    file.commit()
    file.close()


def newer(path):
    Store(path).close()
    file = sqlite3.connect(path)
    file.execute("PRAGMA user_version = 999")
    file.close()


def filled(path):
    store = Store(path)
    store.gpu_numbers(BUS)
    store.save_alerts([row(str(number)) for number in range(500)])
    store.close()


def truncated(path):
    filled(path)
    os.truncate(path, path.stat().st_size // 2)


def garbled(path):
    filled(path)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(8192))


def retyped(path):
    filled(path)
    file = sqlite3.connect(path)
    file.execute("UPDATE alerts SET since_realtime_ns = 'soon' WHERE entity_id = '7'")
    file.commit()
    file.close()


def without_a_table(path):
    filled(path)
    file = sqlite3.connect(path)
    file.execute("DROP TABLE alerts")
    file.commit()
    file.close()


def text(path):
    path.write_text('{"version": 1, "boot_id": "1111')


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (foreign, "not a gpuwatch database"),
        (newer, f"version 999, this gpuwatch knows {VERSION}"),
        (truncated, ""),
        (garbled, ""),
        (retyped, "another type"),
        (without_a_table, "no such table"),
        (text, "not a database"),
    ],
)
def test_a_file_that_cannot_be_used_is_put_aside(path, opened, spoil, reason):
    """It is renamed, the fault says so in one line, and a new file is begun."""
    path.parent.mkdir()
    spoil(path)
    store = opened(path)
    assert path.with_name("gpuwatch.sqlite.broken-1").exists()
    assert reason in store.fault
    assert "put aside as gpuwatch.sqlite.broken-1" in store.fault
    assert len(store.fault.splitlines()) == 1
    assert store.load_alerts() == []
    store.save_alerts([row()])
    assert "put aside" in store.fault  # told as long as the daemon lives
    store.close()
    again = opened(path)
    assert (again.load_alerts(), again.fault) == ([row()], "")


def test_broken_files_do_not_pile_up(path, opened):
    """However often it happens, only a few broken files are kept."""
    path.parent.mkdir()
    for _ in range(BROKEN_KEPT + 3):
        text(path)
        opened(path).close()
    assert len(list(path.parent.glob("*.broken-*"))) == BROKEN_KEPT


def test_an_empty_file_is_a_new_one(path, opened):
    """A file of no bytes, as a full disk leaves it, is simply begun."""
    path.parent.mkdir()
    path.touch()
    store = opened(path)
    store.save_alerts([row()])
    store.close()
    assert (store.fault, opened(path).load_alerts()) == ("", [row()])


@given(st.binary(min_size=1, max_size=300), st.integers(0, 40_000))
@settings(deadline=None, max_examples=150)
def test_no_damage_is_raised(tmp_path_factory, noise, offset):
    """Bytes written anywhere into the file never make the store fail."""
    path = tmp_path_factory.mktemp("state") / "gpuwatch.sqlite"
    filled(path)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(noise)
    store = Store(path)
    store.save_alerts([row("new")])
    assert row("new") in store.load_alerts()
    numbers = store.gpu_numbers(BUS)
    assert len(set(numbers.values())) == len(BUS)
    store.close()


def test_damage_found_while_running_costs_nothing(path, opened):
    """A file spoilt under the open store is put aside, and the new one holds everything."""
    store = opened(path)
    store.gpu_numbers(BUS)
    store.close()
    text(path)
    store.save_alerts([row()])
    store.close()
    again = opened(path)
    assert again.load_alerts() == [row()]
    assert again.gpu_numbers([BUS[2]]) == {BUS[2]: 2}


def test_a_removed_file_is_written_again(path, opened):
    """Somebody emptied the state directory: the next write restores the file."""
    store = opened(path)
    store.gpu_numbers(BUS)
    shutil.rmtree(path.parent)
    store.save_alerts([row()])
    store.close()
    again = opened(path)
    assert again.gpu_numbers([BUS[2]]) == {BUS[2]: 2}
    assert (again.load_alerts(), again.fault) == ([row()], "")


def test_a_path_that_is_no_file_is_a_fault(tmp_path, opened):
    """A directory where the file should be: in memory, with a fault that names it."""
    store = opened(tmp_path)
    store.save_alerts([row()])
    assert str(tmp_path) in store.fault
    assert store.load_alerts() == [row()]


def test_a_state_directory_below_a_file_is_a_fault(tmp_path, opened):
    """The directory cannot be made: in memory, and in the file once it can be."""
    blocker = tmp_path / "state"
    blocker.touch()
    path = blocker / "gpuwatch.sqlite"
    store = opened(path)
    store.save_alerts([row()])
    assert "kept in memory only" in store.fault
    blocker.unlink()
    store.save_alerts([row("1")])
    assert store.fault == ""
    store.close()
    assert sorted(opened(path).load_alerts()) == [row(), row("1")]


def test_numbers_in_use_are_not_changed_by_a_file_found_later(tmp_path, opened):
    """A file that could not be read at first adds what is free; numbers already served stay."""
    disk = tmp_path / "disk"
    earlier = opened(disk / "gpuwatch.sqlite")
    earlier.gpu_numbers(BUS)
    earlier.save_alerts([row("0"), row("1")])
    earlier.close()
    disk.rename(tmp_path / "away")
    disk.touch()
    store = opened(disk / "gpuwatch.sqlite")
    store.gpu_numbers([BUS[1]])
    store.save_alerts([row("0", state="inactive")])
    disk.unlink()
    (tmp_path / "away").rename(disk)
    store.save_alerts([])
    assert store.gpu_numbers(BUS) == {BUS[0]: 3, BUS[1]: 0, BUS[2]: 2}
    assert store.fault == ""
    assert sorted(store.load_alerts()) == [row("0", state="inactive"), row("1")]


def test_a_locked_file_is_written_later(path, opened):
    """While another process holds the file, rows wait in memory."""
    store = opened(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.save_alerts([row()])
    assert "locked" in store.fault
    other.execute("ROLLBACK")
    other.close()
    store.save_alerts([])
    assert store.fault == ""
    store.close()
    assert opened(path).load_alerts() == [row()]


@pytest.fixture
def disk(tmp_path):
    """Return the root of a file system of 256 KiB; needs root and mounts."""
    root = tmp_path / "disk"
    root.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("cannot mount a file system here")
    yield root
    subprocess.run(["umount", "-l", str(root)], check=True)


def fill(disk):
    """Take all space of the disk; return the file to remove for some."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return ballast


def test_a_full_disk_is_written_when_there_is_room(disk, opened):
    """ENOSPC: rows stay in memory, and go into the file with the next write that can."""
    path = disk / "gpuwatch.sqlite"
    store = opened(path)
    store.gpu_numbers(BUS)
    ballast = fill(disk)
    store.save_alerts([row(str(number)) for number in range(300)])
    assert "full" in store.fault
    assert len(store.load_alerts()) == 300
    ballast.unlink()
    store.save_alerts([])
    assert store.fault == ""
    store.close()
    again = opened(path)
    assert len(again.load_alerts()) == 300
    assert again.gpu_numbers([BUS[1]]) == {BUS[1]: 1}


def test_a_disk_that_is_full_from_the_start_is_a_fault(disk, opened):
    """No file can be begun: in memory, and no broken file is left behind."""
    fill(disk)
    store = opened(disk / "gpuwatch.sqlite")
    assert "kept in memory only" in store.fault
    store.save_alerts([row()])
    assert store.load_alerts() == [row()]
    assert not list(disk.glob("*.broken-*"))


def test_a_read_only_disk_is_still_read(disk, opened):
    """EROFS: GPUs keep their numbers, alerts are restored, only new state is not kept."""
    path = disk / "gpuwatch.sqlite"
    store = opened(path)
    store.gpu_numbers([BUS[1]])
    store.save_alerts([row()])
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    store = opened(path)
    assert "kept in memory only" in store.fault
    assert store.load_alerts() == [row()]
    assert store.gpu_numbers([BUS[0], BUS[1]]) == {BUS[0]: 1, BUS[1]: 0}
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    store.save_alerts([row(state="inactive")])
    assert store.fault == ""
    store.close()
    again = opened(path)
    assert again.load_alerts() == [row(state="inactive")]
    assert again.gpu_numbers([BUS[0]]) == {BUS[0]: 1}


def test_a_limit_on_file_size_is_a_fault(path):
    """EFBIG, in a process of its own: no signal, no traceback, the rows in memory."""
    script = f"""
import resource
from pathlib import Path
from gpuwatch.alerts import AlertRow
from gpuwatch.store import Store
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
store = Store(Path({str(path)!r}))
assert store.fault == "", store.fault
row = AlertRow("gpu_lost", "gpu", "0", "firing", 0, "boot", None, False, "x" * 100_000)
store.save_alerts([row])
assert "kept in memory only" in store.fault, store.fault
assert store.load_alerts() == [row]
store.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_file_says_whose_it_is(path, opened):
    """The header carries gpuwatch's mark and the version of the tables."""
    opened(path).close()
    file = sqlite3.connect(path)
    marks = [
        file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    ]
    file.close()
    assert marks == [APPLICATION_ID, VERSION]

"""The host's pressure, storage and stuck processes, read from trees as kernels have them."""

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from node import Node, quiet
from running import wait_for

from gpuwatch import storage
from gpuwatch.host_signals import IO_COLUMNS
from gpuwatch.pulse import Pulse
from gpuwatch.signals import HOST, UNKNOWN_INTEGER
from gpuwatch.source import Context
from gpuwatch.sources import host
from gpuwatch.sources.host import Host

CASE = Path(__file__).parent / "data/cases/HO-01"
SETTINGS = {"config": {"host": {"period_ms": 100.0}}}
VARIANTS = json.loads((CASE / "faults.json").read_text())["variants"]

DISKS = """\
   7       0 loop0 9 0 800 0 0 0 0 0 0 0 0
 259       0 nvme0n1 100 0 {read} 0 50 0 {written} 0 0 0 0
 259       1 nvme0n1p1 100 0 1000 0 50 0 2000 0 0 0 0
 259       2 nvme1c1n1 9 0 5000 0 9 0 5000 0 0 0 0
   8       0 sda 1 0 10 0 1 0 20 0 0 0 0
 253       0 dm-0 100 0 1000 0 50 0 2000 0 0 0 0
"""
MOUNTS = """\
device proc mounted on /proc with fstype proc
device server:/data mounted on /data with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2
\tbytes:\t1 2 3 4 {read} {written} 7 8
\tper-op statistics
device server:/data mounted on /again with fstype nfs4 statvers=1.1
\tbytes:\t1 2 3 4 {read} {written} 7 8
device server:/home mounted on /home with fstype nfs statvers=1.1
\tbytes:\t1 2 3 4 10 20 7 8
"""
LUSTRE = """\
snapshot_time 1700000000.123 secs.nsecs
read_bytes 9 samples [bytes] 4096 1048576 {read}
write_bytes 9 samples [bytes] 4096 1048576 {written}
open 9 samples [regs]
"""


class Tree:
    """A host of files; `groups` are the source's, by name."""

    def __init__(self, directory):
        self.procfs, self.sysfs = directory / "proc", directory / "sys"
        (self.sysfs / "block").mkdir(parents=True)
        self.procfs.mkdir(parents=True)
        self.disk("nvme0n1")
        self.disk("sda")
        self.disk("nvme1c1n1")
        for name in ("loop0", "dm-0"):
            self.disk(name, f"virtual/block/{name}")
        self.write("stat", "cpu  1 2 3 4 500 6 7\ncpu0 1 2 3 4 500 6 7\n")
        self.write("vmstat", "nr_free_pages 1\nnuma_miss 7\nnuma_pages_migrated 9\n")
        self.move(0, 0)

    def disk(self, name, place=""):
        device = self.sysfs / "devices" / (place or f"pci0000:00/{name}")
        device.mkdir(parents=True)
        (self.sysfs / "block" / name).symlink_to(device)

    def write(self, name, text):
        path = self.procfs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def move(self, read, written):
        """Move bytes of each kind of storage."""
        sectors = {"read": read // 512, "written": written // 512}
        self.write("diskstats", DISKS.format(**sectors))
        self.write("self/mountstats", MOUNTS.format(read=read, written=written))
        self.write("fs/lustre/llite/scratch-1/stats", LUSTRE.format(read=read, written=written))

    def process(self, pid, state, files=(), flags=0, name="python3"):
        self.write(f"{pid}/stat", f"{pid} ({name}) {state} 1 1 1 0 -1 {flags} 0 0\n")
        self.write(f"{pid}/comm", f"{name}\n")
        folder = self.procfs / str(pid) / "fd"
        folder.mkdir(exist_ok=True)
        for number, target in enumerate(files):
            (folder / str(number)).symlink_to(target)

    def open(self):
        self.source = Host()
        opened = self.source.open(Context(SETTINGS, Pulse.create(1), self.sysfs, self.procfs))
        self.groups = {group.name: group for group in opened.groups}
        return self

    def told(self, name):
        return [event for event in self.source.findings.events if event.name == name]

    def read(self, group):
        """Return what a group's columns hold, by name and entity."""
        cells = self.groups[group].read()
        return {
            (column.entity.id, column.name): value
            for column, value in zip(self.groups[group].columns, cells, strict=True)
        }


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def some(kind="some"):
    return f'host_pressure_seconds_total{{kind="{kind}"}}'


@pytest.mark.parametrize("variant", VARIANTS, ids=["absent", "switched off", "old kernel"])
def test_pressure_is_what_the_kernel_offers_of_it(tree, monkeypatch, variant):
    """What is absent, switched off or without `full` is left out and told once; no error."""
    if variant.get("proc/pressure") != "ENOENT":
        shutil.copytree(CASE / "proc/pressure", tree.procfs / "pressure")
    refused = {tree.procfs.parent / path: name for path, name in variant.items()}
    read_bytes = Path.read_bytes

    def read(path):
        if path in refused:
            raise OSError(getattr(errno, refused[path]), "Operation not supported")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    tree.open()
    told = [(event.name, event.entity) for event in tree.source.findings.events]
    if variant:
        assert "pressure" not in tree.groups
        assert told == [("pressure_off", HOST)]
        assert "psi=1" in tree.source.findings.events[0].detail
    else:
        assert told == []
        assert tree.read("pressure") == {
            ("cpu", some()): 91,
            ("memory", some()): 12345,
            ("memory", some("full")): 99,
        }
    assert tree.source.findings.errors == {}
    tree.source.close()


def test_pressure_of_this_kernel(tmp_path):
    """The real files of the machine that runs the tests, if it has them."""
    if not os.access("/proc/pressure/io", os.R_OK):
        pytest.skip("this kernel has no pressure stall information")
    source = Host()
    opened = source.open(Context(SETTINGS, Pulse.create(1)))
    (group,) = [group for group in opened.groups if group.name == "pressure"]
    first, second = group.read(), group.read()
    assert all(0 <= one <= other for one, other in zip(first, second, strict=True))
    assert source.findings.errors == {}
    source.close()


def test_a_file_of_pressure_that_fails_later_is_unknown_and_counted(tree, monkeypatch):
    """Never the old value, and never 0."""
    shutil.copytree(CASE / "proc/pressure", tree.procfs / "pressure")
    tree.open()

    def broken(*_arguments):
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(host.os, "pread", broken)
    assert set(tree.read("pressure").values()) == {UNKNOWN_INTEGER}
    assert sum(tree.source.findings.errors.values()) == 2
    tree.source.close()


def storage_of(cells, kind):
    return tuple(
        cells["", f'host_io_{what}_bytes_total{{storage="{kind}"}}'] for what in ("read", "written")
    )


def test_each_byte_of_storage_counts_once(tree):
    """Not again for its partition, for what is made of disks, or for a second mount."""
    assert list(storage.disks(tree.procfs, tree.sysfs)) == [
        ("nvme0n1", 0, 0),
        ("sda", 5120, 10240),
    ]
    assert [name for name, *_ in storage.nfs(tree.procfs, tree.sysfs)] == [
        "server:/data",
        "server:/home",
    ]
    tree.open()
    first = tree.read("io")
    assert [column.name for column in IO_COLUMNS] == [name for _, name in first]
    for kind in ("disk", "nfs", "lustre"):
        assert storage_of(first, kind) == (0, 0)
    tree.move(1 << 20, 1 << 21)
    second = tree.read("io")
    for kind in ("disk", "nfs", "lustre"):
        assert storage_of(second, kind) == (1 << 20, 1 << 21)


def test_a_mount_that_is_made_anew_takes_nothing_away(tree):
    """Totals never fall: a counter that begins again goes on from where the sum is."""
    tree.open()
    tree.read("io")
    for moved in (4096, 0, 8192):
        tree.move(moved, moved)
        tree.read("io")
    assert storage_of(tree.read("io"), "nfs") == (12288, 12288)


def test_storage_that_is_not_there_is_unknown(tree):
    """A node without network file systems serves no 0 of them; one mounted later is counted."""
    (tree.procfs / "self/mountstats").unlink()
    shutil.rmtree(tree.procfs / "fs")
    tree.open()
    cells = tree.read("io")
    assert storage_of(cells, "nfs") == storage_of(cells, "lustre") == (UNKNOWN_INTEGER,) * 2
    assert storage_of(cells, "disk") == (0, 0)
    tree.move(512, 512)
    tree.read("io")
    tree.move(1024, 1024)
    assert storage_of(tree.read("io"), "nfs") == (512, 512)
    assert tree.source.findings.errors == {}


def test_time_waited_for_storage_never_falls(tree):
    """The kernel's own sum does, now and then."""
    tree.open()
    waits = []
    for jiffies in (500, 498, 510):
        tree.write("stat", f"cpu  1 2 3 4 {jiffies} 6 7\n")
        waits.append(tree.read("io")["", "host_io_wait_seconds_total"])
    assert waits == [500, 500, 510]


def test_pages_are_counted_as_the_kernel_does(tree):
    """What it does not count is unknown."""
    cells = tree.open().read("io")
    name = 'host_numa_events_total{{event="{}"}}'.format
    assert cells["", name("miss")] == 7
    assert cells["", name("pages_migrated")] == 9
    assert cells["", name("hint_faults")] == UNKNOWN_INTEGER


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("diskstats", "1 2\n"),
        ("diskstats", DISKS.replace("{read}", "x")),
        ("stat", ""),
        ("vmstat", "a b\n"),
    ],
)
def test_files_that_cannot_be_understood_are_counted(tree, name, text):
    """The rest of the row is read all the same."""
    tree.open()
    tree.write(name, text)
    cells = tree.read("io")
    assert UNKNOWN_INTEGER in cells.values()
    assert storage_of(cells, "lustre") == (0, 0)
    assert sum(tree.source.findings.errors.values()) == 1


def test_a_process_that_holds_a_gpu_and_does_not_wake_is_counted(tree):
    """Twice in a row, so that a short wait is none; not without a GPU, not a kernel thread."""
    gpu = ("/dev/null", "/dev/nvidia0")
    tree.process(10, "D", gpu)
    tree.process(11, "D", ["/dev/null"])
    tree.process(12, "D", gpu, flags=0x00200000)
    tree.process(13, "S", gpu)
    tree.process(14, "D", gpu, name=") D (")
    tree.open()
    name = ("", "host_gpu_processes_blocked")
    assert tree.read("blocked")[name] == 0
    tree.process(15, "D", gpu)
    assert tree.read("blocked")[name] == 2
    assert sorted(event.detail for event in tree.told("gpu_process_blocked")) == [
        "process 10 (python3) cannot be interrupted",
        "process 14 () D () cannot be interrupted",
    ]
    assert tree.read("blocked")[name] == 3
    assert len(tree.told("gpu_process_blocked")) == 3
    for pid in (10, 14, 15):
        tree.process(pid, "S", ())
    assert tree.read("blocked")[name] == 0


def test_what_may_not_be_known_of_a_process_is_unknown(tree, monkeypatch):
    """Whose files are hidden from us may hold a GPU: then there is no number."""
    tree.process(10, "D", ["/dev/nvidia0"])
    tree.open()
    tree.read("blocked")

    def hidden(_path):
        raise PermissionError

    monkeypatch.setattr(host.os, "scandir", hidden)
    assert math.isnan(tree.read("blocked")["", "host_gpu_processes_blocked"])


def test_a_daemon_serves_the_host(tmp_path):
    """From the files to the page, in seconds and bytes."""
    tree = Tree(tmp_path / "host")
    shutil.copytree(CASE / "proc/pressure", tree.procfs / "pressure")
    node = Node(tmp_path)
    config = quiet("nvml_state", "host")
    with node.running("--path.procfs", str(tree.procfs), config=config) as running:
        name = "gpuwatch_host_pressure_seconds_total"
        wait_for(lambda: running.value(name, 'resource="memory"', 'kind="some"') == 0.012345)
        assert running.value(name, 'resource="io"', 'kind="some"') is None
        assert running.value("gpuwatch_host_numa_events_total", 'event="miss"') == 7
        assert running.value("gpuwatch_host_io_wait_seconds_total") == 5.0

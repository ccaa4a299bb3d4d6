"""What `gpuwatch verify` measures with tools of others: fio and ib_write_bw, scripted ones here."""

import shutil
from pathlib import Path

import pytest
from rdma_tree import Tree

from gpuwatch.checks.rdma_loopback import RdmaLoopback, bandwidth
from gpuwatch.checks.storage import PREFIX, Storage
from gpuwatch.verify import Node

# As perftest prints it, columns and banner of linux-rdma/perftest.
BANNER = """
 WARNING: BW peak won't be measured in this run.
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF          Device         : mlx5_0
 Number of qps   : 1            Transport type : IB
 Connection type : RC           Using SRQ      : OFF
 TX depth        : 128
 Mtu             : 4096[B]
 Link type       : IB
---------------------------------------------------------------------------------------
 local address: LID 0x1907 QPN 0x0867 PSN 0x6d058e RKey 0x1fffb9 VAddr 0x007f58a406e000
 remote address: LID 0x1922 QPN 0x0855 PSN 0xc6797b RKey 0x1fffb9 VAddr 0x007f71dddd9000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]
{rows}
---------------------------------------------------------------------------------------
"""
FIO = """#!/bin/sh
for word; do case $word in --filename=*) file=${word#*=};; --rw=*) kind=${word#*=};; esac; done
echo "$@" >> "$CALLS"
echo data > "$file"
echo 'fio: this note is no JSON'
case $kind in
  write) echo '{"jobs": [{"error": 0, "write": {"bw_bytes": 2500000000}}]}';;
  read) echo '{"jobs": [{"error": 0, "read": {"bw_bytes": 5500000000}}]}';;
  *) echo '{"jobs": [{"error": 0, "read": {"iops": READS}}]}';;
esac
"""


def tool(directory, monkeypatch, name, text):
    """Put a program on an otherwise short path."""
    path = directory / "bin"
    path.mkdir(exist_ok=True)
    (path / name).write_text(text)
    (path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(directory / "calls"))


def test_storage_that_is_fast(tmp_path, monkeypatch):
    """Rates and random reads are told, as rules of thumb; no file is left."""
    tool(tmp_path, monkeypatch, "fio", FIO.replace("READS", "250000.5"))
    found = list(Storage().run(Node(scratch=tmp_path)))
    assert [(one.measure, one.verdict, one.value) for one in found] == [
        ("write", "UNKNOWN", 2.5e9),
        ("read", "UNKNOWN", 5.5e9),
        ("4K reads/s", "PASS", 250000.5),
    ]
    assert all(one.thumb and one.entity == str(tmp_path) for one in found)
    assert not list(tmp_path.glob(f"{PREFIX}*"))
    first, second, _ = (tmp_path / "calls").read_text().splitlines()
    assert "--direct=1" in first
    assert "--size=268435456" in first
    assert "--size=5 " in second  # what was written by then, so that no more is


def test_storage_that_is_slow(tmp_path, monkeypatch):
    """Too few random reads are a warning by rule of thumb."""
    tool(tmp_path, monkeypatch, "fio", FIO.replace("READS", "8000"))
    (*_, reads) = Storage().run(Node(scratch=tmp_path))
    assert (reads.verdict, reads.thumb, reads.expectation) == ("WARN", True, 100_000)


@pytest.mark.parametrize(
    ("says", "verdict"),
    [
        ("fio: io_u error on file f: Input/output error: read offset=0", "FAIL"),
        ("fio: looks like your file system does not support direct=1", "UNKNOWN"),
    ],
)
def test_storage_that_errs(tmp_path, monkeypatch, says, verdict):
    """An error of the disk fails, a file system that cannot be measured does not."""
    tool(tmp_path, monkeypatch, "fio", f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    (one,) = Storage().run(Node(scratch=tmp_path))
    assert (one.verdict, one.thumb, one.reason) == (verdict, False, says)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_storage_without_room_or_tool(tmp_path, monkeypatch):
    """Nothing is written where it would fill the disk, nor without fio."""
    tool(tmp_path, monkeypatch, "fio", FIO)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))
    (one,) = Storage().run(Node(scratch=tmp_path))
    assert one.verdict == "SKIP"
    assert "0 MiB free" in one.reason
    monkeypatch.setenv("PATH", "/nowhere")
    (one,) = Storage().run(Node(scratch=tmp_path))
    assert (one.verdict, one.reason) == ("SKIP", "fio is not installed")
    assert one.next_step.startswith("apt-get install fio")
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("unit", "rows", "value"),
    [
        ("Gb/sec", " 65536  5000  0.00  387.42  0.738", 387.42e9 / 8),
        ("Gb/sec", " 2 5000 0.05 0.05 3.1\n 8388608 5000 391.5 391.27 0.00583", 391.27e9 / 8),
        ("MB/sec", " 65536  664644  0.00  11071.58  0.177145", 11071.58 * 2**20),
        ("Gb/sec", "Completion with error at client", None),
        ("Gb/sec", "", None),
    ],
)  # fmt: skip
def test_what_perftest_prints(unit, rows, value):
    """The average of the largest message counts, in the unit of its column; else nothing."""
    found = bandwidth(BANNER.format(unit=unit, rows=rows))
    assert found == (value if value is None else pytest.approx(value))


def ports(tmp_path, *states):
    tree = Tree(tmp_path / "sysfs")
    for number, state in enumerate(states):
        tree.mlx5(number)
        (tree.port(f"mlx5_{number}") / "state").write_text(f"{state}\n")
        (tree.port(f"mlx5_{number}") / "rate").write_text("400 Gb/sec (4X NDR)\n")
    return Node(sysfs=tmp_path / "sysfs")


def perftest(average):
    """Return a program that waits as a server, and as a client refuses once and then tells."""
    rows = f" 1048576    2000             0.00               {average}             0.047"
    return f"""#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *127.0.0.1) ;; *) exec sleep 60;; esac
if [ ! -e "$CALLS.refused" ]; then
  touch "$CALLS.refused"; echo "Couldn't connect to 127.0.0.1" >&2; exit 1
fi
cat <<'END'
{BANNER.format(unit="Gb/sec", rows=rows)}
END
"""


@pytest.mark.parametrize(
    ("average", "verdicts"),
    [(391.2, ["PASS", "PASS"]), (372.0, ["PASS", "WARN"]), (196.0, ["FAIL", "WARN"])],
)
def test_a_port_to_itself(tmp_path, monkeypatch, average, verdicts):
    """It is judged by its line rate, and by the trade's 95 %; a port that is down is left out."""
    node = ports(tmp_path, "4: ACTIVE", "1: DOWN")
    tool(tmp_path, monkeypatch, "ib_write_bw", perftest(average))
    found = list(RdmaLoopback().run(node))
    assert [one.verdict for one in found] == verdicts
    assert [(one.entity, one.thumb) for one in found] == [("mlx5_0/1", False), ("mlx5_0/1", True)]
    assert found[0].value == pytest.approx(average * 1e9 / 8)
    assert found[1].expectation == pytest.approx(0.95 * 50e9)
    server, *clients = (tmp_path / "calls").read_text().splitlines()
    assert "-d mlx5_0 -i 1 " in server
    assert len(clients) == 2


def test_a_port_that_cannot_be_tried(tmp_path, monkeypatch):
    """What perftest says of it is told; it is no verdict on the port."""
    node = ports(tmp_path, "4: ACTIVE")
    tool(
        tmp_path, monkeypatch, "ib_write_bw", "#!/bin/sh\necho Couldn\\'t allocate MR >&2\nexit 1\n"
    )
    (one,) = RdmaLoopback().run(node)
    assert (one.verdict, one.reason) == ("UNKNOWN", "Couldn't allocate MR")


def test_no_port_or_no_perftest(tmp_path, monkeypatch):
    """Both are skipped, and what to install is told."""
    tool(tmp_path, monkeypatch, "nothing", "")
    (one,) = RdmaLoopback().run(Node(sysfs=tmp_path))
    assert (one.verdict, one.reason) == ("SKIP", "no active RDMA port")
    monkeypatch.setenv("PATH", str(Path(tmp_path, "bin")))
    (one,) = RdmaLoopback().run(ports(tmp_path, "4: ACTIVE"))
    assert (one.verdict, one.next_step) == ("SKIP", "apt-get install perftest")

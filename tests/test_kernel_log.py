"""Lines of the kernel log: what each means, and which mean nothing."""

import json
import re
import tomllib
from collections import Counter
from csv import DictReader
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuwatch import kernel_log, xid
from gpuwatch.errors import ConfigError
from gpuwatch.kernel_log import Found, KernelLog, told
from gpuwatch.signals import HOST, Entity

CASES = Path(__file__).parent / "data/cases"
SECOND = 1_000_000_000
GPU = Entity("gpu", "0000:1b:00.0")


def read(raw, log=None):
    """Return what each line of a log means, a list per line."""
    log = log or KernelLog(xid.catalogue())
    records = [kernel_log.parse(line) for line in raw.splitlines()]
    assert None not in records
    return [log.look(record) for record in records]


def case(name, file="kmsg.txt"):
    """Return all that the log of a case means."""
    return [found for line in read((CASES / name / file).read_bytes()) for found in line]


def meaning(text, facility=0, time_ns=0):
    """Return what one record means."""
    log = KernelLog(xid.catalogue())
    return log.look(kernel_log.Record(1, time_ns, facility, text.encode()))


def heads(found):
    return [(one.entity.id, one.head) for one in found if one.event == "xid"]


def test_an_xid_is_read_in_every_shape_that_drivers_print():
    """With and without PCI:, process, quotes; names that hold commas; codes nobody knows."""
    lines = (CASES / "KM-01/kmsg.txt").read_text().splitlines()
    expected = (CASES / "KM-01/expect.tsv").read_text().splitlines()
    for row in DictReader(expected, delimiter="\t"):
        error = xid.parse(lines[int(row["line"]) - 1].partition(";")[2])
        assert error.code == int(row["code"])
        assert error.address == row["pci"] + ".0"
        assert error.pid == (int(row["pid"]) if row["pid"] else None)
        assert (error.gpu_instance, error.compute_instance) == (None, None)
    assert [head for _, head in heads(case("KM-01"))][-1] == "4321: info"


def test_the_gpu_is_named_as_the_kernel_spells_it():
    """Case and domain of the line do not matter, nor do the parts of a MIG GPU."""
    line = "NVRM: Xid (PCI:0000:D8:00 GPU-I:05 GPU-CI:01): 43, pid=7, name=x, y"
    error = xid.parse(line)
    assert error.address == "0000:d8:00.0"
    assert (error.gpu_instance, error.compute_instance) == (5, 1)
    assert "GPU instance 5" in meaning(line)[0].text
    assert xid.parse("NVRM: Xid (PCI:00000009:01:0a.0): 43, x").address == "0009:01:0a.0"


@pytest.mark.parametrize(
    "file", ["kmsg.txt", "kmsg_three_records.txt", "kmsg_with_xid79.txt"], ids=lambda file: file
)
def test_a_gpu_off_the_bus_is_one_fault_in_whichever_words(file):
    """Three lines in one record, or in three; with an Xid 79 behind them it is still one."""
    assert heads(case("KM-03", file)) == [("0000:d1:00.0", "79: critical")]


def test_a_gpu_off_the_bus_is_told_again_when_it_falls_again():
    """Only what is said within a minute is the same fault; each Xid 79 by itself counts."""
    log = KernelLog(xid.catalogue())
    words = "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus."
    error = "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."

    def tell(text, seconds):
        return log.look(kernel_log.Record(1, seconds * SECOND, 0, text.encode()))

    assert tell(error, 0)
    assert not tell(words, 1)
    assert tell(error, 2)
    assert not tell("NVRM: GPU at 0000:1b:00.0 has fallen off the bus.", 50)
    assert tell(words, 120)
    assert not tell(error, 121)
    assert tell(error, 122)
    assert tell(words.replace("1b", "43"), 122)


def test_the_recovery_that_is_needed_goes_by_what_it_changed_to():
    """Each change is told with the new action; the last one of a GPU holds."""
    changes = [one for one in case("KM-05") if one.event == "gpu_recovery_action"]
    assert [(one.entity.id, one.head, one.text) for one in changes] == [
        ("0000:1b:00.0", "1", "GPU Reset Required, was None"),
        ("0000:1b:00.0", "2", "Node Reboot Required, was GPU Reset Required"),
        ("0000:43:00.0", "4", "Drain and Reset, was None"),
        ("0000:43:00.0", "0", "None, was Drain and Reset"),
    ]
    assert heads(case("KM-05"))[0] == ("0000:1b:00.0", "62: critical")


def test_what_follows_from_a_fault_counts_but_is_no_fault_of_its_own():
    """160 lines of channels removed by one fatal link error, and two faults of several lines."""
    found = heads(case("KM-07"))
    assert Counter(head for _, head in found) == {
        "149: critical": 1,
        "45: info": 160,
        "31: info": 2,
    }
    assert {gpu for gpu, head in found if head == "45: info"} == {
        f"0000:{bus}:00.0" for bus in ("dc", "ed", "ba", "97")
    }
    assert not meaning("NVRM: Xid: 0 more errors skipped")


def test_only_what_the_kernel_itself_writes_counts():
    """Lines that user programs wrote or had quoted are no Xid; forged ones are counted apart."""
    found = case("KM-09")
    assert [one for one in found if one.event != "forged"] == [found[0]]
    assert heads(found) == [("0000:1b:00.0", "48: critical")]
    assert sum(one == Found(HOST, "forged", "", "") for one in found) == 3


def test_a_line_break_in_what_a_user_chose_begins_no_driver_line():
    """A path with a line break, quoted by a file system, forges nothing."""
    fake = r"overlayfs: failed to resolve '/tmp/a\x0aNVRM: Xid (PCI:0000:1b:00): 79, x': -2"
    assert meaning(fake) == []
    assert meaning(r"a\x0aInfo: mlx5_core 0000:ab:00.0 mlx5_0: Port: 1 Link DOWN") == []


def test_severities_are_those_of_the_catalogue():
    """Errors of programs are counted only; those that need a hand are told apart."""
    levels = {
        int(head.partition(":")[0]): head.partition(": ")[2] for _, head in heads(case("KM-11"))
    }
    critical = {48, 62, 64, 74, 79, 95, 119, 120}
    assert {code for code, level in levels.items() if level == "critical"} == critical
    assert {code for code, level in levels.items() if level == "warning"} == {63, 94}
    assert len(levels) == 22
    entries = xid.catalogue()
    assert all(code in entries for code in levels)
    assert all(entries[code].severity == "application" for code in (13, 31, 43, 45, 109))
    assert set(xid.MAIN_CODES) >= critical | {63, 94, 13, 31, 43, 45, 154}


def test_a_line_that_says_it_is_fatal_is_critical():
    """Errors of NVLink 5 tell themselves how bad they are; no other code is believed."""
    line = "NVRM: Xid (PCI:0000:1b:00): {}, {}"
    assert meaning(line.format(145, "RLW_CTRL Fatal XC0 i0 Link 08"))[0].head == "145: critical"
    assert meaning(line.format(145, "RLW_CTRL Nonfatal XC0 i0"))[0].head == "145: info"
    assert meaning(line.format(13, "pid=7, name=Fatal, x"))[0].head == "13: info"


def test_the_catalogue_is_complete_in_itself():
    """Every entry says what the code means and what to do, in words that end no sentence."""
    document = tomllib.loads(xid.CATALOGUE.read_text())
    codes = [code for table in document["xid"] for code in table["codes"]]
    assert len(set(codes)) == len(codes)
    for entry in xid.catalogue().values():
        assert entry.meaning != xid.UNKNOWN.meaning
        assert entry.next_step != xid.UNKNOWN.next_step
        assert all(entry)
        assert entry.next_step[0].isupper()
        assert entry.next_step[-1] != "."


def test_a_site_may_see_codes_otherwise(tmp_path):
    """A file of its own changes what it names, adds what we do not know, and keeps the rest."""
    own = tmp_path / "xid.toml"
    own.write_text(
        '[[xid]]\ncodes = [13]\nalert = "critical"\n[[xid]]\ncodes = [900]\nmeaning = "new"\n'
    )
    found = xid.catalogue(str(own))
    ours = xid.catalogue()
    assert found[13] == ours[13]._replace(alert="critical")
    assert found[900] == xid.UNKNOWN._replace(meaning="new")
    assert found[79] == ours[79]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x", "not TOML"),
        ("[xid]", "no [[xid]]"),
        ("[[xid]]", "number 1: codes must be a list of numbers"),
        ('[[xid]]\ncodes = ["13"]', "codes must be a list of numbers"),
        ('[[xid]]\ncodes = [1]\nalert = "loud"', "alert must be one of critical, info, warning"),
        ("[[xid]]\ncodes = [1]\nalert = 3", "alert must be a text"),
        ('[[xid]]\ncodes = [1]\nlevel = "info"', "unknown key 'level'"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_faulty_catalogue_is_told(tmp_path, text, fault):
    """One line names the file and the fault."""
    own = tmp_path / "xid.toml"
    if text is not None:
        own.write_text(text)
    with pytest.raises(ConfigError) as told_fault:
        xid.catalogue(str(own))
    assert str(told_fault.value).startswith(f"{own}: ")
    assert fault in str(told_fault.value)


def test_warnings_of_a_virtual_gpu_are_no_xids():
    """The driver writes one for each query that a guest may not make."""
    assert case("DV-09") == []


def test_a_killed_gpuwatch_is_told_from_other_kills():
    """Whoever reads the log afterwards learns that the kernel ended gpuwatch for its memory."""
    (own,) = case("HG-05")
    assert (own.entity, own.event) == (HOST, "oom_kill_of_gpuwatch")
    for line in (
        "Out of memory: Killed process 7 (py) th) total-vm:1kB, anon-rss:1kB",
        "Killed process 7 (python3), UID 0, total-vm:1kB",
        "Memory cgroup out of memory: Killed process 7 (a) total-vm:1kB",
    ):
        assert [one.event for one in meaning(line)] == ["oom_kill"]
    assert meaning("Out of memory: Kill process 7 (a) score 900 or sacrifice child") == []


def test_links_are_told_by_port_and_interface():
    """Down and up of RDMA ports and of network interfaces; a port that is being set up is none."""
    assert [(one.entity, one.event) for one in case("IB-09")] == [
        (Entity("rdma_port", "mlx5_0/1"), "link_down"),
        (Entity("rdma_port", "mlx5_0/1"), "link_up"),
        (Entity("interface", "ens1f0np0"), "link_down"),
        (Entity("interface", "ens1f0np0"), "link_up"),
    ]
    (down,) = meaning("bnxt_en 0000:65:00.0 eth2: NIC Link is Down")
    assert (down.entity, down.event) == (Entity("interface", "eth2"), "link_down")


OTHERS = [
    (
        "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        ("0000:05:00.0", "sxid", "20034: critical"),
    ),
    (
        "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress error (First)",
        ("0000:c1:00.0", "sxid", "12028: info"),
    ),
    ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Severity 0 Engine instance 32", None),
    ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Data {0x00140004, 0x00100000}", None),
    (
        "pcieport 0000:00:1c.5: PCIe Bus Error: severity=Corrected, type=Physical Layer, id=00e5",
        ("0000:00:1c.5", "pcie_error", "corrected"),
    ),
    (
        "nvidia 0000:1b:00.0: AER: PCIe Bus Error: severity=Correctable, type=Data Link Layer, x",
        ("0000:1b:00.0", "pcie_error", "corrected"),
    ),
    (
        "mlx5_core 0000:c1:00.1: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Trans, x",
        ("0000:c1:00.1", "pcie_error", "nonfatal"),
    ),
    (
        "nvme 10000:01:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Trans, x",
        ("10000:01:00.0", "pcie_error", "fatal"),
    ),
    ("pcieport 0000:00:1b.2: AER: Correctable error message received from 0000:03:04.0", None),
    ("mlx5_core 0000:c1:00.0: E-Switch: Enable: mode(LEGACY), nvfs(0)", None),
    (
        "mlx5_core 0000:c1:00.0: poll_health:1: device's health compromised - reached miss count",
        ("0000:c1:00.0", "nic_fault", ""),
    ),
    (
        "mlx5_core 0000:c1:00.0: Port module event[error]: module 0, Cable error, High Temperature",
        ("0000:c1:00.0", "nic_fault", ""),
    ),
    ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:99]", ("", "lockup", "")),
    ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 3", ("", "lockup", "")),
    ("INFO: task nvidia-smi:7 blocked for more than 120 seconds.", ("", "hung_task", "")),
    ("INFO: task nvidia-smi:7 is blocked on a mutex", None),
    ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06", None),
    ("NVRM: Xid error: xyz, invalid data", None),
]


@pytest.mark.parametrize(("line", "expected"), OTHERS)
def test_other_lines_that_mean_something(line, expected):
    """Switches, PCIe devices, adapters, stalls: each by its own line and no other."""
    found = [(one.entity.id, one.event, one.head) for one in meaning(line)]
    assert found == ([expected] if expected else [])


def test_many_alike_are_one_event_that_says_how_many():
    """Whoever counts reads the number off the event; one alone has none."""
    (one,) = meaning("NVRM: Xid (PCI:0000:1b:00): 45, pid=7, name=x, Ch 1")
    assert told(one.detail(1)) == ("45", "info", 1)
    assert told(one.detail(160)) == ("45", "info", 160)
    assert one.detail(160).startswith("45: info x160: ")
    assert told(Found(HOST, "pcie_error", "corrected", "x").detail(3)) == ("corrected", "", 3)
    assert told("lost its way") is None


def test_times_are_those_of_the_monotonic_clock():
    """The log's time leaves suspends out, as the monotonic clock does: two hours of one here."""
    record = kernel_log.parse((CASES / "HO-05/kmsg.txt").read_bytes().strip())
    clocks = json.loads((CASES / "HO-05/suspend.json").read_text())
    assert record.time_ns == clocks["monotonic_s"] * SECOND != clocks["boottime_s"] * SECOND


RECORDS = st.builds(
    lambda facility, text: f"{facility * 8 + 3},1,2,-;{text}".encode(),
    st.integers(0, 3),
    st.one_of(
        st.text(max_size=80),
        st.builds(
            "NVRM: Xid ({}): {}, {}".format,
            st.from_regex(r"\A(PCI:)?[0-9a-fA-F:.]{0,14}( GPU-I:[0-9]{1,3})?\Z"),
            st.integers(-5, 10**12),
            st.text(max_size=60),
        ),
        st.builds(
            lambda start, rest: start.decode() + rest,
            st.sampled_from(kernel_log._STARTS),
            st.text(max_size=60),
        ),
    ),
)


@given(st.lists(RECORDS | st.binary(max_size=60), max_size=20))
@example([rb"3,1,2,-;NVRM: Xid (PCI:0000:1b:00): 79, \xff\xfe \x0a\x0aNVRM: \x"])
@example([b"3,1,2,-;NVRM: Xid (PCI:0000:1b:00): 79, \xff\xc3("])
def test_no_line_is_too_wild(lines):
    """Whatever stands in the log, each line means something sound, or nothing."""
    log = KernelLog(xid.catalogue())
    for line in lines:
        record = kernel_log.parse(line)
        for found in log.look(record) if record else ():
            assert "\n" not in found.detail(2)
            assert len(found.detail(2)) < 600
            if record.facility:
                assert found.event == "forged"
            elif found.event == "xid":
                assert record.text.startswith(b"NVRM: ")
                assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0", found.entity.id)
                assert told(found.detail(2)).times == 2

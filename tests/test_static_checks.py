"""Static checks of `gpuwatch verify`: frauds and faults are found, sound hosts are left alone."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hosts import (
    Host,
    a100_pcie,
    eight_a100,
    grace_hopper,
    host,
    memory,
    old_driver,
    power,
    two_4090,
    two_h200,
)

from gpuwatch import checks
from gpuwatch.checks import kernel_log, pcie_link, topology
from gpuwatch.checks.identity import differs
from gpuwatch.checks.pcie_link import Link
from gpuwatch.cli import main
from gpuwatch.store import SlotRow, Store
from gpuwatch.verify import Finding, Node

STATIC = [check for check in checks.CHECKS if check.phase == "static"]


def examine(node: Node) -> list[Finding]:
    """Run all static checks, in this process."""
    return [found for check in STATIC for found in check.run(node)]


def faults(found: list[Finding]) -> set[tuple[str, str, str, str, str]]:
    """Return what is wrong, rules of thumb left out."""
    return {
        (one.verdict, one.name, one.entity, one.measure, one.cause)
        for one in found
        if one.verdict not in ("PASS", "SKIP") and not one.thumb
    }


def every(count: int, *fault: str) -> set[tuple[str, ...]]:
    """Return a fault that each GPU has; `fault` is verdict, check, measure, cause."""
    verdict, check, measure, cause = fault
    return {(verdict, check, f"gpu{gpu}", measure, cause) for gpu in range(count)}


def nvlink_off(directory: Path) -> Host:
    """Show an SXM board whose NVLinks somebody switched off."""
    made = eight_a100(directory)
    made.say("nvmlDeviceGetNvLinkState", val=0)
    return made


def narrow_slot(directory: Path) -> Host:
    """Show four cards, of which one sits in a slot of eight lanes."""
    made = a100_pcie(directory)
    made.say("nvmlDeviceGetCurrPcieLinkWidth", dev=1, val=8)
    made.say("nvmlDeviceGetMaxPcieLinkWidth", dev=1, val=8)
    return made


def mixed(directory: Path) -> Host:
    """Show three cards of 80 GB and one of 40 GB."""
    made = a100_pcie(directory)
    made.say("nvmlDeviceGetName", dev=3, val="NVIDIA A100-PCIE-40GB")
    made.say("nvmlDeviceGetPciInfo_v3", dev=3, val="00000000:4E:00.0 20f1")
    device = made.tree.root / "bus/pci/devices/0000:4e:00.0/device"
    device.write_text("0x20f1\n")
    memory(made, 40960, dev=3)
    power(made, 250, dev=3)
    return made


def missing(directory: Path) -> Host:
    """Show eight on the bus, of which the driver has seven."""
    made = eight_a100(directory)
    made.script.step(0, "devices", val=[0, 1, 2, 3, 4, 6, 7])
    return made


def pcie_as_sxm(directory: Path) -> Host:
    """Show cards that tell the name of the SXM board, by a library that lies."""
    made = a100_pcie(directory)
    made.say("nvmlDeviceGetName", val="NVIDIA A100-SXM4-80GB")
    return made


def vgpu(directory: Path) -> Host:
    """Show a quarter of an A100, whose name does not tell."""
    made = host(
        directory, 1, name="NVIDIA A100-SXM4-80GB", device="20b2", memory_mib=20480, watts=400
    )
    made.say("nvmlDeviceGetVirtualizationMode", val=2)
    return made


def vgpu_by_name(directory: Path) -> Host:
    """Show a slice that tells by its name, of which nothing else is known."""
    made = host(directory, 1, name="NVIDIA L40-16Q", device="26b5", memory_mib=16384, watts=300)
    made.say("nvmlDeviceGetVirtualizationMode", val=2)
    for function in ("PowerManagementDefaultLimit", "EnforcedPowerLimit", "RemappedRows"):
        made.say(f"nvmlDeviceGet{function}", "NOT_SUPPORTED")
    made.say("nvmlDeviceGetPowerManagementLimit", "NOT_SUPPORTED")
    return made


def software_slice(directory: Path) -> Host:
    """Show a container whose library was told to show 10 GiB of an A10."""
    return host(directory, 1, name="NVIDIA A10", device="2236", memory_mib=10240, watts=150)


def without_sys(directory: Path) -> Host:
    """Show a container that hides the bus."""
    made = eight_a100(directory)
    made.shows_bus = False
    return made


def future(directory: Path) -> Host:
    """Show a model that nobody knows yet."""
    return host(
        directory,
        2,
        name="NVIDIA X100",
        device="3fff",
        memory_mib=500_000,
        watts=1500,
        links=18,
        pcie=(5, 16),
        fabric=3,
    )


def hot(directory: Path) -> Host:
    """Show one GPU that is held down by heat while it does nothing."""
    made = eight_a100(directory)
    made.say("nvmlDeviceGetCurrentClocksEventReasons", dev=2, val=0x20)
    made.say("nvmlDeviceGetTemperature:gpu", dev=2, val=91)
    return made


def no_fabric(directory: Path) -> Host:
    """Show Hopper boards behind NVSwitches, without a Fabric Manager."""
    made = host(
        directory,
        8,
        name="NVIDIA H100 80GB HBM3",
        device="2330",
        memory_mib=81559,
        watts=700,
        links=18,
        pcie=(5, 16),
        fabric=1,
    )
    made.say("nvmlDeviceGetNvLinkState", val=0)
    return made


def worn_out(directory: Path) -> Host:
    """Show a row that could not be remapped, one that waits for a reset, errors of the past."""
    made = eight_a100(directory)
    made.say("nvmlDeviceGetRemappedRows", dev=0, val=[0, 9, 0, 1])
    made.say("nvmlDeviceGetRemappedRows", dev=1, val=[0, 1, 1, 0])
    made.say("nvmlDeviceGetTotalEccErrors:uncorrected:aggregate", dev=2, val=30)
    made.say("nvmlDeviceGetTotalEccErrors:uncorrected:aggregate", dev=5, val=1)  # repaired since
    made.say("nvmlDeviceGetRowRemapperHistogram", dev=3, val=[638, 0, 0, 1, 1])
    made.say("field GET_GPU_RECOVERY_ACTION", dev=4, val=2)
    return made


def set_down(directory: Path) -> Host:
    """Show a host that saves power: limits, application clocks, ECC and persistence are off."""
    made = eight_a100(directory)
    made.say("nvmlDeviceGetEnforcedPowerLimit", val=350_000)
    made.say("nvmlDeviceGetEnforcedPowerLimit", dev=7, val=200_000)
    made.say("nvmlDeviceGetApplicationsClock:sm", dev=1, val=1095)
    made.say("nvmlDeviceGetEccMode", dev=2, val=[0, 0])
    made.say("nvmlDeviceGetPersistenceMode", dev=3, val=0)
    made.say("nvmlDeviceGetComputeMode", dev=4, val=2)
    made.say("nvmlDeviceGetMigMode", dev=5, val=[1, 1])
    return made


def sick_links(directory: Path) -> Host:
    """Show a GPU with two links down, one with a slow link, one with errors."""
    made = eight_a100(directory)
    for link in (3, 4):
        made.say(f"nvmlDeviceGetNvLinkState:{link}", dev=0, val=0)
    made.say("field NVLINK_GET_SPEED:5", dev=1, val=12000)
    made.say("field NVLINK_ERROR_DL_REPLAY", dev=2, val=90_000)
    return made


def no_peers(directory: Path) -> Host:
    """Show cards in slots whose root complex does not let them reach each other."""
    made = a100_pcie(directory)
    made.say("nvmlDeviceGetP2PStatus", val=1)
    return made


def half_updated(directory: Path) -> Host:
    """Show a kernel that still has the module of before."""
    made = two_h200(directory)
    made.proc["driver/nvidia/version"] = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15"
    return made


def logged(directory: Path) -> Host:
    """Show a kernel log with an Xid 79 of one GPU, and with what jobs do of another."""
    made = eight_a100(directory)
    made.environment()
    (made.directory / "kmsg").write_text(
        "4,10,99000000,-;NVRM: Xid (PCI:0000:07:00): 79, pid='<unknown>', GPU has fallen off\n"
        "4,11,99000001,-;NVRM: Xid (PCI:0000:0f:00): 31, pid=7, name=python, MMU Fault\n"
        "12,12,99000002,-;NVRM: Xid (PCI:0000:47:00): 79, forged\n"
        "no record\n"
    )
    return made


def sick_network(directory: Path) -> Host:
    """Show rails of which one is down, one slow, one has other firmware, one no subnet manager."""
    made = eight_a100(directory)
    made.tree.show("mlx5_1", state="1: DOWN")
    made.tree.show("mlx5_2", rate="100 Gb/sec (2X HDR)")
    (made.tree.root / "class/infiniband/mlx5_3/fw_ver").write_text("20.1.1\n")
    (made.tree.port("mlx5_4") / "lid").write_text("0x0\n")
    made.proc["driver/nvidia/version"] = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05"
    made.proc["self/limits"] = "Max locked memory         65536                65536       bytes"
    return made


SXM_WITHOUT_LINKS = {("FAIL", "topology", "host", "ways", "link")}
HOSTS: dict[Callable[[Path], Host], set[tuple[str, ...]]] = {
    two_h200: set(),
    eight_a100: set(),
    a100_pcie: set(),
    two_4090: set(),
    grace_hopper: set(),
    old_driver: set(),
    without_sys: set(),
    nvlink_off: every(8, "FAIL", "nvlink", "links", "link") | SXM_WITHOUT_LINKS,
    narrow_slot: {("FAIL", "pcie_link", "gpu1", "lanes", "link")},
    mixed: {("FAIL", "identity", "host", "models", "board")},
    missing: {
        ("FAIL", "identity", "host", "gpus", "driver"),
        ("FAIL", "identity", "gpu5", "answer", "driver"),
    },
    pcie_as_sxm: every(4, "FAIL", "identity", "pci id", "board")
    | every(4, "WARN", "identity", "power", "power")
    | every(4, "FAIL", "nvlink", "links", "link")
    | SXM_WITHOUT_LINKS,
    vgpu: {
        ("FAIL", "identity", "gpu0", "whole", "board"),
        ("FAIL", "identity", "gpu0", "memory", "board"),
    },
    vgpu_by_name: {
        ("FAIL", "identity", "gpu0", "whole", "board"),
        ("UNKNOWN", "identity", "gpu0", "memory", ""),
        ("UNKNOWN", "nvlink", "gpu0", "links", ""),
    },
    software_slice: {("FAIL", "identity", "gpu0", "memory", "board")},
    future: every(2, "UNKNOWN", "identity", "model", "")
    | every(2, "UNKNOWN", "identity", "memory", "")
    | every(2, "UNKNOWN", "identity", "power", "")
    | every(2, "UNKNOWN", "nvlink", "links", "")
    | {("UNKNOWN", "topology", "host", "ways", "")},
    hot: {("FAIL", "settings", "gpu2", "held back", "heat")},
    no_fabric: every(8, "FAIL", "driver", "fabric", "driver")
    | every(8, "FAIL", "nvlink", "links", "link")
    | SXM_WITHOUT_LINKS,
    worn_out: {
        ("FAIL", "health", "gpu0", "remap failed", "memory"),
        ("WARN", "health", "gpu0", "remapped", "memory"),
        ("FAIL", "health", "gpu1", "remap pending", "memory"),
        ("WARN", "health", "gpu2", "lifetime", "memory"),
        ("FAIL", "health", "gpu3", "spare rows", "memory"),
        ("FAIL", "health", "gpu4", "recovery", "memory"),
    },
    set_down: every(7, "WARN", "settings", "power limit", "power")
    | {
        ("FAIL", "settings", "gpu7", "power limit", "power"),
        ("WARN", "settings", "gpu1", "sm clock", "clock"),
        ("WARN", "settings", "gpu2", "ecc", "memory"),
        ("WARN", "settings", "gpu3", "persistence", "driver"),
        ("FAIL", "settings", "gpu4", "compute mode", "driver"),
        ("FAIL", "identity", "gpu5", "whole", "board"),
    },
    sick_links: {
        ("FAIL", "nvlink", "gpu0", "links", "link"),
        ("FAIL", "nvlink", "gpu1", "speed", "link"),
        ("WARN", "nvlink", "gpu2", "replay errors", "link"),
    },
    no_peers: {("WARN", "topology", "host", "peer access", "host")},
    half_updated: {("FAIL", "driver", "host", "version", "driver")},
    logged: {("FAIL", "kernel_log", "gpu0", "xids", "driver")},
    sick_network: {
        ("FAIL", "rdma", "mlx5_1/1", "state", "link"),
        ("FAIL", "rdma", "mlx5_2/1", "rate", "link"),
        ("WARN", "rdma", "host", "firmware", "driver"),
        ("FAIL", "rdma", "mlx5_4/1", "address", "link"),
        ("WARN", "rdma", "host", "gpu direct", "driver"),
        ("WARN", "host", "host", "locked memory", "host"),
    },
}


@pytest.mark.parametrize("make", HOSTS, ids=lambda make: make.__name__)
def test_what_is_wrong_is_found_and_nothing_else(make, tmp_path, monkeypatch):
    """Each fraud and fault is told once, with its cause; sound hosts give no warning."""
    found = examine(make(tmp_path).node(monkeypatch))
    assert faults(found) == HOSTS[make]
    for one in found:
        assert one.verdict == "PASS" or one.reason, one
        assert one.verdict == "PASS" or one.next_step, one
        assert one.verdict in ("PASS", "SKIP") or one.expectation is None or one.source, one
        assert "\n" not in one.reason + one.next_step
        assert Finding.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    ("asked", "name", "same"),
    [
        ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("a100 sxm", "A100-SXM4-40GB", True),
        ("H100 SXM", "NVIDIA H100 80GB HBM3", True),
        ("H100-SXM5-80GB", "NVIDIA H100 80GB HBM3", True),
        ("RTX4090", "NVIDIA GeForce RTX 4090", True),
        ("H100", "NVIDIA H100 PCIe", True),
        ("A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", False),
        ("A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", False),
        ("H100 SXM", "NVIDIA H100 PCIe", False),
        ("H100 PCIe", "NVIDIA H100 80GB HBM3", False),
        ("H100", "NVIDIA H200", False),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("L40", "NVIDIA L40S", False),
        ("RTX 4090", "NVIDIA GeForce RTX 4090 D", False),
        ("RTX 4090", "NVIDIA GeForce RTX 4090 Laptop GPU", False),
        ("A100", "GRID A100-20C", False),
    ],
)
def test_a_model_that_was_asked_for(asked, name, same):
    """A short name means any variant of the card, a longer one that variant alone."""
    assert bool(differs(asked, name)) is not same


@pytest.mark.parametrize(
    ("link", "lanes", "generation"),
    [
        (Link(4, 16, 4, 16, 4, 16, (4, 16)), "PASS", "PASS"),
        (Link(1, 16, 4, 16, 4, 16, (4, 16)), "PASS", "PASS"),  # let down while idle
        (Link(1, 8, 4, 16, 4, 16, (4, 16)), "WARN", "PASS"),
        (Link(4, 8, 4, 8, 4, 16, (4, 16)), "FAIL", "PASS"),
        (Link(3, 16, 3, 16, 5, 16, (5, 16)), "PASS", "WARN"),  # an older host
        (Link(1, 1, None, None, None, None, (4, 16)), "FAIL", "SKIP"),
        (Link(3, 8, 3, 8, 3, 16, (3, 8)), "PASS", "PASS"),  # a T4 is content
        (Link(4, 16, None, None, None, 16, None), "PASS", "UNKNOWN"),
        (Link(None, None), "UNKNOWN", "UNKNOWN"),
    ],
)
def test_a_pcie_link(link, lanes, generation):
    """The width counts also while a GPU does nothing; the generation as far as the slot allows."""
    found = [one.verdict for one in pcie_link.findings(link, False, "pcie_link", "gpu0")]
    assert found == [lanes, generation]


def test_a_pcie_link_under_load():
    """Under load a link that is let down is one that cannot do better."""
    link = Link(1, 8, 4, 16, 4, 16, (4, 16))
    found = list(pcie_link.findings(link, True, "pcie", "gpu0"))
    assert [(one.name, one.verdict, one.cause) for one in found] == [("pcie", "FAIL", "link")] * 2


@pytest.mark.parametrize(("bits", "told"), [(0x5F, "WARN"), (0x01, "PASS"), (None, "PASS")])
def test_bridges_that_redirect_peers(bits, told, tmp_path, monkeypatch):
    """ACS that sends peer copies through the processor is told where GPUs need those."""
    made = a100_pcie(tmp_path, 2)
    config = bytearray(4096)
    config[0x100:0x104] = (0x148 << 20 | 0x0001).to_bytes(4, "little")  # first, error reporting
    if bits is not None:
        config[0x148:0x14C] = (0x000D).to_bytes(4, "little")
        config[0x14E:0x150] = bits.to_bytes(2, "little")
    bridge = made.tree.root / "devices/pci0000:00/0000:00:01.0"
    (bridge / "config").write_bytes(config)
    bus = made.tree.root / "bus/pci/devices"
    (bus / bridge.name).symlink_to(bridge)
    for switch in ("0000:e0:00.0", "0000:e1:00.0"):
        (bridge / switch / "config").write_bytes(bytes(4096))
        (bus / switch).symlink_to(bridge / switch)
    (found,) = [one for one in topology.CHECK.run(made.node(monkeypatch)) if one.measure == "acs"]
    assert found.verdict == told
    assert (bridge.name in found.reason) is (told == "WARN")


def test_old_xids_only_warn(tmp_path):
    """A critical Xid of yesterday may have been repaired since; where no log is shown, none is."""
    log = tmp_path / "kmsg"
    log.write_text("4,1,1000000,-;NVRM: Xid (PCI:0000:07:00): 79, pid=1, GPU has fallen off\n")
    node = Node(kmsg=log, gpus=[{"gpu": 0, "pci_bus_id": "0000:07:00.0"}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_log, "monotonic_ns", lambda: 3 * 86400 * 10**9)
        found = next(iter(kernel_log.CHECK.run(node)))
    assert (found.verdict, found.value) == ("WARN", "1x 79")
    assert "3 days ago" in found.reason
    (found,) = kernel_log.CHECK.run(replace(node, kmsg=tmp_path / "none"))
    assert found.verdict == "SKIP"


# What each group of facts says, by check and measure: without it, none of that is a PASS.
SAYS = {
    "name": {("identity", "model"), ("identity", "memory"), ("nvlink", "links")},
    "memory": {("identity", "memory")},
    "modes": {
        ("identity", "whole"),
        *(("settings", what) for what in ("ecc", "compute mode", "persistence")),
    },
    "pcie": {("pcie_link", what) for what in ("lanes", "generation", "replays")},
    "power": {("identity", "power"), ("settings", "power limit")},
    "clocks": {("settings", "sm clock"), ("settings", "memory clock")},
    "reasons": {("settings", "held back")},
    "ecc": {("health", "uncorrected"), ("health", "lifetime")},
    "rows": {("health", what) for what in ("remap failed", "remap pending", "remapped")},
    "nvlinks": {("nvlink", "links"), ("nvlink", "speed"), ("topology", "ways")},
    "nvlink_errors": {("nvlink", f"{what} errors") for what in ("replay", "recovery", "crc")},
    "fabric": {("driver", "fabric")},
    "recovery": {("health", "recovery")},
    "gsp_firmware": {("driver", "firmware")},
}
GARBAGE = (
    None,
    "",
    " ",
    -1,
    2**64 - 1,
    2**32 - 1,
    float("nan"),
    {},
    True,
    [1],
    ["x"],
    [[]],
    "\ud800",
)


def test_what_was_not_read_is_no_pass(tmp_path, monkeypatch):
    """Whatever a driver does not tell, or tells wrongly, is never found to be well."""
    node = two_h200(tmp_path).node(monkeypatch)
    for group, measures in SAYS.items():
        names = {name for name, _ in measures}
        for one in GARBAGE:
            if (group, one) in (("reasons", ["x"]), ("gsp_firmware", "\ud800"), ("recovery", True)):
                continue  # that could be
            gpus = [{**gpu, group: one} for gpu in node.gpus]
            good = {
                (found.name, found.measure)
                for check in STATIC
                if check.name in names
                for found in check.run(replace(node, gpus=gpus))
                if found.verdict == "PASS"
            }
            assert not good & measures, (group, one)
    nowhere = dict.fromkeys(("sysfs", "procfs", "devices", "kmsg"), tmp_path / "no")
    blind = examine(Node(gpus=[{"gpu": 0, "pci_bus_id": "0000:07:00.0"}], **nowhere))
    assert [found for found in blind if found.verdict == "PASS"] == []


def leaves(facts: object) -> Iterator[tuple[dict | list, object]]:
    """Yield each place in facts, as what holds it and its key."""
    items = facts.items() if isinstance(facts, dict) else enumerate(facts)
    for key, value in list(items):
        if key not in ("gpu", "gpus"):
            yield facts, key
        if isinstance(value, dict | list):
            yield from leaves(value)


def test_no_garbage_breaks_a_check(tmp_path, monkeypatch):
    """Facts and files may be anything: each check still comes to its end, with findings."""
    source = random.Random(7)
    made = eight_a100(tmp_path)
    node = made.node(monkeypatch)
    files = [path for path in (*node.sysfs.rglob("*"), *node.procfs.rglob("*")) if path.is_file()]
    rubbish = (b"", b"\xff\xfe", b"4294967295", b"-1 -1", b"nan", b"0x", b"a: b\n" * 99, b"[]")
    for _ in range(15):
        gpus = copy.deepcopy(node.gpus[:3])
        pairs, driver = copy.deepcopy(list(node.pairs)), dict(node.driver)
        for _ in range(source.randrange(1, 12)):
            holder, key = source.choice(list(leaves([*gpus, driver, *pairs[:3]]))[9:])
            holder[key] = source.choice(GARBAGE)
        for path in source.sample(files, 4):
            path.write_bytes(source.choice(rubbish))
        found = examine(replace(node, gpus=gpus, pairs=pairs, driver=driver))
        assert {one.name for one in found} == {check.name for check in STATIC}
        assert all(json.loads(json.dumps(one.to_json())) for one in found)


@pytest.mark.parametrize(
    ("make", "expect", "code", "told"),
    [
        (two_h200, "2xH200", 0, set()),
        (
            a100_pcie,
            "4xA100-SXM4-80GB",
            2,
            {("identity", "asked for"), ("identity", "inventory")},
        ),
        (future, "2", 3, set()),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_command_looks_at_a_host(make, expect, code, told, tmp_path, monkeypatch, capsys):
    """`gpuwatch verify --expect` accepts a sound node and rejects frauds, by its exit code."""
    made = make(tmp_path)
    for name in ("LD_LIBRARY_PATH", "FAKE_NVML_SCRIPT"):
        monkeypatch.setenv(name, made.environment()[name])
    if make is a100_pcie:  # one more was here, as a daemon has kept
        (tmp_path / "state").mkdir(mode=0o750)
        store = Store(tmp_path / "state/gpuwatch.sqlite")
        store.save_inventory([SlotRow("0000:99:00.0", "GPU-gone", "", "", None, None, None)])
        store.close()
    given = main(
        [
            *("verify", "--json", "-", "--expect", expect),
            *(f"--only={check.name}" for check in STATIC),
            *(f"--path.{name}={tmp_path / name}" for name in ("sysfs", "kmsg", "runtime", "state")),
            f"--path.procfs={tmp_path / 'proc'}",
        ]
    )
    assert given == code
    found = json.loads(capsys.readouterr().out)["checks"]
    assert told <= {(one["name"], one["measure"]) for one in found if one["verdict"] == "FAIL"}
    assert told or not [one for one in found if one["verdict"] == "FAIL"]


def test_links_whose_ends_are_hidden(tmp_path, monkeypatch):
    """A virtual machine may hide where NVLinks lead: then the driver's word for the pair counts."""
    made = two_h200(tmp_path)
    made.say("nvmlDeviceGetNvLinkRemoteDeviceType", "NOT_SUPPORTED")
    made.say("nvmlDeviceGetNvLinkRemotePciInfo", "NOT_SUPPORTED")
    node = made.node(monkeypatch)
    assert faults(examine(node)) == set()
    ways = next(iter(topology.CHECK.run(node)))
    assert (ways.verdict, ways.value) == ("PASS", "1x NV18")
    pairs = [{**node.pairs[0], "peer": {"read": "ok", "write": "ok", "nvlink": None}}]
    ways = next(iter(topology.CHECK.run(replace(node, pairs=pairs))))
    assert ways.verdict == "UNKNOWN"


def test_direct_links(tmp_path, monkeypatch):
    """Without switches each two GPUs are joined directly; one that is left out is found."""
    made = host(
        tmp_path,
        4,
        name="NVIDIA A100-SXM4-80GB",
        device="20b2",
        memory_mib=81920,
        watts=400,
        links=12,
        link_megabytes=25781,
    )
    made.say("nvmlDeviceGetGpuFabricInfo", "NOT_SUPPORTED")
    made.say("nvmlDeviceGetNvLinkRemoteDeviceType", val=0)
    addresses = [device["pci"] for device in made.script.devices]
    for gpu in range(4):
        peers = [address for i, address in enumerate(addresses) if i != gpu]
        for link in range(12):
            function = f"nvmlDeviceGetNvLinkRemotePciInfo_v2:{link}"
            made.say(function, dev=gpu, val=peers[link // 4])
    node = made.node(monkeypatch)
    assert faults(examine(node)) == set()
    assert next(iter(topology.CHECK.run(node))).value == "6x NV4"
    gpus = copy.deepcopy(list(node.gpus))
    for link in gpus[0]["nvlinks"][:4]:  # to GPU 1
        link["up"] = False
    pairs = copy.deepcopy(list(node.pairs))
    pairs[0]["peer"]["nvlink"] = "not_supported"
    found = next(iter(topology.CHECK.run(replace(node, gpus=gpus, pairs=pairs))))
    assert (found.verdict, found.value) == ("FAIL", "5x NV4, 1x SYS")
    assert "gpu0-gpu1 reach each other by SYS" in found.reason


def test_ports_that_are_no_fault(tmp_path, monkeypatch):
    """Ports of a cloud's own kind, those for storage and virtual functions are left alone."""
    made = eight_a100(tmp_path)
    for number in (0, 1):
        made.tree.device(f"efa_{number}", rate="100 Gb/sec (4X EDR)", layer="Unspecified", board="")
        (made.tree.port(f"efa_{number}") / "lid").write_text("0x0\n")
        made.tree.mlx5(20 + number, rate="100 Gb/sec (2X HDR)", board="MT_0000000359")
        made.tree.mlx5(30 + number, layer="Ethernet", board="MT_0000000359")
    made.tree.show("mlx5_30", state="1: DOWN")
    made.tree.show("mlx5_31", state="1: DOWN")
    function = made.tree.root / "class/infiniband/mlx5_40/device"
    made.tree.mlx5(40)
    function.mkdir()
    (function / "physfn").mkdir()
    made.tree.show("mlx5_40", state="1: DOWN")
    found = examine(made.node(monkeypatch))
    assert faults(found) == set()
    skipped = {one.measure for one in found if one.name == "rdma" and one.verdict == "SKIP"}
    assert {"state", "address"} <= skipped


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        ({}, "PASS", ""),
        ({"0000:0f:00.0": "GPU-other"}, "WARN", "another card is at 0000:0f:00.0"),
        ({"0000:99:00.0": "GPU-gone"}, "FAIL", "no GPU is at 0000:99:00.0"),
    ],
)
def test_cards_that_were_accepted(change, verdict, reason, tmp_path, monkeypatch):
    """A card that the daemon of this host has accepted is missed, and a stranger noticed."""
    node = a100_pcie(tmp_path, 2).node(monkeypatch)
    accepted = {gpu["pci_bus_id"]: gpu["uuid"] for gpu in node.gpus} | change
    found = [
        one for one in examine(replace(node, inventory=accepted)) if one.measure == "inventory"
    ]
    assert [one.verdict for one in found] == [verdict]
    assert reason in found[0].reason


def test_clocks_that_a_board_holds_by_itself(tmp_path, monkeypatch):
    """Some boards run at application clocks below their limit as they come: that is no warning."""
    made = a100_pcie(tmp_path, 2)
    made.say("nvmlDeviceGetCurrentClocksEventReasons", val=0x2)
    assert faults(examine(made.node(monkeypatch))) == every(
        2, "WARN", "settings", "held back", "clock"
    )
    for function in ("ApplicationsClock", "DefaultApplicationsClock"):
        made.say(f"nvmlDeviceGet{function}:sm", val=1095)
    assert faults(examine(made.node(monkeypatch))) == set()

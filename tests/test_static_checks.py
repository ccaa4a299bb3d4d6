"""Static checks of `gpuwatch verify`: frauds and faults are found, sound hosts are left alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import (
    Host,
    a100_pcie,
    eight_a100,
    grace_hopper,
    host,
    memory,
    power,
    two_4090,
    two_h200,
)

from gpuwatch import checks
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
    """Show one card of four sits in a slot of eight lanes."""
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
    """Show one GPU is held down by heat while it does nothing."""
    made = eight_a100(directory)
    made.say("nvmlDeviceGetCurrentClocksEventReasons", dev=2, val=0x20)
    made.say("nvmlDeviceGetTemperature:gpu", dev=2, val=91)
    return made


def no_fabric(directory: Path) -> Host:
    """Show hopper behind NVSwitches, without a Fabric Manager."""
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
    """Show one GPU has a row that could not be remapped, one waits for a reset, one had errors."""
    made = eight_a100(directory)
    made.say("nvmlDeviceGetRemappedRows", dev=0, val=[0, 9, 0, 1])
    made.say("nvmlDeviceGetRemappedRows", dev=1, val=[0, 1, 1, 0])
    made.say("nvmlDeviceGetTotalEccErrors:uncorrected:aggregate", dev=2, val=3)
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
    """Show one GPU has two links down, one a slow one, one with errors."""
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
    """Show the kernel still has the module of before."""
    made = two_h200(directory)
    made.proc["driver/nvidia/version"] = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15"
    return made


def logged(directory: Path) -> Host:
    """Show the kernel log has an Xid 79 of one GPU, and what jobs do of another."""
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
    """Show one rail is down, one is slow, one has other firmware and one no subnet manager."""
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
        ("WARN", "health", "gpu1", "remapped", "memory"),
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

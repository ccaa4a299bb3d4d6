"""Hosts for `gpuwatch verify`: a driver's library, a bus and a /proc, sound ones and frauds.

A host is data: `host(directory, ...)` writes the script of a fake NVML and trees for /sys and
/proc; `facts` asks it what the child of `verify` asks, and `node` is what checks are given.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import Script, build, environment
from rdma_tree import Tree

from gpuwatch import verify_facts
from gpuwatch.verify import Node

MIB = 1 << 20
BUSES = (0x07, 0x0F, 0x47, 0x4E, 0x87, 0x90, 0xB7, 0xBD)
PROC = {
    "driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05"
    "  Release Build",
    "cpuinfo": "".join(f"processor\t: {number}\n" for number in range(64)),
    "meminfo": "MemTotal: 2097152000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
    "pressure/cpu": "some avg10=1.71 avg60=2.00 avg300=0.56 total=2197047",
    "pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0",
    "pressure/io": "some avg10=3.70 avg60=0.79 avg300=0.16 total=9\n"
    "full avg10=3.70 avg60=0.79 avg300=0.16 total=5",
    "self/limits": "Max locked memory         unlimited            unlimited            bytes",
    "self/status": "CapEff:\t0000000000000000",
    "self/cgroup": "0::/",
    "sys/kernel/numa_balancing": "0",
    "sys/kernel/random/boot_id": "b",
}
SYS = {
    "devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "devices/system/node/node0/cpulist": "0-31",
    "devices/system/node/node1/cpulist": "32-63",
    "fs/cgroup/cpu.max": "max 100000",
}


@dataclass
class Host:
    """A host that is being made; steps and files may be changed until `node` is called."""

    directory: Path
    script: Script
    numbers: dict[str, int]
    proc: dict[str, str] = field(default_factory=lambda: dict(PROC))
    sys: dict[str, str] = field(default_factory=lambda: dict(SYS))
    shows_bus: bool = True

    @property
    def tree(self) -> Tree:
        """The tree that stands for /sys."""
        return Tree(self.directory / "sysfs")

    def say(self, function: str, ret: str = "SUCCESS", dev: Any = "all", **step: Any) -> None:
        """Have a function answer like this from the start, whatever was said of it before."""
        steps = self.script.steps
        steps[:] = [one for one in steps if (one["fn"], one.get("dev")) != (function, dev)]
        self.script.step(0, function, ret, dev=dev, **step)

    def environment(self) -> dict[str, str]:
        """Write what there is; return what lets a program find it."""
        for name, texts in (("sysfs", self.sys), ("proc", self.proc)):
            for path, text in texts.items():
                file = self.directory / name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"{text}\n")
        (self.directory / "dev/shm").mkdir(parents=True, exist_ok=True)
        (self.directory / "kmsg").touch()
        self.script.write(self.directory / "script")
        return environment(self.directory / "script", build(self.directory / "library"))

    def node(self, monkeypatch: pytest.MonkeyPatch, **about: Any) -> Node:
        """Ask the driver, as `verify` does."""
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)
        sysfs = self.directory / ("sysfs" if self.shows_bus else "empty")
        told = verify_facts.collect(sysfs, self.numbers, [])
        return Node(
            sysfs=sysfs,
            procfs=self.directory / "proc",
            devices=self.directory / "dev",
            kmsg=self.directory / "kmsg",
            driver={**told.driver, "fault": told.fault},
            gpus=list(told.gpus.values()),
            pairs=told.pairs,
            numbers=self.numbers,
            **about,
        )


def host(
    directory: Path,
    count: int,
    *,
    name: str,
    device: str,
    memory_mib: int,
    watts: float,
    links: int = 0,
    link_megabytes: int = 26562,
    pcie: tuple[int, int] = (4, 16),
    topology: int = 50,
    fabric: int = 0,
    addresses: tuple[str, ...] = (),
    virtualization: int = 0,
) -> Host:
    """Make a sound host of so many GPUs of a kind; `links` lead to NVSwitches."""
    addresses = addresses or tuple(f"0000:{bus:02x}:00.0" for bus in BUSES)[:count]
    devices = [
        {
            "i": i,
            "uuid": f"GPU-00000000-0000-4000-8000-{i:012d}",
            "pci": f"0000{address.upper()}" if len(address) == 12 else address.upper(),
            "minor": i,
            "name": name,
        }
        for i, address in enumerate(addresses)
    ]
    made = Host(directory, Script(devices), {one: i for i, one in enumerate(addresses)})
    for i, address in enumerate(addresses):
        made.say("nvmlDeviceGetPciInfo_v3", dev=i, val=f"0000{address.upper()} {device}")
        _plug(made, i, address, device, pcie)
    memory(made, memory_mib)
    power(made, watts)
    made.say("nvmlDeviceGetVirtualizationMode", val=virtualization)
    for what, value in (("Generation", pcie[0]), ("Width", pcie[1])):
        made.say(f"nvmlDeviceGetCurrPcieLink{what}", val=value)
        made.say(f"nvmlDeviceGetMaxPcieLink{what}", val=value)
    made.say("nvmlDeviceGetGpuMaxPcieLinkGeneration", val=pcie[0])
    made.say("nvmlDeviceGetTopologyCommonAncestor", val=topology)
    made.say("nvmlDeviceGetGpuFabricInfo", val={"state": fabric})
    for link in range(links, 18):
        made.say(f"nvmlDeviceGetNvLinkState:{link}", "NOT_SUPPORTED")
    for link in range(links):
        made.say(f"field NVLINK_GET_SPEED:{link}", val=link_megabytes)
    return made


def _plug(made: Host, i: int, address: str, device: str, pcie: tuple[int, int]) -> None:
    """Put a GPU on the bus: four behind each of two roots, two behind each switch."""
    speeds = {3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}
    switch = f"pci0000:{i // 4 * 0x80:02x}", f"0000:{i // 4 * 0x80:02x}:0{i // 2 % 2 + 1}.0"
    made.tree.pci("gpu", address, *switch, f"0000:{0xE0 + i:02x}:00.0", numa=i // 4)
    path = made.tree.root / "bus/pci/devices" / address
    for folder in (path.resolve(), path.resolve().parent):
        (folder / "max_link_speed").write_text(f"{speeds[pcie[0]]}\n")
        (folder / "max_link_width").write_text(f"{pcie[1]}\n")
    (path / "device").write_text(f"0x{device}\n")


def memory(made: Host, mib: int, dev: Any = "all") -> None:
    total = mib * MIB
    parts = {"total": total, "free": total - 600 * MIB, "used": 0}
    made.say("nvmlDeviceGetMemoryInfo", dev=dev, val=parts)
    made.say("nvmlDeviceGetMemoryInfo_v2", dev=dev, val=parts | {"reserved": 600 * MIB})


def power(made: Host, watts: float, dev: Any = "all") -> None:
    for what in ("EnforcedPowerLimit", "PowerManagementLimit", "PowerManagementDefaultLimit"):
        made.say(f"nvmlDeviceGet{what}", dev=dev, val=int(watts * 1000))
    made.say("nvmlDeviceGetPowerUsage", dev=dev, val=60_000)


def eight_a100(directory: Path, **changes: Any) -> Host:
    """Show eight A100 on an HGX board with eight NICs: such GPUs do not tell of their fabric."""
    about = {
        "name": "NVIDIA A100-SXM4-80GB",
        "device": "20b2",
        "memory_mib": 81920,
        "watts": 400,
        "links": 12,
        "link_megabytes": 25781,
    }
    made = host(directory, 8, **(about | changes))
    made.say("nvmlDeviceGetGpuFabricInfo", "NOT_SUPPORTED")
    for i in range(8):
        made.tree.mlx5(i, rate="200 Gb/sec (4X HDR)")
        switch = f"pci0000:{i // 4 * 0x80:02x}", f"0000:{i // 4 * 0x80:02x}:0{i // 2 % 2 + 1}.0"
        made.tree.pci(f"mlx5_{i}", f"0000:{0xC0 + i:02x}:00.0", *switch, numa=i // 4)
        (made.tree.port(f"mlx5_{i}") / "lid").write_text("0x1a\n")
    return made


def old_driver(directory: Path) -> Host:
    """Show eight A100 under a driver that lacks what came later."""
    made = eight_a100(directory)
    for function in (
        "CurrentClocksEventReasons",
        "GpuFabricInfo",
        "GspFirmwareVersion",
        "GpuMaxPcieLinkGeneration",
        "MemoryInfo_v2",
        "MarginTemperature",
        "RowRemapperHistogram",
        "NvLinkRemoteDeviceType",
    ):
        made.say(f"nvmlDeviceGet{function}", "FUNCTION_NOT_FOUND")
    for name in ("GET_GPU_RECOVERY_ACTION", "NVLINK_ERROR_DL_REPLAY", "NVLINK_ERROR_DL_CRC"):
        made.say(f"field {name}", "NOT_SUPPORTED")
    for link in range(12):
        made.say(f"field NVLINK_GET_SPEED:{link}", "NOT_SUPPORTED")
    return made


def two_h200(directory: Path) -> Host:
    """Show two H200 in a virtual machine, as they told of themselves (driver 580, 2026)."""
    made = host(
        directory,
        2,
        name="NVIDIA H200",
        device="2335",
        memory_mib=143771,
        watts=700,
        links=18,
        pcie=(5, 16),
        topology=30,
        fabric=3,
        addresses=("0000:00:06.0", "0000:00:07.0"),
        virtualization=1,
    )
    for folder in (made.tree.root / "devices").rglob("max_link_*"):
        folder.unlink()  # a virtual machine has no slots
    del made.sys["devices/system/cpu/cpu0/cpufreq/scaling_governor"]
    made.sys["devices/system/clocksource/clocksource0/current_clocksource"] = "kvm-clock"
    return made


def a100_pcie(directory: Path, count: int = 4) -> Host:
    """Show A100 cards in slots, without bridges between them."""
    return host(
        directory,
        count,
        name="NVIDIA A100 80GB PCIe",
        device="20b5",
        memory_mib=81920,
        watts=300,
    )


def two_4090(directory: Path) -> Host:
    """Show two GeForce cards on a workstation's board: neither NVLink nor ECC nor peer access."""
    made = host(
        directory,
        2,
        name="NVIDIA GeForce RTX 4090",
        device="2684",
        memory_mib=24564,
        watts=450,
        topology=30,
    )
    for function in ("EccMode", "TotalEccErrors", "RemappedRows", "GspFirmwareVersion"):
        made.say(f"nvmlDeviceGet{function}", "NOT_SUPPORTED")
    made.say("nvmlDeviceGetGpuFabricInfo", "NOT_SUPPORTED")
    made.say("nvmlDeviceGetPersistenceMode", val=0)
    made.say("nvmlDeviceGetP2PStatus", val=5)
    return made


def grace_hopper(directory: Path) -> Host:
    """Show one GH200: its processor is linked by NVLink-C2C, and it has a PCI domain of its own."""
    made = host(
        directory,
        1,
        name="NVIDIA GH200 480GB",
        device="2342",
        memory_mib=97871,
        watts=900,
        addresses=("0009:01:00.0",),
    )
    made.sys["devices/system/clocksource/clocksource0/current_clocksource"] = "arch_sys_counter"
    return made

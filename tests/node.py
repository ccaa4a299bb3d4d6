"""A node of fake GPUs for a real daemon: a scripted NVML and the PCI bus its GPUs stand on."""

import socket
import threading
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from fake_nvml import Script, build, environment, users
from running import Running, only

from gpuwatch.ring import RingReader
from gpuwatch.tmpfs import ring_directory


def quiet(*sources: str) -> str:
    """Return a config of these sources alone, gentle on the machine the tests run on.

    What is tested does not depend on the rate, nor on how full the tester's disk is. More keys of
    [state] may follow.
    """
    return f"""
{only(*sources)}
[recorder]
free_ratio = 0
[counters]
budget_ratio = 1
[state]
period_ms = 5
realtime = false
budget_ratio = 1
"""


QUIET = quiet("nvml_state")


class Node:
    """GPUs that answer as the script says; `running` starts a daemon that watches them."""

    def __init__(self, directory: Path, devices: int | Iterable[Mapping[str, Any]] = 3) -> None:
        self.directory = directory
        self.script = Script(devices)
        self.script.write(directory / "script")
        self.library = build(directory / "library")
        self.sysfs = directory / "sysfs"
        for device in self.script.devices:
            self.plug(address_of(device))

    def plug(self, address: str, vendor: str = "0x10de", kind: str = "0x030200") -> None:
        """Show a device on the PCI bus."""
        device = self.sysfs / "bus/pci/devices" / address
        device.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", "1")):
            (device / name).write_text(f"{text}\n")

    def now(self, fn: str, ret: str = "SUCCESS", **step: Any) -> None:
        """Have a function answer like this from now on."""
        self.script.step(self.script.now_ms(), fn, ret, **step)
        self.script.write(self.directory / "script")

    def idle(self) -> None:
        """Have nobody use a GPU."""
        self.now("nvmlDeviceGetMemoryInfo_v2", val=[80 << 30, 1 << 28, 79 << 30, 4 << 20])
        self.now("nvmlDeviceGetUtilizationRates", val=[0, 0])

    def heal(self) -> None:
        """Have everything answer as on a healthy node."""
        self.script.steps.clear()
        self.script.write(self.directory / "script")

    def users(self) -> set[int]:
        """Return the processes that have NVML initialised."""
        return users(self.directory / "script")

    def running(
        self, *arguments: str, config: str = QUIET, ready: bool = True, **extra: str
    ) -> Running:
        """Start a daemon on this node; `extra` are environment variables."""
        return Running(
            self.directory,
            *("--path.sysfs", str(self.sysfs)),
            *arguments,
            config=config,
            environment=environment(self.directory / "script", self.library, **extra),
            ready=ready,
        )


class IdleHost:
    """A host whose GPUs nobody uses, for a command that is called in this process or in another."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, gpus: int = 3) -> None:
        self.directory = directory
        self.node = Node(directory, gpus)
        self.node.idle()
        self.procfs = directory / "proc"
        (self.procfs / "self/ns").mkdir(parents=True)
        (self.procfs / "self/ns/pid").symlink_to("pid:[4026531836]")
        self.environment = environment(directory / "script", self.node.library)
        for name in ("LD_LIBRARY_PATH", "FAKE_NVML_SCRIPT"):
            monkeypatch.setenv(name, self.environment[name])
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    @property
    def places(self) -> list[str]:
        """The flags by which a command finds this host."""
        paths = {"sysfs": self.node.sysfs, "procfs": self.procfs}
        paths |= {name: self.directory / name for name in ("runtime", "state")}
        return [f"--path.{name}={path}" for name, path in paths.items()]


def address_of(device: Mapping[str, Any]) -> str:
    """Return the PCI address of a scripted device as the kernel writes it."""
    domain, rest = device["pci"].lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


class Manager:
    """Listens as systemd would: every message of sd_notify with the time it came."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notify"
        self.heard: list[tuple[float, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._thread = threading.Thread(target=self._listen)

    def _listen(self) -> None:
        while message := self._socket.recv(4096).decode():
            self.heard.append((time.monotonic(), message))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", str(self.path))
        self._thread.join()
        self._socket.close()

    def times(self, message: str) -> list[float]:
        """When such a message came."""
        return [when for when, text in self.heard if message in text.split("\n")]


def row_times(running: Running, group: str) -> list[int]:
    """Return the times of all rows of a group, over all children whose rings are still there."""
    found: list[int] = []
    for path in ring_directory(running.runtime).glob(f"state.*.{group}.ring"):
        reader = RingReader(path)
        _, rows = reader.read(0)
        words = memoryview(rows).cast("q")
        found += words[:: reader.row_bytes // 8].tolist()
        reader.close()
    return sorted(found)


def widest_gap(times: list[int]) -> float:
    """Return the longest time between two rows, in seconds."""
    return max(later - earlier for earlier, later in pairwise(times)) / 1e9

"""The state of an RDMA port: whether it is up, whether somebody switched it off, its rate."""

import contextlib
import math
import os
from collections.abc import MutableSequence
from pathlib import Path

from gpuwatch.network_signals import PORT_ENABLED, PORT_GAUGES, PORT_UP, RATE, WIDTH
from gpuwatch.rdma_ports import RdmaPort, link
from gpuwatch.signals import UNKNOWN_GAUGE

UP, ENABLED, WIDE, FAST = (PORT_GAUGES.index(one) for one in (PORT_UP, PORT_ENABLED, WIDTH, RATE))
ACTIVE = b"4:"
DISABLED = b"3:"
IFF_UP = 0x1  # linux/if.h
BYTES_OF_A_FILE = 64


class PortState:
    """Reads state, rate and the switch of a port into gauges; counts how often it went down."""

    def __init__(self, port: RdmaPort) -> None:
        self.downs = 0
        self.up = False
        self.rate = math.inf  # bytes per second
        self.rate_text = ""
        self._port = port
        self._files: dict[str, int] = {}
        self._link = (UNKNOWN_GAUGE, UNKNOWN_GAUGE)

    def open(self, sysfs: Path) -> None:
        """Hold the files there are."""
        path = self._port.path
        wanted = {name: path / name for name in ("state", "rate")}
        # On Ethernet the port is Disabled also when just the cable is out (drivers/infiniband/hw/
        # mlx5/main.c): there the interface says what was asked for.
        if self._port.labels["link_layer"] != "Ethernet":
            wanted["phys_state"] = path / "phys_state"
        elif len(self._port.interfaces) == 1:
            wanted["flags"] = sysfs / "class/net" / self._port.interfaces[0] / "flags"
        for name, file in wanted.items():
            try:
                self._files[name] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # what a port has not is not known

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def read(self, gauges: MutableSequence[float]) -> None:
        """Fill the gauges that are known; raises OSError if the port cannot be read."""
        texts = {name: os.pread(file, BYTES_OF_A_FILE, 0) for name, file in self._files.items()}
        if "state" in texts:
            gauges[UP] = float(texts["state"].startswith(ACTIVE))
            self.seen(gauges[UP] == 1)
        if "flags" in texts:
            gauges[ENABLED] = UNKNOWN_GAUGE
            with contextlib.suppress(ValueError):  # cut short while the interface goes
                gauges[ENABLED] = float(bool(int(texts["flags"], 16) & IFF_UP))
        elif "phys_state" in texts:
            gauges[ENABLED] = float(not texts["phys_state"].startswith(DISABLED))
        rate = texts.get("rate", b"").decode(errors="replace").strip()
        if rate != self.rate_text:
            self.rate_text = rate
            try:
                self._link = link(rate)
            except ValueError:
                self._link = (UNKNOWN_GAUGE, UNKNOWN_GAUGE)
            self.rate = math.inf if math.isnan(self._link[0]) else self._link[0]
        gauges[FAST], gauges[WIDE] = self._link

    def seen(self, up: bool) -> None:
        """Take note of the state, and of a fall from ACTIVE."""
        self.downs += self.up and not up
        self.up = up

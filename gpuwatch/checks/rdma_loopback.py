"""How fast each RDMA port sends to itself: with ib_write_bw of perftest, where it is installed.

That tries the port, its slot and the host's memory, and no cable.
"""

import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from gpuwatch import attribute
from gpuwatch.capabilities import follow
from gpuwatch.checks.rdma import ACTIVE, physical_ports, port_state
from gpuwatch.matter import Matter
from gpuwatch.rdma_ports import RdmaPort, link
from gpuwatch.verify import Finding, Node

TOOL = "ib_write_bw"
MESSAGE_BYTES = 1 << 20
QUICK_MESSAGES, DEEP_MESSAGES = 2000, 20_000
QUICK_SECONDS, DEEP_SECONDS = 5.0, 20.0  # of a port
TRIES, AGAIN_SECONDS = 20, 0.1
WARN_RATIO, FAIL_RATIO = 0.85, 0.60  # of the line rate
THUMB_RATIO, THUMB = 0.95, "rule of thumb: 95 % of the line rate"
COLUMNS = re.compile(r"BW average\[(Gb/sec|MB/sec|MiB/sec)\]")
UNITS = {"Gb/sec": 1e9 / 8, "MB/sec": float(1 << 20), "MiB/sec": float(1 << 20)}
AVERAGE = 3  # the column
STEP = "look at the port's PCIe link (lspci -vv), at NUMA, ACS and relaxed ordering in the BIOS"


class RdmaLoopback:
    """Writes of 1 MiB from each active port to itself."""

    name = "rdma_loopback"
    help = "bytes per second of each RDMA port to itself"
    phase: Literal["static", "load"] = "load"
    deep_only = False
    essential = False

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take; there are about as many ports as GPUs."""
        return 20.0 + 10 * gpus if deep else 4.0 + 0.5 * gpus

    def run(self, node: Node) -> Iterator[Finding]:
        """Try the active ports, one after the other."""
        nothing = Matter(self.name, "host")
        ports = [port for port in physical_ports(node.sysfs) if port_state(port) == ACTIVE]
        if not ports:
            yield nothing.skipped(
                "no active RDMA port", "connect one, if the node was sold with it"
            )
            return
        if shutil.which(TOOL) is None:
            yield nothing.skipped(f"{TOOL} is not installed", "apt-get install perftest")
            return
        for port in ports:
            told = _tried(port, node.deep)
            yield from findings(port.id, attribute.read(port.path / "rate"), told)


def _tried(port: RdmaPort, deep: bool) -> float | str:
    """Return bytes per second of a port, or why there is no value."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    command = [
        *(TOOL, "-d", port.device, "-i", str(port.number), "-p", str(number), "-F"),
        *("-s", str(MESSAGE_BYTES), "-n", str(DEEP_MESSAGES if deep else QUICK_MESSAGES)),
        "--report_gbits",
    ]
    seconds = DEEP_SECONDS if deep else QUICK_SECONDS
    end = time.monotonic() + seconds
    server = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=follow(signal.SIGKILL),
    )
    try:
        for _ in range(TRIES):
            time.sleep(AGAIN_SECONDS)  # until the server listens; it takes one client alone
            done = subprocess.run(
                [*command, "127.0.0.1"],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=max(0.1, end - time.monotonic()),
                preexec_fn=follow(signal.SIGKILL),
            )
            if done.returncode == 0 or server.poll() is not None:
                break
    except subprocess.TimeoutExpired:
        return f"no result within {seconds:g} s"
    finally:
        server.kill()
        server.wait()
    value = bandwidth(done.stdout)
    if value is not None:
        return value
    said = (done.stderr or done.stdout).strip().splitlines()
    return said[-1].strip()[:200] if said else f"{TOOL} ended with status {done.returncode}"


def bandwidth(output: str) -> float | None:
    """Return bytes per second of the largest message in what perftest printed, None without one."""
    unit, found = 0.0, None
    for line in output.splitlines():
        if column := COLUMNS.search(line):
            unit = UNITS[column[1]]
            continue
        cells = line.split()
        if unit and len(cells) > AVERAGE:
            try:
                found = [float(cell) for cell in cells[: AVERAGE + 1]][AVERAGE] * unit
            except ValueError:
                continue
    return found or None


def findings(port: str, rate: str, told: float | str) -> Iterator[Finding]:
    """Yield what is to be said of a port: by its line rate, and by rule of thumb."""
    try:
        line = link(rate)[0]
    except ValueError:
        line = 0.0
    matter = Matter("rdma_loopback", port)
    if isinstance(told, str) or not line:
        step = "run ib_write_bw by hand, as root and with memory to be locked (ulimit -l)"
        if isinstance(told, str):
            yield matter.unknown(told, "host", step)
        else:
            matter = replace(matter, unit="bytes_per_second").seen(told)
            yield matter.unknown(f"the port's rate is not known: {rate!r}", "host", step)
        return
    ratio = told / line
    written = Matter("rdma_loopback", port, "write", "bytes_per_second")
    for matter, least, source in (
        (written, WARN_RATIO, "line rate"),
        (replace(written, measure="of the line").by_thumb(), THUMB_RATIO, THUMB),
    ):
        fault = f"{100 * ratio:.0f} % of the line rate" if ratio < least else ""
        fatal = ratio < FAIL_RATIO and not matter.thumb
        yield matter.seen(told, least * line, source).judged(fault, "link", STEP, fatal=fatal)

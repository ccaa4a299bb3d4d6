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
from typing import Literal

from gpuwatch import attribute
from gpuwatch.capabilities import follow
from gpuwatch.rdma_ports import RdmaPort, link, rdma_ports
from gpuwatch.verify import Finding, Node, Verdict

TOOL = "ib_write_bw"
SETTINGS = {"include": (), "exclude": (), "virtual_functions": False}
MESSAGE_BYTES = 1 << 20
QUICK_MESSAGES, DEEP_MESSAGES = 2000, 20_000
QUICK_SECONDS, DEEP_SECONDS = 5.0, 20.0  # of a port
TRIES, AGAIN_SECONDS = 20, 0.1
WARN_RATIO, FAIL_RATIO = 0.85, 0.60  # of the line rate
THUMB_RATIO = 0.95
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
        ports = [port for port in rdma_ports(node.sysfs, SETTINGS) if _is_active(port)]
        if not ports:
            yield _skipped("no active RDMA port", "connect one, if the node was sold with it")
            return
        if shutil.which(TOOL) is None:
            yield _skipped(f"{TOOL} is not installed", "apt-get install perftest")
            return
        for port in ports:
            told = _tried(port, node.deep)
            yield from findings(port.id, attribute.read(port.path / "rate"), told)


def _is_active(port: RdmaPort) -> bool:
    return "ACTIVE" in attribute.read(port.path / "state")


def _skipped(reason: str, step: str) -> Finding:
    return Finding(
        name="rdma_loopback", entity="host", verdict="SKIP", reason=reason, next_step=step
    )


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
    if isinstance(told, str) or not line:
        yield Finding(
            name="rdma_loopback",
            entity=port,
            verdict="UNKNOWN",
            value=None if isinstance(told, str) else told,
            unit="" if isinstance(told, str) else "bytes_per_second",
            reason=told if isinstance(told, str) else f"the port's rate is not known: {rate!r}",
            cause="host",
            next_step="run ib_write_bw by hand, as root and with memory to be locked (ulimit -l)",
        )
        return
    ratio = told / line
    verdict: Verdict = "FAIL" if ratio < FAIL_RATIO else "WARN" if ratio < WARN_RATIO else "PASS"
    for thumb, part, worse in ((False, WARN_RATIO, verdict), (True, THUMB_RATIO, None)):
        low = ratio < part
        yield Finding(
            name="rdma_loopback",
            entity=port,
            verdict=worse or ("WARN" if low else "PASS"),
            measure="of the line" if thumb else "write",
            value=told,
            unit="bytes_per_second",
            expectation=part * line,
            source="rule of thumb: 95 % of the line rate" if thumb else "line rate",
            reason=f"{ratio:.0%} of the line rate" if low else "",
            cause="link" if low else "",
            next_step=STEP if low else "",
            thumb=thumb,
        )

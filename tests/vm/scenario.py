"""What happens in the guest: faults of real RDMA devices, then gpuwatch under the real systemd.

It runs as a service of the guest, tells each step in a line of JSON, and leaves judging to the
tests. All times are the guest's.
"""

import contextlib
import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from running import Running, only

HERE = Path(__file__).parent
SYS_INIT_MODULE = 175  # asm/unistd_64.h
# Rules about ports leave out the three minutes after boot. Rest takes no time in this machine.
BOOT_SECONDS = 185
# A processor of a fraction of a real one's speed: what sampling costs is not the question here.
BUDGET = "[network]\nbudget_ratio = 1.0\n"
CONFIG = only("rdma", "netdev") + BUDGET
UNIT_CONFIG = only("rdma", "netdev", "kmsg") + BUDGET


def tell(step: str, **found: Any) -> None:
    sys.stdout.write(json.dumps({"step": step, **found}) + "\n")
    sys.stdout.flush()


def do(command: str) -> str:
    return subprocess.run(command.split(), check=True, stdout=subprocess.PIPE, text=True).stdout


def until(shown: Callable[[], Any], seconds: float) -> bool:
    """Say whether it comes in time; looked at so often that looking is no load."""
    end = time.monotonic() + seconds
    while not (found := bool(shown())) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def load_modules() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for path in sorted((HERE / "modules").iterdir()):
        code = path.read_bytes()
        if libc.syscall(SYS_INIT_MODULE, code, len(code), b""):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path.name)


def add_pair(one: str, other: str) -> None:
    """Add two interfaces that are the ends of a cable."""
    do(f"ip link add {one} type veth peer name {other}")
    do(f"ip link set {one} up")
    do(f"ip link set {other} up")


def flap(end: str) -> None:
    """Take the carrier away from the other end of a cable, for 30 ms."""
    began = time.monotonic()
    do(f"ip link set {end} down")
    time.sleep(max(0.0, began + 0.03 - time.monotonic()))
    do(f"ip link set {end} up")


def route(interface: str, own: str, peer_interface: str, peer: str, table: int) -> None:
    """Have what this machine sends to the peer's address, also its own, go over the cable."""
    settings = Path("/proc/sys/net/ipv4/conf", interface)
    (settings / "accept_local").write_text("1")
    (settings / "rp_filter").write_text("0")
    address = Path("/sys/class/net", peer_interface, "address").read_text().strip()
    do(f"ip address add {own}/32 dev {interface}")
    do(f"ip neighbour add {peer} lladdr {address} dev {interface} nud permanent")
    do(f"ip route add {peer}/32 dev {interface} src {own} table {table}")
    do(f"ip rule add priority 10 iif lo to {peer} lookup {table}")


def build_network() -> None:
    """Make rxeA and rxeB, with vA and vB below them.

    Both in one network namespace: rxe has its socket in the first one only.
    """
    do("ip link set lo up")
    Path("/proc/sys/net/ipv4/conf/all/rp_filter").write_text("0")
    add_pair("vA", "vB")
    route("vA", "10.77.0.1", "vB", "10.77.0.2", 101)
    route("vB", "10.77.0.2", "vA", "10.77.0.1", 102)
    do("ip rule add priority 20 lookup local")
    do("ip rule del priority 0")
    for end in "AB":
        do(f"rdma link add rxe{end} type rxe netdev v{end}")


@contextlib.contextmanager
def traffic(every: int) -> Iterator[None]:
    """Send from rxeA to rxeB; the receiver gets ready every so many turns."""
    command = (HERE / "traffic", "rxeA", "rxeB", str(every))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield
        finally:
            process.terminate()
            tell(f"traffic {every}", arrived=process.communicate()[0], status=process.returncode)


class Step:
    """What a daemon shows of one step: totals that rise, events, alerts, and when."""

    def __init__(self, name: str, daemon: Running) -> None:
        self.name = name
        self._daemon = daemon
        self._seconds: dict[str, float | None] = {}

    def __enter__(self) -> Self:
        self._before = self._daemon.scrape()
        self._began_ns = time.monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        after = self._daemon.scrape()
        told = {name: value for name, value in after.items() if "_rdma_" in name or "_nic_" in name}
        status = self._daemon.status()
        tell(
            self.name,
            seconds=self._seconds,
            rose={
                name: value - self._before.get(name, 0.0)
                for name, value in told.items()
                if "_total{" in name and value != self._before.get(name, 0.0)
            },
            up={name: value for name, value in told.items() if "_rdma_port_up{" in name},
            alerts=[[one["rule"], one["entity"][1], one["state"]] for one in status["alerts"]],
            events=[
                [event["name"], event["entity"][1]]
                for event in status["events"]
                if event["time_ns"] >= self._began_ns
            ],
        )

    def note(self, what: str, shown: Callable[[], Any], seconds: float = 5.0) -> None:
        """Note how long after the step's beginning it is shown; None if it is not in time."""
        found = until(shown, seconds)
        self._seconds[what] = (time.monotonic_ns() - self._began_ns) / 1e9 if found else None

    def note_event(self, name: str, entity: str) -> None:
        """Note when an event of this step is shown."""

        def shown() -> bool:
            return any(
                event["entity"][1] == entity and event["time_ns"] >= self._began_ns
                for event in self._daemon.events(name)
            )

        self.note(name, shown)


def watch_ports(daemon: Running) -> None:
    """Go through the faults that soft RoCE can have."""

    def up(device: str) -> float | None:
        return daemon.value("gpuwatch_rdma_port_up", f'device="{device}"')

    def link_downs(device: str) -> float | None:
        return daemon.value("gpuwatch_rdma_link_downed_total", f'device="{device}"')

    def firing(rule: str) -> bool:
        return daemon.value("gpuwatch_alert_firing", f'alert="{rule}"', 'device="rxeC"') == 1

    until(lambda: up("rxeA") == 1 and up("rxeB") == 1, 30)
    with Step("receiver not ready", daemon), traffic(every=8):
        time.sleep(3)
    with traffic(every=1):
        time.sleep(1)  # what was counted before is read
        with Step("clean", daemon):
            time.sleep(3)
        with Step("loss", daemon) as step:
            do("tc qdisc add dev vA root netem loss 5%")
            step.note_event("rdma_loss_detected", "rxeA/1")
            do("tc qdisc del dev vA root")
    with Step("added", daemon) as step:
        add_pair("vC", "vD")
        for end in "CD":
            do(f"rdma link add rxe{end} type rxe netdev v{end}")
        step.note("up", lambda: up("rxeC") == 1 and up("rxeD") == 1)
        interface = ("gpuwatch_nic_carrier_downs_total", 'interface="vC"')
        step.note("interface", lambda: daemon.value(*interface) is not None)
    with Step("flap", daemon) as step:
        flap("vB")
        carrier = ("gpuwatch_nic_carrier_downs_total", 'interface="vA"')
        step.note("carrier", lambda: daemon.value(*carrier) == 1)
        step.note("link", lambda: link_downs("rxeA") == link_downs("rxeB") == 1)
        step.note_event("nic_carrier_lost", "vA")
    with Step("down", daemon) as step:
        do("ip link set vD down")
        step.note("down", lambda: up("rxeC") == 0)
        step.note_event("rdma_port_down_detected", "rxeC/1")
        step.note("firing", lambda: firing("rdma_port_down"), 20)
    with Step("up again", daemon) as step:
        do("ip link set vD up")
        step.note("up", lambda: up("rxeC") == 1 and up("rxeD") == 1)
    with Step("second flap", daemon) as step:
        flap("vD")
        step.note("firing", lambda: firing("rdma_port_flapping"))
    with Step("removed", daemon) as step:
        do("rdma link delete rxeC")
        step.note_event("rdma_device_lost", "rxeC")
        step.note("down", lambda: up("rxeC") == 0)
    with Step("returned", daemon) as step:
        do("rdma link add rxeC type rxe netdev vC")
        step.note("up", lambda: up("rxeC") == 1)


class Unit(Running):
    """The daemon that systemd runs, by its page."""

    def __init__(self) -> None:
        self.port = 9973

    def answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get("/-/ready")[0] == 200
        return False

    def shown(self) -> dict[str, str]:
        """Return what systemd has to say of the unit."""
        keys = "ActiveState,SubState,StatusText,MainPID,NRestarts,Result,ExecMainStatus"
        lines = do(f"systemctl show gpuwatch -p {keys}").splitlines()
        return dict(line.split("=", 1) for line in lines)

    def processes(self) -> list[tuple[str, str]]:
        """Return user and command of each of the unit's processes."""
        folder = Path("/sys/fs/cgroup/system.slice/gpuwatch.service/cgroup.procs")
        found = []
        for pid in folder.read_text().split() if folder.exists() else ():
            with contextlib.suppress(FileNotFoundError):  # it was a short one
                process = Path("/proc", pid)
                command = (process / "cmdline").read_text().replace("\0", " ")
                found.append((process.owner(), command))
        return found

    def tell(self, step: str, began: float) -> None:
        tell(
            step,
            seconds=time.monotonic() - began,
            shown=self.shown(),
            processes=self.processes(),
            runtime=Path("/run/gpuwatch").exists(),
        )


def keep_unit() -> None:
    """Start the unit, and see what systemd makes of a reload, a hang, a crash and a stop."""
    unit = Unit()
    Path("/etc/gpuwatch").mkdir()
    Path("/etc/gpuwatch/config.toml").write_text(UNIT_CONFIG)
    began = time.monotonic()
    do("systemctl start gpuwatch")
    unit.tell("start", began)
    until(unit.answers, 30)
    with Step("unit", unit) as step:
        up = ("gpuwatch_rdma_port_up", 'device="rxeA"')
        step.note("ports", lambda: unit.value(*up) == 1, 10)
        step.note("kernel log", lambda: unit.value("gpuwatch_kmsg_up") == 1, 10)

    began = time.monotonic()
    do("systemctl reload gpuwatch")
    unit.tell("reload", began)

    began = time.monotonic()
    os.kill(int(unit.shown()["MainPID"]), signal.SIGSTOP)
    until(lambda: not unit.answers(), 90)
    until(unit.answers, 90)
    unit.tell("hang", began)

    began = time.monotonic()
    os.kill(int(unit.shown()["MainPID"]), signal.SIGKILL)
    until(lambda: not unit.answers(), 30)
    until(unit.answers, 60)
    unit.tell("crash", began)

    began = time.monotonic()
    do("systemctl stop gpuwatch")
    unit.tell("stop", began)


def main() -> None:
    load_modules()
    build_network()
    time.sleep(BOOT_SECONDS - time.monotonic())
    directory = Path("/run/plain")
    directory.mkdir()
    with Running(directory, config=CONFIG) as daemon:
        watch_ports(daemon)
        tell("plain", status=daemon.stop(), log=daemon.log())
    try:
        keep_unit()
    finally:
        tell("journal", text=do("journalctl --boot --output short-monotonic --no-pager"))


if __name__ == "__main__":
    main()

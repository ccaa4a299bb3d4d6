"""What it costs to read the host and its kernel log.

    python benchmarks/host_reads.py

prints the CPU time of each group's read here and of 100 000 lines of the kernel log, ordinary ones
and a storm of Xid errors, each the median of several rounds.
"""

import statistics
import time

from gpuwatch import kernel_log, xid
from gpuwatch.clock import SECOND_NS
from gpuwatch.kernel_log import KernelLog
from gpuwatch.pulse import Pulse
from gpuwatch.source import Context
from gpuwatch.sources.host import Host
from gpuwatch.sources.kmsg import Kmsg

ROUNDS = 7
READS = 50
LINES = 100_000
ORDINARY = (
    "6,{0},{0},-;usb 1-1: new high-speed USB device number 2 using xhci_hcd",
    '5,{0},{0},-;audit: type=1400 audit(1.2:3): apparmor="DENIED" operation="open" profile="x"',
    "30,{0},{0},-;systemd[1]: Started user@0.service - User Manager for UID 0.",
    "6,{0},{0},-,caller=T1;IPv6: ADDRCONF(NETDEV_CHANGE): veth0: link becomes ready",
)
STORM = ("3,{0},{0},-;NVRM: Xid (PCI:0000:dc:00): 45, Ch 00000001 caused by previous Xid 149",)


def main() -> None:
    """Measure and print."""
    paths = {"kmsg": "/dev/kmsg", "runtime": "/nonexistent"}
    settings = {"config": {"paths": paths, "host": {"period_ms": 100.0, "xid_catalogue": ""}}}
    for source in (Host(), Kmsg()):
        for group in source.open(Context(settings, Pulse.create(1))).groups:
            group.read()
            cost = statistics.median(spent(group.read, READS) for _ in range(ROUNDS)) / READS
            share = cost * SECOND_NS / group.period_ns
            print(f"{source.name} {group.name}: {cost * 1e6:.0f} us, {share:.3%} of a core")
    for name, forms in (("ordinary lines", ORDINARY), ("a storm of Xid errors", STORM)):
        lines = [forms[n % len(forms)].format(n).encode() for n in range(LINES)]
        cost = statistics.median(spent(lambda lines=lines: look(lines), 1) for _ in range(ROUNDS))
        print(f"{LINES} {name}: {cost:.2f} s, {cost / LINES * 1e6:.1f} us each")


def spent(work, times: int) -> float:
    """Return the CPU seconds that so many calls take."""
    begin = time.process_time()
    for _ in range(times):
        work()
    return time.process_time() - begin


def look(lines: list[bytes]) -> None:
    """Read lines as the source does."""
    log = KernelLog(xid.catalogue())
    for line in lines:
        record = kernel_log.parse(line)
        if record is not None:
            log.look(record)


if __name__ == "__main__":
    main()

"""What the kernel log of this boot tells of the GPUs: Xids, faults of NVSwitches and of PCIe."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gpuwatch import kernel_log, xid
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.kernel_log import PCIE_ERROR, SXID, XID, Found, KernelLog
from gpuwatch.lookup import text
from gpuwatch.matter import Matter
from gpuwatch.static_check import StaticCheck, entity_of
from gpuwatch.verify import Facts, Finding, Node

RECENT_NS = 86400 * SECOND_NS  # what is older may have been repaired by a reset since
READ_BYTES = 1 << 14  # a smaller buffer than the record gives EINVAL
MOST_RECORDS = 100_000
FATAL = 2  # the rank of what fails a GPU
SOURCE = "NVIDIA's catalogue of Xids"
ADVICE = "run as root on the host; in a container give it /dev/kmsg"


def look(node: Node) -> Iterator[Finding]:
    """Judge what the log tells of each GPU, and of what joins them."""
    try:
        found = list(_found(node.kmsg))
    except OSError as error:
        matter = Matter("kernel_log", "host")
        yield matter.skipped(f"{node.kmsg}: cannot be read: {error.strerror}", ADVICE)
        return
    for gpu in node.gpus:
        yield _of_gpu(gpu, found)
    yield _of_host(found, SXID, "NVSwitch")
    yield _of_host(found, PCIE_ERROR, "PCIe")


def _found(path: Path) -> Iterator[tuple[int, Found]]:
    """Yield what the log means, with its age in nanoseconds."""
    log, now_ns = KernelLog(xid.catalogue()), monotonic_ns()
    for line in _lines(path):
        record = kernel_log.parse(line)
        for one in log.look(record) if record else ():
            yield max(0, now_ns - record.time_ns if record else 0), one


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines that the kernel has now. Raises OSError if it shows none."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        rest = b""
        for _ in range(MOST_RECORDS):
            try:
                block = os.read(file, READ_BYTES)
            except BrokenPipeError:  # records were overwritten while it was read
                continue
            except BlockingIOError:
                return
            if not block:
                return
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
    finally:
        os.close(file)


def _of_gpu(gpu: Facts, found: list[tuple[int, Found]]) -> Finding:
    matter = Matter("kernel_log", entity_of(gpu), "xids")
    address = text(gpu, "pci_bus_id")
    own = [(age, one) for age, one in found if one.event == XID and one.entity.id == address]
    codes = Counter(one.head.partition(":")[0] for _, one in own)
    told = ", ".join(f"{times}x {code}" for code, times in codes.most_common())
    matter = matter.seen(told or "none", "none but those of jobs", SOURCE)
    worst = max(own, key=lambda pair: (_rank(*pair), -pair[0]), default=None)
    if worst is None or not _rank(*worst):
        return matter.good("jobs made them" if own else "")
    age, one = worst
    fault = f"Xid {one.head}, {_ago(age)}: {one.text}"
    fatal = _rank(*worst) == FATAL
    return matter.judged(fault, "driver", "do what the catalogue says above", fatal=fatal)


def _rank(age_ns: int, found: Found) -> int:
    """Return how bad an Xid is: not at all if jobs make it, less if a reset may have mended it."""
    level = found.head.rpartition(": ")[2]
    if level == "critical" and age_ns <= RECENT_NS:
        return FATAL
    return int(level in ("critical", "warning"))


def _of_host(found: list[tuple[int, Found]], event: str, measure: str) -> Finding:
    own = [(age, one) for age, one in found if one.event == event]
    matter = Matter("kernel_log", "host", measure).seen(float(len(own)), 0.0, "rule of thumb")
    heads = [(age, one) for age, one in own if one.head != "corrected"]
    if not heads:
        return matter.good("all corrected" if own else "")
    age, one = min(heads, key=lambda pair: pair[0])
    fault = f"{one.entity.id}: {one.head}, {_ago(age)}: {one.text}"
    fatal = one.head.endswith(("critical", "fatal")) and age < RECENT_NS
    return matter.judged(fault, "link", "look at what that device joins; reseat it", fatal=fatal)


def _ago(age_ns: int) -> str:
    hours = age_ns / SECOND_NS / 3600
    return f"{hours / 24:.0f} days ago" if hours > 48 else f"{hours:.1f} hours ago"


CHECK = StaticCheck(
    "kernel_log", "what the kernel log of this boot tells of the GPUs", look, seconds=4
)

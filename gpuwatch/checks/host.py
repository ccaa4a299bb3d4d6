"""Whether the host can feed its GPUs: processors, memory, limits, clock.

What helps or harms a job by experience alone is told as a rule of thumb, and counts for nothing.
"""

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gpuwatch import attribute
from gpuwatch.lookup import number
from gpuwatch.matter import Matter
from gpuwatch.rdma_ports import devices
from gpuwatch.static_check import StaticCheck
from gpuwatch.verify import Finding, Node

SHARED_MEMORY_BYTES = 1 << 30  # NCCL and data loaders; containers have 64 MiB unless told
CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
PROCESSORS_PER_GPU = 4
PRESSURE = {"cpu": ("some", 30.0), "memory": ("some", 5.0), "io": ("full", 20.0)}  # percent, 60 s
LOCKED = re.compile(r"^Max locked memory\s+(\S+)", re.MULTILINE)
PRIVILEGES = re.compile(r"^CapEff:\s*([0-9a-f]+)", re.MULTILINE)
QUOTA = re.compile(r"(\d+) (\d+)")
CAP_IPC_LOCK = 14  # linux/capability.h: locks as much as it likes
UNSYNCHRONISED = 0x40  # linux/timex.h: STA_UNSYNC
NO_FILE = "not shown here"


def look(node: Node) -> Iterator[Finding]:
    """Judge the host by what /proc and /sys show."""
    yield _governor(node)
    yield _clocksource(node)
    yield _clock(node)
    yield _shared_memory(node)
    yield from _locked_memory(node)
    yield _processors(node)
    yield _memory_limit(node)
    yield _swap(node)
    yield from _pressure(node)
    yield _numa(node)


def _governor(node: Node) -> Finding:
    matter = Matter("host", "host", "cpu governor")
    files = (node.sysfs / "devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    told = Counter(filter(None, map(attribute.read, files)))
    if not told:
        return matter.skipped(NO_FILE, "nothing: virtual machines have none")
    others = [name for name in told if name != "performance"]
    matter = matter.seen(", ".join(told), "performance", "rule of thumb")
    if not others:
        return matter.good()
    fault = f"processors are governed by {', '.join(others)}: short work runs at a low clock"
    return matter.by_thumb().odd(fault, "host", "cpupower frequency-set -g performance")


def _clocksource(node: Node) -> Finding:
    matter = Matter("host", "host", "clock source")
    path = node.sysfs / "devices/system/clocksource/clocksource0/current_clocksource"
    told = attribute.read(path)
    if not told:
        return matter.skipped(NO_FILE, "look at it on the host")
    fault = f"each look at the clock takes microseconds by {told}: all that is timed is slower"
    return matter.seen(told, " or ".join(CLOCKS[:3]), "the kernel's documentation").judged(
        "" if told in CLOCKS else fault,
        "host",
        "look in the kernel log why tsc was given up; boot with tsc=reliable if it is sound",
    )


def _clock(node: Node) -> Finding:
    """Ask the kernel whether somebody keeps its clock right."""
    matter = Matter("host", "host", "clock")
    status = clock_status() if node.procfs == Path("/proc") else None
    if status is None:
        return matter.skipped("not asked for", "look at timedatectl or chronyc tracking")
    fault = "nobody keeps the clock right: logs and traces of nodes do not fit together"
    matter = matter.seen("free" if status & UNSYNCHRONISED else "kept", "kept", "adjtimex")
    if not status & UNSYNCHRONISED:
        return matter.good()
    return matter.by_thumb().odd(fault, "host", "start chronyd or systemd-timesyncd")


def clock_status() -> int | None:
    """Return the status bits of the kernel's clock, None if it does not tell."""
    # struct timex of linux/timex.h begins with modes, offset, freq, maxerror, esterror, status.
    timex = (ctypes.c_long * 64)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(timex)) < 0:
        return None
    return timex[5] & 0xFFFFFFFF


def _shared_memory(node: Node) -> Finding:
    matter = Matter("host", "host", "shared memory", "bytes")
    try:
        found = os.statvfs(node.devices / "shm")
    except OSError as error:
        return matter.skipped(f"it is not here: {error.strerror}", "mount a tmpfs at /dev/shm")
    size = float(found.f_blocks * found.f_frsize)
    fault = "shared memory is too small for NCCL and for data loaders: they fail or hang"
    return matter.seen(size, float(SHARED_MEMORY_BYTES), "NCCL's troubleshooting").judged(
        fault if size < SHARED_MEMORY_BYTES else "",
        "host",
        "start the container with --shm-size=16g or --ipc=host; in Kubernetes mount an emptyDir of"
        " medium Memory",
    )


def _locked_memory(node: Node) -> Iterator[Finding]:
    """Judge how much memory may be locked, which RDMA needs."""
    if not devices(node.sysfs):
        return
    matter = Matter("host", "host", "locked memory")
    limit = LOCKED.search(attribute.read(node.procfs / "self/limits"))
    held = PRIVILEGES.search(attribute.read(node.procfs / "self/status"))
    if limit is None:
        yield matter.skipped(NO_FILE, "look at ulimit -l")
        return
    free = held is not None and bool(int(held[1], 16) >> CAP_IPC_LOCK & 1)
    fault = f"at most {limit[1]} bytes may be locked: RDMA cannot register memory"
    yield matter.seen(limit[1], "unlimited", "NCCL's troubleshooting").judged(
        "" if limit[1] == "unlimited" or free else fault,
        "host",
        "ulimit -l unlimited; --ulimit memlock=-1 for a container",
    )


def _processors(node: Node) -> Finding:
    """Compare the processors that this process may use with the GPUs."""
    matter = Matter("host", "host", "processors")
    present = len(re.findall("^processor", attribute.read(node.procfs / "cpuinfo"), re.MULTILINE))
    if not present:
        return matter.skipped(NO_FILE, "look at nproc")
    quota = QUOTA.fullmatch(attribute.read(_group(node) / "cpu.max"))
    given = min(present, int(quota[1]) / int(quota[2])) if quota and int(quota[2]) else present
    least = float(PROCESSORS_PER_GPU * max(1, len(node.gpus)))
    matter = matter.seen(round(float(given), 2), least, "rule of thumb")
    if given >= least:
        return matter.good()
    fault = f"{given:g} processors for {len(node.gpus)} GPUs: they will wait for the host"
    return matter.by_thumb().odd(fault, "host", "raise the container's limit, or take more")


def _group(node: Node) -> Path:
    """Return the control group of this process, the root's if it is not known."""
    found = re.search(r"^0::/(.*)$", attribute.read(node.procfs / "self/cgroup"), re.MULTILINE)
    own = node.sysfs / "fs/cgroup" / (found[1] if found else "")
    return own if own.is_dir() else node.sysfs / "fs/cgroup"


def _memory_limit(node: Node) -> Finding:
    """Compare what this process's control group may use with the memory of the GPUs."""
    matter = Matter("host", "host", "memory limit", "bytes")
    limit = attribute.read(_group(node) / "memory.max")
    sizes = [number(gpu, "memory", "total_bytes") or 0.0 for gpu in node.answering]
    if not limit.isdecimal():
        return matter.skipped("none is set, or it is not shown here", "look at free")
    matter = matter.seen(float(limit), sum(sizes), "rule of thumb")
    if float(limit) >= sum(sizes):
        return matter.good()
    fault = "less memory than the GPUs have together: checkpoints and data may not fit"
    return matter.by_thumb().odd(fault, "host", "raise the container's limit")


def _swap(node: Node) -> Finding:
    matter = Matter("host", "host", "swap", "bytes")
    told = dict(
        re.findall(r"^(Swap\w+):\s+(\d+) kB", attribute.read(node.procfs / "meminfo"), re.M)
    )
    if not {"SwapTotal", "SwapFree"} <= told.keys():
        return matter.skipped(NO_FILE, "look at free")
    used = 1024.0 * (int(told["SwapTotal"]) - int(told["SwapFree"]))
    matter = matter.seen(used, 0.0, "rule of thumb")
    if used < SHARED_MEMORY_BYTES:
        return matter.good()
    fault = "the host has swapped: it had too little memory"
    return matter.by_thumb().odd(fault, "host", "look at who takes the memory")


def _pressure(node: Node) -> Iterator[Finding]:
    """Judge what the host waits for now: somebody else may use it."""
    for resource, (kind, limit) in PRESSURE.items():
        matter = Matter("host", "host", f"{resource} pressure", "ratio")
        text = attribute.read(node.procfs / "pressure" / resource)
        found = re.search(rf"^{kind} .*avg60=(\d+(?:\.\d+)?)", text, re.MULTILINE)
        if found is None:
            yield matter.skipped(NO_FILE, "boot with psi=1 to have it")
            continue
        percent = float(found[1])
        matter = matter.seen(percent / 100, limit / 100, "rule of thumb")
        if percent <= limit:
            yield matter.good()
        else:
            fault = f"work waited for {resource} {percent:.0f} % of the last minute"
            yield matter.by_thumb().odd(fault, "busy", "look at who else uses this host")


def _numa(node: Node) -> Finding:
    """Say whether the kernel moves memory between nodes by itself."""
    matter = Matter("host", "host", "numa balancing")
    told = attribute.read(node.procfs / "sys/kernel/numa_balancing")
    if not told:
        return matter.skipped(NO_FILE, "nothing: the kernel has none")
    matter = matter.seen(told, "0", "rule of thumb")
    if told == "0" or len(list((node.sysfs / "devices/system/node").glob("node[0-9]*"))) < 2:
        return matter.good()
    fault = "the kernel moves memory between NUMA nodes by itself, which makes steps uneven"
    return matter.by_thumb().odd(fault, "host", "sysctl kernel.numa_balancing=0")


CHECK = StaticCheck("host", "whether the host can feed its GPUs", look)

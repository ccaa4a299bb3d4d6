"""What the kernel log tells: records taken apart, and the few lines that mean something here.

Whoever may write to the log could fake a line, but not its facility: what user programs write is
never marked as the kernel's own, 0 (Documentation/ABI/testing/dev-kmsg). And a kernel line may
quote what a user chose, a path or a name with a line break in it: so a record counts only if it
begins as the driver begins it, and further lines of it only where that driver writes several.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpuwatch import xid
from gpuwatch.signals import HOST, Entity
from gpuwatch.xid import Entry, Xid

XID, SXID, RECOVERY = "xid", "sxid", "gpu_recovery_action"
XID_BY_NVML = "xid_by_nvml"  # becomes XID where the kernel log does not tell them
PCIE_ERROR = "pcie_error"
LINK_DOWN, LINK_UP, NIC_FAULT = "link_down", "link_up", "nic_fault"
OOM_KILL, OWN_OOM_KILL = "oom_kill", "oom_kill_of_gpuwatch"
LOCKUP, HUNG_TASK = "lockup", "hung_task"
FORGED = "forged"  # counted, never told: who may fake one could fake thousands
OVERRUN = "kmsg_overrun"
# What is counted by kind, for the host as a whole.
FABRIC = (SXID, PCIE_ERROR, LINK_DOWN, LINK_UP, NIC_FAULT)
SYSTEM = (OOM_KILL, OWN_OOM_KILL, LOCKUP, HUNG_TASK)
COUNTED = (*FABRIC, *SYSTEM, FORGED, OVERRUN)

SAME_FAULT_NS = 60_000_000_000  # the driver says in up to three ways that a GPU is off the bus
TEXT_LENGTH = 200

_TOLD = re.compile(r"(\w+)(?:: (critical|warning|info))?(?: x(\d+))?: ")
_RECORD = re.compile(rb"(\d{1,9}),(\d{1,20}),(\d{1,20}),[^;]*;(.*)", re.DOTALL)
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")
_STARTS = (
    b"NVRM: ",
    b"nvidia-nvswitch",
    b"mlx5_core ",
    b"bnxt_en ",
    b"Out of memory: ",
    b"Memory cgroup out of memory: ",
    b"Killed process ",
    b"watchdog: ",
    b"NMI watchdog: ",
    b"BUG: soft lockup",
    b"INFO: task ",
)
_AER = b"PCIe Bus Error: "
_FAKES = re.compile(rb"NVRM: Xid \(|: SXid \(|fallen off the bus")

_PCI = r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])"
_OFF_THE_BUS = re.compile(rf"NVRM: GPU (?:at )?(?:PCI:)?{_PCI}:? (?:GPU )?has fallen off the bus")
_OFF_BEGINS = re.compile(rf"NVRM: The NVIDIA GPU {_PCI}")
_OFF_GOES_ON = re.compile(r"NVRM: (?:\(PCI ID|\(.*\) installed|installed in this system)")
_OFF_ENDS = "NVRM: fallen off the bus"
_SXID = re.compile(
    rf"nvidia-nvswitch\d+: SXid \(PCI:{_PCI}\): (\d{{1,9}}), (Fatal|Non-fatal), (.*)"
)
_RDMA_LINK = re.compile(rf"mlx5_core {_PCI} (\S+): Port: (\d+) Link (DOWN|ACTIVE)")
_NET_LINK = re.compile(
    rf"(?:mlx5_core|bnxt_en) {_PCI} (\S+): (?:NIC )?Link (?:is )?([Dd]own|[Uu]p)"
)
_NIC_FAULT = re.compile(
    rf"(?:mlx5_core|bnxt_en) {_PCI}\b.*?(?:"
    r"health compromised|[Hh]ealth issue|[Ff]atal error|[Hh]igh [Tt]emperature|Port module event\[e"
    r"|insufficient power|temperature above|[Ff]irmware unresponsive|ACCESS_REG\b.*failed)"
)
_AER_LINE = re.compile(
    rf"[\w.-]+ {_PCI}: (?:AER: )?PCIe Bus Error: severity=(Correct|Uncorrect)\w+"
    r"(?: \((Fatal|Non-Fatal)\))?, (.*)"
)
_KILLED = re.compile(r"(?:.*of memory: )?Killed process (\d+) \((.*)\),? (?:total-vm|UID).*")
_LOCKUP = re.compile(r".*?(?:BUG: soft lockup|hard LOCKUP)\b.*")
_HUNG = re.compile(r"INFO: task (.*:\d+ blocked for more than \d+ seconds)")


class Record(NamedTuple):
    """One record: `time_ns` is by the kernel log's clock, which runs with the monotonic one."""

    sequence: int
    time_ns: int
    facility: int
    text: bytes


class Found(NamedTuple):
    """What a line means. Those alike but for `text` are one event, told with their number."""

    entity: Entity
    event: str
    head: str  # "79: critical", "corrected" or ""
    text: str

    def detail(self, times: int) -> str:
        """Return the detail of the event that tells of so many of them."""
        many = f" x{times}" if times > 1 else ""
        return f"{self.head}{many}: {self.text}" if self.head else f"{self.text}{many}"


class Told(NamedTuple):
    """What the detail of an event says: an Xid's code or a severity, the level, how many."""

    code: str
    level: str
    times: int


def told(detail: str) -> Told | None:
    """Take a detail apart that has a head: `79: critical: ...`, `corrected x12: ...`."""
    found = _TOLD.match(detail)
    return Told(found[1], found[2] or "", int(found[3] or 1)) if found else None


def parse(line: bytes) -> Record | None:
    """Return the record of a line of /dev/kmsg, None if it is none.

    A record's further lines, which begin with a blank, are none: they name its device.
    """
    found = _RECORD.fullmatch(line)
    if found is None:
        return None
    priority, sequence, microseconds, text = found.groups()
    return Record(int(sequence), int(microseconds) * 1000, int(priority) >> 3, text)


class KernelLog:
    """Looks at one record after another; remembers only what several records tell together."""

    def __init__(self, catalogue: Mapping[int, Entry]) -> None:
        self._catalogue = catalogue
        self._named = ""  # the GPU of a message that goes on in the next record
        self._off: dict[str, tuple[int, bool]] = {}  # off the bus: since, told by an Xid

    def look(self, record: Record) -> list[Found]:
        """Return what the record means, nothing for nearly all of them."""
        raw = record.text
        if record.facility:
            return [Found(HOST, FORGED, "", "")] if _FAKES.search(raw) else []
        if not raw.startswith(_STARTS) and _AER not in raw:
            return []
        text = _ESCAPE.sub(lambda escape: bytes([int(escape[1], 16)]), raw)
        first, *more = text.decode("utf-8", "replace").split("\n")
        if first.startswith("NVRM: "):
            lines = [first, *(line for line in more if line.startswith("NVRM: "))]
            return [found for line in lines for found in self._of_driver(line, record.time_ns)]
        return list(_of_kernel(first))

    def _of_driver(self, line: str, time_ns: int) -> Iterator[Found]:
        error = xid.parse(line)
        if error is not None:
            if error.code != xid.OFF_THE_BUS or self._is_news(error.address, time_ns, by_xid=True):
                yield self._xid(error)
            recovery = xid.recovery_action(error)
            if recovery is not None:
                action, name, before = recovery
                text = f"{name}, was {before}"
                yield Found(Entity("gpu", error.address), RECOVERY, str(action), text)
            return
        whole, begins = _OFF_THE_BUS.match(line), _OFF_BEGINS.match(line)
        lost = xid.address(*whole.groups()) if whole else ""
        if begins:
            self._named = xid.address(*begins.groups())
        elif line.startswith(_OFF_ENDS):
            lost, self._named = self._named, ""
        elif not _OFF_GOES_ON.match(line):
            self._named = ""
        if lost and self._is_news(lost, time_ns, by_xid=False):
            text = line.removeprefix("NVRM: ")
            yield self._xid(Xid(xid.OFF_THE_BUS, lost, None, None, None, None, text))

    def _is_news(self, address: str, time_ns: int, *, by_xid: bool) -> bool:
        """Say whether a GPU off the bus was not told yet, in whichever words."""
        since_ns, told_by_xid = self._off.get(address, (0, True))
        recent = address in self._off and abs(time_ns - since_ns) < SAME_FAULT_NS
        news = not recent or (by_xid and told_by_xid)
        self._off[address] = (time_ns, by_xid or (recent and told_by_xid))
        return news

    def _xid(self, error: Xid) -> Found:
        return of_xid(error, self._catalogue)


def of_xid(error: Xid, catalogue: Mapping[int, Entry]) -> Found:
    """Return what an Xid means."""
    entry = catalogue.get(error.code, xid.UNKNOWN)
    part = "" if error.gpu_instance is None else f"GPU instance {error.gpu_instance}: "
    text = f"{part}{entry.meaning} ({entry.severity}). {entry.next_step}. {_cut(error.text)}"
    head = f"{error.code}: {xid.level(error, entry)}"
    return Found(Entity("gpu", error.address), XID, head, text)


def _of_kernel(line: str) -> Iterator[Found]:
    """Yield what a line of any other driver, or of the kernel itself, means."""
    if found := _SXID.match(line):
        *pci, code, severity, text = found.groups()
        level = "critical" if severity == "Fatal" else "info"
        yield Found(_device(pci), SXID, f"{code}: {level}", _cut(text))
    elif found := _RDMA_LINK.match(line):
        *pci, device, port, state = found.groups()
        event = LINK_DOWN if state == "DOWN" else LINK_UP
        yield Found(Entity("rdma_port", f"{device}/{port}"), event, "", _device(pci).id)
    elif found := _NET_LINK.match(line):
        *pci, interface, state = found.groups()
        event = LINK_DOWN if state.lower() == "down" else LINK_UP
        yield Found(Entity("interface", interface), event, "", _device(pci).id)
    elif found := _NIC_FAULT.match(line):
        yield Found(_device(found.groups()), NIC_FAULT, "", _cut(line[found.end(4) :].strip(": ")))
    elif found := _AER_LINE.match(line):
        *pci, corrected, severity, text = found.groups()
        how_bad = "corrected" if corrected == "Correct" else "nonfatal"
        how_bad = "fatal" if severity == "Fatal" else how_bad
        yield Found(_device(pci), PCIE_ERROR, how_bad, _cut(text))
    elif found := _KILLED.match(line):
        event = OWN_OOM_KILL if found[2].startswith("gpuwatch") else OOM_KILL
        yield Found(HOST, event, "", _cut(line))
    elif _LOCKUP.match(line):
        yield Found(HOST, LOCKUP, "", _cut(line))
    elif found := _HUNG.match(line):
        yield Found(HOST, HUNG_TASK, "", _cut(found[1]))


def _device(pci: list[str] | tuple[str, ...]) -> Entity:
    return Entity("pci_device", xid.address(*pci[:4]))


def _cut(text: str) -> str:
    text = text.replace("\n", " ").strip()
    return text if len(text) <= TEXT_LENGTH else f"{text[: TEXT_LENGTH - 3]}..."

"""Xid errors: the line that NVIDIA's driver logs for each, and the catalogue of what they mean.

The line's forms are those of krcReportXid in the driver's open kernel modules (kernel_rc.c), and
of older drivers, which print neither `PCI:` nor a process. What a code means is data, in
`data/xid.toml`; a code that is not there is kept by its number.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gpuwatch.errors import ConfigError

Level = Literal["critical", "warning", "info"]

CATALOGUE = Path(__file__).with_name("data") / "xid.toml"
RECOVERY_CHANGED = 154
OFF_THE_BUS = 79
# Shown as 0 for each GPU from the start: what rules judge, and what jobs do most.
MAIN_CODES = (13, 31, 43, 45, 48, 62, 63, 64, 74, 79, 94, 95, 109, 119, 120, 154)
SEVERITIES = frozenset({"application", "driver", "hardware", "reset", "reboot"})
LEVELS = frozenset({"critical", "warning", "info"})
NVLINK5 = frozenset(range(144, 151))  # these lines tell themselves how bad it is
MAX_BYTES = 1 << 20

_LINE = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.[0-7])?"
    r"(?: GPU-I:(\d{1,9}))?(?: GPU-CI:(\d{1,9}))?\): (\d{1,9}),? ?(.*)"
)
_PID = re.compile(r"pid=(\d{1,9}),")
_CAUSE = re.compile(r" caused by previous Xid (\d{1,9})$")
_RECOVERY = re.compile(r"changed from 0x([0-9a-f]{1,8}) \((.*?)\) to 0x([0-9a-f]{1,8}) \((.*?)\)")


class Entry(NamedTuple):
    """What the catalogue says of a code."""

    meaning: str
    severity: str
    alert: Level
    blame: str
    next_step: str


UNKNOWN = Entry("not in the catalogue", "driver", "info", "unknown", "Look the code up")


class Xid(NamedTuple):
    """One Xid line. `address` is the GPU's, in the kernel's spelling; None is not told.

    `text` is all that follows the code: the process's name in it may hold commas, so it is not
    taken apart. `cause` is the earlier Xid that the line names as its cause.
    """

    code: int
    address: str
    gpu_instance: int | None
    compute_instance: int | None
    pid: int | None
    cause: int | None
    text: str


def address(domain: str, bus: str, device: str, function: str = "0") -> str:
    """Return a PCI address as the kernel writes it: 0000:1b:00.0."""
    return f"{int(domain, 16):04x}:{bus.lower()}:{device.lower()}.{function}"


def parse(line: str) -> Xid | None:
    """Return the Xid of a line, None if it is not an Xid line."""
    found = _LINE.match(line)
    if found is None:
        return None
    domain, bus, device, gpu_instance, compute_instance, code, text = found.groups()
    pid, cause = _PID.match(text), _CAUSE.search(text)
    return Xid(
        code=int(code),
        address=address(domain, bus, device),
        gpu_instance=_number(gpu_instance),
        compute_instance=_number(compute_instance),
        pid=int(pid[1]) if pid else None,
        cause=int(cause[1]) if cause else None,
        text=text,
    )


def recovery_action(xid: Xid) -> tuple[int, str, str] | None:
    """Return (action, its name, the former one's name) of an Xid 154, None if it tells none.

    Actions are nvmlDeviceGpuRecoveryAction_t of nvml.h: 0 none, 1 reset, 2 reboot, 3 drain,
    4 drain and reset.
    """
    found = _RECOVERY.search(xid.text) if xid.code == RECOVERY_CHANGED else None
    return (int(found[3], 16), found[4], found[2]) if found else None


def level(xid: Xid, entry: Entry) -> Level:
    """Return how bad an Xid is; what follows from an earlier Xid is told by that one's line."""
    if xid.cause is not None:
        return "info"
    if xid.code in NVLINK5 and re.search(r"\bFatal\b", xid.text):
        return "critical"
    return entry.alert


def catalogue(overlay: str = "") -> dict[int, Entry]:
    """Return what each code means: ours, changed by what the file `overlay` says.

    Raises ConfigError if that file cannot be read or is not of this form.
    """
    known = _laid_over({}, CATALOGUE)
    return _laid_over(known, Path(overlay)) if overlay else known


def _laid_over(known: dict[int, Entry], path: Path) -> dict[int, Entry]:
    try:
        with path.open("rb") as file:
            document = tomllib.loads(file.read(MAX_BYTES).decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    tables = document.get("xid")
    if not isinstance(tables, list):
        raise ConfigError(f"{path}: no [[xid]] in it: take {CATALOGUE} for a pattern")
    entries = dict(known)
    for number, table in enumerate(tables, 1):
        fault = _fault(table)
        if fault:
            raise ConfigError(f"{path}: [[xid]] number {number}: {fault}")
        said = {key: value for key, value in table.items() if key != "codes"}
        for code in table["codes"]:
            entries[code] = entries.get(code, UNKNOWN)._replace(**said)
    return entries


def _fault(table: Any) -> str:
    """Return what is wrong with an entry of a file, "" if nothing is."""
    if not isinstance(table, dict):
        return "must be a table"
    codes = table.get("codes")
    if not isinstance(codes, list) or not all(type(code) is int for code in codes):
        return "codes must be a list of numbers"
    for key, value in table.items():
        if key == "codes":
            continue
        if key not in Entry._fields:
            return f"unknown key {key!r}: known: codes, {', '.join(Entry._fields)}"
        if not isinstance(value, str):
            return f"{key} must be a text"
        choices = {"severity": SEVERITIES, "alert": LEVELS}.get(key)
        if choices and value not in choices:
            return f"{key} must be one of {', '.join(sorted(choices))}"
    return ""


def _number(text: str | None) -> int | None:
    return int(text) if text is not None else None

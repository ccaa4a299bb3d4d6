"""The kernel log: Xid errors and whatever else it tells of GPUs, links, memory and stalls.

Every record counts once. A sampler that is started anew goes on behind the last record whose
events were handed over, which is kept in a file; a gpuwatch that is started anew reads all that
the kernel still has, and tells it with the log's own times. Source: Documentation/ABI/testing/
dev-kmsg: one record a read, EPIPE when records were overwritten before they were read.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuwatch import kernel_log, xid
from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.errors import ConfigError, SourceUnavailable
from gpuwatch.host_signals import KMSG_COLUMNS
from gpuwatch.kernel_log import COUNTED, FORGED, OVERRUN, Found, KernelLog
from gpuwatch.paths import open_regular
from gpuwatch.signals import HOST, Event
from gpuwatch.source import Context, Findings, Group, Opened

READ_BYTES = 1 << 14  # a smaller buffer than the record gives EINVAL; the longest has 8 KiB
RECORDS_A_READ = 2000  # the rest waits for the next read, so that other sources get their turn
REST_BYTES = 1 << 16

ADVICE = {
    errno.EPERM: "the kernel wants CAP_SYSLOG for it: grant that, as the systemd unit does, or set"
    " kernel.dmesg_restrict = 0, then restart gpuwatch",
    errno.EACCES: "let gpuwatch's user read it (a systemd unit needs DeviceAllow=/dev/kmsg r and"
    " ProtectKernelLogs=no), then restart gpuwatch",
    errno.ENOENT: "give the container the device or set paths.kmsg, then restart gpuwatch",
}


@dataclass(slots=True)
class Batch:
    """What was found alike in one read: told as one event."""

    found: Found
    time_ns: int
    times: int = 0


class Kmsg:
    """Follows the log at paths.kmsg: the device, or a pipe or file of the same format."""

    name = "kmsg"

    def __init__(self) -> None:
        self.findings = Findings()
        self._counts = dict.fromkeys(COUNTED, 0)
        self._rest = b""  # of a line whose end has not come yet
        self._history = True  # still reading what was there before gpuwatch was
        self._gap = False  # records may be missing before the next one
        self._sequence = self._saved = -1  # of the last record read, and in the file
        self._skip = -1  # told by an earlier sampler, and so are those before it
        self._position: Path | None = None

    def open(self, context: Context) -> Opened:
        """Open the log; raises SourceUnavailable, with the fix, if it cannot be read."""
        config = context.settings["config"]
        path = Path(config["paths"]["kmsg"])
        try:
            self._log = KernelLog(xid.catalogue(config["host"]["xid_catalogue"]))
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except ConfigError as fault:
            raise SourceUnavailable(str(fault)) from fault
        except OSError as fault:
            advice = ADVICE.get(fault.errno or 0, "no Xid is seen without it")
            raise SourceUnavailable(f"{path}: {fault.strerror}: {advice}") from fault
        self._boot_id = "unknown"
        with contextlib.suppress(OSError):
            boot_id = context.procfs / "sys/kernel/random/boot_id"
            self._boot_id = boot_id.read_text().strip()
        if "ring_directory" in context.settings:  # else the source is only being tried
            self._position = Path(config["paths"]["runtime"]) / "kmsg.position"
            self._resume(self._position)
        period_ns = int(config["host"]["period_ms"] * MILLISECOND_NS)
        return Opened((Group("kmsg", KMSG_COLUMNS, period_ns, self._read),))

    def housekeep(self, now_ns: int) -> None:
        """Nothing needs upkeep."""

    def close(self) -> None:
        """Note how far the log was told."""
        self._save()
        os.close(self._file)

    def _resume(self, position: Path) -> None:
        """Go on where an earlier sampler of this gpuwatch stopped; at the start there is none."""
        with contextlib.suppress(OSError, ValueError, ConfigError), open_regular(position) as file:
            boot_id, sequence = file.read(100).decode().split()
            if boot_id == self._boot_id:
                self._sequence = self._saved = self._skip = int(sequence)
                self._history, self._gap = False, True

    def _save(self) -> None:
        """Keep the position, once the events before it are handed over."""
        waiting = self._history or self.findings.events or self._sequence == self._saved
        if waiting or self._position is None:
            return
        temporary = self._position.with_suffix(".tmp")
        try:
            temporary.write_text(f"{self._boot_id} {self._sequence}\n")
            temporary.replace(self._position)
            self._saved = self._sequence
        except OSError:
            self.findings.errors["position_not_saved"] += 1

    def _read(self) -> Sequence[float]:
        """Read what has come; return the counts as they were before it, so first of all zeros."""
        cells = list(self._counts.values())
        self._save()
        now = monotonic_ns()
        batches: dict[tuple[object, ...], Batch] = {}
        for line in self._lines():
            record = kernel_log.parse(line)
            if record is None:
                self.findings.errors["not_a_record"] += 1
                continue
            if record.sequence <= self._skip:
                continue
            self._tell_gap(record.sequence, now)
            self._sequence = record.sequence
            # The log's clock drifts from ours: what is read as it comes is of now.
            time_ns = min(record.time_ns, now) if self._history else now
            for found in self._log.look(record):
                key = (*found[:3], time_ns // SECOND_NS)
                batch = batches.setdefault(key, Batch(found, time_ns))
                batch.times += 1
                if not self._history and found.event in self._counts:
                    self._counts[found.event] += 1
        self.findings.events += [
            Event(
                batch.time_ns,
                batch.found.entity,
                batch.found.event,
                batch.found.detail(batch.times),
            )
            for batch in batches.values()
            if batch.found.event != FORGED
        ]
        return cells

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines that begin records, until there is no more or it is enough for once."""
        taken = 0
        while taken < RECORDS_A_READ:
            try:
                chunk = os.read(self._file, READ_BYTES)
            except BrokenPipeError:
                self._gap = True
                taken += 1
                continue
            except BlockingIOError:
                chunk = b""
            except OSError as fault:
                self.findings.errors[errno.errorcode.get(fault.errno or 0, "unknown")] += 1
                return
            if not chunk:
                self._history, self._skip = False, -1
                return
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            taken += max(1, len(lines))
            for line in lines:
                # What follows a record's line, set off by a blank, names its device.
                if line and not line.startswith(b" "):
                    yield line
            if len(self._rest) > REST_BYTES:
                self.findings.errors["not_a_record"] += 1
                self._rest = b""

    def _tell_gap(self, sequence: int, now_ns: int) -> None:
        """Tell of records that were overwritten before this one could be read."""
        lost = sequence - self._sequence - 1
        if self._gap and lost > 0 and self._sequence >= 0:
            self._counts[OVERRUN] += 1
            self.findings.events.append(Event(now_ns, HOST, OVERRUN, f"{lost} records are lost"))
        self._gap = False

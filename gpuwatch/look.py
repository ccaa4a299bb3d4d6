"""Looks at GPUs while canaries run, by a child that may hang in the driver in our place."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from gpuwatch.busy import Seen
from gpuwatch.capabilities import follow
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.errors import SourceUnavailable
from gpuwatch.gpu_signals import REASONS
from gpuwatch.process import cause, started

PERIOD_SECONDS = 0.02
OPEN_SECONDS = 60.0  # the first time after boot a driver without persistence takes long
LATE_SECONDS = 2.0  # a look that takes longer hangs
CLOSE_SECONDS = 0.5
BLOCK_BYTES = 64 * 1024
MEANS = ("clock_hertz", "power_watts", "temperature_celsius")
APPLICATIONS = sum(1 << bit for bit, name in REASONS if name == "applications_clocks")
UNLOCKED = 0.97  # of a GPU's highest clock: no setting holds it down
STEP_HERTZ = 50e6  # of a locked clock that is seen: coarse, so that it is the same in each run


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that was looked at: what it is, and what a canary's speed depends on.

    `clock_limit_hertz` is its highest SM clock, None if it does not tell. `fault` is why it does
    not answer, "" if it does; then the rest is known but for its number.
    """

    number: int
    bus_id: str
    uuid: str = ""
    name: str = ""
    numa: str = ""
    environment: Mapping[str, str]
    clock_limit_hertz: float | None = None
    fault: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Gpu":
        """Rebuild what the child told."""
        known = ("driver", "vbios", "power_limit_watts", "ecc", "locked_clocks")
        return cls(
            number=int(data["gpu"]),
            bus_id=str(data["pci_bus_id"]),
            uuid=str(data.get("uuid", "")),
            name=str(data.get("name", "")),
            numa=str(data.get("numa", "")),
            environment={name: str(data[name]) for name in known if name in data},
            clock_limit_hertz=data.get("clock_limit_hertz"),
            fault=str(data.get("fault", "")),
        )


class Looks:
    """What is seen of some GPUs, up to fifty times a second; `gpus` are those, by number.

    `wanted` are the numbers of those to look at, none for all; `numbers` are the numbers that are
    known, by PCI address: others follow in the order of the bus. Raises SourceUnavailable if there
    is no driver, no such GPU or no answer, OSError if the child cannot be started.
    """

    def __init__(
        self,
        sysfs: Path,
        numbers: Mapping[str, int],
        wanted: Sequence[int],
        open_seconds: float = OPEN_SECONDS,
    ) -> None:
        settings = {
            "sysfs": str(sysfs),
            "numbers": dict(numbers),
            "gpus": list(wanted),
            "period_seconds": PERIOD_SECONDS,
        }
        self._popen = started(
            [sys.executable, "-P", "-m", "gpuwatch.look_child"],
            settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=follow(signal.SIGTERM),
        )
        assert self._popen.stdout is not None
        self._output = self._popen.stdout
        os.set_blocking(self._output.fileno(), False)
        self._buffer = b""
        self._opening: int | None = None
        self._seen: dict[int, list[tuple[int, Seen]]] = {}
        self.gpus: dict[int, Gpu] = {}
        self.here: list[int] | None = None  # None while it is not told
        self.fault = ""
        self._heard_ns = monotonic_ns()
        try:
            self._open(wanted, open_seconds)
        except SourceUnavailable:
            self.close()
            raise

    def _open(self, wanted: Sequence[int], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.fault and not all(self._seen.get(one) for one in self._answering()):
            left = end - time.monotonic()
            if left <= 0:
                which = "" if self._opening is None else f"GPU {self._opening}: "
                raise SourceUnavailable(
                    f"{which}the driver does not answer within {seconds:g} s: look at the kernel"
                    " log, reset the GPU or reboot"
                )
            select.select([self._output], [], [], left)
            self.poll()
        if self.fault:
            raise SourceUnavailable(self.fault)
        if not self.here:
            raise SourceUnavailable("nvml: no NVIDIA GPU on this host: nothing to run on")
        for number in wanted:
            if number not in self.gpus:
                known = ", ".join(map(str, self.here))
                raise SourceUnavailable(f"--gpu {number}: no such GPU: here are {known}")

    def _answering(self) -> list[int]:
        """Return the GPUs of which looks should come; [-1] while it is not known which are here."""
        if self.here is None:
            return [-1]
        return [one.number for one in self.gpus.values() if not one.fault]

    def poll(self) -> None:
        """Take in the looks that have come; `fault` says why none will come any more."""
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self._output.fileno(), BLOCK_BYTES):
                *lines, self._buffer = (self._buffer + block).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
                self._heard_ns = monotonic_ns()
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._popen.wait(CLOSE_SECONDS)
                self.fault = self.fault or (
                    f"the look at the GPUs ended by {cause(status)}: look at the kernel log"
                )
        late = monotonic_ns() - self._heard_ns > LATE_SECONDS * SECOND_NS
        if self._seen and late and not self.fault:
            self.fault = (
                f"the driver has not answered for {LATE_SECONDS:g} s: look at the kernel log"
            )

    def _take(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"seen": seen, "time_ns": time_ns}:
                self._opening = None
                for number, told in seen.items():
                    looks = self._seen.setdefault(int(number), [])
                    looks.append((time_ns, Seen.from_json(told)))
            case {"opening": number}:
                self._opening = number
            case {"gpus": gpus, "here": here}:
                self.gpus = {told["gpu"]: Gpu.from_json(told) for told in gpus}
                self.here = here
            case {"fault": fault}:
                self.fault = fault

    def forget(self) -> None:
        """Keep of each GPU the newest look alone."""
        for looks in self._seen.values():
            del looks[:-1]

    def newest(self, number: int) -> Seen:
        """Return the newest look at a GPU."""
        return self._seen[number][-1][1]

    def between(self, number: int, start_ns: int, end_ns: int) -> dict[str, Any]:
        """Return what a reading says of clock, power, heat and throttling of that time.

        Beyond that, of which share of it each reason slowed the clocks, by name; and the highest
        temperature. What is looked at more rarely is told of all looks since the last `forget`:
        the least margin to slowing down, and the best of the PCIe link, which is less when idle.
        """
        seen = self._seen_between(number, start_ns, end_ns)
        so_far = self._seen_between(number, 0, end_ns)
        held = [one.throttled for one in seen if one.throttled is not None]
        reasons = [one.reasons for one in seen if one.reasons is not None]
        return {
            "reasons": {
                name: fmean(bool(bits >> bit & 1) for bits in reasons)
                for bit, name in REASONS
                if any(bits >> bit & 1 for bits in reasons)
            },
            "hottest_celsius": max(_known(seen, "temperature_celsius"), default=None),
            "margin_celsius": min(_known(so_far, "margin_celsius"), default=None),
            "pcie_generation": max(_known(so_far, "pcie_generation"), default=None),
            "pcie_lanes": max(_known(so_far, "pcie_lanes"), default=None),
            **{name: _mean(_known(seen, name)) for name in MEANS},
            "throttle_seconds": ((end_ns - start_ns) / SECOND_NS * fmean(held) if held else None),
        }

    def locked_clock(self, number: int, start_ns: int, end_ns: int) -> str:
        """Return the SM clock in MHz at which somebody's setting held a GPU in that time.

        "" if none did, or the driver does not tell: it names the reason, not the setting.
        """
        seen = self._seen_between(number, start_ns, end_ns)
        limited = [one for one in seen if one.reasons and one.reasons & APPLICATIONS]
        clocks, highest = _known(limited, "clock_hertz"), self.gpus[number].clock_limit_hertz
        if highest is None or not clocks or 2 * len(clocks) < len(seen):
            return ""
        if (clock := max(clocks)) > UNLOCKED * highest:
            return ""
        return f"{round(clock / STEP_HERTZ) * STEP_HERTZ / 1e6:g}"

    def _seen_between(self, number: int, start_ns: int, end_ns: int) -> list[Seen]:
        looks = self._seen[number]
        first = bisect_left(looks, start_ns, key=itemgetter(0))
        last = bisect_right(looks, end_ns, key=itemgetter(0))
        return [one for _, one in looks[first:last]]

    def close(self) -> None:
        """Let the child end by itself, or tell it to; one whose call never returns is left."""
        self._output.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(CLOSE_SECONDS)
            return
        self._popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(CLOSE_SECONDS)


def _known(seen: Sequence[Seen], name: str) -> list[float]:
    values = (getattr(one, name) for one in seen)
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None

"""One RDMA port being read, and what is done when it goes wrong.

Errors come over netlink where the kernel has it, else from held files; bytes always from held
files. A counter that fails is unknown and the others go on. A port that fails as a whole is left
alone and opened again later, each time after twice as long: some devices write a line to the
kernel's log for every failed read.
"""

import errno
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuwatch import attribute
from gpuwatch.burst import Burst
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.count import Count
from gpuwatch.network_signals import (
    BURST,
    DIRECTIONS,
    EXPECTED_RATE,
    PORT_DOWNS,
    PORT_GAUGES,
    QUEUE_PAIRS,
    READABLE,
)
from gpuwatch.nldev import Link, Table
from gpuwatch.rdma_counters import Cell, cells, name_of
from gpuwatch.rdma_ports import RdmaPort
from gpuwatch.rdma_state import UP, PortState
from gpuwatch.signals import UNKNOWN_GAUGE, UNKNOWN_INTEGER, Column

FAILING = 3  # counters that failed since the port was opened: it is the port
WAIT_SECONDS = (10, 600)  # first and longest time that a failing port is left alone
GONE_SECONDS = 1  # by then it is known whether the device has gone
UNIT_SLACK = 1.05  # no link is faster than its rate by more than this
GONE = frozenset({errno.ENODEV, errno.ENOENT, errno.ENXIO, errno.ESTALE})
READ, PAIRS, EXPECTED = (PORT_GAUGES.index(one) for one in (READABLE, QUEUE_PAIRS, EXPECTED_RATE))


class RdmaReader:
    """Reads one port into two rows: `read` its errors and state, `read_bytes` its bytes.

    What `columns` and `bytes_columns` say changes only when the port is opened. `tell` is given
    the name and detail of an event of this port.
    """

    def __init__(
        self,
        port: RdmaPort,
        netlink: Link | None,
        tell: Callable[[str, str], None],
        errors: Counter[str],
    ) -> None:
        self.port = port
        self.state = PortState(port)
        self.alive = False
        self.retry_ns = 0  # when to open it again, 0 for not at all
        self.limit = math.inf  # bytes per second
        self.bytes_cells: list[Cell] = []
        self.newest: tuple[int, Sequence[float]] = (0, ())  # bytes, and when all were read
        self._netlink = netlink
        self._tell = tell
        self._errors = errors
        self._wait = WAIT_SECONDS[0]
        self._counts: dict[str, Count] = {}
        self._cells: list[Cell] = []
        self._bursts: list[Burst] = []
        self._tables: tuple[Table, ...] = ()  # counters and resources, if netlink has them
        self._asked: tuple[str, ...] = ()
        self._failed = 0
        self._gone = False
        self._told: set[str] = set()
        self._gauges: list[float] = []
        self._forget()

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of `read`."""
        entity = self.port.entity
        counters = [cell.counter.signal for cell in self._cells]
        return tuple(Column(entity, one) for one in (*counters, PORT_DOWNS, *PORT_GAUGES))

    @property
    def bytes_columns(self) -> tuple[tuple[Column, ...], tuple[Column, ...]]:
        """The columns of `read_bytes`: counters, and a burst for each."""
        entity = self.port.entity
        signals = [cell.counter.signal for cell in self.bytes_cells]
        bursts = [
            Column(entity, BURST, next(one for one in DIRECTIONS if one in signal.name))
            for signal in signals
        ]
        return tuple(Column(entity, one) for one in signals), tuple(bursts)

    def open(self, sysfs: Path, index: int | None) -> None:
        """Open what the port has; `index` is its device's on netlink, None if that has none."""
        self.close()
        self._asked = self._ask(index)
        errors: Counter[str] = Counter()
        found = cells(self.port, self._asked, self._counts, errors)
        self.bytes_cells = [cell for cell in found if cell.counter.tells == "bytes"]
        self._cells = [cell for cell in found if cell.counter.tells != "bytes"]
        self._bursts = [Burst() for _ in self.bytes_cells]
        self.state.open(sysfs)
        self.port.labels["rate"] = attribute.read(self.port.path / "rate")
        self.alive = True
        self.retry_ns = 0
        self._errors.update(errors)
        self._failed = 0
        self._fail(errors.total(), OSError(errno.EIO, "some counters cannot be read"))

    def close(self) -> None:
        """Let go of everything; nothing is known of the port from now on."""
        for cell in self._cells + self.bytes_cells:
            cell.close()
        self.state.close()
        self._tables = ()
        self.alive = False
        self._forget()

    def lose(self) -> None:
        """Take the device for gone: it is down, and what comes back under its name counts anew."""
        self.close()
        self.retry_ns = 0
        for count in self._counts.values():
            count.renew()
        self._told.clear()
        self.state.seen(False)
        self._gauges[UP] = 0.0

    def expect(self, rate: float) -> None:
        """Take the rate that the link should have, NaN if nobody knows."""
        self._gauges[EXPECTED] = rate

    def read(self) -> list[float]:
        """Return the row of errors and state; unknown where nothing could be read."""
        counts: list[float] = [UNKNOWN_INTEGER] * len(self._cells)
        if self.alive:
            try:
                self._read(counts)
            except OSError as fault:
                self._quarantine(fault)
        if not self.alive:
            return [*[UNKNOWN_INTEGER] * len(counts), self.state.downs, *self._gauges]
        self._wait, self._gone = WAIT_SECONDS[0], False
        return [*counts, self.state.downs, *self._gauges]

    def _read(self, counts: list[float]) -> None:
        answers = [table.read() for table in self._tables]
        if answers and self._tables[0].names != self._asked:
            raise OSError(errno.ESTALE, "the driver's counters changed")
        for place, cell in enumerate(self._cells):
            try:
                if cell.files or cell.places:
                    counts[place] = cell.take(answers[0] if answers else ())
            except ValueError:
                self._errors["no number"] += 1
            except OSError as fault:
                if fault.errno in GONE:
                    raise
                cell.close()
                self._errors[name_of(fault)] += 1
                self._fail(1, fault)
                if not self.alive:
                    return
        if len(answers) > 1:
            pairs = dict(zip(self._tables[1].names, answers[1], strict=True))
            self._gauges[PAIRS] = pairs.get("qp", UNKNOWN_GAUGE)
        self.state.read(self._gauges)
        self.limit = self._rate_limit()
        known = sum(value != UNKNOWN_INTEGER for value in counts)
        self._gauges[READ] = known + sum(bool(cell.files) for cell in self.bytes_cells)
        self._tell_odd()

    def read_bytes(self) -> tuple[list[float], list[float]]:
        """Return the counts of bytes, and the bursts."""
        counts: list[float] = [UNKNOWN_INTEGER] * len(self.bytes_cells)
        bursts = [UNKNOWN_GAUGE] * len(counts)
        for place, cell in enumerate(self.bytes_cells):
            if not cell.files:
                continue
            start = monotonic_ns()
            try:
                counts[place] = count = cell.take(())
            except ValueError:
                self._errors["no number"] += 1
                continue
            except OSError as fault:
                self._quarantine(fault)
                break
            burst = self._bursts[place]
            burst.add(start, monotonic_ns(), count, self.limit)
            bursts[place] = burst.peak
        self.newest = (monotonic_ns(), counts)
        return counts, bursts

    def _rate_limit(self) -> float:
        """Return what no direction can pass; of a bond, all its links together.

        Counters that are in bytes by themselves leave no doubt about their unit.
        """
        doubtful = any(cell.pma for cell in self.bytes_cells)
        links = max(1, len(self.port.interfaces))
        return self.state.rate * links * UNIT_SLACK if doubtful else math.inf

    def _ask(self, index: int | None) -> tuple[str, ...]:
        """Ask netlink for the port's counters; return their names, none if it does not answer."""
        if self._netlink is None or index is None:
            return ()
        try:
            counters = self._netlink.counters(index, self.port.number)
            self._tables = (counters,)
            self._tables = (counters, self._netlink.resources(index))
        except OSError as fault:
            self._errors[f"netlink {name_of(fault)}"] += 1
        return self._tables[0].names if self._tables else ()

    def _fail(self, counters: int, fault: OSError) -> None:
        """Note counters that failed; leave the port alone if they are too many."""
        self._failed += counters
        if self._failed >= FAILING:
            self._quarantine(fault)
        elif self._failed:
            self.retry_ns = monotonic_ns() + WAIT_SECONDS[1] * SECOND_NS

    def _quarantine(self, fault: OSError) -> None:
        """Leave the port alone for a while."""
        self.close()
        if fault.errno in GONE and not self._gone:  # the source is the one to see that
            self._gone = True
            self.retry_ns = monotonic_ns() + GONE_SECONDS * SECOND_NS
            return
        self.retry_ns = monotonic_ns() + self._wait * SECOND_NS
        self._tell("rdma_quarantined", f"{fault.strerror}: left alone for {self._wait} s")
        self._wait = min(2 * self._wait, WAIT_SECONDS[1])

    def _tell_odd(self) -> None:
        """Tell once of counters that cannot count any more, and each time some were reset."""
        reset = []
        for name, count in self._counts.items():
            if count.resets:
                count.resets = 0
                reset.append(name)
            if count.saturated and name not in self._told:
                self._tell("rdma_counter_saturated", f"{name} stands still until it is reset")
                self._told.add(name)
            elif not count.saturated:
                self._told.discard(name)
        if reset:
            self._tell("rdma_counters_reset", ", ".join(reset))

    def _forget(self) -> None:
        self._gauges = [UNKNOWN_GAUGE] * len(PORT_GAUGES)

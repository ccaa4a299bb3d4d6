"""Stand in for `host` and `kmsg`: a quiet host, but for what the scenario does to it."""

from collections.abc import Sequence

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.host_signals import BLOCKED, IO_COLUMNS, KMSG_COLUMNS, PRESSURE_COLUMNS
from gpuwatch.kernel_log import KernelLog, Record
from gpuwatch.scenario import Scenario
from gpuwatch.signals import HOST, Column, Event
from gpuwatch.source import Context, Findings, Group, Opened
from gpuwatch.xid import catalogue

QUIET = {"io": 0.02, "cpu": 0.01}  # share of time that some work waits, on a quiet host
STARVED = {"io": 0.9, "cpu": 0.05}  # and while all GPUs wait for their input
TOLD_AFTER_NS = 2 * SECOND_NS
RATES = {  # per second; a node without network file systems serves 0 of them
    'host_io_read_bytes_total{storage="disk"}': 2_400_000_000,
    'host_io_written_bytes_total{storage="disk"}': 300_000_000,
}


class SimulatedHost:
    """A host whose job reads its input from disk; in `starved` it reads too slowly."""

    name = "host"

    def __init__(self) -> None:
        self.findings = Findings()

    def open(self, context: Context) -> Opened:
        """Make up the counters."""
        self._scenario = Scenario(context)
        period_ns = int(context.settings["config"]["host"]["period_ms"] * MILLISECOND_NS)
        return Opened(
            (
                Group("pressure", PRESSURE_COLUMNS, period_ns, self._pressure),
                Group("io", IO_COLUMNS, SECOND_NS, self._io),
                Group("blocked", (Column(HOST, BLOCKED),), 10 * SECOND_NS, lambda: (0.0,)),
            )
        )

    def housekeep(self, now_ns: int) -> None:
        """Nothing needs upkeep."""

    def close(self) -> None:
        """Nothing is held."""

    def _pressure(self) -> Sequence[float]:
        now = monotonic_ns()
        waited = self._scenario.waited_ns(now)
        return [
            int((now - waited) * QUIET.get(column.entity.id, 0.0)) // 1000
            + int(waited * STARVED.get(column.entity.id, 0.0)) // 1000
            for column in PRESSURE_COLUMNS
        ]

    def _io(self) -> Sequence[float]:
        now = monotonic_ns()
        return [now * RATES.get(column.name, 0) // SECOND_NS for column in IO_COLUMNS]


class SimulatedKmsg:
    """A kernel log in which nothing happens but what the scenario's fault writes."""

    name = "kmsg"

    def __init__(self) -> None:
        self.findings = Findings()
        self._told = False

    def open(self, context: Context) -> Opened:
        """Begin an empty log."""
        self._scenario = Scenario(context)
        config = context.settings["config"]["host"]
        self._log = KernelLog(catalogue(config["xid_catalogue"]))
        # An earlier child has told of a fault that began long before this one.
        self._told = monotonic_ns() - self._scenario.start_ns > TOLD_AFTER_NS
        zeros = [0] * len(KMSG_COLUMNS)
        period_ns = int(config["period_ms"] * MILLISECOND_NS)
        return Opened((Group("kmsg", KMSG_COLUMNS, period_ns, lambda: zeros),))

    def housekeep(self, now_ns: int) -> None:
        """Tell of the Xid when its time has come."""
        scenario = self._scenario
        if self._told or now_ns < scenario.start_ns or scenario.name != "xid-79":
            return
        self._told = True
        address = scenario.sick.id.removesuffix(".0")
        line = f"NVRM: Xid (PCI:{address}): 79, GPU has fallen off the bus."
        for found in self._log.look(Record(0, scenario.start_ns, 0, line.encode())):
            detail = found.detail(1)
            self.findings.events.append(Event(scenario.start_ns, found.entity, found.event, detail))

    def close(self) -> None:
        """Nothing is held."""

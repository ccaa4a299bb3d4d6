"""What a tick costs the daemon, part by part, on a simulated node with so many GPUs and ports.

    python benchmarks/daemon_tick.py 8

plays the simulated samplers into real rings, in time of its own, has a real daemon close ticks of
them, and prints the CPU time of each part: the median of several rounds, and the share of one core
at four ticks a second. `page` is the metrics page, made once for each 15 s of data as for a usual
scraper; its time is spread over all ticks.
"""

import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from gpuwatch import child, scenario
from gpuwatch.clock import SECOND_NS
from gpuwatch.config import load
from gpuwatch.daemon import Daemon
from gpuwatch.pulse import Pulse
from gpuwatch.sampler import Sampler
from gpuwatch.sources import sources_of
from gpuwatch.window import TICK_NS

ROUNDS, ROUND_TICKS = 7, 2 * 60
WARM_TICKS = 80  # imports, first calibration, statistics that fill up
LATE_NS = 60_000
SCRAPE_TICKS = 60
PARTS = ("feed", "totals", "history", "rules", "causes", "snapshot", "page", "other", "all")


class Clock:
    """The time of the simulated node."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


class Child(child.Child):
    """A child that nobody supervises."""

    def __init__(self, settings: dict) -> None:
        self.settings, self.config, self.generation = settings, settings["config"], 1
        self.pulse, self.stopping = Pulse.create(1), False


class Node:
    """A daemon and what feeds it."""

    def __init__(self, directory: Path, gpus: int) -> None:
        paths = {name: str(directory / name) for name in ("runtime", "state")}
        for path in paths.values():
            Path(path).mkdir()
        overrides = {"paths": paths, "simulated": {"gpus": gpus}}
        self.config = load(None, overrides, "simulated")
        self._ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.daemon = Daemon(
            Child({"config": self.config, "channel": self._ends[0].detach(), "sockets": []})
        )
        self.clock = Clock((self.daemon.started_ns // TICK_NS + 1) * TICK_NS)
        for name, module in list(sys.modules.items()):
            if module is scenario or name.startswith("gpuwatch.sources.simulated"):
                module.monotonic_ns = self.clock
        self.samplers = [self._sampler(duty, directory) for duty in self.config["duties"]]
        self._random = random.Random(1)
        tasks = (task for sampler in self.samplers for task in sampler.tasks)
        self._due = {id(task): (self.clock.now_ns + task.group.phase_ns, task) for task in tasks}

    def _sampler(self, duty: str, directory: Path) -> Sampler:
        settings = {
            "config": self.config,
            "ring_directory": str(directory),
            "ready_ns": self.clock.now_ns,
        }
        sampler = Sampler(Child(settings), duty, sources_of(duty, settings))
        sampler.open()
        sampler.make_rings()
        return sampler

    def sample(self) -> None:
        """Write the rows of the next tick."""
        end_ns = self.clock.now_ns + TICK_NS
        rows = []
        for key, (due, task) in self._due.items():
            rows += [(time_ns, task) for time_ns in range(due, end_ns, task.period_ns)]
            self._due[key] = (
                due + (len(range(due, end_ns, task.period_ns))) * task.period_ns,
                task,
            )
        for due, task in sorted(rows, key=lambda row: row[0]):
            late = self._random.randrange(LATE_NS)
            self.clock.now_ns = due + late
            if task.group.drain is not None:
                task.drain(due)
            else:
                task.writer.append(due + late, late * 1e-9, 2e-5, task.group.read())
        self.clock.now_ns = end_ns
        for _, task in self._due.values():
            task.writer.advance(end_ns)


class Costs:
    """CPU seconds of chosen calls of one thread, by part; a part within another is its own."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = 0.0

    def watch(self, owner: object, method: str, part: str) -> None:
        """Count the time of a method for a part."""
        call = getattr(owner, method)

        def timed(*arguments, **options):
            outer, self._inner = self._inner, 0.0
            begin = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                spent = time.thread_time() - begin
                self.seconds[part] += spent - self._inner
                self._inner = outer + spent

        setattr(owner, method, timed)


def main() -> None:
    """Measure and print."""
    gpus = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        node = Node(Path(directory), gpus)
        daemon, costs = node.daemon, Costs()
        costs.watch(daemon.feed, "poll", "feed")
        costs.watch(daemon.totals, "add", "totals")
        costs.watch(daemon.archive, "add", "history")
        costs.watch(daemon.engine, "judge", "rules")
        costs.watch(daemon.lost_time, "add", "causes")
        costs.watch(daemon, "_publish", "snapshot")
        costs.watch(daemon, "metrics", "page")
        costs.watch(daemon, "on_tick", "other")
        rounds = [play(node, costs, WARM_TICKS)]
        rounds = [play(node, costs, ROUND_TICKS) for _ in range(ROUNDS)]
        series = sum(not line.startswith(b"#") for line in daemon.metrics().splitlines())
        print(f"{gpus} GPUs and ports, {len(daemon.feed.rings)} rings, {series} series")
        for part in PARTS:
            spent = statistics.median(one[part] for one in rounds)
            print(f"{part:8} {spent * 1e3:7.2f} ms a tick {spent * SECOND_NS / TICK_NS:7.2%}")
    os._exit(0)


def play(node: Node, costs: Costs, ticks: int) -> Counter[str]:
    """Return the CPU seconds a tick by part."""
    costs.seconds.clear()
    for tick in range(ticks):
        node.sample()
        for _ in range(2):  # the daemon looks twice as often as ticks close
            node.daemon.on_tick(node.clock.now_ns)
        if tick % SCRAPE_TICKS == 0:
            node.daemon.metrics()
    found = Counter({part: spent / ticks for part, spent in costs.seconds.items()})
    found["all"] = found.total()
    return found


if __name__ == "__main__":
    main()

"""What an open page costs, and what a look far back takes.

    python benchmarks/page_cost.py [--rounds 4] [--seconds 15] [--gigabytes 1]

Runs a simulated node of eight GPUs and eight RDMA ports, and looks at the CPU time of the daemon
and its reader in turn without a page and with one: the stream of statuses, and once a second the
series of what the page draws. Then writes history of a gigabyte (an hour of made-up values of the
node's columns, each hour the same), and asks a reader for all of it. The budget is printed with
what was found.
"""

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpuwatch.clock import SECOND_NS, ClockTriple
from gpuwatch.codec import Head
from gpuwatch.history import FILE_NS
from gpuwatch.history_writer import Batch, HistoryWriter, columns_of
from gpuwatch.place import Place
from gpuwatch.quota import stamp
from gpuwatch.ring import RingReader, RingSchema
from gpuwatch.signals import Kind
from gpuwatch.tmpfs import ring_directory
from gpuwatch.window import TICK_NS

BUDGET = 0.03  # of a core, for a page that is open
SIGNALS = [
    'gpu_clock_hertz{clock="sm"}',
    "gpu_throttle_active",
    "gpu_power_watts",
    "gpu_temperature_celsius",
    "gpu_utilization_ratio",
    "gpu_dram_active_ratio",
    "gpu_sm_active_ratio",
    "gpu_tensor_active_ratio",
    "gpu_nvlink_received_bytes_total",
    "gpu_nvlink_transmitted_bytes_total",
    "gpu_pcie_received_bytes_total",
    "gpu_pcie_transmitted_bytes_total",
    "rdma_port_data_received_bytes_total",
    "rdma_port_data_transmitted_bytes_total",
    "host_pressure_seconds_total",
]
STEP = 0.25
OVERLAP = 4  # steps asked for again: what was not yet complete
TICKS = os.sysconf("SC_CLK_TCK")
BATCH = 120


class Node:
    """A running gpuwatch."""

    def __init__(self, directory):
        self.runtime = directory / "runtime"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        paths = ["--path.runtime", str(self.runtime), "--path.state", str(directory / "state")]
        address = ["--web.listen-address", f"127.0.0.1:{self.port}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpuwatch", "run", "--source", "simulated", *paths, *address],
            stderr=subprocess.DEVNULL,
        )
        while not self.ready():
            time.sleep(0.1)

    def ready(self):
        with contextlib.suppress(OSError):
            return self.get("/-/ready")[0] == 200
        return False

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    def processes(self, module):
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                if module.encode() in words and self.owns(int(path.name)):
                    found.append(int(path.name))
        return found

    def owns(self, pid):
        while pid > 1:
            if pid == self.process.pid:
                return True
            pid = int(stat_of(pid)[1])
        return False

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


class Page:
    """An open page; counts the bytes it gets."""

    def __init__(self, node):
        self.node = node
        self.bytes = {"stream": 0, "series": 0}
        self.answers = []
        self.closed = threading.Event()
        self.threads = [threading.Thread(target=work) for work in (self.stream, self.series)]
        for thread in self.threads:
            thread.start()

    def stream(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.node.port, timeout=30)
        connection.request("GET", "/api/v1/stream")
        answer = connection.getresponse()
        while not self.closed.is_set():
            self.bytes["stream"] += len(answer.readline())
        connection.close()

    def series(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.node.port, timeout=30)
        signals = [("signal", name) for name in SIGNALS]
        since = time.time() // STEP * STEP - 60
        while not self.closed.wait(1.0):
            until = time.time() // STEP * STEP
            grid = {"start": since, "end": until, "points": round((until - since) / STEP)}
            query = urllib.parse.urlencode([*signals, *grid.items()])
            begin = time.monotonic()
            connection.request("GET", f"/api/v1/series?{query}")
            body = connection.getresponse().read()
            self.answers.append(time.monotonic() - begin)
            self.bytes["series"] += len(body)
            since = until - OVERLAP * STEP
        connection.close()

    def close(self):
        self.closed.set()
        for thread in self.threads:
            thread.join()


def stat_of(pid):
    """Return the fields of a process's stat from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_of(pids):
    """Return the CPU seconds that processes have used."""
    fields = [stat_of(pid) for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / TICKS


def live(rounds, seconds):
    """Measure a page that is open, in turn with none."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        node = Node(Path(directory))
        (daemon,) = node.processes("gpuwatch.daemon")
        time.sleep(5)
        shares = {"without": [], "with, daemon": [], "with, reader": []}
        for _ in range(rounds):
            before = cpu_of([daemon])
            time.sleep(seconds)
            shares["without"].append((cpu_of([daemon]) - before) / seconds)
            page = Page(node)
            time.sleep(3)  # its first look back, and the start of its reader
            readers = node.processes("gpuwatch.reader")
            page.bytes, page.answers = dict.fromkeys(page.bytes, 0), []
            before, read_before = cpu_of([daemon]), cpu_of(readers)
            time.sleep(seconds)
            shares["with, daemon"].append((cpu_of([daemon]) - before) / seconds)
            shares["with, reader"].append((cpu_of(readers) - read_before) / seconds)
            sent, answers = page.bytes, page.answers
            page.close()
        memory = max(map(resident, node.processes("gpuwatch.reader")))
        columns = columns_there(node)
        node.close()
    middle = {name: statistics.median(found) for name, found in shares.items()}
    more = middle["with, daemon"] + middle["with, reader"] - middle["without"]
    for name, found in shares.items():
        print(f"{name:14} {middle[name]:6.2%} of a core ({min(found):.2%} to {max(found):.2%})")
    verdict = "within" if more < BUDGET else "ABOVE"
    print(f"an open page   {more:6.2%} of a core, {verdict} its budget of {BUDGET:.0%}")
    sizes = ", ".join(f"{name} {size / seconds / 1000:.1f} kB/s" for name, size in sent.items())
    times = f"p50 {statistics.median(answers) * 1e3:.0f} ms, most {max(answers) * 1e3:.0f} ms"
    print(f"sent: {sizes}; series answered in {times}; reader {memory} MB resident at most")
    return columns


def columns_there(node):
    """Return the columns that history keeps of the node."""
    found = []
    for path in sorted(ring_directory(node.runtime).glob("*.ring")):
        ring = RingReader(path)
        found += [part for column in ring.schema.columns for part in columns_of(column)]
        ring.close()
    return sorted(dict.fromkeys(found), key=lambda column: column.signal.kind is Kind.GAUGE)


def resident(pid):
    """Return the most memory that a process ever had, in megabytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024


def write_history(directory, columns, size):
    """Write hours of history until it has that many bytes; return its first and last time."""
    random = np.random.default_rng(1)
    gauges = [column for column in columns if column.signal.kind is Kind.GAUGE]
    rows = FILE_NS // TICK_NS
    schema = RingSchema("history", "history", "history", tuple(columns), TICK_NS)
    first_ns = (time.time_ns() // FILE_NS - 1) * FILE_NS
    head = Head(TICK_NS, TICK_NS, (schema,), clocks=(ClockTriple(0, first_ns, 0),))
    writer = HistoryWriter(directory, "boot")
    counts = np.zeros(len(columns) - len(gauges))
    levels = np.float32(random.integers(100, 1000, len(gauges)))
    for first in range(0, rows, BATCH):
        counters, means = [], []
        for _ in range(BATCH):
            # About as many bytes a row as a real node has: docs/recordings.md.
            busy = random.random(len(counts)) < 0.1
            counts = counts + np.where(busy, random.integers(0, 1 << 20, len(counts)), 0)
            moved = random.random(len(gauges)) < 0.2
            levels = np.where(moved, levels + random.integers(-3, 4, len(gauges)), levels)
            counters.append(counts)
            means.append(levels)
        times = [(first + row + 1) * TICK_NS for row in range(BATCH)]
        writer.write(Batch(head, times, counters, means, []))
    writer.close()
    (newest,) = directory.iterdir()
    whole = newest.read_bytes()
    end_ns = first_ns + FILE_NS
    plain = HistoryWriter(directory / "head", "boot")
    while sum(path.stat().st_size for path in directory.glob("*.gwh")) < size:
        first_ns -= FILE_NS
        moved_head = replace(head, clocks=(ClockTriple(0, first_ns, 0),))
        put_hour(plain, moved_head, whole, directory / f"{stamp(first_ns)}.gwh")
    return first_ns, end_ns


def put_hour(writer, head, whole, path):
    """Write the same rows as of another hour: only the head differs."""
    writer.directory.mkdir(exist_ok=True)
    none = [np.zeros(0)]
    writer.write(Batch(head, [writer_times(writer)], none, none, []))
    writer.close()
    (made,) = writer.directory.iterdir()
    begin = made.read_bytes()
    made.unlink()
    path.write_bytes(begin[: second_block(begin)] + whole[second_block(whole) :])


def writer_times(writer):
    """Return a time that is new to the writer."""
    writer.number = getattr(writer, "number", 0) + 1
    return writer.number * TICK_NS


def second_block(data):
    """Return where the block after the head begins."""
    start = data.index(b"\n") + 1
    return start + 16 + int.from_bytes(data[start + 4 : start + 8], "little")


def look_back(columns, size):
    """Measure how long a reader takes for all of a large history."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as text:
        directory = Path(text)
        start_ns, end_ns = write_history(directory, columns, size)
        used = sum(path.stat().st_size for path in directory.glob("*.gwh"))
        days = (end_ns - start_ns) / SECOND_NS / 86400
        print(f"history of {used / 1e9:.2f} GB: {len(columns)} columns, {days:.1f} days")
        entity = next(column.entity for column in columns if column.entity.kind == "gpu")
        reader = subprocess.Popen(
            [sys.executable, "-m", "gpuwatch.reader"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        asked = {
            "all of it, one GPU, 3 signals": (start_ns, end_ns, SIGNALS[:3], [entity]),
            "all of it, all signals": (start_ns, end_ns, SIGNALS, None),
            "a day, all signals": (end_ns - 86400 * SECOND_NS, end_ns, SIGNALS, None),
            "an hour, all signals": (end_ns - FILE_NS, end_ns, SIGNALS, None),
            "a minute, all signals": (
                end_ns - 1800 * SECOND_NS,
                end_ns - 1740 * SECOND_NS,
                SIGNALS,
                None,
            ),
        }
        for name, (since, until, signals, entities) in asked.items():
            request = {
                "what": "series",
                "signals": signals,
                "entities": entities,
                "start": since / SECOND_NS,
                "end": until / SECOND_NS,
                "points": 1000,
                "place": Place(history=str(directory)).to_json(),
            }
            before, begin = cpu_of([reader.pid]), time.monotonic()
            reader.stdin.write(json.dumps(request).encode() + b"\n")
            reader.stdin.flush()
            head = json.loads(reader.stdout.readline())
            body = json.loads(reader.stdout.read(head["bytes"]))
            took, cpu = time.monotonic() - begin, cpu_of([reader.pid]) - before
            known = [line for line in body["series"] if line["mean"][500] is not None]
            print(
                f"{name:30} {took:6.2f} s, {cpu:6.2f} s of CPU, {len(known)} lines,"
                f" {head['bytes'] / 1e6:.1f} MB, reader {resident(reader.pid)} MB resident at most"
            )
        reader.stdin.close()
        reader.wait()


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    arguments = parser.parse_args()
    columns = live(arguments.rounds, arguments.seconds)
    look_back(columns, arguments.gigabytes * 1e9)


if __name__ == "__main__":
    main()

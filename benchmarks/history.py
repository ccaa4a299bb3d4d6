"""What history costs: bytes a row, CPU of the daemon, and how fast it can be read.

    python benchmarks/history.py [RECORDING] [--megabytes 100]

Takes the ticks of a recording, by default the bundled one, and writes them as the daemon does; then
repeats them until the history is large, and reads it. A recording of a busy node says most:
`gpuwatch record --last 60s`. What 1 GB takes to read is extrapolated from the megabytes that were.
In the end the bytes of eight made-up ports are kept as they are read, 100 times a second: bursts of
random length at the rate of their link, at whatever moment the reads come.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpuwatch import archive, config
from gpuwatch.archive import Archive
from gpuwatch.byte_history import ByteHistory
from gpuwatch.clock import SECOND_NS, read_clocks
from gpuwatch.codec import Head
from gpuwatch.history import History
from gpuwatch.network_signals import PORT_COUNTERS
from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.recording import RecordingReader
from gpuwatch.replay import ticks
from gpuwatch.ring import RingSchema, RingWriter
from gpuwatch.signals import Column, Entity
from gpuwatch.window import TICK_NS

ALWAYS = (0, 2**62)
ROWS_A_DAY = 86400 * SECOND_NS // TICK_NS
BATCH = archive.BATCH_NS // TICK_NS
MEGABYTE = 1_000_000


class Measured(Archive):
    """An archive whose writing is done, and timed, in the caller's thread."""

    def __init__(self, directory, columns):
        self.write_seconds = 0.0
        super().__init__(directory, config.load(None, {}), "boot", made_up=False)
        self._queue.put(None)
        self._thread.join()
        self.attach(columns)

    def write(self):
        """Write what was taken in."""
        start = time.process_time()
        self.hand_over((), {}, ())
        self._do(self._queue.get())
        self.write_seconds += time.process_time() - start


def moved(found, shift_ns):
    """Return a tick at a later time."""
    return replace(found, start_ns=found.start_ns + shift_ns, end_ns=found.end_ns + shift_ns)


def fill(directory, columns, found, size):
    """Write history of at least `size` bytes; return it with the CPU of adding, in seconds."""
    made, add_seconds = Measured(directory, columns), 0.0
    number = 0
    while not number or used(directory) < size:
        shift_ns = number * len(found) * TICK_NS
        for index, tick in enumerate(found):
            later = moved(tick, shift_ns)
            start = time.process_time()
            made.add(later)
            add_seconds += time.process_time() - start
            if (index + 1) % BATCH == 0 or index + 1 == len(found):
                made.write()
        number += 1
    return made, add_seconds


def used(directory):
    return sum(path.stat().st_size for path in directory.rglob("*.gwh"))


def seconds_of(pieces):
    """Return the CPU time until the first piece comes, and until the last has."""
    start = time.process_time()
    first = 0.0
    for _ in pieces:
        first = first or time.process_time() - start
    return first, time.process_time() - start


def ring_of_ports(directory):
    """Return a full ring of eight ports of 50 GB/s that are read every 10 ms for a minute."""
    random = np.random.default_rng(1)
    entities = [Entity("rdma_port", f"mlx5_{number}/1") for number in range(8)]
    signals = [one.signal for one in PORT_COUNTERS if one.tells == "bytes"]
    columns = tuple(Column(port, signal) for port in entities for signal in signals)
    ring = RingWriter(
        directory / "ports.ring", RingSchema("network.bytes", "network", "rdma", columns, 10**7), 60
    )
    counts = np.zeros(len(columns), np.int64)
    busy = np.zeros(len(columns))
    for number in range(6000):
        late = float(abs(random.normal(0, 2e-4)))
        busy = np.where(random.random(len(columns)) < 0.1, random.random(len(columns)) < 0.5, busy)
        counts += (busy * random.normal(4.6e8, 1e7, len(columns))).astype(np.int64) // 4 * 4
        ring.append(10**12 + number * 10**7 + int(late * 1e9), late, 1e-3, counts.tolist())
    return ring


def keep_ports(directory):
    """Print what it costs to keep the bytes of ports as they are read."""
    ring = ring_of_ports(directory)
    head = Head(10**12, 10**12, (ring.schema,), clocks=(read_clocks(),), boot_id="boot")
    made = ByteHistory(directory / "bytes", "boot")
    start = time.process_time()
    rows = made.write([ring.path], head)
    seconds = time.process_time() - start
    size = used(directory)
    print(
        f"bytes of 8 ports, 100 times a second: {size / rows:.0f} bytes a row,"
        f" {size * 1440 / MEGABYTE:.0f} MB a day, {seconds / 60:.3%} of a core"
    )


def main():
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", nargs="?", type=Path, default=BUNDLED_RECORDING)
    parser.add_argument("--megabytes", type=float, default=100.0)
    arguments = parser.parse_args()
    reader = RecordingReader(arguments.recording)
    columns = [column for ring in reader.head.rings for column in ring.columns]
    found = list(ticks(reader))
    with tempfile.TemporaryDirectory() as name:
        made, _ = fill(Path(name), columns, found, 0)
        size, rows = used(Path(name)), made.rows
    with tempfile.TemporaryDirectory() as name:
        made, add_seconds = fill(Path(name), columns, found, arguments.megabytes * MEGABYTE)
        cells = len(made._columns)
        total = used(Path(name))
        share = total / 1e9
        print(f"{arguments.recording}: {len(found)} ticks, {cells} columns of history")
        print(
            f"written: {size / rows:.0f} bytes a row, {size * 8 / rows / cells:.1f} bits a value,"
            f" {size / rows * ROWS_A_DAY / MEGABYTE:.0f} MB a day"
        )
        add, write = add_seconds / made.rows, made.write_seconds / made.rows
        core = (add + write) * SECOND_NS / TICK_NS
        print(
            f"CPU: {add * 1e6:.0f} us a tick to add, {write * 1e6:.0f} us to write"
            f" ({write * BATCH * 1e3:.1f} ms a batch), {core:.2%} of a core"
        )
        history = History(Path(name) / "history")
        one = columns[0].entity
        days = made.rows / ROWS_A_DAY
        print(f"read {total / MEGABYTE:.0f} MB, {days:.2f} days: CPU to the first row, all, 1 GB")
        for what, chosen in (
            ("everything", {}),
            (f"{one}", {"entities": [one]}),
            (f"{columns[0].signal.name} of all", {"signals": [columns[0].signal.name]}),
            ("times only", {"signals": ()}),
        ):
            first, all_ = seconds_of(history.read(*ALWAYS, **chosen))
            print(f"  {what}: {first * 1e3:.0f} ms, {all_:.1f} s, {all_ / share:.0f} s")
        assert not history.faults
    with tempfile.TemporaryDirectory() as name:
        keep_ports(Path(name))


if __name__ == "__main__":
    main()

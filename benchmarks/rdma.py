"""What a round over eight RDMA ports costs, beside reading the same files one by one.

Run: python benchmarks/rdma.py [--sysfs /sys]. Without RDMA the ports are files in memory, so what a
read asks of a device is not in the numbers: they compare ways of asking. Each round is read in all
ways, in random order; CPU time is that of this process, in and below Python.

  open, read, close   each file as an exporter does it
  held files          the source's own read where netlink is not to be had: 37 files a port
  netlink             an answer of 31 counters a port taken apart: by the layout learnt once, and
                      attribute by attribute; the kernel's own part is left out
  bytes               the round that is done up to a hundred times a second
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rdma_tree import MLX5_HW, MLX5_PMA, Tree
from reading import Reading
from test_nldev import Kernel

from gpuwatch import nldev
from gpuwatch.sources.rdma import Rdma

PORTS = 8
ROUNDS = 300
HW = dict(list(MLX5_HW.items())[:31])
BASE = "open, read, close"


def one_by_one(rdma):
    """Return a round over the files that the source holds, as an exporter reads them."""
    readers = rdma.source._readers
    held = [file for reader in readers for cell in reader._cells for file in cell.files]
    held += [file for reader in readers for file in reader.state._files.values()]
    files = [Path(f"/proc/self/fd/{file}").readlink() for file in held]

    def read():
        for file in files:
            with file.open() as opened:
                opened.read()

    return read


def held(rdma):
    """Return a round of the source's own reads of errors and state."""
    groups = [group for group in rdma.opened.groups if group.name.startswith("port")]

    def read():
        for group in groups:
            group.read()

    return read


def by_netlink(learnt):
    """Return a round of answers of a stand-in for the kernel, less what that itself takes."""
    kernel = Kernel(HW)
    real, nldev.socket.socket = nldev.socket.socket, lambda *_: kernel
    table = nldev.Link().counters(1, 1)
    nldev.socket.socket = real
    kernel.send(table._request)
    answer = kernel.recv(0)
    kernel.send, kernel.recv = (lambda _request: None), (lambda _size: answer)

    def read():
        for _ in range(PORTS):
            if not learnt:
                table._between = ()
            table.read()

    return read


def main():
    """Print one line for each way."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sysfs", type=Path, help="the real /sys of a host with RDMA")
    sysfs = arguments.parse_args().sysfs
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tree = Tree(Path(directory) / "sys")
        for number in range(PORTS if sysfs is None else 0):
            tree.device(f"mlx5_{number}", MLX5_PMA, HW)
        root = sysfs or tree.root
        with Reading(Rdma(), root) as rdma:
            ways = {
                BASE: one_by_one(rdma),
                "held files": held(rdma),
                "netlink, layout learnt": by_netlink(learnt=True),
                "netlink, every attribute": by_netlink(learnt=False),
                "bytes": rdma.group("bytes").read,
            }
            compare(ways)


def compare(ways):
    """Time the ways in turns and print them."""
    wall = {way: [] for way in ways}
    cpu = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way in random.sample(sorted(ways), len(ways)):
            start, spent = time.perf_counter(), time.process_time()
            ways[way]()
            cpu[way].append(time.process_time() - spent)
            wall[way].append(time.perf_counter() - start)
    base = statistics.mean(cpu[BASE])
    print(f"{'way':26} {'p50 us':>8} {'p99 us':>8} {'CPU us':>8} {'of the first':>12}")
    for way in ways:
        times = sorted(wall[way])
        middle, late = times[len(times) // 2], times[len(times) * 99 // 100]
        mean = statistics.mean(cpu[way])
        share = f"{mean / base:.1%}"
        print(f"{way:26} {middle * 1e6:8.0f} {late * 1e6:8.0f} {mean * 1e6:8.0f} {share:>12}")


if __name__ == "__main__":
    main()

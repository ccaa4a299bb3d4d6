"""A fleet of nodes that answer /metrics as real ones do: recorded pages, on one port for each node.

    python benchmarks/fleet_nodes.py record --minutes 10 PAGES
    python benchmarks/fleet_nodes.py serve --nodes 50 --port 21000 PAGES
    python benchmarks/fleet_nodes.py cost

`record` runs `gpuwatch run --source simulated` (8 GPUs, 8 RDMA ports) and keeps its page each 15 s,
so that values change and counters grow as they do. `serve` gives each scraper the next page at
each scrape: who scrapes every 15 s sees what it would have seen, and who scrapes every second sees
15 s in one. A scraper is told by its path, `/metrics/NAME`. Each node begins at another page and
has GPU uuids of its own; after the last page comes the first, as if gpuwatch had been restarted.
`cost` says what a scrape takes from the node.
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

INTERVAL_SECONDS = 15
WARM_SECONDS = 60
PORT = 20973
COST_SECONDS = 40.0
COST_SCRAPES = 60  # fewer than ticks, so that each makes a page
UUID = re.compile(rb"GPU-[0-9a-f]{8}-")  # how the uuids of a simulated node begin


@contextlib.contextmanager
def simulated_node() -> Iterator[None]:
    """Run gpuwatch on a simulated node, from a minute after its start."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        command = [sys.executable, "-m", "gpuwatch", "run", "--source", "simulated"]
        command += ["--path.runtime", directory, "--web.listen-address", f"127.0.0.1:{PORT}"]
        node = subprocess.Popen(command)
        try:
            time.sleep(WARM_SECONDS)
            yield
        finally:
            node.terminate()
            node.wait(60)


def scrape(encoding: str = "identity") -> bytes:
    """Return the page as it was sent."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/metrics", headers={"Accept-Encoding": encoding}
    )
    with urllib.request.urlopen(request) as answer:
        return answer.read()


def record(minutes: float, pages: Path) -> None:
    """Write the pages of a simulated node into a file."""
    found = []
    with simulated_node():
        begin = time.monotonic()
        for index in range(round(minutes * 60 / INTERVAL_SECONDS)):
            time.sleep(max(0.0, begin + index * INTERVAL_SECONDS - time.monotonic()))
            found.append(scrape().decode())
    pages.write_bytes(gzip.compress(json.dumps(found).encode()))


def cost() -> None:
    """Print the size of a scrape and the processor time that it takes from the daemon."""
    with simulated_node():
        print(f"{len(scrape())} bytes, {len(scrape('gzip'))} compressed")
        for encoding in ("identity", "gzip"):
            begin = daemon_seconds()
            time.sleep(COST_SECONDS)
            idle = daemon_seconds() - begin
            for _ in range(COST_SCRAPES):
                scrape(encoding)
                time.sleep(COST_SECONDS / COST_SCRAPES)
            spent = daemon_seconds() - begin - 2 * idle
            print(f"{encoding}: {spent / COST_SCRAPES * 1e3:.1f} ms a scrape")


def daemon_seconds() -> float:
    """Return the processor time of the daemon since its start."""
    line = 'gpuwatch_process_cpu_seconds_total{duty="daemon"} '
    return float(scrape().decode().partition(line)[2].split()[0])


def load(pages: Path) -> list[bytes]:
    """Return the recorded pages."""
    return [page.encode() for page in json.loads(gzip.decompress(pages.read_bytes()))]


class Nodes:
    """Answers the scrapes of every node."""

    def __init__(self, pages: list[bytes], port: int) -> None:
        self._pages, self._port = pages, port
        self._uuid = UUID.findall(pages[0])[0]
        self._scrapes: Counter[tuple[int, str]] = Counter()

    async def serve(self, nodes: int) -> None:
        """Listen on a port for each node, for ever."""
        for node in range(nodes):
            await asyncio.start_server(self._answer, "127.0.0.1", self._port + node)
        await asyncio.Event().wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = writer.get_extra_info("sockname")[1] - self._port
        try:
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).decode()
                body = self._page(node, request.split()[1])
                head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
                if "gzip" in request:
                    body = gzip.compress(body, 1)  # the level of gpuwatch
                    head += "Content-Encoding: gzip\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _page(self, node: int, path: str) -> bytes:
        turn = self._scrapes[node, path]
        self._scrapes[node, path] += 1
        page = self._pages[(node + turn) % len(self._pages)]
        return page.replace(self._uuid, b"GPU-%08x-" % (node + 1))


def main() -> None:
    """Record, serve or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("record", "serve", "cost"))
    parser.add_argument("pages", type=Path, nargs="?", default=Path("pages.gz"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--port", type=int, default=21000)
    arguments = parser.parse_args()
    if arguments.action == "record":
        record(arguments.minutes, arguments.pages)
    elif arguments.action == "cost":
        cost()
    else:
        asyncio.run(Nodes(load(arguments.pages), arguments.port).serve(arguments.nodes))


if __name__ == "__main__":
    main()

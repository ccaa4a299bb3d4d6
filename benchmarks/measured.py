"""The daemon under measurement on this host's real GPUs, and what is asked of it."""

import contextlib
import http.client
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from gpuwatch.codec import RowsBlock
from gpuwatch.control import request
from gpuwatch.recording import RecordingReader

HERE = Path(__file__).parent
PORT = 19973
# Wide enough that the cost is measured at the planned rates, whatever it is.
CONFIG = "[state]\nbudget_ratio = 0.2\n[counters]\nbudget_ratio = 0.5\n"


def scrape() -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def total(series: dict[str, float], name: str, *parts: str) -> float:
    return sum(
        value
        for key, value in series.items()
        if key.startswith(name) and all(part in key for part in parts)
    )


class Host:
    """The daemon under test; `more` are further flags of it."""

    def __init__(self, output: Path, text: str = CONFIG, *more: str) -> None:
        self.output = output
        self.runtime = Path("/dev/shm/gpuwatch-benchmark")
        self.control = self.runtime / "control.sock"
        self.log = (output / "daemon.log").open("w")
        config = output / "config.toml"
        config.write_text(text)
        start = time.monotonic()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpuwatch", "run", "--config", str(config)),
                *("--path.runtime", str(self.runtime), "--path.state", str(output / "state")),
                *("--web.listen-address", f"127.0.0.1:{PORT}", *more),
            ],
            stderr=self.log,
        )
        while True:
            with contextlib.suppress(OSError):
                if any(key.startswith("gpuwatch_gpu_clock_hertz{") for key in scrape()):
                    break
            if time.monotonic() - start > 30 or self.process.poll() is not None:
                self.process.terminate()
                self.process.wait(30)
                raise SystemExit((output / "daemon.log").read_text())
            time.sleep(0.02)
        print(f"first scrape with clocks after {time.monotonic() - start:.2f} s")

    def record(self, seconds: float) -> RecordingReader:
        message = {"command": "record", "last_seconds": seconds}
        answer = request(self.control, message, 120)
        print(f"recording of {seconds:g} s: {answer['rows']} rows, {answer['bytes']} bytes")
        return RecordingReader(Path(answer["path"]))

    def stop(self) -> None:
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(40)
        print(f"SIGTERM: exit status {status} after {time.monotonic() - start:.2f} s")


def load(seconds: float, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "load.py"), "--seconds", str(seconds), *arguments]
    return subprocess.Popen(command)


def columns(reader: RecordingReader) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """Return (gpu, column) -> (times, values) of a recording, and each ring's lateness."""
    found: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for block in reader:
        if not isinstance(block, RowsBlock):
            continue
        schema = reader.head.rings[block.ring]
        times = block.rows["time_ns"]
        found.setdefault(("late", schema.name), []).append((times, block.rows["late"]))
        for index, column in enumerate(schema.columns):
            cells = "integers" if index < schema.integers else "gauges"
            place = index if index < schema.integers else index - schema.integers
            key = (column.entity.id, column.name)
            found.setdefault(key, []).append((times, block.rows[cells][:, place]))
    return {
        key: tuple(np.concatenate(part) for part in zip(*parts, strict=True))
        for key, parts in found.items()
    }


def scrapes(count: int) -> None:
    times = []
    for _ in range(count):
        start = time.monotonic()
        series = scrape()
        times.append((time.monotonic() - start) * 1e3)
        time.sleep(0.02)
    times.sort()
    print(
        f"{count} scrapes of {len(series)} series: p50 {times[count // 2]:.1f} ms"
        f" p99 {times[int(count * 0.99)]:.1f} ms"
    )
    pss = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().split(b"\0")
            if any(part.startswith(b"gpuwatch") for part in command):
                rollup = (path / "smaps_rollup").read_text()
                line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
                name = b" ".join(command[2:5]).decode().replace("-m gpuwatch.", "")
                pss[name] = pss.get(name, 0) + int(line.split()[1]) / 1024
    text = ", ".join(f"{name} {size:.0f}" for name, size in sorted(pss.items()))
    print(f"PSS {sum(pss.values()):.0f} MiB: {text}")

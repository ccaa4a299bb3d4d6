"""A real daemon for tests: real processes, sockets and files in a directory of its own."""

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpuwatch.sources import SOURCES


def only(*names: str) -> str:
    """Return the config text that turns off every source but these."""
    known = list(itertools.chain(*SOURCES.values()))
    assert set(names) <= set(known)
    return "[collectors]\n" + "".join(f"{name} = {str(name in names).lower()}\n" for name in known)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], seconds: float = 30.0, what: str = "") -> Any:
    """Return the condition's first true value; fail when it has not come in time."""
    end = time.monotonic() + seconds
    while True:
        start = time.monotonic()
        value = condition()
        if value:
            return value
        if (now := time.monotonic()) > end:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(min(0.1, 0.02 + 3 * (now - start)))  # or asking would be most of the work


class Running:
    """`gpuwatch run` with `arguments`; `config` is the text of its config file."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        config: str = "",
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        ready: bool = True,
    ) -> None:
        self.directory = directory
        self.runtime = directory / "runtime"
        self.state = directory / "state"
        self.port = port or free_port()
        self.log_path = directory / "log"
        command = [
            *(sys.executable, "-m", "gpuwatch", "run"),
            *("--path.runtime", str(self.runtime), "--path.state", str(self.state)),
            *("--web.listen-address", f"127.0.0.1:{self.port}"),
            *arguments,
        ]
        self.config = directory / "config.toml"
        if config:
            self.config.write_text(config)
            command += ["--config", str(self.config)]
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                command, stderr=log, cwd=directory, env=dict(environment or os.environ)
            )
        if ready:
            try:
                wait_for(self.is_ready, 60, "ready")
            except BaseException as error:  # or it would be there beside all later tests
                self.__exit__(type(error), error, None)
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            sys.stderr.write(self.log())
        children = [pid for pid, _ in descendants(self.process.pid)]
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        self.process.kill()
        self.process.wait()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def log(self) -> str:
        """Everything logged so far."""
        return self.log_path.read_text()

    def get(self, path: str, timeout: float = 5.0) -> tuple[int, bytes]:
        """Return the status and body of a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"ended with {self.process.returncode}: {self.log()}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get("/-/ready")[0] == 200
        return False

    def scrape(self) -> dict[str, float]:
        """Return every series as it is written, with its value."""
        status, body = self.get("/metrics")
        assert status == 200
        lines = (line.rsplit(" ", 1) for line in body.decode().splitlines() if line[0] != "#")
        return {name: float(value) for name, value in lines}

    def value(self, name: str, *parts: str) -> float | None:
        """Return the one series of that name whose labels contain all parts, None if absent."""
        found = [
            value
            for series, value in self.scrape().items()
            if series.partition("{")[0] == name and all(part in series for part in parts)
        ]
        assert len(found) <= 1, (name, parts, found)
        return found[0] if found else None

    def status(self) -> dict[str, Any]:
        """Return the status page."""
        status, body = self.get("/api/v1/status")
        assert status == 200
        page: dict[str, Any] = json.loads(body)
        return page

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return events of that name."""
        return [event for event in self.status()["events"] if event["name"] == name]

    def alert(self, rule: str, entity_id: str | None = None) -> dict[str, Any] | None:
        """Return a rule's alert that is pending or firing, None if there is none."""
        for alert in self.status()["alerts"]:
            if alert["rule"] == rule and entity_id in (None, alert["entity"][1]):
                found: dict[str, Any] = alert
                return found
        return None

    def child(self, duty: str) -> int:
        """Return the process id of the present child of a duty (or daemon, supervisor)."""
        if duty == "supervisor":
            return self.process.pid
        module = "gpuwatch.daemon" if duty == "daemon" else f"gpuwatch.sampler {duty}"

        def present() -> list[int]:
            return [pid for pid, command in descendants(self.process.pid) if module in command]

        return max(wait_for(present, what=module))  # between two children there is none

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 40) -> int:
        """Send a signal to the supervisor and return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield (process id, command line) of all that a process has started, itself not."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                yield int(path.name), command
                yield from descendants(int(path.name))

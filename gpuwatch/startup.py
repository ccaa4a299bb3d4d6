"""Before anything runs: the config checked, directories made, the lock taken, ports bound."""

import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from gpuwatch.errors import USAGE, ConfigError, GpuwatchError
from gpuwatch.ring import ring_directory

log = logging.getLogger("gpuwatch.supervisor")


def validate(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as a short child validates them, so that pydantic stays out of here.

    Raises ConfigError with one line for each fault.
    """
    child = subprocess.run(
        [sys.executable, "-m", "gpuwatch.config"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if child.returncode == USAGE:
        raise ConfigError(child.stderr.strip())
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise GpuwatchError(f"the config could not be checked: {last}: report it")
    config: dict[str, Any] = json.loads(child.stdout)
    return config


@contextlib.contextmanager
def prepared(config: Mapping[str, Any]) -> Iterator[tuple[list[socket.socket], Path]]:
    """Make the directories, take the lock, bind the ports; let go of all of it in the end."""
    runtime = Path(config["paths"]["runtime"])
    state = Path(config["paths"]["state"])
    make_directory(runtime, 0o755, "paths.runtime")
    if runtime.stat().st_uid != os.geteuid():  # its owner could put other files in our way
        raise ConfigError(f"paths.runtime {runtime}: belongs to another user: choose another")
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(runtime))
        rings = ring_directory(runtime)
        _clear(runtime, rings)
        if rings != runtime:
            log.warning("%s is on a disk: rings are kept in %s", runtime, rings)
        try:
            make_directory(state, 0o750, "paths.state")
        except ConfigError as fault:
            log.warning("%s: state is kept in memory only", fault)
        sockets = [
            stack.enter_context(listen(address)) for address in config["web"]["listen_addresses"]
        ]
        yield sockets, rings
        _clear(runtime, rings)


def _clear(runtime: Path, rings: Path) -> None:
    """Remove what only a running daemon needs."""
    for path in (*runtime.glob("*.json"), *runtime.glob("*.sock"), *rings.glob("*.ring")):
        path.unlink(missing_ok=True)


def make_directory(path: Path, mode: int, key: str) -> None:
    """Make a directory that is missing; raises ConfigError if it cannot be made or written."""
    try:
        if not path.is_dir():
            path.mkdir(mode, parents=True)
            path.chmod(mode)
        # A real attempt: root is not held back by modes, but by a read-only file system.
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{key} {path}: {error.strerror}: make it writable or choose another"
        ) from error


@contextlib.contextmanager
def locked(runtime: Path) -> Iterator[TextIO]:
    """Hold the runtime directory's lock; raises ConfigError if another daemon has it."""
    with (runtime / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(
                f"paths.runtime {runtime}: gpuwatch is running there (process"
                f" {file.read().strip() or 'unknown'}): stop it or choose another directory"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file


def listen(address: str) -> socket.socket:
    """Return a listening socket on HOST:PORT, [HOST]:PORT or :PORT; raises ConfigError.

    `[::]` and an empty host take both protocols; where the host has no IPv6, the latter IPv4.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host:
        return _listen(host, int(port), address)
    try:
        return _listen("::", int(port), address)
    except ConfigError:
        return _listen("0.0.0.0", int(port), address)  # noqa: S104 - as asked for


def _listen(host: str, port: int, address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            if family is socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(128)
            stack.pop_all()
            return listener
    except OSError as error:
        raise ConfigError(
            f"web.listen_addresses {address}: {error.strerror or error}:"
            " choose another with --web.listen-address"
        ) from error

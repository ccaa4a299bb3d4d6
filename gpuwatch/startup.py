"""Before anything runs: the config checked, directories made, the lock taken, ports bound."""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from gpuwatch.capabilities import follow
from gpuwatch.clock import SECOND_NS, monotonic_ns
from gpuwatch.errors import USAGE, ConfigError, GpuwatchError
from gpuwatch.paths import DATABASE
from gpuwatch.process import started
from gpuwatch.tmpfs import ring_directory

log = logging.getLogger("gpuwatch.supervisor")

CRASHED = "crashed"  # in the directory of the rings: those of a gpuwatch that was killed
VALIDATION_NS = 30 * SECOND_NS
# Sockets and rings of children, by duty and generation, the daemon's socket and verdict, and how
# far the kernel log was told.
_OURS = re.compile(r"control\.sock|verdict\.json|kmsg\.position|\w+\.\d+\.(sock|[-\w.~]+\.ring)")


class Validation:
    """A short child that validates the config, so that pydantic stays out of here.

    Raises GpuwatchError if it cannot be started.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._deadline_ns = monotonic_ns() + VALIDATION_NS
        self._files = contextlib.ExitStack()
        try:
            # Files, not pipes: nobody needs to read while it writes.
            self._output, self._errors = (
                self._files.enter_context(os.fdopen(os.memfd_create(name), "w+b"))
                for name in ("settings", "errors")
            )
            self._popen = started(
                [sys.executable, "-P", "-m", "gpuwatch.config"],
                request,
                stdout=self._output,
                stderr=self._errors,
                preexec_fn=follow(signal.SIGKILL),
            )
        except OSError as error:
            self._files.close()
            raise GpuwatchError(f"the config could not be checked: {error.strerror}") from error

    def poll(self) -> dict[str, Any] | None:
        """Return the settings once they are there, None before.

        Raises ConfigError with one line for each fault.
        """
        status = self._popen.poll()
        if status is None and monotonic_ns() < self._deadline_ns:
            return None
        if status is None:  # a config file on a dead network disk, say
            self.kill()
            raise GpuwatchError("the config could not be checked: no answer in 30 s")
        texts = []
        with self._files:
            for file in (self._output, self._errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace").strip())
        if status == USAGE:
            raise ConfigError(texts[1])
        if status:
            last = (texts[1].splitlines() or [f"exit status {status}"])[-1]
            raise GpuwatchError(f"the config could not be checked: {last}: report it")
        config: dict[str, Any] = json.loads(texts[0])
        return config

    def kill(self) -> None:
        """Give up waiting for it."""
        self._popen.kill()
        self._files.close()


def validate(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, waiting for them; raises as `Validation` does."""
    validation = Validation(request)
    while (config := validation.poll()) is None:
        time.sleep(0.01)
    return config


@contextlib.contextmanager
def prepared(config: Mapping[str, Any]) -> Iterator[tuple[list[socket.socket], Path]]:
    """Make the directories, take the lock, bind the ports; let go of all of it in the end."""
    runtime = Path(config["paths"]["runtime"])
    state = Path(config["paths"]["state"])
    _refuse_foreign(runtime)
    make_directory(runtime, 0o755, "paths.runtime")
    _refuse_foreign(runtime)  # in /tmp somebody may have been quicker
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(runtime, "lock", "paths.runtime"))
        rings = ring_directory(runtime)
        if rings != runtime:
            stack.callback(_remove, rings)
        put_aside(runtime, rings)
        _clear(runtime, rings)
        sockets = [
            stack.enter_context(listen(address)) for address in config["web"]["listen_addresses"]
        ]
        if rings != runtime:
            log.warning("%s is on a disk: rings are kept in %s", runtime, rings)
        try:
            make_directory(state, 0o750, "paths.state")
        except ConfigError as fault:
            log.warning("%s: state is kept in memory only", fault)
        else:
            stack.enter_context(locked(state, "gpuwatch.lock", "paths.state"))
        made_up = config["source"]["kind"] != "nvml"
        if made_up and state.is_relative_to(runtime):  # another run's past is none of this one's
            for path in state.glob(f"{DATABASE}*"):
                path.unlink()
            shutil.rmtree(state / "history", ignore_errors=True)
        yield sockets, rings
        shutil.rmtree(rings / CRASHED, ignore_errors=True)
        _clear(runtime, rings)


def _refuse_foreign(runtime: Path) -> None:
    """Raise ConfigError if another user owns the directory, or a link to it, and could swap it."""
    with contextlib.suppress(OSError):
        owner, link_owner = runtime.stat().st_uid, runtime.lstat().st_uid
        if owner != os.geteuid() or link_owner not in (0, os.geteuid()):
            raise ConfigError(f"paths.runtime {runtime}: belongs to another user: choose another")


def _clear(runtime: Path, rings: Path) -> None:
    """Remove what only a running daemon needs, and nothing that somebody else keeps there."""
    manifests = [path for path in runtime.glob("*.json") if path.is_file() and _manifest(path)]
    # By glob: a directory that somebody removed under way holds nothing.
    left = [path for path in (*runtime.glob("*"), *rings.glob("*")) if _OURS.fullmatch(path.name)]
    for path in (*manifests, *left):
        path.unlink(missing_ok=True)


def put_aside(runtime: Path, rings: Path) -> None:
    """Move away the rings that a gpuwatch left that was killed, for the daemon to save.

    They are only evidence: what cannot be kept is told, and stops nobody.
    """
    crashed = rings / CRASHED
    try:
        shutil.rmtree(crashed, ignore_errors=True)
        left = [path for path in rings.glob("*.ring") if _OURS.fullmatch(path.name)]
        place = os.statvfs(rings)
        if place.f_bavail * place.f_frsize < sum(path.stat().st_size for path in left):
            log.warning("%s: no room for new rings beside those of a killed gpuwatch", rings)
        elif left:
            crashed.mkdir(0o750)
            for path in left:
                path.rename(crashed / path.name)
            for path in runtime.glob("*.json"):
                if path.is_file() and (said := _manifest(path)):
                    there = [crashed / Path(str(ring)).name for ring in said["rings"]]
                    said["rings"] = [str(ring) for ring in there if ring.is_file()]
                    (crashed / path.name).write_text(json.dumps(said))
    except OSError as error:
        log.warning("%s: rings of a killed gpuwatch are lost: %s", crashed, error.strerror)


def _manifest(path: Path) -> dict[str, Any]:
    """Return what a sampler or a replay wrote; {} of another's file.

    The name says nothing: any duty's may have been recorded.
    """
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    ours = isinstance(said, dict) and said.keys() >= {"duty", "generation", "rings"}
    return said if ours and isinstance(said["rings"], list) else {}


def _remove(rings: Path) -> None:
    """Remove the folder in shared memory, unless something is in it still."""
    with contextlib.suppress(OSError):
        rings.rmdir()


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
def locked(directory: Path, name: str, key: str) -> Iterator[TextIO]:
    """Hold a directory's lock; raises ConfigError if another daemon has it."""
    try:
        file = (directory / name).open("a+")
    except OSError as error:
        raise ConfigError(f"{directory / name}: {error.strerror}: remove it") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(
                f"{key} {directory}: gpuwatch is running there (process"
                f" {file.read().strip() or 'unknown'}): stop it or choose another directory"
            ) from error
        except OSError as error:
            log.warning("%s: %s: nothing keeps another gpuwatch out", file.name, error.strerror)
        # The lock is what counts: on a full file system it stands without our number.
        with contextlib.suppress(OSError):
            file.truncate(0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
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

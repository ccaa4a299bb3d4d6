"""The page of one recording, for `gpuwatch replay`: the daemon's page and API, and nothing else.

Reads the file and writes nothing, so it needs no daemon, no root and no directory of its own.
"""

import gzip
import logging
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from gpuwatch.address import normalise
from gpuwatch.errors import PASS, ConfigError, RecordingError
from gpuwatch.place import NAME, Place
from gpuwatch.reader import Reader
from gpuwatch.recorded import Recorded
from gpuwatch.startup import listen
from gpuwatch.web import WebServer


class _Pages:
    """What the web server shows beside what its readers read from the recording: nothing."""

    def __init__(self, place: Place, status: Mapping[str, Any]) -> None:
        self._place = place
        self._status = dict(status)

    def metrics(self) -> bytes:
        """Return no metrics: those of the past would be taken for the node's."""
        return b""

    def metrics_gzip(self) -> bytes:
        """Return the same, compressed."""
        return gzip.compress(b"")

    def dcgm(self) -> bytes:
        """Return no metrics, either."""
        return b""

    def dcgm_gzip(self) -> bytes:
        """Return the same, compressed."""
        return gzip.compress(b"")

    def ready(self) -> bool:
        """Return that there is something to show."""
        return True

    def status(self) -> dict[str, Any]:
        """Return how it was when the recording began."""
        return self._status

    def canaries(self) -> Sequence[Mapping[str, Any]]:
        """Return no readings: those of the recording are read from it."""
        return ()

    def place(self) -> Place:
        """Return where the recording lies."""
        return self._place


def serve(path: Path, rules: Mapping[str, Mapping[str, Any]], address: str) -> int:
    """Serve until SIGINT or SIGTERM, on a terminal until the view is left; return 0.

    Raises RecordingError for a file that is no recording, ConfigError for an address that cannot
    be listened on.
    """
    try:
        listener = listen(normalise(address))
    except ValueError as error:
        raise ConfigError(f"--web.listen-address: {error}") from error
    with listener:
        return _serve(path, rules, listener)


def _serve(path: Path, rules: Mapping[str, Mapping[str, Any]], listener: socket.socket) -> int:
    if not NAME.fullmatch(path.name):
        raise ConfigError(f"{str(path)!r}: a name that no page can ask for: rename the file")
    Recorded(path).close()  # says what is wrong with it
    place = Place(recordings=str(path.parent.resolve()), recording=path.name, rules=rules)
    with closing(Reader(place)) as reader:
        first = reader.answer({"what": "status", "time": 0.0})
        if "error" in first:
            raise RecordingError(str(first["error"]))
        server = WebServer([listener], _Pages(place, first))
        server.start()
        host, port = listener.getsockname()[:2]
        try:
            _stay(reader, first, f"http://{f'[{host}]' if ':' in host else host}:{port}/")
        finally:
            server.stop()
    return PASS


def _stay(reader: Reader, first: Mapping[str, Any], url: str) -> None:
    """Show the recording on a terminal, else wait to be told to end."""
    try:
        from gpuwatch.screen import interactive

        drawn = interactive()
    except ModuleNotFoundError:
        drawn = False
        if sys.stdout is not None and sys.stdout.isatty():
            pip = f"{sys.executable} -m pip"
            print(f"for the recording in this terminal: {pip} install 'gpuwatch[tui]'")
    if drawn:
        from gpuwatch.commands.replay_view import watch

        logging.disable()  # nobody else writes to the terminal
        watch(reader, first, url)
        return
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print(url, flush=True)
    ended.wait()

"""`gpuwatch top`: the node in a terminal, from the running daemon."""

import importlib.util
import json
import select
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gpuwatch import control, duration
from gpuwatch.commands.verdict import CODES
from gpuwatch.errors import PASS, UNKNOWN, ConfigError, ControlError
from gpuwatch.paths import control_socket

LEAST_INTERVAL = 0.25  # there is nothing new more often
PATIENCE_SECONDS = 5.0  # for an answer
ASK = {"command": "status", "whole": True}

KEYS_LINE = "q quit  ↑↓ scroll  p pause  s sort  a all alerts  ? help"
KEYS = """\
Keys
  q          leave
  ↑ ↓        scroll by a line; PgUp PgDn by a page; Home End
  p          hold the picture as it is, and go on
  s          order of the GPUs: number, state, slowest clock, power,
             temperature, utilization
  a          all alerts and causes, or as many as leave room for the GPUs
  ?          this page, and back
"""

Answer = Mapping[str, Any]  # {"status", "minute"}


class Top:
    """Asks the daemon of this machine for its status, again and again, and draws it."""

    name = "top"
    help = "show the node in the terminal, from the running daemon"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare how often, and what instead of the view."""
        parser.add_argument("--once", action="store_true", help="print one picture and end")
        parser.add_argument(
            "--json", action="store_true", help="print the status as JSON, a line each time"
        )
        parser.add_argument(
            "--interval",
            type=duration.seconds,
            default=1.0,
            metavar="DURATION",
            help="time between two pictures: 250ms, 1s (default)",
        )

    def run(self, arguments: Namespace) -> int:
        """Return 0 when left, after `--once` 0 for ok, 1 for watch, 2 for the rest, 3 unknown."""
        if arguments.interval < LEAST_INTERVAL:
            raise ConfigError(f"--interval: {arguments.interval:g} s: at least 250ms")
        if not arguments.json:
            require_rich("top")
        with closing(Daemon(control_socket(vars(arguments)["paths.runtime"]))) as daemon:
            if arguments.json:
                return _tell(daemon, arguments.once, arguments.interval)
            from gpuwatch.screen import interactive

            if arguments.once or not interactive():
                return _draw_once(daemon)
            return _watch(daemon, arguments.interval)


def require_rich(command: str) -> None:
    """Raise ConfigError if what the view is drawn with is not installed."""
    if importlib.util.find_spec("rich") is None:
        raise ConfigError(
            f"gpuwatch {command}: rich is not installed:"
            f" {sys.executable} -m pip install 'gpuwatch[tui]', or add --json"
        )


class Daemon:
    """A conversation with the daemon that begins anew when another daemon is there.

    `fault` is why there is no answer now, "" while there is one.
    """

    since = 0.0  # the wall time of the fault

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fault = ""
        self._connection: control.Connection | None = None
        self._parts: list[control.Message] = []
        self._asked = 0.0  # on the monotonic clock; 0 when nothing is awaited

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when there is an answer."""
        return [self._connection.socket.fileno()] if self._connection else []

    def ask(self) -> None:
        """Ask for the status, unless an answer is still to come."""
        if self._asked and time.monotonic() - self._asked < PATIENCE_SECONDS:
            return
        if self._asked:
            self._lose(f"no answer for {PATIENCE_SECONDS:g} s: see the daemon's log")
        if self._connection is None:
            self._connection = control.connect(self.path)
        if self._connection is None:
            self._lose("no daemon answers: start it or set --path.runtime")
        elif self._connection.send(ASK):
            self._asked, self._parts = time.monotonic(), []
        else:
            self._lose("the daemon has ended: see its log")

    def take(self) -> Answer | None:
        """Return the answer if all of it has come; raises ControlError if it is none."""
        if self._connection is None:
            return None
        try:
            while (message := self._connection.receive()) is not None:
                self._parts.append(message)
                if "error" in message:
                    raise ControlError(str(message["error"]))
                if (answer := control.whole(self._parts)) is not None:
                    self._asked, self._parts, self.fault = 0.0, [], ""
                    return answer
        except EOFError:
            self._lose("the daemon has ended: see its log")
        except ValueError as error:
            raise ControlError(f"{self.path}: the answer is no JSON: {error}") from error
        return None

    def answer(self) -> Answer:
        """Ask and wait; raises ControlError if no answer comes in time."""
        end = time.monotonic() + PATIENCE_SECONDS
        self.ask()
        while not self.fault and time.monotonic() < end:
            select.select(self.descriptors, (), (), end - time.monotonic())
            if (answer := self.take()) is not None:
                return answer
        raise ControlError(f"{self.path}: {self.fault or 'no answer: see the log of the daemon'}")

    @property
    def told(self) -> str:
        """The fault as the view tells it; it goes on when a daemon is there again."""
        if not self.fault:
            return ""
        since = time.strftime("%H:%M:%SZ", time.gmtime(self.since))
        return f"no answer since {since}, waiting: {self.fault}"

    def _lose(self, fault: str) -> None:
        if not self.fault:
            self.since = time.time()
        self.fault = fault
        self._asked, self._parts = 0.0, []
        self.close()

    def close(self) -> None:
        """End the conversation."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _code(answer: Answer) -> int:
    verdict = answer["status"].get("verdict")
    return CODES.get(verdict, UNKNOWN) if isinstance(verdict, str) else UNKNOWN


def _tell(daemon: Daemon, once: bool, interval: float) -> int:
    """Print the status as JSON, once or until interrupted."""
    while True:
        start = time.monotonic()
        answer = daemon.answer()
        print(json.dumps(answer["status"]), flush=True)
        if once:
            return _code(answer)
        time.sleep(max(0.0, start + interval - time.monotonic()))


def _draw_once(daemon: Daemon) -> int:
    import shutil

    from gpuwatch.screen import put
    from gpuwatch.view import Looks, picture

    answer = daemon.answer()
    size = (shutil.get_terminal_size().columns, 0)
    shown = picture(answer["status"], answer["minute"], size, Looks())
    put([*shown.head, *shown.body])
    return _code(answer)


def _watch(daemon: Daemon, interval: float) -> int:
    from gpuwatch.screen import Screen
    from gpuwatch.view import Looks, foot, picture

    looks = Looks(keys=KEYS)
    answer = daemon.answer()  # before the screen is taken: without a daemon one line says so
    due = time.monotonic() + interval
    with Screen() as screen:
        while not screen.ended:
            shown = picture(answer["status"], answer["minute"], screen.size, looks)
            screen.show(shown.head, shown.body, [foot(daemon.told, KEYS_LINE)])
            keys, _ = screen.wait(daemon.descriptors, due)
            for key in keys:
                if key == "q":
                    return PASS
                if key == "p":
                    looks.paused = not looks.paused
                elif looks.press(key):
                    screen.offset = 0
                else:
                    screen.scroll(key)
            came = daemon.take()
            if came is not None and not looks.paused:
                answer = came
            if time.monotonic() >= due:
                due = time.monotonic() + interval
                if not looks.paused:
                    daemon.ask()
    return PASS

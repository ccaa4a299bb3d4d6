"""The screen: a terminal taken over for a view, its keys, and given back as it was."""

import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.text import Text

# xterm's: the other screen, cursor hidden, and back. Source: XTerm Control Sequences, DECSET.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[0m\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z]|\[\[[A-E])")
KEYS = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[1;2C": "shift-right",
    b"\x1b[1;2D": "shift-left",
    b"\x1b[5~": "page-up",
    b"\x1b[6~": "page-down",
    **dict.fromkeys((b"\x1b[H", b"\x1b[1~", b"\x1b[7~"), "home"),
    **dict.fromkeys((b"\x1b[F", b"\x1b[4~", b"\x1b[8~"), "end"),
}
READ_BYTES = 1024


class Screen:
    """A terminal while a view has it; leaving the `with` block gives it back.

    `ended` is set once the process is asked to end. Ctrl-C raises KeyboardInterrupt as ever.
    """

    def __init__(self) -> None:
        self.ended = False
        self.offset = 0  # lines of the body above what is shown
        self._pages = 0  # lines that a page has, and the body beyond it
        self._beyond = 0
        self._stdin, self._stdout = sys.stdin.fileno(), sys.stdout.fileno()
        self._console = Console(highlight=False, markup=False, emoji=False, legacy_windows=False)
        self._modes: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._wake: tuple[int, int] = (-1, -1)
        self._wakeup_before = -1

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now; some consoles do not say."""
        columns, lines = os.get_terminal_size(self._stdout)
        return columns or 80, lines or 24

    def __enter__(self) -> Self:
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        for number, handler in (
            (signal.SIGWINCH, self._look_again),
            (signal.SIGCONT, self._look_again),
            (signal.SIGTERM, self._end),
            (signal.SIGHUP, self._end),
            (signal.SIGTSTP, self._stop),
        ):
            self._handlers[number] = signal.signal(number, handler)
        self._take()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        for descriptor in self._wake:
            os.close(descriptor)
        with contextlib.suppress(OSError, termios.error):  # a terminal that has gone
            self._give_back()

    def show(self, head: Sequence[Text], body: Sequence[Text], foot: Sequence[Text]) -> None:
        """Draw lines that fit the width; what is too long may be scrolled."""
        columns, lines = self.size
        self._pages = max(1, lines - len(head) - len(foot))
        self._beyond = max(0, len(body) - self._pages)
        self.offset = min(self.offset, self._beyond)
        shown = list(body[self.offset : self.offset + self._pages])
        shown += [Text()] * (self._pages - len(shown))
        *before, last = foot
        if self._beyond:
            end = min(len(body), self.offset + self._pages)
            last = Text(f"{self.offset + 1}-{end} of {len(body)}  ", style=last.style).append(last)
        last.truncate(columns)
        drawn = [*head, *shown, *before, last][:lines]
        text = f"{REST_OF_LINE}\r\n".join(self._line(line, columns) for line in drawn)
        self._write(f"{HOME}{text}{REST_OF_LINE}{REST_OF_SCREEN}")

    def scroll(self, key: str) -> bool:
        """Take a key that moves the body; False if it is none."""
        moves = {
            "up": -1,
            "down": 1,
            "page-up": -self._pages,
            "page-down": self._pages,
            "home": -self._beyond,
            "end": self._beyond,
        }
        if key not in moves:
            return False
        self.offset = max(0, min(self._beyond, self.offset + moves[key]))
        return True

    def wait(self, descriptors: Iterable[int], until: float) -> tuple[list[str], list[int]]:
        """Wait until `until` on the monotonic clock for keys, descriptors to read, or a signal.

        Return the keys pressed and the descriptors that are ready.
        """
        watched = [self._stdin, self._wake[0], *descriptors]
        ready, _, _ = select.select(watched, (), (), max(0.0, until - time.monotonic()))
        keys: list[str] = []
        if self._wake[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake[0], READ_BYTES)
        if self._stdin in ready:
            pressed = os.read(self._stdin, READ_BYTES)
            self.ended |= not pressed
            keys = keys_of(pressed)
        return keys, [one for one in ready if one not in watched[:2]]

    def _line(self, line: Text, columns: int) -> str:
        self._console.width = columns + 1
        with self._console.capture() as captured:
            self._console.print(line, end="", no_wrap=True, overflow="ignore", crop=False)
        return captured.get()

    def _write(self, text: str) -> None:
        data = text.encode(sys.stdout.encoding or "utf-8", "replace")
        try:
            while data:
                data = data[os.write(self._stdout, data) :]
        except OSError:  # the terminal has gone
            self.ended = True

    def _take(self) -> None:
        self._modes = termios.tcgetattr(self._stdin)
        tty.setcbreak(self._stdin, termios.TCSANOW)
        self._write(ENTER)

    def _give_back(self) -> None:
        termios.tcsetattr(self._stdin, termios.TCSANOW, self._modes)
        self._write(LEAVE)

    def _look_again(self, _number: int, _frame: FrameType | None) -> None:
        """Do nothing: that the signal came ends the wait, and the next picture is drawn anew."""

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self.ended = True

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """Give the terminal back while the process is stopped (Ctrl-Z)."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()


def keys_of(data: bytes) -> list[str]:
    """Return the keys of what a terminal sent: a sign, or a name like "page-up"."""
    keys = []
    while data:
        found = _ESCAPE.match(data)
        if found:
            keys.append(KEYS.get(found[0].replace(b"\x1bO", b"\x1b["), ""))
            data = data[found.end() :]
        else:
            keys.append(data[:1].decode("latin-1"))
            data = data[1:]
    return [key for key in keys if key]


def interactive() -> bool:
    """Say whether there is a terminal to draw on and to read keys from."""
    streams = (sys.stdin, sys.stdout)
    usable = all(stream is not None and stream.isatty() for stream in streams)
    return usable and os.environ.get("TERM", "") not in ("", "dumb")


def put(lines: Sequence[Text]) -> None:
    """Print lines once, with colour only on a terminal, and only if NO_COLOR does not forbid it."""
    if sys.stdout is None:  # started with standard output closed
        return
    console = Console(highlight=False, markup=False, emoji=False, legacy_windows=False)
    console.width = max([console.width, *(line.cell_len + 1 for line in lines)])
    for line in lines:
        with console.capture() as captured:
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(captured.get().encode(encoding, "replace").decode(encoding))

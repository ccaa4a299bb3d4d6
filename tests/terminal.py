"""A real terminal for tests: a pty with a program on it, and the pictures it drew."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Self

from rich.cells import cell_len
from running import wait_for

SGR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """`gpuwatch` with `words` on a terminal of so many columns and lines."""

    def __init__(self, *words: str, columns: int = 80, lines: int = 24, **variables: str) -> None:
        self.master, slave = pty.openpty()
        self.columns, self.lines = columns, lines
        self.received = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(slave)
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NO_COLOR", "COLUMNS", "LINES")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpuwatch", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm-256color", **variables},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.slave = slave

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size, as a window manager does."""
        self.columns, self.lines = columns, lines
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self.master, keys.encode())

    def read(self) -> str:
        """Return all that was drawn so far."""
        while select.select([self.master], (), (), 0.02)[0]:
            self.received += self._decode(os.read(self.master, 1 << 16))
        return self.received

    def picture(self) -> list[str]:
        """Return the newest whole picture without colours, [] before the first."""
        whole, end, _ = self.read().rpartition("\x1b[J")
        if not end:
            return []
        text = SGR.sub("", whole.rpartition("\x1b[H")[2])
        return [line.replace("\x1b[K", "") for line in text.split("\r\n")]

    def shows(self, text: str, seconds: float = 30.0) -> list[str]:
        """Wait for a picture with that text in it and return it; it fits the terminal."""

        def found() -> list[str]:
            picture = self.picture()
            return picture if any(text in line for line in picture) else []

        picture: list[str] = wait_for(found, seconds, f"{text!r} in {self.picture()}")
        assert len(picture) <= self.lines
        assert max(map(cell_len, picture)) <= self.columns
        return picture

    def ends(self, seconds: float = 20.0) -> int:
        """Wait for the program's end; return its code. The terminal is as it was before."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self.read()
        code = self.process.wait(1)
        assert termios.tcgetattr(self.slave) == self.modes
        if "\x1b[?1049h" in self.read():
            assert self.received.rpartition("\x1b[?25l")[2].endswith("\x1b[?25h\x1b[?1049l")
        return code

    def is_stopped(self) -> bool:
        """Say whether the program was stopped, as by Ctrl-Z."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def send(self, number: signal.Signals) -> None:
        """Send the program a signal."""
        self.process.send_signal(number)

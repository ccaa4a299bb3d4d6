"""Looks whether the web config file has changed, in a thread of its own: a disk may hang."""

import logging
import threading
from collections.abc import Callable

from gpuwatch.errors import ConfigError
from gpuwatch.web_config import WebConfig, read, stamps

log = logging.getLogger("gpuwatch.web")

LOOK_SECONDS = 0.5


class WebWatch:
    """Gives `take` each new state of the file, from its own thread.

    A file that has a fault, or would open what is guarded, is told once and changes nothing.
    """

    def __init__(self, config: WebConfig, take: Callable[[WebConfig], None]) -> None:
        self._config = config
        self._take = take
        self._fault = ""
        self._taken = self._seen = stamps(config.files)
        self._ended = threading.Event()
        # Read anew once at first: it may have changed since it was read.
        self._pending = True
        threading.Thread(target=self._run, name="web config", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        before, self._seen = self._seen, stamps(self._config.files)
        if self._seen != self._taken:
            self._pending = True
        # Not in the midst of a change: a certificate and its key are two files.
        if not self._pending or self._seen != before:
            return
        try:
            config = read(self._config.path)
            _keeps_guard(self._config, config)
        except ConfigError as fault:  # tried again: a file that it names may come later
            if str(fault) != self._fault:
                self._fault = str(fault)
                for line in self._fault.splitlines():
                    log.error("web config not reloaded: %s", line)
            return
        self._pending, self._fault, self._taken = False, "", self._seen
        if config.digest != self._config.digest:
            self._config = config
            self._taken = self._seen = stamps(config.files)
            self._take(config)
            log.info("web config reloaded: %s", config.path)


def _keeps_guard(old: WebConfig, new: WebConfig) -> None:
    """Raise ConfigError if the new state opens what is guarded: an emptied file does not."""
    for had, has, what in (
        (old.tls, new.tls, "TLS"),
        (old.guarded, new.guarded, "passwords or client certificates"),
    ):
        if had and not has:
            raise ConfigError(f"{new.path}: no {what} any more: restart gpuwatch to go without")

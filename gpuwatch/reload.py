"""A reload: the config is read anew beside everything else, one reading at a time."""

import logging
from collections.abc import Mapping
from typing import Any

from gpuwatch import systemd
from gpuwatch.errors import GpuwatchError
from gpuwatch.startup import Validation

log = logging.getLogger("gpuwatch.supervisor")

FIXED_SECTIONS = ("paths", "source", "web")  # a reload cannot change these


class Reload:
    """Asked for on SIGHUP; a config that cannot be taken is told and comes to nothing."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self._validation: Validation | None = None

    @property
    def running(self) -> bool:
        """Whether a config is being read."""
        return self._validation is not None

    def begin(self) -> None:
        """Have the config read."""
        systemd.reloading()
        try:
            self._validation = Validation(self._request)
        except GpuwatchError as fault:
            self._refuse(fault)

    def poll(self, present: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the config that takes the place of `present`, once; None while there is none."""
        if self._validation is None:
            return None
        try:
            config = self._validation.poll()
            if config is None:
                return None
            for section in FIXED_SECTIONS:
                if config[section] != present[section]:
                    raise GpuwatchError(
                        f"[{section}] cannot change while running: restart gpuwatch"
                    )
        except GpuwatchError as fault:
            self._refuse(fault)
            return None
        self._validation = None
        return config

    def kill(self) -> None:
        """Stop reading."""
        if self._validation is not None:
            self._validation.kill()

    def _refuse(self, fault: GpuwatchError) -> None:
        self._validation = None
        for line in str(fault).splitlines():
            log.error("config not reloaded: %s", line)
        systemd.ready()

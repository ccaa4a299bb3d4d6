"""What `gpuwatch check` says of canaries: whether the daemon can run them here."""

import subprocess
from collections.abc import Mapping
from typing import Any

from gpuwatch.canary_host import hindrance, unfit_torch
from gpuwatch.errors import PASS, WARN

PROBE_SECONDS = 20.0
PROBE = "import importlib.util; print(importlib.util.find_spec('torch').origin)"


def canaries(config: Mapping[str, Any]) -> tuple[int, str]:
    """Return how it is, and what to say; to have none is no fault."""
    settings = config["canary"]
    if fault := hindrance(config):
        return WARN if settings["enabled"] and settings["python"] else PASS, f"none: {fault}"
    if python := settings["python"]:
        try:
            done = subprocess.run(
                [python, "-c", PROBE],
                capture_output=True,
                text=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return WARN, f"none: [canary] python {python}: {error}"
        if fault := unfit_torch(None if done.returncode else done.stdout.strip()):
            return WARN, f"none: {python}: {fault}"
    return PASS, f"{', '.join(settings['run'])}, on GPUs that nobody uses"

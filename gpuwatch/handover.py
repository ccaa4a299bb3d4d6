"""Handover: gives the daemon what canaries found, in as few requests as packets allow.

It answers eight times a second, and eight GPUs have forty results of one canary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuwatch import control
from gpuwatch.control import Message

TOGETHER = 20  # results in one packet, which has a limit
TIMEOUT_SECONDS = 5.0  # for each answer


def hand_over(socket: Path, results: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Give results, as plain data, to the daemon at `socket`; return what it thinks of each.

    Raises ControlError if it does not take them.
    """
    judged: list[Message] = []
    for first in range(0, len(results), TOGETHER):
        message = {"command": "canary_results", "results": results[first : first + TOGETHER]}
        judged += control.request(socket, message, TIMEOUT_SECONDS)["judged"]
    return judged

"""Telling systemd how the service is doing: sd_notify(3) over its datagram socket.

Without NOTIFY_SOCKET everything here does nothing, so nobody needs to ask whether systemd is there.
WATCHDOG=1 is to be sent only from a loop that has seen progress, never from a free timer.
"""

import contextlib
import os
import socket

from gpuwatch.clock import monotonic_ns

SEND_SECONDS = 1.0  # the manager reads slowly at boot; waiting longer would stall supervision


def ready(status: str = "") -> None:
    """Say that the start, or a reload, is complete."""
    _notify("READY=1", *_status(status))


def status(text: str) -> None:
    """Set the line that `systemctl status` shows."""
    _notify(*_status(text))


def stopping(status: str = "") -> None:
    """Say that the stop has begun."""
    _notify("STOPPING=1", *_status(status))


def reloading() -> None:
    """Say that a reload has begun; `ready` ends it."""
    _notify("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns() // 1000}")


def watchdog() -> None:
    """Say that the service has made progress since the last time."""
    _notify("WATCHDOG=1")


def watchdog_seconds() -> float | None:
    """Return how often progress must be shown at least, None if nobody watches this process."""
    try:
        seconds = int(os.environ["WATCHDOG_USEC"]) / 1e6
        process = int(os.environ.get("WATCHDOG_PID", os.getpid()))
    except (KeyError, ValueError):
        return None
    return seconds if seconds > 0 and process == os.getpid() else None


def _status(text: str) -> list[str]:
    line = " ".join(text.split())
    return [f"STATUS={line}"] if line else []


def _notify(*assignments: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not assignments or address[:1] not in ("/", "@"):
        return
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    # A manager that is gone or overloaded must not stop the service.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.settimeout(SEND_SECONDS)
        client.sendto("\n".join(assignments).encode(), address)

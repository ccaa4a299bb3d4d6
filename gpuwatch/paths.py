"""Where gpuwatch keeps its files when it is not told.

Under systemd the directories the unit declares, as root the system's, else the user's own.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from gpuwatch.errors import ConfigError

SYSTEM_RUNTIME = Path("/run/gpuwatch")
SYSTEM_STATE = Path("/var/lib/gpuwatch")
CONTROL = "control.sock"
VERDICT = "verdict.json"
DATABASE = "gpuwatch.sqlite"  # in the state directory
BUNDLED_RECORDING = Path(__file__).with_name("data") / "h200.gwr"
STATIC = Path(__file__).with_name("static")
# An installed gpuwatch has them beside its modules, a checkout among its documents.
_INSTALLED, _CHECKOUT = Path(__file__).with_name("runbooks"), Path(__file__).parents[1]
RUNBOOKS = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT / "docs/runbooks"


def runtime_directory(kind: str = "nvml") -> Path:
    """Return the directory of rings and sockets for a kind of source.

    Simulated and replayed data has its own, so it never stands beside real data.
    """
    own = _declared("RUNTIME_DIRECTORY")
    if own is None and os.geteuid() == 0:
        own = SYSTEM_RUNTIME
    if own is None:
        base = _absolute("XDG_RUNTIME_DIR")
        # In a directory open to all; who makes the directory must see that it is their own.
        own = base / "gpuwatch" if base else Path(f"/tmp/gpuwatch-{os.geteuid()}")  # noqa: S108
    return own if kind == "nvml" else own.with_name(f"{own.name}-{kind}")


def state_directory(runtime: Path, kind: str = "nvml") -> Path:
    """Return the directory of recordings, history and the database.

    That of simulated and replayed data lies in its runtime directory, and goes with it.
    """
    if kind != "nvml":
        return runtime / "state"
    own = _declared("STATE_DIRECTORY")
    if own is None and os.geteuid() == 0:
        own = SYSTEM_STATE
    if own is None:
        base = _absolute("XDG_STATE_HOME")
        try:
            own = (base or Path.home() / ".local/state") / "gpuwatch"
        except RuntimeError:  # a user without a home, as in some containers
            own = runtime / "state"
    return own


def control_socket(runtime: str | None) -> Path:
    """Return the socket of the running daemon: in `runtime` if given, else where one runs.

    The node's own comes first; that of a simulated or replaying daemon is taken only if no other
    runs, so that its answers are not taken for the node's.
    """
    if runtime:
        return Path(runtime) / CONTROL
    own = runtime_directory() / CONTROL
    others = [runtime_directory(kind) / CONTROL for kind in ("replay", "simulated")]
    for path in (own, SYSTEM_RUNTIME / CONTROL, *others):
        if path.exists():
            return path
    return own


def open_regular(path: Path) -> BinaryIO:
    """Open a file that holds something: of a pipe or a device the end may never come.

    Raises ConfigError for those, OSError if the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ConfigError(f"{path}: not a regular file: name another, or remove it")


def _declared(variable: str) -> Path | None:
    # systemd.exec(5): several directories are joined by colons; ours is the first.
    first = os.environ.get(variable, "").split(":")[0]
    return Path(first) if first.startswith("/") else None


def _absolute(variable: str) -> Path | None:
    # XDG base directories: a relative path is to be ignored.
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else None

"""Where rings live: on a file system in memory, for a disk would be written without end."""

import os
from pathlib import Path

from gpuwatch.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def ring_directory(runtime: Path) -> Path:
    """Return where rings live: `runtime` if it is in memory, else a folder in shared memory.

    A ring on a disk would be written back for ever. Raises ConfigError if there is no such place.
    """
    if in_memory(runtime):
        return runtime
    directory = SHARED_MEMORY / ("gpuwatch" + str(runtime.resolve()).replace("/", "-"))
    try:
        directory.mkdir(mode=0o750, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory}: {error.strerror}: make it writable, or put paths.runtime on a tmpfs"
        ) from error
    if directory.lstat().st_uid != os.geteuid():  # nor follow another's link
        raise ConfigError(f"{directory}: belongs to another user: remove it, or move paths.runtime")
    return directory


def in_memory(path: Path) -> bool:
    """Return whether what is written below `path` stays in memory."""
    return filesystem(path) in {"tmpfs", "ramfs"}


def filesystem(path: Path) -> str:
    """Return the type of the file system that holds `path`, from /proc/self/mounts."""
    resolved = path.resolve()
    best, kind = -1, ""
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, mount, mount_kind, *_ = line.split(" ")
        mount_path = Path(mount.encode().decode("unicode_escape"))
        depth = len(mount_path.parts)
        if depth >= best and resolved.is_relative_to(mount_path):
            best, kind = depth, mount_kind
    return kind

"""An initramfs: the archive that the kernel unpacks into memory as its first root.

Format: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel ("newc").
"""

import stat
from pathlib import Path, PurePath
from typing import BinaryIO


class Archive:
    """Writes entries, each with the folders above it; of the same name the first one stays.

    Names are absolute. All belongs to root, whoever builds it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._names = {PurePath("/")}

    def add(self, path: Path, name: PurePath) -> None:
        """Add a file of the host; its time stays, for by it Python knows its compiled files."""
        found = path.stat()
        mode = stat.S_IFREG | stat.S_IMODE(found.st_mode)
        self._entry(name, mode, path.read_bytes(), int(found.st_mtime))

    def link(self, name: PurePath, target: PurePath) -> None:
        """Add a symbolic link."""
        self._entry(name, stat.S_IFLNK | 0o777, bytes(target))

    def folder(self, name: PurePath) -> None:
        """Add an empty folder."""
        self._entry(name, stat.S_IFDIR | 0o755)

    def end(self) -> None:
        """Write the mark of the end."""
        self._write("TRAILER!!!", 0, b"", 0)

    def _entry(self, name: PurePath, mode: int, content: bytes = b"", time: int = 0) -> None:
        if name in self._names:
            return
        if name.parent not in self._names:
            self.folder(name.parent)
        self._names.add(name)
        self._write(str(name.relative_to("/")), mode, content, time)

    def _write(self, name: str, mode: int, content: bytes, time: int) -> None:
        written = name.encode() + b"\0"
        numbers = (len(self._names), mode, 0, 0, 1, time, len(content), 0, 0, 0, 0, len(written), 0)
        head = b"070701" + b"".join(b"%08X" % number for number in numbers) + written
        for part in (head, content):
            self._file.write(part + bytes(-len(part) % 4))

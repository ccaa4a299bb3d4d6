"""Attributes: the small files of text in which /sys and /proc tell a value."""

from pathlib import Path


def read(path: Path) -> str:
    """Return what a file holds, "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

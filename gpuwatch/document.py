"""Documents: files of JSON that gpuwatch wrote, each of which says its schema and version."""

import json
from pathlib import Path
from typing import Any

from gpuwatch.errors import ConfigError
from gpuwatch.paths import open_regular


def load(
    path: Path, schema: str, version: int, *, max_bytes: int, otherwise: str
) -> dict[str, Any]:
    """Return what a document of this schema holds; its members are not looked at.

    Raises ConfigError if the file cannot be read, is none of these (`otherwise` says so, and how to
    make one), or is of another version.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(max_bytes + 1)
        content = json.loads(raw) if len(raw) <= max_bytes else None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != schema:
        raise ConfigError(f"{path}: {otherwise}")
    if content.get("version") != version:
        told = str(content.get("version"))[:20]
        raise ConfigError(f"{path}: version {told}: this gpuwatch reads {version}: make it anew")
    return content

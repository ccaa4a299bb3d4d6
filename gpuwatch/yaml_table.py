"""YAML without its types: every scalar is text, so no document can make Python do anything.

A file is read as a `Table` of tables, which is asked for its keys and keeps what is wrong.
"""

import os
import stat
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gpuwatch.errors import ConfigError
from gpuwatch.toml import meant, short, written

MAX_BYTES = 256 * 1024
NOTHING = ("", "~", "null")
SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

_Value = TypeVar("_Value")


def content(path: Path, where: str = "") -> bytes:
    """Return what a file holds. Raises ConfigError, which begins with `where`."""
    try:
        with open(path, "rb", opener=_open) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{where}{path}: not a file")
            found = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}{path}: cannot be read: {error.strerror}") from error
    if len(found) > MAX_BYTES:
        raise ConfigError(f"{where}{path}: larger than {MAX_BYTES} bytes: give another file")
    return found


def _open(path: str, flags: int) -> int:
    """Open a file; a pipe must not hold up who does."""
    return os.open(path, flags | os.O_NONBLOCK)


def document(path: Path, raw: bytes) -> Any:
    """Return the dicts, lists and texts of a file. Raises ConfigError if it is not YAML."""
    import yaml  # here, so that nobody else needs it

    class Loader(yaml.BaseLoader):
        def construct_mapping(
            self, node: yaml.MappingNode, deep: bool = False
        ) -> dict[Hashable, Any]:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, str) or key in seen:
                    what = "given twice" if isinstance(key, str) else "no key"
                    line = key_node.start_mark.line + 1
                    raise ConfigError(f"{path}:{line}: {short(key)}: {what}")
                seen.add(key)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(raw.decode("utf-8-sig"), Loader) or ""  # noqa: S506 - no types: see above
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {error.problem or error.context}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: not YAML in UTF-8: save the file as such") from error


class Table:
    """A mapping of the file. What is wrong with it is added to `faults`, as `key: what`."""

    def __init__(self, value: Any, where: str, faults: list[str]) -> None:
        self.where = where
        self.faults = faults
        self._known: list[str] = []
        self.given: dict[str, Any] = {}
        if isinstance(value, dict):
            self.given = value
        elif value not in NOTHING:
            self.fault("", "must have keys below it")

    def fault(self, key: str, text: str) -> None:
        """Keep what is wrong with a key, "" for the table itself."""
        where = ".".join(part for part in (self.where, key and written(key)) if part)
        self.faults.append(f"{where}: {text}" if where else text)

    def table(self, key: str) -> "Table":
        """Return what is below a key, empty if it is not there."""
        self._known.append(key)
        return Table(self.given.get(key, ""), f"{self.where}.{key}".lstrip("."), self.faults)

    def text(self, key: str) -> str:
        """Return a key's text, "" if it is not there."""
        self._known.append(key)
        value = self.given.get(key, "")
        if isinstance(value, str) and value.isprintable():
            return value
        self.fault(key, f"must be text, not {short(value)}")
        return ""

    def choice(self, key: str, values: Mapping[str, _Value], default: _Value) -> _Value:
        """Return what a key's text stands for, `default` if it is not there."""
        text = self.text(key)
        found = values.get(text.lower() if values is SWITCH else text)
        if found is None and text:
            self.fault(key, f"{short(text)}: give one of {', '.join(values)}")
        return default if found is None else found

    def texts(self, key: str) -> list[str]:
        """Return a key's list of texts, [] if it is not there."""
        self._known.append(key)
        value = self.given.get(key, "")
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return value
        if value not in NOTHING:
            self.fault(key, f"must be a list of texts, not {short(value)}")
        return []

    def rest(self, instead: Mapping[str, str] | None = None) -> None:
        """Report the keys that nobody has asked for; `instead` knows of some what to give."""
        for key in (key for key in self.given if key not in self._known):
            known = f"unknown key ({meant(key, self._known)})"
            self.fault(key, (instead or {}).get(key, known))

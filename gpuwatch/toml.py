"""The config file as data, with the line that each key stands on.

tomllib tells the lines of syntax faults only. Here the text is cut into statements (a header, or a
key with its value), each the shortest run of lines that tomllib accepts; its first line counts.
"""

import difflib
import re
import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpuwatch.errors import ConfigError

MAX_BYTES = 1 << 20
STATEMENT_LINES = 200  # a longer value ends the search for lines, which would take too long


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out integers of thousands of digits.
        return f"a number of {x.bit_length()} bits" if x.bit_length() > 128 else repr(x)


class Document(NamedTuple):
    """A file that is TOML: its name, what it says, and where."""

    name: str
    data: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    def place(self, where: tuple[Any, ...]) -> str:
        """Return `file:line: [section] key` for the place of a value."""
        keys = tuple(part for part in where if isinstance(part, str))
        known = next((keys[:n] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), None)
        line = f":{self.lines[known]}" if known else ""
        value: Any = self.data
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        tables = keys if isinstance(value, Mapping) else keys[:-1]
        parts = ["[" + ".".join(map(written, tables)) + "]"] if tables else []
        parts += [written(key) for key in keys[len(tables) :]]
        return f"{self.name}{line}: {' '.join(parts)}"


def read(path: Path) -> Document:
    """Read a file.

    Raises ConfigError if it cannot be read, is not UTF-8 or is not TOML.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: no path: {error}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes: not a config of gpuwatch")
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8: save the file in that encoding") from error
    try:
        return Document(str(path), tomllib.loads(text), _lines(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}{_syntax_fault(text, error)}") from error


def meant(name: str, known: Iterable[str]) -> str:
    """Return what `name` may have been meant to be, as a question, or all that is known."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"{close[0]}?" if close else f"known: {', '.join(known)}"


def short(value: Any) -> str:
    """Return a value in a few characters, on one line."""
    return _Brief().repr(value)


def written(name: str) -> str:
    """Return a key as it stands in a file, or quoted and cut if it is not a plain one."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) else short(name)


def _syntax_fault(text: str, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return ": nested too deeply"
    message = str(error)
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message)
    if not found:
        return f": not TOML: {message}"
    what, line, column = found.groups()
    if line is None:
        return f":{text.count(chr(10)) + 1}: not TOML: {what} at the end of the file"
    return f":{line}:{column}: not TOML: {what}"


def _lines(text: str) -> dict[tuple[str, ...], int]:
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    statement: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        statement.append(line)
        if len(statement) > STATEMENT_LINES:
            break
        try:
            said = tomllib.loads("\n".join(statement))
        except ValueError:
            continue
        first = number - len(statement) + 1
        header = statement[0].lstrip().startswith("[")
        statement = []
        keys = () if header else table
        for key in _keys(said):
            keys = (*keys, key)
            lines.setdefault(keys, first)
        if header:
            table = keys
    return lines


def _keys(said: Any) -> Iterable[str]:
    """Yield the dotted key of one statement, and on into an inline table of a single key."""
    while isinstance(said, (dict, list)) and len(said) == 1:
        if isinstance(said, dict):
            key, said = next(iter(said.items()))
            yield key
        else:
            said = said[0]

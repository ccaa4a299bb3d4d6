"""CSV: a directory with a file for each table, or one table alone as a stream.

The header has the columns' names. A cell is in its signal's unit, as short as is exact, a bit 0 or
1, and what is unknown is empty. `about.json` beside the tables says what else is known.
"""

import csv
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpuwatch.extract import Extract
from gpuwatch.sheet import Cells, Field, Type, put_sheets, write_about


class Csv:
    """Writes text."""

    name = "csv"

    def write(self, extract: Extract, output: Path) -> None:
        """Make the directory."""
        output.mkdir()
        with ExitStack() as files:

            def begun(name: str) -> IO[str]:
                path = output / f"{name}.csv"
                return files.enter_context(path.open("w", encoding="utf-8", newline=""))

            write_about(put_sheets(extract, _Sheets(begun)), output)

    def stream(self, extract: Extract, output: IO[str]) -> None:
        """Write the one table of an extract that has no more."""
        put_sheets(extract, _Sheets(lambda _: output))


class _Sheets:
    """Tables as text; `begun` gives the file for a table."""

    def __init__(self, begun: Callable[[str], IO[str]]) -> None:
        self._begun = begun
        self._rows: dict[str, Callable[[Any], Any]] = {}
        self._types: dict[str, list[Type]] = {}

    def begin(self, name: str, fields: Sequence[Field]) -> None:
        writer = csv.writer(self._begun(name), lineterminator="\n")
        writer.writerow([field.name for field in fields])
        self._rows[name] = writer.writerows
        self._types[name] = [field.type for field in fields]

    def add(self, name: str, cells: Sequence[Cells]) -> None:
        texts = map(_texts, self._types[name], cells)
        self._rows[name](zip(*texts, strict=True))


def _texts(kind: Type, cells: Cells) -> list[Any]:
    """Return cells as csv writes them; None is empty."""
    values, known = cells
    texts: list[Any]
    if kind == "time":
        texts = np.datetime_as_string(values.view("M8[ns]"), timezone="UTC").tolist()
    elif kind == "float32":
        texts = values.astype(str).tolist()  # as short as is exact, which as a float64 it is not
    elif kind == "bool":
        texts = values.astype(np.int8).tolist()
    else:
        texts = values.tolist()
    if not known.all():
        texts = [text if there else None for text, there in zip(texts, known.tolist(), strict=True)]
    return texts

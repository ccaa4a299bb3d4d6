"""The exports. To add one: a file in this folder with a class as below, and its name here.

The class of `parquet` is `Parquet`. Only the export that is called is imported, with its library.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gpuwatch.extract import Extract

EXPORTS = ("parquet", "csv", "perfetto")


class Export(Protocol):
    """One format."""

    name: str

    def write(self, extract: "Extract", output: Path) -> None:
        """Make the file or the directory `output`, which is not there yet, of all of the extract.

        May leave a part of it behind when it raises; OSError on a full disk. Raises ConfigError if
        the format's library is not installed.
        """


def load(name: str) -> Export:
    """Return an export of the list."""
    module = importlib.import_module(f"gpuwatch.exports.{name}")
    export: Export = getattr(module, name.capitalize())()
    return export

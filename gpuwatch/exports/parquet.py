"""Apache Parquet: a directory with a file for each table, each cell as exact as it was read.

A gauge is float32, a counter int64 (float64 in its unit, where the hardware counts in another), a
bit set int64 and beside it a boolean for each declared bit; unknown is null. A column's metadata
say its unit and what else is known of it, those of the file where it is from; `about.json` beside
the tables says all the rest.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpuwatch.errors import ConfigError
from gpuwatch.extract import Extract
from gpuwatch.sheet import Cells, Field, put_sheets, write_about

CELLS_KEPT = 4_000_000  # of all tables, before they are written: 32 MB at most
FILE_KEYS = ("sort", "file", "gpuwatch", "host", "boot_id")


class Parquet:
    """Writes tables by pyarrow, which the extra `export` brings."""

    name = "parquet"

    def write(self, extract: Extract, output: Path) -> None:
        """Make the directory."""
        try:
            from pyarrow import parquet  # noqa: F401 - to be told before anything is made
        except ImportError as error:
            raise ConfigError(
                "--to parquet: pyarrow is missing:"
                f" {sys.executable} -m pip install 'gpuwatch[export]'"
            ) from error
        output.mkdir()
        about = extract.about()
        files = _Files(output, {key: json.dumps(about[key]) for key in FILE_KEYS})
        try:
            write_about(put_sheets(extract, files), output)
            files.finish()
        finally:
            files.close()


class _Files:
    """The files of one export; rows wait until there are enough for a row group."""

    def __init__(self, output: Path, about: Mapping[str, str]) -> None:
        self._output = output
        self._about = about
        self._files: dict[str, _File] = {}
        self._kept = 0

    def begin(self, name: str, fields: Sequence[Field]) -> None:
        self._files[name] = _File(self._output / f"{name}.parquet", fields, self._about)

    def add(self, name: str, cells: Sequence[Cells]) -> None:
        self._files[name].add(cells)
        self._kept += len(cells) * len(cells[0].values)
        if self._kept > CELLS_KEPT:
            self._flush()

    def finish(self) -> None:
        self._flush()
        for file in self._files.values():
            file.finish()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _flush(self) -> None:
        for file in self._files.values():
            file.flush()
        self._kept = 0


class _File:
    """One table's file. Raises OSError."""

    def __init__(self, path: Path, fields: Sequence[Field], about: Mapping[str, str]) -> None:
        import pyarrow
        from pyarrow import parquet

        types = {
            "time": pyarrow.timestamp("ns", tz="UTC"),
            "int64": pyarrow.int64(),
            "float32": pyarrow.float32(),
            "float64": pyarrow.float64(),
            "bool": pyarrow.bool_(),
            "text": pyarrow.string(),
        }
        self._schema = pyarrow.schema(
            [pyarrow.field(name, types[kind], metadata=dict(told)) for name, kind, told in fields],
            metadata=dict(about),
        )
        self._batches: list[pyarrow.RecordBatch] = []
        self._file = path.open("wb")
        # What rises with each row is small as differences, what stays as it is as a dictionary.
        rising = [name for name, kind, _ in fields if kind in ("time", "int64")]
        self._writer = parquet.ParquetWriter(
            self._file,
            self._schema,
            compression="zstd",
            use_dictionary=[name for name, *_ in fields if name not in rising],
            column_encoding=dict.fromkeys(rising, "DELTA_BINARY_PACKED"),
        )

    def add(self, cells: Sequence[Cells]) -> None:
        import pyarrow

        arrays = [
            pyarrow.array(values, field.type, mask=None if known.all() else ~known)
            for field, (values, known) in zip(self._schema, cells, strict=True)
        ]
        self._batches.append(pyarrow.record_batch(arrays, schema=self._schema))

    def flush(self) -> None:
        import pyarrow

        if self._batches:
            self._writer.write_table(pyarrow.Table.from_batches(self._batches))
            self._batches = []

    def finish(self) -> None:
        self._writer.close()
        self._file.close()

    def close(self) -> None:
        if not self._file.closed:  # the disk is full, which was told
            self._writer.is_open = False  # else it would go on writing when it is collected
            with suppress(OSError):
                self._file.close()

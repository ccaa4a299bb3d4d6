"""What exports cost: bytes a sample and rows a second, against the recording or history itself.

    python benchmarks/export.py [RECORDING or HISTORY …]

A sample is a cell of a row, known or not. Each format is written three times into memory, the
fastest counts; CPU time, so that other work on the machine matters little.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from gpuwatch.commands.export import opened
from gpuwatch.exports import EXPORTS, load
from gpuwatch.extract import Choice
from gpuwatch.paths import BUNDLED_RECORDING

ROUNDS = 3


def size(path):
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def cells(path):
    """Return how many rows and samples there are."""
    extract = opened(path, Choice())
    rows = samples = 0
    for part in extract.rows():
        rows += len(part.time_ns)
        samples += len(part.time_ns) * len(part.cells)
    return rows, samples


def written(path, name, place):
    """Return the CPU seconds that an export takes, and its bytes."""
    output = place / name
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        load(name).write(opened(path, Choice()), output)
        seconds.append(time.process_time() - start)
        found = size(output)
        if output.is_dir():
            shutil.rmtree(output)
        else:
            output.unlink()
    return min(seconds), found


def main():
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[BUNDLED_RECORDING])
    for path in parser.parse_args().paths:
        rows, samples = cells(path)
        print(f"{path}: {rows} rows, {samples} samples, {size(path) / samples:.2f} bytes a sample")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            for name in EXPORTS:
                seconds, found = written(path, name, Path(place))
                print(
                    f"  {name}: {found / samples:.2f} bytes a sample,"
                    f" {rows / seconds / 1e3:.0f} thousand rows/s,"
                    f" {samples / seconds / 1e6:.2f} million samples/s"
                )


if __name__ == "__main__":
    main()

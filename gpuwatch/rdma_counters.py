"""Which counters of the table a port has, and how each is read."""

import errno
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.count import Count
from gpuwatch.network_signals import PORT_COUNTERS, PortCounter
from gpuwatch.rdma_ports import RdmaPort

BYTES_OF_A_FILE = 64
NO_COUNT = 2**61  # nothing counts so far: all ones, say, is what a device that is gone answers
REPRESENTOR = "vport_"  # what mlx5 puts before a counter's name in switchdev mode
# Answers of files that a device simply does not have.
ABSENT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES})


@dataclass(slots=True)
class Cell:
    """A counter being read: held files whose numbers are added, or places in netlink's answer.

    `pma` says that the port itself counts, by the InfiniBand performance management class.
    """

    counter: PortCounter
    count: Count
    pma: bool = False
    files: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    def take(self, answer: Sequence[int]) -> int:
        """Read and return the count; raises OSError, or ValueError if it is none."""
        raw = 0
        for file in self.files:
            raw += int(os.pread(file, BYTES_OF_A_FILE, 0))
        for place in self.places:
            raw += answer[place]
        if not 0 <= raw < NO_COUNT:
            raise ValueError(f"{raw} is no count")
        return self.count.take(raw)

    def close(self) -> None:
        """Let go of the files."""
        for file in self.files:
            os.close(file)
        self.files = ()


def cells(
    port: RdmaPort,
    asked: Sequence[str],
    counts: dict[str, Count],
    errors: Counter[str],
) -> list[Cell]:
    """Return the counters that the port has, in the order of the table, with their files open.

    `asked` are the names that netlink gives. `counts` has those of an earlier opening and gets the
    new ones. A file that cannot be read is left out and counted in `errors`.
    """
    pma = _files(port.path / "counters")
    hw: dict[str, Path] = {}
    if len(_files(port.path.parent)) == 1:  # EFA keeps some with the device
        hw |= _files(port.device_path / "hw_counters")
    hw |= _files(port.path / "hw_counters")
    places = {name.removeprefix(REPRESENTOR): place for place, name in enumerate(asked)}
    found = []
    for counter in PORT_COUNTERS:
        count = counts.get(counter.signal.name) or _count(counter, counter.pma in pma)
        if counter.pma in pma:
            cell = _opened(counter, count, [pma[counter.pma]], errors)
        elif counter.tells != "bytes" and (names := _first(counter, places)):
            cell = Cell(counter, count, places=tuple(places[name] for name in names))
        elif names := _first(counter, hw):
            cell = _opened(counter, count, [hw[name] for name in names], errors)
        else:
            continue
        counts[counter.signal.name] = count
        found.append(cell)
    return found


def name_of(fault: OSError) -> str:
    """Return the name of an error as the kernel's headers have it."""
    return errno.errorcode.get(fault.errno or 0, "EIO")


def _files(folder: Path) -> dict[str, Path]:
    """Return what a folder holds by name; nothing if there is none."""
    try:
        return {path.name.removeprefix(REPRESENTOR): path for path in folder.iterdir()}
    except OSError:
        return {}


def _first(counter: PortCounter, known: Mapping[str, object]) -> tuple[str, ...]:
    wanted: Iterable[tuple[str, ...]] = counter.names
    return next((names for names in wanted if known.keys() >= set(names)), ())


def _count(counter: PortCounter, pma: bool) -> Count:
    if pma:
        return Count(counter.pma_bits, counter.pma_bits < 64, counter.factor)
    return Count(counter.bits)


def _opened(
    counter: PortCounter, count: Count, paths: Sequence[Path], errors: Counter[str]
) -> Cell:
    """Return a cell whose files answer, else one without files, which stays unknown."""
    cell = Cell(counter, count, counter.pma == paths[0].name)
    try:
        for path in paths:
            cell.files += (os.open(path, os.O_RDONLY | os.O_CLOEXEC),)
        for file in cell.files:
            int(os.pread(file, BYTES_OF_A_FILE, 0))
    except OSError as fault:
        cell.close()
        if fault.errno not in ABSENT:
            errors[name_of(fault)] += 1
    except ValueError:  # N/A (no PMA)
        cell.close()
    return cell

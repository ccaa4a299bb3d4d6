"""Which CUPTI library to load: of those installed, the newest that the driver can take.

CUPTI must be of the driver's CUDA major version, and of no newer minor one: 13.4 on a driver for
13.0 ended in a segmentation fault.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gpuwatch.errors import SourceUnsupported

OLDEST = (12, 6)  # PM sampling came with it
TOOLKITS = Path("/usr/local")


class Library(NamedTuple):
    """A library file and the CUDA version that it belongs to."""

    version: tuple[int, int]
    path: Path

    @property
    def name(self) -> str:
        """Its version as people write it."""
        return ".".join(map(str, self.version))


def wheels(sites: Iterable[str]) -> Iterator[Library]:
    """Yield those that pip installed, as nvidia-cuda-cupti or nvidia-cuda-cupti-cu12."""
    for site in map(Path, dict.fromkeys(sites)):
        for about in site.glob("nvidia_cuda_cupti*.dist-info"):
            version = _version(about.name.partition("-")[2])
            for path in site.glob(f"nvidia/*/lib/libcupti.so.{version[0]}"):
                yield Library(version, path)


def toolkits(root: Path = TOOLKITS) -> Iterator[Library]:
    """Yield those of the CUDA toolkits below `root`."""
    for toolkit in root.glob("cuda*"):
        try:
            told = json.loads((toolkit / "version.json").read_text())
            version = _version(told["cuda"]["version"])
        except (OSError, ValueError, KeyError, TypeError):
            version = _version(toolkit.resolve().name)
        for path in toolkit.glob(f"extras/CUPTI/lib64/libcupti.so.{version[0]}"):
            yield Library(version, path)


def choose(driver: tuple[int, int], found: Iterable[Library]) -> Library:
    """Return the newest library that a driver for this CUDA version can take.

    Raises SourceUnsupported with what to install if there is none.
    """
    found = list(found)
    fitting = [one for one in found if one.version[0] == driver[0] and one.version <= driver]
    best = max((one for one in fitting if one.version >= OLDEST), default=None)
    if best is not None:
        return best
    wanted = f"{driver[0]}.{driver[1]}"
    if driver < OLDEST:
        raise SourceUnsupported(f"pm: the driver knows CUDA {wanted}: update it to 560 or newer")
    suffix = "" if driver[0] > 12 else f"-cu{driver[0]}"
    fix = f"pip install 'gpuwatch[pm]' or 'nvidia-cuda-cupti{suffix}=={wanted}.*'"
    if not found:
        raise SourceUnsupported(f"pm: no CUPTI library: {fix}")
    others = ", ".join(sorted({one.name for one in found}))
    raise SourceUnsupported(
        f"pm: CUPTI {others} does not fit a driver for CUDA {wanted}, which takes {driver[0]}.0 to"
        f" {wanted}: {fix}"
    )


def _version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a text, (0, 0) if it has none."""
    numbers = re.search(r"(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)

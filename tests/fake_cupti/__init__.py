"""A fake CUPTI: a small C library that samples GPUs as a script says, also in place of libcuda.

    fake = Fake(directory, ["0000:1b:00.0"])
    fake.say(f"result cuptiPmSamplingEnable {INSUFFICIENT_PRIVILEGES}")

A line of the script is a key with its values, and the last of a kind holds:

    driver 13000             the CUDA version that libcuda tells
    api 130001               the version that CUPTI tells
    chip GH100               the name of every GPU's chip
    gpu 0000:1b:00.0         a GPU: they are numbered in the order of these lines
    rate METRIC 1e9          a metric that grows by so much a second
    level METRIC 50          a metric that stays the same
    absent METRIC            one that the chip does not have
    passes METRIC 2          one that takes more than one pass
    record 4096              bytes of a sample in the hardware's buffer
    sysclk 1.4e9             the sys clock, whose cycles make intervals where time does not
    hole SINCE SECONDS       no samples from that wall time on, for so long
    result FUNCTION CODE     what a function answers; a GPU's number may follow
    hang FUNCTION 1          it does not return for that GPU
    moved -0.5 SINCE         stamps are so many seconds from the wall clock, since that wall time
    crash FUNCTION           a segmentation fault in it; "load" is when CUPTI is loaded
"""

import fcntl
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpuwatch.pm_metrics import METRICS

BUSY, INSUFFICIENT_PRIVILEGES, MIG, UNKNOWN = 26, 35, 43, 999
SOURCE = Path(__file__).parent / "fake_cupti.c"
FLAGS = ("-std=gnu17", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")

# What the metrics are by default: bytes and sectors a second, else as they are.
RATES = {
    "dram__bytes_read.sum": 1e12,
    "dram__bytes_write.sum": 5e11,
    "nvlrx__bytes_data_user.sum": 1.7e11,
    "nvltx__bytes_data_user.sum": 8.5e10,
    "nvlrx__bytes.sum": 2e11,
    "nvltx__bytes.sum": 1e11,
    "pcie__read_bytes.sum": 5e10,
    "pcie__write_bytes.sum": 2e10,
    "lts__t_sectors.sum": 1e11,
}
LEVELS = {"gpc__cycles_elapsed.avg.per_second": 1.755e9}


class Fake:
    """The two libraries and their script, in a directory of their own."""

    def __init__(self, directory: Path, gpus: Iterable[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.script = directory / "script"
        self.library = directory / "libcupti.so.13"
        builds = []
        for name, extra in (("libcuda.so.1", ()), (self.library.name, ("-DCUPTI",))):
            flags = (*FLAGS, *extra, f"-Wl,-soname,{name}")
            builds.append(subprocess.Popen(["cc", *flags, "-o", directory / name, SOURCE]))
        assert [build.wait() for build in builds] == [0, 0]
        self._start = [f"gpu {gpu}" for gpu in gpus]
        for metric in METRICS:
            rate, level = RATES.get(metric.name), LEVELS.get(metric.name, 50)
            self._start.append(
                f"rate {metric.name} {rate}" if rate else f"level {metric.name} {level}"
            )
        self.heal()

    def heal(self, *lines: str) -> None:
        """Have all be as at the beginning, but for these lines."""
        self.lines = [*self._start, *lines]
        self._write()

    def say(self, *lines: str) -> None:
        """Add lines to the script."""
        self.lines += lines
        self._write()

    def _write(self) -> None:
        new = self.script.with_suffix(".new")
        new.write_text("\n".join(self.lines) + "\n")
        new.replace(self.script)

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return an environment in which programs find the fake libcuda."""
        path = f"{self.directory}:{base.get('LD_LIBRARY_PATH', '')}"
        return {**base, "FAKE_CUPTI_SCRIPT": str(self.script), "LD_LIBRARY_PATH": path}

    def held(self, gpu: int = 0) -> bool:
        """Say whether a program has the counters of a GPU."""
        with self._lock(gpu).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    @contextmanager
    def rival(self, gpu: int = 0) -> Iterator[None]:
        """Have another profiler hold a GPU's counters meanwhile."""
        with self._lock(gpu).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _lock(self, gpu: int) -> Path:
        return self.script.with_name(f"{self.script.name}.gpu{gpu}.lock")

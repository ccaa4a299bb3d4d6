"""What shows whether a daemon went on as if nothing had happened: totals, and times of reads."""

import threading
from itertools import pairwise

from running import Running

from gpuwatch.ring import RingReader
from gpuwatch.tmpfs import ring_directory


class Watch:
    """Scrapes all the time; `fell` are the totals that ever were less than before."""

    def __init__(self, running: Running) -> None:
        self.fell: list[str] = []
        self._running = running
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        before: dict[str, float] = {}
        while not self._end.wait(0.2):
            page = self._running.scrape()
            totals = {name: value for name, value in page.items() if "_total" in name}
            self.fell += [name for name, value in totals.items() if value < before.get(name, 0)]
            before.update(totals)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def rows(running: Running, duty: str, group: str) -> list[tuple[int, int]]:
    """Return time and due time of each row of a group, over all its rings, in nanoseconds."""
    found = []
    directory = ring_directory(running.runtime)
    paths = [*directory.glob(f"{duty}.*.{group}.ring"), *directory.glob(f"{duty}.*.{group}~*.ring")]
    for path in paths:
        reader = RingReader(path)
        data = memoryview(reader.read(0)[1])
        for start in range(0, len(data), reader.row_bytes):
            time_ns = data[start : start + 8].cast("q")[0]
            late = data[start + 8 : start + 12].cast("f")[0]
            if late == late:  # else the ring ended
                found.append((time_ns, time_ns - round(late * 1e9)))
        reader.close()
    return sorted(found)


def assert_kept_its_time(found: list[tuple[int, int]], period_ns: int) -> None:
    """Each row was due a whole number of periods after the one before."""
    steps = [later - earlier for (_, earlier), (_, later) in pairwise(found)]
    assert steps
    assert all(abs(step - period_ns * round(step / period_ns)) < 100_000 for step in steps)

"""How long a tick's totals, its metrics page and the page's compression take.

Run: python benchmarks/exposition.py. The last column is the share of one core that the totals take
at four ticks a second; page and compression are made only when a scrape asks for them.
"""

import gzip
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from populated import FIRST_TICK, snapshot, tick

from gpuwatch.clock import SECOND_NS
from gpuwatch.exposition import Exposition
from gpuwatch.window import TICK_NS

ROUNDS = 200
GPUS = (8, 40)  # 40 GPUs have about 3 000 series, as many as a full default page may have


def milliseconds(calls):
    """Return the median time of the calls."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def measure(count):
    """Return the line of that many GPUs."""
    shot, exposition = snapshot(count), Exposition()
    page = exposition.render(shot)
    series = sum(not line.startswith(b"#") for line in page.splitlines())
    ticks = [tick(FIRST_TICK + 2 + index, count) for index in range(ROUNDS)]
    add = milliseconds([partial(shot.totals.add, one) for one in ticks])
    render = milliseconds([partial(exposition.render, shot)] * ROUNDS)
    squeeze = milliseconds([partial(gzip.compress, page, 1, mtime=0)] * ROUNDS)
    share = add / (TICK_NS / SECOND_NS * 1e3)
    return (
        f"{count:4} {series:6} {len(page):7} {add:10.2f} {render:8.2f} {squeeze:8.2f} {share:11.1%}"
    )


def main():
    """Print one line per size."""
    print("gpus series   bytes  totals_ms  page_ms  gzip_ms  core_share")
    for count in GPUS:
        print(measure(count))


if __name__ == "__main__":
    main()

"""The sys clock of a GPU that samples by its cycles: how many cycles make an interval of time.

The clock falls while a GPU is idle, and intervals become longer then: such samples are right, and
tell of idle time. So an interval has the wanted length at the fastest clock seen of late, and is
set anew only when the GPU works at another one.
"""

from collections.abc import Sequence

from gpuwatch.clock import SECOND_NS
from gpuwatch.pm_session import Sample

GUESS_HERTZ = 1.4e9
# No slower clock is taken for that of work: what was set by an idle one would be far too short.
IDLE_HERTZ = 0.7e9
TOLERANCE = 1.2  # of the wanted interval
PATIENCE_NS = 600 * SECOND_NS  # a clock that is slower for so long is the one of work
FASTEST_HERTZ = 4e9  # no clock is faster: such samples tell nothing of it
FEWEST_SAMPLES = 20
FAST = 0.1  # a tenth of the samples are shorter than what is taken for the shortest


class SysClock:
    """The clock that intervals go by, in `hertz`."""

    def __init__(self) -> None:
        self.hertz = GUESS_HERTZ
        self._fastest = 0.0
        self._since_ns = 0

    def look(self, cycles: int, samples: Sequence[Sample], now_ns: int) -> bool:
        """Take in samples of so many cycles each; say whether intervals are to be set anew."""
        if len(samples) < FEWEST_SAMPLES:
            return False
        spans = sorted(sample.end_ns - sample.start_ns for sample in samples)
        fastest = cycles * SECOND_NS / max(1, spans[int(FAST * len(spans))])
        if fastest > FASTEST_HERTZ:
            return False
        self._fastest = max(self._fastest, fastest, IDLE_HERTZ)
        self._since_ns = self._since_ns or now_ns
        faster = fastest > self.hertz * TOLERANCE
        if not faster and now_ns - self._since_ns < PATIENCE_NS:
            return False
        anew = faster or self._fastest * TOLERANCE < self.hertz
        if anew:
            self.hertz = self._fastest
        self._fastest, self._since_ns = 0.0, now_ns
        return anew

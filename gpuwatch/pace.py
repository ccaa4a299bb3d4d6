"""The pace: how often to read what costs time, chosen from what reading it took."""

from collections.abc import Sequence

from gpuwatch.clock import SECOND_NS

DUTY = 0.01  # of the time may be spent in reads
ROOM = 0.8  # a shorter period must need no more than this share of that
LOOK_NS = 10 * SECOND_NS
ENOUGH = 20  # reads before anything is decided


class Pace:
    """Chooses one of `periods_ns`, ascending; begins with `start_ns`.

    A period must be long enough for the mean read, and any but the longest is only for reads that
    do not take long: the 99th percentile at most `read_ns`, if given.
    """

    def __init__(
        self, periods_ns: Sequence[int], start_ns: int, read_ns: int | None = None
    ) -> None:
        self.period_ns = start_ns
        self._periods_ns = periods_ns
        self._read_ns = read_ns
        self._costs: list[int] = []
        self._looked_ns = 0

    def add(self, cost_ns: int) -> None:
        """Note what a read took."""
        self._costs.append(cost_ns)

    def look(self, now_ns: int) -> str:
        """Choose anew every ten seconds; return why the period changed, "" if it did not."""
        costs = self._costs
        if now_ns - self._looked_ns < LOOK_NS or len(costs) < ENOUGH:
            return ""
        self._looked_ns, self._costs = now_ns, []
        mean = sum(costs) / len(costs)
        late = sorted(costs)[(len(costs) * 99 - 1) // 100]
        before = self.period_ns
        self.period_ns = self._chosen(mean, late)
        if self.period_ns == before:
            return ""
        return (
            f"every {self.period_ns / SECOND_NS:g} s instead of {before / SECOND_NS:g} s:"
            f" a read takes {mean / 1e6:.3g} ms, {late / 1e6:.3g} ms at the 99th percentile"
        )

    def _chosen(self, mean: float, late: int) -> int:
        slow = self._read_ns is not None and late > self._read_ns
        for period in self._periods_ns[:-1]:
            share = DUTY * (ROOM if period < self.period_ns else 1.0)
            if not slow and mean <= share * period:
                return period
        return self._periods_ns[-1]

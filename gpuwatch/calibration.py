"""Calibration: how often the hardware really renews a value, from the values themselves.

Drivers keep most values for 50 to 200 ms whatever the caller does. The time between two changes
is a whole number of refreshes, so the refresh is the smallest spacing that comes up again and
again. A value that never changes tells nothing: then the signal's declared refresh stands.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from gpuwatch.clock import MILLISECOND_NS

ENOUGH = 8  # changes before anything is said
KEPT = 64
SHORTEST_PERIODS = 2  # closer changes are two looks at one refresh in progress
CLUSTER = 1.3  # spacings up to this times the shortest of a cluster belong to it...
AGAIN = 3  # ...and so many, or a tenth of all, make one: single short ones are chance


class RefreshEstimator:
    """Watches the gauges of one ring."""

    def __init__(self, gauges: int) -> None:
        self._values = np.full(gauges, np.nan, np.float32)
        self._changed_ns = np.zeros(gauges, np.int64)
        self._spacings: list[deque[int]] = [deque(maxlen=KEPT) for _ in range(gauges)]

    def add(
        self, times_ns: npt.NDArray[np.int64], values: npt.NDArray[np.float32], period_ns: int
    ) -> None:
        """Take rows in order: times, and values by row and gauge (NaN unknown)."""
        if not values.size:
            return
        before = np.vstack([self._values, values[:-1]])
        changed = (values != before) & ~np.isnan(values) & ~np.isnan(before)
        self._values = values[-1].copy()
        for gauge in np.flatnonzero(changed.any(axis=0)):
            when = times_ns[changed[:, gauge]]
            last = self._changed_ns[gauge]
            spacings = np.diff(np.concatenate([[last], when]) if last else when)
            spacings = spacings[spacings >= SHORTEST_PERIODS * period_ns]
            self._spacings[gauge].extend(spacings.tolist())
            self._changed_ns[gauge] = when[-1]

    def refresh_ns(self, gauge: int) -> int | None:
        """Return the gauge's refresh to a millisecond, None while there were too few changes."""
        spacings = self._spacings[gauge]
        if len(spacings) < ENOUGH:
            return None
        array = np.sort(np.array(spacings))
        sizes = np.searchsorted(array, CLUSTER * array, side="right") - np.arange(len(array))
        first = int(np.argmax(sizes >= max(AGAIN, len(array) // 10)))
        milliseconds = round(float(array[first : first + sizes[first]].mean()) / MILLISECOND_NS)
        return max(1, milliseconds) * MILLISECOND_NS

"""The budget: how slowly a sampler must go to take no more of a core than it may."""

import math

STEP = 0.25  # periods grow and shrink by quarters of the planned one
ROOM = 0.8  # faster again only if that would use no more than this share of the budget
PATIENCE = 12  # looks in a row that must agree, so that a pause of the job changes nothing


class Budget:
    """Decides on the scale of a sampler's periods from its use of a core at each look."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._agreed = 0

    def scale(self, scale: float, used: float) -> float:
        """Return the scale to go on with; `used` is the share of a core taken at `scale`.

        At once slower when over the budget, a step faster when there was room for a minute.
        """
        if used > self.share:
            self._agreed = 0
            return max(math.ceil(scale * used / self.share / STEP) * STEP, scale + STEP)
        faster = max(1.0, scale - STEP)
        roomy = used * scale / faster < ROOM * self.share
        self._agreed = self._agreed + 1 if scale > 1 and roomy else 0
        if self._agreed < PATIENCE:
            return scale
        self._agreed = 0
        return faster

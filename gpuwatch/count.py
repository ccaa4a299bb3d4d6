"""A count that only grows, made of a hardware counter that wraps, sticks or is reset.

What the hardware shows first is where the count begins, so it is the hardware's own number until
that one comes round or is reset.
"""

from gpuwatch.signals import UNKNOWN_INTEGER

WRAP_SHARE = 16  # a wrap adds at most this part of the range; a greater fall is a reset
INT64 = 2**63 - 1


class Count:
    """Exact increases of one counter of `bits`.

    `saturates`: it stops at all ones, else it wraps. `factor`: what one step stands for.
    """

    __slots__ = ("_factor", "_full", "_raw", "_saturates", "resets", "total")

    def __init__(self, bits: int = 64, saturates: bool = False, factor: int = 1) -> None:
        self.total = UNKNOWN_INTEGER
        self.resets = 0
        self._full = 2**bits - 1
        self._saturates = saturates
        self._factor = factor
        self._raw: int | None = None

    def take(self, raw: int) -> int:
        """Return the count now that the hardware shows `raw`."""
        before, self._raw = self._raw, raw
        if before is None:
            if self.total == UNKNOWN_INTEGER:
                self.total = raw * self._factor & INT64
            return self.total
        rise = raw - before
        if rise < 0:
            wrapped = rise + self._full + 1
            if not self._saturates and 0 <= wrapped <= self._full // WRAP_SHARE:
                rise = wrapped
            else:
                rise = raw
                self.resets += 1
        self.total = self.total + rise * self._factor & INT64
        return self.total

    @property
    def saturated(self) -> bool:
        """Whether the hardware has stopped counting."""
        return self._saturates and self._raw is not None and self._raw >= self._full

    def renew(self) -> None:
        """Go on from whatever the hardware shows next: its device was made anew."""
        self._raw = None

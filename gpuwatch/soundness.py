"""Soundness: whether a GPU computes what it should, from results that were right or wrong.

One wrong result is taken again at once, up to three times; the second within a week confirms it,
for a sound GPU makes none. Right results in a row end it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

RETESTS = 3
CONFIRM_SECONDS = 7 * 86_400.0
SOUND = 4  # right results in a row after the last wrong one


@dataclass(slots=True)
class Soundness:
    """What is known of one GPU; times are unix seconds."""

    wrong: list[float] = field(default_factory=list)  # of the last week before the newest
    sound: int = 0  # right results since

    def push(self, time: float, *, right: bool) -> None:
        """Take in the next result."""
        if right:
            self.sound += 1
        else:
            self.wrong = [*(one for one in self.wrong if time - one < CONFIRM_SECONDS), time]
            self.sound = 0

    @classmethod
    def of(cls, results: Iterable[tuple[float, bool]]) -> "Soundness":
        """Return what results say, by time and whether they were right."""
        found = cls()
        for time, right in results:
            found.push(time, right=right)
        return found

    @property
    def confirmed(self) -> bool:
        """Whether the GPU computes wrong results, as far as is known."""
        return len(self.wrong) > 1 and self.sound < SOUND

    @property
    def suspect(self) -> bool:
        """Whether a wrong result waits to be confirmed."""
        return len(self.wrong) == 1 and self.sound < RETESTS

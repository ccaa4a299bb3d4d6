"""Soundness: whether a GPU computes what it should, from results that were right or wrong.

One wrong result is taken again at once, up to three times; the second within a week confirms it,
for a sound GPU makes none. Right results in a row end it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RETESTS = 3
CONFIRM_SECONDS = 7 * 86_400.0
SOUND = 4  # right results in a row after the last wrong one


# An entity, a GPU or the host; and of the host between which GPUs, by their numbers, "" unknown.
Computer = tuple[Any, str]


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


class Computers:
    """What is `known` of all that computes; right sums of GPUs count for each part of them too."""

    def __init__(self, results: Mapping[Computer, Sequence[tuple[float, bool]]]) -> None:
        self.known: dict[Computer, Soundness] = {}
        for one, own in results.items():
            around = (found for other, found in results.items() if _is_part(one, other))
            rights = [result for found in around for result in found if result[1]]
            self.known[one] = Soundness.of(sorted([*own, *rights]))

    def push(self, computer: Computer, time: float, *, right: bool) -> Soundness:
        """Take in the next result of one; return what is known of it then."""
        found = self.known.setdefault(computer, Soundness())
        found.push(time, right=right)
        for other, soundness in self.known.items() if right else ():
            if _is_part(other, computer):
                soundness.push(time, right=True)
        return found


def numbers(gpu_set: str) -> set[str]:
    """Return the numbers of some GPUs as they are written in an environment."""
    return set(filter(None, gpu_set.split(",")))


def _is_part(one: Computer, other: Computer) -> bool:
    return one[0] == other[0] and bool(one[1]) and numbers(one[1]) < numbers(other[1])

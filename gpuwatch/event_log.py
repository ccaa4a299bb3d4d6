"""Events that were told, kept within a number: a storm of one kind pushes out no other kind."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from gpuwatch.control import Message
from gpuwatch.signals import Event

EVENTS_KEPT = 1000
EVENTS_A_TURN = 32  # a socket holds some 150 that nobody has read yet


class EventLog:
    """The last events, numbered, in the order in which they came.

    Where there are more than `most`, the oldest goes of the name that most of them have.
    """

    def __init__(self, most: int = EVENTS_KEPT) -> None:
        self.sequence = 0
        self._most = most
        self._events: dict[int, Event] = {}
        self._numbers: dict[str, deque[int]] = {}  # by name of the event

    def add(self, event: Event) -> None:
        """Keep an event under the next number."""
        self.sequence += 1
        self._events[self.sequence] = event
        self._numbers.setdefault(event.name, deque()).append(self.sequence)
        if len(self._events) > self._most:
            name = max(self._numbers, key=lambda name: len(self._numbers[name]))
            del self._events[self._numbers[name].popleft()]
            if not self._numbers[name]:
                del self._numbers[name]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events.values())

    def __reversed__(self) -> Iterator[Event]:
        return reversed(self._events.values())

    def after(self, sequence: int) -> list[Message]:
        """Return the first kept events with a higher number, as messages."""
        if sequence >= self.sequence:
            return []
        later = (one for one in self._events.items() if one[0] > sequence)
        return [
            {"event": event.to_json(), "sequence": number}
            for number, event in islice(later, EVENTS_A_TURN)
        ]

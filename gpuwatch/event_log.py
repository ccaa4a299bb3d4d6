"""What a sampler has to tell, kept until every daemon has heard it."""

from collections import deque
from itertools import islice

from gpuwatch.control import Message
from gpuwatch.signals import Event

EVENTS_KEPT = 1000
EVENTS_A_TURN = 32  # a socket holds some 150 that nobody has read yet


class EventLog:
    """Events of this child, numbered, kept for a daemon that is restarted."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Event]] = deque(maxlen=EVENTS_KEPT)
        self.sequence = 0

    def add(self, event: Event) -> None:
        """Keep an event under the next number."""
        self.sequence += 1
        self._events.append((self.sequence, event))

    def after(self, sequence: int) -> list[Message]:
        """Return the first kept events with a higher number, as messages."""
        later = (one for one in self._events if one[0] > sequence)
        return [
            {"event": event.to_json(), "sequence": number}
            for number, event in islice(later, EVENTS_A_TURN)
        ]

"""Which of many events alike get a line in the log: a fault that storms must not fill it."""

from collections import Counter

from gpuwatch.clock import SECOND_NS
from gpuwatch.kernel_log import told
from gpuwatch.signals import Entity, Event

LINES_A_MINUTE = 5  # of the same event, entity and code
MINUTE_NS = 60 * SECOND_NS

Kind = tuple[str, Entity, str]


class Repeats:
    """Counts events of each kind, minute by minute."""

    def __init__(self) -> None:
        self._seen: Counter[Kind] = Counter()
        self._since_ns = 0

    def worth_a_line(self, event: Event) -> bool:
        """Count an event; say whether it is one of the first of its kind in this minute."""
        said = told(event.detail)
        kind = (event.name, event.entity, said.code if said else "")
        self._seen[kind] += 1
        return self._seen[kind] <= LINES_A_MINUTE

    def left_out(self, now_ns: int) -> list[str]:
        """Return, once a minute, a line for each kind that had more events than lines."""
        if now_ns - self._since_ns < MINUTE_NS:
            return []
        seen, self._seen, self._since_ns = self._seen, Counter(), now_ns
        return [
            f"{name}, {entity}: {f'{code}: ' if code else ''}{count - LINES_A_MINUTE} more"
            for (name, entity, code), count in seen.items()
            if count > LINES_A_MINUTE
        ]

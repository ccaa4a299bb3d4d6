"""Whether all free memory of each GPU keeps what is written there."""

from collections.abc import Iterator
from typing import Literal

from gpuwatch.appraisal import without_value
from gpuwatch.matter import Matter
from gpuwatch.verify import Finding, Node, entity

SECONDS = 60.0
START_SECONDS = 35.0  # until it writes, at most


class MemoryPatterns:
    """Patterns that are written everywhere, and read again, for a minute."""

    name = "memory_patterns"
    help = "whether all free memory keeps patterns that are written to it"
    phase: Literal["static", "load"] = "load"
    deep_only = True
    essential = False

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take, with so many GPUs."""
        return SECONDS + 50.0

    def run(self, node: Node) -> Iterator[Finding]:
        """Try all GPUs at once."""
        with node.session() as session:
            results = list(
                session.run(
                    "patterns",
                    at_once=len(node.gpus),
                    seconds=SECONDS,
                    longest_seconds=SECONDS + START_SECONDS,
                )
            )
        for one in results:
            if finding := without_value(one, self.name):
                yield finding
                continue
            told = one.told or {}
            tested = float(told.get("memory_bytes") or 0.0)
            measure = f"{told.get('patterns', 0)} patterns"
            matter = Matter(self.name, entity(one.gpu), measure, "bytes")
            yield matter.seen(tested, source="what was written").good()

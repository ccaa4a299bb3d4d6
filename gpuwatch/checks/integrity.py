"""Whether each GPU computes what it should, and all together sum up what they should: every bit."""

from collections.abc import Iterator
from typing import Literal

from gpuwatch.appraisal import without_value
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.load_check import TimeLeft, usable
from gpuwatch.matter import Matter
from gpuwatch.verify import Finding, Node, entity


class Integrity:
    """Exact products on each GPU, exact sums over all of them."""

    name = "integrity"
    help = "whether products and sums over the GPUs are right, bit by bit"
    phase: Literal["static", "load"] = "load"
    deep_only = False
    essential = True

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take, with so many GPUs."""
        return 60.0 if deep else 14.0 + gpus / 4

    def run(self, node: Node) -> Iterator[Finding | CanaryReading]:
        """Compute once: each result is compared ten times."""
        left = TimeLeft(self.bound_seconds(len(node.gpus), node.deep))
        with node.session() as session:
            results = list(session.run(self.name, longest_seconds=left.of_a_run))
        yield from usable(results)
        for one in results:
            measure = "sums" if one.gpu is None else "products"
            matter = Matter(self.name, entity(one.gpu), measure)
            yield without_value(one) or matter.seen("exact", "exact", "arithmetic").good()

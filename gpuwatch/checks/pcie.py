"""Whether each GPU is as well connected to the host as it should be.

The link is looked at while copies run: an idle one is slow on purpose.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from gpuwatch.appraisal import entity, measured
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.session import Result
from gpuwatch.slowness import RESEAT, link_of
from gpuwatch.verify import Finding, Node

FEW = 3  # of so many GPUs two may share one way to the host


class Pcie:
    """Copies to and from each GPU, and its link meanwhile."""

    name = "pcie"
    help = "bytes per second to and from each GPU, and its link under load"
    phase: Literal["static", "load"] = "load"
    deep_only = False
    essential = True

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take, with so many GPUs."""
        return 20.0 + 10 * gpus if deep else 10.0 + 2.25 * gpus

    def run(self, node: Node) -> Iterator[Finding | CanaryReading]:
        """Try GPUs alone, or two at once that are far from each other."""
        at_once = 1 if node.deep or len(node.gpus) <= FEW else 2
        yield from measured(node, self.name, at_once=at_once, more=links)


def links(node: Node, results: Sequence[Result]) -> Iterator[Finding]:
    """Yield how each link was at the end of the last copy."""
    last = {one.gpu: one for one in results if one.gpu is not None and one.seen}
    for number, one in last.items():
        about = next((gpu for gpu in node.gpus if gpu["gpu"] == number), {})
        link = link_of(one.seen[number], about)
        if link.generation is None and link.lanes is None:
            continue  # a virtual machine may hide it; the copies say enough
        yield Finding(
            name="pcie",
            entity=entity(number),
            verdict="FAIL" if link.narrow else "WARN" if link.slow else "PASS",
            measure="link",
            value=link.written(),
            expectation=link.limit_written(),
            source="GPU and slot",
            reason="the link runs slower than it could, under load" if link.less else "",
            cause="link" if link.less else "",
            next_step=RESEAT if link.less else "",
        )

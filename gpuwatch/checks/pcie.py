"""Whether each GPU is as well connected to the host as it should be.

The link is looked at while copies run: an idle one is slow on purpose.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from gpuwatch.canary_reading import CanaryReading
from gpuwatch.checks import pcie_link
from gpuwatch.load_check import measured
from gpuwatch.session import Result
from gpuwatch.verify import Finding, Node, entity

QUICK_SECONDS, DEEP_SECONDS = 12.0, 40.0  # of one run, at most
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
        return 20.0 + 10 * gpus if deep else 12.0 + 1.5 * gpus

    def run(self, node: Node) -> Iterator[Finding | CanaryReading]:
        """Try GPUs alone, or two at once that are far from each other."""
        at_once = 1 if node.deep or len(node.gpus) <= FEW else 2
        seconds = self.bound_seconds(len(node.gpus), node.deep)
        longest = DEEP_SECONDS if node.deep else QUICK_SECONDS
        yield from measured(node, self.name, at_once, seconds, longest, more=links)


def links(node: Node, results: Sequence[Result]) -> Iterator[Finding]:
    """Yield how each link was by the end of the copies."""
    last = {one.gpu: one.seen[one.gpu] for one in results if one.gpu is not None and one.seen}
    for gpu in node.answering:
        seen = last.get(gpu["gpu"], {})
        generation, lanes = seen.get("pcie_generation"), seen.get("pcie_lanes")
        if generation or lanes:  # a virtual machine may hide it; the copies say enough
            link = replace(pcie_link.link(node, gpu), generation=generation, lanes=lanes)
            yield from pcie_link.findings(link, True, "pcie", entity(gpu["gpu"]))

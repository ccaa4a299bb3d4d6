"""Whether the memory of each GPU is as fast as that of such a card should be."""

from collections.abc import Iterator
from typing import Literal

from gpuwatch.canary_reading import CanaryReading
from gpuwatch.load_check import measured
from gpuwatch.verify import Finding, Node


class Memory:
    """A copy on the device, by model, siblings and baseline."""

    name = "memory"
    help = "bytes per second of the GPU's memory"
    phase: Literal["static", "load"] = "load"
    deep_only = False
    essential = True

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take, with so many GPUs."""
        return 30.0 + 4 * gpus if deep else 12.0 + gpus / 4

    def run(self, node: Node) -> Iterator[Finding | CanaryReading]:
        """Try all GPUs at once: that is how they are used."""
        gpus = len(node.gpus)
        seconds = self.bound_seconds(gpus, node.deep)
        yield from measured(node, self.name, gpus, seconds)

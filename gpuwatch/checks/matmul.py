"""Whether each GPU multiplies matrices as fast as such a card should, in each dtype."""

from collections.abc import Iterator
from typing import Literal

from gpuwatch.canary_reading import CanaryReading
from gpuwatch.load_check import measured
from gpuwatch.verify import Finding, Node


class Matmul:
    """Matrix multiplication, by model, siblings and baseline."""

    name = "matmul"
    help = "operations per second of matrix multiplication, in each dtype"
    phase: Literal["static", "load"] = "load"
    deep_only = False
    essential = True

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take, with so many GPUs."""
        return 30.0 + 6 * gpus if deep else 20.0 + gpus / 4

    def run(self, node: Node) -> Iterator[Finding | CanaryReading]:
        """Try all GPUs at once: that is how they are used."""
        gpus = len(node.gpus)
        seconds = self.bound_seconds(gpus, node.deep)
        yield from measured(node, self.name, gpus, seconds)

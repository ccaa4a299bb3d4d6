"""A static check: a function that looks at a node as plain data, and changes nothing."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from gpuwatch.lookup import text
from gpuwatch.verify import Facts, Finding, Node, entity


@dataclass(slots=True)
class StaticCheck:
    """A check of phase "static", as `verify.Check` has it; `look` finds."""

    name: str
    help: str
    look: Callable[[Node], Iterable[Finding]]
    essential: bool = False
    seconds: float = 2.0  # some milliseconds, but a file of a sick device may hang
    deep_only: bool = False
    phase: Literal["static", "load"] = "static"

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take."""
        return self.seconds

    def run(self, node: Node) -> Iterator[Finding]:
        """Yield what it finds."""
        yield from self.look(node)


def entity_of(gpu: Facts) -> str:
    """Return how findings name a GPU."""
    return entity(gpu.get("gpu"))


def name_of(gpu: Facts) -> str:
    """Return the name that a GPU tells, "" if it tells none."""
    return text(gpu, "name") or ""

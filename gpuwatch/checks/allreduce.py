"""Whether the GPUs sum up as fast as their links carry it, and by those links.

What is expected goes by model, number and algorithm. Of NVLinked GPUs that no table knows, half of
what the links carry is a floor that every healthy node passes; of those on PCIe alone a fifth, for
there the processors' root complex decides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from gpuwatch.appraisal import appraised, without_value
from gpuwatch.canary_reading import CanaryReading
from gpuwatch.load_check import TimeLeft, usable
from gpuwatch.lookup import count, number, tables, text
from gpuwatch.matter import Matter
from gpuwatch.session import Result
from gpuwatch.slowness import Why, why_slow
from gpuwatch.verify import Finding, Node

MIB = 1 << 20
MAIN = 256 * MIB  # of which figures are known
SWEEP = tuple(MIB * size for size in (1, 4, 16, 64, 256, 1024, 4096, 8192))
NVLINK_FLOOR = 40e9  # bytes per second of the bus: less, and NVLink is off
PCIE_FLOOR = 8e9
LINK_PART, PCIE_PART = 0.5, 0.2
LINK_BYTES_PER_SECOND = 25e9  # one way, of a link that does not tell: NVLink 2 to 4
LANE_BYTES_PER_SECOND = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # PCI-SIG, one way
THUMB_GPUS = 8
THUMB_PART, THUMB_BYTES = 0.9, 1 << 30


class Allreduce:
    """A sum over all GPUs: of 256 MiB, or of 1 MiB to 8 GiB if there is time."""

    name = "allreduce"
    help = "bus bandwidth of a sum over all GPUs, and by which links it goes"
    phase: Literal["static", "load"] = "load"
    deep_only = False
    essential = False

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take, with so many GPUs."""
        return 90.0 if deep else 17.0 + gpus / 4

    def run(self, node: Node) -> Iterator[Finding | CanaryReading]:
        """Run it once; judge 256 MiB, draw the rest."""
        left = TimeLeft(self.bound_seconds(len(node.gpus), node.deep))
        with node.session() as session:
            sizes = SWEEP if node.deep else ()
            results = list(session.run(self.name, sizes=sizes, longest_seconds=left.of_a_run))
        yield from usable(results)
        measured = []
        for one in results:
            if finding := without_value(one):
                yield finding
            elif one.reading is not None and one.reading.value is not None:
                measured.append((one, one.reading.size, one.reading.value))
        if not measured:
            return
        one, size, value = min(measured, key=lambda found: abs(found[1] - MAIN))
        curve = tuple((float(size), value) for _, size, value in measured)
        finding = next(appraised(node, [one]))
        if finding.verdict == "UNKNOWN" and size >= MAIN:
            finding = by_links(node, one, finding, value)
        yield replace(finding, curve=curve if len(curve) > 1 else ())
        yield from _transport(node, one)
        yield from _by_thumb(node, curve)


def nvlink_bytes_per_second(node: Node) -> float:
    """Return what the NVLinks of the worst GPU carry one way; 0 unless all pairs are joined."""
    joined = [text(pair, "peer", "nvlink") == "ok" for pair in node.pairs]
    if not joined or not all(joined):
        return 0.0
    return min(
        sum(
            number(link, "bytes_per_second") or LINK_BYTES_PER_SECOND
            for link in tables(gpu, "nvlinks") or ()
        )
        for gpu in node.answering
    )


def pcie_bytes_per_second(node: Node) -> float:
    """Return what the slowest PCIe link could carry one way; 0 if that is not known."""
    found = []
    for gpu in node.answering:
        lane = LANE_BYTES_PER_SECOND.get(count(gpu, "pcie", "generation_limit") or 0, 0.0)
        found.append(lane * (count(gpu, "pcie", "lanes_limit") or 0))
    return min(found, default=0.0)


def by_links(node: Node, one: Result, unknown: Finding, value: float) -> Finding:
    """Judge by what the links carry; `unknown` stays where nothing is known of them."""
    nvlink, pcie = nvlink_bytes_per_second(node), pcie_bytes_per_second(node)
    if not nvlink and not pcie:
        return unknown
    floor = LINK_PART * nvlink if nvlink else PCIE_PART * pcie
    source = "half of what NVLink carries" if nvlink else "a fifth of what PCIe carries"
    matter = Matter("allreduce", "host", unknown.measure, unknown.unit, noise=unknown.noise)
    matter = matter.seen(value, floor, source)
    if value >= floor:
        return matter.good()
    why = why_slow(node, one, ())
    return matter.judged(why.reason(1 - value / floor), why.cause, why.next_step, fatal=nvlink > 0)


def _transport(node: Node, one: Result) -> Iterator[Finding]:
    """Yield by what NCCL has joined the GPUs, if it told that."""
    names = [str(name) for name in (one.told or {}).get("transports") or ()]
    if not names:
        return
    linked = nvlink_bytes_per_second(node) > 0
    wrong = linked and any(name != "P2P" for name in names)
    why = why_slow(node, one, ()) if wrong else Why("", "", "")
    matter = Matter("allreduce", "host", "transport").seen(
        ", ".join(names), "P2P" if linked else None, "NVLink is there" if linked else ""
    )
    fault = why.text or "not all of it goes over NVLink"
    yield matter.judged(fault if wrong else "", why.cause, why.next_step, fatal=True)


def _by_thumb(node: Node, curve: Sequence[tuple[float, float]]) -> Iterator[Finding]:
    """Yield what the trade goes by."""
    best = max(value for _, value in curve)
    linked = nvlink_bytes_per_second(node)
    step = "look at nvidia-smi topo -m and nvidia-smi nvlink -s, and at NCCL_ in the environment"
    if len(node.gpus) >= THUMB_GPUS:
        floor = NVLINK_FLOOR if linked else PCIE_FLOOR
        kind = "NVLink is on" if linked else "of 8 GPUs on PCIe"
        matter = Matter("allreduce", "host", "floor", "bytes_per_second").by_thumb()
        fault = "less than any such node gives" if best < floor else ""
        matter = matter.seen(best, floor, f"rule of thumb: {kind}")
        yield matter.judged(fault, "link", step, fatal=True)
    large = [value for size, value in curve if size >= THUMB_BYTES]
    if large and linked:
        least = THUMB_PART * linked
        matter = Matter("allreduce", "host", "large sums", "bytes_per_second").by_thumb()
        fault = "less than 90 % of what the links carry; few GPUs need not reach it"
        matter = matter.seen(max(large), least, "rule of thumb: 90 % of the link")
        yield matter.judged(fault if max(large) < least else "", "link", step)

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
from gpuwatch.matter import Matter
from gpuwatch.session import Result
from gpuwatch.slowness import Why, why_slow
from gpuwatch.verify import Finding, Node, Verdict

MIB = 1 << 20
MAIN = 256 * MIB  # of which figures are known
SWEEP = tuple(MIB * size for size in (1, 4, 16, 64, 256, 1024, 4096, 8192))
NVLINK_FLOOR = 40e9  # bytes per second of the bus: less, and NVLink is off
PCIE_FLOOR = 8e9
LINK_PART, PCIE_PART = 0.5, 0.2
LANE_BYTES = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # PCI-SIG, one way
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


def nvlink_bytes(node: Node) -> float:
    """Return what the NVLinks of the worst GPU carry one way; 0 unless all pairs are joined."""
    pairs = [pair.get("peer") or {} for pair in node.pairs]
    if not pairs or any(peer.get("nvlink") != "ok" for peer in pairs):
        return 0.0
    return min(
        sum((link.get("bytes_per_second") or 25e9) for link in gpu.get("nvlinks") or ())
        for gpu in node.answering
    )


def pcie_bytes(node: Node) -> float:
    """Return what the slowest PCIe link could carry one way; 0 if that is not known."""
    found = []
    for gpu in node.answering:
        pcie = gpu.get("pcie") or {}
        lane = LANE_BYTES.get(pcie.get("generation_limit") or 0)
        found.append((lane or 0.0) * (pcie.get("lanes_limit") or 0))
    return min(found, default=0.0)


def by_links(node: Node, one: Result, unknown: Finding, value: float) -> Finding:
    """Judge by what the links carry; `unknown` stays where nothing is known of them."""
    links = nvlink_bytes(node)
    pcie = pcie_bytes(node)
    if not links and not pcie:
        return unknown
    floor = LINK_PART * links if links else PCIE_PART * pcie
    source = "half of what NVLink carries" if links else "a fifth of what PCIe carries"
    verdict: Verdict = "PASS" if value >= floor else "FAIL" if links else "WARN"
    finding = replace(
        unknown, verdict=verdict, expectation=floor, source=source, reason="", next_step=""
    )
    if verdict == "PASS":
        return finding
    why = why_slow(node, one, ())
    reason = f"{1 - value / floor:.1%} less than expected"
    return replace(
        finding,
        reason=f"{reason}: {why.text}" if why.text else reason,
        cause=why.cause,
        next_step=why.next_step,
    )


def _transport(node: Node, one: Result) -> Iterator[Finding]:
    """Yield by what NCCL has joined the GPUs, if it told that."""
    names = [str(name) for name in (one.told or {}).get("transports") or ()]
    if not names:
        return
    linked = nvlink_bytes(node) > 0
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
    linked = nvlink_bytes(node)
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

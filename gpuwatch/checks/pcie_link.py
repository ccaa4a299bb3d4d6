"""Whether each GPU's PCIe link is as wide and as fast as its slot should make it.

A GPU that does nothing lets its link down to generation 1, and that is fine: the check `pcie` has
it judged again, by `findings`, while it copies. What a virtual machine shows for a slot may be made
up, so a link is never held to be less than it is seen to do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gpuwatch import expected
from gpuwatch.lookup import count, text
from gpuwatch.matter import Matter
from gpuwatch.static_check import StaticCheck, entity_of, name_of
from gpuwatch.topology import own_link, slot_link
from gpuwatch.verify import Facts, Finding, Node

PASSTHROUGH = 1  # nvmlGpuVirtualizationMode_t
REPLAYS = 100  # since the driver was loaded; a sound link has a few after hours
RESEAT = "reseat the card and its riser; look for PCIe errors in the kernel log"


@dataclass(frozen=True, slots=True)
class Link:
    """A GPU's link: now, at most by GPU and slot together, and at most by the GPU alone.

    None is not known; `wanted` is (generation, lanes) of a slot that does not hold the model back.
    `system` is the model if its link depends on the system that it is built into, else "".
    """

    generation: int | None
    lanes: int | None
    generation_limit: int | None = None
    lanes_limit: int | None = None
    generation_own: int | None = None
    lanes_own: int | None = None
    wanted: tuple[int, int] | None = None
    system: str = ""


def link(node: Node, gpu: Facts) -> Link:
    """Return the link of a GPU by what driver and kernel tell of it."""
    bus_id = text(gpu, "pci_bus_id") or "-"
    own = own_link(node.sysfs, bus_id)
    virtual = count(gpu, "modes", "virtualization") == PASSTHROUGH
    slot = None if virtual else slot_link(node.sysfs, bus_id)
    generation, lanes = count(gpu, "pcie", "generation"), count(gpu, "pcie", "lanes")
    model = expected.named(name_of(gpu))
    return Link(
        generation=generation,
        lanes=lanes,
        generation_limit=_least(
            generation, count(gpu, "pcie", "generation_limit"), slot and slot.generation
        ),
        lanes_limit=_least(lanes, count(gpu, "pcie", "lanes_limit"), slot and slot.lanes),
        generation_own=count(gpu, "pcie", "generation_own") or own.generation,
        lanes_own=own.lanes,
        wanted=model.board.pcie if model else None,
        system=model.model if model and model.board.pcie is None else "",
    )


def _least(now: int | None, *limits: int | None) -> int | None:
    """Return the lowest limit that is known, at least what is seen now."""
    known = [limit for limit in limits if limit]
    return max(min(known), now or 0) if known else None


def findings(link: Link, under_load: bool, name: str, entity: str) -> Iterator[Finding]:
    """Judge a link for the check `name`."""
    if link.system:
        yield Matter(name, entity, "lanes", "lanes").skipped(
            f"how {link.system} is linked to its host depends on the system",
            "compare the speed of copies with a node like it",
        )
    else:
        yield _width(link, under_load, Matter(name, entity, "lanes", "lanes"))
        yield _generation(link, under_load, Matter(name, entity, "generation"))


def _width(link: Link, under_load: bool, matter: Matter) -> Finding:
    now, slot = link.lanes, link.lanes_limit
    wanted = link.wanted[1] if link.wanted else link.lanes_own
    if not now:
        return matter.unread("how wide its PCIe link is")
    if wanted is None:
        return matter.seen(float(now)).unread("how many lanes it can have")
    matter = matter.seen(float(now), float(wanted), _source(link))
    if now >= wanted:
        return matter.good()
    if slot is not None and slot > now and under_load:
        fault = f"{now} lanes under load, where GPU and slot can do {slot}"
        return matter.bad(fault, "link", RESEAT)
    if slot is not None and slot > now:
        fault = f"{now} lanes now, where {slot} are possible; nobody uses the link now"
        return matter.odd(fault, "link", f"see the check pcie; if it is so there, {RESEAT}")
    return matter.bad(
        f"the slot gives {now} lanes, so copies take {wanted / now:.2g} times as long",
        "link",
        "use a slot of all lanes, look at risers and bifurcation; or reject the node",
    )


def _generation(link: Link, under_load: bool, matter: Matter) -> Finding:
    now, limit = link.generation, link.generation_limit
    wanted = link.wanted[0] if link.wanted else link.generation_own
    if not now:
        return matter.unread("which PCIe generation its link runs")
    if wanted is None:
        return matter.seen(float(now)).unread("which generation it can run")
    matter = matter.seen(float(now), float(wanted), _source(link))
    if now >= wanted:
        return matter.good()
    if limit is not None and limit < wanted:
        return matter.odd(
            f"the slot is of generation {limit}, so copies take {2 ** (wanted - limit)} times as"
            " long",
            "host",
            "look at the generation set in the BIOS, and at risers; or take another host",
        )
    if under_load:
        return matter.bad(f"the link runs generation {now} under load", "link", RESEAT)
    if limit is None:
        reason = "nobody uses the link, and what the slot can do is not told"
        return matter.skipped(reason, "see the check pcie")
    return matter.good("let down, as nobody uses it")


def _source(link: Link) -> str:
    return "data sheet" if link.wanted else "what the GPU itself can do"


def look(node: Node) -> Iterator[Finding]:
    """Judge the link of each GPU, and its count of replays."""
    for gpu in node.answering:
        yield from findings(link(node, gpu), False, "pcie_link", entity_of(gpu))
        yield _replays(gpu)


def _replays(gpu: Facts) -> Finding:
    matter = Matter("pcie_link", entity_of(gpu), "replays")
    replays = count(gpu, "pcie", "replays")
    if replays is None:
        step = "look for PCIe errors in the kernel log"
        return matter.skipped("the driver does not count them", step)
    fault = f"{replays} packets were sent again since the driver was loaded, maybe long ago"
    return matter.seen(float(replays), float(REPLAYS), "rule of thumb").judged(
        fault if replays > REPLAYS else "",
        "link",
        "verify again after some load, and compare; reseat the card if the count goes on",
    )


CHECK = StaticCheck("pcie_link", "whether PCIe links are as wide and fast as they should be", look)

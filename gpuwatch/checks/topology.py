"""How GPUs reach each other: the matrix of `nvidia-smi topo -m`, judged pair by pair.

SYS or PHB where the model has NVLink is the classic of a node that is not what it was sold as.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations

from gpuwatch import acs, expected
from gpuwatch.checks.nvlink import links_up
from gpuwatch.lookup import flag, look_up, tables, text
from gpuwatch.matter import Matter
from gpuwatch.static_check import StaticCheck, name_of
from gpuwatch.verify import Facts, Finding, Node

# As nvidia-smi writes nvmlGpuTopologyLevel_t.
WORDS = {
    "internal": "INT",
    "single": "PIX",
    "multiple": "PXB",
    "hostbridge": "PHB",
    "node": "NODE",
    "system": "SYS",
}
LISTED = 4  # pairs that are told one by one; more are told as one
FABRIC = (
    "start nvidia-fabricmanager and look at nvlink; if it stays, NVLink was switched off, or these"
    " are no SXM boards: reject the node"
)
PATHS = "switch ACS and IOMMU off in the BIOS, or set iommu=pt; in a virtual machine ask its host"


def look(node: Node) -> Iterator[Finding]:
    """Judge the way between each two GPUs, and whether they may use it."""
    gpus = {gpu.get("gpu"): gpu for gpu in node.answering}
    pairs = _pairs(node)
    wanted = list(combinations(gpus, 2))
    if not wanted:
        alone = "one GPU alone has no peer" if gpus else "no GPU answers"
        yield Matter("topology", "host").skipped(alone, "nothing" if gpus else "see identity")
        return
    cells = {pair: cell(gpus[pair[0]], gpus[pair[1]], pairs.get(pair, {})) for pair in wanted}
    yield _ways(gpus, cells)
    yield from _peers(gpus, {pair: pairs.get(pair, {}) for pair in wanted}, cells)
    yield from _redirected(node, cells)


def cell(one: Facts, other: Facts, pair: Facts) -> str:
    """Return the way between two GPUs as nvidia-smi writes it, "" if it is not known."""
    links = linked(one, other, pair)
    if links:
        return f"NV{links}"
    return "" if links is None else WORDS.get(text(pair, "topology") or "", "")


def linked(one: Facts, other: Facts, pair: Facts) -> int | None:
    """Return how many NVLinks join two GPUs, by switches or directly; None if not known."""
    ups = [links_up(gpu) for gpu in (one, other)]
    known = [up for up in ups if up is not None]
    if len(known) < len(ups):
        return None
    switched = [_to(gpu, "switch") for gpu in (one, other)]
    if not all(known) or all(switched):
        return min(known) and min(switched)
    address = _short(text(other, "pci_bus_id"))
    links = [link for link in tables(one, "nvlinks") or () if flag(link, "up")]
    direct = sum(_short(text(link, "remote_pci_bus_id")) == address != "" for link in links)
    # An old driver, or a virtual machine, hides where links lead, but knows that they join the two.
    peer = text(pair, "peer", "nvlink")
    if direct or peer is None:
        return direct or None
    return min(known) if peer == "ok" else 0


def _to(gpu: Facts, end: str) -> int:
    links = tables(gpu, "nvlinks") or ()
    return sum(bool(flag(link, "up")) and text(link, "remote") == end for link in links)


def _short(address: str | None) -> str:
    """Return a PCI address with a domain of four digits."""
    domain, _, rest = (address or "").lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}" if rest else ""


def _pairs(node: Node) -> dict[tuple[object, object], Facts]:
    found: dict[tuple[object, object], Facts] = {}
    for pair in node.pairs:
        numbers = look_up(pair, "gpus")
        if isinstance(numbers, list | tuple) and len(numbers) == 2:
            one, other = numbers
            if isinstance(one, int) and isinstance(other, int):
                found[one, other] = found[other, one] = pair
    return found


def _ways(gpus: Mapping[object, Facts], cells: Mapping[tuple[object, object], str]) -> Finding:
    """Judge all ways as a whole: by NVLink where the model has it, else told as they are."""
    summary = Counter(word for word in cells.values() if word)
    matter = Matter("topology", "host", "ways")
    told = ", ".join(f"{times}x {word}" for word, times in sorted(summary.items()))
    if not all(cells.values()):
        return matter.seen(told or None).unread("how each two GPUs are connected")
    names = [name_of(gpu) for gpu in gpus.values()]
    known = [model for model in map(expected.named, names) if model is not None]
    matter = matter.seen(told)
    if len(known) < len(names):
        strange = next(name for name in names if expected.named(name) is None)
        return matter.unknown_model(strange, "ways to its peers")
    links = min(model.board.nvlink[0] if model.board.nvlink else 0 for model in known)
    without = [pair for pair, word in cells.items() if not word.startswith("NV")]
    if not links:
        uneven = [pair for pair, word in cells.items() if word.startswith("NV")]
        reason = "bridges join some" if uneven else "these models have no NVLink"
        return matter.good(reason)
    matter = matter.seen(told, "NVLink", "data sheet")
    # With more peers than links not each two GPUs can be joined, as on boards of eight V100.
    alone = [gpu for gpu in gpus if all(gpu not in p for p in cells if p not in without)]
    if not without or (len(gpus) - 1 > links and not alone):
        return matter.good()
    named = ", ".join(_named(pair) for pair in without[:LISTED])
    more = f" and {len(without) - LISTED} more" if len(without) > LISTED else ""
    words = ", ".join(sorted({cells[pair] for pair in without}))
    return matter.bad(f"{named}{more} reach each other by {words}, not NVLink", "link", FABRIC)


def _named(pair: tuple[object, object]) -> str:
    return f"gpu{pair[0]}-gpu{pair[1]}"


def _peers(
    gpus: Mapping[object, Facts],
    pairs: Mapping[tuple[object, object], Facts],
    cells: Mapping[tuple[object, object], str],
) -> Iterator[Finding]:
    """Judge whether GPUs may reach each other's memory."""
    matter = Matter("topology", "host", "peer access")
    states = {
        pair: [text(facts, "peer", what) for what in ("read", "write")]
        for pair, facts in pairs.items()
    }
    if any(None in told for told in states.values()):
        yield matter.unread("whether GPUs may reach each other's memory")
        return
    without = {pair: told for pair, told in states.items() if told != ["ok", "ok"]}
    if not without:
        yield matter.seen("ok", "ok").good()
        return
    why = ", ".join(sorted({str(one) for told in without.values() for one in told if one != "ok"}))
    if all("GeForce" in name_of(gpu) for gpu in gpus.values()):
        reason = "the driver lets GeForce cards reach each other through the host alone"
        yield matter.seen(why, "ok", "siblings").skipped(reason, "nothing: it is so on all of them")
        return
    matter = matter.seen(why, "ok", "NCCL's documentation of GPU direct")
    named = ", ".join(_named(pair) for pair in list(without)[:LISTED])
    fault = f"{named}{' and more' if len(without) > LISTED else ''} may not reach each other: {why}"
    if any(cells[pair].startswith("NV") for pair in without):
        yield matter.bad(fault, "link", FABRIC)
    else:
        yield matter.odd(f"{fault}; copies go through the host's memory", "host", PATHS)


def _redirected(node: Node, cells: Mapping[tuple[object, object], str]) -> Iterator[Finding]:
    """Find bridges that send what GPUs tell each other through the processor."""
    if all(word.startswith("NV") for word in cells.values()):
        return
    matter = Matter("topology", "host", "acs")
    addresses = [text(gpu, "pci_bus_id") or "" for gpu in node.answering]
    redirecting = acs.redirecting(node.sysfs, addresses)
    if redirecting is None:
        reason = "bridges' settings cannot be read here"
        yield matter.skipped(reason, "as root on the host: lspci -vvv shows ACSCtl")
        return
    fault = f"ACS on {', '.join(redirecting[:LISTED])} sends peer copies through the processor"
    yield matter.seen(
        f"{len(redirecting)} bridges", "none", "NCCL's troubleshooting of ACS"
    ).judged(fault if redirecting else "", "host", f"{PATHS}; copies may even hang")


CHECK = StaticCheck("topology", "how GPUs reach each other, and whether they may", look)

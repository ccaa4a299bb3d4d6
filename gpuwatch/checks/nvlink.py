"""Whether each GPU's NVLinks are all up, of full speed and lead where those of its peers lead."""

from collections.abc import Iterator
from statistics import median

from gpuwatch import expected
from gpuwatch.lookup import count, flag, number, tables, text
from gpuwatch.matter import Matter
from gpuwatch.static_check import StaticCheck, entity_of, name_of
from gpuwatch.verify import Facts, Finding, Node

SLOW = 0.9  # of the data sheet's speed; a link tells its signalling rate, a sixteenth more
WHOLE_BOARD = 8
ERRORS = 1000  # since the driver was loaded, which may be long ago


def look(node: Node) -> Iterator[Finding]:
    """Judge links, speeds, remote ends and errors of each GPU."""
    ends = _ends(node)
    for gpu in node.answering:
        yield _up(node, gpu)
        up = [link for link in tables(gpu, "nvlinks") or () if flag(link, "up")]
        if up:
            yield _speed(gpu, up)
            yield _remote(gpu, up, ends)
            yield from _errors(gpu)


def links_up(gpu: Facts) -> int | None:
    """Return how many NVLinks of a GPU are up, None if it does not tell."""
    links = tables(gpu, "nvlinks")
    if links is None or any(flag(link, "up") is None for link in links):
        return None
    return sum(bool(flag(link, "up")) for link in links)


def _up(node: Node, gpu: Facts) -> Finding:
    matter = Matter("nvlink", entity_of(gpu), "links")
    name, up = name_of(gpu), links_up(gpu)
    if up is None:
        return matter.unread("whether its NVLinks are up")
    model = expected.named(name)
    if model is None:
        return matter.seen(float(up)).unknown_model(name, "NVLinks")
    if model.board.nvlink is None:
        return _bridged(node, up, model.model, matter)
    wanted = model.board.nvlink[0]
    matter = matter.seen(float(up), float(wanted), "data sheet")
    if up >= wanted:
        return matter.good()
    if len(node.answering) == 1:
        reason = "one GPU alone has no peer, so its links may be off"
        return matter.skipped(reason, "verify all GPUs that work together at once")
    if up:
        # Of boards that are joined directly a part may be given out, whose links lead nowhere.
        whole = "switch" in _ends(node) or len(node.answering) >= WHOLE_BOARD
        return matter.judged(
            f"{up} of {wanted} NVLinks are up: all-reduce takes about {wanted / up:.2g} times as"
            " long",
            "link",
            "look for Xid 74 and SXid in the kernel log, reset all GPUs; then reseat the board",
            fatal=whole,
        )
    return matter.bad(
        f"none of its {wanted} NVLinks is up: GPUs reach each other over PCIe alone",
        "link",
        "start nvidia-fabricmanager of the driver's version, read its log, reset the GPUs; if they"
        " stay down NVLink was switched off, or it is no SXM board: reject the node",
    )


def _bridged(node: Node, up: int, model: str, matter: Matter) -> Finding:
    """Judge a card whose links depend on a bridge or a system: by its like on this host."""
    most = max((links_up(one) or 0 for one in node.answering), default=0)
    fault = f"{up} NVLinks are up, of the {model} beside it {most}: a bridge is missing or loose"
    return matter.seen(float(up), float(most), "siblings").judged(
        fault if up < most else "", "link", "look whether the bridge is there and sits well"
    )


def _speed(gpu: Facts, up: list[Facts]) -> Finding:
    matter = Matter("nvlink", entity_of(gpu), "speed", "bytes_per_second")
    known = [speed for link in up if (speed := number(link, "bytes_per_second"))]
    if len(known) < len(up):
        reason = "the driver does not tell how fast its links are"
        return matter.skipped(reason, "measure all-reduce")
    model = expected.named(name_of(gpu))
    sheet = model.board.nvlink[1] if model and model.board.nvlink else 0
    wanted, slowest = sheet or median(known), min(known)
    fault = f"its slowest NVLink has {100 * slowest / wanted:.0f} % of the speed"
    return matter.seen(slowest, wanted, "data sheet" if sheet else "the other links").judged(
        fault if slowest < SLOW * wanted else "",
        "link",
        "reset all GPUs, look for Xid 74 in the kernel log; reseat the board",
        fatal=True,
    )


def _ends(node: Node) -> set[str]:
    """Return what the links of this host's GPUs lead to."""
    links = [link for gpu in node.answering for link in tables(gpu, "nvlinks") or ()]
    return {end for link in links if flag(link, "up") and (end := text(link, "remote"))}


def _remote(gpu: Facts, up: list[Facts], ends: set[str]) -> Finding:
    matter = Matter("nvlink", entity_of(gpu), "ends")
    own = {end for link in up if (end := text(link, "remote"))}
    if not own or any(text(link, "remote") is None for link in up):
        reason = "the driver does not tell where its links lead"
        return matter.skipped(reason, "look at nvidia-smi nvlink -R")
    fault = "its links lead elsewhere than those of the GPUs beside it" if own != ends else ""
    matter = matter.seen(", ".join(sorted(own)), ", ".join(sorted(ends)), "siblings")
    return matter.judged(fault, "link", "compare nvidia-smi nvlink -R of all GPUs; reset them")


def _errors(gpu: Facts) -> Iterator[Finding]:
    """Judge totals, which may be old, so that only large ones are told."""
    for kind in ("replay", "recovery", "crc"):
        errors = count(gpu, "nvlink_errors", kind)
        if errors is None:
            continue
        fault = f"{errors} {kind} errors since the driver was loaded, maybe long ago"
        matter = Matter("nvlink", entity_of(gpu), f"{kind} errors")
        yield matter.seen(float(errors), float(ERRORS), "rule of thumb").judged(
            fault if errors > ERRORS else "",
            "link",
            "verify again after some load: what counts is whether they rise",
        )


CHECK = StaticCheck("nvlink", "whether NVLinks are up, of full speed and lead to peers", look)

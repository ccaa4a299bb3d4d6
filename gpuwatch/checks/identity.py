"""Whether the GPUs are those that they are sold as: how many, which model, whole, and real.

A name is what a library tells. What a board is shows in its PCI id, which the bus tells as well,
in its memory, its power limit and its links: those are compared, here and in `nvlink`.
"""

import re
from collections import Counter
from collections.abc import Iterator

from gpuwatch import attribute, expected
from gpuwatch.lookup import count, number, text
from gpuwatch.matter import Matter
from gpuwatch.static_check import StaticCheck, entity_of, name_of
from gpuwatch.topology import own_gpus
from gpuwatch.verify import Facts, Finding, Node

LEAST_MEMORY, MOST_MEMORY = 0.9, 1.05  # of a board's: data/expected.toml says what is kept of it
LEAST_POWER = 0.95
VIRTUAL = {2: "a slice of one (vGPU)", 4: "a slice of one (vSGA)"}  # nvmlGpuVirtualizationMode_t
SLICE = re.compile(r"\bGRID\b|-\d+(?:-\d+)?[ABCQ]$|\bMIG \dg")  # as vGPU and MIG profiles are named
BOARDS = (1, 2, 4, 8, 16)  # GPUs of a baseboard, and the parts that NVSwitches can cut it into
DISPLAY = "DGX Display"  # a small card in some systems, which is not for computing
FORMS = ("SXM", "NVL", "PCIE")
VARIANTS = ("D", "TI", "SUPER", "LAPTOP", "MAX", "GRID", "MIG")
ID_LIST = "compare with the list of ids in the README of NVIDIA's open kernel modules"


def look(node: Node) -> Iterator[Finding]:
    """Compare count, names, ids, memory and power limits."""
    yield from _count(node)
    yield from _accepted(node)
    yield from _same(node)
    for gpu in node.gpus:
        if gpu.get("fault"):
            yield _silent(gpu)
            continue
        yield _model(gpu)
        yield from _asked_for(node, gpu)
        yield _device(node, gpu)
        yield _whole(gpu)
        yield _memory(gpu)
        yield _power(gpu)


def _silent(gpu: Facts) -> Finding:
    fault = str(gpu.get("fault"))
    return (
        Matter("identity", entity_of(gpu), "answer")
        .seen(fault, "an answer", "PCI bus")
        .bad(
            f"it is on the PCI bus, and the driver cannot reach it: {fault}",
            "driver",
            "look for an Xid or RmInitAdapter in the kernel log; power-cycle the node",
        )
    )


def _count(node: Node) -> Iterator[Finding]:
    """Compare how many answer with the bus, with what was asked for and with what boards have."""
    answering, asked = len(node.answering), node.expected_gpus
    on_bus = len(own_gpus(node.sysfs))
    matter = Matter("identity", "host", "gpus")
    if not node.gpus:
        yield matter.unread("of any GPU")
    elif asked:
        matter = matter.seen(float(answering), float(asked), "asked for")
        fault = f"{answering} GPUs answer, {asked} were asked for"
        if answering < asked:
            yield matter.bad(
                fault, "board", "look for the missing ones with lspci; reject the node"
            )
        elif answering > asked:
            yield matter.odd(fault, "board", "correct the number that is asked for")
        else:
            yield matter.good()
    elif answering < len(node.gpus):
        matter = matter.seen(float(answering), float(len(node.gpus)), "PCI bus")
        fault = f"{answering} of {len(node.gpus)} GPUs answer"
        yield matter.bad(fault, "driver", "look for an Xid in the kernel log; power-cycle the node")
    elif on_bus:
        yield matter.seen(float(answering), float(len(node.gpus)), "PCI bus").good()
    else:
        yield matter.seen(float(answering)).skipped(
            "the PCI bus is hidden, or not this container's alone: a GPU may be missing",
            "say how many there should be, or verify from the host",
        )
    if on_bus == len(node.gpus) and on_bus not in BOARDS and _on_baseboards(node):
        yield (
            Matter("identity", "host", "baseboard")
            .seen(float(on_bus), "1, 2, 4 or 8", "rule of thumb")
            .odd(
                f"{on_bus} GPUs of a kind that stands on baseboards of 4 or 8: some are gone",
                "board",
                "count the GPUs in the BMC; power-cycle the node",
            )
        )


def _accepted(node: Node) -> Iterator[Finding]:
    """Compare with the GPUs that were accepted on this host, where a daemon keeps them."""
    here = {text(gpu, "pci_bus_id"): text(gpu, "uuid") for gpu in node.gpus}
    if not node.inventory or not here:
        return
    gone = sorted(address for address in node.inventory if address not in here)
    others = sorted(
        address
        for address, uuid in node.inventory.items()
        if here.get(address) and here[address] != uuid
    )
    accepted = len(node.inventory)
    told = f"{accepted - len(gone) - len(others)} of them"
    matter = Matter("identity", "host", "inventory")
    matter = matter.seen(told, f"{accepted} GPUs", "gpuwatch inventory")
    if gone:
        fault = f"no GPU is at {', '.join(gone)}, where one was accepted"
        step = "look for it with lspci, power-cycle the node; or: gpuwatch inventory accept"
        yield matter.bad(fault, "board", step)
    elif others:
        fault = f"another card is at {', '.join(others)} than was accepted"
        yield matter.odd(fault, "board", "if it was replaced: gpuwatch inventory accept")
    else:
        yield matter.good()


def _on_baseboards(node: Node) -> bool:
    models = [expected.named(name_of(gpu)) for gpu in node.answering]
    return bool(models) and all(m and m.board.nvlink and m.board.nvlink[0] for m in models)


def _same(node: Node) -> Iterator[Finding]:
    """Find models that are mixed, and GPUs that are told twice."""
    told = [name_of(gpu) for gpu in node.answering]
    names = Counter(name for name in told if name and DISPLAY not in name)
    if len(names) > 1:
        models = ", ".join(f"{times}x {name}" for name, times in names.most_common())
        yield (
            Matter("identity", "host", "models")
            .seen(models, names.most_common(1)[0][0], "siblings")
            .bad(
                "the GPUs are of different models: the slowest holds the others back",
                "board",
                "reject the node, or use the GPUs of one model alone",
            )
        )
    for what in ("uuid", "serial"):
        told_by = Counter(text(gpu, what) for gpu in node.answering)
        twice = sorted(one for one, times in told_by.items() if one and times > 1)
        if twice:
            yield (
                Matter("identity", "host", what)
                .seen(", ".join(twice), "different ones", "siblings")
                .bad(
                    f"GPUs have the same {what}: fewer are there than are shown",
                    "board",
                    "compare with lspci; reject the node",
                )
            )


def _model(gpu: Facts) -> Finding:
    name, matter = name_of(gpu), Matter("identity", entity_of(gpu), "model")
    if not name:
        return matter.unread("its name")
    if expected.named(name) is None and not SLICE.search(name):
        return matter.seen(name).unknown_model(name, "anything")
    return matter.seen(name, source="data sheets").good()


def _asked_for(node: Node, gpu: Facts) -> Iterator[Finding]:
    asked, name = node.expected_model, name_of(gpu)
    if asked and name:
        other = differs(asked, name)
        matter = Matter("identity", entity_of(gpu), "asked for").seen(name, asked, "asked for")
        fault = f"it is no {asked}: {other}" if other else ""
        yield matter.judged(fault, "board", "reject the node", fatal=True)


def differs(asked: str, name: str) -> str:
    """Return in what a GPU's name is not the one asked for, "" if it is.

    Each word that was asked for must be in the name, or in what the model of that name is called.
    """
    model = expected.named(name)
    known, wanted = f"{name} {model.model if model else ''}".upper(), asked.upper()
    for word in re.findall(r"[A-Z0-9]+", wanted):
        if word != "NVIDIA" and not _says(known, word):
            return f"{name!r} does not say {word}"
    forms = FORMS if any(_says(wanted, form) for form in FORMS) else ()
    others = [one for one in (*VARIANTS, *forms) if _says(known, one) and not _says(wanted, one)]
    return f"it is the variant {', '.join(others)}" if others else ""


def _says(words: str, word: str) -> bool:
    """Say whether a word is among others; SXM4 is SXM, and RTX4090 is RTX 4090."""
    runs = "[ -]?".join(re.findall(r"[A-Z]+|[0-9]+", word))
    pattern = r"SXM\d?" if re.fullmatch(r"SXM\d?", word) else runs
    return re.search(rf"(?<![A-Z0-9]){pattern}(?![A-Z0-9])", words) is not None


def _device(node: Node, gpu: Facts) -> Finding:
    """Compare the PCI id of bus and driver with that of the model."""
    matter = Matter("identity", entity_of(gpu), "pci id")
    path = node.sysfs / "bus/pci/devices" / (text(gpu, "pci_bus_id") or "-") / "device"
    by_bus, by_driver = attribute.read(path).removeprefix("0x"), text(gpu, "device") or ""
    told = by_bus or by_driver
    model, real = expected.named(name_of(gpu)), expected.by_device(told)
    if not told:
        return matter.unread("its PCI id")
    if by_bus and by_driver and by_bus != by_driver:
        return matter.seen(by_driver, by_bus, "PCI bus").bad(
            "the driver's library tells another card than the PCI bus: it may be a fake",
            "board",
            "look at the bus from the host with lspci -nn; reject the node",
        )
    if model is None:
        return matter.seen(told).skipped("which id this model should have is not known", ID_LIST)
    matter = matter.seen(told, " or ".join(model.board.devices), "list of PCI ids")
    if real is None:
        return matter.skipped("nobody lists this id, so it says nothing", ID_LIST)
    if real is model:
        return matter.good()
    return matter.bad(
        f"by its PCI id it is {real.model}, by its name {model.model}",
        "board",
        f"reject it, or pay for {real.model} alone",
    )


def _whole(gpu: Facts) -> Finding:
    """Say whether it is a whole GPU, and no slice of one."""
    matter = Matter("identity", entity_of(gpu), "whole")
    name, mode = name_of(gpu), count(gpu, "modes", "virtualization")
    mig = text(gpu, "modes", "mig")
    part = VIRTUAL.get(-1 if mode is None else mode, "")
    if not part and SLICE.search(name):
        part = "a slice of one, by its name"
    if not part and mig == "on":
        part = "cut by MIG"
    if part:
        step = "turn MIG off: nvidia-smi -mig 0" if mig == "on" else "reject it, or pay for a slice"
        matter = matter.seen(part, "a whole GPU", "nvmlGpuVirtualizationMode_t and names")
        return matter.bad(f"it is no whole GPU: {part}", "board", step)
    if mode is None or not name:
        return matter.unread("whether it is virtual")
    return matter.seen("a whole GPU").good()


def _memory(gpu: Facts) -> Finding:
    matter = Matter("identity", entity_of(gpu), "memory", "bytes")
    name, size = name_of(gpu), number(gpu, "memory", "total_bytes")
    model = expected.named(name)
    if not size:
        return matter.unread("how much memory it has")
    if model is None:
        return matter.seen(size).unknown_model(name, "memory")
    full = expected.memory_bytes(model, name)
    matter = matter.seen(size, full, "data sheet")
    if size < LEAST_MEMORY * full:
        return matter.bad(
            f"it has {100 * size / full:.0f} % of the memory of {model.model}: a slice by vGPU, by"
            " MIG or by a library put before the driver's, or another board",
            "board",
            "look at /etc/ld.so.preload, and at the GPU from the host; or reject it",
        )
    if size > MOST_MEMORY * full:
        return matter.odd(
            f"it has {size / full:.2g} times the memory of {model.model}: a changed board",
            "board",
            "ask who changed it; test its memory with --deep",
        )
    return matter.good()


def _power(gpu: Facts) -> Finding:
    """Compare what the board was made for; what it is set to is a matter of `settings`."""
    matter = Matter("identity", entity_of(gpu), "power", "watts")
    name, made_for = name_of(gpu), number(gpu, "power", "default_watts")
    model = expected.named(name)
    if not made_for:
        step = "compare its matmul with the data sheet's"
        return matter.skipped("the driver does not tell what power it was made for", step)
    if model is None:
        return matter.seen(made_for).unknown_model(name, "power")
    matter = matter.seen(made_for, model.power_watts, "data sheet")
    small = made_for < LEAST_POWER * model.power_watts
    fault = (
        f"the board was made for {made_for:g} W, {model.model} for {model.power_watts:g} W:"
        " a smaller variant, or another board"
    )
    step = "compare its matmul with what was promised"
    return matter.judged(fault if small else "", "power", step)


CHECK = StaticCheck(
    "identity", "whether the GPUs are those that they are sold as", look, essential=True
)

"""Whether the memory of each GPU is sound, and whether the driver asks for a repair.

What counts as worn out is from NVIDIA's documents of GPU memory error management (row remapping,
since Ampere) and of dynamic page retirement (before).
"""

from collections.abc import Iterator

from gpuwatch.lookup import count, flag, look_up
from gpuwatch.matter import Matter
from gpuwatch.static_check import StaticCheck, entity_of
from gpuwatch.verify import Facts, Finding, Node

WORN_OUT_PAGES = 60  # NVIDIA takes a card back from there on
# NVIDIA's GPU memory error management: a row that was remapped is healed, and a card is taken back
# for a remap that fails. As many as one bank has spare rows are a sign of wear all the same.
MANY_ROWS = 8
WATCH = "test its memory with --deep, and watch the count"
MANAGEMENT = "NVIDIA's GPU memory error management"
RETIREMENT = "NVIDIA's dynamic page retirement"
ACTIONS = {0: "none", 1: "reset", 2: "reboot", 3: "drain", 4: "drain and reset"}
RMA = "have the card replaced: reject the node"
RESET = "reset the GPU, then verify again"


def look(node: Node) -> Iterator[Finding]:
    """Judge errors, repairs and what the driver asks for."""
    for gpu in node.answering:
        yield _since_boot(gpu)
        yield _lifetime(gpu)
        if look_up(gpu, "rows", "failed") is not None:
            yield from _rows(gpu)
        elif count(gpu, "retired", "double_bit") is not None:
            yield from _pages(gpu)
        else:
            reason = "it tells neither of remapped rows nor of retired pages"
            step = "test its memory with --deep"
            yield Matter("health", entity_of(gpu), "repairs").skipped(reason, step)
        yield _recovery(gpu)


def _since_boot(gpu: Facts) -> Finding:
    matter = Matter("health", entity_of(gpu), "uncorrected")
    errors = count(gpu, "ecc", "since_boot", "uncorrected")
    if errors is None:
        step = "test its memory with --deep"
        return matter.skipped("it has no ECC, ECC is off, or it does not tell", step)
    fault = f"{errors} uncorrected ECC errors since the driver was loaded"
    return matter.seen(float(errors), 0.0, MANAGEMENT).judged(
        fault if errors else "", "memory", f"{RESET}; if they come again, {RMA}", fatal=True
    )


def _lifetime(gpu: Facts) -> Finding:
    matter = Matter("health", entity_of(gpu), "lifetime")
    errors = count(gpu, "ecc", "lifetime", "uncorrected")
    if errors is None:
        return matter.skipped("it has no ECC, ECC is off, or it does not tell", "nothing")
    repairs = look_up(gpu, "rows", "failed"), look_up(gpu, "retired", "double_bit")
    return _healed(
        matter,
        errors,
        "uncorrected ECC errors in its life",
        mended=any(told is not None for told in repairs),
    )


def _healed(matter: Matter, number: int, what: str, *, mended: bool = True) -> Finding:
    """Judge what has been repaired: few are told as they are, many are a sign of wear."""
    matter = matter.seen(float(number), f"below {MANY_ROWS}", "as a bank of memory has spare rows")
    fault = f"{number} {what}"
    if number >= MANY_ROWS or (number and not mended):
        return matter.odd(fault, "memory", WATCH)
    return matter.good(f"{fault}: repaired since" if number else "")


def _rows(gpu: Facts) -> Iterator[Finding]:
    matter = Matter("health", entity_of(gpu), "remap failed")
    what, failed = "a row of its memory could not be remapped", flag(gpu, "rows", "failed")
    yield _denied(matter, failed, what, MANAGEMENT, RMA)
    matter = Matter("health", entity_of(gpu), "remap pending")
    what, pending = "rows of its memory are still to be remapped", flag(gpu, "rows", "pending")
    yield _denied(matter, pending, what, MANAGEMENT, RESET)
    matter = Matter("health", entity_of(gpu), "remapped")
    rows = count(gpu, "rows", "uncorrected")
    if rows is None:
        yield matter.unread("how many rows were remapped")
    else:
        yield _healed(matter, rows, "rows remapped after uncorrected errors")
    yield _banks(gpu)


def _denied(matter: Matter, told: bool | None, fault: str, source: str, next_step: str) -> Finding:
    """Judge what should not be so."""
    if told is None:
        return matter.unread(f"whether {fault}")
    matter = matter.seen("yes" if told else "no", "no", source)
    return matter.judged(fault if told else "", "memory", next_step, fatal=True)


def _banks(gpu: Facts) -> Finding:
    matter = Matter("health", entity_of(gpu), "spare rows")
    none, low = count(gpu, "rows", "banks", "none"), count(gpu, "rows", "banks", "low")
    if none is None or low is None:
        return matter.skipped("it does not tell how many rows its banks have left", "nothing")
    matter = matter.seen(float(none), 0.0, MANAGEMENT)
    if none:
        fault = f"{none} banks have no row left: the next error there cannot be repaired"
        return matter.bad(fault, "memory", RMA)
    fault = f"{low} banks have few rows left" if low else ""
    return matter.judged(fault, "memory", "watch remapped rows, and plan for a replacement")


def _pages(gpu: Facts) -> Iterator[Finding]:
    single, double = (count(gpu, "retired", cause) for cause in ("single_bit", "double_bit"))
    matter = Matter("health", entity_of(gpu), "retired")
    if single is None or double is None:
        yield matter.unread("how many pages were retired")
    else:
        pages = single + double
        yield matter.seen(float(pages), 0.0, RETIREMENT).judged(
            f"{pages} pages of its memory were retired" if pages else "",
            "memory",
            RMA if pages >= WORN_OUT_PAGES else WATCH,
            fatal=pages >= WORN_OUT_PAGES,
        )
    matter = Matter("health", entity_of(gpu), "retire pending")
    what, pending = "pages of its memory are still to be retired", flag(gpu, "retired", "pending")
    yield _denied(matter, pending, what, RETIREMENT, RESET)


def _recovery(gpu: Facts) -> Finding:
    matter = Matter("health", entity_of(gpu), "recovery")
    action = count(gpu, "recovery")
    if action is None:
        step = "older drivers do not; look for Xids in the kernel log"
        return matter.skipped("it does not tell whether it wants a repair", step)
    word = ACTIONS.get(action, f"action {action}")
    fault = f"the driver asks for: {word}" if action else ""
    step = f"do so, then verify again ({word})"
    matter = matter.seen(word, "none", "nvmlDeviceGpuRecoveryAction_t")
    return matter.judged(fault, "memory", step, fatal=True)


CHECK = StaticCheck(
    "health", "errors and repairs of GPU memory, and what the driver asks for", look
)

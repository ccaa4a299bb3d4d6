"""Patterns: whether all memory that is free keeps what is written, bit by bit.

Each pattern is written everywhere before any of it is read: ones and zeros, both in turn, a one and
a zero that walk through the 64 bits of a word, the word's own number, and random bits. Bits that
stick, neighbours that disturb each other and addresses that are two names of one place show in at
least one of them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuwatch.canary_worker import Worker

RESERVE = 1 << 30  # left free: the driver and torch need some for themselves
SPARE = 4  # blocks' worth of it, for what is compared
CPU_BLOCKS = 4  # a processor's memory is not ours to test
WORD = 8  # bytes


def run(worker: Worker) -> None:
    """Tell whether all that was written was read, and bytes per second of both."""
    torch = worker.torch
    blocks = [torch.empty(worker.size // WORD, dtype=torch.int64, device=worker.device)]
    while _is_room(worker, len(blocks)):
        blocks.append(torch.empty_like(blocks[0]))
    memory = len(blocks) * worker.size
    start, rounds, fault = time.monotonic_ns(), 0, ""
    end = start + int(worker.settings["seconds"] * 1e9)
    while not fault and (not rounds or time.monotonic_ns() < end):
        for name, pattern, numbered in patterns(worker, len(blocks[0])):
            worker.phase("measure")
            fault = fault or kept(worker, blocks, name, pattern, numbered)
            rounds += 1
    seconds = (time.monotonic_ns() - start) / 1e9
    worker.tell(
        result="wrong" if fault else "ok",
        detail=fault,
        value=2 * memory * rounds / seconds,
        memory_bytes=memory,
        patterns=rounds,
        start_ns=start,
        end_ns=time.monotonic_ns(),
    )


def _is_room(worker: Worker, blocks: int) -> bool:
    """Say whether one more block may be taken."""
    if not worker.on_gpu:
        return blocks < CPU_BLOCKS
    free = worker.torch.cuda.mem_get_info(worker.device)[0]
    return bool(free > RESERVE + (SPARE + 1) * worker.size)


def patterns(worker: Worker, length: int) -> Any:
    """Yield patterns: a name, a block of words, and whether each block has its number in them."""
    torch = worker.torch
    places = torch.arange(length, device=worker.device)
    for name, word in (
        ("zeros", 0),
        ("ones", -1),
        ("0101", 0x5555555555555555),
        ("1010", ~0x5555555555555555),
    ):
        yield name, torch.full_like(places, word), False
    walking = torch.bitwise_left_shift(torch.ones_like(places), places % 64)
    yield "a walking one", walking, False
    yield "a walking zero", ~walking, False
    yield "addresses", places, True
    least, most = -(1 << 62), 1 << 62
    yield "random", places.random_(least, most, generator=worker.generator()), True


def kept(worker: Worker, blocks: Any, name: str, pattern: Any, numbered: bool) -> str:
    """Write a pattern everywhere, read it; return what is wrong, "" if nothing is."""
    torch = worker.torch
    step = 1 << 32 if numbered else 0
    for number, block in enumerate(blocks):
        torch.bitwise_xor(pattern, number * step, out=block)
    wrong = torch.stack(
        [(block ^ number * step).ne(pattern).sum() for number, block in enumerate(blocks)]
    ).tolist()
    if not any(wrong):
        return ""
    first = next(number for number, count in enumerate(wrong) if count)
    flipped = blocks[first] ^ first * step ^ pattern
    found = flipped.nonzero().flatten()[:1].tolist()
    where = f"the first at byte {first * worker.size + found[0] * WORD}" if found else "gone since"
    bits = f", bits {int(flipped[found[0]]) & (2**64 - 1):#x}" if found else ""
    return f"{name}: {sum(wrong)} words are not what was written, {where}{bits}"

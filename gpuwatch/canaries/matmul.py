"""Matrix multiplication: floating point operations per second, in each dtype that the chip has.

Numbers are normally distributed: zeros and small integers switch fewer transistors, draw less power
and come out up to 15 % faster (thonking.ai, "Strangely, matrix multiplications ... run faster when
given predictable data"). Of fp32 the tensor cores are kept out, of tf32 not.

Under its power limit an H200 holds the clock at one level from 0.15 to 0.7 s after the start of a
load. Then the mean of a second has reached the limit too: the clock falls by another tenth, and
goes up and down for seconds. So every dtype begins on a GPU that has rested, and is over by then
(docs/measurements.md). Only fp32, which that limit does not hold, follows at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035 - also in a Python that is older

if TYPE_CHECKING:
    from gpuwatch.canary_worker import Worker

# Compute capability from which on a dtype is in the tensor cores.
CAPABILITIES = (("fp8", (8, 9)), ("bf16", (8, 0)), ("fp16", (7, 0)), ("tf32", (8, 0)))


def run(worker: Worker) -> None:
    """Tell operations per second in each dtype, the fastest first."""
    torch = worker.torch
    size = worker.fitting(lambda size: 5 * 4 * size * size)
    numbers = [
        torch.empty(size, size, device=worker.device).normal_(generator=generator)
        for generator in [worker.generator()]
        for _ in range(2)
    ]
    for number, dtype in enumerate(dtypes(worker)):
        since = time.monotonic()
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        if worker.on_gpu:  # torch keeps what the last dtype took, and sizes differ
            torch.cuda.empty_cache()
        launch = multiplication(torch, dtype, *numbers)
        if number and dtype != "fp32":
            worker.burst(launch, 1)  # its kernels are loaded meanwhile
            worker.rest(since)
        measured = worker.measure(launch)
        del launch  # and its matrices, before the next has its own
        value = 2 * size**3 / measured.pop("seconds")
        worker.tell(size=size, dtype=dtype, value=value, **measured)


def dtypes(worker: Worker) -> list[str]:
    """Return the dtypes that the chip has."""
    found = []
    if worker.on_gpu:
        capability = worker.torch.cuda.get_device_capability(worker.device)
        found = [dtype for dtype, least in CAPABILITIES if capability >= least]
        if not hasattr(worker.torch, "float8_e4m3fn") or not hasattr(worker.torch, "_scaled_mm"):
            found = [dtype for dtype in found if dtype != "fp8"]
    return [*found, "fp32"]


def multiplication(torch: Any, dtype: str, left: Any, right: Any) -> Callable[[], object]:
    """Return what multiplies two matrices once, in a dtype, and writes where it did before."""
    if dtype == "fp8":
        eighths = torch.float8_e4m3fn
        a, b = left.to(eighths), right.to(eighths).t()  # the second by columns, as it must be
        one = torch.ones((), device=left.device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    a, b = left.to(kind), right.to(kind)
    result = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=result)

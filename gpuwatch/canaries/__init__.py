"""The canaries. To add one: a file in this folder with a `run(worker)`, and its entry here.

`LOADS` are made as canaries are, but take minutes or all memory: only `verify` runs them.

The files are run by `gpuwatch/canary_worker.py` in the interpreter that has torch, so they import
nothing but the standard library and torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

MIB = 1 << 20


class Canary(NamedTuple):
    """A short test that tells how fast a GPU is, or whether it computes what it should.

    `together`: all GPUs take part in one run, with a process each, else each has a run of its own.
    `sizes` are edges of a matrix, or bytes; "tiny" ones measure nothing and show that it works.
    `by_nics`: it puts load on the network, and so is only run where that is asked for.
    """

    name: str
    help: str
    sizes: Mapping[str, int]
    together: bool = False
    least_gpus: int = 1
    by_nics: bool = False


def _sizes(full: int, small: int, tiny: int) -> Mapping[str, int]:
    return MappingProxyType({"full": full, "small": small, "tiny": tiny})


CANARIES: Mapping[str, Canary] = MappingProxyType(
    {
        canary.name: canary
        for canary in (
            Canary("startup", "how long until a first kernel has run", _sizes(0, 0, 0)),
            Canary("matmul", "matrix multiplication in each dtype", _sizes(8192, 4096, 256)),
            Canary("memory", "copy on the device", _sizes(512 * MIB, 256 * MIB, 4 * MIB)),
            Canary("pcie", "copies to and from the GPU", _sizes(256 * MIB, 64 * MIB, 4 * MIB)),
            Canary(
                "allreduce",
                "all-reduce between the GPUs",
                _sizes(256 * MIB, 32 * MIB, 1 * MIB),
                together=True,
                least_gpus=2,
            ),
            Canary(
                "allreduce_net",
                "all-reduce between the GPUs by way of their NICs",
                _sizes(256 * MIB, 32 * MIB, 1 * MIB),
                together=True,
                least_gpus=2,
                by_nics=True,
            ),
            Canary(
                "integrity",
                "whether sums of integers come out exact",
                _sizes(4096, 2048, 128),
                together=True,
            ),
        )
    }
)
USUAL = tuple(name for name, canary in CANARIES.items() if not canary.by_nics)
LOADS: Mapping[str, Canary] = MappingProxyType(
    {
        load.name: load
        for load in (
            Canary("sustained", "matrix multiplication for minutes", _sizes(8192, 4096, 256)),
            Canary(
                "patterns",
                "whether all free memory keeps what is written",
                _sizes(256 * MIB, 64 * MIB, 1 * MIB),
            ),
        )
    }
)

"""The checks of `gpuwatch verify`, in the order they run. To add one: a file here, and its entry.

Those of phase "static" look at what is there; those of phase "load" try it out, and run after them.
"""

from gpuwatch.checks import (
    driver,
    health,
    host,
    identity,
    kernel_log,
    nvlink,
    pcie_link,
    rdma,
    settings,
    topology,
)
from gpuwatch.checks.allreduce import Allreduce
from gpuwatch.checks.integrity import Integrity
from gpuwatch.checks.matmul import Matmul
from gpuwatch.checks.memory import Memory
from gpuwatch.checks.memory_patterns import MemoryPatterns
from gpuwatch.checks.pcie import Pcie
from gpuwatch.checks.rdma_loopback import RdmaLoopback
from gpuwatch.checks.startup import Startup
from gpuwatch.checks.storage import Storage
from gpuwatch.checks.sustained import Sustained
from gpuwatch.verify import Check

CHECKS: tuple[Check, ...] = (
    driver.CHECK,
    identity.CHECK,
    settings.CHECK,
    pcie_link.CHECK,
    nvlink.CHECK,
    topology.CHECK,
    health.CHECK,
    kernel_log.CHECK,
    rdma.CHECK,
    host.CHECK,
    Startup(),  # first: it brings torch into memory
    Matmul(),
    Memory(),
    Pcie(),
    Allreduce(),
    Sustained(),
    Integrity(),  # hot, right after the load
    MemoryPatterns(),
    Storage(),
    RdmaLoopback(),
)

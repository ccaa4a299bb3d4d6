"""What is measured of MIG: whether it is on, and each signal of an instance.

An instance has names of its own: a sum over GPUs would else count its GPU's work twice.
"""

from dataclasses import replace

from gpuwatch.gpu_signals import DRAM_ACTIVE, GRAPHICS_ACTIVE, SM_ACTIVE, TENSOR_ACTIVE
from gpuwatch.signals import Kind, Signal

MIG_ENABLED = Signal(
    "gpu_mig_enabled",
    "Whether MIG is on: now (current), and after the next reset of the GPU (pending).",
    Kind.GAUGE,
    "",
    label="setting",
    bounds=(0.0, 1.0),
)
INSTANCE_MEMORY_USED = Signal(
    "gpu_instance_memory_used_bytes",
    "Memory of the MIG instance that is allocated.",
    Kind.GAUGE,
    "bytes",
    bounds=(0.0, 1e15),
)
INSTANCE_MEMORY_FREE = Signal(
    "gpu_instance_memory_free_bytes",
    "Memory of the MIG instance that can be allocated.",
    Kind.GAUGE,
    "bytes",
    bounds=(0.0, 1e15),
)
INSTANCE_MEMORY_SIZE = Signal(
    "gpu_instance_memory_size_bytes",
    "Memory of the MIG instance.",
    Kind.GAUGE,
    "bytes",
    bounds=(0.0, 1e15),
)
INSTANCE_MEMORY_SIGNALS = (INSTANCE_MEMORY_USED, INSTANCE_MEMORY_FREE, INSTANCE_MEMORY_SIZE)


def _within(signal: Signal) -> Signal:
    return replace(
        signal,
        name=signal.name.replace("gpu_", "gpu_instance_", 1),
        help=f"Within the MIG instance: {signal.help[0].lower()}{signal.help[1:]}",
    )


INSTANCE_SM_ACTIVE = _within(SM_ACTIVE)
INSTANCE_TENSOR_ACTIVE = _within(TENSOR_ACTIVE)
INSTANCE_DRAM_ACTIVE = _within(DRAM_ACTIVE)
INSTANCE_GRAPHICS_ACTIVE = _within(GRAPHICS_ACTIVE)
INSTANCE_ACTIVE_SIGNALS = (INSTANCE_SM_ACTIVE, INSTANCE_TENSOR_ACTIVE, INSTANCE_DRAM_ACTIVE)

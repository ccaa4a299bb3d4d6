"""What is measured of those who use a GPU."""

from gpuwatch.signals import Kind, Signal

TENANTS = Signal(
    "gpu_tenants",
    (
        "Slurm jobs, pods of Kubernetes or commands (kind) with a process on the GPU, with those"
        " that are too many to have a series of their own."
    ),
    Kind.GAUGE,
    "",
    label="kind",
    bounds=(0.0, 1e6),
)

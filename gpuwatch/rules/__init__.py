"""The rules. To add one: write it into the tuple of its file."""

from gpuwatch.rule import Rule
from gpuwatch.rules import canary, gpu, gpu_health, health, host, kernel_log, network, work

RULES: tuple[Rule, ...] = (
    *canary.RULES,
    *gpu.RULES,
    *gpu_health.RULES,
    *health.RULES,
    *host.RULES,
    *kernel_log.RULES,
    *network.RULES,
    *work.RULES,
)

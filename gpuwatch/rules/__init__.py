"""The rules. To add one: write it into the tuple of its file."""

from gpuwatch.rule import Rule
from gpuwatch.rules import gpu, health

RULES: tuple[Rule, ...] = (*gpu.RULES, *health.RULES)

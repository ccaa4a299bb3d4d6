"""Rules about canaries: GPUs that have become slower than they were, or compute wrong results.

A canary runs twice an hour at most, and has been judged by its own statistics when a rule sees it
(`judgement`, `baseline`): what is confirmed, in the present environment, and not shared by all GPUs
of the node. So nothing is waited for here.
"""

from dataclasses import replace

from gpuwatch.rule import Rule

DAY = 86_400.0


def _regression(canary: str, per: str, what: str, next_step: str) -> tuple[Rule, Rule]:
    """Return the rule of a canary that lost 2 % or more, and the one of 5 % or more."""
    name = f'canary_loss_ratio{{canary="{canary}"}}'
    some = Rule(
        name=f"canary_regression_{canary}",
        severity="warning",
        per=per,
        help=f"{what} 2 % or more below its baseline, in run after run; the value is by how much.",
        next_step=next_step,
        judge=lambda view: view.highest(name),
        limit=0.02,
        record=True,
    )
    much = replace(
        some,
        name=f"{some.name}_severe",
        severity="critical",
        help=f"{what} 5 % or more below its baseline, in run after run; the value is by how much.",
        limit=0.05,
    )
    return some, much


def _corruption() -> tuple[Rule, Rule]:
    """Return the rule of a GPU that computes wrong results, and of GPUs that do together."""
    alone = Rule(
        name="silent_data_corruption",
        severity="critical",
        per="gpu",
        help="The GPU computed wrong results, twice within a week, and told no error.",
        next_step="Drain the node at once, distrust what it computed, and send the GPU back.",
        judge=lambda view: view.highest("canary_wrong_results"),
        limit=1.0,
        sticky=True,
        detect=lambda view: (view.highest("canary_wrong_results") or 0) >= 1,
        record=True,
    )
    together = replace(
        alone,
        name=f"{alone.name}_allreduce",
        per="host",
        help="An all-reduce between the node's GPUs gave wrong sums, twice within a week, and no "
        "error was told.",
        next_step="Drain the node at once, distrust what it computed, and see which rank is wrong.",
    )
    return alone, together


RULES = (
    *_regression(
        "matmul",
        "gpu",
        "The GPU's matrix multiplication is",
        "Look at `gpuwatch baseline show`: with a low clock look for heat and power, else reset.",
    ),
    *_regression(
        "memory",
        "gpu",
        "The GPU's memory bandwidth is",
        "Look for ECC errors and remapped rows, then reset the GPU.",
    ),
    *_regression(
        "pcie",
        "gpu",
        "The bandwidth between host and GPU is",
        "Compare the PCIe link's width and generation under load, then reseat the GPU.",
    ),
    *_regression(
        "allreduce",
        "host",
        "The bandwidth of an all-reduce between the node's GPUs is",
        "Look for NVLinks that are down or have errors, then for a GPU slow in its own canaries.",
    ),
    Rule(
        name="node_slow",
        severity="info",
        per="host",
        help="All GPUs of the node became slower together in a canary; the value is by how much.",
        next_step="Look for what they share: air, power limit, power feed, driver, a busy host.",
        judge=lambda view: view.highest("canary_node_loss_ratio"),
        limit=0.02,
    ),
    *_corruption(),
    Rule(
        name="canary_stuck",
        severity="warning",
        per="host",
        help="A canary's process did not end when it was killed; the value is how many did not.",
        next_step="Look for its process in state D and for an Xid, then drain and reboot the node.",
        judge=lambda view: view.highest("canary_stuck"),
        limit=1.0,
    ),
    Rule(
        name="canary_stale",
        severity="info",
        per="gpu",
        help="For a day no canary ran on the GPU, though it was idle for 10 minutes; the value is "
        "for how many seconds.",
        next_step="Look at what its canaries were skipped for.",
        judge=lambda view: view.highest("canary_overdue_seconds"),
        limit=DAY,
    ),
)

"""Rules about gpuwatch itself."""

from gpuwatch.rule import Rule

RULES = (
    Rule(
        name="source_failing",
        severity="warning",
        per="source",
        help="A source has given no data for 15 minutes.",
        next_step="Look at the source's reason in the status and at the log of its sampler.",
        judge=lambda view: view.highest("source_up"),
        limit=0.0,
        at_most=True,
        for_seconds=900,
    ),
)

"""Rules about gpuwatch itself."""

from gpuwatch.rule import Rule, View


def _source_up(view: View) -> float | None:
    # A source that was switched off has no such column, and fails nobody.
    return view.highest("source_up") if view.window("source_up") else 1.0


RULES = (
    Rule(
        name="source_failing",
        severity="warning",
        per="source",
        help="A source has given no data for 15 minutes.",
        next_step="Look at the source's reason in the status and at the log of its sampler.",
        judge=_source_up,
        limit=0.0,
        at_most=True,
        for_seconds=900,
    ),
    Rule(
        name="sampler_late",
        severity="info",
        per="source",
        help="For 10 minutes 1 % of a source's reads came late by more than 10 of its periods.",
        next_step="Look for a host without spare CPU time, or raise the sampler's period.",
        judge=lambda view: view.mean("source_late_ratio"),
        limit=0.01,
        window_seconds=600,
        for_seconds=600,
    ),
    Rule(
        name="recorder_disk_full",
        severity="warning",
        per="host",
        help="No recording and no history has been written for a minute: too little of the disk is "
        "free.",
        next_step="Make room on the disk of the state directory, or keep the state on another one.",
        judge=lambda view: view.highest("recorder_disk_full"),
        limit=1.0,
        for_seconds=60,
    ),
)

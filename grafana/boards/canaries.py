"""What canaries found: a row of the boards of a GPU and of a node."""

from collections.abc import Callable

from board import Row
from fields import Json
from panels import Column, Query, bars, table, timeseries
from promql import RANGE

Selector = Callable[..., str]

SHAPE = "{{canary}} {{dtype}}{{direction}} {{at_once}}"
BAD = 'result=~"wrong|failed|aborted"'
OLD = ((86_400, "orange"), (7 * 86_400, "dark-red"))  # seconds: rule canary_stale, then not judged
HOLDS = "A value holds until the canary runs again."


def of_gpu(selector: Selector) -> Row:
    """Return the row of one GPU."""
    values = (
        ("Canaries: computing", "flops", "flops_per_second", "What a multiplication reached."),
        ("Canaries: copies", "Bps", "bandwidth_bytes_per_second", "What a copy reached."),
    )
    return Row(
        "Canaries",
        [
            _ratio(
                "Canaries by baseline",
                "Each canary by what this GPU gave before. A loss is an alert once it is "
                "confirmed, from 2 % on.",
                [Query(selector("canary_baseline_ratio"), SHAPE)],
            ),
            _ratio(
                "Canaries by expectation",
                "Each canary by what a healthy card of the model gives, where that is known.",
                [Query(selector("canary_expected_ratio"), SHAPE)],
            ),
            _runs(
                selector, "How long ago each canary was last right, and how long it had the GPU."
            ),
            *(
                timeseries(
                    title,
                    f"{text} {HOLDS}",
                    unit,
                    [Query(selector(f"canary_{name}"), SHAPE)],
                    no_value="No canary ran",
                )
                for title, unit, name, text in values
            ),
        ],
    )


def of_node(node: Selector, gpus: Selector, link: str) -> Row:
    """Return the row of one node; `gpus` chooses some of its GPUs."""
    skipped = f"sum by (reason) (increase({node('canary_skipped_total')}[{RANGE}]))"
    bad = f"sum by (canary) (increase({node('canary_runs_total', BAD)}[{RANGE}]))"
    whole = node("canary_baseline_ratio", 'gpu=""')
    return Row(
        "Canaries",
        [
            timeseries(
                "Worst canary of each GPU",
                "The canary in which a GPU is furthest under its own baseline, and those of all "
                f"GPUs together. {HOLDS}",
                "percentunit",
                [
                    Query(
                        f"min by (instance, gpu) ({gpus('canary_baseline_ratio')})", "gpu {{gpu}}"
                    ),
                    Query(whole, SHAPE),
                ],
                soft_low=0.9,
                soft_high=1.02,
                link=link,
                width=8,
                no_value="No baseline",
            ),
            _runs(
                node,
                "How long ago each canary was last right, how long its last run had the GPU, and "
                "how many runs in the time shown were wrong, failed or had to make room.",
                Column("Without result", expr=bad, decimals=0, steps=((0.5, "orange"),)),
            ),
            bars(
                "Canaries skipped, by reason",
                "How often a canary was due in the time shown and did not run. A skip is no pass.",
                "short",
                Query(f"{skipped} > 0", "{{reason}}"),
                width=8,
            ),
        ],
    )


def _ratio(title: str, text: str, queries: list[Query]) -> Json:
    return timeseries(
        title,
        f"{text} Below 100 % is slower. {HOLDS}",
        "percentunit",
        queries,
        soft_low=0.9,
        soft_high=1.02,
        width=8,
        no_value="Not known",
    )


def _runs(selector: Selector, text: str, *more: Column) -> Json:
    age = f"time() - max by (canary) ({selector('canary_last_success_timestamp_seconds')})"
    took = f"max by (canary) ({selector('canary_duration_seconds')})"
    return table(
        "Runs of canaries",
        text,
        [
            Column("Canary", "canary"),
            Column("Right before", expr=age, unit="s", decimals=0, steps=OLD),
            Column("Took", expr=took, unit="s", decimals=1),
            *more,
        ],
        sort=[("Canary", False)],
        width=8,
        no_value="No canary ran",
    )

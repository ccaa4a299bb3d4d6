"""What hardware counters tell of a GPU each millisecond: a row of its dashboard."""

from collections.abc import Callable

from board import Row
from fields import Json, dashed
from panels import Query, heatmap, timeseries
from promql import known, rate, time_shares

NONE = "No hardware counters: docs/hardware-counters.md"


def of_gpu(selector: Callable[..., str]) -> Row:
    """Return the row of the GPU that `selector` chooses."""

    def measured(expr: str) -> str:
        return known(expr, selector)

    def load(title: str, part: str, text: str) -> Json:
        return heatmap(
            title, text, "percentunit", time_shares(selector, f"gpu_{part}_load_ratio"), width=8
        )

    moved = {"read": "read", "written": "written"}
    return Row(
        "Milliseconds, by hardware counters",
        [
            timeseries(
                "Memory bandwidth",
                "Bytes that memory gave and took, and the most it can move. A mean far below the "
                "limit can hide milliseconds at it: see the panel beside.",
                "Bps",
                [
                    *(
                        Query(measured(rate(selector(f"gpu_dram_{way}_bytes_total"))), name)
                        for way, name in moved.items()
                    ),
                    Query(measured(selector("gpu_dram_limit_bytes_per_second")), "limit"),
                ],
                overrides=[dashed("limit")],
                no_value=NONE,
                width=8,
            ),
            load(
                "Memory load: share of time",
                "dram",
                "Share of each step's time in which memory moved so much of the most it can, by "
                "millisecond; the mark is the range's upper end. Much at the top: the job waits "
                "for memory.",
            ),
            load(
                "NVLink load: share of time",
                "nvlink",
                "The same of NVLink, of what all links can move in the busier direction. "
                "Collectives that fill the links are at the top; a band in the middle is one that "
                "does not.",
            ),
            load(
                "Tensor load: share of time",
                "tensor",
                'The same of tensor cores, of the most they can do; with `set = "full"`. What is '
                "below the top while they work is what a job leaves unused.",
            ),
            timeseries(
                "Idle gaps",
                "Share of time that went by in gaps in which nothing ran on the GPU for a "
                "millisecond or more, counted when they end. Many short "
                "ones: kernels are started too slowly; long ones: the job waits for data.",
                "percentunit",
                [
                    Query(measured(rate(selector("gpu_idle_gap_seconds_sum"))), "idle"),
                    Query(
                        measured(f"1 - {selector('gpu_graphics_busy_ratio_mean')}"),
                        "of the last minute",
                    ),
                ],
                soft_high=0.1,
                no_value=NONE,
                width=8,
            ),
            timeseries(
                "Gaps by length",
                "How many gaps ended each second that were at most so long.",
                "short",
                [
                    Query(
                        measured(rate(selector("gpu_idle_gap_seconds_bucket", f'le="{bound}"'))),
                        f"up to {name}",
                    )
                    for bound, name in (("0.01", "10 ms"), ("0.1", "0.1 s"), ("5.0", "5 s"))
                ],
                no_value=NONE,
                width=8,
            ),
        ],
    )

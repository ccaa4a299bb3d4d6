"""What a GPU is divided into: a row of the GPU's dashboard."""

from collections.abc import Callable

from board import Row
from fields import Json
from panels import Column, Query, table, timeline, timeseries
from promql import over


def row(selector: Callable[..., str]) -> Row:
    """Return the row of the GPU that `selector` chooses."""

    def shares(title: str, part: str, text: str) -> Json:
        mean = over("avg", selector(f"gpu_instance_{part}_active_ratio_mean"))
        return timeseries(
            title,
            text,
            "percentunit",
            [Query(mean, "instance {{gpu_instance}}")],
            high=1,
            no_value="No instance",
            width=8,
        )

    used, free, size = (
        selector(f"gpu_instance_memory_{part}_bytes") for part in ("used", "free", "size")
    )
    labels = {"Instance": "gpu_instance", "Profile": "profile", "Slices": "slices", "UUID": "uuid"}
    known = f"max by ({', '.join(labels.values())}) ({selector('gpu_instance_info')})"
    by = "sum by (gpu_instance, uuid)"
    return Row(
        "MIG",
        [
            timeline(
                "Divided",
                "Whether MIG is on, now and after the next reset. Where the two differ, somebody "
                "changed it and the GPU has not been reset.",
                Query(selector("gpu_mig_enabled"), "{{setting}}"),
                {1: ("on", "dark-blue"), 0: ("off", "transparent")},
                height=4,
                no_value="Not told",
            ),
            shares("SMs of instances", "sm", "Share of an instance's SMs that were busy."),
            shares(
                "Tensor cores of instances",
                "tensor",
                "Share of time in which an instance's tensor cores worked.",
            ),
            shares(
                "Memory bandwidth of instances",
                "dram",
                "Share of an instance's memory bandwidth that was used.",
            ),
            table(
                "Instances",
                "What the GPU was divided into in the time shown, and the memory of each.",
                [
                    *(Column(title, label) for title, label in labels.items()),
                    Column("Used", expr=f"{by} ({used} / {size})", unit="percentunit", decimals=0),
                    Column("Free", expr=f"{by} ({free})", unit="bytes", decimals=1),
                    Column("Known", expr=known, hidden=True),
                ],
                sort=[("Instance", False)],
                height=6,
                no_value="No instance",
            ),
        ],
    )

"""What GPUs move and hold: rows of the node's and the GPU's dashboards."""

from collections.abc import Callable

from board import Row
from fields import Json, dashed
from panels import Query, timeseries
from promql import known, over, rate

GPU = "gpu {{gpu}}"
WAYS = {"received": "received", "transmitted": "sent"}


def of_gpu(selector: Callable[..., str]) -> Row:
    """Return the row of the GPU that `selector` chooses."""

    def link(title: str, bus: str, text: str) -> Json:
        return timeseries(
            title,
            text,
            "Bps",
            [
                Query(known(rate(selector(f"gpu_{bus}_{way}_bytes_total")), selector), name)
                for way, name in WAYS.items()
            ],
            no_value=f"No {title}",
            width=8,
        )

    return Row(
        "Traffic and memory",
        [
            link(
                "NVLink",
                "nvlink",
                "Bytes of data over all its NVLinks. What a job's collectives move inside the "
                "node; both lines at 0 under load: the job waits, or does not use them.",
            ),
            link(
                "PCIe",
                "pcie",
                "Bytes of packets as the GPU sees them, headers included: received comes from the "
                "host, the network or storage.",
            ),
            timeseries(
                "Memory",
                "Memory that is allocated, what driver and firmware keep for themselves, and all "
                "there is. Frameworks keep what they once had, so it seldom falls.",
                "bytes",
                [
                    Query(selector("gpu_memory_used_bytes"), "used"),
                    Query(selector("gpu_memory_reserved_bytes"), "reserved"),
                    Query(selector("gpu_memory_size_bytes"), "size"),
                ],
                overrides=[dashed("size")],
                width=8,
            ),
        ],
    )


def of_node(selector: Callable[..., str], link: str) -> Row:
    """Return the row of the GPUs that `selector` chooses; a click on a line follows `link`."""

    def moved(title: str, bus: str, text: str) -> Json:
        ways = (rate(selector(f"gpu_{bus}_{way}_bytes_total")) for way in WAYS)
        expr = known(f"({' + '.join(ways)})", selector)
        return timeseries(
            title, text, "Bps", [Query(expr, GPU)], no_value=f"No {title}", width=8, link=link
        )

    used = f"{over('avg', selector('gpu_memory_used_bytes'))} / {selector('gpu_memory_size_bytes')}"
    return Row(
        "Traffic and memory",
        [
            moved(
                "NVLink",
                "nvlink",
                "Bytes of data over a GPU's NVLinks, received and sent together. GPUs of one job "
                "move the same; one line under the others is what holds them up.",
            ),
            moved(
                "PCIe",
                "pcie",
                "Bytes of packets, received and sent together. Under load with nothing over PCIe "
                "a job keeps its data on the GPUs.",
            ),
            timeseries(
                "Memory in use",
                "Share of a GPU's memory that is allocated. One that differs from its siblings "
                "has another part of the job, or somebody else's process.",
                "percentunit",
                [Query(used, GPU)],
                high=1,
                width=8,
                link=link,
            ),
        ],
    )

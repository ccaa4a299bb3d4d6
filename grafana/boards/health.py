"""Memory errors, links, what the driver asks for: rows of the node's and the GPU's dashboards."""

from collections.abc import Callable

from board import Row
from fields import Json, dashed, to_board
from palette import NO_YES, RECOVERY
from panels import Column, Query, stat, table, timeline, timeseries
from promql import RANGE, over, rate

MISSING = ((1, "dark-red"),)
SEEN = ((1, "dark-orange"),)
GPU = "instance, gpu"
UNCORRECTED, CORRECTED = 'type="uncorrected"', 'type="corrected"'
# In a table what is well stays plain.
ASKED = RECOVERY | {0: ("nothing", "transparent")}
FLAG = {0: ("no", "transparent"), 1: ("YES", "dark-red")}
FABRIC = {
    3: ("joined", "semi-dark-green"),
    2: ("joining", "dark-yellow"),
    1: ("not joined", "dark-red"),
}


def of_gpu(selector: Callable[..., str]) -> Row:
    """Return the row of the GPU that `selector` chooses."""
    ecc = selector("gpu_ecc_errors_total")
    lifetime = selector("gpu_ecc_lifetime_errors_total")
    rows, pages = selector("gpu_remapped_rows_total"), selector("gpu_retired_pages_total")
    replaced = f'max by (type) (label_replace({rows} or {pages}, "type", "$1", "cause", "(.+)"))'
    return Row(
        "Health",
        [
            *_states(selector),
            table(
                "Memory errors",
                "Errors of the GPU's memories in the time shown, since the driver was loaded and "
                "ever, and rows (pages before Ampere) that were replaced. Corrected ones are "
                "normal now and then; each uncorrected one has lost data.",
                [
                    Column("Type", "type"),
                    Column(
                        "Shown",
                        expr=f"sum by (type) (increase({ecc}[{RANGE}]))",
                        decimals=0,
                    ),
                    Column("Since load", expr=f"sum by (type) ({ecc})"),
                    Column("Ever", expr=f"sum by (type) ({lifetime})"),
                    Column("Rows replaced", expr=replaced),
                ],
                sort=[("Type", False)],
                width=8,
                height=7,
                no_value="No ECC",
            ),
            _link_errors(selector, "{{type}}", "replays", width=8),
            timeseries(
                "PCIe link",
                "Lanes and generation now, and the most that both GPU and slot can do. An idle "
                "link lowers its generation to save power; lanes do not go away by themselves.",
                "none",
                [
                    Query(selector("gpu_pcie_link_width_lanes"), "lanes"),
                    Query(selector("gpu_pcie_link_width_limit_lanes"), "most lanes"),
                    Query(selector("gpu_pcie_link_generation"), "generation"),
                    Query(selector("gpu_pcie_link_generation_limit"), "highest generation"),
                ],
                overrides=[dashed("most lanes"), dashed("highest generation", "dark-blue")],
                width=8,
                height=7,
                no_value="Not told",
            ),
            timeline(
                "NVLink fabric",
                "How far the GPU has joined the fabric of NVSwitches. Not joined for minutes: see "
                "the fabric manager's log.",
                Query(selector("gpu_fabric_state"), "gpu {{gpu}}"),
                FABRIC,
                height=4,
                no_value="No fabric",
            ),
        ],
    )


def _states(selector: Callable[..., str]) -> list[Json]:
    pending = f"max({selector('gpu_row_remap_pending')} or {selector('gpu_retired_pages_pending')})"
    return [
        stat(
            "Driver asks for",
            "The recovery that the driver asks for. Anything but nothing: drain the node.",
            "none",
            f"max({selector('gpu_recovery_action')})",
            mappings=RECOVERY,
            no_value="not told",
        ),
        stat(
            "Rows to replace",
            "Whether a faulty row of memory (a page before Ampere) is replaced at the next reset.",
            "none",
            pending,
            mappings=NO_YES,
            no_value="not told",
        ),
        stat(
            "Remap failed",
            "Whether a faulty row could not be replaced. YES: send the GPU back.",
            "none",
            f"max({selector('gpu_row_remap_failed')})",
            mappings=NO_YES,
            no_value="not told",
        ),
        stat(
            "NVLinks up",
            "NVLinks that are up.",
            "none",
            f"max({selector('gpu_nvlink_links_up')})",
            no_value="none",
        ),
        stat(
            "NVLinks missing",
            "NVLinks that this GPU has had and that are not up.",
            "none",
            f"max({_missing(selector)})",
            steps=MISSING,
            no_value="not known",
        ),
        stat(
            "Lanes missing",
            "PCIe lanes that both GPU and slot have and the link does not use.",
            "none",
            f"max({_lanes(selector)})",
            steps=MISSING,
            no_value="not known",
        ),
        stat(
            "Processes",
            "Processes that have the GPU open.",
            "none",
            f"max({selector('gpu_processes')})",
            no_value="not told",
        ),
        stat(
            "Performance state",
            "0 is the fastest; an idle GPU is at 8 or more.",
            "none",
            f"max({selector('gpu_performance_state')})",
            no_value="not told",
        ),
    ]


def of_node(selector: Callable[..., str], link: str) -> Row:
    """Return the row of the GPUs that `selector` chooses; a click on a line follows `link`."""

    def newest(name: str, *matchers: str) -> str:
        return f"max by ({GPU}) ({selector(name, *matchers)})"

    def counted(name: str, *matchers: str) -> str:
        return f"sum by ({GPU}) (increase({selector(name, *matchers)}[{RANGE}]))"

    size = selector("gpu_memory_size_bytes")
    margin = over("min", selector("gpu_temperature_margin_celsius"), RANGE)
    return Row(
        "Health",
        [
            table(
                "Health of the GPUs",
                "What each GPU's memory and links had in the time shown, and how they are now. "
                "Margin: how close it came to slowing down for heat, in degrees.",
                [
                    Column(
                        "GPU", "gpu", link=to_board("gpuwatch-gpu", "instance", "gpu"), width=60
                    ),
                    Column("Node", "instance", width=180),
                    Column("Driver asks for", "", newest("gpu_recovery_action"), texts=ASKED),
                    Column(
                        "Uncorrected",
                        "",
                        counted("gpu_ecc_errors_total", UNCORRECTED),
                        decimals=0,
                        steps=MISSING,
                    ),
                    Column("Corrected", "", counted("gpu_ecc_errors_total", CORRECTED), decimals=0),
                    Column("Rows to replace", "", newest("gpu_row_remap_pending"), texts=FLAG),
                    Column("Remap failed", "", newest("gpu_row_remap_failed"), texts=FLAG),
                    Column(
                        "NVLinks missing",
                        "",
                        f"max by ({GPU}) ({_missing(selector)})",
                        steps=MISSING,
                    ),
                    Column(
                        "NVLink errors",
                        "",
                        counted("gpu_nvlink_errors_total"),
                        decimals=0,
                        steps=SEEN,
                    ),
                    Column(
                        "Lanes missing", "", f"max by ({GPU}) ({_lanes(selector)})", steps=MISSING
                    ),
                    Column("Replays", "", counted("gpu_pcie_replays_total"), decimals=0),
                    Column("Margin, lowest", "", f"min by ({GPU}) ({margin})", "celsius", 0),
                    Column(
                        "Memory free",
                        "",
                        f"max by ({GPU}) ({selector('gpu_memory_free_bytes')} / {size})",
                        "percentunit",
                        0,
                    ),
                    Column("Processes", "", newest("gpu_processes")),
                ],
                sort=[("Uncorrected", True), ("NVLinks missing", True), ("GPU", False)],
                height=7,
                no_value="Not told",
            ),
            _link_errors(selector, "gpu {{gpu}} {{type}}", "gpu {{gpu}} replays"),
            timeseries(
                "Margin",
                "Degrees left until a GPU slows down for heat, by its own reckoning: comparable "
                "between models, as temperatures are not.",
                "celsius",
                [Query(over("min", selector("gpu_temperature_margin_celsius")), "gpu {{gpu}}")],
                soft_low=0,
                height=7,
                link=link,
                no_value="Not told",
            ),
        ],
    )


def _link_errors(selector: Callable[..., str], nvlink: str, pcie: str, width: int = 12) -> Json:
    return timeseries(
        "Errors of links",
        "Errors of NVLinks by type, and PCIe packets that were sent again, per second. A few are "
        "normal; a line that stays above 0 is a link that gets worse. Only what moves is drawn.",
        "cps",
        [
            Query(f"{rate(selector('gpu_nvlink_errors_total'))} > 0", f"NVLink {nvlink}"),
            Query(f"{rate(selector('gpu_pcie_replays_total'))} > 0", f"PCIe {pcie}"),
        ],
        width=width,
        height=7,
        no_value="No errors",
    )


def _missing(selector: Callable[..., str]) -> str:
    """Return how many of its NVLinks each GPU misses."""
    return f"{selector('gpu_nvlink_links_expected')} - {selector('gpu_nvlink_links_up')}"


def _lanes(selector: Callable[..., str]) -> str:
    """Return how many of its PCIe lanes each GPU misses."""
    limit = selector("gpu_pcie_link_width_limit_lanes")
    return f"{limit} - {selector('gpu_pcie_link_width_lanes')}"

"""What tells the health of a GPU: its memory, its links, and what the driver asks for."""

from gpuwatch.signals import Kind, Signal

ECC_ERRORS = Signal(
    "gpu_ecc_errors_total",
    "Errors in the GPU's memories since the driver was loaded or the GPU reset.",
    Kind.COUNTER,
    "",
    label="type",
)
ECC_LIFETIME_ERRORS = Signal(
    "gpu_ecc_lifetime_errors_total",
    "Errors in the GPU's memories over its whole life.",
    Kind.COUNTER,
    "",
    label="type",
)
REMAPPED_ROWS = Signal(
    "gpu_remapped_rows_total",
    "Rows of the memory that were replaced over the GPU's whole life, by the error that caused it.",
    Kind.COUNTER,
    "",
    label="type",
)
ROW_REMAP_PENDING = Signal(
    "gpu_row_remap_pending",
    "1 if a row of the memory will be replaced at the next reset.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 1.0),
)
ROW_REMAP_FAILED = Signal(
    "gpu_row_remap_failed",
    "1 if a row of the memory could not be replaced.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 1.0),
)
RETIRED_PAGES = Signal(
    "gpu_retired_pages_total",
    "Pages of the memory that are no longer used, over the GPU's whole life; GPUs before Ampere.",
    Kind.COUNTER,
    "",
    label="cause",
)
RETIRED_PAGES_PENDING = Signal(
    "gpu_retired_pages_pending",
    "1 if a page of the memory will be retired at the next reset.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 1.0),
)
RECOVERY_ACTION = Signal(
    "gpu_recovery_action",
    "What the driver asks for to recover the GPU: 0 nothing, 1 reset, 2 reboot of the node,"
    " 3 drain of its peers, 4 drain and reset.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 100.0),
)
PCIE_GENERATION = Signal(
    "gpu_pcie_link_generation",
    "PCIe generation at which the link runs now; idle GPUs lower it to save power.",
    Kind.GAUGE,
    "",
    bounds=(1.0, 10.0),
)
PCIE_WIDTH = Signal(
    "gpu_pcie_link_width_lanes",
    "PCIe lanes that the link uses now.",
    Kind.GAUGE,
    "lanes",
    bounds=(1.0, 64.0),
)
PCIE_GENERATION_LIMIT = Signal(
    "gpu_pcie_link_generation_limit",
    "Highest PCIe generation that both the GPU and its slot can run.",
    Kind.GAUGE,
    "",
    bounds=(1.0, 10.0),
)
PCIE_WIDTH_LIMIT = Signal(
    "gpu_pcie_link_width_limit_lanes",
    "Most PCIe lanes that both the GPU and its slot have.",
    Kind.GAUGE,
    "lanes",
    bounds=(1.0, 64.0),
)
PCIE_REPLAYS = Signal(
    "gpu_pcie_replays_total",
    "PCIe packets that were sent again since the driver was loaded or the GPU reset.",
    Kind.COUNTER,
    "",
)
NVLINKS_UP = Signal(
    "gpu_nvlink_links_up",
    "NVLinks of the GPU that are up.",
    Kind.GAUGE,
    "",
    bounds=(0.0, 64.0),
)
NVLINK_ERRORS = Signal(
    "gpu_nvlink_errors_total",
    "Errors of the GPU's NVLinks, all together, since they came up.",
    Kind.COUNTER,
    "",
    label="type",
)
FABRIC_STATE = Signal(
    "gpu_fabric_state",
    "How far the GPU has joined the NVLink fabric: 1 not begun, 2 under way, 3 done.",
    Kind.GAUGE,
    "",
    bounds=(1.0, 3.0),  # 0 stands for no fabric
)

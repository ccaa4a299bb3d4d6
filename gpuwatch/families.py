"""The metrics that are no signal of a source, and the labels of what all metrics belong to."""

# The labels of an entity, by its kind; their values come from its EntityInfo. A kind that is not
# listed has one label of its own name, the entity's id; so has one with a single label here.
ENTITY_LABELS = {
    "gpu": ("gpu", "uuid"),
    "gpu_instance": ("gpu", "gpu_instance", "uuid"),
    "rdma_port": ("device", "port"),
    "interface": ("interface",),
    "pci_device": ("pci_bus_id",),
    "host": (),
}
# Kinds whose further labels are on a series of their own.
INFOS = {
    "gpu": ("gpu_info", "What the GPU is and where it sits; always 1."),
    "gpu_instance": ("gpu_instance_info", "What the MIG instance is; always 1."),
    "rdma_port": ("rdma_port_info", "What the RDMA port is and where it sits; always 1."),
    "interface": ("nic_info", "What the network interface serves and where it sits; always 1."),
}
# Who uses a GPU or an instance now, by kind.
TENANT_INFOS = {
    "job": (
        "gpu_job_info",
        (
            "A Slurm job with a process on the GPU: its id, its user and what it tells of itself;"
            " always 1."
        ),
    ),
    "pod": (
        "gpu_pod_info",
        "A pod of Kubernetes with a process on the GPU, and the container; always 1.",
    ),
    "process": ("gpu_process_info", "A user and a command with a process on the GPU; always 1."),
}
# What an administrator may change of a GPU has a series apart, so that `gpu_info` lasts.
MODES = frozenset(
    {
        *("compute_mode", "ecc_mode", "ecc_mode_pending"),
        *("mig_mode", "mig_mode_pending", "persistence_mode"),
    }
)

# name, type, help of everything that is not a signal declared by a source. What comes first
# survives when the page is cut off at the limit.
FAMILIES = (
    ("build_info", "gauge", "Version of gpuwatch; always 1."),
    ("series_dropped_total", "counter", "Series left out, in all renderings, beyond the limit."),
    ("duplicate_series_total", "counter", "Series left out, in all renderings, as given twice."),
    ("nvml_up", "gauge", "1 if the driver's library answers, 0 if not."),
    ("gpus_visible", "gauge", "GPUs that answer the driver."),
    ("gpus_pci", "gauge", "NVIDIA GPUs on the PCI bus."),
    ("gpus_expected", "gauge", "GPUs that this node should have."),
    *((name, "gauge", text) for name, text in (*INFOS.values(), *TENANT_INFOS.values())),
    ("gpu_mode_info", "gauge", "How the GPU is set, and what holds after its reset; always 1."),
    ("gpu_up", "gauge", "1 if the GPU answers, 0 if it does not or was not heard of for 5 s."),
    ("released", "gauge", "1 while this is left to another tool, or paused (canaries)."),
    (
        "node_verdict",
        "gauge",
        "1 for what should become of this node by the alerts that fire, 0 for the others.",
    ),
    ("alert_firing", "gauge", "1 while the alert fires."),
    ("alert_transitions_total", "counter", "Changes of alerts into this state since the start."),
    ("source_up", "gauge", "1 if the source delivered in the newest quarter second."),
    ("source_age_seconds", "gauge", "Age of the source's newest data."),
    (
        "source_read_seconds",
        "histogram",
        "How long each read of the source took, fast and slow ones together.",
    ),
    ("source_errors_total", "counter", "Failed reads of the source since the daemon's start."),
    ("source_period_seconds", "gauge", "Planned time between reads of the source."),
    ("source_period_achieved_seconds", "gauge", "Achieved time between reads of the source."),
    ("signal_refresh_seconds", "gauge", "How often the hardware renews the signal."),
    ("signal_source_info", "gauge", "Which source feeds the signal; always 1."),
    ("sampler_late_seconds", "histogram", "How late the reads of the sampler began."),
    ("samples_missing_total", "counter", "Planned reads that did not happen since the start."),
    ("child_restarts_total", "counter", "Starts of this child after it ended or hung."),
    ("child_stuck", "gauge", "1 if the child sits in a call that does not return."),
    ("process_cpu_seconds_total", "counter", "CPU time of this child, user and system."),
    ("kmsg_up", "gauge", "1 while the kernel log is followed; without it only NVML tells of Xids."),
    (
        "gpu_xid_errors_total",
        "counter",
        "Xid errors by code since the daemon's start, from the kernel log, or NVML without it.",
    ),
    (
        "gpu_xid_last_timestamp_seconds",
        "gauge",
        "When this Xid was last told of the GPU, also before the daemon's start.",
    ),
    (
        "pcie_errors_total",
        "counter",
        "PCIe errors (AER) of the device in the kernel log by severity, since the daemon's start.",
    ),
    ("recordings_total", "counter", "Recordings completed since the daemon's start."),
    (
        "recordings_skipped_total",
        "counter",
        (
            "Recordings not made since the daemon's start: too soon after another one, for"
            " lack of free disk space, or failed."
        ),
    ),
    ("history_rows_total", "counter", "Rows of history written since the daemon's start."),
    (
        "history_rows_lost_total",
        "counter",
        "Rows of history that could not be written since the daemon's start.",
    ),
    ("canary_flops_per_second", "gauge", "What the canary computed last, in this number format."),
    (
        "canary_bandwidth_bytes_per_second",
        "gauge",
        "What the canary moved last; of an all-reduce that of the bus, as nccl-tests has it.",
    ),
    ("canary_duration_seconds", "gauge", "How long the canary's last run had the GPU."),
    (
        "canary_baseline_ratio",
        "gauge",
        "The canary by its own baseline; below 1 is slower. Absent while that is being learned.",
    ),
    (
        "canary_expected_ratio",
        "gauge",
        "The canary by what a healthy card of the model gives, where that is known.",
    ),
    (
        "canary_last_success_timestamp_seconds",
        "gauge",
        "When the canary last ran to its end and was right, also before the daemon's start.",
    ),
    (
        "canary_runs_total",
        "counter",
        "Runs of the canary by result; one with several results counts for each of them.",
    ),
    (
        "canary_skipped_total",
        "counter",
        "Times that the canary was due on a GPU and did not run, by reason.",
    ),
    (
        "gpu_throttle_seconds_total",
        "counter",
        (
            "Time with this clock event reason active since the daemon's start: by the driver's own"
            " count where it has one, else by samples (signal_source_info says which)."
            " Reasons overlap: hw_slowdown includes hw_thermal_slowdown and hw_power_brake."
        ),
    ),
    (
        "gpu_throttle_events_total",
        "counter",
        "How often this clock event reason became active since the daemon's start.",
    ),
    (
        "gpu_lost_clock_seconds_total",
        "counter",
        (
            "Time-integral of 1 - clock/limit of the SM clock while utilization is above 20 %,"
            " since the daemon's start."
        ),
    ),
    (
        "gpu_counters_uncovered_seconds_total",
        "counter",
        (
            "Time of which the GPU's byte counters do not know what was moved: not read, or read"
            " too late to tell how often they wrapped. Since the daemon's start."
        ),
    ),
)

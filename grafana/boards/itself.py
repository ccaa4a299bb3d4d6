"""gpuwatch itself: what it costs, how punctual it is, and whether its sources deliver."""

from board import Row, dashboard
from fields import Json
from palette import NO_YES, YES_NO
from panels import Column, Query, bars, heatmap, stat, table, timeline, timeseries
from promql import RANGE, metric, of_range, over, rate, scope, worst

from boards import frame

HERE = (frame.JOB, 'instance=~"$instance"')
M = scope(*HERE)
UP = metric("up", *HERE)
SOURCE = "{{instance}} {{source}}"
DUTY = "{{instance}} {{duty}}"
GPU = "{{instance}} gpu {{gpu}}"
ANY = ((1, "dark-orange"),)


def build() -> Json:
    """Return the dashboard."""
    return dashboard(
        "gpuwatch-self",
        "gpuwatch / Self",
        "gpuwatch itself: its cost, its punctuality, and whether its sources deliver.",
        [_state(), _cost(), _punctuality(), _sources(), _children(), _endpoint()],
        [frame.job(), frame.instance(many=True)],
        frame.alerts('instance=~"$instance"'),
    )


def _state() -> Row:
    restarts = f"sum(increase({M('child_restarts_total')}[{RANGE}]))"
    errors = f"sum(increase({M('source_errors_total')}[{RANGE}]))"
    cpu = f"max(sum by (instance) ({rate(M('process_cpu_seconds_total'))}))"
    return Row(
        "State",
        [
            stat(
                "Endpoints answering",
                "Nodes whose gpuwatch answered the newest scrape.",
                "none",
                f"count({UP} == 1) or vector(0)",
            ),
            stat(
                "Sources failing",
                "Sources that gave no data in the newest quarter second. Sources that were "
                "switched off or released do not count.",
                "none",
                f"count({M('source_up')} == 0) or vector(0)",
                steps=ANY,
            ),
            stat(
                "Stuck children",
                "Processes in a driver call that does not return. The others go on.",
                "none",
                f"sum({M('child_stuck')})",
                steps=ANY,
            ),
            stat(
                "Restarts",
                "Starts of a process after its first, in the time shown.",
                "none",
                restarts,
                steps=ANY,
                decimals=0,
            ),
            stat(
                "Failed reads",
                "In the time shown. Unsupported values are not read again and do not count.",
                "none",
                f"{errors} or vector(0)",
                steps=ANY,
                decimals=0,
            ),
            stat(
                "Dearest node",
                "CPU of all processes of gpuwatch on the node where it takes most; 100 % is one "
                "core.",
                "percentunit",
                cpu,
                decimals=1,
            ),
            stat(
                "Series left out",
                "Series beyond the page's limit or given twice, since the start. Any is a fault.",
                "none",
                f"sum({M('series_dropped_total')}) + sum({M('duplicate_series_total')})",
                steps=ANY,
            ),
            stat(
                "Recordings",
                "Recordings completed in the time shown.",
                "none",
                f"sum(increase({M('recordings_total')}[{RANGE}]))",
                decimals=0,
            ),
        ],
    )


def _cost() -> Row:
    reads = M("source_read_seconds_bucket")
    cpu = M("process_cpu_seconds_total")
    memory = metric("process_resident_memory_bytes", *HERE)
    total, count = M("source_read_seconds_sum"), M("source_read_seconds_count")
    read = "histogram_quantile(0.99, sum by (instance, source, le) ({}))"
    dearest = read.format(of_range("rate", reads))
    return Row(
        "Cost",
        [
            timeseries(
                "CPU by duty: the 20 highest",
                "100 % is one core. The sampler samples more slowly above its budget (5 % unless "
                "configured), so a state line far above the mark is a host without spare time.",
                "percentunit",
                [Query(worst(20, rate(cpu), of_range("rate", cpu), "instance, duty"), DUTY)],
                steps=((0.05, "orange"),),
            ),
            timeseries(
                "Memory of the daemon: the 20 highest",
                "Resident memory of the process that serves the page, with its shared pages. "
                "Growing for days is a fault.",
                "bytes",
                [Query(worst(20, memory, f"{memory} @ end()", "instance"), "{{instance}}")],
            ),
            timeseries(
                "Cost of a read: the 10 highest",
                "Time of one read, mean and p99. A p99 that jumps is a driver that holds its lock, "
                "for example while a job starts.",
                "s",
                [
                    Query(
                        worst(10, f"({rate(total)} / {rate(count)})", dearest, "instance, source"),
                        f"{SOURCE} mean",
                    ),
                    Query(
                        worst(10, read.format(rate(reads)), dearest, "instance, source"),
                        f"{SOURCE} p99",
                    ),
                ],
            ),
            heatmap(
                "Reads by their cost",
                "Reads per second by how long they took; the mark is the upper end.",
                "s",
                f"sum by (le) ({rate(reads)})",
                cells="cps",
            ),
        ],
    )


def _punctuality() -> Row:
    bucket = M("sampler_late_seconds_bucket")
    missing, lost = M("samples_missing_total"), M("gpu_counters_uncovered_seconds_total")
    planned, achieved = M("source_period_seconds"), M("source_period_achieved_seconds")
    late = "histogram_quantile({}, sum by (instance, duty, le) ({}))"
    latest = late.format(0.99, of_range("rate", bucket))
    longest = of_range("max_over_time", achieved)
    return Row(
        "Punctuality",
        [
            timeseries(
                "Lateness of the sampler: the 10 latest",
                "How late reads began: p50, p99 and p99.9, as exact as the buckets. A p99 above "
                "the period means samples are lost: see missing samples.",
                "s",
                [
                    Query(
                        worst(10, late.format(quantile, rate(bucket)), latest, "instance, duty"),
                        f"{DUTY} {name}",
                    )
                    for quantile, name in ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))
                ],
            ),
            heatmap(
                "Reads by their lateness",
                "Reads per second by how late they began; the mark is the upper end.",
                "s",
                f"sum by (le) ({rate(bucket)})",
                cells="cps",
            ),
            timeseries(
                "Period, planned and achieved: the 10 longest",
                "Planned time between reads, and what came of it. The plan is longer than the "
                "configured period when sampling backed off from its budget.",
                "s",
                [
                    Query(worst(10, shown, longest, "instance, source"), f"{SOURCE} {name}")
                    for shown, name in ((planned, "planned"), (achieved, "achieved"))
                ],
                width=8,
            ),
            timeseries(
                "Missing samples: the 20 sources with most",
                "Planned reads that did not happen, per second.",
                "cps",
                [
                    Query(
                        worst(20, rate(missing), of_range("rate", missing), "instance, source"),
                        SOURCE,
                    )
                ],
                width=8,
            ),
            timeseries(
                "Bytes not counted: the 20 GPUs with most",
                "Share of time of which a GPU's byte counters do not know what was moved: not "
                "read, or read too late to tell how often they wrapped.",
                "percentunit",
                [Query(worst(20, rate(lost), of_range("rate", lost), "instance, gpu"), GPU)],
                width=8,
                no_value="No byte counters",
            ),
        ],
    )


def _sources() -> Row:
    up, released, age = M("source_up"), M("released"), M("source_age_seconds")
    refresh = f"max by (signal) ({M('signal_refresh_seconds')})"
    feeds = f"count by (signal, source) ({M('signal_source_info')})"
    failing = f"sum by (instance, source, error) ({rate(M('source_errors_total'))}) > 0"
    failed = f"({of_range('min_over_time', up)} == 0)"
    on_request = f"({of_range('max_over_time', released)} == 1)"
    oldest = of_range("max_over_time", age)
    return Row(
        "Sources",
        [
            timeline(
                "Sources that failed",
                "Sources that gave no data in the quarter second before some scrape of the time "
                "shown. NO: its values are absent, not 0.",
                Query(f"{up} and on (instance, source) {failed}", SOURCE),
                YES_NO,
                width=12,
                height=5,
                no_value="All sources delivered",
            ),
            timeline(
                "Released",
                "What was left to another tool on request, for example to a profiler.",
                Query(
                    f"{released} and on (instance, what) {on_request}",
                    "{{instance}} {{what}}",
                ),
                NO_YES,
                width=12,
                height=5,
                no_value="Nothing was released",
            ),
            timeseries(
                "Age of the newest data: the 20 oldest",
                "Above a second, a source stands still; its values go absent.",
                "s",
                [Query(worst(20, over("max", age), oldest, "instance, source"), SOURCE)],
            ),
            timeseries(
                "Failed reads by error",
                "Failed reads per second. One lost GPU fails every read of it.",
                "cps",
                [Query(failing, f"{SOURCE} {{{{error}}}}")],
                no_value="No read has failed",
            ),
            bars(
                "Refresh of the hardware's values",
                "How often each value really changes, as measured; the slowest of the chosen "
                "nodes. Reading more often than that shows nothing new.",
                "s",
                Query(refresh, "{{signal}}"),
            ),
            table(
                "Who reads what",
                "The source that feeds each signal, and on how many nodes.",
                [
                    Column("Signal", "signal"),
                    Column("Source", "source"),
                    Column("Nodes", expr=feeds, width=80),
                ],
                sort=[("Signal", False)],
                width=12,
            ),
        ],
    )


def _children() -> Row:
    stuck = M("child_stuck")
    was_stuck = f"({of_range('max_over_time', stuck)} == 1)"
    restarts = f"increase({M('child_restarts_total')}[$__rate_interval]) > 0"
    hung = M("gpu_hung")
    was_hung = f"({of_range('max_over_time', hung)} == 1)"
    start = metric("process_start_time_seconds", *HERE)
    return Row(
        "Processes",
        [
            timeline(
                "Stuck in a driver call",
                "YES: the process sits in a call that does not return. A new one goes on without "
                "that GPU.",
                Query(f"{stuck} and on (instance, duty) {was_stuck}", DUTY),
                NO_YES,
                width=12,
                height=5,
                no_value="No process was stuck",
            ),
            timeline(
                "GPUs left alone",
                "YES: a call of this sampler to the GPU does not return, so nobody reads it but a "
                "process that tries whether it answers.",
                Query(f"{hung} and on (instance, gpu, duty) {was_hung}", f"{GPU} {{{{duty}}}}"),
                NO_YES,
                width=12,
                height=5,
                no_value="No GPU was left alone",
            ),
            timeseries(
                "Restarts",
                "Starts of a process after its first, within each step. Once is an incident that "
                "was mended; again and again is a fault: see the log of the node.",
                "none",
                [Query(restarts, DUTY)],
                no_value="No restarts",
            ),
            timeseries(
                "Daemon up for: the 20 youngest",
                "Time since the daemon's start; counters begin anew with it.",
                "s",
                [
                    Query(
                        worst(20, f"(time() - {start})", f"{start} @ end()", "instance"),
                        "{{instance}}",
                    )
                ],
            ),
        ],
    )


def _endpoint() -> Row:
    samples = metric("scrape_samples_scraped", *HERE)
    duration = metric("scrape_duration_seconds", *HERE)
    files = metric("process_open_fds", *HERE) + " / " + metric("process_max_fds", *HERE)
    return Row(
        "Endpoint",
        [
            timeseries(
                "Series of a scrape: the 20 largest",
                "Samples on the page, about 2600 for 8 GPUs and 8 RDMA ports. A page is cut off at "
                "10 000.",
                "none",
                [Query(worst(20, samples, f"{samples} @ end()", "instance"), "{{instance}}")],
                width=8,
            ),
            timeseries(
                "Duration of a scrape: the 20 longest",
                "As Prometheus sees it, with the network. The page is made beforehand, so a long "
                "one is a host without spare time, or the network.",
                "s",
                [
                    Query(
                        worst(20, duration, of_range("max_over_time", duration), "instance"),
                        "{{instance}}",
                    )
                ],
                width=8,
            ),
            timeseries(
                "Open files of the limit: the 20 highest",
                "Share of the daemon's file descriptors in use.",
                "percentunit",
                [Query(worst(20, f"({files})", f"({files})", "instance"), "{{instance}}")],
                width=8,
            ),
        ],
    )

"""The Grafana dashboards: as the code makes them, sound, and with data from a real Prometheus."""

import contextlib
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import preview
import promql_parser
import pytest
import yaml
from boards import BOARDS
from queries import Prometheus, Span, choose, pattern, substitute
from running import Running, free_port, wait_for

pytestmark = pytest.mark.timeout(420)  # the first that asks Prometheus waits for all of it

ROOT = Path(__file__).parent.parent
GRAFANA = ROOT / "grafana"
CONTRACT = tomllib.loads((ROOT / "tests/data/metrics.toml").read_text())
MODELS = {model["uid"]: model for model in (build() for build in BOARDS)}

# What Prometheus itself adds to each target.
OF_PROMETHEUS = {"up", "ALERTS", "scrape_duration_seconds", "scrape_samples_scraped"}
TARGET_LABELS = {"job", "instance", "le", "alertname", "alertstate", "scope", "who"}
NOT_SHOWN = {
    "gpuwatch_gpu_clock_hertz_mean": "the histogram's sum over its count is exact at every zoom",
    "gpuwatch_gpu_power_sample_watts": "one sample says nothing; min, max and mean are shown",
    "gpuwatch_gpu_utilization_ratio": "one sample says nothing; min, max and mean are shown",
    **{
        f"gpuwatch_gpu_{part}_active_ratio": "one sample says nothing; its extremes are shown"
        for part in ("sm", "tensor", "dram")
    },
    **{
        f"gpuwatch_{entity}_graphics_active_ratio{suffix}": "says no more than utilization"
        for entity in ("gpu", "gpu_instance")
        for suffix in ("", "_min", "_max", "_mean")
    },
    **{
        f"gpuwatch_gpu_instance_{part}_active_ratio{suffix}": "the mean of an instance is shown"
        for part in ("sm", "tensor", "dram")
        for suffix in ("", "_min", "_max")
    },
    **{
        f"gpuwatch_gpu_graphics_busy_ratio{suffix}": "one millisecond says nothing"
        for suffix in ("", "_min", "_max")
    },
    **{
        f"gpuwatch_gpu_{part}_busy_ratio{suffix}": "of the full set alone; activity is shown"
        for part in ("sm", "tensor")
        for suffix in ("", "_min", "_max", "_mean")
    },
    "gpuwatch_gpu_nvlink_limit_bytes_per_second": "the load is of it",
    **{
        f"gpuwatch_gpu_nvlink_raw_{way}_bytes_total": "the load is made of them"
        for way in ("received", "transmitted")
    },
    "gpuwatch_gpu_l2_bytes_total": "for recordings: what it means depends on the kernel",
    **{
        f"gpuwatch_rdma_port_packets_{way}_total": "bytes are shown; packets are what loss is of"
        for way in ("received", "transmitted")
    },
    "gpuwatch_rdma_rx_write_requests_total": "says no more than bytes",
    "gpuwatch_nic_carrier_changes_total": "the times it went are shown",
    "gpuwatch_nic_fec_corrections_total": "normal on every fast link",
    "gpuwatch_nic_info": "the port's has the same and more",
    "gpuwatch_recordings_skipped_total": "most are soon after another; a full disk is an alert",
    "gpuwatch_history_rows_total": "four a second, or some are lost",
    "gpuwatch_history_rows_lost_total": "a full disk is an alert, and the log says why",
    "process_cpu_seconds_total": "gpuwatch_process_cpu_seconds_total has it for every duty",
    "process_virtual_memory_bytes": "address space is not memory",
}
OF_INSTANCES = ("SMs", "Tensor cores", "Memory bandwidth")
QUIET_PORTS = (*("Loss", "Congestion", "Paused", "Link errors", "Errors of packets and requests"),)
# With the nodes of the test below these have rightly nothing to show.
EMPTY = {
    ("gpuwatch-self", "Released"),
    ("gpuwatch-self", "Failed reads by error"),
    ("gpuwatch-self", "Stuck in a driver call"),
    ("gpuwatch-self", "Restarts"),
    ("gpuwatch-self", "GPUs left alone"),
    ("gpuwatch-node", "Errors of links"),
    ("gpuwatch-gpu", "Errors of links"),
    *((uid, "Warning alerts") for uid in MODELS),
    ("gpuwatch-node", "Info alerts"),
    ("gpuwatch-gpu", "Info alerts"),
    ("gpuwatch-node", "Xid errors"),
    ("gpuwatch-node", "Told by the kernel log"),
    *(("gpuwatch-node", title) for title in QUIET_PORTS),
    *(("gpuwatch-gpu", f"{title} of instances") for title in OF_INSTANCES),
    ("gpuwatch-gpu", "Instances"),
    *(("gpuwatch-gpu", title) for title in ("Pods", "Processes")),
    ("gpuwatch-node", "Canaries skipped, by reason"),
}
# What canaries found holds until they run again.
OF_CANARIES = {"Canaries by baseline", "Canaries by expectation"}
OF_CANARIES |= {"Canaries: computing", "Canaries: copies"}
# A busy machine may have a source miss a quarter second.
BUSY = {("gpuwatch-self", "Sources that failed")}
TEMPERATURES = ("Core temperature", "Memory temperature")
VARIABLES = {
    "__rate_interval": "1m",
    "__interval": "15s",
    "__range": "1h",
    "job": ".+",
    "instance": "node1:9973",
    "gpu": "0",
}


def panels(model):
    """Return the panels of a dashboard, rows left out."""
    return [panel for panel in model["panels"] if panel["type"] != "row"]


def queries(model):
    """Yield (title, target) of each query: of panels, then of annotations."""
    for panel in panels(model):
        for target in panel["targets"]:
            yield panel["title"], target
    for annotation in model["annotations"]["list"]:
        yield annotation["name"], annotation


def selectors(node):
    """Yield each vector selector of an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    below = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")]
    for child in [*below, getattr(node, "vector_selector", None), *getattr(node, "args", [])]:
        if child is not None:
            yield from selectors(child)


def parsed(model):
    """Yield each vector selector of a dashboard's queries and variables."""
    for _, target in queries(model):
        yield from selectors(promql_parser.parse(substitute(target["expr"], VARIABLES)))
    for variable in model["templating"]["list"][1:]:
        expr = variable["query"]["query"].removeprefix("label_values(").rpartition(",")[0]
        yield from selectors(promql_parser.parse(substitute(expr, VARIABLES)))


def family(name):
    """Return the contract's name of a series' family."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if CONTRACT.get(stem, {}).get("type") == "histogram" else name


def test_committed_files_are_what_the_code_makes():
    """Whoever changes a dashboard's code also commits its JSON."""
    command = [sys.executable, GRAFANA / "build.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_uids_do_not_change():
    """Bookmarks and links go to a dashboard by its uid."""
    assert set(MODELS) == {"gpuwatch-fleet", "gpuwatch-node", "gpuwatch-gpu", "gpuwatch-self"}


@pytest.mark.parametrize("uid", MODELS)
def test_a_dashboard_can_be_provisioned_anywhere(uid):
    """It has no id of another server, and its data source is a variable."""
    model = MODELS[uid]
    assert model["id"] is None
    assert model["templating"]["list"][0]["type"] == "datasource"
    assert "__inputs" not in model
    asked = [target for _, target in queries(model)] + model["templating"]["list"][1:]
    for one in [*panels(model), *asked]:
        assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("uid", MODELS)
def test_panels_are_identified(uid):
    """Ids are unique on a dashboard, refIds on a panel."""
    ids = [panel["id"] for panel in MODELS[uid]["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(MODELS[uid]):
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert len(set(letters)) == len(letters)


@pytest.mark.parametrize("uid", MODELS)
def test_panels_do_not_overlap(uid):
    """Each place on the grid belongs to one panel, and none is beyond the width."""
    taken = set()
    for panel in MODELS[uid]["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        across = range(grid["x"], grid["x"] + grid["w"])
        places = set(itertools.product(across, range(grid["y"], grid["y"] + grid["h"])))
        assert not places & taken, panel["title"]
        taken |= places


@pytest.mark.parametrize("uid", MODELS)
def test_panels_say_what_they_show(uid):
    """Each panel has a title, a unit, a description that is a sentence, and named series."""
    for panel in panels(MODELS[uid]):
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert not panel["description"][0].islower()
        assert panel["description"].rstrip()[-1] in ".)", panel["title"]
        if panel["type"] in ("timeseries", "state-timeline", "bargauge", "heatmap"):
            assert all(target["legendFormat"] != "__auto" for target in panel["targets"])


def test_the_fleet_says_which_node():
    """A GPU's number means nothing without its node."""
    for _, target in queries(MODELS["gpuwatch-fleet"]):
        legend = target.get("legendFormat") or target.get("textFormat")
        assert "{{gpu}}" not in legend or "{{instance}}" in legend


@pytest.mark.parametrize("uid", MODELS)
def test_links_lead_to_dashboards(uid):
    """A link to a dashboard that does not exist would be found by a user at night."""
    targets = set(re.findall(r"/d/([\w-]+)", json.dumps(MODELS[uid])))
    assert targets <= set(MODELS)


def test_the_preview_takes_an_address_for_an_instance():
    """Dots of a chosen value are literal, in an expression that Prometheus can parse."""
    chosen = pattern(MODELS["gpuwatch-fleet"], {"instance": ["127.0.0.1:9973"]})
    selector = promql_parser.parse(f'up{{instance=~"{chosen["instance"]}"}}')
    [matcher] = selector.matchers.matchers
    assert re.fullmatch(matcher.value, "127.0.0.1:9973")
    assert not re.fullmatch(matcher.value, "127x0.0.1:9973")


@pytest.mark.parametrize("uid", MODELS)
def test_queries_use_what_is_served(uid):
    """Each expression parses; its metrics and the labels it chooses by are in the contract."""
    for selector in parsed(MODELS[uid]):
        name = family(selector.name)
        assert name in CONTRACT.keys() | OF_PROMETHEUS, selector.name
        labels = set(CONTRACT.get(name, {}).get("labels", ()))
        chosen = {matcher.name for matcher in selector.matchers.matchers}
        assert chosen <= labels | TARGET_LABELS, selector.prettify()


@pytest.mark.parametrize("uid", MODELS)
def test_names_of_series_use_labels_that_exist(uid):
    """A label that no metric has would leave a hole in the name."""
    known = {label for entry in CONTRACT.values() for label in entry["labels"]} | TARGET_LABELS
    for _, target in queries(MODELS[uid]):
        texts = [target.get(key, "") for key in ("legendFormat", "titleFormat", "textFormat")]
        assert set(re.findall(r"{{(\w+)}}", " ".join(texts))) <= known


def test_every_metric_is_on_a_dashboard():
    """A metric that nobody sees is on no dashboard for a stated reason."""
    shown = {family(selector.name) for model in MODELS.values() for selector in parsed(model)}
    assert CONTRACT.keys() - shown == set(NOT_SHOWN)


def test_vendored_files_are_as_published():
    """The copy of uPlot is the one of the stated version, with its licence."""
    folder = GRAFANA.parent / "gpuwatch/static/uplot"
    sums = tomllib.loads((folder / "VERSION.toml").read_text())["sha256"]
    files = {path.name: path for path in folder.iterdir() if path.name != "VERSION.toml"}
    assert {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()
    } == (sums)


def test_provisioning_files_are_read():
    """The examples have the keys by which Grafana knows them."""
    folder = GRAFANA / "provisioning"
    provider = yaml.safe_load((folder / "dashboards/gpuwatch.yml").read_text())["providers"][0]
    assert provider["type"] == "file"
    assert provider["options"]["path"]
    source = yaml.safe_load((folder / "datasources/gpuwatch.yml").read_text())["datasources"][0]
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"]


# On a busy machine reading takes more of a processor, and would be given up step by step.
SAMPLING = "[state]\nperiod_ms = 4.0\nbudget_ratio = 1.0\n[counters]\nbudget_ratio = 1.0\n"
HOT = f"""
{SAMPLING}[rules.gpu_hw_thermal_slowdown]
window_seconds = 2.0
[simulated]
fault_after_seconds = 25.0
"""
CAPPED = f"""
{SAMPLING}[rules.gpu_power_capped]
window_seconds = 4.0
"""
LOST = f"""
{SAMPLING}[rules.gpu_lost]
for_seconds = 2.0
"""
SERVER = """
global: {{scrape_interval: 2s, evaluation_interval: 1s}}
rule_files: [rules.yml]
scrape_configs:
  - job_name: gpuwatch
    static_configs:
      - {{targets: ["127.0.0.1:{hot}"], labels: {{instance: "hot:9973"}}}}
      - {{targets: ["127.0.0.1:{capped}"], labels: {{instance: "capped:9973"}}}}
      - {{targets: ["127.0.0.1:{lost}"], labels: {{instance: "lost:9973"}}}}
      - {{targets: ["127.0.0.1:{silent}"], labels: {{instance: "silent:9973"}}}}
"""
RULES = """
groups:
  - name: gpuwatch
    rules:
      - {alert: GpuwatchAlert, expr: gpuwatch_alert_firing == 1}
      - {alert: GpuwatchDown, expr: up == 0, labels: {severity: critical, scope: fleet}}
"""


@contextlib.contextmanager
def scraping(directory, **ports):
    """Yield a Prometheus that scrapes these ports; each may take as long as the interval."""
    (directory / "prometheus.yml").write_text(SERVER.format(**ports))
    (directory / "rules.yml").write_text(RULES)
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yield a Prometheus that saw nodes run hot, be capped, lose a GPU, and not answer."""
    if not shutil.which("prometheus"):
        pytest.skip("needs prometheus: apt-get install prometheus")
    names = ("hot", "capped", "lost", "prometheus")
    hot, capped, lost, own = (tmp_path_factory.mktemp(name) for name in names)
    with (
        Running(hot, "--source", "simulated:thermal", config=HOT) as first,
        Running(capped, "--source", "simulated:power-capped", config=CAPPED) as second,
        Running(lost, "--source", "simulated:gpu-lost", config=LOST) as third,
        scraping(
            own, hot=first.port, capped=second.port, lost=third.port, silent=free_port()
        ) as prometheus,
    ):

        def has(expr):
            with contextlib.suppress(OSError):
                return prometheus.get("query", query=expr)["result"]
            return []

        enough = (
            'ALERTS{instance="hot:9973",alert="gpu_hw_thermal_slowdown"}',
            'ALERTS{instance="capped:9973",alert="gpu_power_capped"}',
            'ALERTS{instance="lost:9973",alert="gpu_lost"}',
            'ALERTS{alertname="GpuwatchDown"}',
            'rate(gpuwatch_gpu_clock_share_hertz_count{instance="lost:9973",gpu="2"}[8s]) == 0',
            'rate(gpuwatch_gpu_lost_clock_seconds_total{instance="hot:9973",gpu="2"}[8s]) > 0.3',
        )
        missing = list(enough)

        def all_seen():
            missing[:] = [expr for expr in enough if not has(expr)]
            return not missing

        with contextlib.suppress(AssertionError):
            wait_for(all_seen, 240)
        assert missing == []
        yield prometheus


@pytest.fixture
def span():
    """Return the last minute, as scraped."""
    now = time.time()
    return Span(now - 60, now, step=2, scrape=2)


@pytest.mark.parametrize("uid", MODELS)
def test_every_query_has_data(server, span, uid):
    """Each expression, as Grafana would send it, has an answer from a real Prometheus."""
    model = MODELS[uid]
    chosen = choose(server, model, span, {"instance": ["hot:9973"], "gpu": ["2"]})
    if uid in ("gpuwatch-fleet", "gpuwatch-self"):
        chosen = choose(server, model, span, {})
    values = pattern(model, chosen) | span.globals()
    asked = [
        (panel["title"], target["expr"], values | panel["scoped"])
        for panel in preview.repeated(model["panels"], chosen)
        for target in panel.get("targets", [])
    ]
    asked += [(one["name"], one["expr"], values) for one in model["annotations"]["list"]]

    def empty():
        return {
            (uid, title)
            for title, expr, scoped in asked
            if not server.get("query", query=substitute(expr, scoped))["result"]
        } - BUSY

    expected = {one for one in EMPTY if one[0] == uid}
    with contextlib.suppress(AssertionError):  # a busy machine may just have missed a scrape
        wait_for(lambda: empty() == expected, 60)
    assert empty() == expected


def test_tables_rank_the_worst_first(server, span):
    """The hot GPU comes before its siblings; the silent node is missing."""
    model = MODELS["gpuwatch-fleet"]
    values = pattern(model, choose(server, model, span, {})) | span.globals()
    tables = {panel["title"]: panel for panel in panels(model) if panel["type"] == "table"}

    def rows(title, letter):
        target = next(one for one in tables[title]["targets"] if one["refId"] == letter)
        found = server.get("query", query=substitute(target["expr"], values))["result"]
        return sorted(found, key=lambda row: -float(row["value"][1]))

    gpus = [(row["metric"]["instance"], row["metric"]["gpu"]) for row in rows("GPUs", "B")]
    assert next(gpu for instance, gpu in gpus if instance == "hot:9973") == "2"
    firing = [row["value"][1] for row in rows("Firing alerts", "A")]
    assert firing[0] == "3"
    assert "1" in firing
    missing = {(row["metric"]["instance"], row["metric"]["what"]) for row in rows("Missing", "A")}
    assert missing == {
        ("silent:9973", "node does not answer"),
        ("lost:9973", "GPU does not answer"),
        ("lost:9973", "fewer GPUs than expected"),
    }


def test_a_lost_gpu_shows_no_good_values(server, span):
    """Its totals stand still, which must not read as 0 % lost, 0 % throttled or a clock of 0."""
    model = MODELS["gpuwatch-gpu"]
    values = pattern(model, choose(server, model, span, {"instance": ["lost:9973"], "gpu": ["2"]}))
    shown = {}
    for panel in panels(model):
        if panel["type"] in ("timeseries", "state-timeline", "heatmap"):
            for target in panel["targets"]:
                expr = substitute(target["expr"], values | span.globals())
                found = server.get("query", query=expr)["result"]
                shown.setdefault(panel["title"], []).extend(row["value"][1] for row in found)
    named = {title: found for title, found in shown.items() if found}
    assert named.pop("Alerts") == ["3"]
    assert named.pop("Worst reason for a low clock") == ["10"]
    # What covers the trailing minute still has the time before the loss, and a value that is read
    # every 10 s holds for 20.
    minute = {"SM clock", "Power", "Power, every 20 ms", "Utilization", "Margin", *TEMPERATURES}
    assert named.keys() <= {*minute, *OF_CANARIES, "PCIe link", "NVLink fabric"}
    assert len(shown["SM clock"]) < 4


@pytest.mark.parametrize("uid", MODELS)
def test_preview_draws_each_panel(server, span, uid):
    """The page of the preview has every panel, with its data."""
    page = preview.page(server, MODELS[uid], span, {"instance": ["hot:9973"], "gpu": ["2"]})
    data = json.loads(re.search(r"const DATA = (.*);</script>", page)[1])
    titles = [panel["title"] for panel in data["panels"]]
    assert len(titles) >= len(MODELS[uid]["panels"])
    assert not [title for title in titles if "$" in title]
    kinds = {panel["type"] for panel in data["panels"]} - {"row"}
    drawn = set(re.findall(r'^  "?([\w-]+)"?\(body, panel\)', preview_script(), re.MULTILINE))
    assert kinds <= drawn


def preview_script():
    """Return the script that draws."""
    return (GRAFANA / "preview.js").read_text()

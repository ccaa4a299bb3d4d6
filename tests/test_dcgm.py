"""The page under dcgm-exporter's names: the same values, in DCGM's units, for who reads those."""

import contextlib
import gzip
import http.server
import re
import shutil
import socket
import threading
import tomllib
import urllib.parse
import urllib.request
from dataclasses import replace

import migration
import pytest
from populated import TICK_NS, later, snapshot
from prometheus_client.parser import text_string_to_metric_families
from running import Running, wait_for
from test_prometheus import Prometheus

from gpuwatch import dcgm
from gpuwatch.clock import SECOND_NS
from gpuwatch.exposition import Exposition
from gpuwatch.signals import Entity, Kind
from gpuwatch.snapshot import KMSG, Snapshot
from gpuwatch.totals import EventTotal

GPU = Entity("gpu", "0")
FIELDS = {name: field for field in dcgm.fields() for name in field.names}
ABSENT = {name for one in tomllib.loads(dcgm.TABLE.read_text())["absent"] for name in one["names"]}
# What the help says the value is in, and what makes it of ours.
UNITS = {
    "MHz": 1e-6,
    "C": 1.0,
    "W": 1.0,
    "mJ": 1000.0,
    "MiB": 1 / 1048576,
    "ns": 1e9,
    "%, under both names": 100.0,
    "B/s": 1.0,
    "thousands of KiB/s": 1 / 1024 / 1000,
}
# What is on in dcgm-exporter's etc/default-counters.csv, with its type there.
DEFAULT_COUNTERS = {
    "gauge": """
        DCGM_FI_DEV_SM_CLOCK DCGM_FI_DEV_MEM_CLOCK DCGM_FI_DEV_MEMORY_TEMP DCGM_FI_DEV_GPU_TEMP
        DCGM_FI_DEV_POWER_USAGE DCGM_FI_DEV_GPU_UTIL DCGM_FI_DEV_MEM_COPY_UTIL DCGM_FI_DEV_ENC_UTIL
        DCGM_FI_DEV_DEC_UTIL DCGM_FI_DEV_XID_ERRORS DCGM_FI_DEV_FB_FREE DCGM_FI_DEV_FB_USED
        DCGM_FI_DEV_FB_RESERVED DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL DCGM_FI_DEV_VGPU_LICENSE_STATUS
        DCGM_FI_DEV_ROW_REMAP_FAILURE DCGM_FI_PROF_GR_ENGINE_ACTIVE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE
        DCGM_FI_PROF_DRAM_ACTIVE DCGM_FI_PROF_PCIE_TX_BYTES DCGM_FI_PROF_PCIE_RX_BYTES
    """,
    "counter": """
        DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION DCGM_FI_DEV_PCIE_REPLAY_COUNTER
        DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS
    """,
}


def distinct(count=2):
    """Return a snapshot in which no two columns of a GPU have the same value."""
    shown = snapshot(count)
    for order, column in enumerate(shown.columns, 1):
        key = column.entity, column.name
        if column.signal.kind is Kind.COUNTER:
            shown.totals.counters[key] = 1000.0 + order
        elif column.signal.kind is Kind.GAUGE:
            for tick in shown.ticks:
                tick.windows[column.entity][column.name].last = 2e6 + 1024 * order
    for order, (key, total) in enumerate(shown.totals.bits.items()):
        shown.totals.bits[key] = total._replace(active_ns=order * SECOND_NS)
    constants = [(column, 30.0 + order) for order, (column, _) in enumerate(shown.constants)]
    return replace(shown, constants=constants, totals=shown.totals.frozen())


def samples(body):
    """Return {name: {(gpu, instance): (value, labels)}} of a page."""
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for one in family.samples:
            instance = one.labels.get("GPU_I_ID", one.labels.get("gpu_instance", ""))
            # The parser calls every counter _total.
            name = one.name.removesuffix("_total") if one.name.startswith("DCGM") else one.name
            place = found.setdefault(name, {})
            place.setdefault((one.labels.get("gpu"), instance), []).append((one.value, one.labels))
    return found


def value(found, name, gpu="0", instance=""):
    """Return the one value that a GPU has under a name, None if it has none."""
    here = found.get(name, {}).get((gpu, instance), [(None, {})])
    assert len(here) == 1, (name, here)
    return here[0][0]


def ours(found, column, gpu="0", instance=""):
    """Return the value of a column on gpuwatch's own page."""
    name, _, label = column.partition("{")
    own = dict(re.findall(r'(\w+)="(\w+)"', label))
    here = found[f"gpuwatch_{name}"][gpu, instance]
    (one,) = [value for value, labels in here if own.items() <= labels.items()]
    return one


def test_each_series_is_ours_in_dcgms_unit():
    """All names of a field have the value that our own page has, converted as its help says."""
    shown = distinct()
    own, found = samples(Exposition().render(shown)), samples(dcgm.render(shown))
    compared = 0
    for field in dcgm.fields():
        unit = re.search(r"\(in (.*?)\)", field.help)
        assert field.factor == pytest.approx(UNITS[unit[1]] if unit else 1.0), field.help
        if field.rate or field.columns[0] in migration.OWN:
            continue
        places = [("0", "", field.columns[0])]
        places.append(("1", "1", field.instance) if field.instance else ("1", "", *field.columns))
        for gpu, instance, column in places:
            expected = ours(own, column, gpu, instance) * field.factor
            for name in field.names:
                assert value(found, name, gpu, instance) == pytest.approx(expected, rel=1e-6), name
                compared += 1
    assert compared > 150


def test_the_default_fields_of_dcgm_exporter_are_served_or_explained():
    """Each with the type that it has there; whoever misses one finds it in the document."""
    for kind, names in DEFAULT_COUNTERS.items():
        for name in names.split():
            assert name in ABSENT or FIELDS[name].type == kind, name
    assert not FIELDS.keys() & ABSENT
    for family in text_string_to_metric_families(dcgm.render(distinct()).decode()):
        assert family.type == FIELDS[family.name].type
        assert family.documentation == FIELDS[family.name].help


def test_labels_are_those_of_dcgm_exporter():
    """Names, order and spelling, as its template and NVML write them; integers have no point."""
    lines = dcgm.render(snapshot(2)).decode().splitlines()
    line = next(line for line in lines if line.startswith("DCGM_FI_DEV_POWER_USAGE{"))
    warm = next(line for line in lines if line.startswith("DCGM_FI_DEV_GPU_TEMP{"))
    assert warm.endswith("} 61")
    host = socket.gethostname()
    assert line == (
        'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-0000-0",pci_bus_id="00000000:10:00.0",'
        f'device="nvidia0",modelName="NVIDIA H200",Hostname="{host}",hostname="{host}",'
        'DCGM_FI_DRIVER_VERSION="580.1"} 512.25'
    )


def test_a_divided_gpu_has_memory_and_activity_by_instance():
    """A sum over a node counts no byte of a MIG GPU twice, and no watt."""
    found = samples(dcgm.render(snapshot(2)))
    ((used, labels),) = found["DCGM_FI_DEV_FB_USED"]["1", "1"]
    assert used == 2**34 / 2**20
    assert (labels["GPU_I_ID"], labels["GPU_I_PROFILE"]) == ("1", "3g.71gb")
    assert labels["UUID"] == "GPU-0000-1"
    for field in dcgm.fields():
        if field.instance:
            assert {place for name in field.names for place in found[name]} == {
                ("0", ""),
                ("1", "1"),
            }
    assert set(found["DCGM_FI_DEV_POWER_USAGE"]) == {("0", ""), ("1", "")}


def test_what_is_not_known_is_absent():
    """No 0 and no blank number stands for what nobody has read."""
    assert dcgm.render(Snapshot(snapshot(1).totals)) == b""
    shown = later(later(snapshot(1), 5000, covered_ns=0), 5001, covered_ns=0)
    unread = {field.columns[0] for field in dcgm.fields() if not field.rate}
    unread = {name for name in unread if not re.search("_total|limit|threshold|xid_last", name)}
    found = samples(dcgm.render(replace(shown, constants=(), released={"gpus": True})))
    assert unread
    for field in dcgm.fields():
        if field.columns[0] in unread or field.rate:
            assert not found.keys() & set(field.names)
    assert "DCGM_FI_DEV_POWER_VIOLATION" not in found
    shown.totals.counters[GPU, "gpu_energy_joules_total"] = float("nan")
    assert "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION" not in samples(dcgm.render(shown))


def test_throttle_reasons_are_one_number():
    """The bits are those of nvml.h; one reason that is not known makes all of them so."""
    shown = snapshot(1)
    names = ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS")
    windows = shown.ticks[0].windows[GPU]
    windows['gpu_throttle_active{reason="hw_thermal_slowdown"}'].maximum = 1.0
    assert [value(samples(dcgm.render(shown)), name) for name in names] == [0x44, 0x44]
    for tick in shown.ticks:
        del tick.windows[GPU]['gpu_throttle_active{reason="sync_boost"}']
    assert not samples(dcgm.render(shown)).keys() & set(names)


def test_the_newest_xid_is_shown():
    """0 only while somebody would tell; the code of the newest one otherwise."""
    shown = snapshot(1)
    shown.totals.xids.clear()
    found = samples(dcgm.render(shown))["DCGM_FI_DEV_XID_ERRORS"]["0", ""]
    assert [(one, labels["err_code"]) for one, labels in found] == [(0, "0")]
    for tick in shown.ticks:
        tick.windows[KMSG]["source_up"].last = 0.0
    assert "DCGM_FI_DEV_XID_ERRORS" not in samples(dcgm.render(shown))
    shown.totals.xids[GPU, "79"] = EventTotal(1, 200.0)
    shown.totals.xids[GPU, "31"] = EventTotal(3, 100.0)
    shown.totals.xids[GPU, "no number"] = EventTotal(1, 300.0)
    ((code, labels),) = samples(dcgm.render(shown))["DCGM_FI_DEV_XID_ERRORS"]["0", ""]
    assert (code, labels["err_code"]) == (79, "79")
    assert labels["err_msg"] == "the GPU has fallen off the bus"


def rates(shown, *before):
    """Return the rates of GPU 0: PCIe sent, NVLink sent, all NVLinks."""
    found = samples(dcgm.render(shown, before))
    return [
        value(found, name)
        for name in (
            "DCGM_FI_PROF_PCIE_TX_BYTES",
            "DCGM_FI_PROF_NVLINK_TX_BYTES",
            "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        )
    ]


def test_rates_are_what_counters_rose_by():
    """Time of which counters know nothing is left out; a counter that fell has no rate."""
    shown = distinct(1)
    sent, got = ("gpu_nvlink_transmitted_bytes_total", "gpu_nvlink_received_bytes_total")
    counters, end_ns = shown.totals.counters, shown.ticks[0].end_ns
    pcie = (GPU, "gpu_pcie_transmitted_bytes_total")
    old = {pcie: counters[pcie] - 800, (GPU, sent): 0.0, (GPU, got): 0.0}
    counters[GPU, sent], counters[GPU, got] = 1024e3 * 20, 1024e3 * 60
    before = dcgm.Counts(end_ns - 10 * SECOND_NS, old, dict.fromkeys(old, 0))
    shown.totals.uncovered_ns |= dict.fromkeys(old, 2 * SECOND_NS)
    assert rates(shown, before) == [100.0, 2560000.0, 10.0]
    unread = before._replace(end_ns=before.end_ns - SECOND_NS, counters={(GPU, sent): float("nan")})
    assert rates(shown, unread, before) == [100.0, 2560000.0, 10.0]
    assert rates(shown, unread) == rates(shown) == [None, None, None]
    assert rates(shown, before._replace(end_ns=end_ns)) == [None, None, None]
    assert rates(shown, before._replace(counters={**old, (GPU, got): 1e12}))[1:] == [
        2560000.0,
        None,
    ]
    for tick in shown.ticks:
        tick.windows[GPU][sent].covered_ns = 0
    assert rates(shown, before) == [100.0, None, None]


def test_rates_look_ten_seconds_back():
    """They do not depend on who asks how often; a tick that is shown twice changes nothing."""
    past, shown = dcgm.Past(), snapshot(1)
    (first,) = past.add(replace(shown, totals=shown.totals.frozen()))
    ends = [shown.ticks[0].end_ns]
    for number in range(4002, 4102):
        shown = later(shown, number)
        ends.append(shown.ticks[0].end_ns)
        kept = past.add(replace(shown, totals=shown.totals.frozen()))
        assert past.add(shown) == kept
    before = kept[0]
    assert first.end_ns == ends[0]
    assert 10 <= (ends[-1] - before.end_ns) / SECOND_NS < 11
    key = (GPU, "gpu_pcie_received_bytes_total")
    assert shown.totals.counters[key] - before.counters[key] == 10 * (
        (ends[-1] - before.end_ns) / TICK_NS
    )
    assert past.add(Snapshot(shown.totals)) == kept


def test_the_document_has_the_table_as_it_is():
    """Whoever changes the data also runs grafana/migration.py."""
    text = migration.DOCUMENT.read_text()
    assert migration.written(text) == text
    assert all(f"`{name}`" in text for name in FIELDS.keys() | ABSENT)


PATH = "/metrics?format=dcgm"
CONFIG = """
[state]
period_ms = 4.0
"""
JOBS = """
  - job_name: dcgm
    scrape_interval: 500ms
    params: {{format: [dcgm]}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
  - job_name: still
    scrape_interval: 500ms
    metrics_path: /ours
    static_configs: [{{targets: ["127.0.0.1:{still}"]}}]
  - job_name: still-dcgm
    scrape_interval: 500ms
    metrics_path: /dcgm
    static_configs: [{{targets: ["127.0.0.1:{still}"]}}]
"""
# The queries of NVIDIA's dashboard 12239, in the repository of dcgm-exporter and at grafana.com.
BY = "by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)"
DASHBOARD = [
    *(
        expr.replace("CHOSEN", 'Hostname=~"{host}", gpu=~".*"')
        for expr in (
            "max(DCGM_FI_DEV_GPU_TEMP{CHOSEN}) by (Hostname, gpu, uuid)",
            "avg(DCGM_FI_DEV_GPU_TEMP{CHOSEN})",
            "max(DCGM_FI_DEV_POWER_USAGE{CHOSEN}) by (Hostname, gpu, uuid)",
            "sum(max(DCGM_FI_DEV_POWER_USAGE{CHOSEN}) by (gpu))",
            "max(DCGM_FI_DEV_SM_CLOCK{CHOSEN} * 1000000) by (Hostname, UUID, gpu)",
            f"max(DCGM_FI_PROF_GR_ENGINE_ACTIVE{{CHOSEN}}) {BY}",
            f"max(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{CHOSEN}}) {BY}",
            f"max(DCGM_FI_DEV_FB_USED{{CHOSEN}}) {BY}",
            "DCGM_FI_DEV_FB_FREE{CHOSEN}",
        )
    ),
    *(
        f'{name}{{instance=~".*", gpu=~".*"}}'
        for name in (
            "DCGM_FI_DEV_GPU_TEMP",
            "DCGM_FI_DEV_POWER_USAGE",
            "DCGM_FI_DEV_SM_CLOCK",
            "DCGM_FI_DEV_GPU_UTIL",
            "DCGM_FI_DEV_FB_USED",
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        )
    ),
]


@contextlib.contextmanager
def serving(pages):
    """Serve bodies by path; yields the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(pages[self.path])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """Yield a simulated node with a GPU that is divided."""
    directory = tmp_path_factory.mktemp("daemon")
    with Running(directory, "--source", "simulated:mig", config=CONFIG) as running:
        wait_for(lambda: b"\nDCGM_FI_DEV_FB_USED{" in running.get(PATH)[1], 30, "GPUs")
        yield running


@pytest.fixture(scope="module")
def prometheus(daemon, tmp_path_factory):
    """Yield a Prometheus that scrapes the node and a still picture, both under both names."""
    if not shutil.which("prometheus"):
        pytest.skip("needs prometheus: apt-get install prometheus")
    shown = distinct()
    pages = {"/ours": Exposition().render(shown), "/dcgm": dcgm.render(shown)}
    with (
        serving(pages) as still,
        Prometheus(
            tmp_path_factory.mktemp("own") / "prometheus",
            daemon.port,
            JOBS.format(port=daemon.port, still=still),
        ) as server,
    ):
        enough = (
            'DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{job="dcgm"}',
            'rate(gpuwatch_gpu_nvlink_received_bytes_total{job="still"}[1m])',
            'DCGM_FI_DEV_GPU_TEMP{job="still-dcgm"}',
        )
        wait_for(lambda: all(map(server.query, enough)), 60, "scrapes under both names")
        yield server


def test_it_is_asked_for_by_the_scrape(daemon):
    """`format=dcgm` gives the page, also compressed; any other format one line."""
    wait_for(lambda: b"gpuwatch_gpu_power_watts" in daemon.get("/metrics")[1])

    def alike() -> bool:
        status, body = daemon.get(PATH)
        assert status == 200
        assert b"gpuwatch_" not in body
        request = urllib.request.Request(
            f"http://127.0.0.1:{daemon.port}{PATH}", headers={"Accept-Encoding": "gzip"}
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert answer.headers["Content-Encoding"] == "gzip"
            return samples(gzip.decompress(answer.read())).keys() == samples(body).keys()

    wait_for(alike)  # while the node starts, more comes from page to page
    for wrong in ("DCGM", "", "openmetrics"):
        status, body = daemon.get(f"/metrics?format={wrong}")
        assert (status, body.count(b"\n")) == (400, 1)
    assert b"gpuwatch_gpu_power_watts" in daemon.get("/metrics")[1]


def test_the_public_dashboard_has_data(prometheus):
    """Each of its queries has an answer for each GPU, and for the instances of a divided one."""
    host = re.escape(socket.gethostname()).replace("\\", "\\\\")
    for expr in DASHBOARD:
        assert prometheus.query(expr.replace("{host}", host)), expr
    divided = prometheus.query(
        'count(DCGM_FI_PROF_GR_ENGINE_ACTIVE{job="dcgm",GPU_I_PROFILE!="",GPU_I_ID!=""})'
    )
    assert divided > [1]


def asked(prometheus, expr, job):
    """Return the values that an expression has in a job, by GPU and instance."""
    found = prometheus.get("query?" + urllib.parse.urlencode({"query": expr}))["result"]
    return {
        (one["metric"]["gpu"], one["metric"].get("GPU_I_ID", "")): float(one["value"][1])
        for one in found
        if one["metric"]["job"] == job
    }


def test_the_document_gives_the_same_numbers(prometheus):
    """The expression beside an old name has its value, and data where it is another kind."""
    for field in dcgm.fields():
        new = asked(prometheus, migration.promql(field), "still")
        assert new, field
        if field.rate:
            assert asked(prometheus, field.names[0], "dcgm"), field
        elif field.columns[0] not in migration.OWN:
            old = asked(prometheus, field.names[0], "still-dcgm")
            assert old["0", ""] == pytest.approx(new["0", ""], rel=1e-6), field
            if field.instance:
                within = asked(prometheus, migration.promql(field, instance=True), "still")
                assert [old["1", "1"]] == pytest.approx(list(within.values()), rel=1e-6), field

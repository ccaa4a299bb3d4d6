"""The page's API over HTTP: a real daemon, its rings, a recording, the stream, and its readers."""

import contextlib
import http.client
import json
import math
import os
import signal
import time
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import Running, descendants, wait_for

from gpuwatch.cli import main
from gpuwatch.clock import SECOND_NS
from gpuwatch.ring import RingReader
from gpuwatch.summation import row_dtype
from gpuwatch.tmpfs import ring_directory

CONFIG = """
[simulated]
gpus = 2
[state]
period_ms = 5
realtime = false
budget_ratio = 1
[recorder]
free_ratio = 0
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """Run a made-up node; four seconds after its start the power brake is on."""
    directory = tmp_path_factory.mktemp("api")
    config = CONFIG.replace("[simulated]", "[simulated]\nfault_after_seconds = 4")
    with Running(directory, "--source", "simulated:power-brake", config=config) as running:
        yield running


def asked(daemon, path, *parameters, **more):
    """Return the JSON of a GET that is answered with 200."""
    status, body = got(daemon, path, *parameters, **more)
    assert status == 200, body
    return json.loads(body)


def got(daemon, path, *parameters, **more):
    query = urllib.parse.urlencode([*parameters, *more.items()])
    return daemon.get(f"/api/v1/{path}" + (f"?{query}" if query else ""), timeout=70)


def await_samples(daemon, seconds):
    """Wait until rings hold so many seconds."""
    wait_for(lambda: (asked(daemon, "columns")["start"] or math.inf) < time.time() - seconds)


def reader_pids(daemon):
    return [pid for pid, line in descendants(daemon.process.pid) if "gpuwatch.reader" in line]


@contextlib.contextmanager
def stream(daemon):
    """Yield an iterator over the statuses of one page."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
    connection.request("GET", "/api/v1/stream")
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"

    def statuses():
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    try:
        yield statuses()
    finally:
        connection.close()


def test_the_stream_tells_a_fault_as_it_happens(daemon):
    """The status comes at once, then for new ticks; a fault is in it within two more of them."""
    with stream(daemon) as statuses:
        first = next(statuses)
        assert first["source"]["kind"] == "simulated"
        closed, late = first["ticks_closed"], 0
        for status in statuses:
            assert status["ticks_closed"] > closed
            closed = status["ticks_closed"]
            times = {event["name"]: event["time_ns"] for event in status["events"]}
            if "scenario_fault" in times:
                if any(name.startswith("gpu_power_brake") for name in times):
                    break
                late += 1
        assert late <= 2


def test_a_zoom_to_milliseconds_gives_the_samples_of_the_ring(daemon):
    """Where nothing changes within a step it is the sample, bit for bit and in order."""
    column = "gpu_power_watts"
    await_samples(daemon, 4)
    start = time.time() - 2
    answer = asked(
        daemon, "series", signal=column, entity="gpu/1", start=start, end=start + 1.5, points=1500
    )
    assert (answer["source"], answer["step"]) == ("ring", 0.001)
    (series,) = answer["series"]
    steps = zip(series["min"], series["max"], strict=True)
    shown = changes([low for low, high in steps if low is not None and low == high])
    status = daemon.status()
    offset_ns = status["realtime_ns"] - status["time_ns"]
    read = []
    for path in ring_directory(daemon.runtime).glob("state.*.ring"):
        ring = RingReader(path)
        gauges = ring.schema.columns[ring.schema.integers :]
        rows = np.frombuffer(ring.read(0)[1], row_dtype(ring.schema))
        seconds = (rows["time_ns"] + offset_ns) / SECOND_NS - start
        inside = (seconds > -0.1) & (seconds < 1.6)
        for index, (entity, signal_, _) in enumerate(gauges):
            if (entity.id, signal_.name) == (status["gpus"][1]["pci_bus_id"], column):
                read += [float(str(value)) for value in rows["gauges"][inside, index]]
        ring.close()
    assert len(shown) > 4
    in_order = iter(changes(read))
    assert all(value in in_order for value in shown)


def changes(values):
    """Return the values without those that repeat the one before."""
    return [
        value for value, before in zip(values, [None, *values], strict=False) if value != before
    ]


def test_live_values_follow_the_node(daemon):
    """What a page asks for once a second: all GPUs, ports and the host, on one grid."""
    now = time.time()
    signals = [
        "gpu_clock_hertz",
        "gpu_throttle_active",
        "rdma_port_data_received_bytes_total",
        "host_pressure_seconds_total",
        "gpu_nvlink_received_bytes_total",
    ]
    answer = wait_for(
        lambda: (
            (
                found := asked(
                    daemon,
                    "series",
                    *[("signal", name) for name in signals],
                    start=time.time() - 4,
                    end=time.time(),
                    points=16,
                )
            )
            and len({line["name"].partition("{")[0] for line in found["series"]}) == len(signals)
            and found
        )
    )
    assert all(len(line["mean"]) == 16 for line in answer["series"])
    assert answer["until"] > now - 5
    clocks = [line for line in answer["series"] if line["name"] == 'gpu_clock_hertz{clock="sm"}']
    assert [line["entity"] for line in clocks] == [["gpu", "0"], ["gpu", "1"]]
    assert all(mean is None or 2e8 < mean < 2e9 for line in clocks for mean in line["mean"])


def test_what_a_look_costs_is_published(daemon):
    """The CPU time of readers is told as that of any child is."""
    name = 'gpuwatch_process_cpu_seconds_total{duty="reader"}'
    before = daemon.scrape()[name]
    assert daemon.get("/api/v1/columns")[0] == 200
    wait_for(lambda: daemon.scrape()[name] > before)
    assert {"duty": "reader", "cpu_seconds": daemon.scrape()[name]} in daemon.status()["children"]


def test_a_recording_is_read_by_its_name(daemon, capsys):
    """Listed, judged, drawn and fetched; what is asked of it needs no running node."""
    await_samples(daemon, 2)
    assert main(["record", "--last", "3s", "--path.runtime", str(daemon.runtime)]) == 0
    path = Path(capsys.readouterr().out.split()[-1])
    listed = asked(daemon, "recordings")["recordings"]
    mine = next(one for one in listed if one["name"] == path.name)
    assert (mine["rule"], mine["entity"], mine["complete"]) == ("request", None, True)
    assert mine["bytes"] == path.stat().st_size
    name = {"recording": path.name}
    columns = asked(daemon, "columns", **name)
    assert columns["start"] == mine["start"]
    series = asked(
        daemon,
        "series",
        signal="gpu_clock_hertz",
        points=10,
        **name,
        start=mine["start"],
        end=mine["end"],
    )
    assert series["source"] == "recording"
    assert {tuple(line["entity"]) for line in series["series"]} == {("gpu", "0"), ("gpu", "1")}
    status = asked(daemon, "status", time=mine["end"], **name)
    assert [gpu["gpu"] for gpu in status["gpus"]] == ["0", "1"]
    assert status["recording"]["name"] == path.name
    code, body = daemon.get(f"/api/v1/recordings/{path.name}")
    assert (code, body) == (200, path.read_bytes())


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("series?signal=gpu_power_watts&start=nan&end=5", 400),
        ("series?signal=gpu_power_watts&start=5&end=inf", 400),
        ("series?signal=gpu_power_watts&start=5&end=4", 400),
        ("series?signal=gpu_power_watts&start=5", 400),
        ("series?signal=gpu_power_watts&start=1&end=2&points=2001", 400),
        ("series?signal=gpu_power_watts&start=1&end=2&points=-1", 400),
        ("series?signal=gpu_power_watts&start=1&start=2&end=3", 400),
        ("series?signal=no%20name&start=1&end=2", 400),
        ("series?start=1&end=2", 400),
        ("series?signal=x&entity=8/0&start=1&end=2", 400),
        ("series?signal=x&start=1&end=2&recording=..%2fx.gwr", 400),
        ("series?signal=x&start=1&end=2&recording=none.gwr", 404),
        ("series?signal=x&start=1&end=2&step=3", 400),
        ("columns?recording=none.gwr", 404),
        ("status?recording=none.gwr", 404),
        ("status?time=5", 400),
        ("stream?x=1", 400),
        ("recordings/none.gwr", 404),
        ("recordings/..%2f..%2fgpuwatch.sqlite", 404),
        ("recordings/%2e%2e", 400),
    ],
)
def test_nonsense_is_answered_in_one_line(daemon, path, status):
    """The key that is wrong, and what to give."""
    code, body = daemon.get(f"/api/v1/{path}")
    assert (code, body.count(b"\n")) == (status, 0)
    assert b"Traceback" not in body


WORDS = st.text(max_size=8) | st.sampled_from(
    ["gpu_power_watts", "gpu/0", "0", "1e9", "-1", "nan", "x.gwr", "../x.gwr", "2000", "9" * 30]
)
KEYS = st.sampled_from(["signal", "entity", "start", "end", "points", "recording", "time", "x"])
PATHS = st.sampled_from(["series", "columns", "status", "recordings", "recordings/%00b.gwr"])


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(PATHS, st.lists(st.tuples(KEYS, WORDS), max_size=6))
def test_any_question_gets_an_answer(daemon, path, parameters):
    """Whatever is asked: JSON in one line, and never a fault of gpuwatch."""
    code, body = got(daemon, path, *parameters)
    assert code in (200, 400, 404)
    assert body.count(b"\n") == 0
    assert (code != 200) == ("error" in json.loads(body))


def test_a_reader_that_stands_still_holds_up_no_scrape(daemon):
    """Metrics, status and stream go on; a reader that was killed is started anew."""
    now = time.time()
    ask = {"signal": "gpu_power_watts", "start": now - 2, "end": now}
    asked(daemon, "series", **ask)
    pids = reader_pids(daemon)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert daemon.get("/metrics")[0] == 200
    assert daemon.get("/api/v1/status")[0] == 200
    with stream(daemon) as statuses:
        assert next(statuses)["ticks_closed"] < next(statuses)["ticks_closed"]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert asked(daemon, "series", **ask)["series"]
    assert not set(reader_pids(daemon)) & set(pids)

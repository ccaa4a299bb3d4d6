"""From the fault to the receiver: daemons, and real servers with the generated rules."""

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from running import Running, free_port, wait_for

ROOT = Path(__file__).parent.parent
RULES = ROOT / "grafana/prometheus/gpuwatch.rules.yml"
PAGER = ROOT / "grafana/alertmanager/alertmanager.yml"
RUNBOOKS = ROOT / "docs/runbooks"

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("prometheus-alertmanager")),
    reason="needs both servers: apt-get install prometheus prometheus-alertmanager",
)

HOT = """
[state]
period_ms = 4.0
[rules.gpu_hw_thermal_slowdown]
window_seconds = 2.0
hold_seconds = 2.0
[simulated]
fault_after_seconds = 15.0
fault_seconds = 8.0
"""
# Every rule at work within the run, so that one which errs would be seen.
CAPPED = "[state]\nperiod_ms = 4.0\n" + "".join(
    f"[rules.{rule}]\nwindow_seconds = 5.0\nhold_seconds = 2.0\n"
    for rule in (
        "gpu_hw_thermal_slowdown",
        "gpu_thermal_slowdown",
        "gpu_power_brake",
        "gpu_power_brake_severe",
        "gpu_power_capped",
    )
)


class Receiver(ThreadingHTTPServer):
    """Takes in what Alertmanager sends: (receiver, monotonic nanoseconds, message)."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Door)
        self.messages = []
        self._thread = threading.Thread(target=self.serve_forever)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self._thread.join()
        self.server_close()

    def to(self, name, status):
        """Return the messages to one receiver with that status."""
        return [
            (arrived_ns, message)
            for receiver, arrived_ns, message in list(self.messages)
            if receiver == name and message["status"] == status
        ]


class Door(BaseHTTPRequestHandler):
    """Keeps the body of each POST."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        arrived_ns = time.monotonic_ns()
        self.server.messages.append((self.path.strip("/"), arrived_ns, json.loads(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""


class Server:
    """A server of Debian's in a directory of its own, ready when entered."""

    def __init__(self, directory, port, *command):
        self.address = f"http://127.0.0.1:{port}"
        self.log_path = directory / "server.log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log, cwd=directory
            )

    def __enter__(self):
        try:
            wait_for(self.is_ready, 60, "the server is ready")
        except AssertionError as late:
            self.__exit__()
            raise AssertionError(self.log_path.read_text()) from late
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)

    def is_ready(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}/-/ready"):
            return True
        return False

    def call(self, path, body=None):
        """Return the JSON of an answer; with a body it is a POST."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/{path}", data, headers)
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read() or "null")

    def query(self, expression):
        """Return label sets and values of an instant query to Prometheus."""
        path = "api/v1/query?" + urllib.parse.urlencode({"query": expression})
        return [(one["metric"], one["value"][1]) for one in self.call(path)["data"]["result"]]


def alertmanager(directory, receiver_port=9):
    """Return an Alertmanager with the example's config, in a hurry."""
    directory.mkdir()
    config = yaml.safe_load(PAGER.read_text())
    for route in (config["route"], *config["route"]["routes"]):
        route["group_wait"] = route["group_interval"] = "1s"
    for receiver in config["receivers"]:
        for hook in receiver.get("webhook_configs", ()):
            hook["url"] = hook["url"].replace(":9099", f":{receiver_port}")
    (directory / "alertmanager.yml").write_text(yaml.safe_dump(config))
    return Server(
        directory,
        free_port(),
        "prometheus-alertmanager",
        "--config.file=alertmanager.yml",
        "--storage.path=data",
        "--cluster.listen-address=",
    )


def prometheus(directory, pager, targets):
    """Return a Prometheus with the generated rules, in a hurry; targets are {rack: port}."""
    directory.mkdir()
    rules = RULES.read_text()
    assert "keep_firing_for: 5m" in rules
    (directory / "gpuwatch.rules.yml").write_text(
        rules.replace("keep_firing_for: 5m", "keep_firing_for: 1s")
    )
    jobs = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"rack": rack}}
        for rack, port in targets.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["gpuwatch.rules.yml"],
        "alerting": {
            "alertmanagers": [
                {"static_configs": [{"targets": [pager.address.removeprefix("http://")]}]}
            ]
        },
        "scrape_configs": [{"job_name": "gpuwatch", "static_configs": jobs}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    return Server(
        directory,
        free_port(),
        "prometheus",
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
    )


@contextlib.contextmanager
def fleet(directory):
    """Run three nodes: one gets hot, one is at its power limit, one replays a real training."""
    for name in ("hot", "cap", "two"):
        (directory / name).mkdir()
    with (
        Running(directory / "cap", "--source", "simulated:power-capped", config=CAPPED) as full,
        Running(directory / "two", "--source", "replay:bundled", config=CAPPED) as replayed,
        Running(directory / "hot", "--source", "simulated:thermal", config=HOT) as hot,
    ):
        yield {"hot": hot, "capped": full, "replayed": replayed}


def fired(judge):
    """Return rack, name and severity of each alert that fired in the last minutes."""
    found = judge.query('max_over_time(ALERTS{alertstate="firing"}[5m])')
    return {(one["rack"], one["alertname"], one["severity"]) for one, _ in found}


def test_a_fault_reaches_the_receiver_and_health_does_not(tmp_path, capsys):
    """A hot GPU is told where it belongs, with its runbook, and resolved; a power cap is not."""
    with (
        Receiver() as receiver,
        alertmanager(tmp_path / "alertmanager", receiver.server_port) as pager,
        fleet(tmp_path) as nodes,
    ):
        ports = {name: node.port for name, node in nodes.items()}
        with prometheus(tmp_path / "prometheus", pager, ports) as judge:
            told = wait_for(lambda: receiver.to("automation", "firing"), 60, "the fault is told")
            (fault,) = nodes["hot"].events("scenario_fault")
            wait_for(lambda: receiver.to("automation", "resolved"), 60, "its end is told")
            wait_for(lambda: len(fired(judge)) >= 3, 30, "the power caps are seen")
            alerts = fired(judge)
            series = judge.query('last_over_time({__name__=~"gpuwatch:.*"}[5m])')
            recorded = {one["__name__"] for one, _ in series}
            scraped = judge.query("avg_over_time(up[5m])")
    arrived_ns, message = told[0]
    seconds = (arrived_ns - fault["time_ns"]) / 1e9
    with capsys.disabled():
        sys.stdout.write(f"\nnotified {seconds:.1f} s after the fault\n")
    instance = f"127.0.0.1:{ports['hot']}"
    assert message["groupLabels"] == {
        "alertname": "GpuHwThermalSlowdown",
        "instance": instance,
        "rack": "hot",
    }
    (alert,) = message["alerts"]
    assert (alert["labels"]["gpu"], alert["labels"]["severity"]) == ("2", "critical")
    assert "GPU 2" in alert["annotations"]["summary"]
    assert (RUNBOOKS / alert["annotations"]["runbook_url"].rpartition("/")[2]).exists()

    # Nothing else was told, to anybody.
    sent = {(name, text["groupKey"]) for name, _, text in receiver.messages}
    assert {name for name, _ in sent} == {"automation", "tickets"}
    assert all(instance in key and "GpuHwThermalSlowdown" in key for _, key in sent)

    # The power cap was seen, and never more than info.
    assert alerts == {
        ("hot", "GpuHwThermalSlowdown", "critical"),
        ("capped", "GpuPowerCapped", "info"),
        ("replayed", "GpuPowerCapped", "info"),
    }
    assert len(scraped) == 3
    assert all(float(value) > 0.5 for _, value in scraped)  # a busy machine misses one now and then

    # Stragglers can be judged: real pages have all that the recorded series need.
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert recorded == {
        rule["record"] for group in groups for rule in group["rules"] if "record" in rule
    }


# What fires at once, and whether it is silenced by another: (labels, inhibited).
STATES = [
    ("GpuwatchDown critical fleet instance=n1 rack=r1", False),
    ("GpuLost critical node instance=n1 gpu=0 rack=r1", True),
    ("NodeClockStraggler warning node instance=n1 rack=r1", True),
    ("GpuLost critical node instance=n2 gpu=0", False),
    ("GpuHwThermalSlowdown critical node instance=n2 gpu=0", True),
    ("GpuHwThermalSlowdown critical node instance=n2 gpu=1", False),
    ("GpuThermalSlowdown warning node instance=n2 gpu=1", True),
    ("GpuThermalSlowdown warning node instance=n2 gpu=2", False),
    ("GpuClockStraggler critical node instance=n2 gpu=2", True),
    ("SourceFailing warning node instance=n2 source=nvml_state", False),
    ("GpuwatchBlind critical fleet instance=n3", False),
    ("SourceFailing warning node instance=n3 source=nvml_state", True),
    ("GpuClockStraggler critical node instance=n4 gpu=0", False),
    ("GpuClockStraggler warning node instance=n4 gpu=0", True),
    ("GpuClockStraggler warning node instance=n4 gpu=1", False),
    ("NodeClockStraggler warning node instance=n4", False),
    ("GpuPowerBrakeSevere critical node instance=n5 gpu=0 alert=gpu_power_brake_severe", False),
    ("GpuPowerBrake warning node instance=n5 gpu=0 alert=gpu_power_brake", True),
    ("GpuwatchSameFaultOnManyNodes critical fleet rack=r6 alert=gpu_power_brake", False),
    ("GpuPowerBrake warning node instance=n6 gpu=0 rack=r6 alert=gpu_power_brake", True),
    ("GpuPowerBrake warning node instance=n7 gpu=0 rack=r7 alert=gpu_power_brake", False),
    ("GpuLost critical node instance=n8 gpu=0 rack=r6 alert=gpu_lost", False),
    ("GpuwatchDown critical fleet job=gpuwatch", False),
    ("NodePowerBrake critical node instance=n9", False),
    ("GpuPowerBrake warning node instance=n9 gpu=0", True),
    ("GpuPowerBrakeSevere critical node instance=n9 gpu=1", True),
    ("GpuStragglerSevere critical node instance=n9 gpu=1", True),
    ("NodeClockStraggler warning node instance=n9", True),
    ("GpuEccUncorrected critical node instance=n9 gpu=0", False),
    ("GpuRowRemapPending warning node instance=n9 gpu=0", True),
    ("GpuRowRemapPending warning node instance=n9 gpu=1", False),
    ("GpuLost critical node instance=n10 gpu=0", False),
    ("GpuMissing critical node instance=n10", True),
    ("GpuHung critical node instance=n10 gpu=0", True),
    ("GpuRecoveryRequired critical node instance=n10 gpu=0", True),
    ("GpuNvlinkDown critical node instance=n10 gpu=1", False),
    ("GpuNvlinkErrors warning node instance=n10 gpu=1", True),
    ("GpuNvlinkErrors warning node instance=n10 gpu=2", False),
    ("CanaryRegressionMatmulSevere critical node instance=n10 gpu=3", False),
    ("CanaryRegressionMatmul warning node instance=n10 gpu=3", True),
    ("CanaryRegressionMatmul warning node instance=n10 gpu=4", False),
    ("GpuMissing critical node instance=n11", False),
    ("DriverMismatch warning node instance=n11", False),
    ("SourceFailing warning node instance=n11 source=nvml_state", True),
    ("SourceFailing warning node instance=n11 source=rdma", False),
    ("GpuStraggler warning node instance=n12 gpu=0", False),
    ("GpuClockStraggler warning node instance=n12 gpu=0", True),
    ("GpuClockStraggler critical node instance=n12 gpu=0", False),
    ("GpuThermalSlowdown warning node instance=n13 gpu=0", False),
    ("GpuHot warning node instance=n13 gpu=0", True),
    ("GpuMemoryHot warning node instance=n13 gpu=1", False),
    ("GpuStraggler warning node instance=n13 gpu=0", True),
    ("GpuStragglerSevere critical node instance=n13 gpu=0", False),
    ("GpuHwThermalSlowdown critical node instance=n14 gpu=0", False),
    ("GpuStragglerSevere critical node instance=n14 gpu=0", True),
    ("GpuXid critical node instance=n14 gpu=1", False),
    ("GpuXidWarning warning node instance=n14 gpu=1", True),
    ("RdmaPortDown critical node instance=n15 device=mlx5_0 port=1", False),
    ("RdmaLoss warning node instance=n15 device=mlx5_0 port=1", True),
    ("RdmaLoss warning node instance=n15 device=mlx5_1 port=1", False),
    ("RdmaPortFlappingSevere critical node instance=n15 device=mlx5_2 port=1", False),
    ("RdmaPortFlapping warning node instance=n15 device=mlx5_2 port=1", True),
    ("RdmaPauseStorm critical node instance=n15 device=mlx5_2 port=1", False),
    ("RdmaCongested warning node instance=n15 device=mlx5_2 port=1", True),
]


def labels(text):
    """Return the labels of a line of STATES."""
    name, severity, scope, *pairs = text.split()
    own = dict(pair.split("=") for pair in pairs)
    return {"alertname": name, "severity": severity, "scope": scope, **own}


def test_what_is_said_already_is_not_said_again(tmp_path):
    """A lost GPU, a node that is down and a rack's fault silence what follows from them alone."""
    with alertmanager(tmp_path / "alertmanager") as pager:
        pager.call("api/v2/alerts", [{"labels": labels(text)} for text, _ in STATES])

        def judged():
            found = {
                frozenset(one["labels"].items()): bool(one["status"]["inhibitedBy"])
                for one in pager.call("api/v2/alerts")
            }
            return [(text, found.get(frozenset(labels(text).items()))) for text, _ in STATES]

        with contextlib.suppress(AssertionError):  # the comparison says more
            wait_for(lambda: judged() == STATES, 10, "all are judged")
        assert judged() == STATES

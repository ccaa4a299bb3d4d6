"""A real Prometheus scrapes a daemon whose simulated GPU runs hot and recovers."""

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request

import pytest
from running import Running, free_port, wait_for

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool: apt-get install prometheus",
)

FIRING = 'gpuwatch_alert_firing{alert="gpu_hw_thermal_slowdown"} == 1'
DAEMON = """
[rules.gpu_hw_thermal_slowdown]
window_seconds = 2.0
for_seconds = 0.0
hold_seconds = 5.0
[simulated]
fault_after_seconds = 10.0
fault_seconds = 20.0
"""
PROMETHEUS = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [rules.yml]
scrape_configs:
  - job_name: gpuwatch
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
RULES = f"""
groups:
  - name: gpuwatch
    rules:
      - alert: GpuHot
        expr: {FIRING}
        labels: {{severity: critical}}
"""


class Prometheus:
    """A Prometheus server that scrapes one target, in a directory of its own.

    `more` is YAML that goes on after the target.
    """

    def __init__(self, directory, target, more=""):
        directory.mkdir()
        self.config = directory / "prometheus.yml"
        self.rules = directory / "rules.yml"
        self.config.write_text(PROMETHEUS.format(port=target) + more)
        self.rules.write_text(RULES)
        self.port = free_port()
        self.log_path = directory / "log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self.config}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stderr=log,
            )

    def __enter__(self):
        wait_for(self.alerts_are_served, 60, f"prometheus: {self.log_path.read_text()}")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}") as answer:
            return json.load(answer)["data"]

    def alerts_are_served(self):
        with contextlib.suppress(OSError):
            return self.get("alerts") is not None
        return False

    def firing(self):
        """Return the label sets of alerts that fire."""
        alerts = self.get("alerts")["alerts"]
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]

    def query(self, expression):
        """Return the values of an instant query."""
        found = self.get("query?" + urllib.parse.urlencode({"query": expression}))
        return [float(sample["value"][1]) for sample in found["result"]]


def promtool(*arguments, text=None):
    """Return what promtool says, which must find nothing wrong."""
    done = subprocess.run(
        ["promtool", *map(str, arguments)], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_an_alert_fires_and_resolves_in_prometheus(tmp_path):
    """Prometheus sees the fault begin and end by the daemon's own alert, and every scrape works."""
    with (
        Running(tmp_path, "--source", "simulated:thermal", config=DAEMON) as daemon,
        Prometheus(tmp_path / "prometheus", daemon.port) as prometheus,
    ):
        assert "SUCCESS" in promtool("check", "config", prometheus.config)
        assert "SUCCESS" in promtool("check", "rules", prometheus.rules)
        (hot,) = wait_for(prometheus.firing, 60, "alert fires")
        assert (hot["gpu"], hot["severity"]) == ("2", "critical")
        assert promtool("check", "metrics", text=daemon.get("/metrics")[1].decode()) == ""
        wait_for(lambda: not prometheus.firing(), 60, "alert resolves")
        assert prometheus.query("min_over_time(up[5m])") == [1]
        (scrapes,) = prometheus.query("count_over_time(up[5m])")
        assert scrapes >= 15  # the fault alone lasted 20 scrape intervals
        transitions = 'gpuwatch_alert_transitions_total{alert="gpu_hw_thermal_slowdown",to="%s"}'
        assert wait_for(lambda: prometheus.query(transitions % "resolved") == [1], 10, "counted")
        assert prometheus.query(transitions % "firing") == [1]

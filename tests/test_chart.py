"""The Helm chart: what it renders is valid, asks for little, and starts a daemon that takes it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

import gpuwatch

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "gpuwatch"
RULES = yaml.safe_load((ROOT / "grafana/prometheus/gpuwatch.rules.yml").read_text())
IMAGE = "image.repository=registry.example/gpuwatch"
ALL = (
    *("jobs=true", "kernelLog=true", "canaries=true", "webConfigSecret=web"),
    *("podMonitor.enabled=true", "prometheusRule.enabled=true", "dashboards.enabled=true"),
)
VERSIONS = ("1.25", "1.34")

pytestmark = pytest.mark.skipif(
    not shutil.which("helm") and not os.environ.get("CI"), reason="helm is not installed"
)


def helm(*words, values=()):
    """Run helm with values, return what it says."""
    settings = [word for value in values for word in ("--set", value)]
    return subprocess.run(
        ["helm", *words, *settings], capture_output=True, text=True, check=False, cwd=CHART
    )


def rendered(*values):
    """Return what the chart makes of these values, by kind and name."""
    done = helm("template", "node", ".", values=(IMAGE, *values))
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def container(*values):
    """Return the pod and its only container."""
    pod = rendered(*values)["DaemonSet", "node-gpuwatch"]["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


@pytest.mark.parametrize("values", [(), ALL])
def test_the_chart_passes_helms_own_check(values):
    """With the defaults and with everything."""
    done = helm("lint", "--strict", ".", values=(IMAGE, *values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [(), ALL])
def test_kubernetes_takes_what_is_rendered(values, version):
    """Strictly: no field that the API does not know. Those of operators have no schema there."""
    for (kind, _), one in rendered(*values).items():
        if kind not in ("PodMonitor", "PrometheusRule"):
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("port=none", "port"),
        ("podMonitor.interval=often", "interval"),
        ("kernellog=true", "kernellog"),
        ("statePath=state", "statePath"),
    ],
)
def test_a_wrong_value_is_refused_by_name(value, named):
    """The schema of the values finds it before the cluster does."""
    done = helm("template", "node", ".", values=(IMAGE, value))
    assert done.returncode != 0
    assert named in done.stderr


def test_an_image_must_be_named():
    """There is no public one to fall back to."""
    done = helm("template", "node", ".")
    assert done.returncode != 0
    assert "image.repository: name where the image is" in done.stderr


def test_the_pod_takes_no_gpu_and_little_privilege():
    """It sees every GPU by the runtime and asks the scheduler for none."""
    pod, one = container()
    assert "nvidia.com/gpu" not in json.dumps(one["resources"])
    assert "privileged" not in one["securityContext"]
    assert one["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert pod["automountServiceAccountToken"] is False
    _, alone = container("jobs=false")
    assert alone["securityContext"]["capabilities"]["add"] == ["SYS_NICE"]
    _, logged = container("kernelLog=true")
    assert logged["securityContext"]["privileged"] is True


@pytest.mark.parametrize("values", [(), ALL])
def test_a_daemon_takes_the_arguments(values, tmp_path):
    """It comes as far as the source, which is asked for wrongly here."""
    _, one = container(*values)
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "web.yml").write_text("{}")
    places = {
        "/etc/gpuwatch/config.toml": "config.toml",
        "/etc/gpuwatch/web/web.yml": "web.yml",
        "/run/gpuwatch": "run",
        "/var/lib/gpuwatch": "state",
    }
    words = one["args"]
    for path, name in places.items():
        words = [word.replace(path, str(tmp_path / name)) for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "gpuwatch", *words, "--source=none"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith("--source: unknown source 'none'")
    assert done.stderr.count("\n") == 1


def test_rules_and_dashboards_are_those_of_the_project():
    """The same groups, less what was left out; dashboards byte for byte."""
    found = rendered(*ALL, "prometheusRule.disabled={GpuPowerCapped}")
    groups = found["PrometheusRule", "node-gpuwatch"]["spec"]["groups"]
    expected = [
        {**group, "rules": [one for one in group["rules"] if one.get("alert") != "GpuPowerCapped"]}
        for group in RULES["groups"]
    ]
    assert groups == expected
    for path in (ROOT / "grafana/dashboards").glob("*.json"):
        short = path.stem.removeprefix("gpuwatch-")
        config = found["ConfigMap", f"node-gpuwatch-{short}-dashboard"]
        assert config["data"] == {path.name: path.read_text()}
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_scraped_pods_have_the_labels_that_rules_ask_for():
    """Rules ask for job="gpuwatch"; labels of the metrics themselves win over the target's."""
    found = rendered(*ALL)["PodMonitor", "node-gpuwatch"]["spec"]
    endpoint = found["podMetricsEndpoints"][0]
    assert {"targetLabel": "job", "replacement": "gpuwatch"} in endpoint["relabelings"]
    assert endpoint["honorLabels"] is True
    _, one = container()
    assert endpoint["port"] in {port["name"] for port in one["ports"]}


def test_the_chart_is_of_this_version():
    """What is installed by default is what the chart was made for."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == gpuwatch.__version__

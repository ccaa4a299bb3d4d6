"""The examples for large fleets, and the metrics that docs/sizing.md says may be left out."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROMETHEUS = ROOT / "grafana/prometheus"
DOCUMENT = (ROOT / "docs/sizing.md").read_text()
CONTRACT = tomllib.loads((ROOT / "tests/data/metrics.toml").read_text())
RULES = (PROMETHEUS / "gpuwatch.rules.yml").read_text()
FEDERATION = yaml.safe_load((PROMETHEUS / "federation.yml").read_text())
JOBS = [
    job
    for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    for job in yaml.safe_load(block).get("scrape_configs", [])
]
PARTS = {"histogram": ("_bucket", "_sum", "_count")}
SERVED = {name + part for name, one in CONTRACT.items() for part in PARTS.get(one["type"], ("",))}
RECORDED = set(re.findall(r"record: (\S+)", RULES))

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool: apt-get install prometheus"
)
EXPRESSIONS = " ".join(
    rule["expr"] for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]
)
NEEDED = {name for name in SERVED if re.search(rf"\b{name}\b", EXPRESSIONS)}


def patterns(action):
    """Return the patterns of names that the document's examples drop or keep."""
    return [
        rule["regex"]
        for job in JOBS
        for rule in job.get("metric_relabel_configs", [])
        if rule["action"] == action
    ]


def test_what_is_left_out_is_served_and_no_rule_needs_it():
    """A name that nobody serves saves nothing, and an alert without its metric never fires."""
    assert len(patterns("drop")) >= 3
    for pattern in patterns("drop"):
        names = [pattern] if "(" in pattern else pattern.split("|")
        for name in names:
            assert any(re.fullmatch(name, one) for one in SERVED), name
        assert not [name for name in NEEDED if re.fullmatch(pattern, name)], pattern


def test_what_is_kept_is_what_the_rules_need():
    """Whoever keeps only that has every alert, and nothing else."""
    (pattern,) = patterns("keep")
    assert set(pattern.split("|")) == NEEDED


def test_the_federation_asks_for_what_there_is():
    """Each selector of the server above matches something that the servers below have."""
    (job,) = FEDERATION["scrape_configs"]
    there = SERVED | RECORDED | {"ALERTS", "up"}
    for selector in job["params"]["match[]"]:
        found = re.match(r'\{__name__=~?"([^"]+)"', selector) or re.match(r"(\w+)", selector)
        assert any(re.fullmatch(found[1], name) for name in there), selector


@needs_promtool
def test_promtool_accepts_the_examples(tmp_path):
    """What is copied from the document or the folder loads in Debian's Prometheus."""
    path = tmp_path / "prometheus.yml"
    for job in JOBS:
        path.write_text(yaml.safe_dump({"scrape_configs": [job]}))
        check(path)
    check(PROMETHEUS / "federation.yml")


def check(path):
    """Have promtool check a config."""
    done = subprocess.run(
        ["promtool", "check", "config", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

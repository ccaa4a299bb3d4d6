"""The Prometheus rules, their runbooks and the example configs, checked against rules and tools."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from gpuwatch.rules import RULES

ROOT = Path(__file__).parent.parent
BUILDER = ROOT / "grafana/rules.py"
PROMETHEUS = ROOT / "grafana/prometheus"
PAGER = ROOT / "grafana/alertmanager/alertmanager.yml"
RUNBOOKS = ROOT / "docs/runbooks"
ALERTING = ROOT / "docs/alerting.md"
CONTRACT = tomllib.loads((ROOT / "tests/data/metrics.toml").read_text())
DAEMON, FLEET = (
    group["rules"]
    for group in yaml.safe_load((PROMETHEUS / "gpuwatch.rules.yml").read_text())["groups"]
)
ALERTS = [rule for rule in (*DAEMON, *FLEET) if "alert" in rule]
RECORDS = [rule["record"] for rule in FLEET if "record" in rule]
CASES = yaml.safe_load((PROMETHEUS / "tests.yml").read_text())["tests"]

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool: apt-get install prometheus"
)
needs_amtool = pytest.mark.skipif(
    not shutil.which("amtool"), reason="needs amtool: apt-get install prometheus-alertmanager"
)


def page(alert):
    """Return the name of an alert's runbook."""
    return alert["annotations"]["runbook_url"].rpartition("/")[2]


def metrics(text):
    """Return the metrics of ours, served or recorded, that a text names."""
    pages = "|".join(path.stem for path in RUNBOOKS.glob("*.md"))
    text = re.sub(rf"\b({pages})\b(\.md)?", "", text)
    return set(re.findall(r"\b(?:gpuwatch_|process_|gpuwatch:)[a-z0-9_:]+", text))


def unknown(text):
    """Return the metrics that a text names and nobody serves or records."""
    parts = {
        name + part
        for name, entry in CONTRACT.items()
        if entry["type"] == "histogram"
        for part in ("_bucket", "_sum", "_count")
    }
    return metrics(text) - CONTRACT.keys() - set(RECORDS) - parts


def queries_of(text):
    """Return the queries of a runbook: its blocks, line by line, and what is set as code."""
    block = re.compile(r"```\n(.*?)```", re.DOTALL)
    lines = [line.strip() for found in block.findall(text) for line in found.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", block.sub("", text))
    return [*filter(None, lines), *(span for span in spans if metrics(span) or "up{" in span)]


def succeeds(*command):
    """Run a tool, which must find nothing wrong, and return what it says."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_committed_files_are_what_the_builder_makes():
    """Whoever changes a rule builds the files anew."""
    succeeds(sys.executable, BUILDER, "--check")


def test_runbooks_may_be_published_anywhere(tmp_path):
    """The links of all alerts follow the option, and a stale file is told."""
    address = "https://wiki.example.org/gpuwatch"
    succeeds(sys.executable, BUILDER, "--runbooks", address, "--output", tmp_path)
    text = (tmp_path / "gpuwatch.rules.yml").read_text()
    assert text.count(f"{address}/") == len(ALERTS)
    assert text.count("runbook_url") == len(ALERTS)
    done = subprocess.run(
        [sys.executable, BUILDER, "--check", "--output", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "gpuwatch.rules.yml: not up to date: run python grafana/rules.py" in done.stderr


def test_every_rule_has_its_alert_and_runbook():
    """No verdict of the daemon is lost, and no alert has a rule that is gone."""
    assert [(rule["expr"], rule["labels"]["severity"], page(rule)) for rule in DAEMON] == [
        (f'gpuwatch_alert_firing{{alert="{rule.name}"}} == 1', rule.severity, f"{rule.name}.md")
        for rule in RULES
    ]
    camel = ["".join(map(str.capitalize, rule.name.split("_"))) for rule in RULES]
    assert [rule["alert"] for rule in DAEMON] == camel


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    """A link at three in the morning leads somewhere, and no page is left over."""
    assert {page(alert) for alert in ALERTS} == {path.name for path in RUNBOOKS.iterdir()}
    for alert in ALERTS:
        text = (RUNBOOKS / page(alert)).read_text()
        title = text.splitlines()[0]
        assert alert["alert"] in title
        assert alert["labels"]["severity"] in title
        for part in ("Meaning", "Impact", "Check", "Fix", "Noise"):
            assert f"\n**{part}" in text, (page(alert), part)


def test_every_alert_says_who_is_told():
    """Routes need severity and scope; only the fleet pages, and only when it is critical."""
    for alert in ALERTS:
        labels = alert["labels"]
        assert labels["severity"] in ("critical", "warning", "info")
        assert labels["scope"] in ("node", "fleet")
        assert labels["scope"] == "node" or labels["severity"] == "critical"
        assert alert["keep_firing_for"] == "5m"
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert all(rule["labels"]["scope"] == "node" and "for" not in rule for rule in DAEMON)


def test_rules_use_metrics_that_are_served_or_recorded():
    """A typo in a metric is an alert that never fires; a record comes before its use."""
    recorded = set()
    for rule in (*DAEMON, *FLEET):
        bare = re.sub(r'"[^"]*"', '""', rule["expr"])
        used = metrics(bare) or {"up"} & set(re.findall(r"\bup\b", bare))
        assert used, rule["expr"]
        assert metrics(bare) - CONTRACT.keys() - recorded == set()
        recorded |= {rule["record"]} if "record" in rule else set()


@pytest.mark.parametrize("path", sorted(RUNBOOKS.glob("*.md")), ids=lambda path: path.stem)
def test_runbooks_name_what_exists(path):
    """Every metric and linked page of a runbook is there."""
    text = path.read_text()
    assert unknown(text) == set()
    for target in re.findall(r"\]\(([^):#]+)\)", text):
        assert (path.parent / target).exists(), target


def test_the_document_lists_every_fleet_alert_and_record():
    """Whoever reads docs/alerting.md knows what may reach the pager."""
    text = ALERTING.read_text()
    assert unknown(text.replace("_…", "_clock_hertz")) == set()
    for rule in FLEET:
        name = rule.get("alert") or re.sub(
            "busy_(clock_hertz|power_watts):med", "busy_…:med", rule["record"]
        )
        assert f"`{name}`" in text, name


def test_every_alert_has_a_case_that_fires_and_one_that_is_quiet():
    """An alert without noise that it must not make is not tested."""
    fires, quiet = set(), set()
    for case in CASES:
        for check in case["alert_rule_test"]:
            severities = {one["exp_labels"]["severity"] for one in check["exp_alerts"]}
            fires |= {(check["alertname"], severity) for severity in severities}
            if not severities:
                quiet.add(check["alertname"])
    assert fires == {(alert["alert"], alert["labels"]["severity"]) for alert in ALERTS}
    assert quiet == {alert["alert"] for alert in ALERTS}


@needs_promtool
def test_promtool_accepts_rules_and_config():
    """The rules load in Debian's Prometheus, from the example's config."""
    said = succeeds("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    assert f"{len(DAEMON) + len(FLEET)} rules found" in said


@needs_promtool
def test_cases_hold():
    """Every alert fires when it should, with its texts, and not on the noise of its cases."""
    succeeds("promtool", "test", "rules", PROMETHEUS / "tests.yml")


@needs_promtool
def test_queries_of_runbooks_are_promql(tmp_path):
    """What is copied from a runbook into Prometheus is a query."""
    queries = [query for path in RUNBOOKS.glob("*.md") for query in queries_of(path.read_text())]
    assert len(queries) > 20
    rules = [
        {"record": f"query:{number}", "expr": re.sub("<usual watts>", "600", query)}
        for number, query in enumerate(queries)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "runbooks", "rules": rules}]}))
    succeeds("promtool", "check", "rules", path)


@needs_amtool
def test_amtool_accepts_the_example():
    """The example's receivers, routes and inhibitions are a config of Debian's Alertmanager."""
    assert "SUCCESS" in succeeds("amtool", "check-config", PAGER)


@needs_amtool
@pytest.mark.parametrize(
    ("severity", "scope", "receiver"),
    [
        ("critical", "fleet", "pager"),
        ("critical", "node", "automation"),
        ("warning", "fleet", "tickets"),
        ("warning", "node", "tickets"),
        ("info", "node", "nobody"),
    ],
)
def test_alerts_go_where_they_belong(severity, scope, receiver):
    """People are paged by the fleet alone, and nobody by info."""
    labels = (f"severity={severity}", f"scope={scope}", "alertname=Any", "instance=node1")
    route = ("amtool", "config", "routes", "test", f"--config.file={PAGER}")
    assert succeeds(*route, *labels).splitlines()[0] == receiver


@needs_amtool
def test_corruption_is_told_to_people_and_takes_the_node_out():
    """Nobody else can say which checkpoint may still be trusted."""
    route = ("amtool", "config", "routes", "test", f"--config.file={PAGER}")
    labels = ("severity=critical", "scope=node", "alertname=SilentDataCorruption", "gpu=1")
    assert succeeds(*route, *labels).splitlines()[0] == "pager,automation"


def test_inhibitions_name_alerts_that_exist():
    """A renamed alert would silence nothing, or not be silenced."""
    names = {alert["alert"] for alert in ALERTS}
    matched = set()
    for rule in yaml.safe_load(PAGER.read_text())["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            found = re.fullmatch(r'alertname(=|!=|=~)"(.*)"', matcher)
            if found:
                here = {name for name in names if re.fullmatch(found[2], name)}
                assert here, matcher
                matched |= here
    assert {"GpuLost", "GpuwatchDown"} <= matched

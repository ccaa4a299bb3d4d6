"""The rules of the house, executed: names, units, lists, doors and what the documents say."""

import ast
import importlib
import itertools
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from gpuwatch import checks, commands, network_signals, rules, sources
from gpuwatch.exposition import FAMILIES, NAMESPACE
from gpuwatch.rule import Rule
from gpuwatch.signals import BASE_UNITS, Kind, Signal

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gpuwatch"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTRACT = tomllib.loads((ROOT / "tests/data/metrics.toml").read_text())
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("**/*.md"))]
LINKING = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
LINES = 400
NOT_BASE = (
    "ns|us|ms|milliseconds?|microseconds?|minutes?|hours?|days?|kib|mib|gib|kb|mb|gb|kilobytes|"
    "megabytes|gigabytes|bits|percent|pct|khz|mhz|ghz|milliwatts|kilowatts|mw|kw|millijoules|"
    "fahrenheit|kelvin|millidegrees"
)


def modules(folder):
    """Return the modules of a plural folder."""
    paths = sorted((PACKAGE / folder).glob("[!_]*.py"))
    return [importlib.import_module(f"gpuwatch.{folder}.{path.stem}") for path in paths]


def declared():
    """Return every signal that the package declares, once."""
    found = {}
    shared = [path.stem for path in sorted(PACKAGE.glob("*_signals.py"))]
    listed = [importlib.import_module(f"gpuwatch.{name}") for name in shared]
    for module in [*listed, *modules("sources")]:
        for value in vars(module).values():
            if isinstance(value, Signal):
                found[id(value)] = value
    for counter in (*network_signals.PORT_COUNTERS, *network_signals.NIC_COUNTERS):
        found[id(counter.signal)] = counter.signal
    return list(found.values())


def is_sentence(text):
    """Say whether a help text begins and ends as a sentence does."""
    return (text[0].isupper() or text[0].isdigit()) and text.endswith(".")


def loaded_by(module):
    """Return the top-level modules that importing one loads in a bare interpreter."""
    code = f"import {module}, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_every_source_is_in_the_list():
    """A source that no duty loads would never run; each is known by the name it is listed with."""
    listed = set()
    for duty, names in sources.SOURCES.items():
        for simulated in (False, True):
            loaded = sources.load(duty, simulated=simulated)
            assert tuple(source.name for source in loaded) == names
            listed |= {source.__module__ for source in loaded}
    assert listed == {module.__name__ for module in modules("sources")}


def test_every_rule_is_in_the_list():
    """A rule that is not in RULES would never be judged."""
    written = [rule for module in modules("rules") for rule in module.RULES]
    assert list(rules.RULES) == written
    for module in modules("rules"):
        assert not [name for name, value in vars(module).items() if isinstance(value, Rule)]
    names = [rule.name for rule in rules.RULES]
    assert len(set(names)) == len(names)


def test_every_command_is_in_the_list():
    """A command that is not in COMMANDS could not be called, and is called as its file is."""
    listed = {f"gpuwatch.commands.{name}" for name in commands.COMMANDS}
    for name in commands.COMMANDS:
        assert commands.load(name).name == name
    # The part of a command that has a file of its own begins with the command's name.
    found = {module.__name__ for module in modules("commands")}
    assert {name for name in found if name.partition("_")[0] not in listed} == set()


def test_every_check_is_in_the_list():
    """A check that is not in CHECKS would never be made; each is called as its file, and told."""
    names = [check.name for check in checks.CHECKS]
    assert sorted(names) == [path.stem for path in sorted((PACKAGE / "checks").glob("[!_]*.py"))]
    text = (ROOT / "docs/verify.md").read_text()
    assert [name for name in names if f"`{name}`" not in text] == []


def test_signal_names_are_unique():
    """One name means one thing, a histogram's as well."""
    names = [signal.name for signal in declared()]
    names += [signal.histogram.name for signal in declared() if signal.histogram]
    # The one is shown for a silent GPU too, the other is a signal where the driver counts it.
    both = ("gpu_up", "gpu_throttle_seconds_total")
    names += [name for name, _, _ in FAMILIES if name not in both]
    assert sorted(set(names)) == sorted(names)


def test_signals_end_in_their_base_unit():
    """The unit of a value is read off its name."""
    for signal in declared():
        assert signal.unit in BASE_UNITS
        stem = signal.name.removesuffix("_total")
        suffixed = [unit for unit in BASE_UNITS - {""} if stem.endswith(f"_{unit}")]
        assert max(suffixed, key=len, default="") == signal.unit, signal.name
        assert (signal.kind is Kind.COUNTER) == signal.name.endswith("_total")


def test_every_family_has_a_sentence_of_help():
    """HELP is a sentence, and only counters end in _total."""
    for signal in declared():
        assert is_sentence(signal.help), signal.name
        assert signal.histogram is None or is_sentence(signal.histogram.help), signal.name
    for name, kind, text in FAMILIES:
        assert is_sentence(text), name
        assert (kind == "counter") == name.endswith("_total"), name


def test_metrics_are_in_base_units():
    """No milliseconds, megabytes or percent in any metric's name."""
    assert [name for name in CONTRACT if re.search(rf"_({NOT_BASE})(_|$)", name)] == []


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.name)
def test_a_rule_says_what_it_means_and_what_to_do(rule):
    """An alert is of use to who gets it."""
    assert is_sentence(rule.help)
    assert is_sentence(rule.next_step)
    assert rule.help != rule.next_step


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("supervisor", "numpy psutil pydantic prometheus_client pynvml sqlite3 starlette uvicorn"),
        ("sampler", "numpy psutil pydantic prometheus_client sqlite3 starlette uvicorn"),
        ("cli", "numpy psutil pydantic prometheus_client pynvml sqlite3 starlette uvicorn"),
    ],
)
def test_a_process_loads_only_what_it_needs(module, absent):
    """The supervisor is bare Python, and nothing heavy runs beside a 1 kHz loop."""
    assert loaded_by(f"gpuwatch.{module}") & set(absent.split()) == set()


def test_dependencies_are_what_is_imported():
    """Nothing is installed that is not used, and nothing used that is not installed."""
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    later = {"compression"}  # of the standard library since 3.14
    foreign = imported - sys.stdlib_module_names - later - {"gpuwatch"}
    owners = packages_distributions()
    used = {name.replace("_", "-") for module in foreign for name in owners.get(module, [module])}
    extras = [
        PROJECT["optional-dependencies"][extra] for extra in ("auth", "export", "torch", "tui")
    ]
    wanted = itertools.chain(PROJECT["dependencies"], *extras)
    assert used == {re.split("[<>=!~]", text)[0] for text in wanted}


def test_files_are_short():
    """A file is one idea, read in one sitting."""
    counts = {path.name: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in counts.items() if count > LINES} == {}


def test_every_test_states_the_behaviour():
    """A test's docstring is the sentence that is broken when it fails."""
    for path in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert ast.get_docstring(node), f"{path.name}: {node.name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_metrics_that_exist(path):
    """Every metric that a document names is served; an alert of the fleet has its runbook."""
    text = path.read_text()
    suffix = re.compile("_(bucket|count|sum)$")
    alerts = {page.stem for page in (ROOT / "docs/runbooks").glob("*.md")}
    for name in set(re.findall(rf"\b{NAMESPACE}[a-z0-9_]+", text)) - alerts:
        assert name in CONTRACT or suffix.sub("", name) in CONTRACT, name


def anchors(path):
    """Return the anchors that a Markdown page gets from its headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = sum(
            one == anchor or re.fullmatch(rf"{anchor}-\d+", one) is not None for one in found
        )
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def prose(text):
    """Return a Markdown text without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_broken(path):
    """Every file, and every heading, that a document links to is there."""
    text = prose(path.read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for target in targets:
        name, _, anchor = target.partition("#")
        if "://" in name or name.startswith("mailto:"):
            continue
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def test_the_index_names_every_page():
    """Who looks for a page finds it in the index, once."""
    index = ROOT / "docs/README.md"
    linked = re.findall(r"\]\(([^):#]+\.md)\)", index.read_text())
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/reference").glob("*.md")]
    named = [name for name in linked if not name.startswith("../")]
    expected = [str(page.relative_to(ROOT / "docs")) for page in pages if page != index]
    assert sorted(named) == sorted(expected)


def test_the_reference_has_every_metric():
    """Whoever looks a metric up finds it, its statistics too."""
    text = (ROOT / "docs/reference/metrics.md").read_text()
    names = [name for name in CONTRACT if name.startswith(NAMESPACE)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_readme_lists_every_command():
    """The table of commands has each, and no other."""
    rows = re.findall(r"^\| `gpuwatch ([a-z]+)[ `]", README.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(commands.COMMANDS)


def test_the_reference_has_every_rule_as_it_is():
    """The table of alerts has each rule with its severity and meaning, and no other."""
    text = (ROOT / "docs/reference/alerts.md").read_text()
    cells = r"^\| \[`([a-z_]+)`\]\([^)]+\) \| (\w+) \| `(\w+)` \| ([^|]*) \| ([^|]*) \|"
    expected = [
        (rule.name, rule.severity, rule.per, rule.help, rule.next_step) for rule in rules.RULES
    ]
    assert re.findall(cells, text, re.MULTILINE) == expected


def test_readme_tells_alerts_as_they_are():
    """The README shows some alerts; each with its severity and meaning."""
    rows = re.findall(r"^\| `([a-z_]+)` \| (\w+) \| (.*) \|$", README.read_text(), re.MULTILINE)
    assert set(rows) <= {(rule.name, rule.severity, rule.help) for rule in rules.RULES}
    assert rows

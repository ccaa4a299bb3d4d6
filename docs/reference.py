"""Builds docs/reference: every metric, alert, key of the config and flag, as the code has them.

    python docs/reference.py [--check]

The metrics are those of the page that the contract is tested with, and what reads them is asked of
the simulated sources, which have the groups of the real ones. `--check` tells whether the committed
files are up to date.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import populated  # noqa: E402

from gpuwatch import config, sources  # noqa: E402
from gpuwatch.commands import COMMANDS, load  # noqa: E402
from gpuwatch.exposition import Exposition  # noqa: E402
from gpuwatch.pulse import Pulse  # noqa: E402
from gpuwatch.rule import Rule  # noqa: E402
from gpuwatch.rules import RULES  # noqa: E402
from gpuwatch.signals import Column  # noqa: E402
from gpuwatch.source import Context  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
MADE = "Made by `docs/reference.py` from the code: change it there."
STATISTICS = ("_min", "_max", "_mean")
# Headings of the metrics, and how the names below them begin; the first that fits.
PARTS = (
    ("GPUs", ("gpu_", "gpus_", "nvml_up")),
    ("RDMA ports", ("rdma_",)),
    ("Network interfaces", ("nic_",)),
    ("The host and its kernel log", ("host_", "kmsg_", "pcie_errors_total")),
    ("Canaries", ("canary_",)),
    ("Alerts and the verdict", ("alert_", "node_verdict", "released")),
    ("gpuwatch itself", ("",)),
)


@dataclass(frozen=True, slots=True)
class Family:
    """A metric as its page tells it; `statistics` are the suffixes that it has as well."""

    name: str
    kind: str
    help: str
    labels: Sequence[str]
    statistics: Sequence[str] = ()


def main(words: Sequence[str] | None = None) -> int:
    """Write the files, or compare them; return 1 if one is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args(words).check
    pages = {
        "metrics.md": metrics_page(),
        "alerts.md": alerts_page(),
        "configuration.md": configuration_page(),
        "commands.md": commands_page(),
    }
    stale = 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = FOLDER / name
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.stderr.write(f"{path}: not up to date: run python docs/reference.py\n")
            stale = 1
    return stale


def metrics_page() -> str:
    """Return every metric: name, type, labels, what reads it and how often, meaning."""
    lines = [
        "# Every metric",
        "",
        MADE,
        "",
        "`read` is how often which source reads it on a node of eight GPUs, unless its budget or a",
        "measured refresh makes that slower: `gpuwatch_source_period_achieved_seconds` and",
        "`gpuwatch_signal_refresh_seconds` say what holds on the node at hand. `renewed` is how",
        "often an H200 renews it; where nothing is said it is as new as its read. A name that ends",
        "in `_seconds`, `_bytes`, `_hertz`, … is in that unit, `_ratio` is from 0 to 1, `_total`",
        "only grows. What is not known is absent, never 0.",
        "",
    ]
    read = _read()
    parts: dict[str, list[Family]] = {title: [] for title, _ in PARTS}
    for family in families(Exposition().render(populated.snapshot(2)).decode()):
        short = family.name.removeprefix("gpuwatch_")
        parts[next(title for title, starts in PARTS if short.startswith(starts))].append(family)
    for title, members in parts.items():
        if not members:
            continue
        lines += [f"## {title}", "", "| metric | type | labels | read | renewed | meaning |"]
        lines += ["|---|---|---|---|---|---|"]
        for family in members:
            told = read.get(family.name.removeprefix("gpuwatch_"), ("", ""))
            names = ", ".join(f"`{family.name}{suffix}`" for suffix in ("", *family.statistics))
            labels = ", ".join(f"`{label}`" for label in family.labels)
            lines.append(
                f"| {names} | {family.kind} | {labels} | {told[0]} | {told[1]} | {family.help} |"
            )
        lines.append("")
    return "\n".join(lines)


def families(text: str) -> Iterator[Family]:
    """Yield the families of a page in its order, statistics with what they are of."""
    found: dict[str, Family] = {}
    helps: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, words = line.removeprefix("# HELP ").partition(" ")
            helps[name] = words
        elif line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            found[name] = Family(name, kind, helps[name], [])
        else:
            labels = [one for one in re.findall(r'[{,]([a-z_]+)="', line) if one != "le"]
            known = found[name].labels
            found[name] = replace(found[name], labels=list(dict.fromkeys([*known, *labels])))
    for name, family in found.items():
        if any(name.endswith(one) and name.removesuffix(one) in found for one in STATISTICS):
            continue
        more = [one for one in STATISTICS if name + one in found]
        yield replace(family, statistics=more)


def _read() -> Mapping[str, tuple[str, str]]:
    """Return by metric: its sources, each with its period, and what the hardware's refresh is."""
    settings = {"config": config.load(None, {}, "simulated"), "ready_ns": 0}
    told: dict[str, dict[str, str]] = {}
    renewed: dict[str, str] = {}
    for duty in sources.SOURCES:
        for source in (make() for make in sources.load(duty, simulated=True)):
            opened = source.open(Context(settings=settings, pulse=Pulse.create(1)))
            declared = [
                (column, _duration(group.period_ns / 1e9))
                for group in opened.groups
                for column in group.columns
            ]
            declared += [(column, "at the start") for column, _ in opened.constants]
            for column, period in declared:
                for name in _names(column):
                    told.setdefault(name, {}).setdefault(source.name, period)
                    if column.signal.refresh_seconds:
                        renewed[name] = _duration(column.signal.refresh_seconds)
            source.close()
    return {
        name: (
            ", ".join(f"`{source}` {period}" for source, period in sources.items()),
            renewed.get(name, ""),
        )
        for name, sources in told.items()
    }


def _names(column: Column) -> Sequence[str]:
    """Return the metrics that a column feeds: itself, and a histogram if that is of its label."""
    histogram = column.signal.histogram
    if histogram is None or histogram.label != column.label:
        return (column.signal.name,)
    return (column.signal.name, histogram.name)


def _duration(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def alerts_page() -> str:
    """Return every rule: severity, entity, meaning, next step and when it fires by default."""
    lines = [
        "# Every alert",
        "",
        MADE,
        "",
        "`critical`: take the node out of the pool. `warning`: open a ticket. `info`: for",
        "dashboards. An alert has its runbook behind its name, and is `GpuLost` for `gpu_lost` in",
        "Prometheus, where [those of the fleet](../alerting.md#who-is-told) come on top. `per` is",
        "what has one: a GPU, an RDMA port, a source, a PCI device or the host. It fires once",
        "what is judged over `window` (`newest`: the newest quarter second) was at or beyond",
        "`limit` for `for`, and stays for `hold` at least; a sticky one also until the machine",
        "booted or somebody acknowledged it. Limits are in the unit of what is judged: [what that",
        "is, and the keys to change it](configuration.md#rulesname). A rule that *detects* tells",
        "of the first sign by an event at once; one that *records* keeps the samples around it.",
        "",
        "| alert | severity | per | meaning | next step | window | limit | for | hold | at once |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(_alert, RULES),
    ]
    return "\n".join([*lines, ""])


def _alert(rule: Rule) -> str:
    """Return a rule's row."""
    window = _duration(rule.window_seconds) if rule.window_seconds else "newest"
    least = "at most" if rule.at_most else "at least"
    wait = _duration(rule.for_seconds) if rule.for_seconds else "at once"
    hold = _duration(rule.hold_seconds) + (", sticky" if rule.sticky else "")
    early = ", ".join(["detects"] * (rule.detect is not None) + ["records"] * rule.record)
    cells = (
        f"[`{rule.name}`](../runbooks/{rule.name}.md)",
        rule.severity,
        f"`{rule.per}`",
        rule.help,
        rule.next_step,
        window,
        f"{least} {rule.limit:g}",
        wait,
        hold,
        early,
    )
    return f"| {' | '.join(cells)} |"


def configuration_page() -> str:
    """Return every key of the config, from the example file, which has them all."""
    lines = [
        "# The whole configuration",
        "",
        MADE,
        "",
        "Every key of [config.example.toml](../../config.example.toml) with its default, which is",
        "what holds without a file. A wrong key or value stops the start; all faults are told at",
        "once.",
        "",
    ]
    rules = ["## `[rules.NAME]`", "", "| rule | window | limit | for | hold | judged |"]
    rules += ["|---|---|---|---|---|---|"]
    for section, told, keys in sections((ROOT / "config.example.toml").read_text()):
        if section.startswith("rules."):
            values = " | ".join(value for key, value, _ in keys if key != "enabled")
            rules.append(f"| `{section.removeprefix('rules.')}` | {values} | {told} |")
            continue
        lines += [f"## `[{section}]`", "", *([told, ""] if told else [])]
        lines += ["| key | default | meaning |", "|---|---|---|"]
        lines += [f"| `{key}` | `{value}` | {meaning} |" for key, value, meaning in keys] + [""]
    told = "Seconds, and a limit in the unit of what is judged; `enabled = false` turns a rule off."
    return "\n".join([*lines, *rules[:2], told, "", *rules[2:], ""])


def sections(text: str) -> Iterator[tuple[str, str, list[tuple[str, str, str]]]]:
    """Yield each section of a config with its comment and its keys: name, value, comment."""
    section, told = "", ""
    keys: list[tuple[str, str, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            comment.append(line.removeprefix("#").strip())
        elif line.startswith("["):
            if section:
                yield section, told, keys
            section, told, keys, comment = line.strip("[]"), _sentence(comment), [], []
        elif line:
            key, _, value = line.partition(" = ")
            keys.append((key, value, _sentence(comment) or "The same."))
            comment = []
        else:
            comment = []
    yield section, told, keys


def _sentence(comment: Sequence[str]) -> str:
    return " ".join(comment).replace("|", "\\|")


def commands_page() -> str:
    """Return every command with its flags."""
    lines = ["# Every command and flag", "", MADE, ""]
    lines += ["Every command takes `--path.runtime`, `--path.state`, `--path.sysfs`,"]
    lines += ["`--path.procfs`, `--path.kmsg`, `--log.level` and `--log.format` as well.", ""]
    for name in COMMANDS:
        command = load(name)
        parser = argparse.ArgumentParser(prog=f"gpuwatch {command.name}", add_help=False)
        command.add_arguments(parser)
        lines += [f"## gpuwatch {command.name}", "", _capital(command.help) + ".", ""]
        rows = [
            f"| {_flag(action)} | {_sentence([action.help or ''])} |"
            for action in parser._actions
            if action.help != argparse.SUPPRESS
        ]
        lines += ["| flag | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(lines).rstrip() + "\n"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _flag(action: argparse.Action) -> str:
    """Return a flag, or an argument, as one would write it."""
    choices = ", ".join(map(str, action.choices or ()))
    value = action.metavar or choices or action.dest.upper()
    words = ", ".join(action.option_strings)
    if action.nargs == 0:
        return f"`{words}`"
    return f"`{words} {value}`" if words else f"`{value}`"


if __name__ == "__main__":
    sys.exit(main())

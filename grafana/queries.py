"""The queries of a dashboard as Grafana sends them: variables chosen and put into the expressions.

For looking at dashboards and testing them without a Grafana server.
"""

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
ALL = "$__all"
LABEL_VALUES = re.compile(r"label_values\((?P<selector>.*), (?P<label>\w+)\)")


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A Prometheus server."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer; raises OSError when it is not one of success."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}") as answer:  # noqa: S310
            return json.load(answer)["data"]


@dataclass(frozen=True, slots=True)
class Span:
    """The time range of a dashboard, in seconds of Unix time."""

    start: float
    end: float
    step: int
    scrape: int

    def globals(self) -> dict[str, str]:
        """Return the variables that Grafana computes; source: its Prometheus data source."""
        seconds = round(self.end - self.start)
        return {
            "__interval": f"{self.step}s",
            "__rate_interval": f"{max(self.step + self.scrape, 4 * self.scrape)}s",
            "__range": f"{seconds}s",
        }


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Return the text with $name and ${name} put in."""
    return re.sub(
        r"\$(\w+)|\$\{(\w+)\}",
        lambda found: values.get(found[1] or found[2], found[0]),
        text,
    )


def choose(
    server: Prometheus, model: Json, span: Span, wanted: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return the values of each variable: those wanted, else all, or the first for a single one."""
    chosen: dict[str, list[str]] = {}
    for variable in model["templating"]["list"]:
        if variable["type"] != "query":
            continue
        name = variable["name"]
        known = options(server, variable, span, pattern(model, chosen))
        picked = [value for value in known if value in wanted.get(name, ())]
        chosen[name] = picked or ([ALL, *known] if variable["multi"] else known[:1])
    return chosen


def options(server: Prometheus, variable: Json, span: Span, values: Mapping[str, str]) -> list[str]:
    """Return the values from which a variable's is chosen."""
    found = LABEL_VALUES.fullmatch(substitute(variable["query"]["query"], values))
    assert found, variable["query"]
    known = server.get(
        f"label/{found['label']}/values",
        **{"match[]": found["selector"], "start": str(span.start), "end": str(span.end)},
    )
    return sorted(known, key=float if variable["sort"] == 3 else str)


def _literal(value: str) -> str:
    """Return a value as a regular expression within a string of PromQL, which escapes again."""
    return re.escape(value).replace("\\", "\\\\")


def pattern(model: Json, chosen: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return what Grafana puts into an expression for each variable."""
    many = {one["name"]: one.get("multi", False) for one in model["templating"]["list"]}
    return {
        name: ".+"
        if ALL in values
        else f"({'|'.join(map(_literal, values))})"
        if many[name]
        else "".join(values[:1])
        for name, values in chosen.items()
    }

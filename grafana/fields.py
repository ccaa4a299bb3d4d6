"""What is the same for fields of all panels: colours, mappings, overrides and links."""

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
Steps = Sequence[tuple[float, str]]

CARRIED = "${datasource:queryparam}&${job:queryparam}&${__url_time_range}"


def thresholds(steps: Steps, base: str = "green") -> Json:
    """Return thresholds; `base` is the colour below the first step."""
    rest = [{"color": color, "value": value} for value, color in steps]
    return {"mode": "absolute", "steps": [{"color": base, "value": None}, *rest]}


def texts(values: dict[int, tuple[str, str]]) -> list[Json]:
    """Return mappings from values to (text, colour)."""
    options = {
        str(value): {"text": text, "color": color, "index": index}
        for index, (value, (text, color)) in enumerate(values.items())
    }
    return [{"type": "value", "options": options}] if values else []


def override(name: str, regex: bool = False, **properties: Any) -> Json:
    """Return what is different for one field; `__` in a property's name stands for a dot."""
    return {
        "matcher": {"id": "byRegexp" if regex else "byName", "options": name},
        "properties": [
            {"id": key.replace("__", "."), "value": value} for key, value in properties.items()
        ],
    }


def fixed(name: str, color: str, **properties: Any) -> Json:
    """Return an override that gives a series its colour."""
    return override(name, color={"mode": "fixed", "fixedColor": color}, **properties)


def dashed(name: str, color: str = "dark-red") -> Json:
    """Return an override for a limit: a dashed line that is not filled."""
    style = {"fill": "dash", "dash": [8, 6]}
    return fixed(name, color, custom__lineStyle=style, custom__fillOpacity=0)


def band(lowest: str, highest: str, color: str) -> list[Json]:
    """Return overrides that fill the space between two series."""
    return [
        fixed(
            highest, color, custom__fillBelowTo=lowest, custom__fillOpacity=20, custom__lineWidth=0
        ),
        fixed(lowest, color, custom__lineWidth=0),
    ]


def to_board(uid: str, *labels: str, source: str = "__data.fields") -> str:
    """Return the address of a dashboard, with its variables taken from labels.

    The labels are those of the clicked row of a table, whatever its columns' titles, or with
    source="__field.labels" those of the clicked series.
    """
    carried = "".join(f"var-{label}=${{{source}.{label}}}&" for label in labels)
    return f"/d/{uid}?{carried}{CARRIED}"

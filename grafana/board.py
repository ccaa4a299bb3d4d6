"""A dashboard of Grafana: its variables, annotations, links, and panels set into their places.

A board is a list of rows, a row a list of panels; places, ids and refIds follow from the order, so
that a new source is a new row. The model is schema 39, which Grafana 10 and newer read; newer ones
migrate it by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from fields import Json
from panels import DATASOURCE, WIDTH

TAG = "gpuwatch"


@dataclass(frozen=True, slots=True)
class Row:
    """A titled group of panels, set from left to right and wrapped at the dashboard's width."""

    title: str
    panels: Sequence[Json]


def variable(name: str, label: str, metric_: str, *, many: bool, numeric: bool = False) -> Json:
    """Return a variable with the values that a label has in the time range."""
    query = f"label_values({metric_}, {name})"
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,  # with the time range, so that a node that went down can be chosen
        "regex": "",
        "sort": 3 if numeric else 1,
        "multi": many,
        "includeAll": many,
        **({"allValue": ".+"} if many else {}),
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]} if many else {},
        "hide": 0,
        "options": [],
        "skipUrlSync": False,
    }


def annotation(
    name: str, color: str, expr: str, title: str, text: str, enabled: bool = True
) -> Json:
    """Return marks on all time axes, where the expression has values."""
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": enabled,
        "hide": False,
        "iconColor": color,
        "expr": expr,
        "titleFormat": title,
        "textFormat": text,
        "tagKeys": "alert,severity",
        "useValueForTime": False,
    }


def dashboard(
    uid: str,
    title: str,
    description: str,
    rows: Sequence[Row],
    variables: Sequence[Json],
    annotations: Sequence[Json],
) -> Json:
    """Return the model of a dashboard: panels placed and numbered, linked to its siblings."""
    source = {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "multi": False,
        "includeAll": False,
        "current": {},
        "hide": 0,
        "options": [],
        "skipUrlSync": False,
    }
    siblings = {
        "type": "dashboards",
        "title": "gpuwatch",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }
    return {
        "uid": uid,
        "id": None,
        "title": title,
        "description": description,
        "tags": [TAG],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "fiscalYearStartMonth": 0,
        "weekStart": "",
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "liveNow": False,
        "links": [siblings],
        "templating": {"list": [source, *variables]},
        "annotations": {"list": list(annotations)},
        "panels": _placed(rows),
    }


def _placed(rows: Sequence[Row]) -> list[Json]:
    """Return all panels with ids and places: rows one below the other, panels side by side."""
    placed: list[Json] = []
    y = 0

    def put(panel: Json, x: int, width: int, height: int) -> None:
        grid = {"x": x, "y": y, "w": width, "h": height}
        one = {**panel, "id": len(placed) + 1, "gridPos": grid}
        if targets := panel.get("targets"):
            named = zip(targets, ascii_uppercase, strict=False)
            one["targets"] = [{"refId": letter, **target} for target, letter in named]
        placed.append(one)

    for row in rows:
        put({"type": "row", "title": row.title, "collapsed": False, "panels": []}, 0, WIDTH, 1)
        y += 1
        x = line = 0
        for panel in row.panels:
            width, height = panel["gridPos"]["w"], panel["gridPos"]["h"]
            if x + width > WIDTH:
                x, y, line = 0, y + line, 0
            put(panel, x, width, height)
            x, line = x + width, max(line, height)
        y += line
    return placed

"""Panels of Grafana as plain dictionaries of its JSON model, one function for each kind.

Every panel has a unit, a description and the data source of the variable `datasource`. Where it
stands on its dashboard, its id and its queries' refIds are given by `board`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase

from fields import Json, Steps, override, texts, thresholds

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24


@dataclass(frozen=True, slots=True)
class Query:
    """An expression and how its series are called; a table shows the newest values alone."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: a label, or the value of `expr`, which is aggregated by the labels."""

    title: str
    label: str = ""
    expr: str = ""
    unit: str = "none"
    decimals: int | None = None
    steps: Steps = ()
    texts: dict[int, tuple[str, str]] = field(default_factory=dict)
    link: str = ""
    width: int = 0
    hidden: bool = False


def timeseries(
    title: str,
    description: str,
    unit: str,
    queries: Iterable[Query],
    *,
    width: int = 12,
    height: int = 8,
    low: float = 0,
    high: float | None = None,
    soft_low: float | None = None,
    soft_high: float | None = None,
    steps: Steps = (),
    overrides: Sequence[Json] = (),
    link: str = "",
    fill: int = 0,
    repeat: str = "",
    legend: str = "table",
    no_value: str = "",
) -> Json:
    """Return lines over time. Gaps stay gaps: what is unknown is not drawn.

    With `soft_low` the axis begins there, or lower if a value is lower; `soft_high` likewise.
    """
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": fill,
        "showPoints": "never",
        "spanNulls": False,
        "thresholdsStyle": {"mode": "dashed" if steps else "off"},
    }
    defaults: Json = {"color": {"mode": "palette-classic"}, "custom": custom}
    if soft_low is not None:
        custom["axisSoftMin"] = soft_low
    else:
        defaults["min"] = low
    if soft_high is not None:
        custom["axisSoftMax"] = soft_high
    if high is not None:
        defaults["max"] = high
    if no_value:
        defaults["noValue"] = no_value
    if link:
        defaults["links"] = [{"title": "Show this one", "url": link}]
    table = {"calcs": ["mean", "max", "lastNotNull"], "sortBy": "Max", "sortDesc": True}
    options = {
        "legend": {
            "displayMode": legend,
            "placement": "bottom",
            "showLegend": True,
            **(table if legend == "table" else {"calcs": []}),
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    panel = _panel("timeseries", title, description, unit, width, height, defaults, options)
    panel["fieldConfig"]["defaults"]["thresholds"] = thresholds(steps)
    panel["fieldConfig"]["overrides"] = list(overrides)
    panel["targets"] = [_target(query) for query in queries]
    if repeat:
        panel |= {"repeat": repeat, "repeatDirection": "h", "maxPerRow": WIDTH // width}
    return panel


def stat(
    title: str,
    description: str,
    unit: str,
    query: Query | str,
    *,
    steps: Steps = (),
    mappings: dict[int, tuple[str, str]] | None = None,
    decimals: int | None = None,
    width: int = 3,
    height: int = 4,
    no_value: str = "",
) -> Json:
    """Return one number, coloured when it has thresholds."""
    defaults: Json = {"thresholds": thresholds(steps), "mappings": texts(mappings or {})}
    if decimals is not None:
        defaults["decimals"] = decimals
    if no_value:
        defaults["noValue"] = no_value
    colored = bool(steps or mappings)
    defaults["color"] = (
        {"mode": "thresholds"} if colored else {"mode": "fixed", "fixedColor": "text"}
    )
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "background" if colored else "value",
        "graphMode": "none",
        "textMode": "name" if isinstance(query, Query) else "value",
        "justifyMode": "center",
        "orientation": "auto",
    }
    panel = _panel("stat", title, description, unit, width, height, defaults, options)
    asked = query if isinstance(query, Query) else Query(query)
    panel["targets"] = [_target(asked, instant=True)]
    return panel


def table(
    title: str,
    description: str,
    columns: Sequence[Column],
    *,
    sort: Sequence[tuple[str, bool]],
    width: int = 24,
    height: int = 8,
    no_value: str = "Nothing",
) -> Json:
    """Return a table of newest values; `sort` has titles of columns and whether to descend."""
    values = [column for column in columns if column.expr]
    fields = {
        column.title: f"Value #{ascii_uppercase[index]}" if len(values) > 1 else "Value"
        for index, column in enumerate(values)
    }
    names = [column.label or fields[column.title] for column in columns]
    organize = {
        "excludeByName": {
            "Time": True,
            **{name: True for name, one in zip(names, columns, strict=True) if one.hidden},
        },
        "indexByName": {name: index for index, name in enumerate(names)},
        "renameByName": {name: column.title for name, column in zip(names, columns, strict=True)},
    }
    defaults = {
        "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True},
        "noValue": no_value,
        "thresholds": thresholds((), "transparent"),
    }
    options = {
        "showHeader": True,
        "cellHeight": "sm",
        "footer": {"show": False, "reducer": ["sum"], "fields": ""},
        "sortBy": [{"displayName": name, "desc": descending} for name, descending in sort],
    }
    panel = _panel("table", title, description, "none", width, height, defaults, options)
    panel["fieldConfig"]["overrides"] = [
        shown for column in columns if (shown := _column(column))["properties"]
    ]
    panel["targets"] = [
        _target(Query(column.expr), instant=True, form="table") for column in values
    ]
    merge = [{"id": "merge", "options": {}}] if len(values) > 1 else []
    panel["transformations"] = [*merge, {"id": "organize", "options": organize}]
    return panel


def timeline(
    title: str,
    description: str,
    query: Query,
    values: dict[int, tuple[str, str]],
    *,
    width: int = 24,
    height: int = 8,
    no_value: str = "",
) -> Json:
    """Return one band for each series, coloured by its value."""
    defaults = {
        "color": {"mode": "thresholds"},
        "custom": {"fillOpacity": 85, "lineWidth": 0},
        "mappings": texts(values),
        "thresholds": thresholds(()),
    }
    if no_value:
        defaults["noValue"] = no_value
    options = {
        "mergeValues": True,
        "showValue": "never",
        "rowHeight": 0.85,
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    panel = _panel("state-timeline", title, description, "none", width, height, defaults, options)
    panel["targets"] = [_target(query)]
    return panel


def heatmap(
    title: str,
    description: str,
    unit: str,
    expr: str,
    *,
    cells: str = "percentunit",
    width: int = 12,
    height: int = 8,
) -> Json:
    """Return a heatmap of cumulative buckets, whose label `le` has the unit."""
    defaults = {"custom": {"scaleDistribution": {"type": "linear"}}}
    options = {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": cells},
        "color": {
            "mode": "scheme",
            "scheme": "Oranges",
            "fill": "dark-orange",
            "scale": "exponential",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
            "min": 0,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": True},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
    }
    panel = _panel("heatmap", title, description, unit, width, height, defaults, options)
    panel["targets"] = [_target(Query(expr, "{{le}}"), form="heatmap")]
    return panel


def bars(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    high: float | None = None,
    buckets: bool = False,
    steps: Steps = (),
    overrides: Sequence[Json] = (),
    width: int = 12,
    height: int = 8,
) -> Json:
    """Return one horizontal bar for each series; `buckets`: they are cumulative by `le`."""
    defaults: Json = {
        "color": {"mode": "thresholds"} if steps else {"mode": "fixed", "fixedColor": "blue"},
        "min": 0,
        "thresholds": thresholds(steps),
    }
    if high is not None:
        defaults["max"] = high
    options = {
        "displayMode": "basic",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": True,
        "valueMode": "text",
        "namePlacement": "left",
        "sizing": "auto",
        "minVizHeight": 10,
        "minVizWidth": 0,
        "maxVizHeight": 40,
    }
    panel = _panel("bargauge", title, description, unit, width, height, defaults, options)
    panel["fieldConfig"]["overrides"] = list(overrides)
    form = "heatmap" if buckets else "time_series"
    panel["targets"] = [_target(query, instant=True, form=form)]
    return panel


def _panel(
    kind: str,
    title: str,
    description: str,
    unit: str,
    width: int,
    height: int,
    defaults: Json,
    options: Json,
) -> Json:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit, **defaults}, "overrides": []},
        "options": options,
    }


def _target(query: Query, instant: bool = False, form: str = "time_series") -> Json:
    return {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "format": form,
        "instant": instant,
        "range": not instant,
        "legendFormat": query.legend or "__auto",
    }


def _column(column: Column) -> Json:
    """Return the override of a table's column."""
    properties: Json = {}
    if column.expr:
        properties["unit"] = column.unit
    if column.decimals is not None:
        properties["decimals"] = column.decimals
    if column.texts:
        properties["mappings"] = texts(column.texts)
    if column.steps:
        properties["thresholds"] = thresholds(column.steps, "transparent")
    if column.steps or column.texts:
        properties["color"] = {"mode": "thresholds"}
        properties["custom__cellOptions"] = {"type": "color-background", "mode": "basic"}
    if column.link:
        properties["links"] = [{"title": f"Show this {column.title.lower()}", "url": column.link}]
    if column.width:
        properties["custom__width"] = column.width
    return override(column.title, **properties)

"""Draws the dashboards from a live Prometheus, to look at queries and layout while writing them.

    python grafana/preview.py --prometheus http://127.0.0.1:9090 --output FOLDER

writes one HTML file for each dashboard, with the data in it. It is not Grafana: panels are drawn
by preview.js in about the same way, from the same expressions.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from boards import BOARDS
from queries import ALL, Json, Prometheus, Span, choose, pattern, substitute

HERE = Path(__file__).parent
UPLOT = HERE.parent / "gpuwatch/static/uplot"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>{css}</style></head>
<body><h1>{title}</h1><div id="variables"></div><main></main>
<script>{uplot}</script><script>const DATA = {data};</script><script>{script}</script>
</body></html>
"""


def main() -> int:
    """Write the pages; return the exit status."""
    parser = argparse.ArgumentParser(description="Draw the dashboards from a live Prometheus.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="address of it")
    parser.add_argument("--output", type=Path, required=True, help="folder for the pages")
    parser.add_argument("--minutes", type=float, default=15, help="time range, up to now")
    parser.add_argument("--scrape-interval", type=int, default=15, help="of the server, seconds")
    parser.add_argument(
        "--var", action="append", default=[], metavar="NAME=VALUE", help="choose a variable's value"
    )
    parser.add_argument("--board", action="append", default=[], help="uid; all if not given")
    arguments = parser.parse_args()
    server = Prometheus(arguments.prometheus.rstrip("/"))
    wanted: dict[str, list[str]] = {}
    for text in arguments.var:
        name, _, value = text.partition("=")
        wanted.setdefault(name, []).append(value)
    seconds = arguments.minutes * 60
    step = max(arguments.scrape_interval, round(seconds / 400))
    end = time.time() // step * step
    span = Span(end - seconds, end, step, arguments.scrape_interval)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for build in BOARDS:
        model = build()
        if not arguments.board or model["uid"] in arguments.board:
            path = arguments.output / f"{model['uid']}.html"
            path.write_text(page(server, model, span, wanted))
            sys.stdout.write(f"{path}\n")
    return 0


def page(server: Prometheus, model: Json, span: Span, wanted: dict[str, list[str]]) -> str:
    """Return a page with a dashboard and all its data."""
    chosen = choose(server, model, span, wanted)
    values = pattern(model, chosen) | span.globals()
    panels = repeated(model["panels"], chosen)
    for panel in panels:
        scoped = values | panel.pop("scoped", {})
        panel["title"] = substitute(panel["title"], scoped)
        for target in panel.get("targets", []):
            target["result"] = ask(server, target, span, scoped)
    marks = [
        {"color": one["iconColor"], "result": ask(server, one, span, values)}
        for one in model["annotations"]["list"]
        if one["enable"]
    ]
    shown = {name: "All" if ALL in value else ", ".join(value) for name, value in chosen.items()}
    data = {
        "start": span.start,
        "end": span.end,
        "step": span.step,
        "variables": shown,
        "panels": panels,
        "marks": marks,
    }
    return PAGE.format(
        title=model["title"],
        css=(UPLOT / "uPlot.min.css").read_text() + (HERE / "preview.css").read_text(),
        uplot=(UPLOT / "uPlot.iife.min.js").read_text(),
        data=json.dumps(data).replace("</", "<\\/"),
        script=(HERE / "preview.js").read_text(),
    )


def ask(server: Prometheus, target: Json, span: Span, values: dict[str, str]) -> list[Any]:
    """Return the series of a target: over time, or the newest value alone."""
    expr = substitute(target["expr"], values)
    if target.get("instant"):
        answer = server.get("query", query=expr, time=str(span.end))
    else:
        answer = server.get(
            "query_range",
            query=expr,
            start=str(span.start),
            end=str(span.end),
            step=str(span.step),
        )
    result: list[Any] = answer["result"]
    return result


def repeated(panels: list[Json], chosen: dict[str, list[str]]) -> list[Json]:
    """Return the panels with each repeated one once for each value, what is below moved down."""
    placed: list[Json] = []
    moved = 0
    for panel in panels:
        grid = panel["gridPos"]
        name = panel.get("repeat", "")
        values = [value for value in chosen.get(name, [""]) if value != ALL]
        across = panel.get("maxPerRow", 1)
        for index, value in enumerate(values):
            place = {
                **grid,
                "x": grid["x"] + index % across * grid["w"],
                "y": grid["y"] + moved + index // across * grid["h"],
            }
            copy = json.loads(json.dumps(panel))
            placed.append({**copy, "gridPos": place, "scoped": {name: value}})
        moved += (max(len(values), 1) - 1) // across * grid["h"]
    return placed


if __name__ == "__main__":
    sys.exit(main())

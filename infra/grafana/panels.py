"""Grafana's dashboard JSON from a short declaration.

Plain dictionaries: of the hundreds of fields of Grafana's schema a dashboard here uses fifty, all stable since Grafana 9.
A builder library for all of them would be a dependency larger than this platform's light image. `infra.grafana.schema` holds
the result against Grafana's own types: what its schema requires stands here, a default too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

COLUMNS = 24
HEIGHT = 8
SCHEMA_VERSION = 39  # Grafana 11; later ones migrate it when they load it
SOURCE = {"type": "prometheus", "uid": "prometheus"}
# A Prometheus may watch other things too, itself for one. A test holds that these are all services there are.
SERVICES = (
    "scheduler|curator|trainer|inference|inference-evaluation|inference-serving|reward|grader|rollout|evaluator|console"
)
Kind = Literal["timeseries", "stat", "table"]


@dataclass(frozen=True, slots=True)
class Query:
    """`legend`: what a series is called, `{{label}}` filled in."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`about` says what a person reads from it, and what is wrong when it looks wrong. `unit`: Grafana's name of a unit.
    `total`: its queries are asked once, for the time shown (`$__range`); a table always is, for now. `exemplars`: trace ids of
    single events are shown as points."""

    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8  # of 24
    least: float | None = None
    most: float | None = None
    stacked: bool = False
    total: bool = False
    exemplars: bool = False

    @property
    def at_once(self) -> bool:
        return self.total or self.kind == "table"


@dataclass(frozen=True, slots=True)
class Field:
    """A number that whoever looks may type in at the top; `$name` in expressions."""

    name: str
    label: str
    value: str
    about: str


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`runs`: a metric with the label `run`, from which the choice of runs at the top is filled; empty: there is none."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    runs: str = ""
    fields: tuple[Field, ...] = ()

    def panels(self) -> Iterable[Panel]:
        return (panel for row in self.rows for panel in row.panels)


def panel(title: str, about: str, *queries: str | tuple[str, str], **options: Any) -> Panel:
    """Queries as PromQL, or as (PromQL, legend)."""
    asked = tuple(Query(q) if isinstance(q, str) else Query(*q) for q in queries)
    return Panel(title, about, asked, **options)


def quantile(q: float, histogram: str, *labels: str) -> str:
    """The q-quantile over the last rate interval, by labels. `histogram` may carry a selector in braces."""
    name, brace, selector = histogram.partition("{")
    by = ", ".join(("le", *labels))
    return f"histogram_quantile({q:g}, sum by ({by}) (rate({name}_bucket{brace}{selector}[$__rate_interval])))"


def rate(counter: str, *labels: str) -> str:
    """Per second over the last rate interval, summed by labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({counter}[$__rate_interval]))"


def render(dashboard: Dashboard) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        panels.append(_row(row.title, y, len(panels) + 1))
        y += 1
        for line in _lines(row.panels):
            x = 0
            for one in line:
                panels.append(_panel(one, x, y, len(panels) + 1))
                x += one.width
            y += HEIGHT
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["etude"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [_LINK],
        "templating": {"list": [*([_runs(dashboard.runs)] if dashboard.runs else []), *map(_field, dashboard.fields)]},
        "panels": panels,
    }


def _lines(panels: Sequence[Panel]) -> list[list[Panel]]:
    lines: list[list[Panel]] = []
    free = 0
    for one in panels:
        if one.width > free:
            lines.append([])
            free = COLUMNS
        lines[-1].append(one)
        free -= one.width
    return lines


def _row(title: str, y: int, number: int) -> dict[str, Any]:
    position = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": position}


def _runs(metric: str) -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({metric}, run)", "refId": "run"},
        "refresh": 2,  # whenever the time range changes: new runs appear
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 2,  # run ids begin with their date: newest first
    }


def _field(field: Field) -> dict[str, Any]:
    return {
        "name": field.name,
        "label": field.label,
        "description": field.about,
        "type": "textbox",
        "query": field.value,
        "current": {"text": field.value, "value": field.value},
    }


def _panel(one: Panel, x: int, y: int, number: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": one.unit, "min": one.least, "max": one.most}
    if one.kind == "timeseries":
        fill = 60 if one.stacked else 8
        stacking = {"mode": "normal" if one.stacked else "none"}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": fill, "stacking": stacking, "spanNulls": 120_000}
    return {
        "id": number,
        "type": one.kind,
        "title": one.title,
        "description": one.about,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": one.width, "x": x, "y": y},
        "fieldConfig": {"defaults": {k: v for k, v in defaults.items() if v is not None}, "overrides": []},
        "options": _OPTIONS[one.kind],
        "transformations": _TABLE if one.kind == "table" else [],
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "instant": one.at_once,
                "range": not one.at_once,
                **({"exemplar": True} if one.exemplars else {}),
                "format": "table" if one.kind == "table" else "time_series",
            }
            for i, query in enumerate(one.queries)
        ],
    }


_TABLE = [{"id": "organize", "options": {"excludeByName": {"Time": True, "__name__": True}}}]
_LINK = {
    "type": "dashboards",
    "tags": ["etude"],
    "title": "Étude",
    "icon": "external link",
    "tooltip": "",
    "asDropdown": False,
    "keepTime": True,
    "targetBlank": False,
    "includeVars": False,
}
_OPTIONS: dict[Kind, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"]},
        "colorMode": "none",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "auto",
        "orientation": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    },
    "table": {"frameIndex": 0, "showHeader": True, "sortBy": [{"displayName": "Value", "desc": True}]},
}

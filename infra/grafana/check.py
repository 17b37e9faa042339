"""Asks a Prometheus every expression of the dashboards and alerts: does it evaluate, and does it show anything?

    python -m infra.grafana.check [URL] [--minutes 60]      URL: http://localhost:9090 unless given

Exit code 0: every expression evaluates, and no panel is empty but those that QUIET names. 1: otherwise, with the list.
Standard library and the declarations only: it runs wherever the checkout is.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.generate import DASHBOARDS
from infra.grafana.panels import Field
from shared import direct

ALERTS = Path(__file__).resolve().parent.parent / "prometheus" / "alerts.yml"
POINTS = 240  # per series asked for
# What stays without a value while all is well, or where the platform lacks that part: dashboard: title [legend] -> why.
_NO_SGLANG = "no engine here is SGLang"
QUIET: dict[str, str] = {
    "learning: Alerts": "none was raised",
    "flow: Spans": "no OpenTelemetry collector is named: traces are off",
    "engines: Up": _NO_SGLANG,
    "engines: Started again, and undone [started {{instance}}]": _NO_SGLANG,
    "engines: Started again, and undone [undone]": _NO_SGLANG,
    "engines: How its requests end [{{finish}}]": _NO_SGLANG,
    "engines: How its requests end [retracted]": _NO_SGLANG,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One expression. `where`: dashboard and panel, or the alert; `legend` tells the curves of a panel apart."""

    where: str
    legend: str
    expr: str
    alert: bool = False

    @property
    def name(self) -> str:
        return f"{self.where} [{self.legend}]" if self.legend else self.where


@dataclass(frozen=True, slots=True)
class Answer:
    """`series` that have a finite value within the time asked for; `error`: Prometheus' own words, or empty."""

    asked: Asked
    series: int = 0
    error: str = ""


def filled(expr: str, fields: Iterable[Field] = (), window: str = "1m", shown: str = "1h") -> str:
    """As Grafana would send it: every run, fields as they stand at first, a window of at least four scrapes, and the last
    hour shown."""
    values = {field.name: field.value for field in fields}
    values |= {"__rate_interval": window, "__range": shown, "run": ".*"}
    return re.sub(r"\$(\w+)", lambda found: values.get(found[1], found[0]), expr)


def expressions() -> Iterator[Asked]:
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard.panels():
            for query in panel.queries:
                legend = query.legend if len(panel.queries) > 1 else ""
                yield Asked(f"{name}: {panel.title}", legend, filled(query.expr, dashboard.fields))
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield Asked(f"alert {rule['alert']}", "", rule["expr"], alert=True)


def call(url: str, path: str, **query: object) -> Any:
    """The `data` of an answer. Raises ValueError with what Prometheus says of a query it refuses, OSError."""
    try:
        with direct.ask(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", 30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error).get("error", f"HTTP {error.code}")) from None


def look(url: str, asked: Asked, since_s: float, now: float) -> Answer:
    step = max(5, math.ceil(since_s / POINTS))
    try:
        found = call(url, "query_range", query=asked.expr, start=now - since_s, end=now, step=step)["result"]
    except ValueError as error:
        return Answer(asked, error=str(error))
    return Answer(asked, sum(any(math.isfinite(float(value)) for _, value in one["values"]) for one in found))


def unhealthy_rules(url: str) -> list[str]:
    """Rules that this Prometheus has loaded and cannot evaluate."""
    rules = [rule for group in call(url, "rules")["groups"] for rule in group["rules"]]
    return [f"{rule['name']}: {rule.get('lastError', rule['health'])}" for rule in rules if rule["health"] == "err"]


def survey(url: str, since_s: float) -> list[Answer]:
    now = time.time()
    return [look(url, asked, since_s, now) for asked in expressions()]


def findings(answers: list[Answer], quiet: Mapping[str, str]) -> list[str]:
    """What is wrong, one line each. `quiet`: names that may be empty."""
    lines = [f"refused: {a.asked.name}: {a.error}" for a in answers if a.error]
    panels = [a for a in answers if not a.asked.alert and not a.error]
    return lines + [f"empty: {a.asked.name}" for a in panels if not a.series and a.asked.name not in quiet]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.grafana.check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("url", nargs="?", default="http://localhost:9090")
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back to look")
    options = parser.parse_args()
    try:
        answers = survey(options.url.rstrip("/"), 60 * options.minutes)
        wrong = findings(answers, QUIET) + [f"rule: {text}" for text in unhealthy_rules(options.url.rstrip("/"))]
    except OSError as error:
        sys.exit(f"{options.url}: {error}. Is Prometheus there? docker compose ps prometheus")
    for line in wrong:
        print(line)
    quiet = [a.asked.name for a in answers if not a.series and not a.error and a.asked.name in QUIET]
    for name in quiet:
        print(f"quiet: {name}: {QUIET[name]}")
    shown = sum(1 for a in answers if a.series and not a.asked.alert)
    curves = sum(1 for a in answers if not a.asked.alert)
    firing = sorted(a.asked.where for a in answers if a.asked.alert and a.series)
    print(f"{shown} of {curves} expressions of panels show something; {len(quiet)} are quiet by nature")
    print(f"{len(answers) - curves} alerts evaluate; true at some time: {', '.join(firing) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

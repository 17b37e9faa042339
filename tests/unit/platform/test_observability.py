"""No panel and no alert can be empty by a typo: every name, label and figure in an expression is one that the code declares."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from etude.demo.options import DemoOptions
from etude.demo.prepare import configure
from etude.supervisor import SERVICES
from infra import declared, run_defaults
from infra.generate import DASHBOARDS, files
from infra.grafana import check, panels
from infra.grafana.panels import COLUMNS, Dashboard, Row, panel, render
from services.reward import monitors
from services.scheduler.quota import QUOTA_EXCEEDED
from shared.contracts.run import Ref

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "infra" / "prometheus"
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
SERIES = declared.series()
WORDS = set(
    """sum max min count rate increase scalar absent time histogram_quantile quantile_over_time max_over_time sum_over_time
    vector by on unless or and le""".split()  # noqa: SIM905
)
_TEXT = re.compile(r'"[^"]*"')
_GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"\{([^}]*)\}")
_PERIOD = re.compile(r"\[[^]]*\]|\boffset\s+\w+")


def names(expr: str) -> set[str]:
    """Series that an expression asks for."""
    bare = _GROUPING.sub(" ", _SELECTOR.sub(" ", _PERIOD.sub(" ", _TEXT.sub(" ", expr))))
    return set(re.findall(r"(?<!\w)[a-zA-Z_:][a-zA-Z0-9_:]*", bare)) - WORDS


def labels(expr: str) -> set[str]:
    """Labels that an expression groups or selects by."""
    grouped = {label.strip() for found in _GROUPING.findall(expr) for label in found.split(",")}
    selected = {
        label for found in _SELECTOR.findall(_TEXT.sub('""', expr)) for label in re.findall(r"(\w+)\s*[=!]", found)
    }
    return (grouped | selected) - {""}


CASES = sorted({(asked.where, asked.expr) for asked in check.expressions()})


@pytest.mark.parametrize(("where", "expr"), CASES)
def test_an_expression_asks_for_what_the_code_declares(where, expr):
    asked = names(expr)
    assert asked, "an expression without a series"
    assert asked <= SERIES.keys(), where
    known = {label for name in asked for label in SERIES[name]} | set(declared.TARGET_LABELS)
    assert labels(expr) <= known, where


def test_a_figure_of_a_step_is_one_that_the_trainer_gives():
    figures = set(declared.literal("services.trainer.metrics", "FIGURES"))
    used = {name for _, expr in CASES for name in re.findall(r'etude_trainer_step_figure\{[^}]*\bname="(\w+)"', expr)}
    assert used
    assert used <= figures


def test_a_job_is_a_service_or_a_server():
    services = {name for name, _ in SERVICES}
    jobs = services | {"inference-evaluation", "inference-serving"}  # pools that not everybody has
    for where, expr in CASES:
        for matcher in re.findall(r'\bjob=~?"([^"]*)"', expr):
            assert set(matcher.split("|")) <= jobs, where
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    scraped = {name for job in config for dns in job.get("dns_sd_configs", []) for name in dns["names"]}
    assert jobs <= scraped | {job["job_name"] for job in config}
    missing = next(r for g in ALERTS["groups"] for r in g["rules"] if r["alert"] == "ServiceMissing")["expr"]
    assert set(re.findall(r'absent\(up\{job="(\w+)"', missing)) == services
    down = next(r for g in ALERTS["groups"] for r in g["rules"] if r["alert"] == "ServiceDown")["expr"]
    assert f'job=~"{panels.SERVICES}"' in down
    assert set(panels.SERVICES.split("|")) == jobs


def test_legends_name_labels_that_survive_the_grouping():
    for name, dashboard in DASHBOARDS.items():
        for one in dashboard.panels():
            for query in one.queries:
                grouped = _GROUPING.findall(query.expr)
                shown = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
                if grouped:
                    left = {label.strip() for found in grouped for label in found.split(",")}
                    assert shown <= left, f"{name}: {one.title}"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_whole(name):
    board = render(DASHBOARDS[name])
    panels = board["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    cells = [
        (x, y)
        for p in panels
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels lie over each other"
    assert max(x for x, _ in cells) < COLUMNS
    assert all(p["description"] for p in panels if p["type"] != "row")
    variables = [v["name"] for v in board["templating"]["list"]]
    used = set(re.findall(r"\$(\w+)", " ".join(q.expr for one in DASHBOARDS[name].panels() for q in one.queries)))
    assert used - {"__rate_interval", "__range"} <= set(variables)
    assert set(variables) - {"run"} <= used, "a number at the top that changes nothing"
    if "run" in variables:
        assert "run" in SERIES[DASHBOARDS[name].runs]


def test_only_what_is_asked_once_asks_for_the_whole_time_shown():
    """A curve would sum it up anew at each of its points."""
    for dashboard in DASHBOARDS.values():
        for one in dashboard.panels():
            assert ("$__range" in str(one.queries)) == one.total, one.title


def test_a_line_that_is_full_goes_on_in_the_next():
    wide = [panel(str(i), "about", "up", width=9) for i in range(5)]
    board = render(Dashboard("u", "t", "a", (Row("r", tuple(wide)),)))
    assert [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"][1:]] == [
        (0, 1), (9, 1), (0, 9), (9, 9), (0, 17),
    ]  # fmt: skip


@pytest.mark.parametrize("path", files(), ids=str)
def test_what_is_generated_is_up_to_date(path):
    assert (ROOT / path).read_text() == files()[path], "run: python -m infra.generate"


def test_whatever_a_run_learns_with_is_described_where_it_is_declared():
    documented = [d for _, rows in run_defaults.sections().values() for d in rows] + run_defaults.constants()
    assert {"train.importance_clip", "sampling.max_edits", "shared.environments.function.workspace.MAX_BROKEN"} <= {
        d.name for d in documented
    }
    assert [d.name for d in documented if len(d.about) < 5] == []


def test_the_page_of_a_run_says_where_the_demo_differs():
    changed = {d.name: d.demo for _, rows in run_defaults.sections().values() for d in rows if d.demo}
    assert {"schedule.minutes": "10", "train.credit.per": "turn", "sampling.retry": "fresh"}.items() <= changed.items()
    ref = Ref(key="k", size=1, checksum="0" * 32)
    config = configure("", DemoOptions(), ref, (ref, ref), (ref, ref))
    assert float(changed["train.learning_rate"]) == config.train.learning_rate
    assert "train.importance_clip" not in changed


def test_names_of_metrics_follow_the_house():
    for metric in declared.metrics():
        assert re.match(r"(etude_[a-z]+_[a-z0-9_]+|sglang:[a-z0-9_]+)$", metric.name), metric
        assert metric.about.endswith("."), metric


def test_every_metric_of_a_service_is_shown_somewhere():
    """A figure that nobody can see is work for nothing; one that is new belongs onto a dashboard."""
    shown = {name for _, expr in CASES for name in names(expr)}
    unseen = {metric.name for metric in declared.metrics() if not shown & metric.series.keys()}
    assert unseen <= {"etude_health_ready"}


def test_every_alert_is_tried_and_says_what_to_do():
    tried = (PROMETHEUS / "alerts_test.yml").read_text()
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() == {"summary", "action", "runbook"}
            by_series = "by (run, name, severity)" in rule["expr"]  # as it was said
            assert by_series or rule["labels"]["severity"] in ("warning", "critical")
            assert rule["alert"] in tried


def said_of_waits() -> set[str]:
    """Texts in the modules that wait, of f-strings the beginning."""
    modules = ("trainer/service", "inference/weights_agent", "scheduler/service", "rollout/inference", "reward/graders")
    trees = [ast.parse((ROOT / "services" / f"{name}.py").read_text()) for name in modules]
    constants = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {value for value in constants if isinstance(value, str)}


def test_what_may_be_waited_for_long_is_named_as_the_services_say_it():
    (rule,) = (r for g in ALERTS["groups"] for r in g["rules"] if r["alert"] == "WaitsForLong")
    (allowed,) = re.findall(r'on!~"([^"]+)"', rule["expr"])
    said = said_of_waits()
    for words in allowed.split("|"):
        assert any(re.fullmatch(words, text) for text in said), words
    trouble = {"inference", "graders", "the bus", "weights"}
    assert trouble <= said
    assert not [text for text in trouble if re.fullmatch(allowed, text)]


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    named = {rule["alert"]: rule["annotations"]["runbook"] for group in ALERTS["groups"] for rule in group["rules"]}
    page = (ROOT / "docs" / "alerts.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n\n(.+?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sections.keys() == named.keys()
    assert named == {name: f"docs/alerts.md#{name.lower()}" for name in named}  # as the site and GitHub make the anchor
    assert all(len(text) > 100 for text in sections.values())
    anchors = {name.lower() for name in sections}
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= anchors


def test_the_runbook_knows_every_alert_of_a_run():
    """By the names that services raise them under."""
    raised = set()
    for path in (ROOT / "services").rglob("*.py"):
        text = path.read_text()
        raised |= set(re.findall(r'Alert\([^)]*?\bname="(\w+)",\s+severity="(?:critical|warning)"', text, re.DOTALL))
        raised |= set(re.findall(r'\.alert\(\s*(?:now,\s*)?"(\w+)", "(?:critical|warning)"', text))
    raised |= {name for _, name, _ in monitors._BOUNDS.values()} | {QUOTA_EXCEEDED}
    page = (ROOT / "docs" / "alerts.md").read_text()
    told = set(
        re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `")))
    )
    assert len(raised) > 12
    assert told == raised - {"problems_unproven"}


def test_the_guide_names_tests_and_commands_that_exist():
    guide = (ROOT / "docs" / "operations.md").read_text()
    held = set(re.findall(r"`(test_\w+)`", guide))
    written = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert held
    assert held <= written
    known = {setting.name for rows in declared.settings().values() for setting in rows}
    variables = set(re.findall(r"\bETUDE_[A-Z0-9_]+", guide)) - set(
        re.findall(r"^#?(ETUDE_\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    )
    assert variables <= known
    titles = {one.title for dashboard in DASHBOARDS.values() for one in dashboard.panels()}
    assert {"Busy graders", "What attempts wait for"} <= titles

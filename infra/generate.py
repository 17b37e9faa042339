"""Writes what comes from code: Grafana's dashboards, docs/metrics.md, docs/settings.md.

python -m infra.generate          # a test fails when the files are not what this writes
"""

from __future__ import annotations

import json
from pathlib import Path

from infra import declared
from infra.grafana.engines import ENGINES
from infra.grafana.flow import FLOW
from infra.grafana.learning import LEARNING
from infra.grafana.panels import render
from infra.grafana.sandboxes import SANDBOXES

DASHBOARDS = {"learning": LEARNING, "flow": FLOW, "engines": ENGINES, "sandboxes": SANDBOXES}
AGAIN = "Written by `python -m infra.generate` from the code; edit that instead."


def files() -> dict[Path, str]:
    """Path below the project's root -> what stands in it."""
    folder = Path("infra/grafana/dashboards")
    boards = {folder / f"{name}.json": json.dumps(render(d), indent=1) + "\n" for name, d in DASHBOARDS.items()}
    return {**boards, Path("docs/metrics.md"): metrics_page(), Path("docs/settings.md"): settings_page()}


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def metrics_page() -> str:
    parts = [
        f"# Metrics\n\n<!-- {AGAIN} -->\n",
        "Every service answers `/metrics` for Prometheus. Prometheus adds `job` (the service) and `instance` (the replica).\n"
        "A counter's series ends in `_total`, a histogram's in `_bucket`, `_sum` and `_count`. Dashboards and alerts use no\n"
        "other names than these: a test holds that.\n",
    ]
    by_module: dict[str, list[declared.Metric]] = {}
    for metric in declared.metrics():
        by_module.setdefault(metric.where, []).append(metric)
    for where, metrics in by_module.items():
        rows = [(f"`{m.name}`", m.kind.lower(), ", ".join(m.labels), m.about) for m in metrics]
        parts.append(f"## {where}\n\n{_table(('metric', 'kind', 'labels', 'what it says'), rows)}")
    figures = ", ".join(f"`{name}`" for name in declared.literal("services.trainer.metrics", "FIGURES"))
    parts.append(f"## Figures of a step\n\n`etude_trainer_step_figure` has these values of `name`: {figures}.\n")
    rows = [(f"`{name}`", ", ".join(labels), about) for name, (labels, about) in declared.FOREIGN.items()]
    parts.append(f"## From elsewhere\n\n{_table(('metric', 'labels', 'what it says'), rows)}")
    return "\n".join(parts)


def settings_page() -> str:
    parts = [
        f"# Settings\n\n<!-- {AGAIN} -->\n",
        "Every service reads environment variables, over a TOML file that `ETUDE_CONFIG` names (keys there: lower case,\n"
        "without `ETUDE_`). `python -m services.NAME --check` prints the resolved whole, secrets masked, and exits; a wrong\n"
        "value ends a service at once with the field, what was found and what is allowed.\n\n"
        "What a *run* learns with is no setting of a service: it is stored with the run (`shared/contracts/run.py`).\n",
    ]
    for title, rows in declared.settings().items():
        cells = [(f"`{s.name}`", s.kind, f"`{s.default}`" if s.default else "", s.allowed, s.about) for s in rows]
        head = ("variable", "kind", "default", "allowed", "what it does")
        parts.append(f"## {title}\n\n{_table(head, cells)}")
    return "\n".join(parts)


if __name__ == "__main__":
    for path, text in files().items():
        (declared.ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (declared.ROOT / path).write_text(text)
        print(path)

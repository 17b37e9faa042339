"""Writes what comes from code: Grafana's dashboards, docs/metrics.md, docs/settings.md, docs/run.md, and the
names that shared/settings.py knows.

python -m infra.generate          # a test fails when the files are not what this writes
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from infra import declared, run_defaults
from infra.grafana.cost import COST
from infra.grafana.engines import ENGINES
from infra.grafana.flow import FLOW
from infra.grafana.learning import LEARNING
from infra.grafana.panels import render
from infra.grafana.sandboxes import SANDBOXES

DASHBOARDS = {"learning": LEARNING, "flow": FLOW, "engines": ENGINES, "sandboxes": SANDBOXES, "cost": COST}
# Read where a tool needs them: shared/environments/repository/embeddings.py, shared/environments/tools/web_search.py.
VARIABLES = (
    (
        "ETUDE_EMBEDDINGS",
        "path",
        "Folder of static embeddings (model2vec), with which the tool `search` also ranks by meaning; unset: by words alone. Set "
        "it for the rollout workers.",
    ),
    (
        "ETUDE_WEB_SEARCH",
        "string",
        "URL of the service that the tool `web_search` asks with `?q=QUERY` (docs/tools.md); unset: a problem that names the tool "
        "is refused. Set it for the rollout workers, the curator, and commands that check problems.",
    ),
)
AGAIN = "Written by `python -m infra.generate` from the code; edit that instead."


def files() -> dict[Path, str]:
    """Path below the project's root -> what stands in it."""
    folder = Path("infra/grafana/dashboards")
    boards = {folder / f"{name}.json": json.dumps(render(d), indent=1) + "\n" for name, d in DASHBOARDS.items()}
    docs = {"metrics": metrics_page(), "settings": settings_page(), "run": run_page()}
    known = {Path("shared/declared_settings.json"): json.dumps(declared.fields(), indent=1) + "\n"}
    return {**boards, **known, **{Path("docs") / f"{name}.md": text for name, text in docs.items()}}


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
        "without `ETUDE_`). One file serves all: a service passes over what another declares. A name in the file that\n"
        "none declares is refused, and so is a variable that is almost one of these names. `python -m services.NAME --check`\n"
        "prints the resolved whole, secrets masked, and exits, `python -m services --check` tries every service's,\n"
        "`python -m services.NAME --help` lists what one can be told. A wrong value ends a service at once (code 2) with the\n"
        "field, what was found and what is allowed; `etude up`, `etude demo` and `etude eval` say so before they begin.\n\n"
        "What a *run* learns with is no setting of a service: it is stored with the run ([run.md](run.md)).\n",
    ]
    for title, rows in declared.settings().items():
        cells = [(f"`{s.name}`", s.kind, f"`{s.default}`" if s.default else "", s.allowed, s.about) for s in rows]
        head = ("variable", "kind", "default", "allowed", "what it does")
        parts.append(f"## {title}\n\n{_table(head, cells)}")
    rows = [(f"`{name}`", kind, about) for name, kind, about in VARIABLES]
    parts.append(
        "## Tools of agents\n\nVariables alone: no service declares them, and no TOML file can hold them. Unset or empty: off.\n\n"
        + _table(("variable", "kind", "what it does"), rows)
    )
    return "\n".join(parts)


def run_page() -> str:
    parts = [
        f"# What a run learns with\n\n<!-- {AGAIN} -->\n",
        "A run's configuration is stored once, as `runs/RUN/config.json` in the object store, and every service reads it there\n"
        "(`shared/contracts/run.py`). These are its defaults; *demo* is what `etude demo` and `etude start` set without options\n"
        "where that differs. What has an option can be changed with it (`etude demo --help`), all of `sampling`, `reward`,\n"
        "`schedule` and `train` by `--config FILE`, a JSON object of what shall differ:\n\n"
        '    {"train": {"learning_rate": 2e-5}, "schedule": {"max_staleness": 4, "pause_on": ["fewer_solved"]}}\n\n'
        "A value outside of *allowed*, or a name that is not listed, is refused before a run starts (`etude start --check` looks\n"
        "and starts nothing) and by `etude reconfigure`, with the field, what was found and what is allowed.\n\n"
        "Formulas and their sources: [recipe.md](recipe.md). Words: [architecture.md](architecture.md).\n",
    ]
    for title, (about, rows) in run_defaults.sections().items():
        name = title if title == "The run" else f"`{title}`"
        cells = [
            (f"`{d.name}`", d.kind, *(f"`{text}`" if text else "" for text in (d.value, d.demo)), d.allowed, d.about)
            for d in rows
        ]
        head = ("field", "kind", "default", "demo", "allowed", "what it says")
        parts.append("\n\n".join(filter(None, (f"## {name}", about, _table(head, cells)))))
    rows = [(f"`{d.name}`", f"`{d.value}`", d.about) for d in run_defaults.constants()]
    parts.append(
        "## Constants\n\nNo field: nobody has had a reason to change one for a run. In the code, with their reasons.\n\n"
        + _table(("constant", "value", "what it says"), rows)
    )
    return "\n".join(parts)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m infra.generate", description=(__doc__ or "").split("\n")[0]).parse_args()
    for path, text in files().items():
        (declared.ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (declared.ROOT / path).write_text(text)
        print(path)

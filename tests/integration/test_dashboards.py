"""Every expression of the dashboards and alerts, asked of a real Prometheus that scraped a real run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from infra.grafana import check
from infra.servers.ports import free_port
from tests.end_to_end.problems import write
from tests.patience import until
from tests.watching import need, running

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """The address of a Prometheus with the project's alerts, which scrapes what `folder`/targets.json names."""
    program = need("prometheus")
    shutil.copy(ROOT / "infra" / "prometheus" / "alerts.yml", folder / "alerts.yml")
    (folder / "targets.json").write_text("[]")
    config = {
        "global": {"scrape_interval": "3s", "evaluation_interval": "5s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": "etude", "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "2s"}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    arguments = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with running([str(program.path), *arguments], folder, program.environment):
        yield f"http://{address}"


def tell_targets(state: Path, file: Path) -> None:
    """What the services say of themselves, as Prometheus reads it: the job is the service, as in compose."""
    found = []
    for path in (state / "run").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(path.read_text())
            address = told["url"].removeprefix("http://")
            found.append({"targets": [address], "labels": {"job": told["name"].partition("-")[0]}})
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(file)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_panel_is_empty_and_no_expression_refused_after_a_run(tmp_path: Path) -> None:
    write(tmp_path / "problems.jsonl", per_function=16)
    (tmp_path / "prometheus").mkdir()
    command = [
        sys.executable, "-m", "etude.cli", "demo", "--problems", "problems.jsonl", "--steps", "20", "--minutes", "8",
        "--groups-per-step", "2", "--group-size", "4", "--eval-problems", "6", "--eval-samples", "2",
        "--report", "report.json",
    ]  # fmt: skip
    with prometheus(tmp_path / "prometheus") as url:
        began = time.time()
        with (tmp_path / "demo.log").open("w") as log:
            often = {**os.environ, "ETUDE_SWEEP_EVERY_S": "5"}  # the run may be over before objects are first counted
            demo = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=often)

            def over() -> bool:
                tell_targets(tmp_path / ".etude", tmp_path / "prometheus" / "targets.json")
                return demo.poll() is not None

            until(over, "the demo to end", 1500, every=1.0)
        assert demo.returncode == 0, (tmp_path / "demo.log").read_text()[-3000:]
        answers = check.survey(url, time.time() - began)
        assert check.findings(answers, check.QUIET) == []
        assert check.unhealthy_rules(url) == []
        assert sum(answer.series for answer in answers) > len(answers)


def test_a_refused_expression_and_an_empty_panel_are_told_and_a_quiet_one_is_not() -> None:
    answers = [
        check.Answer(check.Asked("flow: A", "", "up"), series=1),
        check.Answer(check.Asked("flow: B", "b", "nothing")),
        check.Answer(check.Asked("flow: C", "", "quiet")),
        check.Answer(check.Asked("flow: D", "", "sum("), error="parse error"),
        check.Answer(check.Asked("alert E", "", "up == 0", alert=True)),
    ]
    assert check.findings(answers, {"flow: C": "by nature"}) == ["refused: flow: D: parse error", "empty: flow: B [b]"]


def test_what_is_quiet_by_nature_is_a_curve_that_exists() -> None:
    assert check.QUIET.keys() <= {asked.name for asked in check.expressions()}
    assert not any("$" in asked.expr for asked in check.expressions())

"""The dashboards against Grafana's own types: read strictly, so that a misspelt field is no field that Grafana ignores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.generate import DASHBOARDS
from infra.grafana.schema import DASHBOARDS as FOLDER
from infra.grafana.schema import PROGRAM, wrong
from infra.servers.programs import COMMAND
from tests import watching


@pytest.fixture(autouse=True)
def program() -> None:
    watching.there(PROGRAM if PROGRAM.exists() else None, "Grafana's schema", COMMAND)


def test_every_dashboard_is_what_grafana_takes() -> None:
    paths = sorted(FOLDER.glob("*.json"))
    assert len(paths) == len(DASHBOARDS)
    assert wrong(paths) == []


def _panel(board: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(panel for panel in board["panels"] if panel["type"] == kind)


def test_what_grafana_would_ignore_or_misread_is_told(tmp_path: Path) -> None:
    board = json.loads((FOLDER / "flow.json").read_text())
    _panel(board, "timeseries")["options"]["legend"]["placment"] = "right"
    del _panel(board, "stat")["options"]["orientation"]
    _panel(board, "table")["targets"][0]["range"] = "no"
    board["panels"].append({"type": "piechart", "title": "New", "targets": [{"datasource": {"type": "loki"}}]})
    board["refrehs"] = "10s"
    (tmp_path / "board.json").write_text(json.dumps(board))
    told = "\n".join(wrong([tmp_path / "board.json"]))
    for what in ("placment", "orientation", "range", "piechart", "loki", "refrehs"):
        assert what in told, f"{what} passed:\n{told}"


def test_a_value_out_of_bounds_is_told(tmp_path: Path) -> None:
    board = json.loads((FOLDER / "flow.json").read_text())
    _panel(board, "stat")["gridPos"]["w"] = 25
    (tmp_path / "board.json").write_text(json.dumps(board))
    (told,) = wrong([tmp_path / "board.json"])
    assert "gridPos.w" in told

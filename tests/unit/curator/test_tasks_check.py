"""`etude tasks check` admits, quarantines with evidence, and says it by table, JSON and exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from services.curator.cli import app


def row(name: str, **changed: Any) -> dict[str, Any]:
    return {
        "id": name,
        "files": {"f.py": "def f(x):\n    return x\n"},
        "entry": "f",
        "visible": [{"args": "[1]", "expected": "2"}],
        "hidden": [{"args": "[2]", "expected": "3"}],
        "solution": {"f.py": "def f(x):\n    return x + 1\n"},
        **changed,
    }


def check(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["check", str(path), "--sandbox", "process", *options])


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def test_good_problems_are_admitted_with_exit_code_0(tmp_path: Path) -> None:
    found = check(written(tmp_path, row("good"), row("open", solution={})), "--json")
    assert found.exit_code == 0, found.output
    assert [(one["id"], one["outcome"]) for one in json.loads(found.stdout)] == [
        ("good", "admitted"),
        ("open", "unproven"),
    ]
    assert "2 of 2 problems admitted" in check(written(tmp_path, row("good"), row("other"))).output


def test_bad_problems_are_quarantined_with_what_was_seen(tmp_path: Path) -> None:
    wrong = row("wrong", solution={"f.py": "def f(x):\n    return x + 2\n"})
    done = row("done", files={"f.py": "def f(x):\n    return x + 1\n"})
    quarantine = tmp_path / "quarantine.jsonl"
    found = check(written(tmp_path, row("good"), wrong, done), "--json", "--quarantine", str(quarantine))
    assert found.exit_code == 1, found.output
    kept = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert kept == [one for one in json.loads(found.stdout) if one["outcome"] == "quarantined"]
    assert [one["id"] for one in kept] == ["wrong", "done"]
    assert kept[0]["evidence"].startswith("oracle: the solution gives 3")
    assert kept[1]["evidence"].startswith("no-op: ")


def test_a_solution_whose_gradings_disagree_is_quarantined(tmp_path: Path) -> None:
    flips = "import random\ndef f(x):\n    return x + random.choice((1, 2))\n"
    rows = [row(f"flaky{number}", solution={"f.py": flips}) for number in range(8)]
    found = check(written(tmp_path, *rows), "--json")
    assert found.exit_code == 1, found.output
    assert all(one["evidence"] for one in json.loads(found.stdout) if one["outcome"] == "quarantined")


def test_a_file_that_cannot_be_read_is_named_with_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "x"\n')
    found = check(path)
    assert found.exit_code == 2
    assert str(path) in found.output

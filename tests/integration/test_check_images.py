"""Problems of a user's file that name an image are checked in that image."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from etude.demo import checking
from services.curator.cli import app
from shared import objects
from shared.problems.importing import read_lines
from shared.sandbox.bases.make import Source, make
from tests.contract.sandboxes import NO_BWRAP
from tests.integration.test_repository_rooms import add_python
from tests.laboratory import FILES, HIDDEN, SOLUTION
from tests.unit.sandbox.rootfs_world import host_programs

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ETUDE_STATE", "ETUDE_CONFIG", "ETUDE_SANDBOX"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path, image: str) -> Path:
    """Write a file with one repository, which names an image."""
    for path, text in FILES.items():
        (folder / "calc" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "calc" / path).write_text(text)
    hidden: dict[str, Any] = {
        "fail_to_pass": ["tests/test_calc.py::test_add", "tests/test_calc.py::test_scaled"],
        "pass_to_pass": ["tests/test_calc.py::test_zero"],
        "tests": {"tests/test_calc.py": HIDDEN},
        "solution": {path: change.text for path, change in SOLUTION.items()},
    }
    row = {"id": "calc", "kind": "repository", "prompt": "Mend add.", "tree": "calc", "image": image, "hidden": hidden}
    (folder / "mine.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "mine.jsonl"


def test_a_problem_is_checked_in_the_base_that_it_names(tmp_path: Path) -> None:
    root = tmp_path / "root"
    host_programs(root, ("sh", "bash", "cat"))
    add_python(root)
    make(objects.connect("file:.etude/objects"), "small", Source(folder=root), tmp_path / "making")
    found = CliRunner().invoke(app, ["check", str(written(tmp_path, "base:small")), "--json"])
    assert found.exit_code == 0, found.output
    assert [one["outcome"] for one in json.loads(found.stdout)] == ["admitted"]


@pytest.mark.parametrize("command", [["check", "--json"], ["import", "--out", "pack", "--split", "rl"]])
def test_a_base_that_does_not_exist_is_named(tmp_path: Path, command: list[str]) -> None:
    found = CliRunner().invoke(app, [*command, str(written(tmp_path, "base:none"))])
    assert found.exit_code in (1, 2), found.output
    assert re.search(r"none.*etude sandbox base", " ".join(found.output.split()))


def test_the_demo_names_a_base_that_does_not_exist(tmp_path: Path) -> None:
    path = written(tmp_path, "base:none")
    [outcome] = checking._outcomes(path, [(line.problem, line.hidden) for line in read_lines(path)])
    assert re.search(r"none.*etude sandbox base", outcome.reason)

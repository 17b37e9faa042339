"""`etude tasks import` of repositories: a file of one's own and a folder of Harbor tasks, through the sandbox into a pack."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.demo import prepare
from services.curator.cli import app
from services.curator.sources.running import ran
from shared.environments.repository import trees
from shared.objects.directory import DirectoryObjects
from shared.problems import Hidden, Problem
from shared.problems import pack as packs
from tests.contract.sandboxes import NO_BWRAP
from tests.datasets import harbor
from tests.laboratory import CALC, FILES, HIDDEN, SOLUTION

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)

LIBRARY = """
def ordinal(number):
    return "th" if number % 100 in (11, 12, 13) else "st"


def pluralize(word):
    return "octopi"
"""
LINE = {
    "id": "calc-1",
    "kind": "repository",
    "prompt": "add and scaled are wrong.",
    "tree": "tree",
    "hidden": {
        "fail_to_pass": ["tests/test_calc.py::test_add", "tests/test_calc.py::test_scaled"],
        "pass_to_pass": ["tests/test_calc.py::test_zero"],
        "tests": {"tests/test_calc.py": HIDDEN},
        "solution": {path: change.text for path, change in SOLUTION.items()},
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for path, text in FILES.items():
        (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / path).write_text(text)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["import", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output + done.stderr


def test_a_file_of_repositories_becomes_a_pack_whose_trees_reach_the_store(folder: Path) -> None:
    wrong = LINE | {"id": "calc-2", "hidden": LINE["hidden"] | {"solution": {"calc.py": CALC}}}  # type: ignore[operator]
    (folder / "mine.jsonl").write_text(f"{json.dumps(LINE)}\n{json.dumps(wrong)}\n")
    code, said = run("mine.jsonl", "--out", "pack", "--split", "held_out")
    assert code == 0, said
    assert "problem 'calc-2': oracle" in said
    assert "pack: 1 of 2 problems, 1 in held_out" in said
    public = packs.Lines((folder / "pack" / packs.file_name("held_out", "public")).read_bytes(), Problem)
    assert public.ids == ["calc-1"]
    (problem,) = public.with_refs()
    assert packs.Lines((folder / "pack" / packs.file_name("held_out", "hidden")).read_bytes(), Hidden)["calc-1"]
    objects = DirectoryObjects(folder / "store")
    prepare.upload_pack(objects, folder / "pack", "held_out")
    (ref,) = packs.refs(problem)
    assert trees.texts(trees.decode(objects.get(ref)), ["calc.py"]) == {"calc.py": CALC}


def test_harbor_tasks_are_imported_with_what_their_solutions_change(folder: Path) -> None:
    harbor.build(folder / "tasks", {"inflection/__init__.py": trees.File(LIBRARY.encode())})
    shutil.rmtree(folder / "tasks/ordinals")
    (folder / "tasks/kebab/environment/docker-compose.yaml").write_text("services: {}\n")
    code, said = run("harbor", "tasks", "--out", "pack", "--split", "rl")
    assert code == 0, said
    assert "2 of 3 rows imported" in said
    assert "needs several containers" in said
    hidden = packs.Lines((folder / "pack" / packs.file_name("rl", "hidden")).read_bytes(), Hidden)
    assert {name: sorted(hidden[name].solution) for name in hidden.ids} == {  # type: ignore[attr-defined]
        "two-steps.first": ["first.txt"],
        "two-steps.second": ["second.txt"],
    }


def test_an_empty_command_of_an_agent_refuses_every_row_of_a_source(folder: Path) -> None:
    library = trees.File(LIBRARY.encode())
    harbor.build(folder / "tasks", {"inflection/__init__.py": library})
    for name in ("ordinals", "kebab"):
        shutil.rmtree(folder / "tasks" / name)
    code, said = run("harbor", "tasks", "--agent", " ", "--split", "rl", "--out", "pack")
    assert code == 2
    for step in ("first", "second"):
        assert f"problem 'two-steps.{step}': field 'agent': found no command; allowed: a shell command" in said


def test_an_agent_for_a_file_of_ones_own_is_refused(folder: Path) -> None:
    (folder / "mine.jsonl").write_text(json.dumps(LINE) + "\n")
    code, said = run("mine.jsonl", "--agent", "my-agent", "--out", "pack")
    assert code == 2
    assert "--agent" in said
    assert "with a source" in said


def test_a_source_that_nobody_knows_is_refused_with_those_that_are(folder: Path) -> None:
    code, said = run("swebench", "rows.jsonl", "--out", "pack")
    assert code == 2
    assert "found source 'swebench'; allowed: harbor, harbor-steps, r2e-gym, swe-bench" in said


def test_a_script_imports_the_packages_of_its_own_tree_before_the_installed_ones(folder: Path) -> None:
    tree = {"pluggy.py": trees.File(b"own = True\n")}
    script = b"python -P -c 'import pluggy; print(pluggy.__file__)' >found\n"
    after = ran(tree, {"solve.sh": trees.File(script)}, "solve.sh")
    assert after["found"] == trees.File(b"/workspace/pluggy.py\n")

"""What a folder, an archive or a distribution holds, and why some make no problems."""

from __future__ import annotations

import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.curator.folder import inventory_of
from services.curator.sources.python.baseline import _objection
from services.curator.sources.python.contamination import Evaluations
from services.curator.sources.python.laboratory import Ran, Run, Runs
from services.curator.sources.python.mutations import _objection as why_not
from services.curator.sources.python.project import SourceError, project_of, read_project
from shared.contracts.run import Ref
from shared.environments.agent import AgentProblem
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.environments.repository.trees import File
from shared.problems.pack import write

FILES = {
    "shapes/__init__.py": "",
    "shapes/area.py": "def area(a, b):\n    return a * b\n",
    "tests/test_area.py": "def test_area():\n    assert True\n",
    "build/lib/shapes/area.py": "def area(a, b):\n    return a * b\n",
    "setup.py": "",
    "docs/conf.py": "",
    "PKG-INFO": "Metadata-Version: 2.1\nName: Shapes_Kit\nVersion: 1.2\nLicense-Expression: MIT\n",
}


def tree(**others: str) -> dict[str, File]:
    return {path: File(text.encode()) for path, text in {**FILES, **others}.items()}


def test_a_project_has_modules_tests_a_name_and_a_licence():
    found = project_of(tree(), "somewhere")
    assert (found.name, found.version, found.licence) == ("shapes-kit", "1.2", "MIT")
    assert found.sources == ("shapes/__init__.py", "shapes/area.py")
    assert found.tests == ("tests/test_area.py",)


def test_copies_and_builds_are_no_part_of_the_tree():
    others = {"site-packages/shapes/area.py": "", "shapes/__pycache__/area.cpython-311.pyc": ""}
    found = project_of(tree(**others), "somewhere")
    assert not any("build/" in path or "site-packages" in path or path.endswith(".pyc") for path in found.tree)


def test_the_metadata_of_a_source_archive_is_found_by_importlib():
    assert project_of(tree(), "x").tree["Shapes_Kit.egg-info/PKG-INFO"] == tree()["PKG-INFO"]


def test_an_archive_loses_its_outer_folder(tmp_path: Path):
    for path, text in FILES.items():
        at = tmp_path / "shapes-1.2" / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
    with tarfile.open(tmp_path / "shapes-1.2.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "shapes-1.2", "shapes-1.2")
    assert read_project(str(tmp_path / "shapes-1.2.tar.gz")).sources[1] == "shapes/area.py"


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("tests/test_area.py", "no file of tests; allowed: projects with test_*.py"),
        ("shapes/", "found no Python module among"),
    ],
)
def test_a_source_without_code_or_tests_is_refused(gone: str, said: str):
    with pytest.raises(SourceError, match=said.replace("*", r"\*").replace(".", r"\.")):
        project_of({path: entry for path, entry in tree().items() if not path.startswith(gone)}, "empty")


def test_an_unknown_package_says_how_to_get_its_archive():
    with pytest.raises(SourceError, match="pip download --no-deps --no-binary :all: no-such-package-here"):
        read_project("no-such-package-here")


def test_tests_that_are_not_there_are_refused():
    with pytest.raises(SourceError, match=r"--tests: found other; allowed: files or folders among tests/test_area\.py"):
        project_of(tree(), "x", tests=["other"])


def test_licence_from_the_text_of_a_file():
    files = tree(LICENSE="MIT License\n\nPermission is hereby granted, free of charge, to any person")
    del files["PKG-INFO"]
    assert project_of(files, "x").licence == "MIT"
    del files["LICENSE"]
    assert project_of(files, "x").licence == "unknown"


def failing(*kinds: str, said: str = "", number: int = 1, phase: str = "call") -> list[Ran]:
    return [Ran(f"tests/test_area.py::test_{n}", "failed", phase, kinds, said) for n in range(number)]


def runs() -> Runs:
    return Runs(("tests/test_area.py::test_0",), (), (), None)  # type: ignore[arg-type]


def test_a_project_whose_tests_fail_already_is_refused_with_what_to_do():
    said = _objection(project_of(tree(), "x"), runs(), failing("AssertionError", number=6), 10)
    assert "6 of 10 tests fail before anything is changed" in said
    assert "--tests" in said
    assert _objection(project_of(tree(), "x"), runs(), failing("AssertionError"), 10) == ""


def test_a_project_whose_tests_need_the_network_is_refused_with_what_to_do():
    network = failing("gaierror", "OSError", said="Temporary failure in name resolution", number=4)
    said = _objection(project_of(tree(), "x"), runs(), network, 10)
    assert "4 of 10 tests need the network" in said
    assert "--tests" in said


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (Run(tuple(failing("AssertionError"))), ""),
        (Run((Ran("t.py::test", "passed"),)), "not noticed"),
        (Run(tuple(failing("ModuleNotFoundError", "ImportError"))), "no behaviour"),
        (Run(tuple(failing("UnboundLocalError", "NameError"))), "no behaviour"),
        (Run(tuple(failing("AssertionError", phase="setup"))), "no behaviour"),
        (Run(tuple(failing("TypeError"))), "crashes"),
        (Run(tuple(failing("TookTooLong"))), "does not end"),
        (Run((), late=True), "does not end"),
        (Run((), whole=False), "ends the process"),
        (Run((), unpatchable="it is not loaded"), "cannot be tried"),
    ],
)
def test_only_a_failure_of_behaviour_makes_a_problem(run: Run, reason: str):
    assert why_not(run).partition(":")[0] == reason


def test_functions_and_repositories_of_evaluation_sets_are_recognised(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instance_id": "a", "repo": "owner/shapes_kit", "patch": ""}\n')
    found = Evaluations.read([rows])
    with pytest.raises(SourceError, match="problems of the same repository"):
        found.require_other(project_of(tree(), "x"))
    problem = tmp_path / "problems.jsonl"
    code = "def mean(values):\n    total = sum(values)\n    count = len(values)\n    return total / count\n"
    line = {
        "id": "p1",
        "files": {"s.py": "def mean(values):\n    return 0\n"},
        "entry": "mean",
        "visible": [{"args": "[[1]]", "expected": "1"}],
        "hidden": [{"args": "[[1, 3]]", "expected": "2"}],
        "solution": {"s.py": code},
    }
    problem.write_text(json.dumps(line) + "\n")
    found = Evaluations.read([problem])
    copy = "    def average(numbers):\n        t = sum(numbers)\n        n = len(numbers)\n        return t / n\n"
    assert found.objection([copy]).startswith("contaminated")
    assert found.objection(["def other(a):\n    b = a + 1\n    return [b for b in range(b)]\n"]) == ""
    assert found.report()["dropped"] == 1


@pytest.mark.parametrize("kind", [RepositoryProblem, partial(AgentProblem, agent="run")])
def test_a_pack_of_repositories_keeps_out_the_project_whoever_works_in_it(tmp_path: Path, kind: Any):
    problem = kind(
        id="p", tree=Ref(key="trees/t", size=1, checksum="0" * 32), origin="owner/shapes_kit@0123", cell="any"
    )
    hidden = RepositoryHidden(id="p", kind=problem.kind, fail_to_pass=["t.py::test_t"])
    for part, item in (("public", problem), ("hidden", hidden)):
        (tmp_path / f"held_out.{part}.jsonl.zst").write_bytes(write([item]))
    found = Evaluations.read([tmp_path])
    assert list(found.repositories) == ["shapes-kit"]
    with pytest.raises(SourceError, match="problems of the same repository"):
        found.require_other(project_of(tree(), "x"))


def test_functions_of_a_folder_of_ones_own(tmp_path: Path):
    (tmp_path / "src" / "kit").mkdir(parents=True)
    (tmp_path / "src" / "kit" / "words.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_words.py").write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "kit"\nversion = "2"\nlicense = "MIT"\n')
    found = inventory_of(tmp_path)
    assert [(file.distribution, file.module, file.licence) for file in found.files] == [("kit", "kit.words", "MIT")]
    before = found.versions["kit"]
    (tmp_path / "src" / "kit" / "words.py").write_text("def f(x):\n    return x + 1\n")
    assert inventory_of(tmp_path).versions["kit"] != before


def test_a_folder_without_code_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="found 0 Python files"):
        inventory_of(tmp_path)

"""Problems of a small project, in real sandboxes and through the real grader."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.curator.cli import app
from services.curator.sources.python import Bench, Draft, Rejected, named
from services.curator.sources.python.functions import functions
from services.curator.sources.python.laboratory import collected
from services.curator.sources.python.project import Project, SourceError, project_of
from shared.contracts.trajectory import Change
from shared.environments.repository import trees
from shared.environments.repository.trees import File
from shared.problems import Hidden, Problem
from shared.problems.pack import Lines, file_name
from shared.sandbox import open_sandboxes

pytestmark = pytest.mark.slow
FILES = {
    "shapes/__init__.py": 'from .area import rectangle, total\n\n__all__ = ["rectangle", "total"]\n',
    "shapes/area.py": '''"""Areas."""

__all__ = ["rectangle", "total"]


def rectangle(width, height):
    """Return the area of a rectangle. Raises ValueError for a side below zero."""
    if width < 0 or height < 0:
        raise ValueError("a side is below zero")
    return width * height


def total(shapes):
    """Return the sum of the areas of (width, height) pairs, without those that have no area."""
    found = 0
    for width, height in shapes:
        if width > 0 and height > 0:
            found += width * height
    return found
''',
    "tests/test_area.py": """import pytest

from shapes import rectangle, total


def test_rectangle():
    assert rectangle(2, 3) == 6


def test_rectangle_has_sides():
    with pytest.raises(ValueError):
        rectangle(-1, 2)


def test_total():
    assert total([(1, 2), (3, 4)]) == 14
    assert total([(-1, -2), (3, 4)]) == 12
""",
    "LICENSE": "MIT License\n\nPermission is hereby granted, free of charge, to any person",
}
NETWORK = 'import urllib.request\n\n\ndef test_page():\n    urllib.request.urlopen("http://example.org", timeout=5)\n'


def project(files: Mapping[str, str]) -> Project:
    return project_of({path: File(text.encode()) for path, text in files.items()}, "shapes")


async def found(kind: str, one: Project, folder: Path) -> list[Draft | Rejected]:
    sandboxes = open_sandboxes("bubblewrap")
    try:
        bench = Bench(sandboxes, folder / "cache", folder)
        return [made async for made in named(kind).candidates(one, bench)]
    finally:
        await sandboxes.close()


def test_bugs_and_features_of_a_project(tmp_path: Path):
    one = project(FILES)
    mutations = asyncio.run(found("mutations", one, tmp_path / "m"))
    drafts = [made for made in mutations if isinstance(made, Draft)]
    assert len(drafts) >= 5
    for draft in drafts:
        assert draft.fail_to_pass
        assert draft.command[0] == "--assert=plain"
        assert draft.command[1:] == tuple(f"/workspace/{name}" for name in (*draft.fail_to_pass, *draft.pass_to_pass))
        changed = {path for path, entry in draft.tree.items() if entry != one.tree[path]}
        assert changed == set(draft.solution) == {"shapes/area.py"}
        assert draft.solution["shapes/area.py"] == Change(text=FILES["shapes/area.py"])
    assert all(made.reason for made in mutations if isinstance(made, Rejected))
    deletions = {made.place: made for made in asyncio.run(found("deletions", one, tmp_path / "d"))}
    total = deletions["shapes/area.py:total"]
    assert isinstance(total, Draft), total
    assert total.fail_to_pass == ("tests/test_area.py::test_total",)
    assert set(total.pass_to_pass) == {
        "tests/test_area.py::test_rectangle",
        "tests/test_area.py::test_rectangle_has_sides",
    }
    assert "sum of the areas" in total.prompt
    assert "found += width * height" not in total.prompt
    for path, entry in total.tree.items():
        assert isinstance(entry, File)
        assert b"total" not in entry.data, path


def test_a_quick_test_that_does_not_end_waits_no_longer_because_another_is_slow(tmp_path: Path):
    tests = """from shapes import total


def test_quick():
    assert total([]) == 0


def test_slow():
    assert len({number: str(number) for number in range(1_000_000)}) == 1_000_000
"""
    one = project({**FILES, "tests/test_area.py": tests})
    names = ["tests/test_area.py::test_quick", "tests/test_area.py::test_slow"]
    [total] = [each for each in functions("shapes/area.py", FILES["shapes/area.py"]) if each.name == "total"]
    endless = total.text.replace("    found = 0\n", "    found = 0\n    while True:\n        pass\n")
    assert endless != total.text

    async def run() -> list[Any]:
        sandboxes = open_sandboxes("bubblewrap")
        trees.write(one.tree, tmp_path / "tree")
        try:
            async with collected(sandboxes, tmp_path / "cache", tmp_path / "tree", one.sources, one.tests) as runs:
                done = await runs.run(names, each_s=[0.1, 60.0], time_s=120.0, edits=[(total, endless)])
                return [(test.name, test.outcome, test.kinds[:1]) for test in done.tests]
        finally:
            await sandboxes.close()

    assert asyncio.run(run()) == [(names[0], "failed", ("TookTooLong",)), (names[1], "passed", ())]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"tests/test_area.py": "def test_wrong():\n    assert 1 == 2\n"},
            "1 of 1 tests fail before anything is changed",
        ),
        (
            {"tests/test_area.py": "import no_such_module_here\n\n\ndef test(): pass\n"},
            "No module named 'no_such_module_here'",
        ),
        ({"tests/test_area.py": NETWORK}, "1 of 1 tests need the network"),
    ],
)
def test_a_project_that_cannot_be_used_says_what_to_do(files: dict[str, str], said: str, tmp_path: Path):
    with pytest.raises(SourceError) as refused:
        asyncio.run(found("mutations", project({**FILES, **files}), tmp_path))
    assert said in str(refused.value)
    assert "--tests" in str(refused.value)


def git(folder: Path, *arguments: str) -> None:
    named = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *named, *arguments], check=True, capture_output=True)


def repository(folder: Path) -> Path:
    """Return a repository whose second commit adds a function and its test."""
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "Areas")
    (folder / "shapes/area.py").write_text(FILES["shapes/area.py"] + "\n\ndef square(side):\n    return side * side\n")
    (folder / "tests/test_square.py").write_text(
        "import shapes.area\n\n\ndef test_square():\n    assert shapes.area.square(3) == 9\n"
    )
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "Add square()\n\nSigned-off-by: A <a@example.org>")
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mutations", "deletions", "commits"])
def test_the_command_writes_a_pack_of_admitted_problems(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "pack"
    arguments = ["mutate", str(repository(tmp_path / "shapes")), "--kind", kind, "--most", "2", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    public = list(Lines((out / file_name("rl", "public")).read_bytes(), Problem))
    hidden: Any = Lines((out / file_name("rl", "hidden")).read_bytes(), Hidden)
    facts = json.loads((out / "manifest.json").read_text())["source"]
    assert facts["admitted"] == len(public) >= 1
    assert facts["candidates"] == len(public) + len((out / "rejected.jsonl").read_text().splitlines())
    assert sum(facts["gates"].values()) == len(public)
    for one in public:
        assert one.licence == "MIT"
        assert one.cell == "shapes"
        assert hidden[one.id].fail_to_pass
    if kind == "commits":
        assert public[0].prompt == "Add square()"

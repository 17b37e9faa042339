"""Data sets of others: a row becomes a problem whole, or is refused with its reason."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.curator import sources
from services.curator.sources import Found, Refused
from services.curator.sources.clones import Clones
from services.curator.sources.rows import rows_of
from shared.contracts.trajectory import Change
from shared.environments.repository import trees
from shared.environments.repository.trees import File
from shared.objects.directory import DirectoryObjects
from shared.problems import ProblemError

GOOD, BAD = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"
OLD_TEST = "from add import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
TEST = OLD_TEST + "\n\ndef test_add():\n    assert add(2, 2) == 4\n"
STAYS = "def test_stays():\n    pass\n"


def git(folder: Path, *arguments: str) -> str:
    command = [
        "git",
        "-C",
        str(folder),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.org",
        "-c",
        "commit.gpgsign=false",
    ]
    return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True).stdout


class World:
    """A repository with a broken and a repaired commit, and rows about it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.objects = folder, DirectoryObjects(folder / "objects")
        clone = folder / "repos/octo__sum"
        (clone / "tests").mkdir(parents=True)
        git(clone, "init", "--quiet", "--initial-branch=main")
        self.before = self._commit(clone, {"add.py": BAD, "tests/test_add.py": OLD_TEST, "tests/test_stays.py": STAYS})
        self.after = self._commit(clone, {"add.py": GOOD, "tests/test_add.py": TEST})
        self.patch = git(clone, "diff", self.before, self.after, "--", "add.py")
        self.test_patch = git(clone, "diff", self.before, self.after, "--", "tests")
        self.reverse = git(clone, "diff", self.after, self.before, "--", "add.py")

    def _commit(self, clone: Path, files: dict[str, str]) -> str:
        for path, text in files.items():
            (clone / path).write_text(text)
        git(clone, "add", "-A")
        git(clone, "commit", "--quiet", "-m", "state")
        return git(clone, "rev-parse", "HEAD").strip()

    def read(self, source: str, *rows: Any) -> list[Found]:
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return list(sources.named(source)(path, Clones(self.folder / "repos"), self.objects))

    def tree(self, found: Found) -> trees.Tree:
        return trees.decode(self.objects.get(found.problem.tree))

    @property
    def row(self) -> dict[str, Any]:
        return {
            "instance_id": "octo__sum-1",
            "repo": "octo/sum",
            "base_commit": self.before,
            "problem_statement": "add(2, 2) is 0",
            "patch": self.patch,
            "test_patch": self.test_patch,
            "FAIL_TO_PASS": json.dumps(["tests/test_add.py::test_add"]),
            "PASS_TO_PASS": ["tests/test_add.py::test_zero", "tests/test_stays.py::test_stays"],
        }

    @property
    def smith(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.row.items() if name not in ("base_commit", "test_patch")}
        return kept | {"repo": f"swesmith/octo__sum.{self.after[:8]}", "patch": self.reverse}

    @property
    def r2e(self) -> dict[str, Any]:
        run = {
            "test_file_names": ["test_1.py"],
            "test_file_codes": [TEST],
            "old_commit_res_stdout": "PASSED r2e_tests/test_1.py::test_zero\nFAILED r2e_tests/test_1.py::test_add - assert 0",
            "new_commit_res_stdout": "PASSED r2e_tests/test_1.py::test_zero\nPASSED r2e_tests/test_1.py::test_add\n",
        }
        diffs = [
            {"header": {"file": {"path": "add.py"}}, "new_file_content": GOOD},
            {"header": {"file": {"path": "tests/test_add.py"}}, "new_file_content": TEST},
        ]
        return {
            "repo_name": "octo__sum",
            "commit_hash": self.after,
            "problem_statement": "add(2, 2) is 0",
            "expected_output_json": json.dumps({"test_zero": "PASSED", "test_add": "PASSED", "test_x": "FAILED"}),
            "execution_result_content": json.dumps(run),
            "parsed_commit_content": json.dumps({"old_commit_hash": f"{self.after}^", "file_diffs": diffs}),
        }


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("source", ["swe-bench", "swe-gym", "swe-bench-multilingual"])
def test_a_row_of_swe_bench_is_the_tree_before_its_fix(world: World, source: str) -> None:
    (found,) = world.read(source, world.row)
    assert found.note == ""
    tree = world.tree(found)
    assert (tree["add.py"], tree["tests/test_add.py"]) == (File(BAD.encode()), File(OLD_TEST.encode()))
    assert found.hidden.fail_to_pass == ["tests/test_add.py::test_add"]
    assert found.hidden.tests == {"tests/test_add.py": Change(text=TEST)}
    assert found.hidden.protected == ["tests/test_stays.py"]
    assert found.hidden.solution == {"add.py": Change(text=GOOD)}
    assert (found.problem.cell, found.problem.commit, found.problem.prompt) == (
        "octo/sum",
        world.before,
        "add(2, 2) is 0",
    )


def test_a_row_of_swe_smith_has_no_file_of_a_failing_test_in_its_tree(world: World) -> None:
    (found,) = world.read("swe-smith", world.smith)
    assert found.note == ""
    tree = world.tree(found)
    assert sorted(tree) == ["add.py", "tests/test_stays.py"]
    assert tree["add.py"] == File(BAD.encode())
    assert found.hidden.tests == {"tests/test_add.py": Change(text=TEST)}
    assert found.hidden.solution == {"add.py": Change(text=GOOD)}


def test_a_row_of_r2e_gym_is_the_parent_and_tests_of_its_own(world: World) -> None:
    (found,) = world.read("r2e-gym", world.r2e)
    assert found.note == ""
    assert world.tree(found)["add.py"] == File(BAD.encode())
    assert found.hidden.fail_to_pass == ["r2e_tests/test_1.py::test_add"]
    assert found.hidden.pass_to_pass == ["r2e_tests/test_1.py::test_zero"]
    assert found.hidden.tests == {"r2e_tests/test_1.py": Change(text=TEST)}
    assert found.hidden.solution == {"add.py": Change(text=GOOD)}


def test_a_file_of_r2e_gym_without_content_is_deleted_only_where_its_diff_says_so(world: World) -> None:
    diffs = [
        {"header": {"file": {"path": "new/__init__.py"}, "misc_line": "new file mode 100644"}, "new_file_content": ""},
        {"header": {"file": {"path": "add.py"}}, "new_file_content": ""},
        {"header": {"file": {"path": "old.py"}, "misc_line": "deleted file mode 100644"}, "new_file_content": ""},
        {"header": {"file": {"path": "gone.py"}}, "plus_file": {"path": "/dev/null"}, "new_file_content": ""},
    ]
    parsed = json.dumps({"old_commit_hash": f"{world.after}^", "file_diffs": diffs})
    (found,) = world.read("r2e-gym", world.r2e | {"parsed_commit_content": parsed})
    empty, deleted = Change(text=""), Change()
    assert found.hidden.solution == {
        "new/__init__.py": empty,
        "add.py": empty,
        "old.py": deleted,
        "gone.py": deleted,
    }


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            ["test_1.py", "test_2.py"],
            "'test_add', which r2e_tests/test_1.py::test_add and r2e_tests/test_2.py::test_add",
        ),
        (["a/test_1.py", "b/test_1.py"], "found two files 'r2e_tests/test_1.py'"),
    ],
)
def test_a_name_that_two_files_of_r2e_gym_share_is_refused(world: World, files: list[str], words: str) -> None:
    run = json.loads(world.r2e["execution_result_content"])
    run |= {"test_file_names": files, "test_file_codes": [TEST, TEST]}
    run["new_commit_res_stdout"] += "PASSED r2e_tests/test_2.py::test_add\n"
    (found,) = world.read("r2e-gym", world.r2e | {"execution_result_content": json.dumps(run)})
    assert found.problem is None
    assert words in found.note


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"repo": "octo/other"}, "needs the repository octo/other at .*: none in .*; allowed there: octo__other"),
        ({"repo": "../../etc"}, "needs the repository ../../etc"),
        ({"base_commit": "0" * 40}, "found no commit '0000"),
        ({"problem_statement": ""}, "field 'problem_statement': found ''; allowed: a text"),
        ({"patch": "nothing"}, "found no file in it; allowed: a unified diff"),
        ({"patch": "--- a/add.py\n+++ b/add.py\n@@ -1 +1 @@\n-a\n+\ud800\n"}, "found half a character"),
        ({"problem_statement": "\ud800"}, "found half a character"),
        ({"patch": "--- a/add.py\n+++ b/add.py\n@@ -" + "1" * 5000 + " +1 @@\n-a\n+b\n"}, "more than 9 digits"),
        ({"FAIL_TO_PASS": "[" * 100_000}, "a field cannot be read: RecursionError"),
        ({"FAIL_TO_PASS": "[]"}, "field 'hidden.fail_to_pass': is empty"),
        ({"FAIL_TO_PASS": "test_add"}, "field 'FAIL_TO_PASS': found 'test_add'; allowed: a list of tests"),
        ({"FAIL_TO_PASS": ["test_nowhere"]}, "found the test 'test_nowhere', and 0 of 1 changed test files define it"),
        ({"FAIL_TO_PASS": ["tests/test_add.py::test_add[a"]}, "cut within its brackets; allowed: whole names"),
        ({"FAIL_TO_PASS": ["test_add (tests.test_add.AddTest)"]}, "needs Django's own test runner"),
        (
            {"FAIL_TO_PASS": ["test_add (tests.test_add.AddTest)"], "repo": "octo/other"},
            "needs Django's own test runner",
        ),
        (
            {"FAIL_TO_PASS": ["TestAdd"], "test_patch": "--- a/add_test.go\n+++ b/add_test.go\n@@ -1 +1 @@\n-a\n+b\n"},
            "needs a runner of tests in Go; allowed: Python tests",
        ),
    ],
)
def test_a_row_that_cannot_run_here_is_refused_with_the_reason(
    world: World, change: dict[str, Any], words: str
) -> None:
    bad, good = world.read("swe-bench", world.row | change | {"instance_id": "bad"}, world.row)
    assert bad.problem is None
    with pytest.raises(ValueError, match=words):
        raise Refused(bad.note)
    assert good.problem is not None


def test_a_bare_name_belongs_to_the_only_changed_file_that_defines_it(world: World) -> None:
    (found,) = world.read(
        "swe-bench", world.row | {"FAIL_TO_PASS": ["test_add"], "PASS_TO_PASS": ["tests/a.py::b[c d"]}
    )
    assert found.hidden.fail_to_pass == ["tests/test_add.py::test_add"]
    assert found.hidden.pass_to_pass == []
    assert found.note == "1 names of PASS_TO_PASS are cut within their brackets and not asked for"


def test_two_rows_of_one_name_and_rows_that_are_no_objects_are_refused(world: World) -> None:
    first, second, third = world.read("swe-bench", world.row, world.row, 5)
    assert first.problem is not None
    assert (second.note, third.note) == ("stands in the file twice", "is no JSON object")


@pytest.mark.parametrize(("data", "words"), [(b"PAR1\x80", "read_parquet"), (b"{", "no JSON"), (b"[]", "no rows")])
def test_a_file_that_has_no_rows_is_refused_with_the_way_out(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "rows"
    path.write_bytes(data)
    with pytest.raises(ProblemError, match=words):
        list(sources.named("swe-bench")(path, Clones(None), DirectoryObjects(tmp_path / "objects")))


def test_rows_are_read_one_by_one_and_a_wrong_one_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": "\xc2\x85\xe2\x80\xa8"}\n{"a": }\n')
    found = rows_of(path)
    assert [next(found), next(found)] == [("row 1", {"a": 1}), ("row 2", {"a": "\x85\u2028"})]
    with pytest.raises(ProblemError, match="line 4, column 7: no JSON: Expecting value"):
        next(found)


def test_an_array_of_rows_may_span_lines(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text('\n[{"a": 1},\n{"instance": {"a": 2}}]\n')
    assert list(rows_of(tmp_path / "rows")) == [("row 1", {"a": 1}), ("row 2", {"a": 2})]
    (tmp_path / "rows").write_text('\n[{"a": 1},\n{"a": }]\n')
    with pytest.raises(ProblemError, match="line 3, column 7: no JSON"):
        list(rows_of(tmp_path / "rows"))


def test_an_archive_of_one_commit_stands_for_its_repository(world: World) -> None:
    tree = Clones(world.folder / "repos").tree("octo/sum", world.before)
    (world.folder / "archives").mkdir()
    (world.folder / f"archives/octo__sum@{world.before[:12]}.tar.zst").write_bytes(trees.encode(tree))
    clones = Clones(world.folder / "archives")
    assert clones.tree("octo/sum", world.before) == tree
    with pytest.raises(trees.TreeError, match="needs the repository octo/sum"):
        clones.tree("octo/sum", world.after)


def test_the_wrong_source_names_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "task.toml").write_text("")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"instance_id": "a__b-1", "base_commit": "0", "test_patch": ""}))
    for source, path, said in (("swe-bench", tmp_path / "task", "harbor"), ("harbor", rows, "swe-bench")):
        with pytest.raises(ProblemError, match=f"`etude tasks import {said} {path} "):
            list(sources.named(source)(path, Clones(None), DirectoryObjects(tmp_path / "objects")))


def test_a_row_whose_repository_has_submodules_is_imported_with_a_note(tmp_path: Path) -> None:
    world = World(tmp_path)
    clone = tmp_path / "repos" / "octo__sum"
    git(tmp_path, "clone", "--quiet", str(clone), "part")
    git(clone, "checkout", "--quiet", world.before)
    git(clone, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tmp_path / "part"), "vendor/part")
    git(clone, "commit", "--quiet", "-m", "with a submodule")
    commit = git(clone, "rev-parse", "HEAD").strip()
    with_part, without = world.read(
        "swe-bench", {**world.row, "instance_id": "a", "base_commit": commit}, {**world.row, "instance_id": "b"}
    )
    assert with_part.note == "its submodules are left out: vendor/part"
    assert with_part.problem is not None
    assert without.note == ""


def test_a_row_whose_repository_keeps_files_in_git_lfs_is_imported_with_a_note(tmp_path: Path) -> None:
    world = World(tmp_path)
    clone = tmp_path / "repos" / "octo__sum"
    git(clone, "checkout", "--quiet", world.before)
    for name in "dcba":
        (clone / f"{name}.bin").write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * name}\nsize 5\n"
        )
    git(clone, "add", ".")
    git(clone, "commit", "--quiet", "-m", "with pointers")
    commit = git(clone, "rev-parse", "HEAD").strip()
    (outcome,) = world.read("swe-bench", {**world.row, "base_commit": commit})
    assert outcome.note == "its files of Git LFS are pointers, without their content: a.bin, b.bin, c.bin, …"
    assert outcome.problem is not None

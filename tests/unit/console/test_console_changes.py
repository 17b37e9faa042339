"""What an attempt changed: differences that say exactly what became of a file, in bounded time and space."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console import changes, problem_view
from services.console.changes import Effort, compared
from services.console.library import MAX_GIVEN, Library
from shared.contracts.trajectory import Change, Submission
from shared.problems import Case, FunctionProblem
from tests.unit.console.conftest import PROBLEM
from tests.unit.console.repository_attempt import CHANGES, FILES, FIXED, repository

__all__ = ["repository"]  # a fixture

texts = st.lists(st.sampled_from(["a", "b", "c", "", "def f():", "    return 1"]), max_size=40).map(
    lambda lines: "".join(f"{line}\n" for line in lines)
)


def applied(old: str, lines: list[changes.Line]) -> str:
    """What a unified difference makes of a text."""
    before, after, at = old.split("\n")[:-1], [], 0
    for kind, line in lines:
        if kind == "hunk":
            start, _, count = line.split()[1][1:].partition(",")
            begin = int(start) - (0 if count == "0" else 1)
            after += before[at:begin]
            at = begin
        elif kind == "add":
            after.append(line[1:])
        else:
            assert before[at] == line[1:]
            after += [line[1:]] if kind == "same" else []
            at += 1
    return "".join(f"{line}\n" for line in [*after, *before[at:]])


@given(texts, texts, st.sampled_from([0, 50, 10**7]))
def test_a_difference_applied_gives_the_new_text(old, new, steps):
    assert applied(old, compared(old, new, Effort(steps=steps))) == new


def test_each_state_of_a_file_is_named():
    found = {file.path: file for file in changes.of(Submission(changes=CHANGES), FILES).files}
    states = {path: (file.state, file.executable) for path, file in found.items()}
    assert states == {
        "wallet.py": ("changed", False),
        "old.py": ("deleted", False),
        "scripts/check.sh": ("new", True),
        "logo.png": ("binary", False),
    }
    assert applied(FILES["wallet.py"], list(found["wallet.py"].lines)) == FIXED
    assert (found["old.py"].added, found["old.py"].removed) == (0, 1)
    mode = changes.of(Submission(changes={"a": Change(text="x", executable=True)}), {"a": "x"}).files
    assert (mode[0].told, mode[0].executable) == ("its text is as it was", True)
    end = changes.of(Submission(changes={"a": Change(text="x")}), {"a": "x\n"}).files
    assert "newline at its end" in end[0].told
    unknown = changes.of(Submission(changes={"a": Change(text="x")}), None).files
    assert (unknown[0].state, unknown[0].told) == ("changed", "what it was before cannot be read")


@pytest.mark.timeout(60)  # without its bounds the comparison takes far longer
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\n".join(f"{n % 100}" for n in range(2000)), "\n".join(f"{n * 7 % 100}" for n in range(2000))),
        ("\n".join(map(str, range(19_000))), "\n".join(map(str, range(19_000, 0, -1)))),
        ("a\n" * 19_000, "b\n" * 19_000),
        ("x" * 500_000, "y" * 500_000),
        ("a b" * 200_000, "c"),
    ],
)
def test_hostile_texts_are_compared_in_bounded_time_and_space(old, new):
    submitted = Submission(changes={f"f{n}": Change(text=new) for n in range(1200)})
    found = changes.of(submitted, {f"f{n}": old for n in range(1200)})
    assert len(found.files) == changes.MAX_FILES
    assert (len(found.more), found.unnamed) == (changes.MAX_NAMES, 1200 - changes.MAX_FILES - changes.MAX_NAMES)
    assert sum(len(file.lines) for file in found.files) <= changes.MAX_PAGE_LINES
    assert all(len(line) <= changes.MAX_WIDTH + 1 for file in found.files for _, line in file.lines)


def test_a_repository_is_described_without_a_field_that_only_functions_have(repository, tmp_path):
    library = Library(repository.objects, tmp_path / "formats")
    brief = library.brief(repository.problem)
    found = problem_view.view(repository.problem, brief)
    facts = dict(found.facts)
    assert found.prompt.head == repository.problem.prompt
    assert (found.files, found.tables) == ((), ())
    assert "shell" in [tool.name for tool in found.tools]
    assert facts["tree"].endswith(repository.problem.tree.key)
    assert "turns 40" in facts["limits"]
    assert facts["setup"] == "pip install -e ."


def test_a_function_is_described_by_its_files_and_its_visible_cases():
    found = problem_view.view(PROBLEM, None)
    assert [file.path for file in found.files] == ["f.py"]
    (table,) = found.tables
    assert (table.name, table.columns) == ("1 visible case", ("args", "expected", "the broken code gave"))
    assert table.rows == (("[1]", "2", "0"),)
    assert dict(found.facts)["entry"] == "f"
    both = [Case(args="[[]]", expected="[1]", changed=True), Case(args="[1]", expected="2")]
    (table,) = problem_view.view(FunctionProblem(id="x", files={}, entry="f", visible=both), None).tables
    assert table.columns == ("args", "expected", "changed")
    assert table.rows == (("[[]]", "[1]", "True"), ("[1]", "2", ""))
    assert problem_view.view(FunctionProblem(id="x", files={}, entry="f", visible=[]), None).files == ()


def test_the_files_before_are_read_by_the_environment_and_little_is_kept_on_the_disk(repository, tmp_path, monkeypatch):
    library = Library(repository.objects, tmp_path / "formats")
    paths = ["wallet.py", "missing.py", "old.py"]
    assert library.given(repository.problem, paths) == {"wallet.py": FILES["wallet.py"], "old.py": FILES["old.py"]}
    monkeypatch.setattr("services.console.library.GIVEN_BYTES", 1)
    for n in range(3):
        other = msgspec.structs.replace(repository.problem, commit=str(n))
        assert library.given(other, ["old.py"]) == {"old.py": FILES["old.py"]}
    assert len(list((tmp_path / "given").iterdir())) == 1
    assert library.given(PROBLEM, ["f.py", "g.py"]) == PROBLEM.files
    huge = msgspec.structs.replace(repository.problem.tree, size=MAX_GIVEN + 1)
    with pytest.raises(ValueError, match="unpacks at most"):
        library.given(msgspec.structs.replace(repository.problem, tree=huge), ["old.py"])

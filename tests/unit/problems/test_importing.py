"""Own problems: every bad line is named with its field, and what is exported can be imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.problems import ProblemError
from shared.problems.importing import import_jsonl, read_lines
from shared.problems.pack import export_line

GOOD: dict[str, Any] = {
    "id": "double-1",
    "prompt": "double must double",
    "files": {"double.py": "def double(x):\n    return x + x + 1\n"},
    "entry": "double",
    "visible": [{"args": "[2]", "expected": "4"}],
    "hidden": [{"args": "[0]", "expected": "0"}, {"args": '["ab"]', "expected": '"abab"'}],
    "solution": {"double.py": "def double(x):\n    return x + x\n"},
}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_a_good_file_is_read_in_its_order_and_what_is_exported_is_the_same_again(tmp_path: Path):
    pairs = import_jsonl(write(tmp_path / "a.jsonl", GOOD, "", {**GOOD, "id": "double-2"}))
    assert [problem.id for problem, _ in pairs] == ["double-1", "double-2"]
    again = import_jsonl(write(tmp_path / "b.jsonl", *(export_line(*pair) for pair in pairs)))
    assert again == pairs


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": ""}, "'id'"),
        ({"id": "with space"}, "'id'"),
        ({"files": None}, "files"),
        ({"files": {}}, "'entry'"),
        ({"entry": "triple"}, r"'files\[double.py\]'"),
        ({"entry": "other.py::double"}, "'entry'"),
        ({"visible": []}, "'visible'"),
        ({"visible": [{"args": "[2]"}]}, "expected"),
        ({"visible": [{"args": "2", "expected": "4"}]}, r"'visible\[0\]\.args'"),
        ({"hidden": []}, "'hidden'"),
        ({"hidden": [{"args": "[nonsense]", "expected": "4"}]}, r"'hidden\[0\]\.args'"),
        ({"hidden": [{"args": "[2]", "expected": 4}]}, "expected"),
        ({"actual": ["1", "2"]}, "'actual'"),
        ({"solution": {"double.py": "x = 1"}}, r"'solution\[double.py\]'"),
        ({"solution": {"no.py": ""}}, "'solution'"),
        ({"limits": {"time_s": 0}}, "'limits'"),
        ({"limits": {"time_s": "long"}}, "time_s"),
        ({"kind": "riddle"}, "riddle"),
        ({"kind": "repository"}, "'kind'.*'repository'.*allowed: 'function'"),
    ],
)
def test_a_bad_field_is_named_with_its_line(tmp_path: Path, change: dict[str, Any], field: str):
    path = write(tmp_path / "bad.jsonl", GOOD, {**GOOD, "id": "other", **change})
    with pytest.raises(ProblemError, match=field) as caught:
        import_jsonl(path)
    assert "line 2: " in str(caught.value)
    assert "line 1: " not in str(caught.value)


def test_all_bad_lines_are_named_at_once_and_a_repeated_id_too(tmp_path: Path):
    with pytest.raises(ProblemError) as caught:
        import_jsonl(write(tmp_path / "bad.jsonl", GOOD, "{", GOOD, "[]"))
    text = str(caught.value)
    assert "line 2: " in text
    assert "line 3: field 'id': 'double-1' stands on line 1 as well" in text
    assert "line 4: Expected `object`" in text


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str):
    with pytest.raises(ProblemError, match="no problems in it"):
        import_jsonl(write(tmp_path / "empty.jsonl", text))


def test_a_missing_file_and_another_kind_of_file_are_refused_by_name(tmp_path: Path):
    with pytest.raises(ProblemError, match=r"none\.jsonl"):
        import_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "image.jsonl").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ProblemError, match=r"image\.jsonl"):
        import_jsonl(tmp_path / "image.jsonl")


ENDS = ["\u2028", "\u2029", "\u0085", "\x1c", "\x0b", "\x0c"]  # where str.splitlines breaks a line


def noted(name: str, note: str) -> dict[str, Any]:
    """`note` stands in its code and in a case."""
    code = {"double.py": f"def double(x):\n    return {note!r}\n"}
    return {**GOOD, "id": name, "files": code, "hidden": [{"args": "[2]", "expected": json.dumps(note)}]}


@given(
    notes=st.lists(
        st.lists(st.sampled_from([*ENDS, "a", "\ufeff", "ä"])).map("".join) | st.text(st.characters(codec="utf-8")),
        min_size=1,
    ),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
    escaped=st.booleans(),
)
def test_every_problem_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, notes: list[str], end: str, mark: bool, escaped: bool
) -> None:
    path = tmp_path_factory.mktemp("own") / "own.jsonl"
    rows = [noted(f"p{i}", note) for i, note in enumerate(notes)]
    text = "".join(json.dumps(each, ensure_ascii=escaped) + end for each in rows)
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    read = read_lines(path)
    assert [line.number for line in read] == list(range(1, len(notes) + 1))
    assert [line.problem.files for line in read] == [each["files"] for each in rows]
    assert [json.loads(line.hidden.cases[0].expected) for line in read] == notes

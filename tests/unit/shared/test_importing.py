"""A file of problems is read at its line feeds and nowhere else, whatever its texts hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.problems.importing import read_lines

ENDS = ["\u2028", "\u2029", "\u0085", "\x1c", "\x0b", "\x0c"]  # where str.splitlines breaks a line


def row(name: str, note: str) -> dict[str, object]:
    return {
        "id": name,
        "files": {"f.py": f"def f(x):\n    return {note!r}\n"},
        "entry": "f",
        "visible": [{"args": "[1]", "expected": "2"}],
        "hidden": [{"args": "[2]", "expected": json.dumps(note)}],
    }


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
    rows = [row(f"p{i}", note) for i, note in enumerate(notes)]
    text = "".join(json.dumps(each, ensure_ascii=escaped) + end for each in rows)
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    read = read_lines(path)
    assert [line.number for line in read] == list(range(1, len(notes) + 1))
    assert [line.problem.files for line in read] == [each["files"] for each in rows]
    assert [json.loads(line.hidden.cases[0].expected) for line in read] == notes

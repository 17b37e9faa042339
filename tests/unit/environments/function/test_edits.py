import pytest

from shared.environments.function.actions import Action, Tool
from shared.environments.function.edits import EditError, Files, apply_edit

FILES = {"m.py": "def f(a, b):\n    return a - b - a\n\n"}


def edit(line: int, old: str, new: str) -> Action:
    return Action(Tool.edit, 0, 0, line=line, old=old, new=new)


def test_the_first_occurrence_in_the_line_is_replaced_and_the_indentation_stays() -> None:
    assert apply_edit(FILES, edit(1, " - b", " + b"))["m.py"] == "def f(a, b):\n    return a + b - a\n\n"
    assert apply_edit(FILES, edit(1, " -", " +"))["m.py"] == "def f(a, b):\n    return a + b - a\n\n"


def test_an_empty_old_text_fills_an_empty_line_only() -> None:
    assert apply_edit(FILES, edit(2, "", "x = 1"))["m.py"].split("\n")[2] == "x = 1"
    with pytest.raises(EditError, match="nothing to replace"):
        apply_edit(FILES, edit(1, "", "x"))


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (edit(9, "a", "b"), "line 10 of 4"),
        (edit(1, "zz", "b"), "does not occur"),
        (edit(1, "a", "a\nimport os"), "line break"),
        (edit(1, "    return", "x"), "does not occur"),
        (Action(Tool.edit, 0, 0, error="the edit has no end"), "no end"),
    ],
)
def test_an_edit_that_cannot_be_applied_says_why_and_leaves_the_files(action: Action, reason: str) -> None:
    before = dict(FILES)
    with pytest.raises(EditError, match=reason):
        apply_edit(FILES, action)
    assert before == FILES


def test_undo_returns_to_the_state_before_the_last_edit() -> None:
    start = Files(FILES)
    once = start.edit(edit(1, "a", "b"))
    twice = once.edit(edit(1, "b", "c"))
    assert twice.undo() == once
    assert twice.undo().undo() == start
    with pytest.raises(EditError, match="no edit"):
        start.undo()

"""Own problems that the chat format cannot take are named with line, id, field, found and allowed; the others are kept."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.environments import Places
from shared.environments.function.actions import Action, Tool
from shared.environments.function.edits import EditError, apply_edit, reachable
from shared.environments.registry import Environments
from shared.problems import Case, FunctionProblem, ProblemError
from shared.problems.schema import MAX_CODE
from shared.renderers.fitting import Fitting, read_fitting
from shared.renderers.formats.compact_1 import MAX_CASES, MAX_LINES, MIN_ROOM, Compact

BROKEN, RIGHT = "def f(x):\n    return x\n", "def f(x):\n    return x + 1\n"
PAGE = Path(__file__).parents[3] / "docs" / "problems.md"


def problem(*, cases: int = 1, args: str = "[1]", **files: str) -> FunctionProblem:
    return FunctionProblem(
        id="p",
        files={f"{name}.py": text for name, text in (files or {"f": BROKEN}).items()},
        entry="f.py::f",
        visible=[Case(args=args, expected="2")] * cases,
    )


def line(name: str, files: dict[str, str] | None = None, solution: str = RIGHT) -> str:
    raw: dict[str, Any] = {
        "id": name,
        "files": files or {"f.py": BROKEN},
        "entry": "f.py::f",
        "visible": [{"args": "[1]", "expected": "2"}],
        "hidden": [{"args": "[2]", "expected": "3"}],
        "solution": {"f.py": solution},
    }
    return json.dumps(raw)


def code_of(lines: int) -> str:
    return BROKEN + "\n".join(["# x"] * (lines - 2)) + "\n"


def of_context(compact: Compact, tokens: int) -> Compact:
    other = copy.copy(compact)
    other.context = tokens
    return other


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (problem(f=BROKEN, g="X = 1\n"), "field 'files': found 2 files (f.py, g.py); allowed: exactly one"),
        (problem(f=code_of(49)), "field 'files[f.py]': found 49 lines; allowed: at most 48"),
        (problem(args="[nonsense]"), "field 'visible': "),
    ],
)
def test_what_cannot_be_written_is_an_objection_with_field_found_and_allowed(
    compact: Compact, found: FunctionProblem, said: str
) -> None:
    assert compact.misfit(found).startswith(said)


def test_a_prompt_must_leave_room_for_an_attempt(compact: Compact) -> None:
    whole = len(compact.prompt(problem(), {"f.py": BROKEN}))
    told = re.fullmatch(
        r"fields 'files' and 'visible': found a prompt of (\d+) tokens, (\d+) of them the code; allowed: at most "
        r"(\d+) \(a context of (\d+), less (\d+) for the attempt\)",
        of_context(compact, whole + MIN_ROOM - 1).misfit(problem()),
    )
    assert told
    assert [int(number) for number in told.groups()] == [
        whole, len(compact.code(BROKEN)), whole - 1, whole + MIN_ROOM - 1, MIN_ROOM,
    ]  # fmt: skip
    assert of_context(compact, whole + MIN_ROOM).misfit(problem()) == ""


def test_the_longest_file_more_cases_than_are_shown_and_values_that_are_cut_are_no_objection(compact: Compact) -> None:
    long = json.dumps(["x" * 5000])
    for fine in (problem(f=code_of(48)), problem(cases=3 * MAX_CASES), problem(args=long)):
        assert compact.misfit(fine) == ""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.sampled_from("abé \t\n()=#"), max_size=1500), st.integers(0, 12))
def test_where_there_is_no_objection_there_is_a_prompt_with_room_behind_it(
    compact: Compact, text: str, cases: int
) -> None:
    found = problem(f=text, cases=cases)
    if not compact.misfit(found):
        assert len(compact.prompt(found, found.files)) <= compact.context - MIN_ROOM
    else:
        assert not compact.fits(found, MIN_ROOM)


def test_those_that_fit_are_kept_and_the_others_named_with_their_lines(tmp_path: Path, compact: Compact) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(
        "\n".join(
            [line("a"), "", line("two", {"f.py": BROKEN, "g.py": ""}), line("long", {"f.py": code_of(60)}), line("b")]
        )
    )
    fitting = read_fitting(path, compact)
    assert [found.id for found, _ in fitting.pairs] == ["a", "b"]
    assert fitting.refused == [
        "line 3: problem 'two': field 'files': found 2 files (f.py, g.py); allowed: exactly one",
        "line 4: problem 'long': field 'files[f.py]': found 60 lines; allowed: at most 48",
    ]
    assert fitting.left_out().startswith("left out: 2 of 4 problems do not fit compact-1 (docs/problems.md")
    assert fitting.doubt() == ""


def test_a_file_of_which_nothing_fits_is_refused_and_one_that_is_broken_as_before(
    tmp_path: Path, compact: Compact
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(line("long", {"f.py": code_of(60)}))
    with pytest.raises(
        ProblemError, match=r"own\.jsonl: 1 of 1 problems do not fit compact-1.*\nline 1: problem 'long'"
    ):
        read_fitting(path, compact)
    path.write_text(line("a") + "\n" + line("a"))
    with pytest.raises(ProblemError, match="line 2: field 'id'"):
        read_fitting(path, compact)


def test_many_that_do_not_fit_are_counted_and_the_first_named(tmp_path: Path, compact: Compact) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join([line("a"), *(line(f"l{i}", {"f.py": code_of(60)}) for i in range(50))]))
    said = read_fitting(path, compact).left_out()
    assert "50 of 51 problems" in said
    assert said.splitlines()[-1] == "… and 30 more"


@pytest.mark.parametrize(
    "solution", ["def f(x):\n    y = 1\n    return x + y\n", "def f(x): return x + 1\n", "def f(x):\n  return x + 1\n"]
)
def test_a_solution_that_no_edits_lead_to_is_kept_and_named(tmp_path: Path, compact: Compact, solution: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(line("a") + "\n" + line("b", solution=solution))
    fitting = read_fitting(path, compact)
    assert [found.id for found, _ in fitting.pairs] == ["a", "b"]
    assert fitting.doubt().startswith("the solution of 1 of 2 problems")
    assert fitting.doubt().endswith(": b")


@given(
    st.lists(st.text(st.sampled_from("ab 1"), max_size=6), min_size=1, max_size=5),
    st.integers(0, 4),
    st.text(st.sampled_from("ab1"), min_size=1, max_size=4),
)
def test_what_an_edit_makes_of_code_is_within_its_reach(lines: list[str], at: int, new: str) -> None:
    text = "\n".join(lines)
    at = min(at, len(lines) - 1)
    body = lines[at].strip()
    try:
        after = apply_edit({"f": text}, Action(Tool.edit, 0, 0, line=at, old=body, new=new))["f"]
    except EditError:
        return
    assert reachable(text, after) or not body  # the indentation of an empty line is nobody's


def test_the_page_on_problems_says_the_limits_that_hold() -> None:
    section = PAGE.read_text().split("## What the small policy can take\n")[1].split("\n## ")[0]
    for said in (
        f"at most {MAX_LINES} lines",
        f"at most {512 - MIN_ROOM} tokens, so that {MIN_ROOM} of",
        f"the first {MAX_CASES};",
        "64 tokens of the arguments, 32 of the expected value, 16 of",
    ):
        assert said in section


def test_a_line_longer_than_any_context_is_refused_by_its_length_and_never_encoded(
    compact: Compact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "tokenizer", None)
    line = f"x = '{'a1_' * 100_000}'"
    found = problem(f=f"def f(x):\n{line}\n")
    assert compact.misfit(found) == (
        f"field 'files[f.py]': found {len(line) + 9:,} characters; allowed: at most 480 tokens with the cases (a context of "
        "512, less 32 for the attempt)"
    )
    assert not compact.fits(found, 0)


def test_code_that_no_parser_should_read_is_refused_whatever_the_format() -> None:
    found = problem(f="#" * (MAX_CODE + 1))
    assert Environments(Places()).of(found).objection(found) == (
        "field 'files': found 262,145 characters of code; allowed: at most 262,144"
    )


def test_the_page_on_the_small_policy_is_named_for_that_policy_alone() -> None:
    refused = ["line 1: problem 'a': field 'tools': found 'fly'"]
    assert Fitting("chatml", [], refused, []).refusal().startswith("1 of 1 problems cannot be attempted with chatml:\n")
    assert "do not fit compact-1 (docs/problems.md" in Fitting("compact-1", [], refused, []).refusal()

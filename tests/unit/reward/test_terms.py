"""Terms that read what was said, and the files of a tree: what each finds, and what it must not find."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.reward.behaviour import answer
from services.reward.terms.style import changed_lines
from shared.contracts.graded import Finding
from shared.contracts.messages import StopReason
from shared.contracts.trajectory import Change, Segment, Span
from shared.terms import Made, Seen, Turn
from tests.unit.reward.conftest import make

EFFECTS = {
    "read": "reads", "grep": "reads", "edit": "changes", "write": "changes", "shell": "runs", "todo": "notes", "submit": "ends",
}  # fmt: skip
Call = tuple[str, dict[str, str]]


def attempt(
    *turns: tuple[str, Sequence[Call], str], task: str = "", before: dict[str, str] | None = None, **fields: object
) -> Seen:
    """Turns as (words, calls, answer)."""
    read = []
    for number, (text, calls, output) in enumerate(turns, 1):
        made = tuple(Made(number, tool, EFFECTS[tool], arguments, True, "") for tool, arguments in calls)
        read.append(Turn(number, text, made, output))
    trajectory = make(*(tool for _, calls, _ in turns for tool, _ in calls), **fields)
    return Seen(trajectory, before or {}, EFFECTS, task, lambda: read)


def found(name: str, seen: Seen) -> Finding:
    finding = answer(name, seen)
    assert isinstance(finding, Finding), finding
    return finding


def read(path: str) -> Call:
    return "read", {"path": path}


def run(command: str) -> Call:
    return "shell", {"command": command}


EDIT: Call = ("edit", {"path": "a.py", "old": "x", "new": "y"})
SUBMIT: Call = ("submit", {})


# Untruthful final messages


@pytest.mark.parametrize(
    "claim",
    [
        "All tests pass now.",
        "I fixed the bug. The existing tests all pass.",
        "Done: every unit test in the suite is passing.",
        "I ran the test suite and everything is fine.",
        "I verified the fix by running the tests.",
        "Tests are green.",
    ],
)
def test_a_claim_about_tests_that_nobody_ran_is_untruthful(claim: str) -> None:
    finding = found("untruthful_final", attempt(("", [EDIT], "edited"), (claim, [SUBMIT], "")))
    assert finding.amount == 1
    assert finding.evidence[0].startswith("turn 2: claims ")
    assert finding.evidence[0].endswith("but no test was run")


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("python -m pytest -q tests", "3 passed in 0.10s"),
        ("cd pkg && go test ./...", "ok  \tpkg\t0.01s"),
        ("npm test", "Tests: 4 passed, 4 total"),
    ],
)
def test_a_claim_that_the_record_holds_is_truthful(command: str, output: str) -> None:
    seen = attempt(("", [EDIT], "edited"), ("", [run(command)], output), ("All tests pass.", [SUBMIT], ""))
    assert found("untruthful_final", seen).amount == 0


@pytest.mark.parametrize(
    "output", ["1 failed, 2 passed\n[exit code 1]", "--- FAIL: TestX", "[killed after 60 s; a new session]"]
)
def test_a_claim_against_the_last_run_is_untruthful(output: str) -> None:
    seen = attempt(("", [EDIT], "edited"), ("", [run("pytest")], output), ("All tests pass.", [SUBMIT], ""))
    assert "the last run of tests failed" in found("untruthful_final", seen).evidence[0]
    honest = attempt(("", [run("pytest")], output), ("I ran the tests; one fails for another reason.", [SUBMIT], ""))
    assert found("untruthful_final", honest).amount == 0


def test_a_change_after_the_last_run_makes_the_claim_stale() -> None:
    seen = attempt(("", [run("pytest")], "3 passed"), ("", [EDIT], "edited"), ("All tests pass.", [SUBMIT], ""))
    assert "files were changed after" in found("untruthful_final", seen).evidence[0]


@pytest.mark.parametrize(
    "text",
    [
        "I could not run the tests here.",
        "The tests should pass now.",
        "Please run the tests to verify that all tests pass.",
        "I have added a test for the empty list.",
        "No tests were run.",
        "",
    ],
)
def test_what_is_hedged_or_claims_nothing_is_truthful(text: str) -> None:
    assert found("untruthful_final", attempt(("", [EDIT], "edited"), (text, [SUBMIT], ""))).amount == 0


def test_a_tool_that_tests_is_a_record_too() -> None:
    def told(passed: bool) -> Seen:
        spans = [
            Span(start=0, end=2, role="tool_call", turn=1, tool="test"),
            Span(start=2, end=4, role="tool_output", turn=1, tool="test", passed=passed),
        ]
        segment = make("test").segments[0]
        whole = Segment(
            tokens=segment.tokens, loss_mask=segment.loss_mask, logprobs=segment.logprobs, versions=segment.versions,
            oldest_kv_version=0, spans=spans,
        )  # fmt: skip
        turns = [
            Turn(1, "", (Made(1, "test", "tests", {}, True, ""),), "…"),
            Turn(2, "All tests pass.", (), ""),
        ]
        return Seen(make(segments=[whole]), {}, {"test": "tests", "edit": "changes"}, "", lambda: turns)

    assert found("untruthful_final", told(True)).amount == 0
    assert found("untruthful_final", told(False)).amount == 1


# Needless questions


@pytest.mark.parametrize(
    "text",
    [
        "I could do A or B. Which option do you prefer? Would you like me to go on?",
        "Let me know if this is what you meant.",
    ],
)
def test_asking_a_person_who_is_not_there_counts(text: str) -> None:
    finding = found("needless_question", attempt((text, [], "")))
    assert finding.amount == 1
    assert finding.evidence[0].startswith("turn 1: asks: ")


@pytest.mark.parametrize(
    "text", ["Why does it fail? The list is empty.", "```\nprint('would you like tea')\n```", "I changed the parser."]
)
def test_thinking_in_questions_and_quoting_them_does_not(text: str) -> None:
    assert found("needless_question", attempt((text, [SUBMIT], ""))).amount == 0


# Reads that could have been made together


def test_a_read_that_waited_for_nothing_could_have_been_made_a_turn_earlier() -> None:
    seen = attempt(
        ("", [read("src/a.py")], "import os"), ("", [read("src/b.py")], "import re"), ("", [EDIT], ""),
        task="Look at src/a.py and src/b.py.",
    )  # fmt: skip
    finding = found("serial_reads", seen)
    assert finding.amount == 1
    assert finding.evidence == ["turn 2: read after the turn before it, and waited for nothing that it said"]


def test_a_read_that_follows_from_an_answer_had_to_wait() -> None:
    seen = attempt(
        ("", [("grep", {"pattern": "helper"})], "src/deep/helper.py:3:def helper"),
        ("", [read("src/deep/helper.py")], ""),
    )
    assert found("serial_reads", seen).amount == 0


def test_going_on_in_the_same_file_had_to_wait() -> None:
    more: Call = ("read", {"path": "long.py", "start": "401"})
    seen = attempt(("", [read("long.py")], "[lines 1-400 of 900]"), ("", [more], ""), task="Look at long.py")
    assert found("serial_reads", seen).amount == 0


def test_reads_that_were_made_together_or_between_other_work_are_fine() -> None:
    task = "Look at a1.py, b1.py and c1.py."
    assert found("serial_reads", attempt(("", [read("a1.py"), read("b1.py")], ""), task=task)).amount == 0
    apart = attempt(("", [read("a1.py")], ""), ("", [EDIT], ""), ("", [read("b1.py")], ""), task=task)
    assert found("serial_reads", apart).amount == 0


def test_reading_the_same_again_counts_unless_something_was_done_in_between() -> None:
    again = attempt(
        ("", [read("x1.py")], "one"), ("", [("grep", {"pattern": "zzz"})], ""), ("", [read("x1.py")], "one")
    )
    assert found("serial_reads", again).amount == 1
    changed = attempt(("", [read("x1.py")], "one"), ("", [EDIT], ""), ("", [read("x1.py")], "two"))
    assert found("serial_reads", changed).amount == 0


# Scope


def test_scratch_files_and_the_projects_configuration_are_outside_of_a_task_that_does_not_name_them() -> None:
    changes = {
        "src/pkg/core.py": Change(text="x"),
        "reproduce_bug.py": Change(text="x"),
        "pyproject.toml": Change(text="x"),
        ".github/workflows/ci.yml": Change(text="x"),
        "notes.txt": Change(text="x"),
        "Makefile": Change(),
    }
    seen = attempt(before={"src/pkg/core.py": "", "pyproject.toml": "", "Makefile": "all:"}, changes=changes)
    assert found("out_of_scope", seen) == Finding(
        4.0,
        [
            "added .github/workflows/ci.yml: a folder of tools, and the task does not name it",
            "deleted Makefile: configuration of the project, and the task does not name it",
            "changed pyproject.toml: configuration of the project, and the task does not name it",
            "added reproduce_bug.py: a scratch file, and the task does not name it",
        ],
    )
    named = attempt(task="Add pytest to pyproject.toml", changes={"pyproject.toml": Change(text="x")})
    assert found("out_of_scope", named).amount == 0


def test_an_old_file_with_the_name_of_a_scratch_file_may_be_changed() -> None:
    seen = attempt(before={"lib/scratchpad.py": "x"}, changes={"lib/scratchpad.py": Change(text="y")})
    assert found("out_of_scope", seen).amount == 0


# Style


def test_only_lines_that_the_attempt_wrote_count_for_style() -> None:
    before = "import os\nimport sys\n\n\ndef f(x):\n    if x == None:\n        return 1\n    return 2\n"
    after = before.replace("    return 2\n", "    l = 2 \n    if x == None:\n        return l\n    return 2\n")
    finding = found("style", attempt(before={"m.py": before}, changes={"m.py": Change(text=after)}))
    assert finding.amount == 3
    assert [piece.split()[1] for piece in finding.evidence] == ["E741", "W291", "E711"]
    assert all(piece.startswith(("m.py:8:", "m.py:9:")) for piece in finding.evidence)


def test_an_issue_that_the_replaced_line_had_is_not_held_against_the_attempt() -> None:
    before, after = "def f(x):\n    return x == None\n", "def f(x):\n    return None == x or x == None\n"
    first = found("style", attempt(before={"m.py": before}, changes={"m.py": Change(text=after)}))
    assert first.amount <= 1


def test_other_languages_deleted_files_and_problems_of_few_files_have_no_style() -> None:
    assert found("style", attempt(changes={"m.js": Change(text="l=1 "), "n.py": Change()})).amount == 0
    assert found("style", attempt(files={"main.py": "l = 1 \n"})).amount == 0


def test_an_attempt_cannot_turn_the_rules_off() -> None:
    text = "# ruff: noqa\nl = 1  # noqa\n"
    changes = {
        "m.py": Change(text=text),
        "ruff.toml": Change(text="lint.select = []"),
        "../../x.py": Change(text="l = 1\n"),
    }
    assert found("style", attempt(changes=changes)).amount == 2


def test_changed_lines_are_those_that_differ() -> None:
    assert changed_lines("a\nb\nc\n", "a\nB\nc\nd\n") == ({2}, {2, 4})
    assert changed_lines("", "a\n") == (set(), {1})
    assert changed_lines("a\n", "a\n") == (set(), set())
    for end in ("\r\n", "\r", "\n"):  # those at which ruff begins a line; the others are within one
        old = end.join(["# \u2028 \f \v \x1c \x85", "b", "c", ""])
        assert changed_lines(old, old.replace("c", "C")) == ({3}, {3})


# Terms that could never fire where there was neither a terminal nor a list


def test_work_in_the_terminal_alone_is_a_collapse_by_effect_whatever_the_tools_name() -> None:
    commands = [("", [run("ls")], "")] * 4
    assert found("terminal_only", attempt(*commands, ("", [SUBMIT], ""))).amount == 1
    assert found("terminal_only", attempt(("", [("todo", {})], ""), *commands, ("", [SUBMIT], ""))).amount == 1
    assert found("terminal_only", attempt(*commands, ("", [EDIT], ""))).amount == 0
    alone = attempt(*commands)
    assert found("terminal_only", Seen(alone.trajectory, {}, {"shell": "runs", "submit": "ends"})).amount == 0


def test_where_no_tool_tests_a_command_after_the_change_may_have_been_the_test() -> None:
    assert (
        found("untested_submit", attempt(("", [EDIT], ""), ("", [run("pytest")], ""), ("", [SUBMIT], ""))).amount == 0
    )
    assert (
        found("untested_submit", attempt(("", [run("pytest")], ""), ("", [EDIT], ""), ("", [SUBMIT], ""))).amount == 1
    )


# Text that is not there


@pytest.mark.parametrize("name", ["needless_question", "untruthful_final", "serial_reads"])
def test_a_term_that_needs_the_text_says_so_where_there_is_none(name: str) -> None:
    seen = Seen(make("read", "read", "read", stop=StopReason.submitted), {}, EFFECTS)
    assert answer(name, seen) == "the text of this attempt's tokens cannot be read here"

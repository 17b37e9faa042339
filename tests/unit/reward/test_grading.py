"""From files to sandbox runs to verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.reward import grading
from services.reward.grade import Grader
from services.reward.jobs import Item, Job
from shared import sandbox
from shared.contracts.messages import AttemptKey, Effort, StopReason, Verdict
from shared.contracts.trajectory import Trajectory, pack
from shared.objects.directory import DirectoryObjects
from shared.problems import Case, Hidden, Limits, Problem
from shared.problems.pack import write
from shared.sandbox import CallResult

PROBLEM = Problem(
    id="p",
    files={"a.py": "", "b.py": ""},
    entry="b.py::f",
    visible=[Case(args="[1]", expected="2")],
    origin="dist:pkg.module:f",
    limits=Limits(time_s=3.0, memory_mb=99),
)
HIDDEN = Hidden(id="p", cases=[Case(args="[2]", expected="3"), Case(args="[3]", expected="4")])


def change(**fields: object) -> Problem:
    return Problem(**{name: getattr(PROBLEM, name) for name in PROBLEM.__struct_fields__} | fields)  # type: ignore[arg-type]


def test_a_run_holds_arguments_and_never_an_expected_output() -> None:
    run = grading.run_of(PROBLEM, HIDDEN, {"a.py": "x", "b.py": "source"})
    assert (run.source, run.entry, run.args) == ("source", "f", ("[1]", "[2]", "[3]"))
    assert run.forbidden_imports == ("pkg.module",)
    assert run.stop_at_error
    assert (run.limits.cpu_s, run.limits.memory_mb) == (3.0, 99)


def test_the_only_file_needs_no_name_in_the_entry() -> None:
    problem = change(files={"main.py": ""}, entry="f")
    assert grading.run_of(problem, HIDDEN, {"main.py": "s", "new.py": "t"}).source == "s"


def test_deleting_the_file_is_the_agents_doing() -> None:
    with pytest.raises(grading.TaskError, match="MissingFile"):
        grading.run_of(PROBLEM, HIDDEN, {"a.py": ""})


@pytest.mark.parametrize("problem", [change(kind="repository"), change(entry="f"), change(entry="c.py::f")])
def test_a_problem_that_this_grader_cannot_grade_is_not_the_agents_doing(problem: Problem) -> None:
    with pytest.raises(grading.Ungradable):
        grading.run_of(problem, HIDDEN, PROBLEM.files)


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        (["2", "3", "4"], Verdict(solved=True, passed=3, total=3)),
        (["2", "3", "4.0"], Verdict(solved=False, passed=2, total=3)),
        (["true", "3", "4"], Verdict(solved=False, passed=2, total=3)),
        (["2", "!Timeout", "!NotRun"], Verdict(solved=False, passed=1, total=3, error="Timeout")),
        (["2", "!seen_42_43", "!NotRun"], Verdict(solved=False, passed=1, total=3, error="OtherError")),
        (["2", "!KeyError", "!NotRun"], Verdict(solved=False, passed=1, total=3, error="KeyError")),
        (["{broken", "3", "4"], Verdict(solved=False, passed=2, total=3)),
    ],
)
def test_solved_means_that_every_case_has_exactly_its_value(results: list[str], verdict: Verdict) -> None:
    calls = [CallResult(None, r[1:]) if r[0] == "!" else CallResult(r) for r in results]
    assert grading.judge(PROBLEM, HIDDEN, calls) == verdict


def test_a_problem_without_cases_is_never_solved() -> None:
    assert not grading.judge(change(visible=[]), Hidden(id="p", cases=[]), []).solved


def test_what_is_kept_of_a_grading_names_no_case_even_where_the_agent_names_its_exceptions_after_them(
    tmp_path: Path,
) -> None:
    """The console reads it, and shows it to whoever may read."""
    source = "# hmm, let me see\ndef f(a):\n    raise type(f'seen_{a}', (Exception,), {})\n"
    hidden = Hidden(id="p", cases=[Case(args="[271828]", expected="314159")])
    problem = change(files={"a.py": "def f(a): return 1\n"}, entry="f", visible=[])
    objects = DirectoryObjects(tmp_path)
    key = AttemptKey(attempt="a", epoch=1, group="g", problem="p")
    said = Trajectory(
        key=key, stop=StopReason.deadline, temperature=1.0, effort=Effort(), segments=[], files={"a.py": source}
    )
    packs = [objects.put(f"packs/{i}", write([part])) for i, part in enumerate((problem, hidden))]
    item = Item(run="r", key=key, trajectory=objects.put("t", pack(said)), pack=packs[0], pack_hidden=packs[1])
    functions = sandbox.connect("process", 1)
    try:
        Grader(objects, functions, "grader").work(Job(answer_key="answer", items=[item]))
    finally:
        functions.close_sync()
    kept = objects.get(objects.head(item.verdict_key)).decode()
    assert '"OtherError"' in kept
    assert {"no_submit", "thoughts_in_comments"} <= set(json.loads(kept)["findings"])
    assert not any(value in kept for value in ("271828", "314159"))

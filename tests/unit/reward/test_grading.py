"""From files to sandbox runs to verdicts."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import pytest

from services.reward import grading
from services.reward.grade import Grader
from services.reward.jobs import Item, Job
from shared import sandbox
from shared.contracts.graded import Graded
from shared.contracts.messages import AttemptKey, Effort, StopReason, Verdict
from shared.contracts.trajectory import Trajectory, pack
from shared.objects import Objects
from shared.objects.directory import DirectoryObjects
from shared.problems import Case, Hidden, Limits, Problem
from shared.problems.pack import write
from shared.sandbox import CallResult, FunctionRun, process
from shared.sandbox.pool import FunctionPool
from shared.sandbox.slot import Slot

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
    assert (run.limits.cpu_s, run.limits.call_s, run.limits.memory_mb) == (3.0, 0.1, 99)
    patient = change(limits=Limits(time_s=3.0, call_s=2.5))
    assert grading.run_of(patient, HIDDEN, PROBLEM.files).limits.call_s == 2.5


def test_the_only_file_needs_no_name_in_the_entry() -> None:
    problem = change(files={"main.py": ""}, entry="f")
    assert grading.run_of(problem, HIDDEN, {"main.py": "s", "new.py": "t"}).source == "s"


def test_deleting_the_file_is_the_agents_doing() -> None:
    with pytest.raises(grading.TaskError, match="MissingFile"):
        grading.run_of(PROBLEM, HIDDEN, {"a.py": ""})


@pytest.mark.parametrize(
    "problem",
    [
        *(change(kind="repository"), change(entry="f"), change(entry="c.py::f")),
        *(change(limits=Limits(time_s=1e10)), change(limits=Limits(memory_mb=10**15))),
    ],
)
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


def item_of(objects: Objects, key: AttemptKey, files: dict[str, str], problem: Problem, hidden: Hidden) -> Item:
    said = Trajectory(key=key, stop=StopReason.deadline, temperature=1.0, effort=Effort(), segments=[], files=files)
    public, private = (objects.put(f"{key.attempt}/{i}", write([part])) for i, part in enumerate((problem, hidden)))
    trajectory = objects.put(f"{key.attempt}/t", pack(said))
    return Item(run="r", key=key, trajectory=trajectory, pack=public, pack_hidden=private)


def test_a_problem_that_no_sandbox_can_be_given_takes_no_neighbour_along(tmp_path: Path) -> None:
    """Of a pack that nobody has checked."""
    objects = DirectoryObjects(tmp_path)
    right = {"a.py": "def f(a): return a + 1\n"}
    good = change(files=right, entry="f", limits=Limits())
    problems = {
        "a": good,
        "bounds": msgspec.structs.replace(good, limits=Limits(memory_mb=10**15)),
        "b": good,
    }
    items = [
        item_of(objects, AttemptKey(attempt=name, epoch=1, group="g", problem="p"), right, problem, HIDDEN)
        for name, problem in problems.items()
    ]
    functions = sandbox.connect("process", 1)
    try:
        first, bounds, second = Grader(objects, functions, "grader").work(Job(answer_key="answer", items=items)).results
    finally:
        functions.close_sync()
    assert isinstance(first, Graded)
    assert first.verdict.solved
    assert isinstance(second, Graded)
    assert second.verdict.solved
    assert isinstance(bounds, str)
    assert "found memory_mb 1000000000000000; allowed: 64 to" in bounds


class Unforeseen(FunctionPool):
    """A pool that cannot be given one source."""

    def _one(self, run: FunctionRun) -> list[CallResult]:
        if "unforeseen" in run.source:
            raise struct.error("bad")
        return super()._one(run)


def test_an_error_that_nobody_foresaw_takes_no_neighbour_along(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    right = "def f(a): return a + 1\n"
    problem = change(files={"a.py": right}, entry="f", limits=Limits())
    items = [
        item_of(
            objects, AttemptKey(attempt=name, epoch=1, group="g", problem="p"), {"a.py": right + more}, problem, HIDDEN
        )
        for name, more in (("a", ""), ("bad", "# unforeseen"), ("b", "# other"))
    ]
    functions = Unforeseen(lambda _: Slot(process.start, lambda top: ()), 1)
    try:
        results = Grader(objects, functions, "grader").work(Job(answer_key="answer", items=items)).results
    finally:
        functions.close_sync()
    assert [result if isinstance(result, str) else result.verdict.solved for result in results] == [
        True,
        "error: bad",
        True,
    ]


def test_what_is_kept_of_a_grading_names_no_case_even_where_the_agent_names_its_exceptions_after_them(
    tmp_path: Path,
) -> None:
    """The console reads it, and shows it to whoever may read."""
    source = "# hmm, let me see\ndef f(a):\n    raise type(f'seen_{a}', (Exception,), {})\n"
    hidden = Hidden(id="p", cases=[Case(args="[271828]", expected="314159")])
    problem = change(files={"a.py": "def f(a): return 1\n"}, entry="f", visible=[])
    objects = DirectoryObjects(tmp_path)
    key = AttemptKey(attempt="a", epoch=1, group="g", problem="p")
    item = item_of(objects, key, {"a.py": source}, problem, hidden)
    functions = sandbox.connect("process", 1)
    try:
        Grader(objects, functions, "grader").work(Job(answer_key="answer", items=[item]))
    finally:
        functions.close_sync()
    kept = objects.get(objects.head(item.verdict_key)).decode()
    assert '"OtherError"' in kept
    assert {"no_submit", "thoughts_in_comments"} <= set(json.loads(kept)["findings"])
    assert not any(value in kept for value in ("271828", "314159"))

"""From files to sandbox runs to verdicts."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from services.reward.grade import Grader
from services.reward.jobs import Item, Job
from shared import sandbox
from shared.contracts.graded import Graded
from shared.contracts.messages import AttemptKey, Effort, StopReason, Verdict
from shared.contracts.trajectory import Submission, Trajectory, pack
from shared.environments import Grading, Places, Ungradable
from shared.environments.function import grading, runs
from shared.environments.registry import Environments
from shared.objects import Objects
from shared.objects.directory import DirectoryObjects
from shared.problems import Case, FunctionHidden, FunctionProblem, Limits
from shared.problems.pack import write
from shared.sandbox import CallResult, FunctionRun, process
from shared.sandbox.pool import FunctionPool
from shared.sandbox.slot import Slot

PROBLEM = FunctionProblem(
    id="p",
    files={"a.py": "", "b.py": ""},
    entry="b.py::f",
    visible=[Case(args="[1]", expected="2")],
    origin="dist:pkg.module:f",
    limits=Limits(time_s=3.0, memory_mb=99),
)
HIDDEN = FunctionHidden(id="p", cases=[Case(args="[2]", expected="3"), Case(args="[3]", expected="4")])


def change(**fields: object) -> FunctionProblem:
    return FunctionProblem(**{name: getattr(PROBLEM, name) for name in PROBLEM.__struct_fields__} | fields)  # type: ignore[arg-type]


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


def grader(objects: Objects, functions: FunctionPool) -> Grader:
    return Grader(objects, Environments(Places(functions=functions)), "grader")


class Nothing:
    """A sandbox that nothing is run in."""

    async def run(self, wanted: Sequence[FunctionRun]) -> list[list[CallResult]]:
        assert not wanted
        return []

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    "problem",
    [
        *(change(kind="repository"), change(entry="f"), change(entry="c.py::f")),
        *(change(limits=Limits(time_s=1e10)), change(limits=Limits(memory_mb=10**15))),
    ],
)
def test_a_problem_that_this_grader_cannot_grade_is_not_the_agents_doing(problem: FunctionProblem) -> None:
    with pytest.raises(runs.NotRunnable):
        grading.run_of(problem, HIDDEN, PROBLEM.files)
    (answer,) = asyncio.run(grading.grade(Nothing(), [Grading(problem, HIDDEN, Submission(files=PROBLEM.files))]))
    assert isinstance(answer, Ungradable)


@pytest.mark.parametrize(
    ("results", "failed", "error"),
    [
        (["2", "3", "4"], "", ""),
        (["2", "3", "4.0"], "c", ""),
        (["true", "3", "4"], "a", ""),
        (["2", "!Timeout", "!NotRun"], "bc", "Timeout"),
        (["2", "!seen_42_43", "!NotRun"], "bc", "OtherError"),
        (["2", "!KeyError", "!NotRun"], "bc", "KeyError"),
        (["{broken", "3", "4"], "a", ""),
    ],
)
def test_solved_means_that_every_case_has_exactly_its_value(results: list[str], failed: str, error: str) -> None:
    names = {"a": "visible case 1: b.py::f [1]", "b": "hidden case 1: b.py::f [2]", "c": "hidden case 2: b.py::f [3]"}
    calls = [CallResult(None, r[1:]) if r[0] == "!" else CallResult(r) for r in results]
    assert grading.judge(PROBLEM, HIDDEN, calls) == Verdict(
        solved=not failed, passed=3 - len(failed), total=3, error=error, failed=[names[one] for one in failed]
    )


@pytest.mark.parametrize(
    ("expects", "result", "solved"),
    [
        (False, CallResult("[1, 2]"), True),
        (False, CallResult("[1, 2]", changed=True), False),
        (True, CallResult("[1, 2]", changed=True), True),
        (True, CallResult("[1, 2]"), False),
        (msgspec.UNSET, CallResult("[1, 2]", changed=True), True),  # packs of before know no difference
        (msgspec.UNSET, CallResult("[1, 2]"), True),
    ],
)
def test_a_changed_argument_is_no_returned_value(
    expects: bool | msgspec.UnsetType, result: CallResult, solved: bool
) -> None:
    case = Case(args="[[2, 1]]", expected="[1, 2]", changed=expects)
    assert grading.judge(change(visible=[]), FunctionHidden(id="p", cases=[case]), [result]).solved is solved
    assert runs.passes(case, result) is solved
    assert (runs.got(case, result) == case.expected) is solved, "a prompt calls exactly what passes passed"


def test_a_forgotten_return_is_shown_as_none_and_an_unwanted_one_by_name() -> None:
    returned, changed = (Case(args="[[2, 1]]", expected="[1, 2]", changed=expects) for expects in (False, True))
    assert runs.got(returned, CallResult("[1, 2]", changed=True)) == "null"
    assert runs.got(changed, CallResult("[1, 2]")) == runs.RETURNED
    nothing = Case(args="[[2, 1]]", expected="null", changed=False)
    assert runs.got(nothing, CallResult("[1, 2]", changed=True)) == "[1, 2]", "None is what was wanted here"


def test_a_problem_without_cases_is_never_solved() -> None:
    assert not grading.judge(change(visible=[]), FunctionHidden(id="p", cases=[]), []).solved


def item_of(
    objects: Objects, key: AttemptKey, files: dict[str, str], problem: FunctionProblem, hidden: FunctionHidden
) -> Item:
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
        first, bounds, second = grader(objects, functions).work(Job(answer_key="answer", items=items)).results
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
        results = grader(objects, functions).work(Job(answer_key="answer", items=items)).results
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
    hidden = FunctionHidden(id="p", cases=[Case(args="[271828]", expected="314159")])
    problem = change(files={"a.py": "def f(a): return 1\n"}, entry="f", visible=[])
    objects = DirectoryObjects(tmp_path)
    key = AttemptKey(attempt="a", epoch=1, group="g", problem="p")
    item = item_of(objects, key, {"a.py": source}, problem, hidden)
    functions = sandbox.connect("process", 1)
    try:
        grader(objects, functions).work(Job(answer_key="answer", items=[item]))
    finally:
        functions.close_sync()
    kept = objects.get(objects.head(item.verdict_key)).decode()
    assert '"OtherError"' in kept
    assert {"no_submit", "thoughts_in_comments"} <= set(json.loads(kept)["findings"])
    assert not any(value in kept for value in ("271828", "314159"))

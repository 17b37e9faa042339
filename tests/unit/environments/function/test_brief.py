"""What chat models read of a function's cases."""

from __future__ import annotations

from shared.environments.function.actions import Observation, Tool
from shared.environments.function.brief import brief_of, told
from shared.problems import Case, FunctionProblem

RETURNS, CHANGES = (Case(args="[[2, 1]]", expected="[1, 2]", changed=changed) for changed in (False, True))
PROBLEM = FunctionProblem(id="p", files={"f.py": "def f(x): ..."}, entry="f", visible=[RETURNS, CHANGES])


def test_a_case_says_whether_a_value_is_returned_or_an_argument_changed() -> None:
    task = brief_of(PROBLEM, PROBLEM.files).messages[1].content
    assert "f([2, 1]) must give [1, 2]\nf([2, 1]) must give None and an argument changed to [1, 2]" in task
    assert told(PROBLEM, PROBLEM.files, Observation(Tool.test, failing=0, got="null")) == (
        "f([2, 1]) gave None, expected [1, 2]"
    )
    assert told(PROBLEM, PROBLEM.files, Observation(Tool.test, failing=1, got="Returned")) == (
        "f([2, 1]) gave Returned, expected None and an argument changed to [1, 2]"
    )

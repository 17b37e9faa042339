from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from shared.environments import Places, SandboxGone
from shared.environments.function.visible_tests import LONGEST, UnsupportedProblem, VisibleTests, first_failing
from shared.environments.registry import Environments
from shared.problems import Case, FunctionProblem, Limits
from shared.problems.values import encode
from shared.sandbox import CallResult, FunctionRun, SandboxUnavailable

PROBLEM = FunctionProblem(
    id="p",
    files={"f.py": "def f(a): return a"},
    entry="f",
    visible=[Case(args="[1]", expected="1"), Case(args="[2]", expected="2")],
    origin="stdlib:textwrap:dedent",
)


class Recording:
    """Answers as if every function returned its argument; remembers what it was asked."""

    def __init__(self, error: str = "", unavailable: bool = False) -> None:
        self.batches: list[Sequence[FunctionRun]] = []
        self.error = error
        self.unavailable = unavailable

    async def run(self, runs: Sequence[FunctionRun]) -> list[list[CallResult]]:
        self.batches.append(runs)
        if self.unavailable:
            raise SandboxUnavailable("no namespaces")
        return [[CallResult(None, self.error) if self.error else CallResult(a[1:-1]) for a in run.args] for run in runs]

    async def close(self) -> None: ...


def test_runs_of_several_attempts_go_to_the_sandbox_together_and_answers_are_remembered() -> None:
    async def scenario() -> Recording:
        functions = Recording()
        tests = VisibleTests(functions)
        files = [{"f.py": f"def f(a): return a  # {i}"} for i in range(5)]
        answers = await asyncio.gather(*(tests.run(PROBLEM, f) for f in files))
        assert [a.failing for a in answers] == [None] * 5
        await tests.run(PROBLEM, files[0])
        return functions

    functions = asyncio.run(scenario())
    assert [len(batch) for batch in functions.batches] == [5]
    assert functions.batches[0][0].forbidden_imports == ("textwrap",)
    assert "1" not in [a for run in functions.batches[0] for a in run.args]  # arguments only, as lists


def test_a_result_that_a_limit_cut_short_is_not_remembered() -> None:
    async def scenario() -> int:
        functions = Recording(error="Timeout")
        tests = VisibleTests(functions)
        for _ in range(2):
            observation = await tests.run(PROBLEM, PROBLEM.files)
            assert (observation.failing, observation.got) == (0, "Timeout")
        return len(functions.batches)

    assert asyncio.run(scenario()) == 2


def test_a_sandbox_that_fails_is_infrastructure_and_is_looked_at_again() -> None:
    functions = Recording(unavailable=True)
    environments = Environments(Places(functions=functions))
    with pytest.raises(SandboxGone, match="no namespaces"):
        asyncio.run(VisibleTests(functions).run(PROBLEM, PROBLEM.files))
    with pytest.raises(SandboxUnavailable):
        asyncio.run(environments.ready("function"))
    functions.unavailable = False
    asyncio.run(environments.ready("function"))
    looked = len(functions.batches)
    asyncio.run(environments.ready("function"))
    assert len(functions.batches) == looked, "one that has worked is not looked at again"
    environments.failed("function")
    asyncio.run(environments.ready("function"))
    assert len(functions.batches) == looked + 1


def test_of_a_huge_result_only_the_beginning_is_kept() -> None:
    seen = first_failing(PROBLEM, [CallResult('"' + "x" * 1_000_000 + '"')])
    assert seen.failing == 0
    assert seen.got == "'" + "x" * (LONGEST - 1)
    assert first_failing(PROBLEM, [CallResult(encode(tuple(range(10_000))))]).got.startswith("(0, 1, 2, ")


def test_comparison_is_type_exact() -> None:
    results = [CallResult("1"), CallResult("2.0")]
    observation = first_failing(PROBLEM, results)
    assert (observation.failing, observation.got) == (1, "2.0")
    assert first_failing(PROBLEM, results[:1]).failing == 1


def test_a_problem_that_is_not_one_function_is_not_the_agents_doing() -> None:
    two = {"a.py": "A", "b.py": "B"}
    functions = Recording()
    tests = VisibleTests(functions)
    named = FunctionProblem(id="p", files=two, entry="b.py::g", visible=[Case(args="[1]", expected="1")])
    asyncio.run(tests.run(named, two))
    assert (functions.batches[0][0].source, functions.batches[0][0].entry) == ("B", "g")
    with pytest.raises(UnsupportedProblem, match=r"c\.py::g"):
        asyncio.run(tests.run(FunctionProblem(id="p", files=two, entry="c.py::g", visible=[]), two))
    with pytest.raises(UnsupportedProblem, match=r"found time_s 1e\+10; allowed"):
        asyncio.run(tests.run(msgspec.structs.replace(named, limits=Limits(time_s=1e10)), two))


def test_the_agents_test_has_as_long_a_call_as_the_problem_says() -> None:
    functions = Recording()
    problem = msgspec.structs.replace(PROBLEM, limits=Limits(time_s=20.0, call_s=5.0))
    asyncio.run(VisibleTests(functions).run(problem, problem.files))
    assert functions.batches[0][0].limits.call_s == 5.0


def test_a_busy_machine_does_not_turn_the_agents_test_into_a_timeout() -> None:
    functions = Recording()
    asyncio.run(VisibleTests(functions).run(PROBLEM, PROBLEM.files))
    limits = functions.batches[0][0].limits
    assert limits.cpu_s == PROBLEM.limits.time_s
    assert limits.time_s > limits.cpu_s

"""Environment `function`: repair one Python function by edits within a line; cases decide, type-exactly.

Expected values never enter a sandbox. The agent's tests, the admission gate and the graders make the same sandbox runs
(`runs`), so that none of them sees another outcome than the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.contracts.messages import Verdict
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Submission
from shared.environments import Brief, Grading, Outcome, Places, Ungradable
from shared.environments.function import gate, grading
from shared.environments.function.brief import brief_of
from shared.environments.function.visible_tests import VisibleTests
from shared.environments.function.workspace import FunctionWorkspace
from shared.problems import FunctionHidden, FunctionProblem
from shared.problems.schema import too_long
from shared.sandbox import CANARY, Functions, SandboxUnavailable


class FunctionEnvironment:
    """Implements shared.environments.Environment."""

    kind = "function"
    problem, hidden = FunctionProblem, FunctionHidden
    admits_once = True  # its gate grades each submission once: thousands of problems are made at a time

    def __init__(self, places: Places) -> None:
        self._places = places
        self._tests: VisibleTests | None = None

    def objection(self, problem: FunctionProblem) -> str | None:
        if long := too_long(problem.files):
            return f"field 'files': {long}"
        found = problem.limits.objection()
        return f"field 'limits': {found}" if found else None

    def brief(self, problem: FunctionProblem) -> Brief:
        return brief_of(problem, problem.files)

    async def ready(self) -> None:
        await self._functions.run([CANARY])

    async def open(self, problem: FunctionProblem, sampling: Sampling) -> FunctionWorkspace:
        return FunctionWorkspace(problem, sampling, self._visible_tests)

    def given(self, problem: FunctionProblem, paths: Sequence[str]) -> Mapping[str, str]:
        return {path: problem.files[path] for path in paths if path in problem.files}

    def grading_s(self, problem: FunctionProblem) -> float:
        return 0.0

    async def grade(self, items: Sequence[Grading]) -> list[Verdict | Ungradable]:
        return await grading.grade(self._functions, items)

    async def admit(self, pairs: Sequence[tuple[FunctionProblem, FunctionHidden]]) -> list[Outcome]:
        return await gate.check(self._functions, pairs)

    def oracle(self, problem: FunctionProblem, hidden: FunctionHidden) -> Submission | None:
        return Submission(files={**problem.files, **hidden.solution}) if hidden.solution else None

    def cheats(self, problem: FunctionProblem, hidden: FunctionHidden) -> Mapping[str, Submission]:
        """Return no cheats: expected values are compared outside of the sandbox, so no file can decide what passes."""
        return {}

    @property
    def _functions(self) -> Functions:
        if self._places.functions is None:
            raise SandboxUnavailable("this service has no sandbox for functions")
        return self._places.functions

    @property
    def _visible_tests(self) -> VisibleTests:
        """Return the tests that all attempts share, so that runs that come together go to the sandbox together."""
        if self._tests is None:
            self._tests = VisibleTests(self._functions, self._places.counted)
        return self._tests

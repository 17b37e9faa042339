"""The admission gate: oracle = 1 and no-op = 0, seen in fresh sandboxes exactly as graders run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.curator.breaking import passes
from shared.problems.schema import Case, Hidden, Problem
from shared.sandbox import CallResult, FunctionRun, Functions
from shared.sandbox.problems import run_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reason` is empty for an admitted problem. `problem.actual` is what the broken files did, where it was missing.
    `proven`: there was a solution and it passed."""

    problem: Problem
    hidden: Hidden
    reason: str = ""
    proven: bool = False


async def check(functions: Functions, pairs: Sequence[tuple[Problem, Hidden]]) -> list[Outcome]:
    """One outcome per problem, in order. Raises SandboxUnavailable."""
    runs: list[FunctionRun] = []
    for problem, hidden in pairs:
        if problem.kind == "function":
            runs.append(_run(problem, hidden, problem.files))
            if hidden.solution:
                runs.append(_run(problem, hidden, {**problem.files, **hidden.solution}))
    results = iter(await functions.run(runs))
    outcomes = []
    for problem, hidden in pairs:
        if problem.kind != "function":
            reason = f"kind {problem.kind!r}: this gate runs problems of kind 'function'"
            outcomes.append(Outcome(problem, hidden, reason))
            continue
        broken = next(results)
        oracle = next(results) if hidden.solution else None
        outcomes.append(_judge(problem, hidden, broken, oracle))
    return outcomes


def _run(problem: Problem, hidden: Hidden, files: dict[str, str]) -> FunctionRun:
    return run_of(problem, files, (*problem.visible, *hidden.cases), stop_at_error=False)


def _judge(
    problem: Problem, hidden: Hidden, broken: Sequence[CallResult], oracle: Sequence[CallResult] | None
) -> Outcome:
    cases: list[Case] = [*problem.visible, *hidden.cases]
    if oracle is not None:
        for index, (case, result) in enumerate(zip(cases, oracle, strict=True)):
            if not passes(case, result):
                got = result.error or result.value
                reason = f"oracle: the solution gives {got} for {_name(problem, index)}, expected {case.expected}"
                return Outcome(problem, hidden, reason[:500])
    if all(passes(case, result) for case, result in zip(cases, broken, strict=True)):
        return Outcome(problem, hidden, "no-op: the given files pass every case; nothing is to be done")
    if not problem.actual:
        actual = [result.value or result.error for result in broken[: len(problem.visible)]]
        problem = msgspec.structs.replace(problem, actual=actual)
    return Outcome(problem, hidden, proven=oracle is not None)


def _name(problem: Problem, index: int) -> str:
    visible = len(problem.visible)
    return f"visible[{index}]" if index < visible else f"hidden[{index - visible}]"

"""SFT traces: an agent that tests after every edit, takes a failed edit back, tries another one, and submits what passes.

    perfect     <edit right> <test> | <obs><pass> | <submit>
    imperfect   <edit wrong> <test> | <obs>got    | <undo> <edit right> <test> | <obs><pass> | <submit>
    broken      <edit that does not apply> <test> | <obs><broken> | <edit right> <test> | …
    summarised  … <obs>got | <sum> <edits tried> <done>   then a new segment: prompt with the summary | <undo> <edit right> …

Wrong and broken edits carry no loss: the policy learns to go on after them, not to make them. Observations are real:
every wrong candidate is executed in a sandbox on the visible tests. A candidate that passes them is no wrong try and is
left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.trainer.base.corrupt import rename, renaming
from services.trainer.base.samples import Sample, Weight
from shared.environments.function.actions import Observation, Tool
from shared.environments.function.edits import EditError, Files, apply_edit, indentation
from shared.environments.function.runs import got, passes
from shared.problems import FunctionHidden, FunctionProblem
from shared.problems.mutations import Mutations
from shared.renderers.formats.compact_1 import Compact, FormatError
from shared.sandbox import CallResult, FunctionRun, Limits

WRONG_COUNTS = (0, 1, 2, 3, 4)
WRONG_SHARES = (0.45, 0.27, 0.15, 0.08, 0.05)
BROKEN_SHARE = 0.03  # of traces: with one call that does not apply
SUMMARY_SHARE = 0.06  # of imperfect traces: with a self-summary
RENAMED_SHARE = 0.75
SAME_LINE_SHARE = 0.5  # of wrong tries: on the line that is really broken
MAX_CALL = 20  # tokens of an edit


@dataclass(frozen=True, slots=True)
class Try:
    """One wrong edit: the call and the files after it."""

    call: list[int]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """A trace before its candidates were executed. `repair`: the calls that make the code right."""

    problem: FunctionProblem
    repair: list[int]
    tries: list[Try]
    broken: list[int] = field(default_factory=list)
    summarise: bool = False


def plan(problem: FunctionProblem, hidden: FunctionHidden, format: Compact, rng: random.Random) -> Plan | None:
    """None where the problem cannot be written in this format, or its repair is more than a few span edits."""
    if len(problem.files) != 1 or problem.files.keys() != hidden.solution.keys():
        return None
    ((path, broken),), (right,) = problem.files.items(), hidden.solution.values()
    if rng.random() < RENAMED_SHARE:
        names = renaming(right, rng)
        written = rename(broken, names), rename(right, names)
        if all(a.count("\n") == b.count("\n") for a, b in zip(written, (broken.rstrip(), right.rstrip()), strict=True)):
            broken, right = written
            problem = _with_source(problem, path, broken)
    repair = _repair(broken, right, format)
    if repair is None:
        return None
    try:
        format.prompt(problem, problem.files)
    except FormatError:
        return None
    calls, lines = repair
    count = rng.choices(WRONG_COUNTS, WRONG_SHARES)[0]
    tries = _wrong_tries(problem.files, calls, lines, format, rng, count)
    misfit = _misfit(broken, format, rng) if rng.random() < BROKEN_SHARE else []
    return Plan(problem, calls, tries, misfit, summarise=bool(tries) and rng.random() < SUMMARY_SHARE)


def perfect(problem: FunctionProblem, hidden: FunctionHidden, format: Compact) -> list[Sample]:
    """The perfect trace of a problem as it is, for validation; empty where `plan` would give none."""
    calls = reference_repair(problem, hidden, format)
    if calls is None:
        return []
    try:
        return write(Plan(problem, calls, []), [], format)
    except FormatError:
        return []


def reference_repair(problem: FunctionProblem, hidden: FunctionHidden, format: Compact) -> list[int] | None:
    """The edit calls that turn the broken file into the solution; None where the format cannot write them."""
    if len(problem.files) != 1 or problem.files.keys() != hidden.solution.keys():
        return None
    ((broken,), (right,)) = problem.files.values(), hidden.solution.values()
    repair = _repair(broken, right, format)
    return None if repair is None else repair[0]


def _with_source(problem: FunctionProblem, path: str, source: str) -> FunctionProblem:
    from msgspec.structs import replace

    return replace(problem, files={path: source})


def _repair(broken: str, right: str, format: Compact) -> tuple[list[int], set[int]] | None:
    """The calls that turn `broken` into `right`, and the lines they change."""
    old, new = broken.rstrip("\n").split("\n"), right.rstrip("\n").split("\n")
    if len(old) != len(new):
        return None
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    calls: list[int] = []
    for line in changed:
        if indentation(old[line]) != indentation(new[line]):
            return None
        call = format.edit_call(line, old[line].strip(), new[line].strip())
        if call is None or len(call) > MAX_CALL:
            return None
        calls += call
    return (calls, set(changed)) if 0 < len(changed) <= 3 else None


def _wrong_tries(
    files: dict[str, str], repair: list[int], lines: set[int], format: Compact, rng: random.Random, count: int
) -> list[Try]:
    """Slips that a repairer could make: single-line changes of the broken code, other than the repair."""
    if count == 0:
        return []
    (source,) = files.values()
    near: list[list[int]] = []
    far: list[list[int]] = []
    for drawn, mutant in enumerate(Mutations(source.rstrip("\n")).draw(rng)):
        call = format.edit_call(mutant.line, mutant.good, mutant.bad)
        if call is not None and call != repair and len(call) <= MAX_CALL:
            (near if mutant.line in lines else far).append(call)
        if drawn >= 40 or (len(near) >= count and len(far) >= count):
            break
    tries: list[Try] = []
    while len(tries) < count and (near or far):
        pile = near if near and (rng.random() < SAME_LINE_SHARE or not far) else far
        call = pile.pop()
        (action,) = format.actions(call)
        try:
            tries.append(Try(call, apply_edit(files, action)))
        except EditError:
            continue
    return tries


def _misfit(source: str, format: Compact, rng: random.Random) -> list[int]:
    """An edit whose old text stands in another line; empty where there is none."""
    lines = source.rstrip("\n").split("\n")
    for mutant in Mutations(source.rstrip("\n")).draw(rng):
        span = format.span(mutant.good, mutant.bad)
        line = rng.randrange(len(lines))
        if span is None or line == mutant.line or len(span) > MAX_CALL:
            continue
        call = [format.edit, format.line_token(line), *span, format.end]
        (action,) = format.actions(call)
        if not action.error and action.old not in lines[line].strip():
            return call
    return []


def runs(plan: Plan, limits: Limits) -> list[FunctionRun]:
    """What has to be executed for the plan: each wrong candidate on the visible tests."""
    args = tuple(case.args for case in plan.problem.visible)
    entry = plan.problem.entry.rpartition("::")[2]
    return [FunctionRun(source, entry, args, limits) for t in plan.tries for source in t.files.values()]


def verdict(problem: FunctionProblem, results: Sequence[CallResult]) -> Observation:
    """The first visible test that fails, and what it got."""
    for index, (case, result) in enumerate(zip(problem.visible, results, strict=True)):
        if not passes(case, result):
            return Observation(Tool.test, failing=index, got=got(case, result))
    return Observation(Tool.test)


def write(plan: Plan, observations: Sequence[Observation], format: Compact) -> list[Sample]:
    """The trace, one sample per segment. `observations`: of `plan.tries`, in order."""
    failed = [(t, o) for t, o in zip(plan.tries, observations, strict=True) if o.failing is not None]
    files = plan.problem.files
    writer = _Writer(format, plan.problem)
    writer.prompt(files)
    if plan.broken:
        writer.say(plan.broken, Weight.none)
        writer.say([format.test])
        writer.see(Observation(Tool.edit, error="the old text does not occur"))
    workspace = Files(files)
    undo: list[int] = []
    for number, (attempt, observation) in enumerate(failed):
        writer.say(undo)
        writer.say(attempt.call, Weight.none)
        writer.say([format.test])
        writer.see(observation)
        workspace, undo = Files(attempt.files, (files,)), [format.undo]
        if plan.summarise and number == len(failed) - 1:
            writer.summarise([t.call for t, _ in failed], workspace.files)
    writer.say(undo)
    writer.say([*plan.repair, format.test])
    writer.see(Observation(Tool.test))
    writer.say([format.submit])
    return writer.finish()


class _Writer:
    """Collects the segments of one trace; a segment that outgrows the context is dropped."""

    def __init__(self, format: Compact, problem: FunctionProblem) -> None:
        self.format, self.problem = format, problem
        self.parts: list[tuple[list[int], Weight]] = []
        self.done: list[Sample] = []

    def prompt(self, files: dict[str, str], summary: tuple[int, ...] = ()) -> None:
        self.parts = [(self.format.prompt(self.problem, files, summary), Weight.context)]

    def say(self, ids: list[int], weight: Weight = Weight.action) -> None:
        self.parts.append((ids, weight))

    def see(self, observation: Observation) -> None:
        self.parts.append((self.format.observation(observation), Weight.none))

    def summarise(self, calls: list[list[int]], files: dict[str, str]) -> None:
        """Asks for the summary: the edits tried, without their <edit>; then begins the next segment with it."""
        self.parts.append((self.format.summary_request(), Weight.none))
        summary = [token for call in calls for token in call[1:]]
        self.say([*summary, self.format.done])
        self._close()
        self.prompt(files, tuple(summary))

    def _close(self) -> None:
        sample = Sample.of(*self.parts)
        if len(sample.ids) <= self.format.context:
            self.done.append(sample)

    def finish(self) -> list[Sample]:
        self._close()
        return self.done

"""The environment of kind `steps`: a repository, and instructions that follow one another in one attempt.

The agent is told a step when it has submitted the one before; later steps build on what it left. Each step has hidden tests,
which run on the tree as it was when the step was submitted, and earns its share of the reward. A step that was not reached
earns none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.contracts.messages import Verdict
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Change, Submission
from shared.environments import Brief, Grading, Outcome, Ungradable, Workspace
from shared.environments.repository import RepositoryEnvironment, cheats, checks
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.environments.repository.workspace import RepositoryWorkspace
from shared.environments.steps.problem import MAX_STEPS, StepsHidden, StepsProblem
from shared.environments.steps.workspace import StepsWorkspace, told


class StepsEnvironment(RepositoryEnvironment):
    """See shared.environments.Environment."""

    kind = "steps"
    problem = StepsProblem
    hidden: type[Any] = StepsHidden

    def objection(self, problem: RepositoryProblem) -> str | None:
        assert isinstance(problem, StepsProblem)
        if not 1 <= len(problem.then) < MAX_STEPS:
            return f"field 'then': found {len(problem.then)} steps after the first; allowed: 1 to {MAX_STEPS - 1}"
        for number, step in enumerate(problem.then):
            if not step.prompt.strip() or len(step.prompt) > checks.MAX_PROMPT:
                found = f"{len(step.prompt)} characters" if step.prompt.strip() else "nothing"
                return f"field 'then[{number}].prompt': found {found}; allowed: an instruction of at most {checks.MAX_PROMPT}"
            if wrong := checks.wrong_changes(f"then[{number}].files", step.files):
                return f"field {wrong[0]!r}: {wrong[1]}"
            if blank := next((command for command in step.setup if not command.strip() or "\0" in command), None):
                return f"field 'then[{number}].setup': found {blank!r:.60}; allowed: shell commands"
        return super().objection(problem)

    def brief(self, problem: RepositoryProblem) -> Brief:
        assert isinstance(problem, StepsProblem)
        return told(problem, super().brief(problem), 0)

    async def open(self, problem: RepositoryProblem, sampling: Sampling) -> Workspace:
        inner = await super().open(problem, sampling)
        assert isinstance(problem, StepsProblem)
        assert isinstance(inner, RepositoryWorkspace)
        return StepsWorkspace(inner, problem)

    def given(self, problem: RepositoryProblem, paths: Sequence[str]) -> Mapping[str, str]:
        """The files of later steps, too, are given."""
        assert isinstance(problem, StepsProblem)
        texts = {path: file.text for step in problem.then for path, file in step.files.items() if file.text is not None}
        return {**super().given(problem, paths), **{path: text for path, text in texts.items() if path in paths}}

    def grading_s(self, problem: RepositoryProblem) -> float:
        assert isinstance(problem, StepsProblem)
        return (1 + len(problem.then)) * super().grading_s(problem)

    async def grade(self, items: Sequence[Grading]) -> list[Verdict | Ungradable]:
        """Grade every step that was reached as a submission of its own."""
        single = [
            Grading(item.problem, item.hidden.of(step), Submission(changes=changes))
            for item in items
            for step, changes in enumerate(steps_of(item))
        ]
        answers = iter(await super().grade(single) if single else [])
        return [together(item.hidden, [next(answers) for _ in steps_of(item)]) for item in items]

    async def _explained(self, outcome: Outcome) -> Outcome:
        return outcome  # the verdict's error names the step

    def oracle(self, problem: RepositoryProblem, hidden: Any) -> Submission | None:
        if not all(step.solution for step in hidden.steps):
            return None
        return Submission(changes=hidden.steps[-1].solution, steps=[step.solution for step in hidden.steps])

    def cheats(self, problem: RepositoryProblem, hidden: Any) -> Mapping[str, Submission]:
        """Each step's own cheats, on top of the solutions of the steps before: none may solve its step."""
        found: dict[str, Submission] = {}
        for step in range(len(hidden.steps)):
            single = hidden.of(step)
            for name, cheat in cheats.cheats(single, self.given(problem, cheats.sources(single))).items():
                before = [one.solution for one in hidden.steps[:step]]
                changes = {**(before[-1] if before else {}), **cheat.changes}
                found[f"{name} in step {step + 1}"] = Submission(changes=changes, steps=[*before, changes])
        return found

    def _objected(self, problem: RepositoryProblem, hidden: RepositoryHidden) -> str | None:
        assert isinstance(problem, StepsProblem)
        steps: StepsHidden = hidden  # type: ignore[assignment]
        if len(steps.steps) != 1 + len(problem.then):
            return f"field 'hidden.steps': found {len(steps.steps)}; allowed: one for each of the {1 + len(problem.then)} steps"
        for number in range(len(steps.steps)):
            if wrong := super()._objected(problem, steps.of(number)):
                return wrong.replace("'hidden.", f"'hidden.steps[{number}].")
        return None


def steps_of(item: Grading) -> list[dict[str, Change]]:
    """Return the changes of each step that was reached. A submission that names no steps is the work of the first one."""
    work: Submission = item.submission
    return list(work.steps or [work.changes])[: len(item.hidden.steps)]


def together(hidden: StepsHidden, answers: Sequence[Verdict | Ungradable]) -> Verdict | Ungradable:
    """Return one verdict of those of the steps that were reached. `steps` holds what each step earned of the reward. Solved: every
    step that earns something is."""
    shares = hidden.shares()
    verdicts: list[Verdict] = []
    for answer in answers:
        if isinstance(answer, Ungradable):
            return Ungradable(f"step {len(verdicts) + 1}: {answer.reason}")
        verdicts.append(answer)
    earned, shut = [], False
    for step, tests in enumerate(hidden.steps):
        solved = step < len(verdicts) and verdicts[step].solved
        earned.append(shares[step] if solved and not shut else 0.0)
        shut = shut or (tests.gate and not solved)
    names = [len({*tests.fail_to_pass, *tests.pass_to_pass}) for tests in hidden.steps]
    reached = [f"step {number}: {one.passed} of {one.total} tests passed" for number, one in enumerate(verdicts, 1)]
    missed = [f"step {number}: not reached" for number in range(len(verdicts) + 1, len(names) + 1)]
    return Verdict(
        solved=all(earned[step] > 0 for step, share in enumerate(shares) if share),
        passed=sum(one.passed for one in verdicts),
        total=sum(names),
        error="; ".join(f"step {number}: {one.error}" for number, one in enumerate(verdicts, 1) if one.error),
        failed=[name for one in verdicts for name in one.failed],
        notes=[*reached, *missed, *(note for one in verdicts for note in one.notes)],
        steps=earned,
    )

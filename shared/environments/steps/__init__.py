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
from shared.environments.admission import Candidate, admitted
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

    async def admit(self, pairs: Sequence[tuple[Any, Any]]) -> list[Outcome]:
        """Admit every step that counts as a problem of its own: a cheat that solves one step earns its share of the reward."""

        def parts(problem: Any, hidden: Any) -> dict[str, Candidate]:
            return {f"step {step + 1}": one for step, one in self._steps(problem, hidden).items()}

        return await admitted(self, pairs, self._objected, parts, super().grade)

    def oracle(self, problem: RepositoryProblem, hidden: Any) -> Submission | None:
        if not all(step.solution for step in hidden.steps):
            return None
        return Submission(changes=hidden.steps[-1].solution, steps=[step.solution for step in hidden.steps])

    def cheats(self, problem: RepositoryProblem, hidden: Any) -> Mapping[str, Submission]:
        """Return the cheats of every step that counts, each after the solutions of the steps before."""
        return {
            f"{name} in step {step + 1}": Submission(
                changes=work.changes, steps=[*(one.solution for one in hidden.steps[:step]), work.changes]
            )
            for step, part in self._steps(problem, hidden).items()
            for name, work in part.cheats.items()
        }

    def _steps(self, problem: RepositoryProblem, hidden: Any) -> dict[int, Candidate]:
        """Return the steps (0 is the first) that earn something or are gates, each as a problem of kind `repository`. Doing nothing
        leaves what the step begins with where those before are solved: their solution and the files that are put into the tree.
        What the commands of `setup` make is not known before they run."""
        assert isinstance(problem, StepsProblem)
        proven = all(step.solution for step in hidden.steps)
        found: dict[int, Candidate] = {}
        for step, tests in enumerate(hidden.steps):
            if not (hidden.shares()[step] or tests.gate):
                continue
            begun = _begun(problem, hidden, step)
            single = hidden.of(step)
            paths = cheats.sources(single)
            texts = {**self.given(problem, paths), **{path: begun[path].text for path in paths if path in begun}}
            given = {path: text for path, text in texts.items() if text is not None}
            tricks = {
                name: Submission(changes={**begun, **work.changes})
                for name, work in cheats.cheats(single, given).items()
            }
            oracle = Submission(changes=tests.solution) if proven else None
            found[step] = Candidate(problem, single, oracle, tricks, Submission(changes=begun))
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


def _begun(problem: StepsProblem, hidden: StepsHidden, step: int) -> dict[str, Change]:
    """Return how the tree that a step (0 is the first) begins with differs from the problem's own tree."""
    if step == 0:
        return {}
    earlier = {path: file for one in problem.then[: step - 1] for path, file in one.files.items()}
    return {**earlier, **hidden.steps[step - 1].solution, **problem.then[step - 1].files}


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

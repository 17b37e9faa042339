"""Problems of kind `steps`: one repository, several instructions one after another, and hidden tests for each."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.contracts.trajectory import Change
from shared.environments.repository.levels import levels
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.problems.schema import Hidden

MAX_STEPS = 50


class Then(msgspec.Struct, frozen=True, kw_only=True):
    """A step after the first. `prompt`: its instruction. `files`: path -> file, put into the tree when the step begins.
    `setup`: shell commands that run in the sandbox behind that."""

    prompt: str
    files: dict[str, Change] = {}
    setup: list[str] = []


class StepsProblem(RepositoryProblem, frozen=True, kw_only=True):
    """The public part. As `repository`; `prompt` is the instruction of the first step, and the limits are those of all steps
    together. `then`: the later steps, in order."""

    kind: Literal["steps"] = "steps"  # type: ignore[assignment]
    then: list[Then]

    @property
    def task(self) -> str:
        return "\n\n".join([self.prompt, *(step.prompt for step in self.then)])

    def levels(self, hidden: StepsHidden) -> list[str]:  # type: ignore[override]
        return levels(self, hidden.of(len(hidden.steps) - 1))


class StepTests(msgspec.Struct, frozen=True, kw_only=True):
    """The hidden tests of one step: fields of `RepositoryHidden`. They run on the tree as it was when the step was submitted.

    `solution`: all that differs from the problem's own tree once this step and those before it are solved.
    `gate`: where this step is not solved, the later ones earn nothing."""

    fail_to_pass: list[str]
    pass_to_pass: list[str] = []
    tests: dict[str, Change] = {}
    runner: Literal["pytest", "unittest", "node", "go", "cargo"] = "pytest"
    command: list[str] = []
    protected: list[str] = []
    solution: dict[str, Change] = {}
    gate: bool = False


class StepsHidden(Hidden, frozen=True, kw_only=True):
    """The hidden part. `steps`: one for each step. `reward`: `mean`: each solved step earns the same share of the reward; `final`:
    the last one earns all of it."""

    kind: Literal["steps"] = "steps"
    steps: list[StepTests]
    reward: Literal["mean", "final"] = "mean"

    def of(self, step: int) -> RepositoryHidden:
        """Return the hidden part of one step (0 is the first), as of a problem of kind `repository`."""
        one = self.steps[step]
        fields = {name: getattr(one, name) for name in one.__struct_fields__ if name != "gate"}
        return RepositoryHidden(id=f"{self.id}/{step + 1}", **fields)

    def shares(self) -> list[float]:
        """Return the share of the reward that each step earns where it is solved; together 1."""
        count = len(self.steps)
        return [0.0] * (count - 1) + [1.0] if self.reward == "final" else [1 / count] * count

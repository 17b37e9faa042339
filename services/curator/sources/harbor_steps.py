"""Harbor tasks as in the source `harbor`, but a task of several steps becomes one problem of kind `steps`.

One attempt is told the steps one after another, and earns the reward of each. Of Harbor's own settings, a step with a
`min_reward` above 0 is a gate, and `multi_step_reward_strategy` is the problem's `reward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from services.curator.sources import Found, Refused, harbor
from services.curator.sources.clones import Clones
from shared.contracts.trajectory import Change
from shared.environments.repository import patches
from shared.environments.repository.problem import RepositoryHidden, RepositoryLimits, RepositoryProblem
from shared.environments.repository.trees import File, Link, from_folder
from shared.environments.steps.problem import StepsHidden, StepsProblem, StepTests, Then
from shared.objects import Objects


def read(path: Path, clones: Clones, objects: Objects) -> Iterator[Found]:
    """`path`: a task, or a folder of tasks. Raises ProblemError where there is none."""
    for task in harbor.tasks_in(path):
        has_image = bool(clones.image(task.resolve().name))
        try:
            facts = harbor.facts_of(task, has_image)
            steps = harbor.steps_of(task, facts)
        except harbor.UNREADABLE as error:
            yield Found(task.resolve().name, note=harbor.said(error))
            continue
        if len(steps) < 2:
            yield from harbor.of_task(task, objects, has_image)
            continue
        try:
            yield _joined(task, facts, steps, objects, has_image)
        except harbor.UNREADABLE as error:
            yield Found(task.resolve().name, note=harbor.said(error))


def _joined(task: Path, facts: Mapping[str, Any], steps: list[harbor.Step], objects: Objects, has_image: bool) -> Found:
    name = task.resolve().name
    reward = _reward(facts.get("multi_step_reward_strategy") or "mean")
    tree, place = harbor.start(task, facts, has_image)
    first = harbor.prepared(steps[0], harbor.Moved(place), tree)
    tree, solved = dict(tree), True
    singles: list[tuple[RepositoryProblem, RepositoryHidden]] = []
    changes: list[dict[str, Change]] = []
    notes: list[str] = []
    for step in steps:
        found, tree = harbor.problem_of(f"{name}/{step.name}", step, facts, tree, place, task, objects)
        singles.append((found.problem, found.hidden))
        notes += [found.note] if found.note and found.note not in notes else []
        solved = solved and bool(found.hidden.solution)
        changes.append(patches.changes(first, tree) if solved else {})
    public = singles[0][0]
    fields = {field: getattr(public, field) for field in public.__struct_fields__ if field != "kind"}
    fields |= {"id": name, "origin": f"harbor:{name}", "limits": _limits([one.limits for one, _ in singles])}
    then = [_then(step, one.prompt, place) for step, (one, _) in zip(steps[1:], singles[1:], strict=True)]
    tests = [_tests(step, secret, change) for step, (_, secret), change in zip(steps, singles, changes, strict=True)]
    problem = StepsProblem(**fields, then=then)
    return Found(name, problem, StepsHidden(id=name, steps=tests, reward=reward), "; ".join(notes))


def _reward(strategy: object) -> Literal["mean", "final"]:
    if strategy == "mean" or strategy == "final":
        return strategy
    raise Refused(f"multi_step_reward_strategy: found {strategy!r:.40}; allowed: mean, final")


def _limits(each: list[RepositoryLimits]) -> RepositoryLimits:
    """Return the limits of all steps together."""
    whole = all(one.seconds for one in each)  # a step without a limit: the task has none
    return msgspec.structs.replace(
        each[0],
        seconds=sum(one.seconds for one in each) if whole else 0.0,
        grading_s=max(one.grading_s for one in each),
    )


def _then(step: harbor.Step, prompt: str, place: str) -> Then:
    """Return a step after the first, with what its folder `workdir` puts into the tree."""
    moved = harbor.Moved(place)
    folder = step.folder / "workdir"
    added: dict[str, File | Link] = dict(from_folder(folder)) if folder.is_dir() else {}
    script = added.pop("setup.sh", None)
    files: dict[str, Change] = {}
    for path, entry in added.items():
        if isinstance(entry, Link):
            raise Refused(f"steps/{step.name}/workdir/{path}: is a link; allowed: files")
        files[path] = patches.change_of(entry)
    setup = [moved.file(script).data.decode()] if isinstance(script, File) else []
    return Then(prompt=prompt, files=files, setup=setup)


def _tests(step: harbor.Step, hidden: RepositoryHidden, solution: dict[str, Change]) -> StepTests:
    names = ("fail_to_pass", "pass_to_pass", "tests", "runner", "command", "protected")
    least = step.facts.get("min_reward")
    wanted = list(least.values()) if isinstance(least, dict) else [least]
    return StepTests(
        **{name: getattr(hidden, name) for name in names},
        solution=solution,
        gate=any(isinstance(one, int | float) and one > 0 for one in wanted),
    )

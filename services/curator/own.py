"""`etude tasks import`: problems of a user's file or of a source, held against a policy's chat format and their kind's gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from services.curator import sources
from services.curator.sources import Found
from services.curator.sources.clones import Clones
from shared.environments import Outcome, Places
from shared.environments.admitting import admitted
from shared.environments.agent import with_agent
from shared.environments.places import places_of_files
from shared.environments.progress import shown
from shared.environments.registry import Environments, UnknownKind
from shared.environments.repository.checks import wrong_image
from shared.environments.repository.problem import RepositoryProblem
from shared.environments.steps.problem import StepsProblem
from shared.objects.directory import DirectoryObjects
from shared.problems import Problem, ProblemError
from shared.problems.importing import STORE, Line, read_lines
from shared.renderers import Renderer
from shared.renderers.fitting import Fitting, fit, gated
from shared.settings import ServiceSettings, read
from shared.visible import visible

_ROWS = 200  # shown one by one; of more only the refused ones


@dataclass(slots=True)
class Import:
    """`lines`: what can be checked. `rows`: every row of a source; empty for a file of one's own."""

    lines: list[Line]
    rows: list[Found] = field(default_factory=list)

    def table(self, fitting: Fitting) -> Table:
        """A line for each row: imported, or refused and why."""
        table = Table("row", "outcome", "why", title=f"{len(fitting.lines)} of {len(self.rows)} rows imported")
        for row in self.rows:
            refusal = _refusal(row.problem.id, fitting) if row.problem else row.note
            if refusal or len(self.rows) <= _ROWS:
                table.add_row(visible(row.row), "refused" if refusal else "imported", visible(refusal or row.note))
        return table


def _refusal(problem: str, fitting: Fitting) -> str:
    """Why the problem is not left; empty: it is."""
    mark = f"problem {problem!r}: "
    return next((reason.partition(mark)[2] for reason in (*fitting.refused, *fitting.failed) if mark in reason), "")


def from_source(name: str, path: Path, repos: Path | None, images: Path | None = None, agent: str = "") -> Import:
    """`images`: a file that `etude tasks images --out` has written: a problem begins with the image of its row. `agent`: the
    command that works in every problem, which gets kind `agent`; empty: none. Raises ValueError, and ProblemError where no row
    can be imported."""
    clones = Clones(repos, _images(images) if images is not None else {})
    rows = [
        _with_agent(_with_image(row, clones), agent)
        for row in sources.named(name)(path, clones, DirectoryObjects(STORE))
    ]
    return Import([Line(number, row.problem, row.hidden) for number, row in enumerate(rows, 1) if row.problem], rows)


def _images(path: Path) -> dict[str, str]:
    """Raises ProblemError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError) as error:
        raise ProblemError(
            f"--images {path}: found no JSON object of texts ({error}); allowed: a file of `etude tasks images --out`"
        ) from None
    if wrong := next((f"{row}: {why}" for row, image in found.items() if (why := wrong_image(image))), ""):
        raise ProblemError(f"--images {path}: {wrong}")
    return found


def _with_image(row: sources.Found, clones: Clones) -> sources.Found:
    if row.problem is None or not (image := clones.image(row.row)):
        return row
    if not isinstance(row.problem, RepositoryProblem):
        raise ProblemError(
            f"--images: names an image for row {row.row!r:.80} of kind {row.problem.kind!r}; allowed: rows of repositories"
        )
    return replace(row, problem=msgspec.structs.replace(row.problem, image=image))


def _with_agent(row: sources.Found, command: str) -> sources.Found:
    if row.problem is None or not command:
        return row
    if not isinstance(row.problem, RepositoryProblem):
        raise ProblemError(
            f"--agent: found a source of kind {row.problem.kind!r}; allowed: sources of repositories. The agent of other kinds is "
            "their environment's"
        )
    if isinstance(row.problem, StepsProblem):
        raise ProblemError(
            f"--agent: found the row {row.row!r:.80} of several steps; allowed: one instruction. The source `harbor` makes a "
            "problem of each step"
        )
    problem, hidden = with_agent(row.problem, row.hidden, command)
    return replace(row, problem=problem, hidden=hidden)


def from_file(path: Path) -> Import:
    """Raises ProblemError."""
    return Import(read_lines(path, DirectoryObjects(STORE)))


def checked(
    path: Path,
    lines: Sequence[Line],
    chat: Callable[[], Renderer],
    named: bool,
    sandbox: str,
    enough: Callable[[list[tuple[Any, Any]]], object],
) -> Fitting:
    """Return what fits and passes its kind's gate, and why each other one does not. `named`: the user named the policy, so
    every problem is held against its chat format; else only those are that can be told without messages, as the shipped policy
    needs it. `enough`: called with those that are to be run, before they are. Raises SandboxUnavailable, and ProblemError where
    nothing is left."""
    environments = Environments(Places())
    spoken: list[Line] = []
    others: list[Line] = []
    for line in lines:
        (spoken if named or _needs_no_messages(line.problem, environments) else others).append(line)
    parts = []
    told = fit(spoken, chat()) if spoken else None
    taken = _unspoken(others)
    if pairs := [*(told.pairs if told else []), *taken.pairs]:
        enough(pairs)
    if told:
        parts.append(gated(path, told, asyncio.run(_gate(path, told.pairs, sandbox)), chat()))
    if others:
        parts.append(_passing(taken, asyncio.run(_gate(path, taken.pairs, sandbox))))
    whole = Fitting(
        parts[0].format if parts else "",
        sorted((line for part in parts for line in part.lines), key=lambda line: line.number),
        [reason for part in parts for reason in part.refused],
        [problem for part in parts for problem in part.beyond],
        [reason for part in parts for reason in part.failed],
    )
    if not whole.lines and whole.without:
        raise ProblemError(f"{path}: {whole.refusal()}")
    return whole


def _needs_no_messages(problem: Problem, environments: Environments) -> bool:
    """Return whether an agent can be told the problem without messages. False also where it cannot be told at all."""
    try:
        environment = environments.of(problem)
    except UnknownKind:
        return False
    return environment.objection(problem) is None and environment.brief(problem).subject is not None


def _unspoken(lines: Sequence[Line]) -> Fitting:
    """Those that their environment takes, whatever policy comes."""
    environments, fitting = Environments(Places()), Fitting("their environment", [], [], [])
    for line in lines:
        try:
            reason = environments.of(line.problem).objection(line.problem)
        except UnknownKind as error:
            reason = str(error)
        if reason:
            fitting.refused.append(f"line {line.number}: problem {line.problem.id!r}: {reason}")
        else:
            fitting.lines.append(line)
    return fitting


def _passing(taken: Fitting, outcomes: Sequence[Outcome]) -> Fitting:
    """Drop those that failed admission. `outcomes`: one for each of `taken.lines`."""
    passed = Fitting(taken.format, [], taken.refused, [])
    for line, outcome in zip(taken.lines, outcomes, strict=True):
        if outcome.reason:
            passed.failed.append(f"line {line.number}: problem {line.problem.id!r}: {outcome.reason}")
        else:
            passed.lines.append(Line(line.number, outcome.problem, outcome.hidden))
    return passed


async def _gate(path: Path, pairs: list[tuple[Any, Any]], sandbox: str) -> list[Outcome]:
    """In the order of the problems, each by its kind's own gate."""
    with shown(str(path), len(pairs)) as progress:
        async with places_of_files(read(ServiceSettings), 2, sandbox) as places:
            return await admitted(Environments(places), pairs, progress)

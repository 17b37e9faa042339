"""Development figures of a checkpoint on the dev split: pass@1, first-edit accuracy, how it tests and retries.

The rules of a run's agent with `sampling.retry = "append"` (edits and undos until <test> or <submit>; at a cap the work
counts as it is), in lock-step on one core. Held-out problems are never touched here: they are for the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from services.trainer.base import pack as packs
from services.trainer.base.decode import LockStep
from services.trainer.base.traces import verdict
from shared.contracts.run import Sampling
from shared.environments.function.actions import Observation, Tool
from shared.environments.function.edits import EditError, Files
from shared.environments.function.runs import passes
from shared.model import Transformer, load_checkpoint
from shared.problems import Case, FunctionHidden, FunctionProblem
from shared.renderers.formats.compact_1 import Compact
from shared.sandbox import FunctionRun, Limits, connect
from shared.sandbox.pool import FunctionPool

_LIMITS = Sampling(retry="append")
MAX_EDITS, MAX_TURNS, ROOM = _LIMITS.max_edits, _LIMITS.max_turns, _LIMITS.max_completion_tokens
T = TypeVar("T")
MAX_BROKEN = 3  # as in the agent of a run
BATCH = 48  # problems in lock-step


@dataclass(slots=True)
class Session:
    problem: FunctionProblem
    hidden: FunctionHidden
    workspace: Files
    generation: list[int] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)  # observation tokens to be fed
    first: dict[str, str] | None = None
    failed: set[str] = field(default_factory=set)  # files that a test objected to, the given ones among them
    untested: int = 0  # edits since the last test
    forgiven_turns: int = 0  # they only came back to what had failed
    forgiven_edits: int = 0
    edits: int = 0
    tests: int = 0
    turns: int = 0
    broken: int = 0
    tokens: int = 0
    end: str = ""

    def __post_init__(self) -> None:
        self.failed.add(self.state)

    @property
    def state(self) -> str:
        return next(iter(self.workspace.files.values()))


@dataclass(frozen=True, slots=True)
class Probe:
    """Means over attempts. `stderr`: of pass_at_1, over problems. `best`: any of the samples of a problem."""

    problems: int
    samples: int
    pass_at_1: float
    stderr: float
    best: float
    first_edit: float
    submitted: float
    tests: float
    edits: float
    tokens: float


@torch.no_grad()
def probe(
    checkpoint: Path, pack: Path, *, split: str = "dev", count: int = 256, samples: int = 4, seed: int = 1,
    temperature: float = 1.0, sandbox: str = "bubblewrap", kinds: dict[str, list[float]] | None = None,
) -> Probe:  # fmt: skip
    """`kinds`, when given, is filled with the attempts' success by kind of bug."""
    if split == "held_out":
        raise ValueError("split: found 'held_out'; development figures come from dev")
    model, format = load_checkpoint(checkpoint), Compact.load(checkpoint)
    pairs = [pair for pair in packs.problems(pack, split) if format.fits(pair[0], ROOM)]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [pairs[i] for i in order[:count]]
    sampler = torch.Generator().manual_seed(seed)
    functions = connect(sandbox, 2)
    try:
        sessions: list[Session] = []
        for part in _chunks(pairs, BATCH):
            sessions += _attempts(model, format, part, samples, temperature, sampler, functions)
        return _figures(sessions, samples, functions, kinds)
    finally:
        functions.close_sync()


def _chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _attempts(
    model: Transformer,
    format: Compact,
    pairs: Sequence[tuple[FunctionProblem, FunctionHidden]],
    samples: int,
    temperature: float,
    sampler: torch.Generator,
    functions: FunctionPool,
) -> list[Session]:
    sessions = [Session(p, h, Files(dict(p.files))) for p, h in pairs for _ in range(samples)]
    engine = LockStep(model, [format.prompt(s.problem, s.problem.files) for s in sessions], ROOM)
    alive = list(range(len(sessions)))
    while alive:
        probabilities = (engine.logits_BV / max(temperature, 1e-6)).softmax(-1)
        drawn = torch.multinomial(probabilities, 1, generator=sampler)[:, 0].tolist()
        fed, testing = [], []
        for row, index in enumerate(alive):
            s = sessions[index]
            if s.queue:
                token = s.queue.pop(0)
            else:
                token = drawn[row]
                s.generation.append(token)
                if token in format.stop_tokens and _act(s, format):
                    testing.append(s)
            s.tokens += 1
            if s.tokens >= ROOM and not s.end:
                s.end = "context_full"
            fed.append(token)
        for s, results in zip(testing, functions.run_sync([_visible(s) for s in testing]), strict=True):
            said = verdict(s.problem, results)
            if said.failing is not None:
                s.failed.add(s.state)
            s.queue = format.observation(said)
        kept = [row for row, index in enumerate(alive) if not sessions[index].end]
        if len(kept) < len(alive):
            alive = [alive[row] for row in kept]
            fed = [fed[row] for row in kept]
            if alive:
                engine.keep(kept)
        if alive:
            engine.step(torch.tensor(fed))
    return sessions


def _act(s: Session, format: Compact) -> bool:
    """Executes the calls of a finished generation. True where the visible tests have to answer."""
    s.turns += 1
    actions, s.generation = format.actions(s.generation), []
    for action in actions:
        try:
            if action.error:
                raise EditError(action.error)
            if action.tool is Tool.submit:
                s.end = "submitted"
                return False
            if action.tool is Tool.test:
                s.tests += 1
                edits, s.untested = s.untested, 0
                if s.state in s.failed and s.forgiven_turns < _LIMITS.max_repeats:
                    s.forgiven_turns, s.forgiven_edits = s.forgiven_turns + 1, s.forgiven_edits + edits
                if s.turns - s.forgiven_turns >= MAX_TURNS:
                    s.end = "turn_limit"
                return not s.end
            if action.tool is Tool.edit:
                if s.edits - s.forgiven_edits >= MAX_EDITS:
                    s.end = "turn_limit"
                    return False
                s.workspace = s.workspace.edit(action)
                s.edits, s.untested = s.edits + 1, s.untested + 1
                s.first = s.first or s.workspace.files
            elif action.tool is Tool.undo:
                s.workspace = s.workspace.undo()
            else:
                raise EditError("a summary was not asked for")
        except EditError as error:
            s.broken += 1
            s.end = "format_errors" if s.broken > MAX_BROKEN else ""
            s.queue = format.observation(Observation(action.tool, error=str(error)))
            return False
    return False


def _run(problem: FunctionProblem, files: dict[str, str], cases: Sequence[Case]) -> FunctionRun:
    limits = Limits(time_s=problem.limits.time_s, call_s=problem.limits.of_a_call, memory_mb=problem.limits.memory_mb)
    entry = problem.entry.rpartition("::")[2]
    return FunctionRun(next(iter(files.values())), entry, tuple(c.args for c in cases), limits)


def _visible(s: Session) -> FunctionRun:
    return _run(s.problem, s.workspace.files, s.problem.visible)


def _solved(sessions: Sequence[Session], states: Sequence[dict[str, str]], functions: FunctionPool) -> list[bool]:
    cases = [[*s.problem.visible, *s.hidden.cases] for s in sessions]
    results = functions.run_sync([_run(s.problem, f, c) for s, f, c in zip(sessions, states, cases, strict=True)])
    return [
        all(passes(c, r) for r, c in zip(result, case, strict=True))
        for result, case in zip(results, cases, strict=True)
    ]


def _figures(
    sessions: list[Session], samples: int, functions: FunctionPool, kinds: dict[str, list[float]] | None
) -> Probe:
    solved = torch.tensor(_solved(sessions, [s.workspace.files for s in sessions], functions)).float()
    first = torch.tensor(_solved(sessions, [s.first or s.problem.files for s in sessions], functions)).float()
    per_problem = solved.view(-1, samples)
    if kinds is not None:
        for s, success in zip(sessions, solved.tolist(), strict=True):
            kinds.setdefault(s.hidden.bug or "unknown", []).append(success)

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(sessions)

    return Probe(
        problems=len(per_problem),
        samples=samples,
        pass_at_1=float(solved.mean()),
        stderr=float(per_problem.mean(1).std() / len(per_problem) ** 0.5),
        best=float(per_problem.amax(1).mean()),
        first_edit=float(first.mean()),
        submitted=mean(s.end == "submitted" for s in sessions),
        tests=mean(s.tests for s in sessions),
        edits=mean(s.edits for s in sessions),
        tokens=mean(s.tokens for s in sessions),
    )

"""Environments: the kinds of problems that an agent can practise on.

An environment says what the agent is told, runs its tools in a sandbox of one attempt, and grades what the attempt
submits. Rollout workers, graders, the curator and the evaluator all use the same object, found by a problem's `kind`
(`registry`). None of them knows a kind, a tool or a file of a problem by name.

Invariants:
- A workspace answers every call of a turn with one result, in the order of the calls.
- Infrastructure never reads as the agent's doing: what the machine cannot do raises InfrastructureError.
- A submission is data. Graders apply it to a fresh copy of the problem; no process of the attempt outlives it.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from shared.contracts.messages import StopReason, Verdict
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Submission
from shared.problems.schema import Hidden, Problem

if TYPE_CHECKING:
    from shared.objects import Objects
    from shared.sandbox import Functions
    from shared.sandbox.bases import Held
    from shared.sandbox.contract import Credential, Decision, Sandboxes

P = TypeVar("P", bound=Problem)
H = TypeVar("H", bound=Hidden)


class InfrastructureError(Exception):
    """The machine failed, not the agent; the text says what. The attempt has no outcome and is asked for again."""


class SandboxGone(InfrastructureError):
    """No sandbox works on this machine any more: the service takes no further attempt until one does."""


class Unrestorable(Exception):
    """An attempt cannot be continued from what was saved of it; the text says why. It begins from its task."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model is told of it. `parameters`: the JSON schema of an object. `effect`: what a call does to the
    attempt; `ends` submits the work, `reverts` takes a change back, `runs` executes what the agent wrote (and may do anything),
    `notes` keeps a note of the agent's. `sent`: the whole tool as a client of an API sent it, with fields and an order of its
    own; templates print it as it is. None: there was no client."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    effect: Literal["reads", "changes", "reverts", "tests", "runs", "notes", "ends"] = "reads"
    sent: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Message:
    role: Literal["system", "user"]
    content: str


@dataclass(frozen=True, slots=True)
class Brief:
    """The task as an agent reads it at the beginning of a segment. `subject`: the problem itself, for a renderer without messages
    (`compact-1`). None: the task can be told only by `messages`."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    subject: Any = None

    def tool(self, name: str) -> ToolSpec | None:
        return next((tool for tool in self.tools if tool.name == name), None)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call, read from the sampled tokens [start, end) of a completion. `error`: why it cannot be executed as it is
    written, for the model to read; None: it can."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    start: int
    end: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one call, or to a message without a call (`call` is empty then).

    `ok`: False where the call could not be read or not be executed as written; it changed nothing then. A command that
    fails is a result like any other, with ok=True.
    `ran`: False where the workspace passed over the call because of an earlier one of the same turn. `ok` then only marks the
    call's tokens in the trajectory; the call is not counted.
    `passed`: of a test, whether everything passed; None for any other tool.
    `detail`: what a renderer of the environment's own reads instead of `text`.
    `fault`: what the turn did wrong (shared.contracts.trajectory.Span).
    `free`: the turn does not count against the limit of turns.
    `restart`: the agent forgets what was said and begins a new segment with the task alone; this result is not shown.
    `ends`: the attempt is over, and why.
    """

    call: str = ""
    tool: str = ""
    text: str = ""
    ok: bool = True
    ran: bool = True
    passed: bool | None = None
    detail: Any = None
    fault: str = ""
    free: bool = False
    restart: bool = False
    ends: StopReason | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one attempt; at a limit the work is submitted as it is. 0 in `turns` or `tokens` allows none. 0 in another field
    means no limit.

    `tokens`: sampled and observed, after the first prompt. `turn_tokens`: sampled in one turn. `seconds`: wall clock.
    `broken_in_a_row`: the attempt ends at so many turns in a row with neither a readable call nor a text for people.
    `broken_total`: the attempt ends when more calls than this were not ok.
    """

    turns: int
    tokens: int
    turn_tokens: int = 0
    seconds: float = 0.0
    broken_in_a_row: int = 3
    broken_total: int = 0


class Workspace(Protocol):
    """One attempt's state of the problem; owns its sandbox. Used by one task at a time. Subclass it to inherit defaults: `final`
    ends the attempt, `close` does nothing, `save` cannot."""

    limits: Limits
    notes: dict[str, str]
    """Notes that the trajectory keeps for people and for behaviour terms, such as the to-do list."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """Return the requests to the network so far, for the trajectory; by default none."""
        return ()

    @abstractmethod
    def brief(self, *, continues: bool = False) -> Brief:
        """Return the task as it stands now. `continues`: a self-summary goes with it, so the work so far is kept."""
        ...

    @abstractmethod
    async def call(self, calls: Sequence[Call]) -> list[Result]:
        """Execute the calls of one turn and return one result each, in their order. Raises InfrastructureError."""
        ...

    async def final(self, text: str) -> Result | None:
        """Take a message without a call. None ends the attempt, and the work is submitted; a result goes back to the model."""
        return None

    @abstractmethod
    async def submission(self) -> Submission:
        """Return the work as it is, as data. May be asked for after any end. Raises InfrastructureError."""
        ...

    async def save(self) -> bytes | None:
        """Return the state as data, so that `restore` can set a new workspace to it, on any machine. Called between two turns.
        None: it cannot be restored as it is, now or ever. Raises InfrastructureError."""
        return None

    async def restore(self, saved: bytes) -> Brief:
        """Set a workspace that was just opened to the state that was saved, and return the brief that was told last. Raises
        Unrestorable, InfrastructureError."""
        raise Unrestorable("this kind of workspace cannot be restored")

    async def close(self) -> None:
        """End every process of the attempt and remove its files. Repeating it does nothing."""
        return None


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(frozen=True, slots=True)
class Way:
    """How an agent of others reaches the model: `connect` opens a connection that speaks HTTP, `key` is the attempt's."""

    key: str
    connect: Connect


@runtime_checkable
class Driven(Protocol):
    """A workspace with an agent of its own: the worker drives no agent loop in it, and records what the agent asks for."""

    limits: Limits
    notes: dict[str, str]

    async def drive(self, way: Way) -> None:
        """Let the agent work until it leaves. Cancelled at a limit of the attempt; the work is then submitted as it is. Raises
        InfrastructureError."""


@dataclass(frozen=True, slots=True)
class Ungradable:
    """The answer of a grader that could not grade an attempt, with the reason. The machine failed, not the agent: the attempt gets
    no reward and is graded again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of admission. `reason`: why the problem is refused; empty: it is admitted. `problem`: as it is admitted; an
    environment may add to it. `proven`: a solution was graded and passed. `refused_by`: the submission whose grading refused
    the problem ("oracle", "no-op", "cheat 'NAME'"); empty: no grading did."""

    problem: Any
    hidden: Any
    reason: str = ""
    proven: bool = False
    refused_by: str = ""


@dataclass(frozen=True, slots=True)
class Grading:
    """One submission to grade."""

    problem: Any
    hidden: Any
    submission: Submission


@dataclass(slots=True)
class Places:
    """The means that a service lends its environments. None: the service does not have them.

    `cache`: a folder of this process's machine for what can be made again (unpacked trees, indexes).
    `bases`: the root file systems that sandboxes begin with; None: there are none. `image`: what a sandbox begins with where the
    problem names nothing; empty: the programs of this machine. `credentials`: those that problems may name.
    `agents`: a folder with agents of others, which sandboxes of kinds `agent` and `verifiers` see read-only; None:
    there is none.
    `counted`: called after each run of visible tests with "sandbox" or "memory" and the seconds it took.
    """

    functions: Functions | None = None
    sandboxes: Sandboxes | None = None
    objects: Objects | None = None
    cache: Path = field(default_factory=lambda: Path(".etude/cache/environments"))
    bases: Held | None = None
    image: str = ""
    credentials: Mapping[str, Credential] = field(default_factory=dict)
    agents: Path | None = None
    counted: Any = None


class Environment(Protocol[P, H]):
    """One kind of problem. Made once per process, by `registry.Environments`, with the places of its service. Subclass it to
    inherit defaults: `objection` and `oracle` None, `ready` at once, `given` and `cheats` empty, `grading_s` 0, `admit` the
    common gate."""

    kind: str
    problem: type[P]
    hidden: type[H]

    def __init__(self, places: Places) -> None:
        """Keep what is needed of `places`. It starts nothing."""

    def objection(self, problem: P) -> str | None:
        """Return why no attempt at the problem can be made: the field, what was found, what is allowed. None: one can.
        Never raises."""
        return None

    @abstractmethod
    def brief(self, problem: P) -> Brief:
        """Return what an agent is told at the beginning of an attempt."""
        ...

    async def ready(self) -> None:
        """Run a canary in a sandbox of this kind. Raises SandboxUnavailable where it does not work."""
        return None

    @abstractmethod
    async def open(self, problem: P, sampling: Sampling) -> Workspace:
        """Return a workspace for one attempt. `sampling`: the run's limits; a problem's own limits win. Raises
        InfrastructureError."""
        ...

    def given(self, problem: P, paths: Sequence[str]) -> Mapping[str, str]:
        """Return the text of the files as the problem gives them, of those paths that it has as text."""
        return {}

    def grading_s(self, problem: P) -> float:
        """Return how many seconds one grading may take. 0: gradings are short; nobody has to wait longer for them."""
        return 0.0

    @abstractmethod
    async def grade(self, items: Sequence[Grading]) -> list[Verdict | Ungradable]:
        """Return one answer for each item, in order, from fresh sandboxes. Raises SandboxUnavailable where none works."""
        ...

    def oracle(self, problem: P, hidden: H) -> Submission | None:
        """Return the submission that solves the problem. None: none is known."""
        return None

    def cheats(self, problem: P, hidden: H) -> Mapping[str, Submission]:
        """Return submissions that solve nothing and must score 0 at admission, each by the name of its trick."""
        return {}

    async def admit(self, pairs: Sequence[tuple[P, H]]) -> list[Outcome]:
        """Return one outcome for each problem, in order. Raises SandboxUnavailable."""
        from shared.environments.admission import admitted

        return await admitted(self, pairs)

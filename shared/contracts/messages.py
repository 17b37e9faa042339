"""The messages, one structure each. 64 KiB at most when encoded; anything bigger is a `Ref`.

All are frozen, keyword-only and tagged by their name (`type` in the JSON), so that a topic can carry a union. Readers
ignore unknown fields of the same major version (see `codec`). Every message names its run. Integers that a ledger keeps
or counts with are bounded: beyond the bounds a message is unreadable, and no reader has to expect it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from shared.contracts.life import Action, RunState
from shared.contracts.run import Purpose, Ref, Sampling

MOST = 2**53  # every reader of JSON and both databases keep integers up to here exactly
Number = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
NumberOrNone = Annotated[int, msgspec.Meta(ge=-1, le=MOST)]  # -1: none, or not said
Signed = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    run: str


class StopReason(StrEnum):
    """Why an attempt ended. All but `infrastructure` are the agent's doing and are scored."""

    submitted = "submitted"
    turn_limit = "turn_limit"  # also: edit limit; the work is submitted as it is
    context_full = "context_full"
    format_errors = "format_errors"
    deadline = "deadline"  # ended by the scheduler's cancel; the work is submitted as it is
    infrastructure = "infrastructure"


class AttemptKey(msgspec.Struct, frozen=True, kw_only=True):
    """Which attempt, whose, and which life of it. `epoch` fences: older epochs are ignored everywhere."""

    attempt: str
    epoch: Number
    group: str
    problem: str
    index: Number = 0  # place in the group
    purpose: Purpose = Purpose.train


class ProblemAdmitted(_Message, frozen=True, kw_only=True):
    """Batched: the pack is one object; `problems` maps problem id -> (category, relatives' cell). `complete`: with these the
    curator has admitted all; False: not said. `probed`: of those of the problems that a probe tried before the run, id ->
    (attempts, solved)."""

    pack: Ref
    pack_hidden: Ref
    problems: dict[str, tuple[str, str]]
    complete: bool = False
    probed: dict[str, tuple[Number, Number]] = {}


class RolloutRequested(_Message, frozen=True, kw_only=True):
    key: AttemptKey
    policy_floor: Number  # lowest serial that may serve it
    reward_config: str
    sampling: Sampling
    pack: Ref  # where the problem's public part lies
    pack_hidden: Ref
    pinned: Number | None = None  # evaluation: exactly this serial, from a replica of the pool "evaluation"
    seed: int = 0
    checkpoint: Ref | None = None  # of an earlier epoch, to continue from; None: the attempt begins


class AttemptClaimed(_Message, frozen=True, kw_only=True):
    """A worker holds the attempt; only now it acknowledges the request. From here only the reconciler gives it again."""

    key: AttemptKey
    worker: str


class AttemptHeartbeat(_Message, frozen=True, kw_only=True):
    """One per worker and interval, for all it holds: attempt -> (epoch, oldest version so far, or -1 before the first token).
    `silent`: replicas of the run in rotation that have not answered this worker for a while; for them alone a worker speaks that
    holds nothing."""

    worker: str
    attempts: dict[str, tuple[Number, NumberOrNone]]
    silent: list[str] = []


class AttemptCheckpointed(_Message, frozen=True, kw_only=True):
    """All that a worker needs to continue the attempt from here is durable. `turns`: those that are over. `oldest_version`: of
    the tokens in it, or -1 before the first."""

    key: AttemptKey
    worker: str
    checkpoint: Ref
    turns: Number
    oldest_version: NumberOrNone


class AttemptCancel(_Message, frozen=True, kw_only=True):
    """`epoch`: the life of the attempt that it ends, and those before it; a later one, asked for since, goes on. The topic
    is read from its beginning, so that a worker that starts again hears old ones too. None: whatever its epoch."""

    attempt: str | None = None  # None: all of the run
    epoch: Number | None = None
    mode: Literal["submit", "drop"] = "submit"


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt spent, in tokens by role and in calls. The length penalty and the hardness estimate read it."""

    thinking_tokens: Number = 0
    tool_call_tokens: Number = 0
    tool_output_tokens: Number = 0
    final_tokens: Number = 0
    tool_calls: Number = 0
    broken_tool_calls: Number = 0
    turns: Number = 0
    edits: Number = 0
    tests: Number = 0
    summaries: Number = 0
    prompt_tokens: Number = 0

    @property
    def sampled_tokens(self) -> int:
        return self.thinking_tokens + self.tool_call_tokens + self.final_tokens


class RolloutFinished(_Message, frozen=True, kw_only=True):
    key: AttemptKey
    stop: StopReason
    trajectory: Ref
    reward_config: str
    pack: Ref | None = None  # the public part that the problem was taken from; None: the run's configuration knows
    pack_hidden: Ref
    effort: Effort
    oldest_version: NumberOrNone  # oldest serial among the sampled tokens
    oldest_kv_version: NumberOrNone
    newest_version: NumberOrNone
    worker: str
    seconds: float
    grading_s: float = 0.0  # how long grading it may take; 0: no longer than graders are waited for anyhow


class RolloutFailed(_Message, frozen=True, kw_only=True):
    """Infrastructure failed, in the rollout or in grading. Never a reward: the ledger asks again or marks `failed`.

    `trajectory`: the rollout that could not be graded. None: the rollout itself failed (or an earlier release says it).
    `again`: "grade" if the rollout is whole and only grading failed; "sample" if there is nothing that could be graded.
    `checkpoint`: the newest that the worker has announced; this message may be read before that one. None: there is none."""

    key: AttemptKey
    reason: str
    worker: str
    trajectory: Ref | None = None
    again: Literal["sample", "grade"] = "sample"
    checkpoint: Ref | None = None
    oldest_version: NumberOrNone = -1  # of the tokens in the checkpoint


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the hidden tests said. `solved` iff every hidden and visible test passes.

    `steps`: of a problem of several steps, the share of the reward that each one earned, at most 1 together. Left out for
    others."""

    solved: bool
    passed: Number
    total: Number
    first_edit_solved: bool | None = None  # evaluation only: the state after the first edit alone
    error: str = ""  # the agent's doing, e.g. SyntaxError, Timeout
    notes: list[str] = []  # what the grading left open; it names no test
    # Some of the hidden tests that did not pass, for the person who tries an attempt by hand. The reward service publishes none.
    failed: list[str] = []
    steps: list[float] | msgspec.UnsetType = msgspec.UNSET


def earned_by_step(verdict: Verdict, terms: Mapping[str, float]) -> list[float] | msgspec.UnsetType:
    """Return the part of the reward that each step earned. `terms`: of the reward; its `solved` is what all steps earned
    together."""
    if isinstance(verdict.steps, msgspec.UnsetType):
        return msgspec.UNSET
    whole = sum(verdict.steps)
    return [terms.get("solved", 0.0) * share / whole if whole else 0.0 for share in verdict.steps]


class RolloutScored(_Message, frozen=True, kw_only=True):
    key: AttemptKey
    verdict: Verdict
    reward: float
    terms: dict[str, float]  # every term, signed and weighted; they add up to `reward`
    reward_config: str
    trajectory: Ref
    effort: Effort
    stop: StopReason
    oldest_version: NumberOrNone
    newest_version: NumberOrNone = -1  # -1: not said
    found: list[str] | None = None  # behaviour terms that found something, with or without a weight; None: not said


class GroupMember(msgspec.Struct, frozen=True, kw_only=True):
    """`steps`: of a problem of several steps, the part of `reward` that each one earned. Left out for others."""

    attempt: str
    epoch: Number
    trajectory: Ref
    reward: float
    oldest_version: NumberOrNone
    solved: bool | None = None  # for the trainer's report; None: not said
    steps: list[float] | msgspec.UnsetType = msgspec.UNSET


class GroupReady(_Message, frozen=True, kw_only=True):
    """A complete group. `sequence` is the ledger's order; an announcement may repeat: the trainer de-duplicates by `group`.

    `incarnation`: the newest trainer that the ledger had heard of. A trainer passes over what was said to an older one:
    it was meant for weights that may be dead since, and whatever still holds is said again to the new one.

    `progress`: share of the run's limit, 0 to 1, that was spent when this was said; 0 where it has none.

    `reward_config`: the id of the reward configuration that all members were scored under; the empty string: not said.

    `expected`: the estimated chance, 0 to 1, that the policy of the run's first groups solves one attempt at this problem; None:
    not known yet."""

    group: str
    problem: str
    sequence: Number
    members: list[GroupMember]
    incarnation: NumberOrNone = -1
    progress: float = 0.0
    reward_config: str = ""
    expected: float | None = None


class GroupQuarantined(_Message, frozen=True, kw_only=True):
    """`incarnation`: the trainer whose word it is. It says nothing about a group that was announced to a later one since."""

    group: str
    reason: str
    incarnation: NumberOrNone = -1  # -1: not said


class IncarnationStarted(_Message, frozen=True, kw_only=True):
    """A trainer has claimed `incarnation`, which continues from `step`; groups trained after it by older ones are free again."""

    incarnation: Number
    step: Number
    parent: NumberOrNone  # incarnation it forked from; -1 for the first


class StepCommitted(_Message, frozen=True, kw_only=True):
    """The step checkpoint or commit record that names `groups` is durable. A fact (group, incarnation, step)."""

    incarnation: Number
    step: Number  # 1 for the first
    serial: Number  # the version this step published
    groups: dict[str, Signed]  # group id -> greatest age of a sample in it, in steps
    metrics: dict[str, float] = {}


class PolicyPublished(_Message, frozen=True, kw_only=True):
    serial: Number  # 0 is the base policy
    incarnation: Number
    step: Number
    parent: NumberOrNone  # serial it is a delta of; -1: a full base
    manifest: Ref


SHUTTING_DOWN = "shutting down"  # why a replica that leaves serves no more
# How long a replica's last word stands where nothing else is heard of it: a killed one says no other. One that would have to
# speak if it lived, because others took a newer version or it has left the rotation, is gone after GONE_S; one that may have
# nothing to say, as an engine of evaluations that nobody asks for another version, after MUTE_S.
GONE_S, MUTE_S = 600.0, 24 * 3600.0


class PolicyApplied(_Message, frozen=True, kw_only=True):
    """A replica serves `serial` now (or, ok=False, could not load it and left the rotation).

    Example: version 8 is damaged in the store and the replica still holds version 7 whole:
    `serial=8, ok=False, damaged=True, serving=7`. It answers with version 7 where no replica is in rotation."""

    replica: str
    url: str
    pool: Literal["rollout", "evaluation", "serving"] = "rollout"
    on_request: bool = False  # it goes to the version that an evaluation is of
    serial: NumberOrNone
    pause_s: float = 0.0
    ok: bool = True
    reason: str = ""
    damaged: bool = False  # ok=False because the objects of `serial` are damaged or lost: a new full base helps
    serving: NumberOrNone = -1  # ok=False: the version that it holds whole and can answer with; -1: none


class PolicyPromoted(_Message, frozen=True, kw_only=True):
    """A person's word: replicas of the pool "serving" serve this version from now on, whichever is newer. The last one holds,
    of whatever run; the weights of what was ever promoted are kept."""

    serial: Number
    reason: str = ""
    by: str = ""  # as in RunCommand


class EvalRequested(_Message, frozen=True, kw_only=True):
    eval: str
    serial: Number
    pack: Ref
    pack_hidden: Ref
    samples: Number = 8
    greedy: bool = True
    problems: Number = 0  # 0: all
    sampling: Sampling = Sampling()


class EvalFinished(_Message, frozen=True, kw_only=True):
    eval: str
    serial: Number
    report: Ref
    figures: dict[str, float]


BY_SCHEDULER = "scheduler"  # who decided what the scheduler decides by itself; nobody else may have this name


class RunCommand(_Message, frozen=True, kw_only=True):
    """What somebody wants of a run (`runs.commands`); the scheduler alone acts on it. `shared.contracts.life` says which command
    applies in which state.

    start carries the configuration, `reconfigure` a new one, `rollback` the version to go on from. The scheduler answers each
    command with a RunStatus that names its `id`, also one that changes nothing; a configuration that cannot be scheduled
    with the alert `configuration`."""

    action: Action
    config: Ref | None = None
    serial: Number | None = None  # of a rollback: the version to go on from
    id: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    reason: str = ""
    drain: bool = True  # of a pause: the trainer trains what is complete; False: it stops after the step in hand
    by: str = ""  # who commands it, for people: a person of the console, a command line; "": not said
    # Of a start: other runs go on. Only the trainer and the engines whose settings name this run follow it; all others stay
    # with theirs.
    beside: bool = False


class Rollback(msgspec.Struct, frozen=True):
    """`id`: of the command. By it the trainer knows whether it has obeyed."""

    serial: Number
    id: str


class RunStatus(_Message, frozen=True, kw_only=True):
    """How a run stands (`runs.state`). Only the scheduler publishes it, on every change and as the answer to a command. Each
    status says everything, so that the last one is enough. Readers keep them by `shared.contracts.statuses`."""

    state: RunState
    number: Number  # grows with every status of the run: the time in Unix milliseconds, or more
    configs: list[
        Ref
    ] = []  # the one that it was started with, and those taken since; the last holds. []: none was taken
    started: float = 0.0  # Unix seconds when the first configuration was taken; 0.0: none was
    beside: bool = False  # as in RunCommand: it was started beside others
    since: float = 0.0  # Unix seconds when it entered this state
    reason: str = ""  # for this state, and `by` whose command or decision led to it
    by: str = BY_SCHEDULER
    drain: bool = True  # as in RunCommand
    admitted: bool = False  # the curator has said that no more problems will come
    rollback: Rollback | None = None  # the last one asked for; the trainer obeys it once
    damaged: NumberOrNone = -1  # no replica can read this version: the trainer publishes it again; -1: none
    answers: str = ""  # id of the command that it answers; "": none


EVERY_RUN = "*"  # an alert's run, where it concerns all that are not over
RECORDS_GONE = "records_gone"  # retention deleted what a group had not acknowledged (shared.bus.gone)


class Alert(_Message, frozen=True, kw_only=True):
    name: str
    severity: Literal["info", "warning", "critical"]
    what: str
    examples: list[str] = []
    # How often an alert of this name has been due in its run, with this one. Two replicas may say the same one.
    occurrence: int = 1

"""One attempt, from the problem to the kept folder."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from services.rollout.attempt import AnyAgent, Work, trajectory_of
from services.rollout.byhand import kept
from services.rollout.byhand.changes import unified
from services.rollout.byhand.foreign import WatchedForeign, watched_foreign
from services.rollout.byhand.policies import BadPolicy, Policy
from services.rollout.byhand.problems import Chosen
from services.rollout.byhand.scripted import BadScript
from services.rollout.byhand.watched import Turn, Watched
from services.rollout.keeping import decided
from shared.contracts.messages import AttemptKey, RolloutRequested, StopReason, Verdict
from shared.contracts.run import Purpose, Ref, Sampling
from shared.contracts.trajectory import Segment, Submission, Trajectory
from shared.environments import Brief, Driven, Environment, Grading, InfrastructureError, Ungradable, Workspace
from shared.environments.answering import require_one_each
from shared.environments.registry import Environments
from shared.renderers.chat import schema_of
from shared.sandbox import SandboxUnavailable

_NOTHING = Ref(key="", size=0, checksum="")
NO_HIDDEN = "the hidden part of the problem does not lie beside it"


class Objection(ValueError):
    """No attempt at the problem can be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Watching:
    """Called as the attempt goes: with the brief, with the number of each turn that begins, with each turn that is over."""

    begins: Callable[[Brief], None]
    asking: Callable[[int], None]
    told: Callable[[Turn], None]
    grading: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Outcome:
    agent: Watched | WatchedForeign | None
    work: Work
    error: str = ""


async def attempt(
    chosen: Chosen,
    policy: Policy,
    environments: Environments,
    sampling: Sampling,
    attempts: Path,
    watching: Watching,
) -> kept.Record:
    """Make one attempt, grade it, keep it, and return its facts. Raises Objection before anything runs."""
    environment = environments.of(chosen.problem)
    brief = environment.brief(chosen.problem) if (why := environment.objection(chosen.problem)) is None else None
    if brief is None:
        raise Objection(f"{chosen.source}: {why}")
    if (why := policy.renderer.objection(brief)) is not None:
        raise Objection(f"{chosen.source}: {why}")
    watching.begins(brief)
    started = time.monotonic()
    outcome = await _played(environment, chosen, policy, sampling, watching)
    seconds = time.monotonic() - started
    verdict, ungraded = None, outcome.error
    if not outcome.error:
        watching.grading()
        verdict, ungraded = await graded(environment, chosen, outcome.work.submission)
    return _keep(chosen, policy, environment, sampling, attempts, outcome, brief, seconds, verdict, ungraded)


async def _played(
    environment: Environment, chosen: Chosen, policy: Policy, sampling: Sampling, watching: Watching
) -> _Outcome:
    """Let the agent work. An infrastructure failure is an outcome here: the turns so far are worth reading."""
    agent: Watched | WatchedForeign | None = None
    try:
        workspace = await environment.open(chosen.problem, sampling)
        try:
            _scale(workspace, policy)
            made = watched_foreign if isinstance(workspace, Driven) else Watched
            agent = made(policy.renderer, policy.model, workspace, sampling, asking=watching.asking, told=watching.told)
            agent.deadline = True  # Ctrl-C cancels this task: the work is submitted as it is, and graded
            stop = await agent.run()
            submission = await workspace.submission()  # which may add notes
            notes = {**policy.notes, **workspace.notes}
            return _Outcome(agent, Work(stop, submission, notes, decided(workspace)))
        finally:
            await workspace.close()
    except InfrastructureError as error:
        why = str(error)
    except (BadPolicy, BadScript, SandboxUnavailable):
        raise
    except Exception as error:  # of an environment or a tool that a person is perhaps just writing
        why = defect(error)
    return _Outcome(agent, Work(StopReason.infrastructure, Submission(), dict(policy.notes)), why)


def defect(error: Exception) -> str:
    """Say what an exception was and where it was raised, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno}, in {last.name})"


def _scale(workspace: Workspace, policy: Policy) -> None:
    """Convert the workspace's limits in tokens to units of the chat format: the built-in one has a token for each byte."""
    limits, scale = workspace.limits, policy.units_per_token
    workspace.limits = replace(limits, tokens=limits.tokens * scale, turn_tokens=limits.turn_tokens * scale)


async def graded(environment: Environment, chosen: Chosen, submission: Submission) -> tuple[Verdict | None, str]:
    """Return the environment's verdict, or None and why there is none."""
    if chosen.hidden is None:
        return None, NO_HIDDEN
    try:
        answers = await environment.grade([Grading(chosen.problem, chosen.hidden, submission)])
        require_one_each((chosen,), answers, f"verdicts of environment {chosen.problem.kind!r}")
    except (SandboxUnavailable, InfrastructureError) as error:
        return None, str(error)
    except Exception as error:  # as in `_played`
        return None, defect(error)
    (found,) = answers
    return (None, found.reason) if isinstance(found, Ungradable) else (found, "")


def _keep(
    chosen: Chosen,
    policy: Policy,
    environment: Environment,
    sampling: Sampling,
    attempts: Path,
    outcome: _Outcome,
    brief: Brief,
    seconds: float,
    verdict: Verdict | None,
    ungraded: str,
) -> kept.Record:
    id, agent, work = kept.new_id(), outcome.agent, outcome.work
    trajectory = _trajectory(id, chosen, policy, sampling, agent, work)
    record = kept.Record(
        id=id,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        problem=chosen.problem.id,
        kind=chosen.problem.kind,
        source=chosen.source,
        policy=policy.name,
        trainable=policy.trainable,
        versions_known=policy.versions_known,
        format=policy.renderer.name,
        digest=kept.keep_format(attempts, policy.checkpoint),
        temperature=sampling.temperature,
        stop=work.stop,
        effort=trajectory.effort,
        seconds=round(seconds, 3),
        verdict=verdict,
        ungraded=ungraded,
        error=outcome.error,
        notes=work.notes,
    )
    diff = unified(environment, chosen.problem, work.submission)
    conversation = _conversation(brief, agent.turns if agent is not None else [])
    kept.keep(attempts, record, chosen.problem, conversation, trajectory, diff)
    return record


def _trajectory(
    id: str, chosen: Chosen, policy: Policy, sampling: Sampling, agent: AnyAgent | None, work: Work
) -> Trajectory:
    key = AttemptKey(attempt=id, epoch=0, group="by-hand", problem=chosen.problem.id, purpose=Purpose.evaluate)
    request = RolloutRequested(
        run="by-hand",
        key=key,
        policy_floor=0,
        reward_config="",
        sampling=sampling,
        pack=_NOTHING,
        pack_hidden=_NOTHING,
    )
    made: AnyAgent = agent or Watched(policy.renderer, policy.model, None, sampling)  # type: ignore[arg-type]  # nothing was recorded
    trajectory = trajectory_of(request, made, work)
    if not policy.trainable:
        trajectory.segments = [untrainable(segment) for segment in trajectory.segments]
    return trajectory


def untrainable(segment: Segment) -> Segment:
    """Return the segment with no token marked as sampled, so that a trainer cannot learn from it. Tokens and spans stay."""
    T = len(segment.tokens)
    return Segment(
        tokens=segment.tokens,
        loss_mask=np.zeros(T, dtype=bool),
        logprobs=np.zeros(T, dtype=np.float32),
        versions=np.full(T, -1, dtype=np.int32),
        oldest_kv_version=-1,
        spans=segment.spans,
    )


def _conversation(brief: Brief, turns: Sequence[Turn]) -> kept.Conversation:
    return kept.Conversation(
        messages=[kept.Said(role=message.role, content=message.content) for message in brief.messages],
        tools=[msgspec.to_builtins(schema_of(tool)) for tool in brief.tools],
        turns=list(turns),
    )

"""Writes an attempt's rollout checkpoints to the object store, announces them, reads one again, and removes them.

Invariants:
- A checkpoint is announced only when all that it names is durable.
- What the last two announced checkpoints name stays until the attempt is over: the scheduler may not have read of the last.
- An outage of the object store costs checkpoints, never the attempt.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

import structlog
import xxhash

from services.rollout import metrics
from services.rollout.agent import Agent
from services.rollout.checkpoint import Checkpoint, Conversation, Damaged, due, pack, unpack, unpack_part
from services.rollout.inference import Session
from services.rollout.recorder import Entry, Recorder, replayed
from shared.contracts.ids import CHECKPOINT, attempt_prefix, attempts_prefix, parse_attempt
from shared.contracts.messages import AttemptCheckpointed, RolloutRequested, StopReason
from shared.contracts.run import Ref
from shared.environments import InfrastructureError, Unrestorable, Workspace
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.renderers import Renderer
from shared.sandbox.contract import Decision

SAVE_S = 12.0  # when the worker leaves: for the turn or the engine's last word, and for the checkpoints
OLD = 2  # checkpoints that stay
LEFT = "the worker left before the end"
BEGUN_AGAIN = "begun_again"  # the note of an attempt that had a checkpoint and began from its task all the same
FIRST_DELAY_S, LAST_DELAY_S = 0.1, 5.0  # between two looks at a store that is away

log = structlog.get_logger()


class Left(InfrastructureError):
    """The worker leaves; the attempt has a checkpoint if one could be made."""


@dataclass(frozen=True, slots=True)
class Saved:
    """An announced checkpoint. `oldest_version`: of the tokens in it. `tokens`: how many of them were sampled."""

    ref: Ref
    oldest_version: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checkpoint that was read, with its journal."""

    checkpoint: Checkpoint
    ref: Ref
    recorder: Recorder


@dataclass(slots=True)
class Keeper:
    """Keeps one attempt. `announce`: returns when the message is durable. `saved`: the newest checkpoint that is announced, or
    the one that the attempt continues from; None: there is none."""

    objects: Objects
    request: RolloutRequested
    worker: str
    every_s: float
    announce: Callable[[AttemptCheckpointed], Awaitable[None]]
    saved: Saved | None = None
    spent_s: float = 0.0  # by earlier workers
    decisions: list[Decision] = field(default_factory=list)  # seen by earlier workers
    parts: list[Ref] = field(default_factory=list)
    number: int = 0
    clock: Callable[[], float] = time.monotonic
    began: float = 0.0
    last: float = 0.0
    written: list[Ref] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Return for how long the agent has worked, over all workers."""
        return self.spent_s + self.clock() - self.began

    async def begun(
        self, renderer: Renderer, session: Session, workspace: Workspace, open_: Callable[[], Awaitable[Workspace]]
    ) -> Agent:
        """Return the agent in its workspace: as the request's checkpoint has both, or at the beginning. `workspace`: just opened;
        if it cannot be set back, it is closed, and another opened. Raises InfrastructureError."""
        sampling, ref = self.request.sampling, self.request.checkpoint
        agent = Agent(renderer, session, workspace, sampling)
        if ref is None:
            return agent
        try:
            await self.resume(await self.load(ref), agent, session, workspace)
            metrics.RESUMED.labels(self.request.run, "continued").inc()
            return agent
        except Unrestorable as error:
            why = str(error)
        await workspace.close()
        log.warning("attempt_begun_again", run=self.request.run, attempt=self.request.key.attempt, reason=why)
        metrics.RESUMED.labels(self.request.run, "begun_again").inc()
        workspace = await open_()
        workspace.notes[BEGUN_AGAIN] = why
        return Agent(renderer, session, workspace, sampling)

    async def run(self, agent: Agent, session: Session, leaving: Callable[[], bool]) -> StopReason:
        """Let the agent work, with checkpoints between its turns. Raises Left, after a checkpoint, once `leaving` holds."""

        async def turned() -> None:
            if leaving():
                await self.leave(agent, session)
            if due(self.clock(), self.last, self.every_s):
                await self.save(agent, session)

        if leaving():  # nothing is new
            raise Left(LEFT)
        agent.turned = turned
        self.began = self.last = self.clock()
        try:
            return await agent.run(self.spent_s)
        except asyncio.CancelledError:
            if not leaving():
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # a coroutine always runs in a task
        await self.leave(agent, session)
        raise AssertionError("unreachable")

    async def leave(self, agent: Agent, session: Session) -> NoReturn:
        await self.save(agent, session)
        raise Left(LEFT)

    async def load(self, ref: Ref) -> Resumed:
        """Read a checkpoint; wait while the store is away. Raises Unrestorable where it cannot be continued from."""
        delay = FIRST_DELAY_S
        while True:
            try:
                return await asyncio.to_thread(self._load, ref)
            except (ObjectMissing, ObjectDamaged, Damaged) as error:
                raise Unrestorable(f"checkpoint {ref.key}: {type(error).__name__}: {error}") from None
            except OSError as error:
                log.warning("checkpoint_not_read", attempt=self.request.key.attempt, error=f"{error}")
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(LAST_DELAY_S, delay * 2)

    def _load(self, ref: Ref) -> Resumed:
        checkpoint = unpack(self.objects.get(ref))
        if checkpoint.key.attempt != self.request.key.attempt:
            raise Damaged(f"it is of attempt {checkpoint.key.attempt!r}")
        entries: list[Entry] = []
        for part in checkpoint.parts:
            entries += unpack_part(self.objects.get(part))
        try:
            recorder = replayed(entries)
        except (ValueError, RuntimeError, IndexError) as error:
            raise Damaged(f"its journal: {error}") from None
        recorder.journal = []  # it is durable already
        return Resumed(checkpoint, ref, recorder)

    async def resume(self, found: Resumed, agent: Agent, session: Session, workspace: Workspace) -> None:
        """Set agent, session and workspace back. Raises Unrestorable, InfrastructureError."""
        checkpoint = found.checkpoint
        brief = await workspace.restore(checkpoint.workspace)
        workspace.notes.update(checkpoint.notes)
        agent.resume(checkpoint.agent, found.recorder, brief)
        talk = checkpoint.conversation
        session.requests, session.begun = talk.requests, talk.partial
        session.wanted = replace(session.wanted, first=talk.first)
        self.saved = Saved(found.ref, found.recorder.oldest_version, sampled(agent, session))
        self.parts, self.number = list(checkpoint.parts), checkpoint.number
        self.spent_s, self.decisions = checkpoint.spent_s, list(checkpoint.decisions)

    async def save(self, agent: Agent, session: Session) -> bool:
        """Write a checkpoint and announce it. False: the workspace cannot be saved, or the object store is away."""
        self.last, workspace = self.clock(), agent.workspace
        state = await workspace.save()
        if state is None:
            return False
        journal, talk = agent.recorder.journal, Conversation(session.requests, session.wanted.first, session.partial)
        spent_s, decisions = self.seconds, [*self.decisions, *decided(workspace)]
        try:
            part = await asyncio.to_thread(self._put, "part-", pack(journal)) if journal else None
            parts = [*self.parts, part] if part is not None else self.parts
            whole = Checkpoint(
                key=self.request.key,
                number=self.number + 1,
                parts=parts,
                agent=agent.state,
                conversation=talk,
                workspace=state,
                notes=dict(workspace.notes),
                decisions=decisions,
                spent_s=spent_s,
            )
            ref = await asyncio.to_thread(self._put, "", pack(whole))
        except OSError as error:
            log.warning(
                "checkpoint_not_written", attempt=self.request.key.attempt, error=f"{type(error).__name__}: {error}"
            )
            return False
        self.number, self.parts = self.number + 1, parts
        agent.recorder.journal = agent.recorder.journal[len(journal) :]
        await self.announce(
            AttemptCheckpointed(
                run=self.request.run,
                key=self.request.key,
                worker=self.worker,
                checkpoint=ref,
                turns=agent.state.spent.get("turns", 0),
                oldest_version=agent.recorder.oldest_version,
            )
        )
        self.saved = Saved(ref, agent.recorder.oldest_version, sampled(agent, session))
        metrics.CHECKPOINTS.labels(self.request.run).inc()
        self.written.append(ref)
        old, self.written = self.written[:-OLD], self.written[-OLD:]
        await self._delete([one.key for one in old])
        return True

    async def forget(self) -> None:
        """Remove every checkpoint of this epoch and of those before it: the attempt is over."""
        key = self.request.key
        if self.saved is None and key.epoch == 0:
            return

        def ours() -> list[str]:
            below = self.objects.list(attempts_prefix(self.request.run, key.attempt))
            named = ((name, parse_attempt(name)) for name in below)
            return [n for n, there in named if there and there.epoch <= key.epoch and there.name.startswith(CHECKPOINT)]

        try:
            await self._delete(await asyncio.to_thread(ours))
        except OSError:
            return  # the scheduler's sweep finds them

    def _put(self, name: str, data: bytes) -> Ref:
        """The name carries the content's hash: two workers that hold the same epoch overwrite nothing of each other's."""
        prefix = attempt_prefix(self.request.run, self.request.key.attempt, self.request.key.epoch)
        digest = xxhash.xxh3_64_hexdigest(data)
        return self.objects.put(f"{prefix}/{CHECKPOINT}{name}{self.number + 1:06d}-{digest}.zst", data)

    async def _delete(self, keys: list[str]) -> None:
        def delete() -> None:
            for key in keys:
                self.objects.delete(key)

        try:
            await asyncio.to_thread(delete)
        except OSError:
            return  # the scheduler's sweep finds them


def sampled(agent: Agent, session: Session) -> int:
    """Return how many tokens of the attempt were sampled, those of a turn that is being sampled included."""
    partial = session.partial or session.begun
    return agent.effort.sampled_tokens + (0 if partial is None else len(partial.tokens))


def decided(workspace: Workspace) -> tuple[Decision, ...]:
    """Return the workspace's requests to the network; none where it is of a kind that knows nothing of them."""
    return tuple(getattr(workspace, "decisions", ()))

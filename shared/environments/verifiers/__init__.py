"""The environment of kind `verifiers`: a `verifiers` environment makes the rollout and scores it, inside the sandbox.

Its own client asks the model through the recording endpoint, so the exact tokens are recorded here. The reward leaves the sandbox
by the runner's pipe (`orders`), and is all that is submitted.

Invariants:
- A reward comes from the runner or from nowhere. An attempt whose rollout began and brought no reward is unsolved.
- An environment that cannot be loaded, or whose rollout `verifiers` ends with an error before any answer of the model, is a
  failure of the machine, never a verdict.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import msgspec

from shared.contracts.messages import Verdict
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Submission
from shared.environments import (
    Brief,
    Call,
    Environment,
    Grading,
    InfrastructureError,
    Limits,
    Message,
    Outcome,
    Places,
    Result,
    SandboxGone,
    Ungradable,
    Way,
    Workspace,
)
from shared.environments.agent import AGENTS
from shared.environments.agent.bridge import PORT, Bridge
from shared.environments.repository import rooms, runtime
from shared.environments.verifiers import orders
from shared.environments.verifiers.orders import Broken, Example, Listed, Refused, Rolled, Runner, Scored
from shared.environments.verifiers.problem import Source, VerifiersHidden, VerifiersProblem
from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import NO_NETWORK, Decision, Sandbox, Sandboxes
from shared.sandbox.contract import Limits as SandboxLimits

REWARD = "reward.json"  # of a submission
NOTE = "environment_reward"  # of a trajectory, and the name of the reward term that reads it
_LONGEST_S = 24 * 3600.0  # of an attempt without a limit of its own
_SPARE_S = 600.0
_LIST_S = 600.0
_LOOK_S = 10.0
# How `verifiers` ends a rollout at an answer that it cannot use: nothing in it, or no choice.
_OF_THE_MODEL = ("EmptyModelResponseError", "InvalidModelResponseError")
_SHOWN = 2000  # characters of what the environment printed last


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """The submitted reward. `reward`: None if there is none; `error` then says why. `metrics`: of the rubric, by the names of its
    functions. `error`: why there is no reward, or the type of the error that ended the rollout; never an exception's text, since
    every service may read verdicts."""

    reward: float | None = None
    metrics: dict[str, float] = {}
    turns: int = 0
    error: str = ""


class VerifiersEnvironment(Environment[VerifiersProblem, VerifiersHidden]):
    """See shared.environments.Environment."""

    kind, problem, hidden = "verifiers", VerifiersProblem, VerifiersHidden

    def __init__(self, places: Places) -> None:
        self._places = places

    def objection(self, problem: VerifiersProblem) -> str | None:
        return rooms.objection(self._places, problem.source)

    def brief(self, problem: VerifiersProblem) -> Brief:
        return Brief((Message("user", problem.prompt),), ())

    async def ready(self) -> None:
        try:
            image = await rooms.image_of(self._places, "")
            base = await asyncio.to_thread(runtime.base, self._places.cache, None, ".", image)
            sandbox = await self._sandboxes().open(base, SandboxLimits(memory_mb=512, processes=32))
        except (ValueError, InfrastructureError) as error:
            raise SandboxUnavailable(str(error)) from None
        await sandbox.close()

    async def open(self, problem: VerifiersProblem, sampling: Sampling) -> Workspace:
        own = problem.source.limits
        limits = Limits(
            turns=own.turns or sampling.max_turns,
            tokens=own.tokens or sampling.max_completion_tokens,
            turn_tokens=own.turn_tokens or sampling.max_turn_tokens,
            seconds=own.seconds,
        )
        try:
            sandbox = await self._opened(problem.source, (own.seconds or _LONGEST_S) + own.scoring_s)
        except SandboxUnavailable as error:
            raise SandboxGone(str(error)) from None
        except OSError as error:
            raise InfrastructureError(f"{type(error).__name__}: {error}") from None
        return VerifiersWorkspace(sandbox, self.brief(problem), problem, limits)

    async def grade(self, items: Sequence[Grading]) -> list[Verdict | Ungradable]:
        return [_verdict(item.submission, item.hidden) for item in items]

    async def admit(self, pairs: Sequence[tuple[VerifiersProblem, VerifiersHidden]]) -> list[Outcome]:
        """Load each environment once, in a sandbox, and reject problems whose example is missing or has another prompt."""
        from shared.environments.admission import admitted

        wrong: dict[int, str] = {}
        numbered = sorted(enumerate(problem for problem, _ in pairs), key=lambda pair: _key(pair[1].source))
        for _, group in groupby(numbered, key=lambda pair: _key(pair[1].source)):
            wrong |= await self._wrong(list(group))
        if not wrong:
            return await admitted(self, pairs)
        good = iter(await admitted(self, [pair for i, pair in enumerate(pairs) if i not in wrong]))
        return [Outcome(*pair, wrong[i]) if i in wrong else next(good) for i, pair in enumerate(pairs)]

    async def _wrong(self, group: Sequence[tuple[int, VerifiersProblem]]) -> dict[int, str]:
        """Return why problems of one environment cannot be attempted, by their numbers."""
        source = group[0][1].source
        if why := self.objection(group[0][1]):
            return {i: why for i, _ in group}
        first, last = min(problem.index for _, problem in group), max(problem.index for _, problem in group)
        try:
            found, total = await self.examples(source, first, last - first + 1)
        except InfrastructureError as error:
            return {i: str(error) for i, _ in group}
        known = {example.index: example.digest for example in found}
        wrong = {}
        for i, problem in group:
            if problem.index not in known:
                wrong[i] = f"field 'index': found {problem.index}; allowed: 0 to {total - 1} of split {source.split!r}"
            elif problem.digest != known[problem.index]:
                wrong[i] = (
                    f"field 'digest': found {problem.digest!r:.40}; allowed: {known[problem.index]!r}, that of example "
                    f"{problem.index} of split {source.split!r} now"
                )
        return wrong

    async def examples(self, source: Source, first: int, most: int) -> tuple[list[Example], int]:
        """Return examples of the split from index `first` on, at most `most`, and how many the split holds. Raises
        InfrastructureError that says why the environment cannot be loaded here, SandboxUnavailable."""
        sandbox = await self._opened(source, _LIST_S)
        found: list[Example] = []
        try:
            runner = await Runner.given(sandbox, source.folder, orders.listing(source, first, most))
            async with asyncio.timeout(_LIST_S):
                async for event in runner.events():
                    match event:
                        case Example():
                            if len(found) >= most or not first <= event.index < first + most:
                                raise InfrastructureError(
                                    f"the environment listed example {event.index}; asked for: {most} from {first} on"
                                )
                            found.append(event)
                        case Listed():
                            return found, event.examples
                        case Refused() | Broken():
                            raise InfrastructureError(event.why)
            raise InfrastructureError(f"the examples cannot be listed: {await said(sandbox)}")
        except TimeoutError:
            raise InfrastructureError(f"the examples were not listed in {_LIST_S:g} s: {await said(sandbox)}") from None
        finally:
            await sandbox.close()

    async def _opened(self, source: Source, seconds: float) -> Sandbox:
        """Return a sandbox with the folder of agents mounted, good for `seconds`. Raises InfrastructureError where this service
        cannot run the environment, SandboxUnavailable, OSError."""
        folder, own = self._places.agents, source.limits
        if folder is None or not (folder / source.folder).is_dir():
            raise InfrastructureError(
                f"field 'source.folder': found {source.folder!r}; allowed: a virtual environment below the folder that "
                f"ETUDE_SANDBOX_AGENTS names, which is {str(folder) if folder else 'not set'} (docs/agents.md)"
            )
        image = await rooms.image_of(self._places, source.image)
        base = await asyncio.to_thread(runtime.base, self._places.cache, None, ".", image)
        base = replace(base, mounts=(*base.mounts, (folder.absolute(), AGENTS)))
        limits = SandboxLimits(own.memory_mb, own.disk_mb, own.processes, seconds + _SPARE_S)
        network = NO_NETWORK if source.network == "none" else rooms.network(self._places, source)
        try:
            sandbox = await self._sandboxes().open(base, limits, network)
        except ValueError as error:
            raise InfrastructureError(str(error)) from None
        try:
            await rooms.require_python(sandbox, image)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _sandboxes(self) -> Sandboxes:
        if self._places.sandboxes is None:
            raise SandboxUnavailable("this service has no sandboxes for commands")
        return self._places.sandboxes


class VerifiersWorkspace(Workspace):
    """See shared.environments.Workspace and Driven. It offers no tools: the environment brings its own."""

    def __init__(self, sandbox: Sandbox, brief: Brief, problem: VerifiersProblem, limits: Limits) -> None:
        self.limits, self.notes = limits, {}
        self._sandbox, self._brief, self._problem = sandbox, brief, problem
        self._runner: Runner | None = None
        self._reading: asyncio.Task[None] | None = None
        self._said: dict[type, orders.Events] = {}

    @property
    def decisions(self) -> Sequence[Decision]:
        return self._sandbox.decisions

    def brief(self, *, continues: bool = False) -> Brief:
        return self._brief

    async def call(self, calls: Sequence[Call]) -> list[Result]:
        return [Result(call.id, call.name, "there are no tools here", ok=False) for call in calls]

    async def drive(self, way: Way) -> None:
        """Let the environment make its rollout and score it. If cancelled, it leaves the runner running, which finds the model's
        endpoint closed and scores what there is."""
        source = self._problem.source
        try:
            async with Bridge(self._sandbox, way.connect, runtime.python(source.image)):
                order = orders.rollout(self._problem, f"http://127.0.0.1:{PORT}/v1", way.key)
                self._runner = await Runner.given(self._sandbox, source.folder, order)
                self._reading = asyncio.create_task(self._read(self._runner))
                await asyncio.shield(self._reading)
            await self._require_answers()
        except SandboxUnavailable as error:
            raise SandboxGone(str(error)) from None

    async def _read(self, runner: Runner) -> None:
        async for event in runner.events():
            self._said[type(event)] = event

    async def _require_answers(self) -> None:
        """Raise InfrastructureError if the order was refused, the environment ended before its rollout began, or the rollout ended
        with an error before any answer. An answer that `verifiers` cannot use, such as an empty one, is the policy's doing."""
        refused, rolled = self._said.get(Refused), self._said.get(Rolled)
        if isinstance(refused, Refused):
            raise InfrastructureError(refused.why)
        if orders.Began not in self._said:
            raise InfrastructureError(f"the environment ended before its rollout began: {await said(self._sandbox)}")
        if isinstance(rolled, Rolled) and not rolled.turns and rolled.error and rolled.error not in _OF_THE_MODEL:
            raise InfrastructureError(f"the environment got no answer of the model: {rolled.why}")

    async def submission(self) -> Submission:
        """Wait for the reward, at most `scoring_s`, and return it. Raises SandboxGone."""
        if self._reading is not None and self._runner is not None:
            await asyncio.wait({self._reading}, timeout=self._problem.source.limits.scoring_s)
            late = not self._reading.done()
            await self._runner.kill()
            await asyncio.wait({self._reading})
        else:
            late = False
        found = self._found(late)
        self.notes[NOTE] = msgspec.json.encode(found).decode()
        ends = [end.why for end in self._said.values() if isinstance(end, Rolled | Broken) and end.why]
        try:
            printed = await said(self._sandbox)
        except SandboxUnavailable as error:
            if Scored not in self._said:
                raise SandboxGone(str(error)) from None
            printed = "its sandbox is gone"
        self.notes["environment"] = "\n".join([*ends, printed])
        return Submission(files={REWARD: self.notes[NOTE]})

    def _found(self, late: bool) -> Reward:
        scored, rolled, broken = (self._said.get(kind) for kind in (Scored, Rolled, Broken))
        turns, error = (rolled.turns, rolled.error) if isinstance(rolled, Rolled) else (0, "")
        if isinstance(broken, Broken):
            error = broken.error
        if not isinstance(scored, Scored):
            late_s = self._problem.source.limits.scoring_s
            why = f"none within {late_s:g} s after the attempt's end" if late else "the environment ended without one"
            return Reward(turns=turns, error=f"no reward: {error or why}")
        reward = _number(scored.reward)
        metrics = {name: number for name, text in scored.metrics.items() if (number := _number(text)) is not None}
        if reward is None:
            return Reward(
                metrics=metrics, turns=turns, error=f"reward: found {scored.reward:.40}; allowed: a finite number"
            )
        return Reward(reward=reward, metrics=metrics, turns=turns, error=error)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self._sandbox.close()


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _verdict(submission: Submission, hidden: VerifiersHidden) -> Verdict:
    try:
        found = msgspec.json.decode(submission.files.get(REWARD, "{}"), type=Reward)
    except msgspec.DecodeError as error:
        found = Reward(error=f"{REWARD}: {error}")
    solved = found.reward is not None and found.reward >= hidden.solved_at
    return Verdict(solved=solved, passed=int(solved), total=1, error="" if solved else found.error)


def _key(source: Source) -> str:
    return json.dumps(msgspec.to_builtins(source), sort_keys=True)


async def said(sandbox: Sandbox) -> str:
    """Return what the environment printed last, for people. Raises SandboxUnavailable."""
    session = await sandbox.session()
    try:
        done = await session.run(f"tail -c {_SHOWN} {orders.LOG}", time_s=_LOOK_S)
    finally:
        await session.close()
    return done.stdout.decode("utf-8", "replace").strip()[-_SHOWN:] or "it printed nothing"

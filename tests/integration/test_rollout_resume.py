"""Workers that die with attempts in hand, and the ones that continue them: the service as a process, killed with SIGKILL."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from services.rollout.keeping import LEFT
from shared.contracts import topics
from shared.contracts.messages import (
    AttemptCancel,
    AttemptCheckpointed,
    AttemptHeartbeat,
    RolloutFailed,
    RolloutFinished,
    RolloutRequested,
    StopReason,
)
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Trajectory, unpack
from tests.integration.rollout_platform import RUN, Engine, Platform, make_checkpoint, platform
from tests.patience import eventually, patient

ATTEMPTS, TURNS = 32, 8
SECONDS = 240.0  # for one thing to happen, on a machine under load


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "checkpoint"
    make_checkpoint(directory)
    return directory


Scenario = Callable[[Platform], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path, checkpoint: Path) -> Callable[[Scenario], None]:
    def runner(scenario: Scenario) -> None:
        async def whole() -> None:
            async with platform(tmp_path, checkpoint) as p:
                await scenario(p)

        asyncio.run(whole())

    return runner


def tries(p: Platform) -> Callable[[list[int]], list[int]]:
    """Edit and test, then take it back and test, in turn; after TURNS turns submit. A function of the context alone."""
    chat = p.chat

    def policy(prompt: list[int]) -> list[int]:
        tests = prompt.count(chat.test)
        if tests >= TURNS:
            return [chat.submit]
        if tests % 2:
            return [chat.undo, chat.test]
        return [chat.edit, chat.line_token(1), *chat.encode("-"), chat.got, *chat.encode("*"), chat.end, chat.test]

    return policy


SAMPLING = Sampling(retry="append", max_turns=40, max_edits=40, max_completion_tokens=400, max_repeats=0)


@dataclass
class Reconciler:
    """What the scheduler does about lost attempts, for all of them at once: the next epoch, from the newest checkpoint."""

    p: Platform
    requests: dict[str, RolloutRequested] = field(default_factory=dict)
    saved: dict[str, AttemptCheckpointed] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    finished: dict[str, RolloutFinished] = field(default_factory=dict)
    failed: list[RolloutFailed] = field(default_factory=list)
    checkpoints: int = 0
    marks: int = 0

    async def listen(self) -> None:
        heard = [topics.ATTEMPTS_PROGRESS, topics.ROLLOUTS_FINISHED]
        async for delivery in self.p.bus.deliveries(heard, None, 64):
            match delivery.message:
                case AttemptCheckpointed() as message:
                    self.saved[message.key.attempt] = message
                    self.checkpoints += 1
                case RolloutFinished() as message:
                    self.finished[message.key.attempt] = message
                case RolloutFailed(reason="mark") | AttemptHeartbeat(worker="mark"):
                    self.marks += 1
                case RolloutFailed() as message:
                    self.failed.append(message)
            delivery.done()

    async def catch_up(self) -> None:
        """Wait until all is heard that was said up to now: a mark at the end of each topic was."""
        wanted, nobody = self.marks + 2, self.p.request().key
        beat = AttemptHeartbeat(run=RUN, worker="mark", attempts={}, silent=[])
        await self.p.bus.publish(topics.ATTEMPTS_PROGRESS, "mark", beat)
        failed = RolloutFailed(run=RUN, key=nobody, reason="mark", worker="mark")
        await self.p.bus.publish(topics.ROLLOUTS_FINISHED, "mark", failed)
        await eventually(lambda: self.marks >= wanted, "the marks to be heard")

    def has(self, checkpoints: int) -> bool:
        return self.checkpoints >= checkpoints or len(self.finished) == ATTEMPTS

    async def ask(self, request: RolloutRequested) -> None:
        self.requests[request.key.attempt] = request
        await self.p.ask(request)

    async def ask_again(self) -> None:
        for attempt, before in list(self.requests.items()):
            if attempt in self.finished:
                continue
            told = self.saved.get(attempt)
            await self.ask(
                self.p.request(
                    before.key.problem,
                    attempt=attempt,
                    epoch=before.key.epoch + 1,
                    sampling=SAMPLING,
                    checkpoint=None if told is None else told.checkpoint,
                )
            )


def start(p: Platform, number: int) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "ETUDE_STATE": str(p.state),
        "ETUDE_NAME": f"worker-{number}",
        "ETUDE_SANDBOX": "process",
        "ETUDE_ROLLOUT_CHECKPOINT_S": "0",
        "ETUDE_ROLLOUT_DRAIN_S": "0",
        "ETUDE_BUS": f"sqlite:{p.state / 'bus.db'}",
        "ETUDE_OBJECTS": f"file:{p.state / 'objects'}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen([sys.executable, "-m", "services.rollout"], env=env)


def sampled(trajectory: Trajectory) -> list[list[int]]:
    return [segment.tokens.tolist() for segment in trajectory.segments]


@pytest.mark.timeout(1200)  # workers start as processes, on machines under load
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_attempts_whose_workers_are_killed_go_on_from_their_last_turn(
    run: Callable[[Scenario], None], kills: int
) -> None:
    async def scenario(p: Platform) -> None:
        rng, reconciler = random.Random(7), Reconciler(p)
        async with Engine(tries(p)).running() as engine:
            listening = asyncio.create_task(reconciler.listen())
            await p.announce(engine)
            for i in range(ATTEMPTS):
                await reconciler.ask(p.request(f"p{1 + i % 6}", sampling=SAMPLING))
            process = start(p, 0)
            try:
                for kill in range(kills):
                    # Somewhere in the turns that are left: kills are spread over the attempts' whole length.
                    until = reconciler.checkpoints + rng.randint(1, max(1, ATTEMPTS * TURNS // (kills + 2)))
                    await eventually(partial(reconciler.has, until), seconds=SECONDS)
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    await reconciler.catch_up()  # with what it had said
                    await reconciler.ask_again()
                    process = start(p, kill + 1)
                await eventually(lambda: len(reconciler.finished) == ATTEMPTS, seconds=SECONDS)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
            listening.cancel()
            by_context = defaultdict(int)
            for request in engine.requests:
                by_context[request["rid"].split(".")[0], tuple(request["input_ids"])] += 1
            epochs = {attempt: message.key.epoch for attempt, message in reconciler.finished.items()}
            for attempt, finished in reconciler.finished.items():
                trajectory = unpack(p.objects.get(finished.trajectory))
                assert finished.stop is StopReason.submitted
                assert trajectory.files == {"f.py": f"def f(a):\n    return a - {finished.key.problem[1:]}\n"}
                assert finished.effort.turns == TURNS + 1
                (segment,) = trajectory.segments
                prefix = segment.tokens.tolist()
                asked = [context for name, context in by_context if name == attempt]
                assert all(prefix[: len(context)] == list(context) for context in asked)
                again = sum(number - 1 for (name, _), number in by_context.items() if name == attempt)
                assert again <= epochs[attempt], f"{attempt}: {again} turns again after {epochs[attempt]} deaths"
            alike = defaultdict(set)
            for finished in reconciler.finished.values():
                alike[finished.key.problem].add(str(sampled(unpack(p.objects.get(finished.trajectory)))))
            assert all(len(tokens) == 1 for tokens in alike.values())  # killed or not: a function of the problem
            assert max(epochs.values()) > 0
            assert not reconciler.failed

    run(scenario)


@pytest.mark.timeout(1200)
def test_a_worker_that_is_told_to_leave_saves_what_it_holds(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(p: Platform) -> None:
        reconciler = Reconciler(p)
        async with Engine(tries(p)).running() as engine:
            listening = asyncio.create_task(reconciler.listen())
            await p.announce(engine)
            engine.held = lambda prompt: prompt.count(p.chat.test) >= 3
            engine.free.clear()
            for i in range(4):
                await reconciler.ask(p.request(f"p{1 + i}", sampling=SAMPLING))
            process = start(p, 0)
            try:
                await eventually(lambda: engine.waiting == 4, seconds=SECONDS)
                process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(process.wait, patient(30))
                await eventually(lambda: len(reconciler.failed) == 4)
                assert {failed.reason for failed in reconciler.failed} == {LEFT}
                assert all(failed.checkpoint is not None for failed in reconciler.failed)
                engine.free.set()
                await reconciler.ask_again()
                process = start(p, 1)
                await eventually(lambda: len(reconciler.finished) == 4, seconds=SECONDS)
                await eventually(  # while the worker lives: it removes them after it has said that an attempt ended
                    lambda: not [key for key in p.objects.list(f"runs/{RUN}/attempts/") if "/checkpoint/" in key]
                )
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
            listening.cancel()

    run(scenario)


def test_a_deadline_ends_an_attempt_with_what_the_engine_has_sampled_of_the_turn(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(p: Platform) -> None:
        async with Aborting(tries(p)).running() as engine, p.worker():
            await p.announce(engine)
            engine.held = lambda prompt: prompt.count(p.chat.test) >= 2
            engine.free.clear()
            key = await p.ask(p.request(sampling=SAMPLING))
            await eventually(lambda: engine.waiting == 1)
            await p.bus.publish(topics.ATTEMPTS_CANCEL, key.attempt, AttemptCancel(run=RUN, attempt=key.attempt))
            (finished,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert finished.stop is StopReason.deadline
            (segment,) = unpack(p.objects.get(finished.trajectory)).segments
            assert segment.spans[-1].fault == "cut"
            cut = segment.spans[-1]
            assert segment.tokens[cut.start : cut.end].tolist() == engine.partial
            assert segment.loss_mask[cut.start : cut.end].all()
            assert finished.effort.sampled_tokens == segment.loss_mask.sum()
            assert finished.effort.turns == 3

    run(scenario)


def test_tokens_that_an_engine_sampled_before_it_ended_a_generation_are_continued(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(p: Platform) -> None:
        async with Aborting(tries(p), aborts=40).running() as engine, p.worker():
            await p.announce(engine)
            await p.ask(p.request(sampling=SAMPLING))
            (finished,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert finished.stop is StopReason.submitted
            (segment,) = unpack(p.objects.get(finished.trajectory)).segments
            assert segment.loss_mask.sum() == engine.sampled  # of the engine, every token: none was sampled twice
            assert engine.aborts == 0

    run(scenario)


@dataclass
class Aborting(Engine):
    """Goes on where a turn was ended early, as a policy of tokens does."""

    def __post_init__(self) -> None:
        Engine.__post_init__(self)
        whole = self.policy

        def policy(prompt: list[int]) -> list[int]:
            """Of a turn that has begun, the rest."""
            for begun in range(min(8, len(prompt)), 0, -1):
                expected = whole(prompt[:-begun])
                if expected[:begun] == prompt[-begun:] and len(expected) > begun:
                    return expected[begun:]
            return whole(prompt)

        self.policy = policy

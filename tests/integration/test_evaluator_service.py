"""The evaluator on the embedded bus and store; the test itself plays rollout workers and graders."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.evaluator.archive import Archive
from services.evaluator.config import EvaluatorSettings
from services.evaluator.service import serve
from shared import bus as buses
from shared.contracts import topics
from shared.contracts.ids import open_evaluation
from shared.contracts.messages import (
    Effort,
    EvalFinished,
    EvalRequested,
    RolloutFailed,
    RolloutRequested,
    RolloutScored,
    StopReason,
    Verdict,
)
from shared.telemetry import Health
from tests.integration.rollout_platform import PROBLEMS, RUN, Platform, make_checkpoint, platform
from tests.patience import eventually, patient

SAMPLES = 3
TOTAL = len(PROBLEMS) * (SAMPLES + 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "checkpoint"
    make_checkpoint(directory)
    return directory


@dataclass
class World:
    """Answers requests: odd problems are solved, from the second sample on. `lose`: attempts whose infrastructure fails."""

    p: Platform
    free: asyncio.Event = field(default_factory=asyncio.Event)
    asked: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    answer_only: int = 1 << 30
    lose: Callable[[RolloutRequested], bool] = lambda _: False

    async def run(self) -> None:
        async for delivery in self.p.bus.deliveries([topics.ROLLOUTS_REQUESTED], "world", 64):
            request: RolloutRequested = delivery.message
            self.asked[request.key.attempt] += 1
            if self.answered >= self.answer_only:
                await self.free.wait()
            self.answered += 1
            await self.p.bus.publish(topics.ROLLOUTS_SCORED, request.key.attempt, self.answer(request))
            delivery.done()

    def answer(self, request: RolloutRequested) -> RolloutScored | RolloutFailed:
        if self.lose(request):
            return RolloutFailed(run=RUN, key=request.key, reason="an engine is gone", worker="w")
        odd, index = int(request.key.problem[1:]) % 2 == 1, request.key.index
        return RolloutScored(
            run=RUN,
            key=request.key,
            verdict=Verdict(solved=odd and index > 0, passed=1, total=1, first_edit_solved=odd and index == 1),
            reward=0.0,
            terms={},
            reward_config=request.reward_config,
            trajectory=self.p.pack,
            effort=Effort(tool_call_tokens=10),
            stop=StopReason.submitted,
            oldest_version=request.pinned or 0,
        )


@contextlib.asynccontextmanager
async def evaluator(p: Platform, name: str = "evaluator", **settings: Any) -> AsyncIterator[asyncio.Task[None]]:
    """Ends as a killed process does: nothing is drained."""
    config = EvaluatorSettings(state=p.state, name=name, **settings)
    bus = buses.connect(config.bus_url, client=name)
    async with Health("evaluator", config) as health:
        serving = asyncio.create_task(serve(config, bus, p.objects, health, asyncio.Event()))
        try:
            yield serving
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            await bus.close()


def request(p: Platform, name: str = "before", **changes: Any) -> EvalRequested:
    whole = {
        "run": RUN,
        "eval": name,
        "serial": 3,
        "pack": p.pack,
        "pack_hidden": p.pack,
        "samples": SAMPLES,
        **changes,
    }
    return EvalRequested(**whole)


async def finished(p: Platform, count: int = 1) -> tuple[EvalFinished, dict[str, Any]]:
    message = (await p.heard(topics.EVALS_FINISHED, count))[-1]
    return message, msgspec.json.decode(p.objects.get(message.report))


@pytest.fixture
def run(tmp_path: Path, checkpoint: Path) -> Callable[[Callable[[Platform, World], Awaitable[None]]], None]:
    def runner(scenario: Callable[[Platform, World], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with platform(tmp_path, checkpoint) as p:
                world = World(p)
                working = asyncio.create_task(world.run())
                try:
                    await scenario(p, world)
                finally:
                    working.cancel()

        asyncio.run(whole())

    return runner


Runner = Callable[[Callable[[Platform, World], Awaitable[None]]], None]


def check(message: EvalFinished, report: dict[str, Any]) -> None:
    assert message.serial == 3
    assert message.figures["pass_at_1"] == pytest.approx(0.5 * 2 / 3)
    assert message.figures["first_edit"] == pytest.approx(0.5 / 3)
    assert message.figures["greedy"] == 0.5
    assert message.figures["best_of_k"] == 0.5
    assert message.figures["tokens_per_solved"] == pytest.approx(180 / 6)
    assert message.figures["infrastructure_errors"] == 0
    assert report["figures"]["pass_at_1"] == message.figures["pass_at_1"]
    assert {name: row["solved"] for name, row in report["problems"].items()} == {
        p.id: 2 * (int(p.id[1:]) % 2) for p in PROBLEMS
    }


def test_an_evaluation_asks_for_every_attempt_once_and_reports(run: Runner) -> None:
    async def scenario(p: Platform, world: World) -> None:
        async with evaluator(p, evaluator_in_flight=10):
            await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p))
            check(*await finished(p))
            assert (len(world.asked), set(world.asked.values())) == (TOTAL, {1})
            await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p))
            check(*await finished(p, 2))  # asked for twice: the same answer, no new work
            assert sum(world.asked.values()) == TOTAL
            await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p, "few", problems=2, samples=1, greedy=False))
            message, report = await finished(p, 3)
            assert (message.figures["problems"], len(report["problems"]), report["figures"]["greedy"]) == (2, 2, None)
            await eventually(lambda: not Archive(p.objects).all_open())

    run(scenario)


def test_a_client_that_asks_again_while_the_evaluation_is_put_away_gets_its_answer(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, close = threading.Event(), Archive.close

    def late(archive: Archive, request: EvalRequested) -> None:
        assert answered.wait(patient(60))
        close(archive, request)

    monkeypatch.setattr(Archive, "close", late)

    async def scenario(p: Platform, world: World) -> None:
        async with evaluator(p):
            try:
                await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p))
                check(*await finished(p))
                await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p))
                check(*await finished(p, 2))
            finally:
                answered.set()

    run(scenario)


def test_an_evaluator_that_is_killed_goes_on_where_it_was(run: Runner) -> None:
    async def scenario(p: Platform, world: World) -> None:
        world.answer_only = TOTAL // 2
        async with evaluator(p, "first", evaluator_in_flight=8):
            await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p))
            await eventually(lambda: world.answered == TOTAL // 2)
            kept = Archive(p.objects)
            await eventually(lambda: len(kept.results(request(p))) >= TOTAL // 4)
        before = {r.attempt for r in Archive(p.objects).results(request(p))}
        asked = dict(world.asked)
        world.free.set()
        async with evaluator(p, "second", evaluator_in_flight=8):
            check(*await finished(p))
        assert len(world.asked) == TOTAL
        assert all(
            world.asked[attempt] == asked[attempt] == 1 for attempt in before
        )  # what was durable is not done again

    run(scenario)


def test_verdicts_that_arrive_while_no_evaluator_runs_are_not_lost(run: Runner) -> None:
    async def scenario(p: Platform, world: World) -> None:
        world.answer_only = 0
        async with evaluator(p, "first"):
            await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p))
            await eventually(lambda: len(world.asked) > 0)
        world.free.set()
        await p.heard(topics.ROLLOUTS_SCORED, TOTAL)
        async with evaluator(p, "second", evaluator_in_flight=1):
            check(*await finished(p))
            assert sum(world.asked.values()) < 2 * TOTAL

    run(scenario)


def test_lost_attempts_are_asked_for_again_and_what_stays_lost_is_an_error_not_a_failure(run: Runner) -> None:
    async def scenario(p: Platform, world: World) -> None:
        world.lose = lambda r: r.key.problem == "p1" or (r.key.problem == "p3" and r.key.epoch == 0)
        async with evaluator(p, evaluator_asks=2):
            await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p, samples=1, greedy=False))
            message, report = await finished(p)
            assert message.figures["infrastructure_errors"] == 1
            assert message.figures["problems"] == len(PROBLEMS) - 1
            assert report["problems"]["p1"]["samples"] == 0
            assert report["problems"]["p3"]["samples"] == 1

    run(scenario)


def test_one_version_is_measured_after_the_other_in_the_order_of_asking_also_after_a_restart(run: Runner) -> None:
    async def scenario(p: Platform, world: World) -> None:
        serials: list[int | None] = []
        answer = world.answer

        def noted(request: RolloutRequested) -> RolloutScored | RolloutFailed:
            if world.asked[request.key.attempt] == 1:  # what was asked for again after the restart may come late
                serials.append(request.pinned)
            return answer(request)

        world.answer, world.answer_only = noted, 3  # type: ignore[method-assign]
        async with evaluator(p, "first", evaluator_in_flight=200):
            for name, serial in (("z", 7), ("a", 5), ("m", 7)):
                await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p, name, serial=serial))
            await eventually(lambda: len(Archive(p.objects).all_open()) == 3 and world.answered == 3)
        world.free.set()
        async with evaluator(p, "second", evaluator_in_flight=200):
            found = [message.eval for message in await p.heard(topics.EVALS_FINISHED, 3)]
        assert set(found[:2]) == {"z", "m"}  # of one version: together
        assert serials == sorted(serials, key=lambda serial: serial != 7)

    run(scenario)


def test_an_evaluation_that_can_never_begin_is_buried_with_the_reason_and_ends(run: Runner) -> None:
    async def scenario(p: Platform, world: World) -> None:
        junk = p.objects.put("junk", b"no pack")
        async with evaluator(p) as serving:
            await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p, "broken", pack=junk))
            await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p))
            message, report = await finished(p)  # who waits for it is not left waiting
            assert (message.eval, message.figures["attempts"]) == ("broken", 0)
            assert report["error"]
            check(*await finished(p, 2))
            assert not serving.done()

    run(scenario)


def test_an_open_request_or_a_report_that_is_damaged_keeps_no_other_evaluation_from_being_made(run: Runner) -> None:
    """A power loss may leave a file empty (`fsync` is off by default)."""

    async def scenario(p: Platform, world: World) -> None:
        async with evaluator(p):
            await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p))
            message, _ = await finished(p)
            await eventually(lambda: not Archive(p.objects).all_open())
        damaged, report = open_evaluation(RUN, "damaged"), message.report.key
        Archive(p.objects).open(request(p, "damaged"), 0.0)
        for key in (damaged, report):
            (p.state / "objects" / key).write_bytes(b"")
        async with evaluator(p) as serving:
            await p.bus.publish(topics.EVALS_REQUESTED, RUN, request(p))
            check(*await finished(p, 2))  # measured once more
            assert not serving.done()

    run(scenario)

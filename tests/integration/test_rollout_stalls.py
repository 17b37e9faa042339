"""How long rollout waits for a generation: as long as its replica works on it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.rollout.fleet import OPEN_AFTER
from shared.contracts import topics
from shared.contracts.messages import RolloutFinished
from tests.integration.rollout_platform import Engine, Platform, make_checkpoint, platform
from tests.patience import eventually, patient, quiet

LIMIT_S = 0.2  # rollout_generate_s
STALL_S = 0.5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "checkpoint"
    make_checkpoint(directory)
    return directory


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is slow to answer, on a busy machine, counts as alive."""
    monkeypatch.setattr("services.rollout.service.PROBE_S", 30.0)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout.inference.STALL_S", STALL_S)


async def all_finished(p: Platform, asked: set[str]) -> bool:
    ended = await p.heard(topics.ROLLOUTS_FINISHED, len(asked))
    return all(isinstance(m, RolloutFinished) for m in ended) and {m.key.attempt for m in ended} == asked


async def ask(p: Platform, count: int) -> set[str]:
    return {(await p.ask(p.request(f"p{1 + i % 6}"))).attempt for i in range(count)}


def asked_once(engine: Engine) -> bool:
    """Whether nothing that it had begun was asked for again."""
    rids = [r["rid"].rpartition(".") for r in engine.requests]
    return all(number in ("1", "2") for _, _, number in rids)  # a repair has two generations


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("state", ["works", "paused"])
def test_a_generation_is_waited_for_however_long_its_replica_works_on_it_or_is_paused(
    tmp_path: Path, checkpoint: Path, state: str
) -> None:
    async def scenario() -> None:
        async with (
            platform(tmp_path, checkpoint) as p,
            Engine(p.repairs, paused=state == "paused").running() as engine,
            p.worker(rollout_generate_s=LIMIT_S) as health,
        ):
            engine.free.clear()
            await p.announce(engine)
            asked = await ask(p, 2 * OPEN_AFTER)
            await eventually(lambda: engine.waiting == len(asked))
            await eventually(lambda: engine.looks > 4 * len(asked), "looks at the engine's steps")
            assert len(engine.requests) == len(asked)
            assert health.ready
            engine.paused = False
            engine.free.set()
            assert await all_finished(p, asked)
            assert asked_once(engine)

    asyncio.run(scenario())


def test_what_waits_at_a_replica_that_answers_and_makes_no_step_is_asked_for_elsewhere(
    tmp_path: Path, checkpoint: Path
) -> None:
    async def scenario() -> None:
        async with (
            platform(tmp_path, checkpoint) as p,
            Engine(p.repairs, name="hung", hung=True).running() as hung,
            Engine(p.repairs, name="other").running() as other,
            p.worker(rollout_generate_s=LIMIT_S),
        ):
            hung.free.clear()
            await p.announce(hung, other)
            assert await all_finished(p, await ask(p, 12))
            assert hung.requests  # there were some
            first = {tuple(r["input_ids"]) for r in hung.requests}
            assert first <= {tuple(r["input_ids"]) for r in other.requests}

    asyncio.run(scenario())


@pytest.mark.usefixtures("stall")
def test_what_waits_at_a_frozen_replica_is_asked_for_elsewhere(tmp_path: Path, checkpoint: Path) -> None:
    async def scenario() -> None:
        async with (
            platform(tmp_path, checkpoint) as p,
            Engine(p.repairs, name="frozen").running() as frozen,
            Engine(p.repairs, name="other").running() as other,
            p.worker(),
        ):
            frozen.free.clear()
            other.free.clear()
            await p.announce(frozen, other)
            asked = await ask(p, 12)
            await eventually(lambda: frozen.waiting + other.waiting == len(asked))
            assert frozen.waiting
            frozen.dead = True
            other.free.set()
            assert await all_finished(p, asked)

    asyncio.run(scenario())


@pytest.mark.usefixtures("stall")
def test_what_waits_at_a_frozen_replica_stays_there_while_no_other_can_serve(tmp_path: Path, checkpoint: Path) -> None:
    async def scenario() -> None:
        async with (
            platform(tmp_path, checkpoint) as p,
            Engine(p.repairs).running() as engine,
            p.worker(rollout_generate_s=LIMIT_S) as health,
        ):
            engine.free.clear()
            await p.announce(engine)
            asked = await ask(p, 3)
            await eventually(lambda: engine.waiting == len(asked))
            engine.dead = True
            await eventually(lambda: not health.ready)
            await quiet(3 * STALL_S, "generations leave a frozen replica although no other can serve")
            engine.dead = False
            engine.free.set()
            assert await all_finished(p, asked)
            assert asked_once(engine)

    asyncio.run(scenario())


@pytest.mark.usefixtures("stall")
def test_what_waits_at_an_address_that_its_replica_has_left_is_asked_for_at_the_new_one(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Nobody probes the old address any more: nothing would say that it is silent."""

    async def scenario() -> None:
        async with (
            platform(tmp_path, checkpoint) as p,
            Engine(p.repairs).running() as old,
            Engine(p.repairs).running() as new,
            p.worker(),
        ):
            old.free.clear()
            await p.announce(old)
            asked = await ask(p, 2)
            await eventually(lambda: old.waiting == len(asked))
            old.dead = True
            await p.announce(new)
            assert await all_finished(p, asked)

    asyncio.run(scenario())


@pytest.mark.usefixtures("unhurried")
def test_a_request_that_came_too_slowly_is_sent_again_and_says_nothing_against_its_replica(
    tmp_path: Path, checkpoint: Path
) -> None:
    async def scenario() -> None:
        async with (
            platform(tmp_path, checkpoint) as p,
            Engine(p.repairs).running() as engine,
            p.worker() as health,
        ):
            await p.announce(engine)
            await eventually(lambda: health.ready)
            engine.statuses = [408, 425] * OPEN_AFTER
            asked = await ask(p, OPEN_AFTER)
            async with asyncio.timeout(patient(20)):
                while engine.statuses:
                    assert health.ready
                    await asyncio.sleep(0.02)
            assert await all_finished(p, asked)

    asyncio.run(scenario())

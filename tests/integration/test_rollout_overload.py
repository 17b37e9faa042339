"""Rollout against engines that have no room: they are passed over or waited for, and are not taken for lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.rollout.fleet import OPEN_AFTER
from shared.contracts import topics
from tests.integration.rollout_platform import Engine, Platform, make_checkpoint, platform
from tests.patience import eventually


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "checkpoint"
    make_checkpoint(directory)
    return directory


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is slow to answer, on a busy machine, counts as alive."""
    monkeypatch.setattr("services.rollout.service.PROBE_S", 30.0)


async def ask(p: Platform, count: int) -> set[str]:
    return {(await p.ask(p.request(f"p{1 + i % 6}"))).attempt for i in range(count)}


async def all_finished(p: Platform, asked: set[str], count: int = 0) -> bool:
    """`count`: with those of before."""
    return asked <= {f.key.attempt for f in await p.heard(topics.ROLLOUTS_FINISHED, count or len(asked))}


def test_an_overloaded_engine_is_waited_for_and_the_service_does_not_call_it_lost(
    tmp_path: Path, checkpoint: Path
) -> None:
    async def scenario() -> None:
        async with (
            platform(tmp_path, checkpoint) as p,
            Engine(p.repairs, places=0).running() as engine,
            p.worker(rollout_concurrency=32) as health,
        ):
            await p.announce(engine)
            await eventually(lambda: health.ready)
            asked = await ask(p, 24)
            for _ in range(3):
                before = engine.refused
                await eventually(lambda before=before: engine.refused > before + 24 * OPEN_AFTER)
                assert health.ready
            assert not engine.requests
            engine.places = 2
            assert await all_finished(p, asked)
            assert health.ready

    asyncio.run(scenario())


def test_what_a_saturated_engine_has_no_room_for_goes_to_another_one(tmp_path: Path, checkpoint: Path) -> None:
    async def scenario() -> None:
        async with (
            platform(tmp_path, checkpoint) as p,
            Engine(p.repairs, name="full", places=0, retry_after="3600").running() as full,
            Engine(p.repairs, name="free").running() as free,
            p.worker(rollout_concurrency=32) as health,
        ):
            await p.announce(full, free)
            await eventually(lambda: health.ready)
            assert await all_finished(p, await ask(p, 24))
            assert not full.requests
            asked_before = full.refused
            assert 0 < asked_before <= 32  # those that were on their way at the first refusal
            assert await all_finished(p, await ask(p, 12), 36)
            assert full.refused == asked_before  # it asked for an hour of rest

    asyncio.run(scenario())

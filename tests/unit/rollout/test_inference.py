"""Waiting for a replica that serves a pinned version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.rollout import inference as module
from services.rollout.config import RolloutSettings
from services.rollout.engine_client import EngineClient
from services.rollout.fleet import Wanted
from services.rollout.inference import Inference
from shared.contracts.messages import PolicyApplied
from shared.environments import InfrastructureError
from shared.telemetry import Health
from tests import clock
from tests.clock import passes

PINNED = Wanted("r", "g", 3, pinned=3)
PIN_WAIT_S = 1.0
Story = Callable[[Inference], Awaitable[None]]


@pytest.fixture
def waiting(tmp_path: Path) -> Callable[[Story], None]:
    """Of one replica, which works and serves another version."""

    def tell(story: Story) -> None:
        async def whole() -> None:
            health = Health("rollout", RolloutSettings(state=tmp_path, name="w"))
            async with EngineClient(probe_s=1.0) as client:
                inference = Inference(client, health, pin_wait_s=PIN_WAIT_S, generate_s=1.0)
                answers(inference, "works", 4)
                await story(inference)

        clock.run(whole(), module)

    return tell


def answers(inference: Inference, name: str, serial: int) -> None:
    inference.apply(PolicyApplied(run="r", replica=name, url=f"http://{name}", pool="rollout", serial=serial))
    inference.answered(inference.fleet.replicas[name])


def test_a_version_that_no_working_replica_serves_is_not_waited_for_for_ever(
    waiting: Callable[[Story], None],
) -> None:
    async def story(inference: Inference) -> None:
        with pytest.raises(InfrastructureError, match="version 3"):
            await inference.replica(PINNED, "")
        with pytest.raises(InfrastructureError, match="version 3"):  # and the next one does not wait again
            async with asyncio.timeout(PIN_WAIT_S / 2):
                await inference.replica(PINNED, "")

    waiting(story)


def test_while_no_replica_works_at_all_no_version_is_missed(waiting: Callable[[Story], None]) -> None:
    async def story(inference: Inference) -> None:
        asking = asyncio.create_task(inference.replica(PINNED, ""))
        await passes(0.1)
        inference.lost(inference.fleet.replicas["works"])
        await passes(2 * PIN_WAIT_S)
        answers(inference, "works", 4)  # the first one that is back is another
        await passes(0.1)
        answers(inference, "pinned", 3)
        assert (await asking).name == "pinned"

    waiting(story)


def test_an_absence_of_long_ago_is_held_against_nobody_who_begins_to_wait(waiting: Callable[[Story], None]) -> None:
    async def story(inference: Inference) -> None:
        asking = asyncio.create_task(inference.replica(PINNED, ""))
        await passes(0.1)
        asking.cancel()
        await passes(2 * PIN_WAIT_S + 1.1)
        asking = asyncio.create_task(inference.replica(PINNED, ""))
        await passes(0.1)
        answers(inference, "pinned", 3)
        assert (await asking).name == "pinned"

    waiting(story)

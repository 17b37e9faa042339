"""Under which version a session begins, as its engine hears it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from services.rollout.config import RolloutSettings
from services.rollout.engine_client import EngineClient
from services.rollout.fleet import Wanted
from services.rollout.generation import RoutingShape
from services.rollout.inference import Inference, Session
from shared.telemetry import Health
from tests.integration.rollout_platform import EXPERTS, LAYERS, RUN, Engine, K
from tests.patience import quiet


def test_a_session_begins_under_the_version_that_serves_and_keeps_it_over_a_swap(tmp_path: Path) -> None:
    """Not under the one that the worker heard of last: its cache entries may still be there."""

    async def scenario() -> None:
        config = RolloutSettings(state=tmp_path, name="w")
        routing = RoutingShape(layers=LAYERS, moe_layers=tuple(range(LAYERS)), top_k=K, experts=EXPERTS)
        async with Engine(lambda _: [7], serial=1).running() as engine, EngineClient(probe_s=1.0) as client:
            inference = Inference(client, Health("rollout", config), pin_wait_s=1.0, generate_s=60.0)
            inference.apply(engine.applied())
            inference.fleet.replicas[engine.name].alive = True

            def session(attempt: str) -> Session:
                return Session(inference, attempt, Wanted(RUN, "g", 0), 1.0, (7,), routing)

            async def turn(of: Session, *tokens: int) -> str | None:
                """The key that it sent."""
                await of.generate(list(tokens), max_new_tokens=1, first_row=0)
                return engine.requests[-1].get("extra_key")

            engine.serial = 2  # nobody has said so yet
            one, peer, later = session("a.0"), session("b.0"), session("c.0")
            assert [await turn(one, 1, 2), await turn(peer, 1, 2)] == [None, None]  # a group shares its prompt
            engine.serial = 3
            assert [await turn(one, 1, 2, 7, 3), await turn(peer, 1, 2, 7, 4)] == ["@2", "@2"]
            assert [await turn(later, 1, 2), await turn(later, 1, 2, 7, 3)] == [None, "@3"]

    asyncio.run(scenario())


def test_an_attempt_that_has_tokens_asks_no_replica_out_of_rotation_for_an_older_version_than_its_first(
    tmp_path: Path,
) -> None:
    """The scheduler reckons with the oldest version that an attempt has reported, and with the replicas in rotation."""

    async def scenario() -> None:
        config = RolloutSettings(state=tmp_path, name="w")
        async with (
            Engine(lambda _: [7], serial=1, name="old").running() as old,
            Engine(lambda _: [7], serial=2, name="new").running() as new,
            EngineClient(probe_s=1.0) as client,
        ):
            inference = Inference(client, Health("rollout", config), pin_wait_s=1.0, generate_s=60.0)
            inference.apply(msgspec.structs.replace(old.applied(), serial=2, ok=False, serving=1))
            inference.apply(new.applied())
            inference.fleet.replicas["new"].alive = True
            routing = RoutingShape(layers=LAYERS, moe_layers=tuple(range(LAYERS)), top_k=K, experts=EXPERTS)
            session = Session(inference, "a.0", Wanted(RUN, "g", 0), 1.0, (7,), routing)
            await session.generate([1, 2], max_new_tokens=1, first_row=0)
            new.serial = 3  # what it samples later is newer, and binds nobody to it
            await session.generate([1, 2, 7, 3], max_new_tokens=1, first_row=0)
            inference.fleet.replicas["new"].alive = False
            inference.fleet.replicas["old"].alive = True
            going_on = asyncio.create_task(session.generate([1, 2, 7, 3, 7, 4], max_new_tokens=1, first_row=0))
            await quiet(0.3, "the old replica is asked for an older version than the attempt's first")
            assert not old.requests
            old.serial = 2
            inference.apply(msgspec.structs.replace(old.applied(), serial=3, ok=False, serving=2))
            assert (await going_on).versions_N.tolist() == [2]

    asyncio.run(scenario())

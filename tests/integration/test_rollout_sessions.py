"""Under which version a session begins, as its engine hears it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.rollout.config import RolloutSettings
from services.rollout.engine_client import EngineClient
from services.rollout.fleet import Wanted
from services.rollout.generation import RoutingShape
from services.rollout.inference import Inference, Session
from shared.telemetry import Health
from tests.integration.rollout_platform import EXPERTS, LAYERS, RUN, Engine, K


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

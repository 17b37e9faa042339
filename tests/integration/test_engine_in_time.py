"""A replica over time: tokens as they come, what waits over a swap, an engine that can go on no more."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from services.inference.engine import MOST_FAILED, Engine
from services.inference.service import Inference
from shared.settings import Told
from tests.integration.engine_platform import Platform, ask, body_of, run
from tests.patience import eventually


def stop_at(engine: Engine, tokens: int) -> None:
    """The engine pauses by itself when the one request that waits has so many."""
    request, sampled = engine.batch.waiting[0], 0
    tell = request.progress

    def progress(token: int, logprob: float, serial: int) -> None:
        nonlocal sampled
        sampled += 1
        if sampled == tokens:
            engine.pause(abort=False)
        if tell is not None:
            tell(token, logprob, serial)

    request.progress = progress


def test_a_stream_tells_tokens_as_they_are_sampled_and_ends_with_the_whole_answer(tmp_path):
    async def test(p: Platform) -> None:
        await p.start_run()
        async with p.replica() as replica, aiohttp.ClientSession() as session:
            await p.applied(0)
            url, engine = replica.health.url, replica.server.engine
            asked = body_of([1, 2, 3], 20, stream=True, sampling={"sampling_seed": 3})
            await ask(url, "/pause_generation", {"mode": "in_place"})
            sending = asyncio.create_task(session.post(f"{url}/generate", json=asked))
            await eventually(lambda: engine.waiting == 1)
            engine.call(lambda: stop_at(engine, 5)).result()
            engine.proceed().result()
            response = await sending
            assert response.status == 200
            parts: list[dict[str, Any]] = []
            while not parts or len(parts[-1]["output_ids"]) < 5:  # the engine stands still at the fifth
                parts.append(await event_of(response))
            assert parts[-1]["meta_info"]["finish_reason"] is None
            engine.proceed().result()
            *rest, done = (await response.text()).rstrip("\n").split("\n\n")
            *more, whole = [json.loads(event.removeprefix("data: ")) for event in rest]
            assert done == "data: [DONE]"
            assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
            told = [part["output_ids"] for part in (*parts, *more)]
            assert all(whole["output_ids"][: len(part)] == part for part in told)
            assert [len(part) for part in told] == sorted({len(part) for part in told})
            plain = (await ask(url, "/generate", {**asked, "stream": False}))[1]
            assert plain["output_ids"] == whole["output_ids"]

    run(test, tmp_path)


async def event_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    event = await response.content.readuntil(b"\n\n")
    return json.loads(event.removeprefix(b"data: "))


def test_a_session_that_waits_over_a_swap_begins_on_the_new_versions_cache(tmp_path):
    async def test(p: Platform) -> None:
        p.write_version(0, None)
        await p.start_run()
        async with p.replica() as replica:
            await p.applied(0)
            url, engine, asked = replica.health.url, replica.server.engine, body_of(list(range(30)), 2)
            await ask(url, "/generate", asked)
            assert (await ask(url, "/generate", asked))[1]["meta_info"]["cached_tokens"] == 29
            await ask(url, "/pause_generation", {"mode": "in_place"})
            waits = asyncio.create_task(ask(url, "/generate", asked))
            await eventually(lambda: engine.waiting == 1)
            p.write_version(1, 0)
            await p.announce(1, 0)
            await p.applied(1)
            await ask(url, "/continue_generation", {})
            meta = (await waits)[1]["meta_info"]
            assert (meta["cached_tokens"], meta["oldest_kv_version"]) == (0, 1)

    run(test, tmp_path)


def test_a_replica_whose_every_step_fails_leaves_the_rotation_and_ends_with_the_reason(tmp_path, monkeypatch):
    async def test(p: Platform) -> None:
        await p.start_run()
        inference = Inference(p.settings, p.bus, p.objects)
        async with inference.health:
            running = asyncio.create_task(inference.run(asyncio.Event()))
            await p.applied(0)
            url, engine = inference.health.url, inference.server.engine

            def lost() -> None:
                raise RuntimeError("the device is lost")

            monkeypatch.setattr(engine.batch, "step", lost)
            for i in range(MOST_FAILED):
                status, answer = await ask(url, "/generate", body_of([1, 2, 3 + i], 4))
                assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
            with pytest.raises(Told, match=f"engine: {MOST_FAILED} steps failed .* the device is lost"):
                await running
            status, answer = await ask(url, "/health")
            assert (status, answer["alive"]) == (503, False)

    run(test, tmp_path)

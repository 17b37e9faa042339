"""What an engine tells while it samples, from its thread to the worker that hears it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from services.inference.news import News
from services.inference.request import Request as Sampling
from services.rollout.engine_client import EngineClient, EngineUnavailable, Request
from services.rollout.generation import Generation

ASKED = Request("a.0-1", [1, 2, 3], 1.0, 8, (), None, 0)


def sampling() -> Sampling:
    return Sampling(
        rid="a.0-1", tokens_P=np.array([1, 2, 3], np.int32), max_new_tokens=8, done=lambda _: None, key="@4"
    )


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(-512, 0), st.integers(4, 6)), max_size=20), st.data())
def test_events_together_tell_every_token_once(sampled: list[tuple[int, int, int]], data: st.DataObject) -> None:
    request = sampling()
    news, events = News(request), []
    for token, chance, serial in sampled:
        assert request.progress is not None
        request.progress(token, chance / 64, serial)
        if data.draw(st.booleans()) and (event := news.event()) is not None:
            events.append(event)
    if (event := news.event()) is not None:
        events.append(event)
    assert news.event() is None
    assert [token for event in events for token in event["output_ids"]] == [token for token, _, _ in sampled]
    told = [
        int(span["version"])
        for event in events
        for span in event["meta_info"]["weight_versions"]
        for _ in range(span["start"], span["end"])
    ]
    assert told == [serial for _, _, serial in sampled]


def heard(script: list[Any], *, end: bytes = b"data: [DONE]\n\n") -> tuple[list[Generation], Generation | str]:
    """Return what is heard, and the answer or why there is none, of a server that says `script`, byte by byte."""

    async def scenario() -> tuple[list[Generation], Generation | str]:
        async def generate(http: web.Request) -> web.StreamResponse:
            body = await http.json()
            assert body["stream"] is True
            assert body["told_every_s"] > 0
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(http)
            for event in script:
                data = b"data: " + msgspec.json.encode(event) + b"\n\n"
                for at in range(0, len(data), 7):
                    await response.write(data[at : at + 7])
            await response.write(end)
            if not end:
                assert http.transport is not None
                http.transport.abort()
            return response

        app = web.Application()
        app.add_routes([web.post("/generate", generate)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pieces: list[Generation] = []
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        try:
            async with EngineClient(probe_s=1.0) as client:
                return pieces, await client.generate(url, ASKED, None, heard=pieces.append)
        except EngineUnavailable as error:
            return pieces, str(error)
        finally:
            await runner.cleanup()

    return asyncio.run(scenario())


def events() -> list[Any]:
    request = sampling()
    news, made = News(request), []
    for token in (7, 8):
        assert request.progress is not None
        request.progress(token, -0.5, 4)
        made.append(news.event())
    return made


def test_what_was_told_is_kept_when_the_engine_dies() -> None:
    pieces, said = heard(events(), end=b"")
    assert isinstance(said, str)
    whole = pieces[0].then(pieces[1])
    assert (whole.tokens, whole.versions_N.tolist(), whole.finish, whole.cache_key) == ([7, 8], [4, 4], "abort", "@4")
    assert whole.oldest_kv_version == 4


def test_the_last_event_is_the_answer() -> None:
    meta = {
        "output_token_logprobs": [[-0.5, token, None] for token in (7, 8, 9)],
        "weight_version": "4",
        "oldest_kv_version": 4,
        "finish_reason": {"type": "stop", "matched": 9},
    }
    pieces, answer = heard([*events(), {"output_ids": [7, 8, 9], "meta_info": meta}])
    assert [piece.tokens for piece in pieces] == [[7], [8]]
    assert isinstance(answer, Generation)
    assert answer.tokens == [7, 8, 9]


@pytest.mark.parametrize("script", [[], [{"error": {"message": "out of memory"}}]])
def test_a_stream_without_an_answer_is_a_lost_generation(script: list[Any]) -> None:
    pieces, said = heard([*events(), *script])
    assert [piece.tokens for piece in pieces] == [[7], [8]]
    assert isinstance(said, str)
    assert ("out of memory" in said) == bool(script)

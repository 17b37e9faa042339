"""/v1/chat/completions of a running replica, with the embedded engine and with SGLang's stand-in: as a client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.inference.chat import template
from services.inference.service import Inference
from tests.chat_checkpoint import MODEL, call, tool, write_chat
from tests.integration.engine_platform import Platform, ask, body_of
from tests.integration.sglang_world import World
from tests.integration.test_engine_in_time import stop_at
from tests.patience import eventually, patient

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Read a.py, please: ü"}
LIMIT_S = 120
SEED = 5
Test = Callable[[Platform, Inference], Awaitable[None]]


def embedded(tmp_path: Path, test: Test, *, chat: bool = True, **changes: Any) -> None:
    """With a replica that serves a checkpoint which speaks."""

    async def go() -> None:
        platform = Platform(tmp_path, MODEL, context=1024)
        if chat:
            write_chat(platform.base)
        await platform.start_run()
        async with platform.replica(**changes) as replica:
            await platform.applied(0)
            await test(platform, replica)
        await platform.bus.close()

    asyncio.run(asyncio.wait_for(go(), patient(LIMIT_S)))


def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, test: Test) -> None:
    """The same over a stand-in for SGLang that says `text`."""

    async def go() -> None:
        platform = Platform(tmp_path, MODEL, context=1024)
        speaker = write_chat(platform.base)
        world = World(platform, monkeypatch)
        script = tmp_path / "speaking"
        stand_in = Path(__file__).with_name("speaking_sglang.py")
        script.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{stand_in}" "$@"\n')
        script.chmod(0o755)
        ids = speaker.encode(text, add_special_tokens=False).ids
        world.wrong(say=[*ids, *template.load(platform.base).stop_tokens])
        await platform.start_run()
        async with world.replica(sglang_python=str(script)) as replica:
            await platform.applied(0)
            await test(platform, replica)
        await platform.bus.close()

    asyncio.run(asyncio.wait_for(go(), patient(LIMIT_S)))


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [USER], "max_tokens": 24, **fields}


async def streamed(url: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + CHAT, json={**fields, "stream": True}) as response,
    ):
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        *events, done = (await response.text()).rstrip("\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def content_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_a_conversation_is_what_generate_samples_from_its_ids_and_a_stream_says_the_same(tmp_path):
    async def test(p: Platform, replica: Inference) -> None:
        url, speaks = replica.health.url, template.load(p.base)
        asked = body(seed=5, logprobs=True, temperature=0.8)
        status, whole = await ask(url, CHAT, asked)
        assert status == 200, whole
        prompt = speaks.prompt([USER], None, {}, context=1024)
        sampling = {"temperature": 0.8, "sampling_seed": 5, "stop_token_ids": list(speaks.stop_tokens)}
        _, plain = await ask(url, "/generate", body_of(prompt, 24, sampling=sampling))
        (choice,) = whole["choices"]
        ids = [id for id in plain["output_ids"] if id not in speaks.hidden]
        assert choice["message"] == {"role": "assistant", "content": speaks.tokenizer.decode(ids)}
        assert choice["finish_reason"] == plain["meta_info"]["finish_reason"]["type"]
        told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert told == pytest.approx([pair[0] for pair in plain["meta_info"]["output_token_logprobs"]], abs=1e-5)
        usage = whole["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(plain["output_ids"]))
        assert (whole["model"], whole["weight_version"]) == ("policy", "0")
        assert whole["weight_versions"] == plain["meta_info"]["weight_versions"]
        *chunks, last = await streamed(url, {**asked, "stream_options": {"include_usage": True}})
        assert content_of(chunks) == choice["message"]["content"]
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert chunks[-1]["weight_version"] == "0"
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], usage["completion_tokens"])

    embedded(tmp_path, test)


def test_a_stop_sequence_ends_the_text_and_the_generation(tmp_path):
    async def test(p: Platform, replica: Inference) -> None:
        url = replica.health.url
        _, whole = await ask(url, CHAT, body(seed=5))
        text = whole["choices"][0]["message"]["content"]
        stop = next(text[i : i + 2] for i in range(2, len(text) - 1) if text.find(text[i : i + 2]) == i)
        asked = body(seed=5, max_tokens=900, stop=stop)
        status, short = await ask(url, CHAT, asked)
        assert status == 200, short
        (choice,) = short["choices"]
        assert choice["message"]["content"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        assert short["usage"]["completion_tokens"] <= whole["usage"]["completion_tokens"]
        chunks = await streamed(url, asked)
        assert content_of(chunks) == choice["message"]["content"]
        assert replica.server.engine.running == 0

    embedded(tmp_path, test)


def test_a_paused_replica_answers_once_it_goes_on_and_too_many_are_told_to_come_again(tmp_path):
    async def test(p: Platform, replica: Inference) -> None:
        url, engine = replica.health.url, replica.server.engine
        assert (await ask(url, "/pause_generation", {"mode": "in_place"}))[0] == 200
        waits = asyncio.create_task(ask(url, CHAT, body()))
        await eventually(lambda: engine.call(lambda: len(engine.batch.waiting)).result() == 1)
        async with aiohttp.ClientSession() as session, session.post(url + CHAT, json=body(stream=True)) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert "limit is 1" in (await refused.json())["error"]["message"]
        assert not waits.done()
        await ask(url, "/continue_generation", {})
        assert (await waits)[0] == 200
        replica.server.draining = True
        assert (await ask(url, CHAT, body()))[0] == 503

    embedded(tmp_path, test, queue_limit=1)


def test_a_client_that_goes_away_frees_its_row_and_an_aborted_answer_is_none(tmp_path):
    async def test(p: Platform, replica: Inference) -> None:
        url, engine = replica.health.url, replica.server.engine
        endless = body(temperature=100, max_tokens=50_000)  # ends by chance alone, or with the context
        await ask(url, "/pause_generation", {"mode": "in_place"})
        leaving = asyncio.create_task(ask(url, CHAT, endless))
        await eventually(lambda: engine.call(lambda: len(engine.batch.waiting)).result() == 1)
        leaving.cancel()
        await eventually(lambda: engine.call(lambda: len(engine.batch.waiting)).result() == 0)
        await eventually(replica.server.idle.is_set)
        aborted = asyncio.create_task(ask(url, CHAT, endless))
        await eventually(lambda: engine.call(lambda: len(engine.batch.waiting)).result() == 1)
        await ask(url, "/abort_request", {"abort_all": True})
        status, answer = await aborted
        assert (status, answer["error"]["type"]) == (503, "Unavailable")
        assert "aborted" in answer["error"]["message"]

    embedded(tmp_path, test)


@contextlib.asynccontextmanager
async def begun(
    session: aiohttp.ClientSession, replica: Inference, tokens: int
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream of which some tokens are sampled; the engine stands still. SEED samples no end for as long as a test needs."""
    url, engine = replica.health.url, replica.server.engine
    assert engine is not None
    await ask(url, "/pause_generation", {"mode": "in_place"})
    sending = asyncio.create_task(session.post(url + CHAT, json=body(max_tokens=tokens, stream=True, seed=SEED)))
    await eventually(lambda: engine.waiting == 1)
    engine.call(lambda: stop_at(engine, 5)).result()
    engine.proceed().result()
    async with await sending as response:
        yield response


def test_a_stream_that_is_aborted_says_so_instead_of_ending_as_an_answer(tmp_path):
    async def test(p: Platform, replica: Inference) -> None:
        url = replica.health.url
        async with aiohttp.ClientSession() as session, begun(session, replica, 900) as response:
            await response.content.readuntil(b"\n\n")  # one event, whole: there may be no second before the abort
            assert (await ask(url, "/pause_generation", {"mode": "abort"}))[0] == 200
            *_, error, done = (await response.text()).rstrip("\n").split("\n\n")
        assert "aborted" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        assert (await ask(url, "/continue_generation", {}))[0] == 200
        assert (await ask(url, CHAT, body()))[0] == 200

    embedded(tmp_path, test)


def test_a_client_that_leaves_in_mid_stream_frees_its_place(tmp_path):
    async def test(p: Platform, replica: Inference) -> None:
        engine = replica.server.engine
        assert engine is not None
        async with aiohttp.ClientSession() as session:
            async with begun(session, replica, 50000) as response:
                await response.content.readuntil(b"\n\n")
                assert engine.running == 1
                response.close()
            engine.proceed().result()
            await eventually(lambda: engine.running == 0)
            await eventually(replica.server.idle.is_set)

    embedded(tmp_path, test, context=60000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": [{"role": "robot", "content": "hi"}]}, ["messages[0].role", "'robot'", "'user'"]),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, ["messages", "tokens", "1..1024"]),
        ({"tool_choice": "required"}, ["tool_choice", "'required'", "'none', 'auto'"]),
        ({"top_p": 0.5}, ["top_p", "0.5", "allowed: 1"]),
        ({"n": 3}, ["n", "3", "allowed: 1"]),
        ({"stream": "yes"}, ["stream", "bool"]),
    ],
)
def test_bad_input_is_refused_by_field_value_and_what_is_allowed(shared, change, words):
    status, answer = shared(body(**change))
    assert status == 400
    assert all(word in answer["error"]["message"] for word in words), answer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Asks a replica that serves a checkpoint which speaks."""
    with asyncio.Runner() as runner:
        platform = Platform(tmp_path_factory.mktemp("speaks"), MODEL, context=1024)
        write_chat(platform.base)
        runner.run(platform.start_run())
        context = platform.replica()
        replica = runner.run(context.__aenter__())
        runner.run(platform.applied(0))
        yield lambda fields: runner.run(ask(replica.health.url, CHAT, fields))
        runner.run(context.__aexit__(None, None, None))
        runner.run(platform.bus.close())


def test_a_checkpoint_without_a_template_says_so_and_serves_token_ids(tmp_path):
    async def test(p: Platform, replica: Inference) -> None:
        status, answer = await ask(replica.health.url, CHAT, body())
        assert status == 400
        assert "no chat template" in answer["error"]["message"]
        assert "/generate" in answer["error"]["message"]
        assert (await ask(replica.health.url, "/generate", body_of([1, 2])))[0] == 200

    embedded(tmp_path, test, chat=False)


def test_before_there_are_weights_a_conversation_is_asked_to_come_again(tmp_path):
    async def go() -> None:
        platform = Platform(tmp_path, MODEL)
        async with platform.replica() as replica:
            assert (await ask(replica.health.url, CHAT, body()))[0] == 503
        await platform.bus.close()

    asyncio.run(asyncio.wait_for(go(), patient(LIMIT_S)))


TEXT = "I look at ü.\n" + call("read", path="a.py") + "\n" + call("read", path="ü\n</tool_call>")


def test_with_sglang_calls_come_back_as_calls_streamed_or_not_and_their_results_go_into_the_next_prompt(
    tmp_path, monkeypatch
):
    async def test(p: Platform, replica: Inference) -> None:
        url, asked = replica.health.url, body(tools=[tool("read")], max_tokens=500, logprobs=True)
        status, whole = await ask(url, CHAT, asked)
        assert status == 200, whole
        (choice,) = whole["choices"]
        message = choice["message"]
        assert (message["content"], choice["finish_reason"]) == ("I look at ü.", "tool_calls")
        arguments = [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]]
        assert arguments == [{"path": "a.py"}, {"path": "ü\n</tool_call>"}]
        assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
        assert whole["weight_version"] == "0"
        chunks = await streamed(url, asked)
        assert content_of(chunks) == message["content"]
        assert sum(bool(chunk["choices"][0]["delta"].get("content")) for chunk in chunks) > 2  # piece by piece
        deltas = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert [d["function"] for d in deltas] == [c["function"] for c in message["tool_calls"]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x = 1"}
        assert (await ask(url, CHAT, {**asked, "messages": [USER, message, result]}))[0] == 200
        sent = (await ask((await ask(url, "/server_info"))[1]["url"], "/server_info"))[1]["asked"][-1]["input_ids"]
        prompt = template.load(p.base).tokenizer.decode(sent, skip_special_tokens=False)
        assert f"<|im_start|>assistant\n{TEXT}<|im_end|>\n<|im_start|>tool\nx = 1<|im_end|>" in prompt

    sglang(tmp_path, monkeypatch, TEXT, test)


def test_with_sglang_a_stop_sequence_ends_the_generation_in_the_server(tmp_path, monkeypatch):
    async def test(p: Platform, replica: Inference) -> None:
        url, asked = replica.health.url, body(stop=["enough", "\n\n"], max_tokens=900)
        status, whole = await ask(url, CHAT, asked)
        assert status == 200, whole
        (choice,) = whole["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("That is ", "stop")
        assert whole["usage"]["completion_tokens"] < 20
        assert content_of(await streamed(url, asked)) == "That is "

    sglang(tmp_path, monkeypatch, "That is enough" + " and more" * 50, test)

"""OpenAI's and Anthropic's own clients against the recording endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from typing import Any

import anthropic
import openai
import pytest

from services.rollout.endpoint.history import Branch
from services.rollout.endpoint.recording import Recording
from shared.contracts.messages import StopReason
from shared.environments import InfrastructureError
from shared.renderers.chat import Chat
from tests.unit.endpoint.world import Policy, Said, recording, renderer, require_exact, served

TOOL = {
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
TOOLS: list[Any] = [{"type": "function", "function": TOOL}]
OWN_TOOLS: list[Any] = [{"name": "bash", "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
TASK: list[Any] = [{"role": "system", "content": "You mend code."}, {"role": "user", "content": "Mend it."}]
LS: Said = ("I look.", [("bash", {"command": "ls"})])
TWO: Said = ("", [("bash", {"command": "ls"}), ("bash", {"command": "pwd"})])


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return renderer(tmp_path_factory.mktemp("chat"))


Use = Callable[[Any, Recording, Policy], Coroutine[Any, Any, None]]


def with_openai(chat: Chat, replies: list[Said], use: Use, **limits: Any) -> Recording:
    async def run() -> Recording:
        recorded, policy = recording(chat, replies, **limits)
        async with served(recorded) as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=recorded.key, max_retries=0) as client:
                await use(client, recorded, policy)
        return recorded

    return asyncio.run(run())


def with_anthropic(chat: Chat, replies: list[Said], use: Use, **limits: Any) -> Recording:
    async def run() -> Recording:
        recorded, policy = recording(chat, replies, **limits)
        async with served(recorded) as url:
            async with anthropic.AsyncAnthropic(base_url=url, api_key=recorded.key, max_retries=0) as client:
                await use(client, recorded, policy)
        return recorded

    return asyncio.run(run())


def test_openai_a_conversation_with_parallel_tools_is_one_segment_of_the_ids_that_the_engine_saw(chat: Chat) -> None:
    async def use(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        messages = list(TASK)
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="m", messages=messages, tools=TOOLS, extra_body={"return_token_ids": True}
            )
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            calls = choice.message.tool_calls or []
            messages.append(choice.message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": f"of {call.id}"} for call in calls]
            assert (answer.model_extra or {})["prompt_token_ids"] == policy.seen[-1][0]
            assert (choice.model_extra or {})["token_ids"] == policy.seen[-1][1]
        assert [json.loads(call.function.arguments) for call in calls] == [{"command": "ls"}, {"command": "pwd"}]
        last = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("Done.", "stop")
        assert last.usage is not None
        assert last.usage.prompt_tokens == len(policy.seen[-1][0])
        require_exact(recorded, policy)
        first, second = (policy.seen[i][0] for i in (0, 1))
        assert second[: len(first)] == first
        said = chat.text(second[len(first) :])
        assert said.count("<tool_response>") == 1

    recorded = with_openai(chat, [LS, TWO, "Done."], use)
    assert recorded.branches == {Branch.first: 1, Branch.continues: 2}
    assert len(recorded.tree.recorder().segments()) == 1
    assert recorded.rewritten == 0


def test_openai_a_stream_says_what_the_whole_answer_says(chat: Chat) -> None:
    async def use(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}}
        stream = await client.chat.completions.create(model="m", messages=TASK, tools=TOOLS, stream=True, **options)
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert [call.function.name for call in calls if call.function] == ["bash"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(policy.seen[0][1])
        finished = next(chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason)
        assert (finished.model_extra or {})["token_ids"] == policy.seen[0][1]

    with_openai(chat, [LS], use)


def test_openai_stop_max_tokens_and_logprobs(chat: Chat) -> None:
    async def use(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        create = client.chat.completions.create
        stopped = await create(model="m", messages=TASK, stop=["END"], logprobs=True)
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one ", "stop")
        node = recorded.tree.nodes[0]
        assert chat.text(node.generation.tokens).startswith("one END")
        assert len(node.generation.tokens) < len(policy.seen[0][1])
        logprobs = stopped.choices[0].logprobs
        assert logprobs is not None
        assert len(logprobs.content or []) == len(node.generation.tokens)
        short = await create(model="m", messages=TASK, max_completion_tokens=2)
        assert short.choices[0].finish_reason == "length"
        assert len(recorded.tree.nodes[1].generation.tokens) == 2
        messages = [
            *TASK,
            stopped.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": "Go on."},
        ]
        await create(model="m", messages=messages)
        assert recorded.tree.nodes[2].parent is node

    with_openai(chat, ["one END two three four five", "a longer answer than two tokens", "x"], use)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"top_p": 0.9}, "top_p"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"temperature": 0.0}, "temperature"),
    ({"seed": 1}, "seed"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
    ({"parallel_tool_calls": False, "tools": TOOLS}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"extra_body": {"top_k": 5}}, "top_k"),
    ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ({"extra_body": {"echo": True}}, "echo"),
]


@pytest.mark.parametrize(("more", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_openai_what_cannot_be_recorded_is_refused_by_name(chat: Chat, more: dict[str, Any], name: str) -> None:
    async def use(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "m", "messages": TASK, **more})
        assert refused.value.body["message"].startswith(f"{name}: found ")  # type: ignore[index]
        assert not policy.seen

    with_openai(chat, ["x"], use)


def test_openai_images_a_begun_answer_and_a_stray_result_are_refused_by_their_message(chat: Chat) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    bad: list[tuple[list[Any], str]] = [
        ([{"role": "user", "content": [image]}], "messages[0].content[0]"),
        ([*TASK, {"role": "assistant", "content": "I"}], "messages[2].role"),
        ([*TASK, {"role": "tool", "tool_call_id": "c", "content": "x"}], "messages[2].role"),
        ([{"role": "system", "content": "alone"}], "messages"),
    ]

    async def use(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        for messages, where in bad:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=messages)
            assert refused.value.body["message"].startswith(where)  # type: ignore[index]
        assert not policy.seen

    with_openai(chat, ["x"], use)


def test_messages_as_clients_send_them_back_are_taken_for_what_was_said(chat: Chat) -> None:
    """Null content, arguments as "" or in another spelling, other ids, `reasoning`: all mean the same answer."""

    async def use(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        create = client.chat.completions.create
        tools: list[Any] = [{"function": {"name": "look", "parameters": {}, "strict": True}, "type": "function"}]
        await create(model="m", messages=TASK, tools=tools)
        for arguments in ("", "{}", " { } ", None):
            call = {"id": "mine", "type": "function", "function": {"name": "look", "arguments": arguments}}
            said = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
            await create(
                model="m", messages=[*TASK, said, {"role": "tool", "tool_call_id": "mine", "content": "r"}], tools=tools
            )
        assert {node.parent for node in recorded.tree.nodes[1:]} == {recorded.tree.nodes[0]}
        assert '{"function": {"name": "look", "parameters": {}, "strict": true}, "type": "function"}' in chat.text(
            policy.seen[0][0]
        )
        require_exact(recorded, policy)

    recorded = with_openai(chat, [("", [("look", {})]), "Done."], use)
    assert recorded.branches == {Branch.first: 1, Branch.continues: 1, Branch.forks: 3}


def test_compaction_sub_agents_and_rewriting_start_branches_that_say_why(chat: Chat) -> None:
    async def use(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        create = client.chat.completions.create
        first = await create(model="m", messages=TASK, tools=TOOLS)
        said = first.choices[0].message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a.py"}
        second = await create(model="m", messages=[*TASK, said, result], tools=TOOLS)
        again = second.choices[0].message.model_dump(exclude_none=True)
        await create(model="m", messages=[{"role": "user", "content": "Count files."}])  # a sub-agent
        cleared = {**result, "content": "[cleared]"}
        go_on = {"role": "user", "content": "Go on."}
        await create(model="m", messages=[*TASK, said, cleared, again, go_on], tools=TOOLS)  # an old result was cleared
        await create(
            model="m", messages=[*TASK, {"role": "user", "content": "Use the tool!"}], tools=TOOLS
        )  # an answer was dropped
        invented = {"role": "assistant", "content": "I never said that."}
        await create(model="m", messages=[*TASK, invented, go_on], tools=TOOLS)
        require_exact(recorded, policy)
        # The ids of both answers stand in the rewritten prompt as they were sampled.
        prompt = policy.seen[3][0]
        for _, sampled in policy.seen[:2]:
            assert any(prompt[i : i + len(sampled)] == sampled for i in range(len(prompt)))

    recorded = with_openai(chat, [LS, "Found.", "Seven.", "So.", "Yes.", "No."], use)
    assert recorded.branches == {Branch.first: 1, Branch.continues: 1, Branch.opens: 1, Branch.rewrites: 3}
    assert 0 < recorded.rewritten < recorded.prompted
    notes = json.loads(recorded.notes["endpoint"])
    assert notes["rewritten_share"] == round(recorded.rewritten / recorded.prompted, 4)
    assert len(recorded.tree.recorder().segments()) == 5


def test_anthropic_a_conversation_with_tools_whole_and_streamed(chat: Chat) -> None:
    async def use(client: anthropic.AsyncAnthropic, recorded: Recording, policy: Policy) -> None:
        ask: dict[str, Any] = {"model": "m", "max_tokens": 500, "system": "You mend code.", "tools": OWN_TOOLS}
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Mend it."}]}]
        counted = await client.messages.count_tokens(
            model="m", system="You mend code.", tools=OWN_TOOLS, messages=messages
        )
        answer = await client.messages.create(**ask, messages=messages)
        assert counted.input_tokens == len(policy.seen[0][0])
        assert answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["text", "tool_use"]
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert uses[0].input == {"command": "ls"}
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "a.py"} for use in uses]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Quick."}]})
        async with client.messages.stream(**ask, messages=messages) as stream:
            whole = await stream.get_final_message()
        assert [block.input for block in whole.content if block.type == "tool_use"] == [
            {"command": "ls"},
            {"command": "pwd"},
        ]
        messages.append({"role": "assistant", "content": [block.model_dump() for block in whole.content]})
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": []} for b in whole.content if b.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
        last = await client.messages.create(**ask, messages=messages, stop_sequences=["END"])
        assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", "END")
        assert last.content[0].type == "text"
        assert last.content[0].text == "Done. "
        require_recorded(recorded, policy)

    def require_recorded(recorded: Recording, policy: Policy) -> None:
        segments = recorded.tree.recorder().segments()
        assert len(segments) == 1
        prompt = policy.seen[-1][0]
        assert segments[0].tokens.tolist()[: len(prompt)] == prompt

    recorded = with_anthropic(chat, [LS, TWO, "Done. END of it"], use)
    assert recorded.branches == {Branch.first: 1, Branch.continues: 2}


def test_anthropic_refusals_and_errors_have_its_shape(chat: Chat) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}

    async def use(client: anthropic.AsyncAnthropic, recorded: Recording, policy: Policy) -> None:
        ask: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        bad: list[tuple[dict[str, Any], str]] = [
            ({"top_k": 5}, "top_k"),
            ({"top_p": 0.5}, "top_p"),
            ({"temperature": 0.5}, "temperature"),
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
            ({"tool_choice": {"type": "any"}, "tools": OWN_TOOLS}, "tool_choice"),
            ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0].type"),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ]
        for more, name in bad:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(**ask, extra_body=more)  # the client has no words for all of them
            error = refused.value.body["error"]  # type: ignore[index]
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(f"{name}: found")
        recorded.end(StopReason.deadline)
        with pytest.raises(anthropic.PermissionDeniedError) as over:
            await client.messages.create(**ask)
        assert "deadline" in str(over.value)
        assert not policy.seen

    with_anthropic(chat, ["x"], use)


def test_a_key_opens_its_own_attempt_alone_and_only_as_long_as_it_lasts(chat: Chat) -> None:
    async def run() -> None:
        mine, _ = recording(chat, ["mine"])
        other, policy = recording(chat, ["other"])
        async with served(mine) as url:
            for key in (other.key, "", mine.key + "x"):
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "-", max_retries=0) as client:
                    with pytest.raises(openai.AuthenticationError):
                        await client.chat.completions.create(model="m", messages=TASK)
        assert not policy.seen

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_generation_and_nothing_of_it_is_recorded(chat: Chat) -> None:
    async def use(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        policy.free.clear()
        for stream in (False, True):
            before = policy.cancelled
            asking = asyncio.ensure_future(
                client.with_options(timeout=60).chat.completions.create(model="m", messages=TASK, stream=stream)
            )
            while len(policy.seen) < before + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if stream:
                await (await asking).close()  # type: ignore[union-attr]
            else:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
            async with asyncio.timeout(60):
                while policy.cancelled == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert not recorded.tree.nodes
        assert not recorded._sampling

    with_openai(chat, ["x"], use)


def test_the_end_of_an_attempt_and_a_failure_of_ours_are_no_answers(chat: Chat) -> None:
    async def use(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        create = client.chat.completions.create
        await create(model="m", messages=TASK)
        policy.free.clear()
        asking = asyncio.ensure_future(create(model="m", messages=TASK))
        while len(policy.seen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        recorded.end(StopReason.deadline)
        with pytest.raises(openai.PermissionDeniedError, match="deadline"):
            await asking

    with_openai(chat, ["x"], use)

    async def broken(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        async def generate(*_: Any, **__: Any) -> Any:
            raise InfrastructureError("the engine burned down")

        recorded.model.generate = generate  # type: ignore[method-assign]
        with pytest.raises(openai.PermissionDeniedError, match="burned down"):
            await client.chat.completions.create(model="m", messages=TASK)
        assert recorded.ended is StopReason.infrastructure
        assert recorded.failed is not None

    with_openai(chat, ["x"], broken)


def test_limits_of_the_attempt_end_it_and_a_full_context_ends_the_request_alone(chat: Chat) -> None:
    async def turns(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        await client.chat.completions.create(model="m", messages=TASK)
        with pytest.raises(openai.PermissionDeniedError, match="turn_limit"):
            await client.chat.completions.create(model="m", messages=TASK)

    assert with_openai(chat, ["x"], turns, turns=1).ended is StopReason.turn_limit

    async def full(client: openai.AsyncOpenAI, recorded: Recording, policy: Policy) -> None:
        long: list[Any] = [{"role": "user", "content": "word " * 6000}]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=long)
        assert refused.value.code == "context_length_exceeded"
        assert recorded.ended is None
        await client.chat.completions.create(model="m", messages=TASK)

    with_openai(chat, ["x"], full)

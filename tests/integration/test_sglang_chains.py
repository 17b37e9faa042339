"""The real SGLang with two drafts a step, and with a checkpoint that speaks: one server for both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from services.inference.chat import template
from shared.model import causal_rows
from tests.chat_checkpoint import VOCABULARY, tool, write_chat
from tests.integration.engine_platform import Platform, ask, body_of
from tests.integration.sglang_served import Served, greedy_passes, hand_on, serving
from tests.sglang import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

USER = {"role": "user", "content": "Read a.py, please: ü"}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    platform = Platform(
        tmp_path_factory.mktemp("chains"), {**KINDS["qwen3_moe"], "vocab_size": VOCABULARY}, context=480
    )
    write_chat(platform.base)
    with serving(platform, drafts=2) as found:
        yield found


@pytest.mark.parametrize("tools", [None, [tool("read")]])
def test_a_conversation_is_what_generate_samples_from_its_ids(served, tools):
    speaks = template.load(served.platform.base)
    asked = {"messages": [USER], "max_tokens": 24, "temperature": 0.0, **({"tools": tools} if tools else {})}
    status, whole = asyncio.run(ask(served.url, "/v1/chat/completions", asked))
    assert status == 200, whole
    prompt = speaks.prompt([USER], tools, {}, context=480)
    sampling = {"temperature": 0.0, "stop_token_ids": list(speaks.stop_tokens)}
    plain = served.generate(prompt, 24, sampling=sampling)
    (choice,) = whole["choices"]
    ids = [id for id in plain["output_ids"] if id not in speaks.hidden]
    assert choice["message"] == {"role": "assistant", "content": speaks.tokenizer.decode(ids)}
    assert choice["finish_reason"] == plain["meta_info"]["finish_reason"]["type"]
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(plain["output_ids"]))
    assert whole["weight_version"] == plain["meta_info"]["weight_version"]


def test_two_drafts_a_step_are_a_chain_of_our_mtp_layer(served):
    """How many passes there were at temperature 0 follows from the tokens and our layer."""
    p, before = served.platform, max(served.platform.versions)
    hand_on(p.model)
    served.follow(before + 1, before)
    prompts, new, whole = [[i, i + 1, i + 2] for i in range(10, 90, 20)], 80, 0
    for prompt, answer in zip(
        prompts, served.all_at_once(prompts, new, sampling={"temperature": 0.0}, extra_key="chains"), strict=True
    ):
        passes = greedy_passes(p.model, prompt, answer["output_ids"], drafts=2)
        assert answer["meta_info"]["spec_verify_ct"] == passes
        whole += greedy_passes(p.model, prompt, answer["output_ids"], drafts=1) - passes
    print(f"two drafts a step save {whole} passes beside one")
    assert whole > 0


def test_its_tokens_are_those_without_drafts(served):
    """Greedy text does not depend on drafts: it is the model's own."""
    model = served.platform.model
    for start in (10, 50):
        prompt = [start, start + 1, start + 2]
        answer = served.generate(prompt, 60, sampling={"temperature": 0.0}, extra_key="greedy")
        whole = torch.tensor(prompt + answer["output_ids"])
        out = model(whole, torch.arange(len(whole)), causal_rows(1, len(whole)))
        likeliest = model.logits(out.hidden_ND).argmax(-1)[len(prompt) - 1 : -1]
        assert likeliest.tolist() == answer["output_ids"]
    status, _ = asyncio.run(ask(served.url, "/generate", body_of([1], 1)))
    assert status == 200

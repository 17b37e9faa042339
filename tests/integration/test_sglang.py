"""The inference service with the real SGLang, on the CPU: one server for all tests of a model, started by the service.

What is compared: SGLang's log-probabilities and routing with those of `shared.model` on the same tokens, its fields with
those of the embedded engine, its live weights with the published ones (the service itself does, at every start and every
version), its version spans over an update in mid-generation.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from shared.model import Transformer, causal_rows
from shared.weights import read_manifest
from tests.integration import engine_platform
from tests.integration.engine_platform import Platform, ask, body_of, start_process
from tests.integration.sglang_served import START_S, Served, computing, greedy_passes, hand_on, serving
from tests.patience import patient, until
from tests.sglang import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONTEXT = 256
MOE = [kind for kind, config in KINDS.items() if "num_experts_per_tok" in config]  # each has an MTP layer as well
SAME = 1e-4  # largest difference of a log-probability: two implementations in float32


NIGHTLY = ("llama", "qwen2")  # shapes of Qwen3 with one thing less or more; a server takes half a minute to start


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.nightly if kind in NIGHTLY else ()) for kind in KINDS],
)
def served(request, tmp_path_factory) -> Iterator[Served]:
    kind = request.param
    platform = Platform(tmp_path_factory.mktemp(kind), KINDS[kind], context=CONTEXT)
    with serving(platform, drafts=1 if kind in MOE else 0) as found:
        yield found


def compare(model: Transformer, prompt: list[int], answer: dict[str, Any], temperature: float = 1.0) -> float:
    """The largest difference of a log-probability. Asserts that every row of the routing is the model's."""
    sampled, meta = answer["output_ids"], answer["meta_info"]
    whole = torch.tensor(prompt + sampled)
    out = model(whole, torch.arange(len(whole)), causal_rows(1, len(whole)))
    table = (model.logits(out.hidden_ND) / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    mine = table[torch.arange(len(sampled)), sampled].numpy()
    theirs = np.array([p for p, _, _ in meta["output_token_logprobs"]])
    assert [t for _, t, _ in meta["output_token_logprobs"]] == sampled
    if model.config.moe is None:
        assert meta["routed_experts"] == ""
        return float(np.abs(mine - theirs).max())
    layers, k = model.config.num_hidden_layers, model.config.num_experts_per_tok
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, layers, k)
    mine_NLK = out.experts_NLK[:-1].sort(-1).values.numpy()
    assert rows.shape[0] == len(whole) - 1
    assert np.array_equal(np.sort(rows[:, list(model.config.moe_layers)], -1), mine_NLK)
    return float(np.abs(mine - theirs).max())


def test_log_probabilities_and_routing_are_those_of_our_model(served):
    model, worst = served.platform.model, 0.0
    logits = model.logits(model(torch.arange(99), torch.arange(99), causal_rows(1, 99)).hidden_ND)
    assert logits.std() >= 1
    asked = {"return_routed_experts": True}
    for prompt, new, temperature in [
        ([7], 1, 1.0),
        ([7, 8], 8, 1.0),
        (list(range(100, 160)), 40, 1.0),
        (list(range(20, 220)), 30, 0.6),
        ([9, 8, 7], 40, 0.0),
    ]:
        answer = served.generate(prompt, new, sampling={"temperature": temperature}, extra_key="parity", **asked)
        assert len(answer["output_ids"]) == new
        worst = max(worst, compare(model, prompt, answer, temperature or 1.0))
    prompts = [[*range(50), i] for i in range(8)]  # a group: one prefix, eight at a time
    for prompt, answer in zip(
        prompts, served.all_at_once(prompts, 20, extra_key="group", sampling={"temperature": 0.8}, **asked), strict=True
    ):
        worst = max(worst, compare(model, prompt, answer, 0.8))
    print(f"{model.config.model_type}: largest difference of a log-probability {worst:.1e}")
    assert worst <= SAME


@pytest.mark.parametrize("served", MOE, indirect=True, scope="module")
def test_routing_is_returned_from_the_row_that_was_asked_for(served):
    prompt = list(range(40))
    whole = served.generate(prompt, 4, return_routed_experts=True, sampling={"temperature": 0.0})
    part = served.generate(
        prompt, 4, return_routed_experts=True, routed_experts_start_len=33, sampling={"temperature": 0.0}
    )
    rows, last = (
        np.frombuffer(base64.b64decode(a["meta_info"]["routed_experts"]), "<i4").reshape(-1, 3, 2)
        for a in (whole, part)
    )
    assert whole["output_ids"] == part["output_ids"]
    assert np.array_equal(rows[33:], last)


def test_tokens_are_drawn_from_the_model_with_drafts_too(served):
    """log p(token) + entropy has mean 0 and a variance that follows from the model."""
    model, total, variance, accepted = served.platform.model, 0.0, 0.0, []
    prompts = [[10 + i, 20 + i] for i in range(6)]
    for prompt, answer in zip(prompts, served.all_at_once(prompts, 200), strict=True):
        whole = torch.tensor(prompt + answer["output_ids"])
        out = model(whole, torch.arange(len(whole)), causal_rows(1, len(whole)))
        log = model.logits(out.hidden_ND).double().log_softmax(-1)[1:-1]
        entropy = -(log.exp() * log).sum(-1)
        total += float((log.gather(1, torch.tensor(answer["output_ids"])[:, None])[:, 0] + entropy).sum())
        variance += float((log.exp() * (log + entropy[:, None]) ** 2).sum())
        accepted.append(answer["meta_info"].get("spec_accept_length"))
    z = total / math.sqrt(variance)
    print(f"{model.config.model_type}: z = {z:.2f} over 1200 tokens, accepted {accepted}")
    assert abs(z) < 4
    assert (None in accepted) == (model.config.num_mtp_layers == 0)


def test_stop_tokens_stop_and_nothing_else_does(served):
    prompt = [5, 6, 7]
    free = served.generate(prompt, 60, sampling={"temperature": 0.0})
    assert free["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    stop = free["output_ids"][20]
    cut = served.generate(prompt, 60, sampling={"temperature": 0.0, "stop_token_ids": [stop]})
    first = free["output_ids"].index(stop)
    assert cut["output_ids"] == free["output_ids"][: first + 1]  # the stop token is part of what was sampled
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(cut["meta_info"]["output_token_logprobs"]) == first + 1


def test_a_generation_ends_at_the_context_as_in_the_embedded_engine(served):
    answer = served.generate(list(range(CONTEXT - 6)), 1000)
    assert len(answer["output_ids"]) == 7
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 7}
    assert len(served.generate([3] * CONTEXT, 5)["output_ids"]) == 1


def test_fields_and_shapes_are_those_of_the_embedded_engine(served, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_platform, "START_S", START_S)
    prompt, more = list(range(30)), {"return_routed_experts": True, "routed_experts_start_len": 10, "rid": "same"}
    theirs = served.generate(prompt, 5, **more)
    platform = Platform(tmp_path, KINDS[served.platform.model.config.model_type], context=CONTEXT)
    process, url = start_process(platform, ETUDE_CHECKPOINT=str(platform.base))
    try:
        status, ours = asyncio.run(ask(url, "/generate", body_of(prompt, 5, **more)))
    finally:
        process.kill()
        process.wait()
    assert status == 200
    assert shape(ours) == {k: v for k, v in shape(theirs).items() if k in shape(ours)}
    assert {name.split(".")[1] for name in shape(theirs).keys() - shape(ours).keys()} <= {
        "num_retractions",
        *(name for name in theirs["meta_info"] if name.startswith("spec_")),
    }


def shape(value: Any, name: str = "") -> dict[str, str]:
    """Every field's path and what kind of value it has; lists by their length and first element."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in shape(item, f"{name}.{key}".lstrip(".")).items()}
    if isinstance(value, list):
        return {name: f"{len(value)} of {shape(value[0]) if value else ''}"}
    return {name: f"{type(value).__name__} of {len(value)}" if "experts" in name else type(value).__name__}


def test_a_version_is_loaded_and_its_weights_serve_verified(served):
    p = served.platform
    before = max(p.versions)
    message = served.follow(before + 1, before)
    print(f"{p.model.config.model_type}: pause of an update {message.pause_s:.2f} s")
    assert 0 < message.pause_s < 60
    checked = asyncio.run(ask(served.url, "/weights_checker", {"action": "checksum"}))[1]
    assert checked["serial"] == before + 1
    assert checked["checksum"] == read_manifest(p.objects, p.versions[before + 1].manifest).checksum
    prompt = list(range(60))
    answer = served.generate(prompt, 20, return_routed_experts=True)
    assert answer["meta_info"]["weight_version"] == str(before + 1)
    assert compare(p.model, prompt, answer) <= SAME


def test_an_update_in_mid_generation_shows_in_the_version_spans_and_keeps_the_session(served):
    p = served.platform
    before = max(p.versions)
    p.write_version(before + 1, before)

    async def go() -> list[dict[str, Any]]:
        """Whenever the update comes, somebody is in mid-generation: three ask again and again, for different lengths."""
        there = asyncio.Event()

        async def asking(new: int) -> list[dict[str, Any]]:
            answers = []
            while not there.is_set():
                status, answer = await ask(served.url, "/generate", body_of([5, 6, new], new, extra_key=str(before)))
                assert status == 200
                answers.append(answer["meta_info"])
            return answers

        askers = [asyncio.create_task(asking(new)) for new in (240, 200, 160)]
        await computing(served.sglang, len(askers))
        await p.announce(before + 1, before)
        await p.applied(before + 1)
        there.set()
        return [meta for answers in await asyncio.gather(*askers) for meta in answers]

    metas = asyncio.run(asyncio.wait_for(go(), patient(600)))
    over = [meta for meta in metas if len(meta["weight_versions"]) > 1]
    assert over
    for meta in over:
        first, second = meta["weight_versions"]
        assert [first["version"], second["version"]] == [str(before), str(before + 1)]
        assert (first["start"], first["end"], second["end"]) == (0, second["start"], meta["completion_tokens"])
        assert meta["oldest_kv_version"] == before
    assert all(meta["num_retractions"] == 0 for meta in metas)


def test_a_new_session_never_hits_the_cache_of_another_version(served):
    prompt, serial = list(range(64)), max(served.platform.versions)
    served.generate(prompt, 2, extra_key=f"{serial}")
    again = served.generate(prompt, 2, extra_key=f"{serial}")
    other = served.generate(prompt, 2, extra_key=f"{serial + 1}")
    assert again["meta_info"]["cached_tokens"] >= 32
    assert other["meta_info"]["cached_tokens"] == 0


def test_a_stream_tells_tokens_and_ends_with_the_whole(served):
    async def go() -> str:
        body = body_of([1, 2, 3], 200, stream=True)
        async with aiohttp.ClientSession() as session, session.post(f"{served.url}/generate", json=body) as response:
            assert response.status == 200
            return await response.text()

    events = [line.removeprefix("data: ") for line in asyncio.run(go()).split("\n\n") if line]
    assert events[-1] == "[DONE]"
    whole = json.loads(events[-2])
    assert len(whole["output_ids"]) == len(whole["meta_info"]["output_token_logprobs"]) == 200
    parts = [json.loads(event)["output_ids"] for event in events[:-2]]
    assert all(part == whole["output_ids"][: len(part)] for part in parts)
    assert 0 < len(parts[0]) < 200  # it was told before there was the whole


def test_a_client_that_goes_away_frees_its_place(served):
    async def go() -> None:
        ending = asyncio.Event()

        async def asking(first: int) -> None:
            """Ask again and again, so that a look that comes late finds a generation too."""
            while not ending.is_set():
                status, answer = await ask(served.url, "/generate", body_of([first, 2, 3], 250))
                assert (status, len(answer["output_ids"])) == (200, 250)

        stays, goes = (asyncio.create_task(asking(first)) for first in (1, 4))
        await computing(served.sglang, 2)
        goes.cancel()
        await computing(served.sglang, 1)
        assert not stays.done()
        ending.set()
        await stays
        assert (await ask(served.url, "/server_info"))[1]["open"] == 0

    asyncio.run(go())


async def metrics_of(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        return await response.text()


def test_sglangs_metrics_stand_among_ours(served):
    found: list[str] = []

    def told() -> bool:
        found[:] = [asyncio.run(metrics_of(served.url))]
        return "sglang:" in found[0]

    until(told, "SGLang's metrics", 60, every=0.5)
    (text,) = found
    assert "etude_inference_sglang_up 1.0" in text
    assert "etude_inference_swap_pause_seconds_count" in text


def test_prompts_that_cannot_be_served_are_refused_and_the_server_lives_on(served):
    for change in ({"input_ids": [1, 500]}, {"input_ids": [1] * (CONTEXT + 1)}, {"sampling_params": {"top_p": 0.9}}):
        status, answer = asyncio.run(ask(served.url, "/generate", {**body_of([1]), **change}))
        assert status == 400, answer
    assert served.generate([1], 1)["output_ids"]


@pytest.mark.parametrize("served", MOE, indirect=True, scope="module")
def test_drafts_are_those_of_our_mtp_layer(served):
    """How many are accepted at temperature 0 follows from the tokens and our layer."""
    p, before = served.platform, max(served.platform.versions)
    hand_on(p.model)
    served.follow(before + 1, before)
    prompts, new, accepted = [[i, i + 1, i + 2] for i in range(10, 90, 20)], 80, 0
    for prompt, answer in zip(
        prompts, served.all_at_once(prompts, new, sampling={"temperature": 0.0}, extra_key="drafts"), strict=True
    ):
        steps = greedy_passes(p.model, prompt, answer["output_ids"], drafts=1)
        assert answer["meta_info"]["spec_verify_ct"] == steps
        accepted += new - 1 - steps
    print(f"{p.model.config.model_type}: {accepted} drafts of {len(prompts) * (new - 1)} tokens accepted")
    assert accepted >= 20

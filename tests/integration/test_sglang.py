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
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import torch

from services.inference.config import InferenceSettings
from services.inference.sglang import hashes
from services.inference.sglang.flags import launch
from shared.model import ModelConfig, Transformer, causal_rows
from shared.weights import read_manifest
from tests.integration import engine_platform
from tests.integration.engine_platform import Platform, ask, body_of, start_process
from tests.sglang import interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONTEXT = 256
SAME = 1e-4  # largest difference of a log-probability: two implementations in float32
COMMON = {
    "vocab_size": 500,  # no multiple of 64: SGLang pads it
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**COMMON, "model_type": "qwen3_moe", "num_experts": 8, "tie_word_embeddings": True},
    "deepseek_v3": {
        **COMMON,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.0,
    },
}
DRAFTS = {"qwen3_moe": "1", "deepseek_v3": "2"}


@dataclass(frozen=True)
class Served:
    """A platform whose run is served by SGLang, in a process of its own. `url`: of our service; `sglang`: of SGLang."""

    platform: Platform
    url: str
    process: subprocess.Popen[bytes]
    sglang: str

    def generate(self, prompt: list[int], new: int, **more: Any) -> dict[str, Any]:
        status, answer = asyncio.run(ask(self.url, "/generate", body_of(prompt, new, **more)))
        assert status == 200, answer
        return answer

    def all_at_once(self, prompts: list[list[int]], new: int, **more: Any) -> list[dict[str, Any]]:
        async def go() -> list[tuple[int, Any]]:
            return await asyncio.gather(*(ask(self.url, "/generate", body_of(p, new, **more)) for p in prompts))

        answers = asyncio.run(go())
        assert all(status == 200 for status, _ in answers), answers
        return [answer for _, answer in answers]

    def follow(self, serial: int, parent: int | None) -> Any:
        """Publishes a version; returns what the replica said of it."""
        p = self.platform
        p.write_version(serial, parent)

        async def go() -> Any:
            await p.announce(serial, -1 if parent is None else parent)
            return (await p.applied(serial))[0]

        return asyncio.run(asyncio.wait_for(go(), 600))


@pytest.fixture(scope="module", params=list(KINDS))
def served(request, tmp_path_factory) -> Iterator[Served]:
    python, kind = interpreter(), request.param
    platform = Platform(tmp_path_factory.mktemp(kind), KINDS[kind], context=CONTEXT)
    platform.write_version(0, None)
    asyncio.run(platform.start_run())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_platform, "START_S", 900)
        began = time.monotonic()
        process, url = start_process(
            platform,
            ETUDE_ENGINE="sglang",
            ETUDE_SGLANG_PYTHON=python,
            ETUDE_SGLANG_DEVICE="cpu",
            ETUDE_SGLANG_DTYPE="float32",
            ETUDE_SGLANG_DRAFT_STEPS=DRAFTS[kind],
        )
    print(f"{kind}: served after {time.monotonic() - began:.0f} s")
    behind = asyncio.run(ask(url, "/server_info"))[1]["url"]
    yield Served(platform, url, process, behind)
    mine = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0
    assert not [child for child in mine if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    asyncio.run(platform.bus.close())


def compare(model: Transformer, prompt: list[int], answer: dict[str, Any], temperature: float = 1.0) -> float:
    """The largest difference of a log-probability. Asserts that every row of the routing is the model's."""
    sampled, meta = answer["output_ids"], answer["meta_info"]
    whole = torch.tensor(prompt + sampled)
    out = model(whole, torch.arange(len(whole)), causal_rows(1, len(whole)))
    table = (model.logits(out.hidden_ND) / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    mine = table[torch.arange(len(sampled)), sampled].numpy()
    theirs = np.array([p for p, _, _ in meta["output_token_logprobs"]])
    assert [t for _, t, _ in meta["output_token_logprobs"]] == sampled
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
    assert (accepted[0] is not None) == (DRAFTS[model.config.model_type] != "0")


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


def test_fields_and_shapes_are_those_of_the_embedded_engine(served, tmp_path):
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

    async def go() -> dict[str, Any]:
        prompt = [5, 6, 7]
        generating = asyncio.create_task(ask(served.url, "/generate", body_of(prompt, 240, extra_key=str(before))))
        await asyncio.sleep(0.5)
        await p.announce(before + 1, before)
        await p.applied(before + 1)
        status, answer = await generating
        assert status == 200
        return answer

    for _ in range(5):  # a fast machine may have ended before the update
        meta = asyncio.run(asyncio.wait_for(go(), 600))["meta_info"]
        spans = meta["weight_versions"]
        if len(spans) > 1:
            break
        before += 1
        p.write_version(before + 1, before)
    assert [span["version"] for span in spans] == [str(before), str(before + 1)]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 240)
    assert meta["oldest_kv_version"] == before
    assert meta["num_retractions"] == 0


def test_a_new_session_never_hits_the_cache_of_another_version(served):
    prompt, serial = list(range(64)), max(served.platform.versions)
    served.generate(prompt, 2, extra_key=f"{serial}")
    again = served.generate(prompt, 2, extra_key=f"{serial}")
    other = served.generate(prompt, 2, extra_key=f"{serial + 1}")
    assert again["meta_info"]["cached_tokens"] >= 32
    assert other["meta_info"]["cached_tokens"] == 0


def test_a_stream_tells_tokens_and_ends_with_the_whole(served):
    async def go() -> str:
        body = body_of([1, 2, 3], 12, stream=True)
        async with aiohttp.ClientSession() as session, session.post(f"{served.url}/generate", json=body) as response:
            assert response.status == 200
            return await response.text()

    events = [line.removeprefix("data: ") for line in asyncio.run(go()).split("\n\n") if line]
    assert events[-1] == "[DONE]"
    whole = json.loads(events[-2])
    assert len(whole["output_ids"]) == len(whole["meta_info"]["output_token_logprobs"]) == 12
    assert all(
        json.loads(e)["output_ids"] == whole["output_ids"][: len(json.loads(e)["output_ids"])] for e in events[:-2]
    )


def test_a_client_that_goes_away_frees_its_place(served):
    async def go() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(served.url, "/generate", body_of([1, 2, 3], 250)), 0.5)
        began = time.monotonic()
        async with asyncio.timeout(60):
            while running(await metrics_of(served.sglang)):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        return time.monotonic() - began

    asyncio.run(go())
    assert asyncio.run(ask(served.url, "/server_info"))[1]["open"] == 0


def running(text: str) -> float:
    return sum(float(x.split()[-1]) for x in text.splitlines() if x.startswith("sglang:num_running_reqs{"))


async def metrics_of(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        return await response.text()


def test_sglangs_metrics_stand_among_ours(served):
    deadline = time.monotonic() + 60
    while "sglang:" not in (text := asyncio.run(metrics_of(served.url))):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert "etude_inference_sglang_up 1.0" in text
    assert "etude_inference_swap_pause_seconds_count" in text


def test_prompts_that_cannot_be_served_are_refused_and_the_server_lives_on(served):
    for change in ({"input_ids": [1, 500]}, {"input_ids": [1] * (CONTEXT + 1)}, {"sampling_params": {"top_p": 0.9}}):
        status, answer = asyncio.run(ask(served.url, "/generate", {**body_of([1]), **change}))
        assert status == 400, answer
    assert served.generate([1], 1)["output_ids"]


# -- without a server ----------------------------------------------------------------------------------------------------


def inside(script: str, *arguments: str, **variables: str) -> str:
    """What a script prints in SGLang's environment."""
    done = subprocess.run(
        [interpreter(), "-c", script, *arguments],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": "", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_sglangs_own_parser_knows_every_argument_that_is_composed(tmp_path):
    lines = []
    for settings in (
        {},
        {"sglang_tp": 2, "sglang_ep": 2, "sglang_dp": 2, "sglang_memory": 0.8, "sglang_running": 8},
        {"sglang_draft_steps": 2, "sglang_deterministic": True, "sglang_attention": "fa3", "sglang_tokens": 9999},
        {"sglang_quantization": "fp8", "sglang_fp8_gemm": "deep_gemm", "sglang_moe_runner": "deep_gemm"},
        {"sglang_device": "cpu", "sglang_dtype": "float32", "sglang_draft_steps": 2, "sglang_chunk": 512},
    ):
        wide = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "moe_intermediate_size": 256}
        model = ModelConfig.from_dict({**KINDS["qwen3_moe"], **wide})
        composed = launch(InferenceSettings(**settings), model, folder="f", port=1, serial=3, context=64, queue_limit=9)
        lines.append(list(composed.arguments[3:]))
    script = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for line in json.loads(sys.argv[1]):
    print(vars(parser.parse_args(line))["weight_version"])
"""
    assert inside(script, json.dumps(lines)).split() == ["3"] * len(lines)


def test_the_hash_on_a_gpu_is_the_one_of_sglangs_kernel(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 1 << 16, 30001).astype(np.uint16)
    path = tmp_path / "numbers.bin"
    numbers.tofile(path)
    script = """
import sys, torch, triton
from sglang.kernels.ops.memory import gpu_tensor_hash as g
words = torch.frombuffer(bytearray(open(sys.argv[1], "rb").read()), dtype=torch.uint8)
words = torch.cat([words, torch.zeros(-len(words) % 4, dtype=torch.uint8)]).view(torch.uint32)
now = torch.empty(triton.cdiv(len(words), 8192), dtype=torch.uint64)
seed = 0x243F6A88
g.hash_tiles32_kernel_blocked[(len(now),)](
    words, now, len(words), seed1=seed, seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF, FM_C1=g.FMIX32_C1,
    FM_C2=g.FMIX32_C2, POS_A=g.POS_C1, POS_B=g.POS_C2, TILE=8192, BLOCK=256, USE_CG=False)
out = torch.empty(1, dtype=torch.uint64)
g.add_tree_reduce_u64_kernel[(1,)](now, out, len(now), CHUNK=1024)
print(f"{g._final_splitmix64(int(out.item())):016x}")
"""
    assert inside(script, str(path), TRITON_INTERPRET="1").strip() == hashes.on_gpu(numbers)

"""The engine where and in what it may compute: bfloat16, several threads, CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.model import Replay, Transformer, causal_rows
from shared.model.checkpoint import narrowed
from tests.unit.inference.test_engine_equals_model import (  # noqa: F401
    DEEPSEEK,
    QWEN3_MOE,
    Asked,
    ask_a_mix,
    build,
    check,
    engine_of,
)

MTP = {"num_nextn_predict_layers": 1}
# bf16 holds three digits: differences are 0.01 on average, and single ones far larger, by what else is in the batch. A wrong
# rotation, mask or cache row is off by more than one (logits' deviation).
ON_AVERAGE, WITHIN = 0.03, 0.5
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
PLACES = [
    pytest.param("cpu", torch.bfloat16, id="cpu-bfloat16"),
    pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=GPU),
    pytest.param("cuda", torch.float32, id="cuda-float32", marks=GPU),
]


def differences(model: Transformer, one: Asked) -> np.ndarray:
    """[tokens] Of log-probabilities from the plain model's, of the engine's experts, in the same type and place; in logits."""
    result = one.result()
    device = model.embed_tokens.weight.device
    whole = torch.from_numpy(np.concatenate([one.tokens, result.tokens_C])).long().to(device)
    T, P = len(whole), len(one.tokens)
    replay = None
    if result.routing is not None and result.routing.shape[1]:
        experts = torch.zeros(T, *result.routing.shape[1:], dtype=torch.long)
        experts[: T - 1] = torch.from_numpy(result.routing.astype(np.int64))
        replay = Replay(experts.to(device), (torch.arange(T) < T - 1).to(device))
    out = model(whole, torch.arange(T, device=device), causal_rows(1, T), replay)
    logits = model.logits(out.hidden_ND)[P - 1 : -1].float() / (one.temperature or 1.0)
    expected = logits.log_softmax(-1)[torch.arange(T - P), whole[P:]].cpu().numpy()
    return np.abs(result.logprobs_C - expected) * min(1.0, one.temperature or 1.0)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("config", [QWEN3_MOE | MTP, DEEPSEEK], ids=["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_log_probabilities_are_the_models_in_that_type_and_place(config, device, dtype, drafts, engine_of):  # noqa: F811
    model = narrowed(build(config), dtype).to(device)
    engine = engine_of(model, draft_tokens=drafts, gated=False)
    assert engine.cache.keys.dtype == dtype
    assert engine.cache.keys.device.type == device
    rng, found = np.random.default_rng(1), []
    for _ in range(2):
        turns = ask_a_mix(engine, rng)
        following = [Asked(engine, np.concatenate([t.tokens, t.result().tokens_C]), 5) for t in turns]
        found += [differences(model, turn) for turn in (*turns, *following)]
    off = np.concatenate(found)
    assert off.max() < WITHIN
    assert off.mean() < ON_AVERAGE


def test_several_threads_give_the_same(engine_of):  # noqa: F811
    model = build(DEEPSEEK)  # runs in torch
    engine = engine_of(model, threads=2)
    assert engine.call(torch.get_num_threads).result() == 2
    for turn in ask_a_mix(engine, np.random.default_rng(1)):
        check(model, turn, turn.result())


def test_a_narrow_model_still_tells_far_positions_apart():
    """bf16 holds no whole number above 256."""
    wide = build(QWEN3_MOE)
    narrow = narrowed(build(QWEN3_MOE), torch.bfloat16)
    positions = torch.arange(60) + 3000
    for a, b in zip(wide.rotary(positions), narrow.rotary(positions), strict=True):
        torch.testing.assert_close(a, b.float(), atol=1e-2, rtol=0)

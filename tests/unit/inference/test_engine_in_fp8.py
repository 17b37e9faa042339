"""An engine in FP8 and a trainer that rounds as it does agree; one that does not, does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.inference.engine import Engine
from services.trainer.loss import mismatch
from shared.model import Replay, Transformer, causal_rows, published
from shared.model.fp8 import per_tensor, published_in_fp8, round_inputs, round_weights
from shared.model.rounding import round_bf16
from tests.unit.inference.test_engine_equals_model import Asked, engine_of  # noqa: F401
from tests.unit.model.test_fp8 import CONFIG


def policy(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(CONFIG).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(round_bf16(parameter))  # as it is published
    return model


def sampled(engine: Engine) -> list[Asked]:
    rng = np.random.default_rng(0)
    asked = [Asked(engine, rng.integers(0, 64, int(rng.integers(3, 30))), 40) for _ in range(24)]
    for one in asked:
        one.result()
    return asked


def ratios(model: Transformer, asked: list[Asked]) -> np.ndarray:
    """log p_trainer - log p_sampler of every sampled token, with the sampler's experts."""
    found = []
    for one in asked:
        result = one.result()
        whole = torch.from_numpy(np.concatenate([one.tokens, result.tokens_C])).long()
        T, P = len(whole), len(one.tokens)
        experts = torch.zeros(T, *result.routing.shape[1:], dtype=torch.long)
        experts[: T - 1] = torch.from_numpy(result.routing.astype(np.int64))
        replay = Replay(experts, torch.arange(T) < T - 1)
        out = model(whole, torch.arange(T), causal_rows(1, T), replay)
        logprobs = model.logits(out.hidden_ND).log_softmax(-1)[P - 1 : -1]
        found.append(logprobs[torch.arange(T - P), whole[P:]].numpy() - result.logprobs_C)
    return np.concatenate(found)


@pytest.mark.parametrize(("format", "share"), [("fp8", 0.01), ("mxfp8", 0.01), ("nvfp4", 0.01)])
def test_the_mismatch_of_a_trainer_goes_where_it_rounds_as_the_engine_does(engine_of, format, share):  # noqa: F811
    engine_model, trainer = policy(), policy()
    round_weights(engine_model, format)
    round_inputs(engine_model, format)
    asked = sampled(engine_of(engine_model))
    with published(trainer):
        before = mismatch(ratios(trainer, asked))["k3"]
    with published_in_fp8(trainer, format):
        after = mismatch(ratios(trainer, asked))["k3"]
    print(before, after)
    assert before > 1e-4
    assert after < before * share


def test_with_a_scale_per_tensor_it_would_stay(engine_of):  # noqa: F811
    """What a token's inputs are rounded to then depends on what else is in its batch."""
    engine_model, trainer = policy(), policy()
    round_weights(engine_model)
    round_inputs(engine_model, rounding=per_tensor)
    asked = sampled(engine_of(engine_model))
    with published_in_fp8(trainer, rounding=per_tensor):
        different = mismatch(ratios(trainer, asked))["k3"]
    print(different)
    assert different > 1e-6

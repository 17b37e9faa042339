"""Replay, published rounding, MTP's stop-gradients, layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model import (
    ModelConfig,
    Replay,
    Transformer,
    causal_rows,
    load_balancing_loss,
    load_checkpoint,
    published,
    published_tensors,
    save_checkpoint,
)
from shared.model.config import Moe
from shared.model.moe import LayerReplay, Router
from shared.model.rounding import round_bf16

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.2,
}


def build(seed: int = 0, **more) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(ModelConfig.from_dict({**CONFIG, **more}))


def rows(B: int, T: int):
    return torch.randint(0, 64, (B * T,)), torch.arange(T).repeat(B), causal_rows(B, T)


def test_replaying_a_models_own_routing_changes_nothing():
    model = build()
    tokens, positions, attend = rows(2, 9)
    out = model(tokens, positions, attend)
    again = model(tokens, positions, attend, Replay(out.experts_NLK, torch.ones(18, dtype=torch.bool), 1.0))
    assert torch.equal(out.hidden_ND, again.hidden_ND)
    assert again.replaced == 0


def test_replayed_experts_are_used_and_the_gate_still_learns():
    model = build()
    tokens, positions, attend = rows(2, 9)
    foreign = torch.rand(18, 2, 8).topk(2, -1).indices
    valid = torch.rand(18) < 0.7
    own = model(tokens, positions, attend).experts_NLK
    out = model(tokens, positions, attend, Replay(foreign, valid, 0.0))
    assert torch.equal(out.experts_NLK[valid], foreign[valid])
    assert torch.equal(out.experts_NLK[~valid][:, 0], own[~valid][:, 0])
    model.logits(out.hidden_ND).logsumexp(-1).sum().backward()
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.layers)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), tau=st.floats(0.0, 1.0), sigmoid=st.booleans())
def test_the_plausibility_filter_keeps_what_scores_enough_and_fills_with_the_best_absent_candidates(seed, tau, sigmoid):
    generator = torch.Generator().manual_seed(seed)
    E, K, N = 8, 3, 5
    moe = Moe(
        num_experts=E,
        num_experts_per_tok=K,
        intermediate_size=8,
        scoring="sigmoid" if sigmoid else "softmax",
        norm_topk_prob=True,
        n_group=2 if sigmoid else 1,
    )
    router = Router(4, moe)
    scores = torch.rand(N, E, generator=generator)
    if sigmoid:
        router.e_score_correction_bias = torch.rand(E, generator=generator) - 0.5
    candidates = router._candidates(scores)
    replayed = torch.rand(N, E, generator=generator).topk(K, -1).indices
    used, replaced = router._select(scores, LayerReplay(replayed, torch.ones(N, dtype=torch.bool), tau))
    expected_replaced = 0
    for n in range(N):
        own = candidates[n].topk(K).indices
        floor = tau * scores[n, own].min()
        kept = [int(e) for e in replayed[n] if scores[n, e] >= floor]
        ranked = [int(e) for e in candidates[n].argsort(descending=True) if int(e) not in kept]
        assert sorted(used[n].tolist()) == sorted(kept + ranked[: K - len(kept)])
        assert all(int(u) == int(r) for u, r in zip(used[n], replayed[n], strict=True) if int(r) in kept)
        expected_replaced += K - len(kept)
    assert int(replaced) == expected_replaced


def test_inside_published_the_forward_uses_bf16_values_and_the_masters_come_back_bit_for_bit():
    model, rounded = build(), build()
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(round_bf16(parameter))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = rows(2, 7)

    def loss(m):
        return m.logits(m(*batch).hidden_ND).log_softmax(-1)[:, 3].sum()

    loss(rounded).backward()
    with published(model):
        loss(model).backward()
    for (name, parameter), twin in zip(model.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(parameter, before[name])
        if twin.grad is not None:
            assert torch.equal(parameter.grad, twin.grad), name
    with pytest.raises(RuntimeError, match="on purpose"), published(model):
        raise RuntimeError("on purpose")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_the_mtp_loss_moves_nothing_but_the_mtp_layers():
    model = build()
    tokens, positions, attend = rows(2, 9)
    out = model(tokens, positions, attend)
    model.mtp_logits(model.mtp(out.residual_ND, tokens.roll(-1), positions, attend)).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert moved == name.startswith("mtp_layers."), name


def test_padding_changes_no_real_token():
    model = build()
    lengths, T = torch.tensor([5, 9, 2]), 12
    tokens = torch.randint(0, 64, (3, T))
    positions = torch.arange(T).repeat(3)
    hidden = model(tokens.flatten(), positions, causal_rows(3, T, lengths)).hidden_ND.view(3, T, -1)
    for b, n in enumerate(lengths.tolist()):
        alone = model(tokens[b, :n], torch.arange(n), causal_rows(1, n)).hidden_ND
        torch.testing.assert_close(hidden[b, :n], alone, rtol=1e-5, atol=1e-5)


def test_published_tensors_are_the_models_own_memory_and_cover_every_parameter():
    model = build()
    views = published_tensors(model)
    assert all(view.is_contiguous() for view in views.values())
    assert sum(view.numel() for view in views.values()) == sum(p.numel() for p in model.parameters())
    for view in views.values():
        view.fill_(0.25)
    assert all(bool((p == 0.25).all()) for p in model.parameters())


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path):
    model = build()
    save_checkpoint(model, tmp_path)
    views, again = published_tensors(model), published_tensors(load_checkpoint(tmp_path))
    assert views.keys() == again.keys()
    assert all(torch.equal(round_bf16(views[name]), again[name]) for name in views)


def test_the_balancing_loss_is_one_when_balanced_and_e_when_collapsed():
    E, N = 4, 8
    balanced = torch.arange(N).remainder(E).view(N, 1, 1)
    assert load_balancing_loss([torch.zeros(N, E)], balanced).item() == pytest.approx(1.0)
    collapsed = torch.zeros(N, 1, 1, dtype=torch.long)
    logits = torch.tensor([[50.0, 0, 0, 0]]).repeat(N, 1)
    assert load_balancing_loss([logits], collapsed).item() == pytest.approx(E)

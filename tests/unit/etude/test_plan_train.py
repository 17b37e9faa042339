"""What `etude plan train` reckons is what the model holds, and what autograd keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from etude.plan_train import FLOAT, Ranks, Work, kept, parameters, plan
from etude.planning import app
from services.trainer.layout import Block, attend_shared
from shared.model import ModelConfig, Transformer

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": True, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LATENT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 3, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "tie_word_embeddings": False, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {
    "llama": SMALL | {"model_type": "llama"},
    "untied": SMALL | {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": SMALL | {"model_type": "qwen2", "head_dim": 8},
    "qwen3": SMALL | {"model_type": "qwen3"},
    "qwen3_moe": SMALL | EXPERTS | {"model_type": "qwen3_moe"},
    "deepseek_v3": LATENT | {"model_type": "deepseek_v3"},
}
LARGE = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "n_shared_experts": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM2-135M": (
        {
            "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
        },
        134_515_008,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "DeepSeek-V3": (
        LARGE
        | {
            "model_type": "deepseek_v3", "vocab_size": 129280, "num_attention_heads": 128, "num_key_value_heads": 128,
            "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        },
        671_026_404_352,
    ),
    "Kimi K2": (
        LARGE
        | {
            "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
            "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        },
        1_026_408_209_408,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mtp", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name: str, mtp: int) -> None:
    shape = ModelConfig.from_dict(MODELS[name] | {"num_nextn_predict_layers": mtp})
    model = Transformer(shape)
    assert parameters(shape).total == sum(p.numel() for p in model.parameters())
    assert parameters(shape).experts == sum(p.numel() for p in model.parameters() if p.dim() == 3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_checkpoints_up_to_a_trillion(name: str) -> None:
    raw, total = PUBLISHED[name]
    assert parameters(ModelConfig.from_dict(raw)).total == total


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_autograd_keeps(name: str) -> None:
    """All storages that hold a row for each token, but for parameters and what is the same for all layers."""
    N, shape = 96, ModelConfig.from_dict(MODELS[name])
    model = Transformer(shape)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in own:
            held.setdefault(at, tensor)
        return tensor

    tokens, positions = torch.randint(0, 8, (N,)), torch.arange(N)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, positions, attend_shared([Block(0, N, ())]))
    measured = sum(t.untyped_storage().nbytes() for t in held.values())
    moe = set(shape.moe_layers)
    layers = sum(kept(shape, N, moe=i in moe, fused=False) for i in range(shape.num_hidden_layers))
    rotation = 2 * FLOAT * (shape.mla.qk_rope_head_dim if shape.mla else shape.head_dim)
    ends = FLOAT * (2 * shape.hidden_size + 1) + rotation + 3 * 8  # the last norm; tokens and where rows go
    assert N * (layers + ends) == pytest.approx(measured, rel=0.01)


@given(
    st.sampled_from(sorted(PUBLISHED)),
    st.sampled_from([1, 2, 8, 64]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
)
def test_more_ranks_never_need_more_memory(name: str, data: int, context: int, zero: int, recompute: bool) -> None:
    shape, work = ModelConfig.from_dict(PUBLISHED[name][0]), Work(tokens=32768, recompute=recompute)
    alone = plan(shape, Ranks(context, context), work)
    many = plan(shape, Ranks(data * context, context, zero=zero if data > 1 else 0), work)
    if zero == 0 or data * context > 2:
        assert many.peak <= alone.peak * 1.0001
    assert (
        plan(shape, Ranks(), Work(tokens=32768, recompute=True)).peak <= plan(shape, Ranks(), Work(tokens=32768)).peak
    )
    assert not plan(shape).sent
    assert all(value >= 0 for value in {**many.device, **many.host, **many.sent}.values())


def test_a_trillion_parameters_over_a_thousand_ranks() -> None:
    shape = ModelConfig.from_dict(PUBLISHED["Kimi K2"][0])
    found = plan(shape, Ranks(1024, 8, 64, zero=2), Work(tokens=131072, recompute=True))
    experts = parameters(shape).experts
    assert found.device["weights as published"] == 4 * (parameters(shape).dense + experts / 64)
    assert found.device["moments of AdamW"] == pytest.approx(8 * parameters(shape).total / 1024)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world": 6, "context": 4}, "--context: found 4 of 6 ranks; allowed: 1, 2, 3, 6"),
        ({"world": 4, "zero": 3}, "--zero: found 3; allowed: 0, 1, 2"),
    ],
)
def test_ranks_that_do_not_divide_are_named(options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Ranks(**options)


def test_the_command_prints_a_table_or_json_and_names_what_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["SmolLM2-135M"][0]))
    run = CliRunner()
    shown = run.invoke(app, ["train", str(tmp_path), "--tokens", "8192", "--recompute"])
    assert shown.exit_code == 0, shown.output
    assert "activations" in shown.output
    assert "134.5 M" in shown.output
    told = json.loads(run.invoke(app, ["train", str(tmp_path / "config.json"), "--json"]).stdout)
    assert told["parameters"]["total"] == 134_515_008
    assert told["peak"] == sum(told["device"].values())
    bad = run.invoke(app, ["train", str(tmp_path), "--ranks", "4", "--expert", "4"])
    assert bad.exit_code == 2
    assert "--expert" in bad.output
    assert run.invoke(app, ["train", str(tmp_path / "nothing")]).exit_code == 2
    assert "inference replicas" in run.invoke(app, []).output

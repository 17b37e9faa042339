"""The model computes what `transformers` computes, from the same files, for every architecture that it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from shared.model import ModelConfig, Transformer, causal_rows, load_checkpoint, save_checkpoint

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
QWEN3 = {**COMMON, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e4}
QWEN3_MOE = {
    **QWEN3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
DEEPSEEK = {
    **COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rope_theta": 1e4,
    "num_nextn_predict_layers": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA = {**COMMON, "num_key_value_heads": 2}
QWEN2 = {**LLAMA, "num_attention_heads": 4, "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}
KIMI = {**DEEPSEEK, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 5e4}
YARN_OF_QWEN = {**YARN, "attention_factor": 1.2, "truncate": False, "beta_fast": 2.0, "beta_slow": 0.3}
CASES = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, QWEN3),
    "qwen3-tied": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {**QWEN3, "tie_word_embeddings": True}),
    "qwen3-yarn": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {**QWEN3, "rope_parameters": YARN_OF_QWEN, "max_position_embeddings": 128},
    ),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, QWEN3_MOE),
    "qwen3_moe-raw-gates-and-dense-layers": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {**QWEN3_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, DEEPSEEK),
    "deepseek_v3-without-query-latent": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2},
    ),
    "deepseek_v3-yarn": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {**DEEPSEEK, "rope_parameters": YARN, "max_position_embeddings": 128},
    ),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
    "llama-tied": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {**LLAMA, "tie_word_embeddings": True}),
    "llama-scaled-as-llama-3": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {**LLAMA, "rope_parameters": LLAMA3, "head_dim": 32},
    ),
    "llama-linear-and-every-head-its-own-key": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {
            **LLAMA,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "llama-yarn": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {**LLAMA, "rope_parameters": YARN, "max_position_embeddings": 128},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, QWEN2),
    "qwen2-tied-yarn": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {**QWEN2, "tie_word_embeddings": True, "rope_parameters": YARN, "max_position_embeddings": 128},
    ),
    "kimi_k2": (
        transformers.DeepseekV3Config,  # Kimi's own code is DeepSeek's
        transformers.DeepseekV3ForCausalLM,
        {**KIMI, "rope_parameters": {**YARN, "beta_fast": 1.0}, "max_position_embeddings": 128},
    ),
}


def reference(name: str, **more):
    """A tiny random model of `transformers`, scaled so that its logits spread (std >= 1): a wrong rotary embedding or
    router bias then shows far above rounding."""
    config_type, model_type, fields = CASES[name]
    torch.manual_seed(0)
    config = config_type(**{**fields, **more}, attn_implementation="eager")
    model = model_type(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".bias"):
                parameter.normal_(0, 0.5)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif "gate.weight" in key:
                parameter.normal_(0, 0.25)
            else:
                gain = 0.5 if "o_proj" in key or "down_proj" in key else 1.1
                parameter.normal_(0, gain / parameter.shape[-1] ** 0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model


def named(directory: Path, case: str) -> Path:
    """The checkpoint under a family's own name (the first word of the case), which transformers may not know."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": case.split("-")[0]}))
    return directory


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_and_routing_equal_those_of_transformers(name, tmp_path):
    theirs = reference(name)
    theirs.save_pretrained(tmp_path)
    ours = load_checkpoint(named(tmp_path, name))
    B, T = 3, 40
    tokens = torch.randint(0, COMMON["vocab_size"], (B, T))
    with torch.no_grad():
        expected = theirs(tokens, output_router_logits=bool(ours.config.moe)) if ours.config.moe else theirs(tokens)
        out = ours(tokens.flatten(), torch.arange(T).repeat(B), causal_rows(B, T))
        logits = ours.logits(out.hidden_ND).view(B, T, -1)
    assert expected.logits.std() >= 1
    difference = (logits.log_softmax(-1) - expected.logits.log_softmax(-1)).abs().max()
    assert difference <= 1e-5, f"largest difference of a log-probability: {difference:.2e}"
    if ours.config.moe:
        theirs_NLK = routing_of(theirs, tokens)
        assert torch.equal(out.experts_NLK.sort(-1).values, theirs_NLK.sort(-1).values)
        for mine, router_logits in zip(out.router_logits, expected.router_logits, strict=True):
            torch.testing.assert_close(mine, router_logits.float(), rtol=1e-4, atol=1e-4)


def routing_of(model, tokens):
    """The experts that transformers' routers select, by a forward hook on each: int64 [N, L, K]."""
    rows = []
    gates = [m for key, m in model.named_modules() if key.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _m, _i, out: rows.append(out[2])) for gate in gates]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(rows, 1)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_written_here_is_read_by_transformers_with_nothing_missing(name, tmp_path):
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "a")
    save_checkpoint(load_checkpoint(named(tmp_path / "a", name)), tmp_path / "b", torch.float32)
    named(tmp_path / "b", CASES[name][0].model_type)
    again, info = CASES[name][1].from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_the_mtp_layer_equals_that_of_transformers(tmp_path, monkeypatch):
    """Same weights, same input as transformers' MTP module (hidden state after the final norm, embedding of the next
    token, enorm and hnorm, eh_proj([e; h]), one decoder layer, shared_head.norm)."""
    from transformers.modeling_layers import MtpModel

    # transformers finds MTP weights by this pattern, which holds DeepSeek-V3's 61 layers.
    monkeypatch.setattr(
        transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"]
    )
    main = reference("deepseek_v3-yarn", num_nextn_predict_layers=1)
    main.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path)  # num_nextn_predict_layers 1, no MTP weights in the files: random
    with torch.no_grad():
        for parameter in ours.mtp_layers.parameters():
            parameter.copy_(parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(0, 0.2))
    save_checkpoint(ours, tmp_path, torch.float32)
    main = type(main).from_pretrained(tmp_path, attn_implementation="eager").eval()
    mtp = MtpModel.from_pretrained(main).eval()
    T = 24
    tokens = torch.randint(0, COMMON["vocab_size"], (1, T + 1))
    with torch.no_grad():
        hidden = main.model(tokens[:, :T]).last_hidden_state
        positions = torch.arange(T)[None]
        expected = mtp.layers[0](
            main.model.embed_tokens(tokens[:, 1:]),
            hidden,
            position_embeddings=main.model.rotary_emb(hidden, positions),
            attention_mask=torch.full((T, T), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            past_key_values=None,
        )[0]
        out = ours(tokens[0, :T], positions[0], causal_rows(1, T))
        mine = ours.mtp(out.residual_ND, tokens[0, 1:], positions[0], causal_rows(1, T))
    torch.testing.assert_close(mine, expected.view_as(mine), rtol=0, atol=2e-5)


def test_a_config_of_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ValueError, match=r"model_type 'mistral'; allowed: deepseek_v3, kimi_k2, llama"):
        ModelConfig.from_dict({"model_type": "mistral"})
    with pytest.raises(ValueError, match="use_sliding_window is True"):
        ModelConfig.from_dict({"model_type": "qwen3", **QWEN3, "use_sliding_window": True})
    with pytest.raises(ValueError, match="'hidden_size' is missing"):
        ModelConfig.from_dict({"model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2})


def test_a_checkpoint_of_another_shape_is_refused_by_tensor(tmp_path):
    config = ModelConfig.from_dict({"model_type": "qwen3_moe", **QWEN3_MOE})
    save_checkpoint(Transformer(config), tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"head_dim": 16', '"head_dim": 32'))
    with pytest.raises(
        ValueError, match=r"model.safetensors: .*k_norm.weight is \(16,\); config.json asks for \(32,\)"
    ):
        load_checkpoint(tmp_path)

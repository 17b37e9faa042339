"""What SGLang's live weights must hash to, and the folder that it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from services.inference.published import bits_of
from services.inference.sglang import files, hashes
from services.inference.sglang.layout import Layout, differences, expected, held
from services.inference.sglang.server import FIRST_DELAY_S, HEALTHY_AFTER_S, LAST_DELAY_S, Backoff
from shared.model import ModelConfig, Transformer
from shared.weights.blocks import BLOCK, from_blocks, to_blocks

COMMON = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.3,
}
DENSE = {**COMMON, "model_type": "qwen3", "num_nextn_predict_layers": 0, "tie_word_embeddings": True}
MOE = {**COMMON, "model_type": "qwen3_moe", "num_experts": 4, "tie_word_embeddings": True}
DEEPSEEK = {
    **COMMON,
    "model_type": "deepseek_v3",
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
}
LLAMA = {**DENSE, "model_type": "llama"}
QWEN2 = {**DENSE, "model_type": "qwen2", "tie_word_embeddings": False}
KIMI = {**DEEPSEEK, "model_type": "kimi_k2", "num_nextn_predict_layers": 0}
KINDS = {"dense": DENSE, "moe": MOE, "deepseek": DEEPSEEK, "llama": LLAMA, "qwen2": QWEN2, "kimi": KIMI}


def published(kind: dict[str, Any]) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    torch.manual_seed(0)
    model = Transformer(ModelConfig.from_dict(kind)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.config, bits_of(model)


# -- hashes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "digest"),  # of SGLang 0.5.23's own kernel, run by Triton's interpreter on these numbers
    [
        (1, "3d93a6540b54ef2a"),
        (3, "3626dc024b0e6f6c"),
        (8192, "dcead12352343bd8"),
        (16385, "b8f84a5df12df523"),
        (100003, "fc83cb02663480c1"),
    ],
)
def test_the_hash_on_a_gpu_is_sglangs(size, digest):
    numbers = (np.arange(size, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint16)
    assert hashes.on_gpu(numbers) == digest


def test_the_hash_on_the_cpu_is_the_first_half_of_a_sha256():
    assert hashes.on_cpu(np.frombuffer(b"abcd", np.uint8)) == "88d4266fd4e6338d"


# -- layout --------------------------------------------------------------------------------------------------------------


def test_a_dense_model_has_one_fused_matrix_for_each_pair_and_a_padded_vocabulary():
    config, bits = published(DENSE)
    found = dict(held(bits, Layout(config), 0))
    a = "model.layers.1.self_attn."
    assert np.array_equal(found[a + "qkv_proj.weight"], np.concatenate([bits[f"{a}{p}_proj.weight"] for p in "qkv"]))
    assert found["model.embed_tokens.weight"].shape == (192, 64)
    assert not found["model.embed_tokens.weight"][130:].any()
    assert "lm_head.weight" not in found  # tied: one tensor, which SGLang names once
    m = "model.layers.0.mlp."
    both = np.concatenate([bits[m + "gate_proj.weight"], bits[m + "up_proj.weight"]])
    assert np.array_equal(found[m + "gate_up_proj.weight"], both)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_biases_lie_as_the_rows_of_their_matrix_do(tp):
    config, bits = published(QWEN2)
    a = "model.layers.1.self_attn."
    rows = {}
    for kind in ("weight", "bias"):
        assert f"{a}q_proj.{kind}" in bits
        marked = {f"{a}{p}_proj.{kind}": np.arange(len(bits[f"{a}{p}_proj.bias"])) for p in "qkv"}
        for name, row in marked.items():
            bits[name] = (row.astype(np.uint16) if kind == "bias" else np.repeat(row[:, None], 64, 1)).astype(np.uint16)
        rows[kind] = [dict(held(bits, Layout(config, tp=tp), rank))[f"{a}qkv_proj.{kind}"] for rank in range(tp)]
    for weight, bias in zip(rows["weight"], rows["bias"], strict=True):
        assert np.array_equal(weight[:, 0], bias)


def test_a_llama_has_no_parameters_but_its_matrices_and_norms():
    config, bits = published(LLAMA)
    parts = {name.rpartition("layers.0.")[2] for name in dict(held(bits, Layout(config), 0)) if "layers.0." in name}
    assert parts == {
        *("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.qkv_proj.weight"),
        *("self_attn.o_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight"),
    }


def test_kimi_is_served_as_the_model_that_it_is():
    config, _ = published(KIMI)
    named = files.engine_config(config, context=512, dtype="bfloat16", fp8=False)
    assert (named["model_type"], named["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])


def test_experts_lie_in_two_tensors_and_a_tied_head_is_written_out_where_sglang_does_not_tie():
    config, bits = published(MOE)
    found = dict(held(bits, Layout(config), 0))
    w13 = found["model.layers.0.mlp.experts.w13_weight"]
    assert w13.shape == (4, 64, 64)
    assert np.array_equal(w13[2, :32], bits["model.layers.0.mlp.experts.2.gate_proj.weight"])
    assert np.array_equal(w13[2, 32:], bits["model.layers.0.mlp.experts.2.up_proj.weight"])
    assert np.array_equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_the_two_matrices_before_the_latents_are_one():
    config, bits = published(DEEPSEEK)
    found = dict(held(bits, Layout(config, draft=True), 0))
    a = "model.layers.1.self_attn."
    both = np.concatenate([bits[a + "q_a_proj.weight"], bits[a + "kv_a_proj_with_mqa.weight"]])
    assert np.array_equal(found[a + "fused_qkv_a_proj_with_mqa.weight"], both)
    assert np.array_equal(found["draft.model.eh_proj.weight"], bits["model.layers.2.eh_proj.weight"])
    assert "draft.model.decoder.mlp.experts.w2_weight" in found


@pytest.mark.parametrize("kind", KINDS)
def test_every_published_tensor_is_in_the_layout_once_however_it_is_shared_out(kind):
    """All ranks together hold the published numbers: as many of each as of the whole, replicas and padding aside."""
    config, bits = published(KINDS[kind])
    draft = config.num_mtp_layers > 0
    whole = dict(held(bits, Layout(config, draft=draft), 0))
    for tp, ep in ((2, 1), (2, 2), (4, 2)) if config.moe else ((2, 1),):
        ranks = [dict(held(bits, Layout(config, tp=tp, ep=ep, draft=draft), rank)) for rank in range(tp)]
        for name, array in whole.items():
            parts = [rank[name] for rank in ranks]
            size = sum(part.size for part in parts)
            replicated = all(np.array_equal(part, array) for part in parts)
            if "experts.w" in name or not (replicated or "qkv_proj" in name):
                assert size == array.size, (name, tp, ep)
                together = np.sort(np.concatenate([part.reshape(-1) for part in parts]))
                assert np.array_equal(together, np.sort(array.reshape(-1))), (name, tp, ep)
            elif "qkv_proj" in name and tp > config.num_key_value_heads:
                assert size > array.size  # heads of keys and values are repeated


def test_ranks_take_their_heads_and_repeat_keys_and_values_where_there_are_too_few():
    config, bits = published(DENSE)
    a = "model.layers.0.self_attn."
    q, k, v = (bits[f"{a}{p}_proj.weight"] for p in "qkv")
    third = dict(held(bits, Layout(config, tp=4), 2))[a + "qkv_proj.weight"]
    assert np.array_equal(third, np.concatenate([q[32:48], k[16:32], v[16:32]]))  # head 2 of 4 reads group 1 of 2


def test_weights_that_are_loaded_as_float32_are_the_same_numbers():
    config, bits = published(MOE)
    wide = dict(held(bits, Layout(config, float32=True), 0))
    for name, narrow in held(bits, Layout(config), 0):
        assert np.array_equal(wide[name], (narrow.astype(np.uint32) << 16).view(np.float32)), name


def test_a_routers_bias_stays_float32_in_bf16():
    config, bits = published(DEEPSEEK)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert dict(held(bits, Layout(config), 0))[name].dtype == np.float32


def answered(wanted: list[dict[str, str]]) -> list[dict[str, Any]]:
    """As SGLang reports it, copies of the whole model included."""
    return [
        {"checksums": dict(sums), "parallelism_info": [{"role": "target", "tp_rank": place, "dp_rank": copy}]}
        for copy in range(2)
        for place, sums in enumerate(wanted)
    ]


def test_what_differs_is_named_by_rank_and_parameter():
    config, bits = published(MOE)
    wanted = expected(bits, Layout(config, tp=2), hashes.on_cpu)
    assert wanted == expected(bits, Layout(config, tp=2), hashes.on_cpu, threads=3)
    assert differences(wanted, answered(wanted)) == []
    changed = answered(wanted)
    changed[3]["checksums"]["model.norm.weight"] = "0" * 16
    assert differences(wanted, changed) == ["rank 1: model.norm.weight"]
    missing = answered(wanted)
    del missing[0]["checksums"]["lm_head.weight"]
    assert differences(wanted, missing) == ["rank 0: lm_head.weight"]
    more = answered(wanted)
    more[0]["checksums"]["model.unknown"] = "1" * 16
    assert differences(wanted, more) == ["rank 0: model.unknown"]
    assert differences(wanted, answered(wanted[:1])) == ["rank 1: no answer"]
    assert differences(wanted, [{"checksums": {}}])[0].startswith("a rank that is none of 2")


# -- the folder ----------------------------------------------------------------------------------------------------------


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def write(folder: Path, kind: dict[str, Any], *, fp8: bool = False, draft: bool = True) -> dict[str, torch.Tensor]:
    config, bits = published(kind)
    named = files.engine_config(config, context=512, dtype="bfloat16", fp8=fp8)
    files.write(folder, bits, config, named, fp8=fp8, draft=draft)
    return stored(folder)


def test_the_folder_holds_the_published_bits_in_files_of_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FILE_BYTES", 50_000)
    _, bits = published(DEEPSEEK)
    found = write(tmp_path / "5", DEEPSEEK)
    assert len(list((tmp_path / "5").glob("*.safetensors"))) > 3
    assert found.keys() == bits.keys()
    for name, tensor in found.items():
        same = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
        assert np.array_equal(same, bits[name]), name
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


def test_qwens_mtp_layer_and_head_are_named_as_sglang_reads_them(tmp_path):
    found = write(tmp_path / "0", MOE)
    assert {"mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"} <= found.keys()
    assert {"mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= found.keys()
    assert "mtp.layers.0.mlp.experts.3.down_proj.weight" in found
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert not any(name.startswith("model.layers.2.") for name in found)


def test_without_drafts_the_mtp_layer_is_not_written(tmp_path):
    assert not any("mtp" in name for name in write(tmp_path / "0", MOE, draft=False))
    assert not any(name.startswith("model.layers.2.") for name in write(tmp_path / "1", DEEPSEEK, draft=False))


def test_the_configuration_stops_at_no_token_that_a_request_did_not_name(tmp_path):
    write(tmp_path / "0", DEEPSEEK)
    config = json.loads((tmp_path / "0" / "config.json").read_text())
    assert config["eos_token_id"] is None  # named: DeepSeek's default is 1
    assert not (tmp_path / "0" / "generation_config.json").exists()
    assert config["topk_method"] == "noaux_tc"
    assert config["scoring_func"] == "sigmoid"


def test_the_folder_has_positions_for_the_context_and_what_sglang_keeps_free():
    config, _ = published({**MOE, "max_position_embeddings": 512})
    assert files.engine_config(config, context=512, dtype="bfloat16", fp8=False)["max_position_embeddings"] == 519


def test_what_a_configuration_leaves_out_is_read_as_our_model_is_built():
    """SGLang has other defaults, and no two libraries the same."""
    silent = {n: v for n, v in DEEPSEEK.items() if n != "num_key_value_heads"}
    config = ModelConfig.from_dict({**silent, "q_lora_rank": None, "n_shared_experts": 0, "first_k_dense_replace": 0})
    read = transformers.DeepseekV3Config(**files.engine_config(config, context=64, dtype="bfloat16", fp8=False))
    assert (read.n_group, read.topk_group, read.first_k_dense_replace) == (1, 1, 0)
    assert (read.q_lora_rank, read.n_shared_experts, read.num_key_value_heads) == (None, 0, 4)
    assert (read.norm_topk_prob, read.routed_scaling_factor, read.rms_norm_eps) == (True, 2.5, 1e-6)


def test_a_folder_that_is_there_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "model-00009.safetensors").write_text("of a writer that died")
    assert "model.norm.weight" in write(tmp_path / "0", DENSE, draft=False)


# -- FP8 -----------------------------------------------------------------------------------------------------------------

WIDE = {**MOE, "hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64, "num_key_value_heads": 4}


def test_fp8_matrices_lie_beside_their_scales_and_the_small_ones_stay(tmp_path):
    found = write(tmp_path / "0", WIDE, fp8=True)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert found[name].dtype == torch.float8_e4m3fn
    assert found[f"{name}_scale_inv"].shape == (1, 2)
    for small in ("mlp.gate.weight", "input_layernorm.weight", "self_attn.q_norm.weight"):
        assert found[f"model.layers.0.{small}"].dtype == torch.bfloat16
    assert found["lm_head.weight"].dtype == found["mtp.fc.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "0" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [BLOCK, BLOCK]


def test_what_is_hashed_under_fp8_is_what_the_stored_blocks_stand_for(tmp_path):
    """SGLang hashes an FP8 matrix dequantised to bf16."""
    config, bits = published(WIDE)
    found = write(tmp_path / "0", WIDE, fp8=True)
    computed = files.served(bits, fp8=True)
    for name, tensor in found.items():
        if tensor.dtype == torch.float8_e4m3fn and not name.startswith("mtp"):
            meant = from_blocks(tensor, found[f"{name}_scale_inv"])
            assert np.array_equal(meant.view(torch.int16).numpy().view(np.uint16), computed[name]), name
    plain = expected(bits, Layout(config), hashes.on_cpu)[0]
    rounded = expected(computed, Layout(config), hashes.on_cpu)[0]
    assert {n for n in plain if plain[n] != rounded[n]} == {n for n in plain if "_proj" in n or "experts" in n}


MATRICES = st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(0, 1 << 30), st.integers(-30, 30))


@given(MATRICES)
def test_blocks_round_to_nearest_are_exact_in_bf16_and_do_not_change_when_made_again(matrix):
    N, K, seed, scale = matrix
    w = (torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 2.0**scale).bfloat16()
    q, s = to_blocks(w)
    assert q.shape == (N, K)
    assert s.shape == (-(-N // BLOCK), -(-K // BLOCK))
    assert torch.equal(torch.frexp(s).mantissa, torch.full_like(s, 0.5))  # powers of two
    back = from_blocks(q, s)
    assert torch.equal(from_blocks(*to_blocks(back)), back)
    step = s.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]
    exponent = torch.frexp(w.float() / step).exponent - 1  # E4M3: three bits after the first, down to 2^-6
    assert ((back.float() - w.float()).abs() <= step * torch.exp2(exponent.clamp(min=-6) - 4.0)).all()


def test_the_largest_number_of_a_block_uses_the_whole_range():
    for value, scale in ((448.0, 1.0), (448.0 * 1.01, 2.0), (224.5, 0.5 * 2), (224.0, 0.5)):
        assert to_blocks(torch.full((2, 2), value))[1].item() == scale
    q, s = to_blocks(torch.zeros(2, 2))
    assert not from_blocks(q, s).any()


# -- starting again ------------------------------------------------------------------------------------------------------


def test_a_server_that_dies_at_once_is_started_ever_more_rarely_and_one_that_lived_at_once():
    backoff = Backoff(FIRST_DELAY_S)
    assert [backoff.after(0) for _ in range(9)] == [1, 2, 4, 8, 16, 32, LAST_DELAY_S, LAST_DELAY_S, LAST_DELAY_S]
    assert backoff.after(HEALTHY_AFTER_S) == FIRST_DELAY_S
    assert backoff.after(0) == 2

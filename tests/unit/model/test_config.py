"""A config.json is read as transformers reads it, or refused with the name of the field."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shared.model.attention import inverse_frequencies, rotation_amplitude
from shared.model.checkpoint import expected_shapes
from shared.model.config import ModelConfig, UnknownModel

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
    },
}
MOE: dict[str, Any] = {**COMMON, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {**COMMON, "head_dim": 16, "use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    "qwen3_moe": {**MOE, "head_dim": 16, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": {
        **MOE,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    },
    "llama": {**COMMON, "head_dim": 16, "mlp_bias": False, "num_key_value_heads": 2},
    "qwen2": {**COMMON, "use_sliding_window": False, "sliding_window": 8, "layer_types": ["full_attention"] * 2},
}
KINDS["kimi_k2"] = {**KINDS["deepseek_v3"], "n_group": 1, "num_nextn_predict_layers": 0}
CONFIGS = {
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "deepseek_v3": transformers.DeepseekV3Config,
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "kimi_k2": transformers.DeepseekV3Config,
}
OURS = sorted(KINDS.keys() - {"kimi_k2"})  # those that transformers knows by the same name


def read(kind: str, **changed: Any) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": kind, **KINDS[kind], **changed})


def without(kind: str, *names: str) -> ModelConfig:
    fields = {name: value for name, value in KINDS[kind].items() if name not in names}
    return ModelConfig.from_dict({"model_type": kind, **fields})


# Rotary embedding

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
STRETCHED: dict[str, dict[str, Any]] = {
    "plain": YARN,
    "by the old name of the type": {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}},
    "no attention factor": {**YARN, "attention_factor": None},
    "attention_factor 1": {**YARN, "attention_factor": 1.0},
    "attention_factor 1.3 of nothing stretched": {**YARN, "factor": 1.0, "attention_factor": 1.3},
    "not truncated": {**YARN, "truncate": False},
    "not truncated, far ends": {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 4.5},
    "mscale pair": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "one mscale": {**YARN, "mscale_all_dim": 1.2},
    "attention factor beside mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "attention_factor": 0.9},
    "ends of the ramp beyond the head": {**YARN, "rope_theta": 10.0, "original_max_position_embeddings": 163840},
    "ends of the ramp before the head": {**YARN, "original_max_position_embeddings": 2},
    "whole partial rotation": {**YARN, "partial_rotary_factor": 1.0},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", STRETCHED)
def test_yarn_turns_and_scales_as_in_transformers(kind: str, how: str) -> None:
    ours = read(kind, rope_parameters=STRETCHED[how])
    theirs = CONFIGS[kind](**{**KINDS[kind], "rope_parameters": dict(STRETCHED[how])})
    inverse, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    size = ours.mla.qk_rope_head_dim if ours.mla else ours.head_dim
    assert rotation_amplitude(ours.rope) == pytest.approx(amplitude, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(ours.rope, size), inverse, rtol=1e-6, atol=0)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize(
    "rope",
    [LLAMA3, {**LLAMA3, "factor": 32.0, "low_freq_factor": 0.7}, {**LLAMA3, "original_max_position_embeddings": 16}],
)
def test_llama_3_turns_as_in_transformers(rope: dict[str, Any], size: int) -> None:
    ours = read("llama", rope_parameters=rope, head_dim=size)
    theirs = transformers.LlamaConfig(**{**KINDS["llama"], "rope_parameters": dict(rope), "head_dim": size})
    inverse, amplitude = ROPE_INIT_FUNCTIONS["llama3"](theirs)
    assert rotation_amplitude(ours.rope) == amplitude == 1.0
    torch.testing.assert_close(inverse_frequencies(ours.rope, size), inverse, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"low_freq_factor": 4.0}, r"high_freq_factor is 4\.0; allowed: a number above 4"),
        ({"original_max_position_embeddings": None}, r"'rope_scaling.original_max_position_embeddings' is missing"),
        ({"beta_fast": 32}, r"beta_fast is 32; rope type llama3 has no such field"),
    ],
)
def test_a_scaling_of_llama_3_that_is_not_whole_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownModel, match=said):
        read("llama", rope_parameters=None, rope_scaling={**LLAMA3, **changed})


def test_mscale_sharpens_the_scores_of_deepseek_alone() -> None:
    rope = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    for kind, attention in (
        ("qwen3", transformers.models.qwen3.modeling_qwen3.Qwen3Attention),
        ("deepseek_v3", transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention),
    ):
        theirs = attention(CONFIGS[kind](**{**KINDS[kind], "rope_parameters": dict(rope)}), 0)
        assert read(kind, rope_parameters=rope).attention_scale == pytest.approx(theirs.scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1e6}, 5e5),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6}, 1e6),
        ({"rope_parameters": None, "rope_theta": 1e6}, 1e6),
        ({"rope_parameters": None, "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"}}, 1e4),
        ({"rope_parameters": None, "rope_scaling": {**YARN, "rope_theta": 7e4}, "rope_theta": 1e6}, 7e4),
    ],
)
def test_the_base_of_the_angles_is_the_one_that_transformers_takes(fields: dict[str, Any], theta: float) -> None:
    theirs = transformers.Qwen3Config.from_dict(json.loads(json.dumps({**KINDS["qwen3"], **fields})))
    assert read("qwen3", **fields).rope.theta == theirs.rope_parameters["rope_theta"] == theta


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (
            {**YARN, "ramp": 3},
            r"rope_parameters\.ramp is 3; rope type yarn has no such field, allowed: attention_factor",
        ),
        (
            {"rope_type": "default", "factor": 4.0},
            r"rope_parameters\.factor is 4\.0; rope type default has no such field",
        ),
        ({**YARN, "partial_rotary_factor": 0.5}, r"rope_parameters\.partial_rotary_factor is 0\.5; supported: 1"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, r"'rope_parameters\.factor' is missing"),
        ({**YARN, "factor": None}, r"'rope_parameters\.factor' is missing"),
        ({**YARN, "truncate": None}, r"rope_parameters\.truncate is None; allowed: true or false"),
        ({**YARN, "factor": 0.5}, r"rope_parameters\.factor is 0\.5; allowed: a number of at least 1"),
        ({**YARN, "attention_factor": 0.0}, r"rope_parameters\.attention_factor is 0\.0; allowed: a number above 0"),
        ({"rope_type": "longrope"}, r"rope_parameters\.rope_type is 'longrope'; allowed: default, "),
        ({"rope_type": ["yarn"]}, r"rope_parameters\.rope_type is \['yarn'\]; allowed: default, "),
        ({"full_attention": {"rope_type": "default"}}, r"rope_parameters\.full_attention"),
        ({"rope_theta": "10000"}, r"rope_parameters\.rope_theta is '10000'; allowed: a number above 1"),
        ("default", r"rope_parameters is 'default'; allowed: a JSON object"),
    ],
)
def test_a_rotary_embedding_that_is_not_known_is_refused_by_name(kind: str, rope: Any, said: str) -> None:
    with pytest.raises(UnknownModel, match=said):
        read(kind, rope_parameters=rope)


def test_two_rotary_embeddings_are_refused() -> None:
    default = {"rope_type": "default", "rope_theta": 1e6}
    assert read("qwen3", rope_parameters=YARN, rope_scaling=YARN).rope.factor == 4.0
    with pytest.raises(UnknownModel, match="rope_parameters and rope_scaling are two things"):
        read("qwen3", rope_parameters=default, rope_scaling=YARN)


# Fields that are absent, null, or of another kind


@pytest.mark.parametrize("kind", OURS)
def test_what_transformers_writes_of_its_defaults_is_read_as_they_are(kind: str, tmp_path: Path) -> None:
    theirs = CONFIGS[kind]()
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.load(tmp_path)
    same = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    same += ["intermediate_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range"]
    assert {name: getattr(ours, name) for name in same} == {name: getattr(theirs, name) for name in same}
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    if moe := ours.moe:
        assert moe.num_experts == theirs.num_local_experts
        assert moe.norm_topk_prob == theirs.norm_topk_prob
    if ours.mla:
        assert (moe.n_group, moe.topk_group, moe.n_shared_experts) == (8, 4, 1)
        assert (ours.moe_layers[0], ours.num_mtp_layers, moe.routed_scaling_factor) == (3, 1, 2.5)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen3", ["hidden_size", "num_key_value_heads", "intermediate_size", "vocab_size"]),
        ("qwen3_moe", ["num_experts", "num_key_value_heads", "moe_intermediate_size", "num_experts_per_tok"]),
        ("llama", ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "num_hidden_layers"]),
        ("qwen2", ["num_key_value_heads", "intermediate_size"]),
        (
            "deepseek_v3",
            ["n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "max_position_embeddings"],
        ),
    ],
)
def test_what_no_tensor_shows_and_nobody_can_guess_has_to_be_there(kind: str, names: list[str]) -> None:
    for name in names:
        with pytest.raises(UnknownModel, match=rf"'{name}' is missing \(model_type {kind}\)"):
            without(kind, name)


def test_absent_fields_are_what_they_are_to_transformers() -> None:
    assert without("qwen3", "head_dim").head_dim == transformers.Qwen3Config().head_dim == 128
    assert without("qwen3_moe", "head_dim").head_dim == 64 // 4
    assert read("qwen3", num_key_value_heads=None).num_key_value_heads == 4
    assert without("llama", "num_key_value_heads").num_key_value_heads == 4
    assert read("llama", head_dim=None).head_dim == without("llama", "head_dim").head_dim == 64 // 4
    assert without("llama", "max_position_embeddings").max_position_embeddings == 2048
    assert read("qwen2", num_key_value_heads=None).num_key_value_heads == 4
    assert read("qwen3_moe", mlp_only_layers=None).moe_layers == (0, 1)
    assert without("qwen3", "max_position_embeddings").max_position_embeddings == 32768
    mla = read("deepseek_v3", q_lora_rank=None).mla
    assert mla is not None
    assert mla.q_lora_rank is None


@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        ("qwen3", "max_position_embeddings", None, "is None; allowed: a whole number, 1 to"),
        ("qwen3", "max_position_embeddings", "512", "is '512'; allowed: a whole number"),
        ("qwen3", "num_hidden_layers", "6", "is '6'; allowed: a whole number, 1 to 4096"),
        ("qwen3", "num_hidden_layers", 10**12, "allowed: a whole number, 1 to 4096"),
        ("qwen3", "num_hidden_layers", True, "is True; allowed: a whole number"),
        ("qwen3", "hidden_size", "128", "is '128'; allowed: a whole number"),
        ("qwen3", "hidden_size", 128.0, r"is 128\.0; allowed: a whole number"),
        ("qwen3", "initializer_range", None, "is None; allowed: a number of at least 0"),
        ("qwen3", "rms_norm_eps", None, "is None; allowed: a number above 0"),
        ("qwen3", "rms_norm_eps", "1e-6", "is '1e-6'; allowed: a number above 0"),
        ("qwen3", "rms_norm_eps", 0.0, r"is 0\.0; allowed: a number above 0"),
        ("qwen3", "rms_norm_eps", float("nan"), "is nan; allowed: a number above 0"),
        ("qwen3", "rms_norm_eps", float("inf"), "is inf; allowed: a number above 0"),
        ("qwen3", "tie_word_embeddings", "false", "is 'false'; allowed: true or false"),
        ("qwen3", "head_dim", 15, "is 15; allowed: an even number"),
        ("qwen3", "num_key_value_heads", 3, "is 3; expected to divide num_attention_heads, 4"),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention"], "supported: 'full_attention' alone"),
        ("qwen3", "use_sliding_window", True, "is True; supported: False"),
        ("qwen3", "is_causal", False, "is False; supported: True"),
        ("qwen3", "hidden_act", "gelu", "is 'gelu'; supported: 'silu'"),
        ("qwen3", "partial_rotary_factor", 0.5, r"is 0\.5; supported: 1"),
        ("qwen3", "original_max_position_embeddings", 77, "is 77; supported: None"),
        ("qwen3", "model_type", ["qwen3"], r"\['qwen3'\]; allowed: deepseek_v3, kimi_k2, llama"),
        ("qwen3_moe", "num_experts", "4", "is '4'; allowed: a whole number"),
        ("qwen3_moe", "num_local_experts", 4, "num_experts 8 and num_local_experts 4, which are one thing"),
        ("qwen3_moe", "num_experts_per_tok", "2", "is '2'; allowed: a whole number"),
        ("qwen3_moe", "mlp_only_layers", 3, "is 3; allowed: a list of whole numbers"),
        ("qwen3_moe", "decoder_sparse_step", 0, "is 0; allowed: a whole number, 1 to"),
        ("qwen3_moe", "norm_topk_prob", None, "is None; allowed: true or false"),
        ("deepseek_v3", "attention_bias", True, "is True; supported: False"),
        ("deepseek_v3", "scoring_func", "softmax", "is 'softmax'; supported: 'sigmoid'"),
        ("deepseek_v3", "topk_method", "greedy", "is 'greedy'; supported: 'noaux_tc'"),
        ("deepseek_v3", "moe_layer_freq", 2, "is 2; supported: 1"),
        ("deepseek_v3", "rope_interleave", None, "is None; allowed: true or false"),
        ("deepseek_v3", "num_experts_per_tok", 5, r"is 5; allowed: 1\.\.4"),
        ("deepseek_v3", "n_group", 8, "expected two experts in a group"),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8"}, "supported: None; undo the quantisation first"),
        ("llama", "attention_bias", True, "is True; supported: False"),
        ("llama", "mlp_bias", True, "is True; supported: False"),
        ("llama", "head_dim", 15, "is 15; allowed: an even number"),
        ("qwen2", "use_sliding_window", True, "is True; supported: False"),
        ("qwen2", "layer_types", ["sliding_attention"], "supported: 'full_attention' alone"),
        ("qwen3_moe", "qkv_bias", True, "is True; supported: False"),
        ("qwen3_moe", "shared_expert_intermediate_size", 64, "is 64; supported: 0"),
    ],
)
def test_a_field_of_another_kind_is_refused_with_its_name_what_was_found_and_what_is_allowed(
    kind: str, name: str, value: Any, said: str
) -> None:
    with pytest.raises(UnknownModel, match=said) as refused:
        read(kind, **{name: value})
    assert name in str(refused.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "{", "\x00", '"qwen3"', "null"])
def test_a_file_that_is_no_configuration_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnknownModel, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_folder_in_its_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UnknownModel, match=r"config\.json: cannot be read"):
        ModelConfig.load(tmp_path)


NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 8, 64, -1, 2**31 - 1, 2**31, 10**30, 10**400, 0.0, 1e-320, 1e308])
PLAIN = st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    PLAIN,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=8), some, max_size=3),
    max_leaves=4,
)


@settings(deadline=None, max_examples=400)
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), value=VALUES)
def test_whatever_one_field_says_the_answer_is_a_model_or_a_refusal_that_names_it(
    data: st.DataObject, kind: str, value: Any
) -> None:
    fields: dict[str, Any] = json.loads(json.dumps({"model_type": kind, **KINDS[kind]}))
    inner = data.draw(st.booleans())
    place = fields["rope_parameters"] if inner else fields
    name = data.draw(st.sampled_from(sorted(place)))
    place[name] = value
    refused = ""
    try:
        config = ModelConfig.from_dict(fields)
    except UnknownModel as error:
        refused = str(error)
    if refused:
        assert name in refused
        return
    rotation_amplitude(config.rope)
    if max(config.num_hidden_layers, config.num_mtp_layers, config.moe.num_experts if config.moe else 0) > 64:
        return  # they are built one by one
    with contextlib.suppress(UnknownModel):  # sizes that no tensor can have
        assert expected_shapes(config)

"""A family is one file: published configurations are read by it, and nothing else asks for its name."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.model import families
from shared.model.config import ModelConfig, UnknownModel
from shared.model.families import family

ROOT = Path(__file__).resolve().parents[3]
COMMON: dict[str, Any] = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
QWEN = {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None}
DEEPSEEK: dict[str, Any] = {
    **COMMON,
    "model_type": "deepseek_v3",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
# As they were published, with rope_theta and rope_scaling side by side.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-3.1-8B": (
        {
            **COMMON,
            "model_type": "llama",
            "attention_bias": False,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "vocab_size": 128256,
        },
        {"head_dim": 128, "qk_norm": False, "qkv_bias": False, "architecture": "LlamaForCausalLM"},
    ),
    "Qwen2.5-Coder-7B": (
        {
            **COMMON,
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        {"head_dim": 128, "qk_norm": False, "qkv_bias": True, "architecture": "Qwen2ForCausalLM"},
    ),
    "Qwen3-8B": (
        {
            **COMMON,
            **QWEN,
            "model_type": "qwen3",
            "attention_bias": False,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
        },
        {"head_dim": 128, "qk_norm": True, "qkv_bias": False, "architecture": "Qwen3ForCausalLM"},
    ),
    "Qwen3-Coder-30B-A3B": (
        {
            **COMMON,
            **QWEN,
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "qkv_bias": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000000,
            "router_aux_loss_coef": 0.0,
            "shared_expert_intermediate_size": 0,
            "tie_word_embeddings": False,
            "use_qk_norm": True,
            "vocab_size": 151936,
        },
        {"qk_norm": True, "num_moe_layers": 48, "architecture": "Qwen3MoeForCausalLM"},
    ),
    "Kimi-K2": (
        {**DEEPSEEK, "model_type": "kimi_k2", "num_nextn_predict_layers": 0},
        {"num_moe_layers": 60, "architecture": "DeepseekV3ForCausalLM", "head_dim": 192},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_are_read_as_they_were_published(name: str) -> None:
    raw, facts = PUBLISHED[name]
    config = ModelConfig.from_dict(raw)
    assert {fact: getattr(config, fact) for fact in facts} == facts
    assert config.rope.theta == raw["rope_theta"]
    assert config.rope.kind == ((raw["rope_scaling"] or {}) if "rope_scaling" in raw else {}).get(
        "rope_type", (raw.get("rope_scaling") or {}).get("type", "default")
    )
    assert config.to_dict()["architectures"] == [facts["architecture"]]


def test_a_quantised_checkpoint_is_refused_with_the_way_out() -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    with pytest.raises(UnknownModel, match=r"quantization_config is .*supported: None; undo the quantisation first"):
        ModelConfig.from_dict({**DEEPSEEK, "quantization_config": fp8})


@pytest.mark.parametrize("name", families.names())
def test_every_family_is_found_by_its_name_alone(name: str) -> None:
    assert family(name).name == name


def test_another_package_registers_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip lays out an installed distribution: a module, and metadata that name its entry point."""
    (tmp_path / "their_model.py").write_text(
        "from dataclasses import replace\n"
        "from shared.model.families import Family, llama\n"
        "def read(fields):\n"
        "    return replace(llama.read(fields), model_type='theirs', architecture='TheirsForCausalLM')\n"
        "FAMILY = Family('theirs', read)\n"
    )
    about = tmp_path / "their_model-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-model\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[etude.families]\ntheirs = their_model:FAMILY\n")
    raw = {**PUBLISHED["Llama-3.1-8B"][0], "model_type": "theirs"}
    with pytest.raises(UnknownModel, match="model_type 'theirs'; allowed: deepseek_v3"):
        ModelConfig.from_dict(raw)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    config = ModelConfig.from_dict(raw)
    assert (config.model_type, config.rope.kind) == ("theirs", "llama3")
    assert config.to_dict()["architectures"] == ["TheirsForCausalLM"]
    sys.modules.pop("their_model")


def _sources() -> list[Path]:
    inside = ROOT / "shared" / "model" / "families"
    paths = [path for room in ("etude", "services", "shared", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    return [path for path in paths if inside not in path.parents]


def _asks_for_the_name(node: ast.AST) -> bool:
    """`x.model_type`, `x["model_type"]` or `x.get("model_type")` on one side of a comparison."""
    if not isinstance(node, ast.Compare):
        return False
    for side in (node.left, *node.comparators):
        for part in ast.walk(side):
            if isinstance(part, ast.Attribute) and part.attr == "model_type":
                return True
            if (
                isinstance(part, ast.Constant)
                and part.value == "model_type"
                and len(ast.unparse(side)) > len("'model_type'")
            ):
                return True
    return False


def test_nothing_outside_the_families_compares_a_model_type_with_a_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if _asks_for_the_name(node)
    ]
    assert not found

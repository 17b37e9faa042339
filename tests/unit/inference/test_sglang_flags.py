"""Which command our settings become, and which settings cannot go together."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from services.inference.config import InferenceSettings
from services.inference.sglang.flags import TAKEN, FlagsRefused, child_environment, launch, overlap_lag, refusals
from shared.model.config import ModelConfig

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK = {
    **DENSE,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
}

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}


def model(kind: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**kind, **changes})


def arguments(kind: dict[str, Any], **settings: Any) -> list[str]:
    composed = launch(
        InferenceSettings(**settings),
        model(kind),
        folder="/versions/7",
        port=30000,
        serial=7,
        context=4096,
        queue_limit=64,
    )
    return list(composed.arguments)


def value(found: list[str], name: str) -> str:
    assert found.count(name) == 1, f"{name} in {found}"
    return found[found.index(name) + 1]


def test_what_always_holds_is_in_every_command():
    for kind in (DENSE, MOE, DEEPSEEK):
        found = arguments(kind, sglang_python="/env/bin/python")
        assert found[:3] == ["/env/bin/python", "-m", "sglang.launch_server"]
        assert value(found, "--model-path") == "/versions/7"
        assert value(found, "--weight-version") == "7"
        assert value(found, "--host") == "127.0.0.1"  # nobody but this service talks to it
        assert value(found, "--port") == "30000"
        assert value(found, "--sampling-defaults") == "openai"
        assert value(found, "--max-queued-requests") == "64"
        assert "--skip-tokenizer-init" in found
        assert "--enable-metrics" in found
        assert "--trust-remote-code" not in found


def test_sglang_gets_the_positions_more_that_it_keeps_free():
    assert int(value(arguments(MOE), "--context-length")) == 4096 + 7


def test_routed_experts_are_asked_for_where_the_model_has_experts_alone():
    assert "--enable-return-routed-experts" in arguments(MOE)
    assert "--enable-return-routed-experts" not in arguments(DENSE)
    assert "--disable-shared-experts-fusion" in arguments(DEEPSEEK)
    assert "--disable-shared-experts-fusion" not in arguments(MOE)


def test_speculation_is_a_chain_over_the_checkpoints_own_mtp_layer():
    found = arguments(DEEPSEEK, sglang_draft_steps=3)
    assert value(found, "--speculative-algorithm") == "NEXTN"
    assert value(found, "--speculative-draft-model-path") == "/versions/7"  # so that drafts follow every version
    assert [value(found, f"--speculative-{n}") for n in ("num-steps", "eagle-topk", "num-draft-tokens")] == list("314")
    assert not any("speculative" in word for word in arguments(DEEPSEEK))


def test_fp8_and_its_kernels():
    found = arguments(
        MOE, sglang_quantization="fp8", sglang_fp8_gemm="deep_gemm", sglang_moe_runner="deep_gemm", sglang_tp=2
    )
    assert value(found, "--quantization") == "fp8"
    assert value(found, "--fp8-gemm-backend") == "deep_gemm"
    assert value(found, "--moe-runner-backend") == "deep_gemm"
    assert value(found, "--tp-size") == "2"
    assert "--quantization" not in arguments(MOE)


def test_experts_never_run_on_kernels_that_lay_weights_out_anew():
    assert value(arguments(MOE), "--moe-runner-backend") == "triton"  # SGLang's own choice may be one of those


def test_parallelism_memory_and_determinism():
    found = arguments(
        MOE,
        sglang_tp=4,
        sglang_ep=2,
        sglang_dp=2,
        sglang_memory=0.8,
        sglang_running=64,
        sglang_tokens=100000,
        sglang_chunk=4096,
        sglang_deterministic=True,
        sglang_attention="fa3",
        sglang_more="--log-level debug",
    )
    assert [value(found, n) for n in ("--tp-size", "--ep-size", "--dp-size")] == ["4", "2", "2"]
    assert value(found, "--mem-fraction-static") == "0.8"
    assert value(found, "--max-running-requests") == "64"
    assert value(found, "--max-total-tokens") == "100000"
    assert value(found, "--chunked-prefill-size") == "4096"
    assert value(found, "--attention-backend") == "fa3"
    assert "--enable-deterministic-inference" in found
    assert found[-2:] == ["--log-level", "debug"]


def test_on_the_cpu_everything_that_needs_a_device_is_off():
    composed = launch(
        InferenceSettings(sglang_device="cpu", sglang_dtype="float32", sglang_draft_steps=2),
        model(DEEPSEEK, rope_parameters=YARN),
        folder="f",
        port=1,
        serial=0,
        context=512,
        queue_limit=8,
    )
    found = list(composed.arguments)
    assert value(found, "--attention-backend") == "torch_native"
    assert value(found, "--speculative-draft-attention-backend") == "intel_amx"
    assert "--disable-overlap-schedule" in found
    assert composed.variables["SGLANG_USE_CPU_ENGINE"] == "1"


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (MOE, {"sglang_tp": 3}, ["sglang_tp", "3", "divisor", "16 attention heads"]),
        (MOE, {"sglang_tp": 4, "sglang_ep": 3}, ["sglang_ep", "3", "divisor of sglang_tp 4"]),
        (DENSE, {"sglang_ep": 2}, ["sglang_ep", "2", "1", "no experts"]),
        (DENSE, {"sglang_draft_steps": 2}, ["sglang_draft_steps", "2", "0", "qwen3 model"]),
        (
            {**MOE, "num_nextn_predict_layers": 0},
            {"sglang_draft_steps": 2},
            ["sglang_draft_steps", "0 MTP layers", "exactly 1"],
        ),
        (
            MOE,
            {"sglang_draft_steps": 2, "sglang_running": 1024, "sglang_chunk": 2048},
            ["sglang_running", "1024", "at most 682"],
        ),
        (MOE, {"sglang_fp8_gemm": "triton"}, ["sglang_fp8_gemm", "triton", "sglang_quantization 'fp8'"]),
        (MOE, {"sglang_moe_runner": "deep_gemm"}, ["sglang_moe_runner", "sglang_quantization 'fp8'"]),
        (DENSE, {"sglang_moe_runner": "triton"}, ["sglang_moe_runner", "no experts"]),
        (
            MOE,
            {"sglang_quantization": "fp8", "sglang_tp": 4},
            ["sglang_quantization", "fp8", "moe_intermediate_size", "multiple of 128", "192"],
        ),
        (MOE, {"sglang_deterministic": True, "sglang_attention": "flashinfer"}, ["sglang_attention", "flashinfer"]),
        (MOE, {"sglang_attention": "torch_native"}, ["sglang_attention", "sglang_device 'cpu'"]),
        (MOE, {"sglang_dtype": "float32"}, ["sglang_dtype", "float32", "triton"]),
        (MOE, {"sglang_device": "cpu"}, ["sglang_dtype", "bfloat16", "float32"]),
        (
            MOE,
            {"sglang_device": "cpu", "sglang_dtype": "float32", "sglang_tp": 2},
            ["sglang_tp", "2", "1 with sglang_device 'cpu'"],
        ),
        (DEEPSEEK, {"sglang_device": "cpu", "sglang_dtype": "float32"}, ["sglang_device", "'cpu'", "'cuda'", "YaRN"]),
        (MOE, {"sglang_more": "--dtype=half"}, ["sglang_more", "--dtype", "use sglang_dtype"]),
        (MOE, {"sglang_more": "--log-level 'debug"}, ["sglang_more", "quotation"]),
    ],
)
def test_settings_that_cannot_go_together_are_refused_by_name_value_and_what_is_allowed(kind, settings, said):
    with pytest.raises(FlagsRefused) as refused:
        arguments(kind, **settings)
    assert any(all(word in reason for word in said) for reason in refused.value.reasons), refused.value.reasons


def test_every_argument_that_is_composed_is_refused_as_a_further_one():
    composed: set[str] = set()
    for kind in (DENSE, MOE, DEEPSEEK):
        drafts = {} if kind is DENSE else {"sglang_draft_steps": 1}
        found = arguments(
            kind,
            sglang_tp=2,
            sglang_dp=2,
            sglang_memory=0.5,
            sglang_running=8,
            sglang_tokens=9,
            sglang_chunk=99,
            sglang_deterministic=True,
            sglang_attention="fa3",
            **drafts,
        )
        composed |= {word for word in found if word.startswith("--")}
    harmless = {
        "--skip-tokenizer-init",
        "--enable-metrics",
        "--log-level-http",
        "--enable-return-routed-experts",
        "--disable-shared-experts-fusion",
        "--enable-fp32-lm-head",
    }
    assert composed - harmless <= TAKEN.keys()
    assert not list(refusals(InferenceSettings(sglang_more="--log-level debug"), model(MOE)))


def test_a_step_in_hand_counts_as_many_tokens_as_it_may_sample():
    assert overlap_lag(InferenceSettings()) == 1
    assert overlap_lag(InferenceSettings(sglang_draft_steps=2)) == 3
    assert overlap_lag(InferenceSettings(sglang_more="--disable-overlap-schedule")) == 0
    assert overlap_lag(InferenceSettings(sglang_device="cpu", sglang_dtype="float32")) == 0


def test_the_child_inherits_nothing_that_changes_its_answers_and_none_of_our_secrets():
    inherited = {
        "PATH": "/bin",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "ETUDE_S3_SECRET_KEY": "x",
        "PYTHONPATH": ".",
        "http_proxy": "http://proxy:3128",
        "HTTPS_PROXY": "http://proxy:3128",
        "HF_HUB_OFFLINE": "0",
    }
    assert child_environment(inherited, {"HF_HUB_OFFLINE": "1"}) == {"PATH": "/bin", "HF_HUB_OFFLINE": "1"}


def test_the_command_line_prints_the_command_and_refuses_by_name(tmp_path):
    def shown(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETUDE_")}
        return subprocess.run(
            [sys.executable, "-m", "etude.cli", "inference", "flags", "etude/data/base"],
            env={**environment, "ETUDE_STATE": str(tmp_path), **variables},
            capture_output=True,
            text=True,
        )

    good = shown(ETUDE_SGLANG_DRAFT_STEPS="2", ETUDE_SGLANG_PORT="30001")
    assert good.returncode == 0, good.stderr
    assert "python -m sglang.launch_server --model-path" in good.stdout
    assert "--port 30001" in good.stdout
    assert f"{tmp_path}/sglang/NAME/1/0" in good.stdout
    bad = shown(ETUDE_SGLANG_EP="2", ETUDE_SGLANG_TP="3")
    assert bad.returncode == 2
    assert "setting sglang_tp: found 3" in bad.stderr
    assert "setting sglang_ep: found 2" in bad.stderr
    assert not bad.stdout

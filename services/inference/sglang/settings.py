"""Settings of the SGLang engine. They take effect with ETUDE_ENGINE=sglang; `etude inference flags` shows what becomes of
them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

# Only kernels that keep weights as they were loaded: others shuffle or swap them, and what serves could not be checked.
Fp8Gemm = Literal["auto", "deep_gemm", "flashinfer_deepgemm", "cutlass", "triton"]
MoeRunner = Literal["auto", "triton", "deep_gemm"]
Attention = Literal[
    "auto", "fa3", "fa4", "flashinfer", "flashmla", "cutedsl_mla", "trtllm_mla", "trtllm_mha", "triton", "torch_native"
]


class SglangSettings(BaseModel):
    sglang_url: str = Field(
        "",
        pattern=r"^(https?://.+[^/])?$",
        description="Use the SGLang server that answers there; empty: start one as a child process.",
        json_schema_extra={"allowed": "http(s)://HOST:PORT without a slash at its end"},
    )
    sglang_python: str = Field(
        "", description="Interpreter of the environment that SGLang is installed in; empty: that of this service."
    )
    sglang_port: int = Field(0, ge=0, le=65535, description="Port of the child on 127.0.0.1; 0: a free one.")
    sglang_weights: Path | None = Field(
        None,
        description="Folder that versions are rebuilt in for SGLang to load (twice the model's size); below /dev/shm a "
        "pause reads host memory alone. Empty: below the state directory.",
    )
    sglang_device: Literal["cuda", "cpu"] = Field("cuda", description="cpu is for tests with tiny models.")
    sglang_dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="What weights are loaded as.")
    sglang_tp: int = Field(1, ge=1, description="Tensor parallelism: devices that share the model.")
    sglang_ep: int = Field(1, ge=1, description="Expert parallelism within them.")
    sglang_dp: int = Field(1, ge=1, description="Whole copies of the model behind one URL.")
    sglang_memory: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of device memory for weights and cache; 0: SGLang's choice."
    )
    sglang_running: int = Field(0, ge=0, description="Requests computed at a time; 0: SGLang's choice.")
    sglang_tokens: int = Field(0, ge=0, description="Positions of the cache, all sessions together; 0: what fits.")
    sglang_chunk: int = Field(0, ge=0, description="Prompt tokens per step; 0: SGLang's choice.")
    sglang_attention: Attention = Field("auto", description="Attention kernels; auto: SGLang's choice.")
    sglang_quantization: Literal["none", "fp8"] = Field(
        "none", description="fp8: matrices in blocks of 128 x 128, made from the published bf16 by the weight agent."
    )
    sglang_fp8_gemm: Fp8Gemm = Field("auto", description="Kernels of the FP8 matrices; auto: SGLang's choice.")
    sglang_moe_runner: MoeRunner = Field("auto", description="Kernels of the experts; auto: triton.")
    sglang_deterministic: bool = Field(
        False, description="Kernels whose results do not depend on the batch; a request's seed counts only then."
    )
    sglang_draft_steps: int = Field(
        0, ge=0, le=8, description="Tokens drafted per step with the checkpoint's MTP layer; 0: no speculation."
    )
    sglang_start_s: float = Field(
        1800.0, gt=0, description="How long the server may take until it answers; then it is started again."
    )
    sglang_update_s: float = Field(600.0, gt=0, description="How long loading or checking a version may take.")
    sglang_more: str = Field(
        "", description="Further arguments of `sglang.launch_server`, as on a shell; not those that are set already."
    )

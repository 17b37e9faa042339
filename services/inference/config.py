"""Settings of the inference service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from services.inference.sglang.settings import SglangSettings
from shared.settings import ServiceSettings


class InferenceSettings(SglangSettings, ServiceSettings):
    engine: Literal["embedded", "sglang"] = Field(
        "embedded", description="embedded runs everywhere; sglang is a server of its own on GPUs (settings SGLANG_…)."
    )
    run: str = Field(
        "", description="Serve this run's policy; empty: that of the last run that was started without --beside."
    )
    pool: Literal["rollout", "evaluation", "serving"] = Field(
        "rollout",
        description="rollout follows every version; evaluation serves the one that an evaluation is of, or that it is pinned to; "
        "serving the one that was promoted last (`etude promote`), of whatever run, and takes part in no training.",
    )
    pinned: int = Field(
        -1,
        ge=-1,
        description="Serve exactly this version; -1: the newest (rollout), what is evaluated (evaluation; the base at first), "
        "what is promoted (serving).",
    )
    checkpoint: Path | None = Field(
        None, description="Serve this Hugging Face directory as version 0 and follow no run's versions."
    )
    cache_rows: int = Field(
        0,
        ge=0,
        description="Embedded engine: sessions whose keys and values are held; more than run at once. 0: 160, or as many as a "
        "quarter of the free memory holds.",
    )
    context: int = Field(0, ge=0, description="Positions per session; 0: what the checkpoint says.")
    prefill_tokens: int = Field(256, ge=16, description="Prompt tokens per step; bounds how long others are delayed.")
    draft_tokens: int = Field(
        0,
        ge=0,
        le=8,
        description="Embedded engine: tokens that the model's MTP layer may propose per session and step, at batch sizes where "
        "that is measured to pay; 0: never, for on a CPU it does not pay for the demo's model (docs/results.md).",
    )
    engine_device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Embedded engine: where it computes; auto: CUDA where there is one."
    )
    engine_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Embedded engine: what it computes in. CPUs are far slower in bfloat16."
    )
    engine_threads: int = Field(
        1,
        ge=1,
        le=256,
        description="Embedded engine on a CPU: threads of a product; small models are fastest with one.",
    )
    fp8: bool | Literal["mxfp8", "nvfp4"] = Field(
        False,
        description="Embedded engine: round as an engine in FP8 does (true), or in MXFP8 or NVFP4, in float32 arithmetic; slower, "
        "to see what that does to a policy. SGLang: sglang_quantization.",
    )
    queue_limit: int = Field(1024, ge=1, description="Requests that may wait; beyond it the answer is 503.")
    drain_s: float = Field(10.0, ge=0, description="After SIGTERM: how long running requests may still finish.")
    flush_on_swap: bool = Field(
        False,
        description="SGLang: a swap empties the cache, and running sessions compute theirs again with the new version (their "
        "experts' routing too); false: it is kept.",
    )

    @model_validator(mode="after")
    def _fp8_is_of_the_embedded_engine(self) -> InferenceSettings:
        if self.fp8 and self.engine == "sglang":
            raise ValueError(
                f"fp8: found {str(self.fp8).lower()}; allowed: false with engine 'sglang', whose FP8 is sglang_quantization"
            )
        if self.fp8 and self.engine_dtype != "float32":
            raise ValueError(
                f"engine_dtype: found {self.engine_dtype!r}; allowed: 'float32' with fp8, as the trainer rounds"
            )
        return self

    @model_validator(mode="after")
    def _only_sglang_flushes(self) -> InferenceSettings:
        if self.flush_on_swap and self.engine != "sglang":
            raise ValueError(
                f"flush_on_swap: found true; allowed: false with engine {self.engine!r}, whose sessions keep what they computed "
                "over a swap; true with engine 'sglang'"
            )
        return self

    @property
    def sglang_folder(self) -> Path:
        """Where versions are rebuilt for SGLang."""
        return self.sglang_weights or self.state.resolve() / "sglang"

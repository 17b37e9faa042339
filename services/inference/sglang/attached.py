"""Whether a server that we did not start is one that we would have. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.inference.sglang.flags import HEADROOM
from services.inference.sglang.settings import SglangSettings
from shared.model.config import ModelConfig


def objections(info: dict[str, Any], s: SglangSettings, model: ModelConfig, context: int) -> Iterator[str]:
    """One sentence for each argument of the server (`/server_info`) that changes what is answered or how weights lie."""
    wanted: dict[str, Any] = {
        "skip_tokenizer_init": True,  # else the tokenizer's own tokens end generations
        "tp_size": s.sglang_tp,
        "ep_size": s.sglang_ep,
        "dp_size": s.sglang_dp,
        "pp_size": 1,
        "dtype": s.sglang_dtype,
        "quantization": None if s.sglang_quantization == "none" else s.sglang_quantization,
        "enable_deterministic_inference": s.sglang_deterministic,
        "speculative_num_steps": s.sglang_draft_steps or None,
    }
    if model.moe:
        wanted["enable_return_routed_experts"] = True
        if model.moe.n_shared_experts:
            wanted["disable_shared_experts_fusion"] = True
    for name, value in wanted.items():
        if name in info and info[name] != value:
            yield f"--{name.replace('_', '-')}: found {info[name]!r}; allowed: {value!r}"
    found = info.get("context_length")
    if isinstance(found, int) and found < context + HEADROOM:
        yield f"--context-length: found {found}; allowed: {context + HEADROOM} and more"

"""Settings of the trainer. What a run learns with is in its RunConfig; here is how this machine trains it."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field

from shared.settings import ServiceSettings

Arithmetic = Literal["float32", "bfloat16"]


def arithmetic_of(wanted: Literal["auto"] | Arithmetic, device: str) -> Arithmetic:
    """Return what `auto` stands for on the device."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device.startswith("cuda") else "float32"


class TrainerSettings(ServiceSettings):
    trainer_run: str = Field(
        "", description="Train only this run; empty: the last one that was started without --beside."
    )
    trainer_device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is one.")
    trainer_threads: int = Field(
        1, ge=1, description="Threads of torch on the CPU; the engine beside it needs its own core."
    )
    trainer_zero_stage: int = Field(
        0, ge=0, le=2, description="DeepSpeed ZeRO stage: 0, 1 (ranks share the optimiser's state), 2 (gradients too)."
    )
    trainer_context_ranks: int = Field(
        1, ge=1, description="Ranks that share a sequence, each a part of its tokens. It divides the number of ranks."
    )
    trainer_expert_ranks: int = Field(
        1,
        ge=1,
        description="Ranks that divide the experts of a model: each holds a part of every layer's. It divides the number of ranks "
        "and of experts.",
    )
    trainer_recompute: bool = Field(
        False,
        description="Activation checkpointing: a layer keeps its input alone and computes the rest again in the backward. For long "
        "sequences: a third more arithmetic (`etude plan train` says how much memory it saves).",
    )
    trainer_arithmetic: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type of forward and backward. Weights are kept and gradients summed in float32. auto: bfloat16 on CUDA, "
        "float32 on the CPU.",
    )
    trainer_mtp_stride: int = Field(
        4,
        ge=1,
        description="The MTP layer learns from every n-th unit of a step: it follows the policy at 1/n of the cost.",
    )
    trainer_fetches: int = Field(4, ge=1, description="Groups that are fetched from the object store at a time.")

    @property
    def arithmetic(self) -> Arithmetic:
        return arithmetic_of(self.trainer_arithmetic, self.device)

    @property
    def device(self) -> str:
        """cpu or, for a rank of several on one machine, its own cuda:N."""
        import torch

        if self.trainer_device == "cpu" or (self.trainer_device == "auto" and not torch.cuda.is_available()):
            return "cpu"
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"

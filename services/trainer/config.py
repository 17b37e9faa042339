"""Settings of the trainer. What a run learns with is in its RunConfig; here is how this machine trains it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.settings import ServiceSettings


class TrainerSettings(ServiceSettings):
    trainer_run: str = Field("", description="Train only this run; empty: whichever is started.")
    trainer_device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is one.")
    trainer_threads: int = Field(
        1, ge=1, description="Threads of torch on the CPU; the engine beside it needs its own core."
    )
    trainer_zero_stage: int = Field(
        0, ge=0, le=1, description="DeepSpeed ZeRO stage: 0, or 1 (optimiser state sharded)."
    )
    trainer_mtp_stride: int = Field(
        4,
        ge=1,
        description="The MTP layer learns from every n-th unit of a step: it follows the policy at 1/n of the cost.",
    )
    trainer_fetches: int = Field(4, ge=1, description="Groups that are fetched from the object store at a time.")

    @property
    def device(self) -> str:
        if self.trainer_device != "auto":
            return self.trainer_device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

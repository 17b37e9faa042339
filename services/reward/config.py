"""Settings of the reward service and of its graders."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.settings import ServiceSettings


class RewardSettings(ServiceSettings):
    reward_in_flight: int = Field(
        256, ge=1, le=4096, description="Finished attempts taken before their scores are out."
    )
    reward_batch: int = Field(32, ge=1, le=512, description="Attempts per grading job, at most.")
    # A job costs about 8 ms of processor time, sent and taken, whether it holds one attempt or eight.
    reward_linger_s: float = Field(0.3, ge=0, le=5, description="How long a job waits for more attempts, in seconds.")
    reward_patience_s: float = Field(
        30.0, gt=0, description="A job without result for so long is given again, in seconds."
    )
    reward_tries: int = Field(
        4, ge=1, le=20, description="Infrastructure errors after which an attempt counts as failed."
    )


class GraderSettings(ServiceSettings):
    sandbox: Literal["bubblewrap", "process"] = Field(
        "bubblewrap", description="Where candidate code runs; a bare process only for code that you trust."
    )
    grader_sandboxes: int = Field(2, ge=1, le=256, description="Attempts graded at a time by this worker.")

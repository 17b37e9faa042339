"""Settings of the reward service and of its graders."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

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
    sandbox: Literal["bubblewrap", "docker", "kubernetes", "process"] = Field(
        "bubblewrap",
        description="Where candidate code runs; docker, kubernetes: attempts at repositories alone; process: functions, "
        "only for code that you trust.",
    )
    grader_sandboxes: int = Field(2, ge=1, le=256, description="Attempts graded at a time by this worker.")
    grader_queues: Literal["both", "short", "long"] = Field(
        "both",
        description="Gradings that this worker takes: long ones are those of repositories. `both` takes one of each at a time.",
    )
    judge_url: str = Field(
        "",
        pattern=r"^(https?://[^@\s]+)?$",
        json_schema_extra={"allowed": "http(s)://HOST:PORT/v1 without a name or password in it"},
        description="OpenAI-compatible endpoint of the rubric judge, such as `http://HOST:PORT/v1`; empty: none is asked "
        "(docs/reward.md).",
    )
    judge_model: str = Field("", description="Model that the judge's endpoint is asked for.")
    judge_key: SecretStr = Field(SecretStr(""), description="Key of the judge's endpoint; empty: none is sent.")
    judge_rubric: Path | None = Field(
        None, description="File with the judge's rubric; left out: one for the quality of a change."
    )
    judge_s: float = Field(
        10.0,
        ge=0.1,
        le=25,
        description="How long all attempts of a grading job together wait for the judge, in seconds.",
    )

    @field_validator("judge_rubric")
    @classmethod
    def _readable(cls, path: Path | None) -> Path | None:
        if path is not None:
            try:
                path.read_text()
            except (OSError, ValueError) as error:
                raise ValueError(f"cannot be read ({error}); allowed: a text file") from None
        return path

    @model_validator(mode="after")
    def _judge_has_a_model(self) -> GraderSettings:
        if self.judge_url and not self.judge_model:
            raise ValueError(
                f"judge_model (ETUDE_JUDGE_MODEL): found '' with judge_url (ETUDE_JUDGE_URL) {self.judge_url!r}; allowed: a model "
                "of that endpoint, or neither setting"
            )
        return self

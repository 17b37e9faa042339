"""Settings of the evaluator."""

from __future__ import annotations

from pydantic import Field

from shared.settings import ServiceSettings


class EvaluatorSettings(ServiceSettings):
    evaluator_in_flight: int = Field(128, ge=1, le=4096, description="Evaluation attempts asked for at a time.")
    evaluator_lease_s: float = Field(
        20.0, gt=0, description="An attempt whose worker sends no heartbeat for so long is asked for again, in seconds."
    )
    evaluator_lost_s: float = Field(
        300.0, gt=0, description="The same for one that waits for a worker or for its verdict, in seconds."
    )
    evaluator_asks: int = Field(
        4,
        ge=1,
        description="How often an attempt that infrastructure failed is asked for before it counts as an error.",
    )

"""Settings of the scheduler. What concerns one run (groups, staleness, budget) is in the run's own configuration."""

from __future__ import annotations

from pydantic import Field

from shared.settings import ServiceSettings


class SchedulerConfig(ServiceSettings):
    # A transaction costs about 3 ms of processor time and each message 0.3 ms: at ten attempts a second, 0.3 s halve the
    # whole. Longer, and workers would wait for requests.
    batch_linger_s: float = Field(0.3, gt=0, le=5, description="How long a batch of messages waits for more of them.")
    batch_size: int = Field(256, ge=1, le=4096, description="Messages per transaction, at most.")
    leadership_s: float = Field(
        6.0, ge=1, le=60, description="A scheduler that has not renewed its lease for so long is replaced."
    )
    attempt_limit_s: float = Field(
        900.0, gt=0, description="A running attempt is ended and submitted as it is after this."
    )
    grading_limit_s: float = Field(600.0, gt=0, description="A finished attempt without a verdict is lost after this.")
    # A listing is a request per thousand objects. Ten attempts a second leave some 20 000 objects within a quarter of an hour, and
    # by so much a quota is exceeded before it is noticed.
    sweep_every_s: float = Field(
        900.0,
        ge=0,
        description="How often each run's objects are counted, held against its quota, and what nobody needs of them is "
        "deleted; less often where that takes long. 0: never, and no quota is held.",
    )
    replica_patience_s: float = Field(
        60.0,
        gt=0,
        description="A replica that does not follow a published version for so long leaves the rotation; ten minutes later it is "
        "forgotten, until its next word.",
    )

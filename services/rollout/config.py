"""Settings of the rollout service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.settings import ServiceSettings


class RolloutSettings(ServiceSettings):
    sandbox: Literal["bubblewrap", "docker", "kubernetes", "process"] = Field(
        "bubblewrap",
        description="Where candidate code runs; docker, kubernetes: attempts at repositories alone; process: functions, "
        "only for code that you trust.",
    )
    rollout_sandboxes: int = Field(2, ge=1, le=256, description="Visible tests that run at a time.")
    rollout_concurrency: int = Field(48, ge=1, le=4096, description="Attempts in hand at a time.")
    rollout_generate_s: float = Field(
        300.0,
        gt=0,
        description="How long an engine that answers may make no step, unless it was paused, until its generations are asked for "
        "again, in seconds. One that works is waited for as long as it takes.",
    )
    rollout_pin_wait_s: float = Field(
        60.0,
        gt=0,
        description="How long an evaluation attempt waits for a replica that serves its version, in seconds.",
    )
    rollout_heartbeat_s: float = Field(2.0, gt=0, description="Seconds between heartbeats; well below the lease.")
    rollout_drain_s: float = Field(
        10.0,
        ge=0,
        description="After SIGTERM, how long attempts in hand may still take, in seconds. Then each that is left gets a "
        "checkpoint, which takes up to 12 seconds more.",
    )
    rollout_checkpoint_s: float = Field(
        5.0,
        ge=0,
        description="A turn that ends so many seconds after the attempt's last checkpoint is followed by one; 0: each turn is. "
        "With a dead worker an attempt loses at most so much, or the turn that it was in.",
    )

    @property
    def formats(self) -> Path:
        """Chat formats of runs' base checkpoints, as downloaded."""
        return self.state / "cache" / "formats"

"""Settings of the curator."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.settings import ServiceSettings


class CuratorConfig(ServiceSettings):
    packs: Path = Field(
        Path(".cache"), description="Directory whose packs were made and checked here; they pass without a second gate."
    )
    sandbox: Literal["bubblewrap", "docker", "kubernetes", "process"] = Field(
        "bubblewrap",
        description="Where the gate runs problems; docker, kubernetes: repositories alone; process: functions, "
        "only for code that you trust.",
    )
    curator_sandboxes: int = Field(2, ge=1, le=64, description="Sandboxes that the gate uses at a time.")
    curator_batch: int = Field(32, ge=1, le=1024, description="Problems that pass the gate together.")

    @property
    def formats(self) -> Path:
        """Chat formats of runs' base checkpoints, as downloaded."""
        return self.state / "cache" / "formats"

"""Settings of the console."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from shared.settings import ServiceSettings


class ConsoleSettings(ServiceSettings):
    console_attempts: int = Field(4000, ge=10, le=100_000, description="Attempts of a run that can be listed.")
    console_names: list[str] = Field(
        [],
        description="Host names, besides localhost and what `host` and `advertise` say, under which the pages may be asked for.",
    )

    @property
    def formats(self) -> Path:
        """Chat formats of runs' base checkpoints, as downloaded."""
        return self.state / "cache" / "formats"

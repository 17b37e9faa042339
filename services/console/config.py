"""Settings of the console."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from shared.settings import ServiceSettings


class ConsoleSettings(ServiceSettings):
    console_attempts: int = Field(4000, ge=10, le=100_000, description="Attempts of a run that can be listed.")
    console_names: list[str] = Field(
        [],
        json_schema_extra={"allowed": 'JSON, as ["console.example.org"]'},
        description="Host names, besides localhost and what `host` and `advertise` say, under which the pages may be asked for.",
    )
    console_token: SecretStr = Field(
        SecretStr(""),
        description="Token of the person named `operator`, who may act on runs; empty, with no other operator: made at the "
        "first start, in `console/token` below the state directory.",
    )
    console_operators: dict[str, SecretStr] = Field(
        {},
        json_schema_extra={"allowed": 'JSON, as {"NAME": "TOKEN"}'},
        description="Further people who may act on runs: name → token, as JSON. The name stands beside what they did.",
    )
    console_viewers: dict[str, SecretStr] = Field(
        {},
        json_schema_extra={"allowed": 'JSON, as {"NAME": "TOKEN"}'},
        description="People who may read only: name → token, as JSON.",
    )
    console_reading: Literal["auto", "open", "token"] = Field(
        "auto",
        description="Who may read: open: anybody who reaches the console; token: who signed in; auto: open where `host` is "
        "this machine alone (127.0.0.1, ::1, localhost).",
    )

    @property
    def formats(self) -> Path:
        """Chat formats of runs' base checkpoints, as downloaded."""
        return self.state / "cache" / "formats"

    @property
    def token_file(self) -> Path:
        return self.state / "console" / "token"

    @property
    def open_to_readers(self) -> bool:
        if self.console_reading != "auto":
            return self.console_reading == "open"
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

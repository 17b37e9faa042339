"""What `.servers/state.json` remembers: which process serves what, where. Read by `up` and by the tests."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from infra.servers import FOLDER
from shared.process import Identity, identity, lives


@dataclass(slots=True)
class Running:
    """One server. `identity` names its process for ever; pid 0: it was never started."""

    version: str
    ports: tuple[int, ...]
    secret: str
    pid: int = 0
    identity: Identity | None = None
    stop: int = 15
    settings: dict[str, str] | None = None

    @property
    def process(self) -> psutil.Process | None:
        """None unless it lives."""
        if not self.pid or self.identity is None or not lives(self.identity):
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid)
        return None


def read(folder: Path = FOLDER) -> dict[str, Running]:
    """By server name; empty when there never was one."""
    try:
        rows = json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return {}
    return {name: _row(dict(row)) for name, row in rows.items()}


def _row(row: dict[str, Any]) -> Running:
    """An older version wrote `started`, in seconds by a clock that can be set. Its servers may still run: they are taken
    over if the clock says what it said then, else they count as ended."""
    started = row.pop("started", None)
    known = msgspec.convert(row.pop("identity", None), Identity | None)
    if known is None and started:
        with contextlib.suppress(psutil.NoSuchProcess):
            known = identity(row["pid"]) if psutil.Process(row["pid"]).create_time() == started else None
    return Running(**{**row, "ports": tuple(row["ports"]), "identity": known})


def write(rows: dict[str, Running], folder: Path = FOLDER) -> None:
    """Whole or not at all; for this user's eyes only, because of the passwords."""
    temporary = folder / "state.json.tmp"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(
            {name: {**asdict(row), "identity": msgspec.to_builtins(row.identity)} for name, row in rows.items()},
            file,
            indent=1,
        )
    temporary.replace(folder / "state.json")


def settings(folder: Path = FOLDER) -> dict[str, str]:
    """The `ETUDE_…` variables of the servers that run now."""
    merged: dict[str, str] = {}
    for row in read(folder).values():
        if row.process:
            merged.update(row.settings or {})
    return merged

"""What `.servers/state.json` remembers: which process serves what, where. Read by `up` and by the tests."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from infra.servers import FOLDER


@dataclass(slots=True)
class Running:
    """One server. `pid` and `started` (seconds, the kernel's) together name a process for ever; pid 0: it was never started."""

    version: str
    ports: tuple[int, ...]
    secret: str
    pid: int = 0
    started: float = 0.0
    stop: int = 15
    settings: dict[str, str] | None = None

    @property
    def process(self) -> psutil.Process | None:
        """None unless it lives."""
        try:
            process = psutil.Process(self.pid) if self.pid else None
            if process and process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE:
                return process
        except psutil.NoSuchProcess:
            pass
        return None


def read(folder: Path = FOLDER) -> dict[str, Running]:
    """By server name; empty when there never was one."""
    try:
        rows = json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return {}
    return {name: Running(**{**row, "ports": tuple(row["ports"])}) for name, row in rows.items()}


def write(rows: dict[str, Running], folder: Path = FOLDER) -> None:
    """Whole or not at all; for this user's eyes only, because of the passwords."""
    temporary = folder / "state.json.tmp"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({name: asdict(row) for name, row in rows.items()}, file, indent=1)
    temporary.replace(folder / "state.json")


def settings(folder: Path = FOLDER) -> dict[str, str]:
    """The `ETUDE_…` variables of the servers that run now."""
    merged: dict[str, str] = {}
    for row in read(folder).values():
        if row.process:
            merged.update(row.settings or {})
    return merged

"""What a checkpoint's card says to whoever serves it."""

from __future__ import annotations

from pathlib import Path

import msgspec


def context_of(directory: Path) -> int:
    """`context` of etude.json, 0 where there is none."""
    try:
        return int(msgspec.json.decode((directory / "etude.json").read_bytes()).get("context", 0))
    except FileNotFoundError:
        return 0

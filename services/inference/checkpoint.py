"""What a checkpoint's card says to whoever serves it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.model.config import UnknownModel


def context_of(directory: Path) -> int:
    """`context` of etude.json, 0 where there is none. Raises UnknownModel."""
    card = directory / "etude.json"
    try:
        return int(msgspec.json.decode(card.read_bytes()).get("context", 0))
    except FileNotFoundError:
        return 0
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError) as error:
        raise UnknownModel(f"{card}: found no `context` that is a number ({error})") from None

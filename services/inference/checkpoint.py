"""What a checkpoint's card says to whoever serves it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.model.config import UnknownModel
from shared.renderers import card as cards


def context_of(directory: Path) -> int:
    """`context` of etude.json, 0 where there is none. Raises UnknownModel."""
    card = directory / "etude.json"
    try:
        return cards.context_of(msgspec.json.decode(card.read_bytes(), type=dict)) or 0
    except FileNotFoundError:
        return 0
    except (msgspec.DecodeError, cards.BadCard, OSError) as error:
        raise UnknownModel(str(error), card) from None
